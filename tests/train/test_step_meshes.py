"""The loss and the updated weights of a step do not depend on mesh, micro-batches or remat.

The test runs this file as a program with eight fake devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from models.config import ModelConfig, TextConfig
from models.lora import LoRASettings, add_adapters, split
from models.qwen3_vl.sizes import qwen3_vl, tiny
from models.qwen3_vl.vision import Qwen3VLVisionTower
from models.sharding import make_mesh, param_shardings, row_devices
from models.text import TextDecoder
from models.trained import Skeleton, TrainedVision, trained_state
from paravt_jax.method.grpo.advantages import compute_advantages
from paravt_jax.method.grpo.batch import GRPOBatch
from paravt_jax.method.grpo.loss import batch_totals
from paravt_jax.method.grpo.settings import GRPOSettings
from paravt_jax.method.protocol import Lengths
from paravt_jax.method.records import Author, Frame, Segment, Trajectory
from paravt_jax.method.rewards import RewardSettings
from paravt_jax.method.structure import Kind, Structure
from tests.processes import on_eight_devices
from train.learn import optimizer as optimizers
from train.learn import update as updates
from train.learn.batch import Group, build
from train.learn.conversation_rows import Rendered, RowsShape, lay_out_rows
from train.learn.optimizer import OptimizerSettings, make_optimizer
from train.learn.packing import StepShape, VisualRoom, pack
from train.learn.placement import (
    Bank,
    BankPlacer,
    bank_sharding,
    put,
    replicas,
    row_pieces,
    sums_sharding,
)
from train.learn.rl import rl_loss
from train.learn.rl_batch import RLBatch
from train.learn.rl_settings import RLSettings
from train.learn.sft import SFTSettings, make_sft_updater
from train.learn.update import Updater, init_state, make_vision_programs, to_floats

# Weights move by up to LEARNING_RATE in the step, and may differ by BOUND.
LEARNING_RATE = 1e-2
BOUND = 1e-6

# (data, fsdp, tensor), upper bound on the tokens of a micro-batch, remat. Packed rows lie in up to
# eight pieces.
RL = (
    ((8, 1, 1), 4096, "none"),
    ((1, 8, 1), 1024, "full"),
    ((2, 4, 1), 2048, "attention"),
    ((2, 2, 2), 1, "dots"),
    ((1, 2, 4), 512, "none"),
    ((1, 1, 8), 256, "full"),
    ((1, 2, 2), 1, "offload"),
)
SFT = (((8, 1, 1), 1, "full"), ((2, 4, 1), 2, "none"), ((2, 2, 2), 1, "none"))
# Twelve heads and six kv heads, or 16 and two: `tensor` has to copy kv heads.
RL_FEW_KV_HEADS = {
    (12, 6): (((1, 2, 4), 1024, "full"),),
    (16, 2): (((1, 1, 8), 512, "dots"), ((2, 1, 4), 1024, "attention")),
}
SFT_FEW_KV_HEADS = (((1, 2, 4), 2, "full"), ((2, 1, 4), 1, "none"))
# The same for adapters.
RL_LORA = (((1, 8, 1), 1024, "dots"), ((1, 2, 4), 512, "full"))
SFT_LORA = (((2, 2, 2), 1, "attention"), ((1, 1, 8), 2, "none"))

TEXT = TextConfig(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=8,
    mrope_section=(2, 1, 1),
    rope_theta=10_000.0,
    tie_word_embeddings=False,
)
IMAGE = 95
# Six prompts of four rollouts.
SHAPE = StepShape(
    groups=6,
    rollouts=4,
    limits=Lengths(prompt=22, visual=4, response=20, crop_prompt=12, report=9),
)
ROWS = RowsShape(rows=5, tokens=24, visual=5)
# A large eps: the rounding of a small gradient must not decide the sign of an update.
ADAM = OptimizerSettings(learning_rate=LEARNING_RATE)


def group(rng: np.random.Generator, rollout: int, members: int, slot: int) -> Group:
    """Random trajectories behind a random prompt with one image of 2 x 2 tokens."""
    most, response, grid = SHAPE.limits.prompt, SHAPE.limits.response, (4, 4)
    length = int(rng.integers(most // 2, most + 1))
    ids = rng.integers(0, IMAGE, length).astype(np.int32)
    ids[1 : 1 + grid[0] * grid[1] // 4] = IMAGE
    trajectories = []
    for _ in range(members):
        count = int(rng.integers(response // 2, response))
        drawn = rng.integers(0, IMAGE, count).astype(np.int32)
        logprobs = (-4.5 + 0.1 * rng.normal(size=count)).astype(np.float32)
        half = count // 2
        prompt = Segment(ids, Author.PROMPT)
        first = Segment(drawn[:half], Author.MODEL, logprobs[:half])
        tool = Segment(drawn[half : half + 2], Author.TOOL)
        last = Segment(drawn[half + 2 :], Author.MODEL, logprobs[half + 2 :])
        trajectories.append(Trajectory((prompt, first, tool, last)))
    return Group(tuple(trajectories), rollout, (grid,), slot)


def groups() -> list[Group]:
    rng = np.random.default_rng(6)
    return [group(rng, 4 * n, 4, 4 * n) for n in range(6)]


def config_of(text: TextConfig) -> ModelConfig:
    """Sizes of a model with this decoder."""
    published = qwen3_vl("2b")
    vision = dataclasses.replace(published.vision, out_hidden_size=text.hidden_size)
    return dataclasses.replace(published, text=text, vision=vision, image_token_id=IMAGE)


def rl_batch(settings: RLSettings) -> GRPOBatch:
    """What PARA-GRPO reads about the rollouts, with random rewards and tags."""
    rng = np.random.default_rng(1)
    size = (SHAPE.all_rollouts, SHAPE.suffix)
    mask = np.zeros(size, bool)
    behaviour = np.zeros(size, np.float32)
    for found in groups():
        for n, trajectory in enumerate(found.trajectories):
            first = len(found.prompt)
            length = len(trajectory.ids) - first
            mask[found.rollout + n, :length] = trajectory.authors[first:] == Author.MODEL
            behaviour[found.rollout + n, :length] = trajectory.logprobs[first:]
    rollouts = (SHAPE.groups, SHAPE.rollouts)
    tags = (SHAPE.all_rollouts, 6)
    tokens = rng.permuted(np.tile(np.arange(SHAPE.suffix), (SHAPE.all_rollouts, 1)), axis=1)
    structure = Structure(
        np.sort(tokens[:, :6]).astype(np.int32),
        rng.integers(0, len(Kind), tags).astype(np.int8),
        rng.random(tags) < 0.8,
    )
    fields: dict[str, Any] = {
        "mask": mask,
        "behaviour": behaviour,
        "reference": behaviour + 0.1 * rng.normal(size=size).astype(np.float32) * mask,
        "rewards": rng.random(rollouts).astype(np.float32) * 2.5,
        "anchor_rewards": rng.choice([-0.3, 0.2, 0.7], rollouts).astype(np.float32),
        "valid": np.ones(rollouts, bool),
        "compliant": rng.random(rollouts) < 0.6,
    }
    return GRPOBatch(structure=structure, **fields)


@contextlib.contextmanager
def in_chunks() -> Iterator[None]:
    """Logits in chunks of 8 tokens, and an eps with which AdamW does not magnify rounding."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(updates, "LARGE_VOCABULARY", 0)
        patch.setattr(updates, "LOGPROB_CHUNK", 8)
        patch.setattr(optimizers, "EPS", 1e-2)
        yield


@in_chunks()
def rl_step(
    graph: nnx.GraphDef,
    weights: Any,
    frozen: Any,
    mesh: Any,
    most_tokens: int,
    remat: Any,
    sizes_of: TextConfig,
) -> tuple[Any, dict[str, jax.Array]]:
    settings = RLSettings(
        steps=1,
        optimizer=ADAM,
        grpo=GRPOSettings(group_size=4, anchor="likelihood", reward_clip=None, behaviour_cap=None),
        rewards=RewardSettings(format_cap=False),
        frame_budgets=(4,),
        remat=remat,
    )
    optimizer = make_optimizer(ADAM)
    state = init_state(jax.device_put(weights, param_shardings(weights, mesh)), optimizer)
    base = jax.device_put(frozen, param_shardings(frozen, mesh))
    devices = row_devices(mesh)
    pieces = row_pieces(sizes_of, mesh.shape["fsdp"], mesh.shape["tensor"])
    sizes = SHAPE.microbatches(most_tokens, devices, pieces)
    packed = pack([found.lengths for found in groups()], sizes)
    vectors = np.random.default_rng(3).normal(size=(40, 3, TEXT.hidden_size)).astype(np.float32)
    visual = jax.device_put(vectors, bank_sharding(mesh))
    config = config_of(sizes_of)
    batch = put(rl_batch(settings), mesh)
    with jax.set_mesh(mesh):
        advantages, _ = compute_advantages(batch, settings.grpo, settings.rewards.gamma)
        whole = RLBatch(batch, advantages, batch_totals(batch))
    updater = Updater(Skeleton(graph, base), state, optimizer, rl_loss(settings))
    microbatches = [
        put(build(each, groups(), config, SHAPE.all_rollouts, SHAPE.suffix), mesh, whole=True)
        for each in packed
    ]
    gradients, metrics = updater.gradients(state.weights, Bank(visual), microbatches, whole)
    figures: dict[str, Any] = {
        name: (max if name.endswith("_max") else sum)(map(np.asarray, values))
        for name, values in metrics.items()
    }
    state, figures["grad_norm"] = updater.apply(state, gradients)
    print(f"{len(packed)} micro-batches, rows in {pieces} pieces")
    return state, figures


def conversations() -> list[list[Rendered]]:
    """Three random conversations per row, the second with a frame of three visual tokens."""
    rng = np.random.default_rng(2)
    rows = []
    for lengths in rng.integers(5, 8, (ROWS.rows, 3)):
        row = []
        for number, length in enumerate(lengths):
            ids = rng.integers(0, IMAGE, length).astype(np.int32)
            frames, vectors, first = (), None, 1
            if number == 1:
                frames, first = (Frame("", 0, 0.0),), 4
                ids[1:first] = IMAGE
                vectors = rng.normal(size=(3, 3, TEXT.hidden_size)).astype(np.float32)
            prompt = Segment(ids[:first], Author.PROMPT, frames=frames)
            said = Segment(ids[first:], Author.MODEL, np.zeros(length - first, np.float32))
            row.append(Rendered(Trajectory((prompt, said)), vectors))
        rows.append(row)
    return rows


class Features:
    """What the layout of rows asks of `FrameFeatures`."""

    config = config_of(TEXT)
    vector = (3, TEXT.hidden_size)
    dtype = np.dtype(np.float32)

    def grid(self, _: Frame) -> tuple[int, int]:
        return 2, 6


@in_chunks()
def sft_step(
    graph: nnx.GraphDef, weights: Any, frozen: Any, mesh: Any, microbatches: int, remat: Any
) -> tuple[Any, dict[str, Any]]:
    settings = SFTSettings(1, ROWS.rows, ADAM, microbatches=microbatches, remat=remat)
    base = jax.device_put(frozen, param_shardings(frozen, mesh))
    placed = jax.device_put(weights, param_shardings(weights, mesh))
    devices = row_devices(mesh)
    shape = ROWS.fitted(microbatches, devices)
    features: Any = Features()
    own = lay_out_rows(conversations(), features, shape, devices)
    updater = make_sft_updater(Skeleton(graph, base), placed, settings, shape)
    rows = tuple(put(part, mesh) for part in own.microbatches)
    batch = put(own.mask, mesh)
    bank = BankPlacer(mesh, shape.room(devices), None)(own.visual, own.grids)
    gradients, metrics = updater.gradients(updater.initial.weights, bank, rows, batch)
    state, norm = updater.apply(updater.initial, gradients)
    return state, to_floats(metrics | {"grad_norm": [norm]})


def compare_vision(
    hidden: int, intermediate: int, heads: int, meshes: tuple[tuple[int, int, int], ...]
) -> None:
    """Vectors and gradients of the trained part of the tower, on meshes and on one device."""
    config = dataclasses.replace(
        tiny(96).vision,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_heads=heads,
        out_hidden_size=TEXT.hidden_size,
    )
    tower = nnx.jit(lambda: Qwen3VLVisionTower(config, rngs=nnx.Rngs(0)))()
    rng = np.random.default_rng(4)
    frames = 13
    grids = [(2 * int(rng.integers(1, 3)), 2 * int(rng.integers(1, 4))) for _ in range(frames)]
    tokens = [h * w // 4 for h, w in grids]
    for part in ("merger", "tower"):
        vision = TrainedVision.of(tower, part, frame_tokens=6)
        assert vision is not None
        cached = rng.normal(size=(sum(tokens), *vision.vector)).astype(np.float32)
        cotangent = rng.normal(size=(104, 1 + config.levels, TEXT.hidden_size))
        # No token reads the padding behind the frames.
        cotangent[sum(tokens) :] = 0
        host = jax.tree.map(np.asarray, trained_state(tower, part))
        found: dict[tuple[int, ...], Any] = {}
        for shape in ((1, 1, 1), *meshes):
            mesh = make_mesh(*shape)
            devices = row_devices(mesh)
            weights = jax.device_put(host, param_shardings(host, mesh))
            room = VisualRoom(104 // devices, -(-frames // devices))
            bank = BankPlacer(mesh, room, vision)(cached, grids)
            programs = make_vision_programs(vision, mesh, 1, 104)
            vectors = np.asarray(programs.encode(weights, bank)).reshape(cotangent.shape)
            # Each replica has a share of the gradients.
            of_visual = cotangent.reshape(devices, -1, *cotangent.shape[1:]).astype(np.float32)
            if replicas(mesh) > 1:
                of_visual = np.stack([of_visual / replicas(mesh)] * replicas(mesh))
            placed = jax.device_put(of_visual, sums_sharding(bank_sharding(mesh), mesh))
            gradients = programs.gradients(weights, bank, placed)
            found[shape] = (vectors, jax.tree.map(np.asarray, gradients))
        for shape, (vectors, gradients) in found.items():
            np.testing.assert_allclose(vectors, found[1, 1, 1][0], rtol=1e-5, atol=1e-5)
            pairs = zip(
                jax.tree.leaves_with_path(gradients),
                jax.tree.leaves(found[1, 1, 1][1]),
                strict=True,
            )
            for (path, a), b in pairs:
                gap = np.linalg.norm(a - b) / np.linalg.norm(b)
                assert gap < 1e-5, (part, shape, jax.tree_util.keystr(path), gap)
            print(f"{part} {shape}: the same vectors and gradients")


def main() -> None:
    compare_vision(64, 96, 4, ((8, 1, 1), (2, 4, 1), (2, 2, 2)))
    # The width does not divide over `fsdp` 8.
    compare_vision(12, 18, 3, ((1, 8, 1),))
    for (heads, kv_heads), meshes in RL_FEW_KV_HEADS.items():
        few = dataclasses.replace(TEXT, num_attention_heads=heads, num_key_value_heads=kv_heads)
        compare(
            nnx.jit(lambda few=few: TextDecoder(few, rngs=nnx.Rngs(0)))(), meshes, SFT_FEW_KV_HEADS
        )
    text = nnx.jit(lambda: TextDecoder(TEXT, rngs=nnx.Rngs(0)))()
    compare(text, RL, SFT)
    add_adapters(text, LoRASettings(rank=4), seed=0)
    for adapter in text.layers.adapters.values():
        # With B = 0, A would have no gradient.
        adapter.b.set_value(0.1 * jax.random.normal(jax.random.key(1), adapter.b.shape))
    compare(text, RL_LORA, SFT_LORA)
    print("done")


def compare(text: TextDecoder, rl: tuple, sft: tuple) -> None:
    """Compares steps on the meshes of two tables with the same step on one device."""
    graph, *states = split(text)
    weights, frozen = jax.tree.map(np.asarray, states)
    play = functools.partial(rl_step, sizes_of=text.config)
    for step, table in ((play, rl), (sft_step, sft)):
        run = functools.partial(step, graph, weights, frozen)
        most = 4096 if step is play else 1
        state, figures = jax.tree.map(np.asarray, run(make_mesh(), most, "none"))
        moved = max(
            np.abs(a - b).max()
            for a, b in zip(jax.tree.leaves(state.weights), jax.tree.leaves(weights), strict=True)
        )
        assert moved > LEARNING_RATE / 10, moved
        for shape, parts, remat in table:
            many, found = run(make_mesh(*shape), parts, remat)
            where = f"{'RL' if step is play else 'SFT'} {shape} at most {parts}, remat {remat}"
            assert len(jax.tree.leaves(many.weights)[0].sharding.device_set) == np.prod(shape), (
                where
            )
            for name in figures:
                np.testing.assert_allclose(
                    found[name], figures[name], rtol=1e-5, atol=1e-6, err_msg=f"{where}: {name}"
                )
            pairs = zip(
                jax.tree_util.tree_leaves_with_path(state.weights),
                jax.tree.leaves(many.weights),
                strict=True,
            )
            gaps = {
                jax.tree_util.keystr(path): float(np.abs(np.asarray(b) - a).max())
                for (path, a), b in pairs
            }
            worst = max(gaps, key=gaps.__getitem__)
            loss = float(found["loss"])
            print(f"{where}: loss {loss:.6f}, weights within {gaps[worst]:.1e} ({worst})")
            assert gaps[worst] < BOUND, where


@pytest.mark.slow
def test_a_step_is_the_same_on_every_mesh():
    assert "done" in on_eight_devices(__file__)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "devices", "tensor", "pieces"),
    [
        (32, 8, 16, 1, 16),
        (32, 8, 64, 1, 32),
        # Eight heads and two kv heads per device of `tensor`.
        (32, 8, 64, 4, 8),
        (32, 8, 12, 1, 4),
        # Every kv head is repeated for two devices.
        (16, 8, 16, 1, 16),
        # Six heads per device of `tensor`, and a copy of a kv head.
        (12, 2, 8, 2, 2),
        # Three heads per device of `tensor`, and as many copies of kv heads.
        (12, 6, 8, 4, 1),
        # Three kv heads divide over three devices only.
        (9, 3, 8, 1, 1),
        (16, 8, 1, 1, 1),
    ],
)
def test_a_row_lies_over_as_many_devices_as_its_heads_allow(
    heads, kv_heads, devices, tensor, pieces
):
    text = dataclasses.replace(TEXT, num_attention_heads=heads, num_key_value_heads=kv_heads)
    assert row_pieces(text, devices, tensor) == pieces


if __name__ == "__main__":
    main()
