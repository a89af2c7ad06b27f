"""Every recipe can be built, says how it is run, and fits itself: the 8B ones by shapes alone, without memory."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from configs import RECIPES
from configs.base import LogSettings, ModelSettings, Run
from models.features import FrameSettings
from models.qwen3_vl import abstract_model, num_params, qwen3_vl
from models.sharding import make_mesh, param_shardings
from train.abstract import Abstract, abstract_reference, abstract_rl_update, abstract_sft_update
from train.batch import BatchShape
from train.checkpoint import CheckpointSettings
from train.cli import parse

LARGE = [name for name, recipe in RECIPES.items() if recipe().model.size != "tiny"]


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.__module__.startswith("configs.")])  # not tests' own
def test_a_recipe_is_built_and_says_how_it_is_run(name):
    recipe = RECIPES[name]
    assert isinstance(recipe(), Run) and recipe().name == name == recipe.__name__
    text = inspect.getdoc(recipe) or ""
    assert re.search(rf"^Command: python -m train\.run --config={name}( |$)", text, re.M), text
    assert recipe() == recipe()


def test_an_unknown_recipe_is_answered_with_the_nearest_and_all(capsys):
    with pytest.raises(SystemExit) as stop:
        parse(["--config=paravt_tinny"], RECIPES)
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert "Did you mean paravt_tiny?" in message and all(name in message for name in RECIPES)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--rl.steps", "x"], ["rl.steps", "x"]), (["--rl.stepz", "3"], ["rl.stepz"]), (["--unreadable-share", "2"], ["unreadable_share: 2"])],
)
def test_a_wrong_field_or_value_is_named(arguments, words, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(["--config=paravt_tiny", *arguments], RECIPES)
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert all(word in message for word in words), message


TIGHT = BatchShape(groups=4, rows=1, prompt=17, visual=16, suffix=17)  # a sub-agent's 16 frames of one token, and 16 tokens of report


def shrunk(field: str) -> BatchShape:
    return dataclasses.replace(TIGHT, **{field: getattr(TIGHT, field) - 1})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("paravt_tiny", {"unreadable_share": 1.0}, r"unreadable_share: 1\.0; "),
        ("paravt_tiny", {"model": ModelSettings(size="8b")}, r"align: set for model\.size 8b"),
        ("paravt_tiny", {"align": None, "sft": RECIPES["sft_8b"]().sft}, r"sft: PackedSFTSettings with data = None; .*\(SFTSettings\)"),
        ("sft_8b", {"sft": RECIPES["sft_tiny"]().sft}, r"sft: SFTSettings with data = DataSettings"),
        ("sft_8b", {"data.row_tokens": 8193}, r"sft\.shape\.tokens: 8192; rows are packed to data\.row_tokens = 8193"),
        ("paravt_8b", {"start": "runs/sft_8b"}, r"start: runs/sft_8b with published data; .* --model\.path runs/sft_8b/model"),
        ("paravt_tiny", {"model": ModelSettings(path="x")}, r"align: set for model\.size tiny, model\.path 'x'"),
        ("paravt_8b", {"protocol.trajectory_tokens": 8256}, r"engine\.own: .*13312\); a rollout may have .* = 5120 \+ 8256 tokens"),
        ("paravt_8b", {"rl.shape": BatchShape(8, 8, 5120, 3136, suffix=4096)}, r"rl\.shape\.suffix: 4096; .*= 8192"),
        ("paravt_tiny", {"rl.frame_budgets": (65, 4)}, r"rl\.frame_budgets: \(65, 4\); .* rl\.shape\.visual = 64: raise"),
        ("paravt_tiny", {"rl.subagents": shrunk("visual")}, r"rl\.subagents\.visual: 15; .* protocol\.crop_frames = 16 frames.*: raise"),
        ("paravt_tiny", {"rl.subagents": shrunk("prompt")}, r"rl\.subagents\.prompt: 16; .* rl\.subagents\.visual = 16, .*: raise"),
        ("paravt_tiny", {"rl.subagents": shrunk("suffix")}, r"rl\.subagents\.suffix: 16; .* protocol\.summary_tokens = 16 .* at least 17"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(name, change, message):
    run = RECIPES[name]()
    for path, value in change.items():
        outer, _, inner = path.rpartition(".")
        change = {outer: dataclasses.replace(getattr(run, outer), **{inner: value})} if outer else {inner: value}
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(run, **change)


@pytest.mark.parametrize(
    ("settings", "field", "value"),
    [
        (FrameSettings, "frames.batch", 0),
        (FrameSettings, "frames.min_pixels", 0),
        (FrameSettings, "frames.max_pixels", 783),
        (FrameSettings, "frames.whole_frames", -1),
        (FrameSettings, "frames.cache_mib", -1),
        (LogSettings, "log.episodes", -1),
        (CheckpointSettings, "checkpoints.keep", 0),
        (CheckpointSettings, "checkpoints.best", "loss"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(settings, field, value):
    with pytest.raises(ValueError, match=rf"^{field}: {value!r}.*; .*give "):
        settings(**{field.partition(".")[2]: value})


def test_what_just_fits_is_taken():
    run = RECIPES["paravt_tiny"]()
    assert run.rl is not None and run.rl.shape.visual == 64 and (run.protocol.crop_frames, run.protocol.summary_tokens) == (16, 16)
    dataclasses.replace(run, rl=dataclasses.replace(run.rl, frame_budgets=(64,), subagents=TIGHT))


# --- shapes of the large recipes: traced, never allocated ---


def check_update(run: Run, update: Abstract) -> None:
    """One update of the recipe's model, optimiser and batch: every weight and moment comes back as it was."""
    state = update.arguments[0]
    after, metrics = jax.eval_shape(update.program.jitted, *update.arguments)
    shapes = [[(x.shape, x.dtype) for x in jax.tree.leaves(tree)] for tree in (state, after)]
    assert shapes[0] == shapes[1] and run.model.dtype == "bfloat16"
    assert metrics["loss"].shape == metrics["grad_norm"].shape == () and metrics["loss"].dtype == jnp.float32


@pytest.mark.parametrize("name", LARGE)
def test_the_model_lies_on_the_recipes_mesh(name):
    run = RECIPES[name]()
    config, mesh = qwen3_vl(run.model.size), run.mesh
    assert 8.5e9 < num_params(config) < 9e9
    devices = jax.sharding.AbstractMesh((mesh.data, mesh.fsdp, mesh.tensor), ("data", "fsdp", "tensor"))
    state = nnx.state(abstract_model(config, dtype=run.model.dtype).text)
    shardings = param_shardings(state, devices)
    share = sum(
        math.prod(sharding.shard_shape(weight.shape))
        for weight, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True)
    )
    assert share < 1.02 * sum(math.prod(w.shape) for w in jax.tree.leaves(state)) / (mesh.fsdp * mesh.tensor), "nearly all of it is cut"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LARGE if RECIPES[name]().rl])
def test_an_rl_step_of_a_large_recipe_fits_itself(name):
    run = RECIPES[name]()
    settings = run.rl
    assert settings is not None
    check_update(run, abstract_rl_update(run, make_mesh()))
    rows = jax.eval_shape((reference := abstract_reference(run, make_mesh())).program.jitted, *reference.arguments)
    assert rows.shape == (8 * 8, settings.shape.suffix), "seven groups in four parts are eight"
    # The widest overview of the largest frames has room in the batch and in the engine.
    frame = run.frames.max_pixels // (32 * 32)
    visual = max(settings.frame_budgets) * frame
    assert visual <= settings.shape.visual < settings.shape.prompt
    assert run.engine.own[-1] >= settings.shape.prompt + run.protocol.trajectory_tokens
    assert any(run.protocol.crop_frames * frame + run.protocol.summary_tokens < length for length in run.engine.own[:-1])
    assert settings.shape.prompt in run.engine.shared


@pytest.mark.parametrize("name", [name for name in LARGE if RECIPES[name]().sft])
def test_a_cold_start_step_of_a_large_recipe_fits_itself(name):
    run = RECIPES[name]()
    check_update(run, abstract_sft_update(run, make_mesh()))


@pytest.mark.parametrize("size", ["8b", "tiny"])
def test_the_anchor_of_the_recipes_is_the_papers(size):
    for name in ("paravt", "exploration_anchoring", "no_tool_reward", "no_penalty"):
        settings = RECIPES[f"{name}_{size}"]().rl
        assert settings is not None and settings.grpo.anchor == "likelihood"
