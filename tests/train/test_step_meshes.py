"""The loss and the updated weights of a step do not depend on mesh, micro-batches or remat.

The test runs this file as a program with eight fake devices.
"""

from __future__ import annotations

import functools
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from models.qwen3_vl.config import TextConfig
from models.qwen3_vl.text import TextDecoder
from models.sharding import make_mesh, param_shardings
from paravt_jax.method import grpo
from paravt_jax.method.grpo import GRPOBatch, GRPOSettings
from paravt_jax.method.rewards import RewardSettings
from paravt_jax.method.structure import Kind, Structure
from train.learn.batch import BatchShape, Sequences
from train.learn.optimizer import OptimizerSettings, make_optimizer
from train.learn.packed_batch import PackedRows, PackedShape, fitted_rows
from train.learn.placement import fit, fitted, parts_of, place
from train.learn.rl import make_rl_update
from train.learn.rl_batch import RLBatch
from train.learn.rl_settings import RLSettings
from train.learn.sft import SFTBatch, SFTSettings, make_sft_update
from train.learn.step import init_state

ROOT = pathlib.Path(__file__).parents[2]
# Weights move by up to LEARNING_RATE in the step, and may differ by BOUND.
LEARNING_RATE = 1e-2
BOUND = 1e-6

# (data, fsdp, tensor), upper bound on micro-batches, remat. Most meshes have more devices than the
# six prompts, which are then computed in 2, 4 or 8 pieces.
RL = (
    ((8, 1, 1), 1, "none"),
    ((1, 8, 1), 4, "full"),
    ((2, 4, 1), 2, "attention"),
    ((2, 2, 2), 4, "dots"),
    ((1, 2, 4), 2, "none"),
    ((1, 1, 8), 5, "full"),
    ((1, 2, 2), 5, "offload"),
)
SFT = (((8, 1, 1), 1, "full"), ((2, 4, 1), 2, "none"), ((2, 2, 2), 1, "none"))

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
MAIN = BatchShape(groups=6, rows=4, prompt=22, visual=4, suffix=20)
WINDOWS = BatchShape(groups=5, rows=1, prompt=12, visual=2, suffix=9)
ROWS = PackedShape(rows=5, tokens=24, visual=5)
# A large eps: the rounding of a small gradient must not decide the sign of an update.
ADAM = OptimizerSettings(learning_rate=LEARNING_RATE, eps=1e-2)


def sequences(shape: BatchShape, fitted: BatchShape) -> Sequences:
    """Random prompts and rows of various lengths in `shape`, padded to `fitted`."""
    rng = np.random.default_rng(shape.groups)
    p, b = shape.groups, shape.groups * shape.rows

    def tokens(count: int, length: int, start: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        segments = (np.arange(length) < rng.integers(length // 2, length + 1, (count, 1))).astype(
            np.int32
        )
        return (
            rng.integers(0, IMAGE, (count, length), np.int32) * segments,
            segments,
            start + np.arange(length, dtype=np.int32) * segments,
        )

    prompt_ids, prompt_segments, prompt_positions = tokens(p, shape.prompt, 0)
    prompt_ids[:, 1 : 1 + shape.visual] = IMAGE
    ids, segments, positions = tokens(b, shape.suffix, shape.prompt)
    sampled = (segments > 0) & (rng.random(segments.shape) < 0.7)
    arrays = {
        "prompt_ids": prompt_ids,
        "prompt_positions": np.broadcast_to(prompt_positions, (3, *prompt_positions.shape)),
        "prompt_segments": prompt_segments,
        "visual": rng.normal(size=(p, shape.visual, 3, TEXT.hidden_size)).astype(np.float32),
        "ids": ids,
        "positions": np.broadcast_to(positions, (3, *positions.shape)),
        "segments": segments,
        "sampled": sampled,
        "logprobs": np.where(sampled, -4.5 + 0.1 * rng.normal(size=sampled.shape), 0).astype(
            np.float32
        ),
    }
    more = {
        name: (fitted.groups - p, fitted.prompt - shape.prompt if name != "visual" else 0)
        for name in arrays
        if "prompt" in name
    }
    more |= {"visual": (fitted.groups - p, 0)}
    return Sequences(
        **{
            name: pad(x, *more.get(name, (fitted.groups * shape.rows - b, 0)))
            for name, x in arrays.items()
        }
    )


def pad(x: np.ndarray, rows: int, length: int) -> np.ndarray:
    """Append `rows` and `length` zeros."""
    # Positions have a leading axis of 3.
    first = 1 if x.ndim == 3 else 0
    widths = [(0, 0)] * x.ndim
    widths[first], widths[first + 1] = (0, rows), (0, length)
    return np.pad(x, widths)


def rl_batch(settings: RLSettings, shapes: Sequence[BatchShape], mesh: Any) -> RLBatch:
    shape, windows = shapes
    parts = sequences(MAIN, shape), sequences(WINDOWS, windows)
    rng = np.random.default_rng(1)
    counts = [MAIN.groups * MAIN.rows, WINDOWS.groups]
    room = [len(s.ids) for s in parts]

    def rows(real: np.ndarray) -> np.ndarray:
        main, alone = np.split(real, [counts[0]])
        return np.concatenate(
            [pad(main, room[0] - counts[0], 0), pad(alone, room[1] - counts[1], 0)]
        )

    def of_parts(name: str) -> np.ndarray:
        return np.concatenate(
            [pad(getattr(s, name), 0, MAIN.suffix - s.ids.shape[1]) for s in parts]
        )

    def groups(real: np.ndarray) -> np.ndarray:
        return pad(real, shape.groups - MAIN.groups, 0)

    b, p, tags = sum(counts), (MAIN.groups, MAIN.rows), 6
    positions = np.sort(
        rng.permuted(np.tile(np.arange(MAIN.suffix), (b, 1)), axis=1)[:, :tags]
    ).astype(np.int32)
    structure = Structure(
        rows(positions),
        rows(rng.integers(0, len(Kind), (b, tags)).astype(np.int8)),
        rows(rng.random((b, tags)) < 0.8),
    )
    owners = np.concatenate([np.arange(counts[0]), rng.integers(0, counts[0], counts[1])])[:, None]
    fields = {
        "mask": of_parts("sampled"),
        "behaviour": of_parts("logprobs"),
        "reference": of_parts("logprobs")
        + rows(0.1 * rng.normal(size=(b, MAIN.suffix))).astype(np.float32),
        "rollout": rows(owners)[:, 0].astype(np.int32),
        "rewards": groups(rng.random(p).astype(np.float32) * 2.5),
        "anchor_rewards": groups(rng.choice([-0.3, 0.2, 0.7], p).astype(np.float32)),
        "valid": groups(np.ones(p, bool)),
        "compliant": groups(rng.random(p) < 0.6),
    }
    placed = place(GRPOBatch(structure=structure, **fields), mesh)
    advantages, _ = grpo.advantages(placed, settings.grpo, settings.rewards.gamma)
    return RLBatch(place(parts, mesh), placed, advantages, grpo.batch_totals(placed))


def rl_step(
    graph: nnx.GraphDef, weights: Any, mesh: Any, microbatches: int, remat: Any
) -> tuple[Any, dict[str, jax.Array]]:
    settings = RLSettings(
        steps=1,
        subagents_per_rollout=WINDOWS.groups / (MAIN.groups * MAIN.rows),
        optimizer=ADAM,
        grpo=GRPOSettings(group_size=4, anchor="likelihood", reward_clip=None, behaviour_cap=None),
        rewards=RewardSettings(format_cap=False),
        frame_budgets=(4,),
        microbatches=microbatches,
        remat=remat,
        logprob_chunk=8,
    )
    optimizer = make_optimizer(ADAM, 1)
    state = init_state(jax.device_put(weights, param_shardings(weights, mesh)), optimizer)
    shapes, parts = fitted((MAIN, WINDOWS), microbatches, mesh)
    return make_rl_update(graph, optimizer, IMAGE, settings, parts, state)(
        state, rl_batch(settings, shapes, mesh)
    )


def packed_rows(fitted: PackedShape) -> PackedRows:
    """Three random conversations per row, the second with frames; padded to `fitted`."""
    rng = np.random.default_rng(2)
    b, t, m = ROWS.rows, ROWS.tokens, ROWS.visual
    ends = np.cumsum(rng.integers(5, 8, (b, 3)), 1)
    at = np.arange(t)
    segments = np.where(at < ends[:, 2:], 1 + (at >= ends[:, :1]) + (at >= ends[:, 1:2]), 0).astype(
        np.int32
    )
    starts = np.concatenate([np.zeros((b, 1), int), ends[:, :2]], 1)[
        np.arange(b)[:, None], np.maximum(segments - 1, 0)
    ]
    ids = rng.integers(0, IMAGE, (b, t), np.int32) * (segments > 0)
    ids[(segments == 2) & (at - starts > 0) & (at - starts < 4)] = IMAGE
    positions = ((at - starts) * (segments > 0)).astype(np.int32)
    arrays = {
        "ids": ids.astype(np.int32),
        "positions": np.broadcast_to(positions, (3, b, t)),
        "segments": segments,
        "sampled": (at > starts) & (segments > 0) & (ids != IMAGE) & (rng.random((b, t)) < 0.7),
        "visual": rng.normal(size=(b, m, 3, TEXT.hidden_size)).astype(np.float32),
    }
    return PackedRows(**{name: pad(x, fitted.rows - b, 0) for name, x in arrays.items()})


def sft_step(
    graph: nnx.GraphDef, weights: Any, mesh: Any, microbatches: int, remat: Any
) -> tuple[Any, dict[str, jax.Array]]:
    settings = SFTSettings(
        1, ROWS.rows, ADAM, microbatches=microbatches, remat=remat, logprob_chunk=8
    )
    optimizer = make_optimizer(ADAM, 1)
    state = init_state(jax.device_put(weights, param_shardings(weights, mesh)), optimizer)
    shape, parts = fitted_rows(ROWS, microbatches, mesh)
    batch = SFTBatch.of(place(packed_rows(shape), mesh))
    return make_sft_update(graph, optimizer, IMAGE, settings, parts, state)(state, batch)


def main() -> None:
    text = nnx.jit(lambda: TextDecoder(TEXT, rngs=nnx.Rngs(0)))()
    graph, weights = nnx.split(text)
    weights = jax.tree.map(np.asarray, weights)
    for step, table in ((rl_step, RL), (sft_step, SFT)):
        run = functools.partial(step, graph, weights)
        state, figures = jax.tree.map(np.asarray, run(make_mesh(), 1, "none"))
        moved = max(
            np.abs(a - b).max()
            for a, b in zip(jax.tree.leaves(state.weights), jax.tree.leaves(weights), strict=True)
        )
        assert moved > LEARNING_RATE / 10, moved
        for shape, parts, remat in table:
            many, found = run(make_mesh(*shape), parts, remat)
            where = f"{step.__name__} {shape} at most {parts} parts, remat {remat}"
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
    print("done")


@pytest.mark.slow
def test_a_step_is_the_same_on_every_mesh():
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    environment = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, env=environment, check=False
    )
    print(done.stdout)
    assert done.returncode == 0 and "done" in done.stdout, done.stderr[-4000:]


@pytest.mark.parametrize(
    ("shape", "devices", "parts", "groups", "prompt"),
    [
        ((7, 8), 1, 1, 7, 30),
        ((7, 8), 1, 4, 8, 30),
        ((7, 8), 16, 1, 8, 30),
        # Two prompts per micro-batch, each on eight devices.
        ((7, 8), 16, 4, 8, 32),
        ((7, 8), 64, 1, 8, 32),
        # The eight rows of a group take at most eight devices.
        ((7, 8), 128, 1, 16, 32),
        ((16, 1), 16, 2, 32, 30),
        ((17, 1), 16, 1, 32, 30),
    ],
)
def test_groups_and_prompts_are_padded_to_divide_over_devices(
    shape, devices, parts, groups, prompt
):
    fitted = fit(BatchShape(shape[0], shape[1], prompt=30, visual=4, suffix=20), devices, parts)
    assert (fitted.groups, fitted.prompt, fitted.rows, fitted.suffix) == (
        groups,
        prompt,
        shape[1],
        20,
    )


@pytest.mark.parametrize(
    ("shapes", "devices", "limit", "processes", "parts"),
    [
        (((7, 8),), 1, 7, 1, 7),
        # A group's rows on eight devices: nothing is padded.
        (((7, 8),), 8, 7, 1, 7),
        (((7, 8),), 16, 7, 4, 4),
        # Three parts would be as large.
        (((7, 8),), 16, 3, 1, 2),
        # Four parts would be as large as one, and four times the work.
        (((7, 8),), 64, 4, 1, 1),
        # Every process needs a group.
        (((7, 8),), 64, 4, 16, 2),
        (((6, 4), (5, 1)), 8, 4, 1, 3),
        # The sub-agents' rows fill two.
        (((6, 4), (32, 1)), 16, 2, 1, 2),
    ],
)
def test_there_are_no_more_micro_batches_than_save_memory(shapes, devices, limit, processes, parts):
    batches = [BatchShape(*shape, prompt=30, visual=4, suffix=20) for shape in shapes]
    assert parts_of(batches, devices, limit, processes) == parts
    assert all(fit(shape, devices, parts).groups % processes == 0 for shape in batches)
    for shape in batches:
        fewer, more = fit(shape, devices, parts), fit(shape, devices, limit)
        # Micro-batches are as large as with `limit`, and the whole is no larger.
        assert fewer.groups // parts == more.groups // limit
        assert fewer.groups <= more.groups
        assert fewer.prompt == more.prompt


if __name__ == "__main__":
    main()
