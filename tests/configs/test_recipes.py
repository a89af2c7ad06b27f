"""Every recipe can be built, states its command and has matching sizes; 8B by shapes only."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import math
import os
import pathlib
import re
import textwrap
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from configs import RECIPES
from models.model import abstract_model
from models.qwen3_vl.dialect import DIALECT
from models.sharding import make_mesh, param_shardings
from paravt_extras.fit import GIB, fit
from paravt_extras.plan import (
    PlannedModel,
    PlannedStep,
    reference_lowerings,
    rl_step,
    sft_step,
)
from paravt_extras.slices import Topology
from paravt_jax.data import tokenizer_file
from paravt_jax.method.protocol import Protocol, ProtocolSettings
from paravt_jax.world import videos as world
from paravt_jax.world.text import TextSettings
from paravt_jax.world.vocabulary import world_vocabulary
from rollout.ask import AskSettings
from rollout.engine.settings import crop_tokens, overview_tokens
from rollout.evaluation.settings import BenchmarkSettings
from tests.models.counts import num_params
from train.cli import parse
from train.export import Export
from train.settings import ModelSettings, Run, change

ROOT = pathlib.Path(__file__).parents[2]
# Without recipes that tests add.
OURS = [name for name, recipe in RECIPES.items() if recipe.__module__.startswith("configs.")]
LARGE = ["paravt_8b", "paravt_8b_released", "paravt_7b"]


@pytest.mark.parametrize("name", OURS)
def test_a_recipe_is_built_and_states_its_command(name):
    recipe = RECIPES[name]
    assert isinstance(recipe(), Run) and recipe().name == name == recipe.__name__
    text = inspect.getdoc(recipe) or ""
    assert re.search(rf"^Command: python -m train\.run --config={name}( |$)", text, re.M), text
    assert recipe() == recipe()


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("paravt_tiny", {"max_left_out": 1.5}, r"max_left_out: 1\.5; "),
        ("paravt_tiny", {"model": ModelSettings(path="x")}, r"align: .*model\.path 'x'"),
        ("paravt_8b", {"text": TextSettings()}, r"text: TextSettings.* world = None"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(name, fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(RECIPES[name](), **fields)


def test_weights_that_had_the_cold_start_replace_it():
    flags = ["--sft.steps", "0", "--model.path", "mwxely/ParaVT-8B-SFT"]
    run = parse(["--config=paravt_8b", *flags], RECIPES)
    assert run.sft is None and run.rl is not None
    with pytest.raises(ValueError, match="sft.steps: 0 for sft_8b"):
        change(RECIPES["sft_8b"](), "sft_8b", {"sft.steps": 0})
    with pytest.raises(ValueError, match="sft.steps: 0 for paravt_tiny, with model.path ''"):
        change(RECIPES["paravt_tiny"](), "paravt_tiny", {"sft.steps": 0})


# --- lengths: each is stated once ---

OVERRIDES = (
    ("--protocol.trajectory-tokens", "200"),
    ("--protocol.summary-tokens", "1024"),
    ("--protocol.crop-frames", "64"),
    ("--rl.frame-budgets", "2", "128"),
    ("--rl.grpo.group-size", "6"),
    ("--rl.microbatch-tokens", "64"),
    ("--evaluation.frames", "256"),
    ("--engine.slots", "10"),
)


@pytest.mark.parametrize("override", OVERRIDES, ids=" ".join)
def test_any_single_override_works_alone(override):
    run = parse(["--config=paravt_8b", *override], RECIPES)
    assert run.rl is not None and run != RECIPES["paravt_8b"]()
    engine, shape = run.engine_sizes, run.rl_shape
    frames, longest = max(run.rl.frame_budgets), shape.limits
    assert (shape.groups, shape.rollouts, longest.response) == (
        run.rl.prompts,
        run.rl.grpo.group_size,
        run.protocol.trajectory_tokens,
    )
    assert (
        longest.visual == frames * run.frame_tokens()
        and longest.prompt >= longest.visual + frames * run.label_tokens
    )
    assert engine.longest >= longest.prompt + longest.response
    assert engine.slots % shape.rollouts == 0
    # However small the bound on a micro-batch is, it has room for the longest rollout.
    (largest, *_) = shape.microbatches(run.rl.microbatch_tokens, devices=1, pieces=1)
    assert largest.tokens >= longest.prompt + longest.response


@pytest.mark.skipif(
    "PARAVT_TEST_ASSETS" not in os.environ, reason="needs the real tokenizer (PARAVT_TEST_ASSETS)"
)
def test_the_8b_recipes_bounds_hold_with_the_real_tokenizer():
    run = RECIPES["paravt_8b"]()
    rules = Protocol(
        tokenizer_file.load(pathlib.Path(os.environ["PARAVT_TEST_ASSETS"]) / "qwen3_vl", DIALECT),
        run.protocol,
    )
    longest = run.lengths(64)
    for last in (9.9, 99_999.9):
        overview = overview_tokens(rules, 64, run.frame_tokens(), last)
        assert longest.prompt - overview > 512, "there is room for a long question"
        assert crop_tokens(rules, run.frame_tokens(), last) <= longest.crop_prompt


def test_the_bounds_of_the_small_world_are_those_of_its_vocabulary():
    run = RECIPES["paravt_tiny"]()
    vocabulary = world_vocabulary(ProtocolSettings(), DIALECT)
    rules, longest = Protocol(vocabulary, run.protocol), run.lengths(64)
    assert (
        overview_tokens(rules, 64, 1, world.SECONDS) + 15
        <= longest.prompt
        < overview_tokens(rules, 64, 1, world.SECONDS) + 32
    )
    assert crop_tokens(rules, 1, world.SECONDS) <= longest.crop_prompt


# --- flags ---

ONE_LINE = re.compile(r"\S[^\n]{5,}\S")  # tyro prints a longer text with the source's line ends


def settings_of(value: object) -> Iterator[type]:
    """The dataclasses that a recipe is made of."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield type(value)
        for field in dataclasses.fields(value):
            yield from settings_of(getattr(value, field.name))


SETTINGS = sorted(
    {kind for recipe in RECIPES.values() for kind in settings_of(recipe())}
    | {AskSettings, BenchmarkSettings, Export},
    key=str,
)


def fields_with_a_line_of_help(kind: type) -> set[str]:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id
        for field, after in itertools.pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
        and ONE_LINE.fullmatch(str(after.value.value))
    }


@pytest.mark.parametrize("kind", SETTINGS, ids=lambda kind: kind.__name__)
def test_every_flag_has_a_line_of_help(kind):
    sections = {
        name
        for name, hint in get_type_hints(kind).items()
        if any(map(dataclasses.is_dataclass, (hint, *get_args(hint))))
    }
    assert {
        field.name for field in dataclasses.fields(kind)
    } - sections - fields_with_a_line_of_help(kind) == set()
    assert inspect.getdoc(kind), "the line over a section's flags"


def test_every_setting_is_read():
    """A field that is only checked, and read nowhere else, would be a flag without effect.

    Fields are told apart by name only: an unread one that shares its name with another is missed.
    """
    read: set[str] = set()
    for folder in ("paravt_jax", "paravt_extras", "models", "rollout", "train", "configs"):
        for file in (ROOT / folder).glob("**/*.py"):
            read |= attributes_outside_checks(ast.parse(file.read_text()))
    for kind in SETTINGS:
        unread = {field.name for field in dataclasses.fields(kind)} - read
        assert not unread, kind


def attributes_outside_checks(node: ast.AST) -> set[str]:
    if isinstance(node, ast.FunctionDef) and node.name == "__post_init__":
        return set()
    below = set[str]().union(*map(attributes_outside_checks, ast.iter_child_nodes(node)))
    return (
        below | {node.attr}
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
        else below
    )


# --- shapes of the large recipes: traced, never allocated ---


def shapes_of(tree: Any) -> list[tuple[tuple[int, ...], Any]]:
    return [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]


def results_of(lowering: Any) -> Any:
    program = lowering.func.__self__
    return jax.eval_shape(program.jitted, *program.first, *lowering.args, **lowering.keywords)


def check_update(step: PlannedStep) -> None:
    """Gradients are float32 and add up; the new state has every weight and moment as before."""
    add, *_, apply = step.lowerings
    weights, total, *_ = add.args
    after, metrics = results_of(add)
    assert total is None or shapes_of(after) == shapes_of(total), "gradients add up"
    assert shapes_of(after) == [(shape, jnp.dtype("float32")) for shape, _ in shapes_of(weights)]
    assert metrics["loss"].shape == () and metrics["loss"].dtype == jnp.float32
    state, _ = apply.args
    after, norm = results_of(apply)
    assert shapes_of(after) == shapes_of(state) and shapes_of(state.weights) == shapes_of(weights)
    assert norm.shape == ()


def slice_of(name: str) -> str:
    """A slice of 16 chips that the recipe fits."""
    return "v6e:4x4" if name.endswith("_released") else "v5e:4x4"


@pytest.mark.parametrize("name", LARGE)
def test_the_model_lies_on_the_recipes_mesh(name):
    run = fit(RECIPES[name](), Topology(slice_of(name)).available).run
    config, mesh = run.model.config(), run.mesh
    assert 8.2e9 < num_params(config) < 9e9
    devices = jax.sharding.AbstractMesh(
        (mesh.data, mesh.fsdp, mesh.tensor), ("data", "fsdp", "tensor")
    )
    state = nnx.state(abstract_model(config, dtype=run.model.dtype).text)
    shardings = param_shardings(state, devices)
    share = sum(
        math.prod(sharding.shard_shape(weight.shape))
        for weight, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True)
    )
    assert share < 1.02 * sum(math.prod(w.shape) for w in jax.tree.leaves(state)) / (
        mesh.fsdp * mesh.tensor
    ), "nearly all weights are sharded"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LARGE if RECIPES[name]().rl])
def test_an_rl_step_of_a_large_recipe_fits_itself(name):
    run = fit(RECIPES[name](), Topology(slice_of(name)).available).run
    settings = run.rl
    assert settings is not None
    planned = PlannedModel.of(run, make_mesh())
    step = rl_step(planned)
    check_update(step)
    rows = results_of(next(reference_lowerings(planned, step)))
    shape, engine = run.rl_shape, run.engine_sizes
    assert rows.shape == (7 * 8, shape.suffix), "log-probs by rollout, without padding rows"
    longest = shape.limits
    # The widest overview of the largest frames has room in the batch and in the engine.
    frame = run.frame_tokens()
    visual = max(settings.frame_budgets) * frame
    assert visual <= longest.visual < longest.prompt
    assert engine.longest >= longest.prompt + run.protocol.trajectory_tokens
    assert engine.longest >= run.protocol.crop_frames * frame + run.protocol.summary_tokens


@pytest.mark.parametrize("name", [name for name in LARGE if RECIPES[name]().sft])
def test_a_cold_start_step_of_a_large_recipe_fits_itself(name):
    run = fit(RECIPES[name](), Topology(slice_of(name)).available).run
    assert run.model.dtype == "bfloat16"
    check_update(sft_step(PlannedModel.of(run, make_mesh())))


@pytest.mark.parametrize(
    ("size", "devices", "most"),
    [("2b", "v5e:1x1", 15.0), ("4b", "v6e:1x1", 30.0), ("8b", "v5e:2x2", 15.0)],
)
@pytest.mark.parametrize("phases", ["all", "cold start"])
def test_a_recipe_with_adapters_is_estimated_to_fit_its_chip(phases, size, devices, most):
    run = RECIPES[f"paravt_{size}_lora"]()
    if phases == "cold start":
        run = change(run, run.name, {"evaluation.questions": 0, "rl": None})
    fitted = fit(run, Topology(devices).available)
    parts = {"cold start"} | ({"PARA-GRPO", "rollouts"} if phases == "all" else set())
    assert parts <= fitted.needs.keys()
    assert max(fitted.needs.values()) <= most * GIB, fitted.needs
