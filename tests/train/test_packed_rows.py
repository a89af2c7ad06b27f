"""Packed rows do not change what PARA-GRPO learns.

Loss, metrics and gradients equal those of the slow layout, in which every trajectory is alone in a
row, behind a copy of its prompt. This holds for any lengths, sizes of micro-batches, and order of
groups and rollouts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from models.attention import RowLayout
from models.config import TextConfig
from models.qwen3_vl.config import Qwen3VLConfig, Qwen3VLVisionConfig
from models.rope import mrope_positions, visual_index
from models.sharding import make_mesh, param_shardings
from models.text import TextDecoder, VisualBank
from models.trained import Skeleton
from paravt_jax.method.grpo.advantages import compute_advantages
from paravt_jax.method.grpo.batch import GRPOBatch
from paravt_jax.method.grpo.loss import batch_totals, paravt_loss
from paravt_jax.method.grpo.settings import GRPOSettings
from paravt_jax.method.records import Author, Segment, Trajectory
from paravt_jax.method.structure import Kind, pad_structures
from train.learn.batch import Group, build
from train.learn.optimizer import OptimizerSettings, make_optimizer
from train.learn.packing import MicrobatchShape, pack
from train.learn.placement import Bank, put, put_rows
from train.learn.rl import rl_loss
from train.learn.rl_batch import RLBatch
from train.learn.rl_settings import RLSettings
from train.learn.update import Updater, init_state, make_logprobs

IMAGE = 63
TEXT = TextConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    mrope_section=(2, 1, 1),
    rope_theta=10_000.0,
    tie_word_embeddings=False,
)
VISION = Qwen3VLVisionConfig(
    hidden_size=8,
    depth=1,
    num_heads=2,
    intermediate_size=8,
    out_hidden_size=32,
    num_position_embeddings=4,
    deepstack_visual_indexes=(0,),
)
CONFIG = Qwen3VLConfig(VISION, TEXT, IMAGE, 62, 61, 60)
# No cap: rounding must not decide whether a token counts.
SETTINGS = RLSettings(
    steps=1,
    grpo=GRPOSettings(group_size=3, anchor="likelihood", reward_clip=None, behaviour_cap=None),
    temperature=0.8,
)

# The most of each, so that the slow layout compiles once.
GROUPS, ROLLOUTS = 3, 3
ROWS = GROUPS * ROLLOUTS
SUFFIX = 20
LONGEST = 48
SLOTS = 64

# Without shrinking: a failure is told by its plans.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
TAGS = 8

# Sizes of micro-batches: one for the whole step, or several of two sizes.
SIZES = {
    "one": (MicrobatchShape(1, 512),),
    "several": (MicrobatchShape(2, 96), MicrobatchShape(2, 48)),
}


@dataclasses.dataclass(frozen=True)
class Played:
    """A trajectory, and what PARA-GRPO knows about it: arrays by token from `Group.prompt` on."""

    trajectory: Trajectory
    reference: np.ndarray
    tags: np.ndarray
    kinds: np.ndarray
    reward: float
    anchor_reward: float
    compliant: bool


@dataclasses.dataclass(frozen=True)
class Prompted:
    """Trajectories with a common prompt, and its frames."""

    members: tuple[Played, ...]
    grids: tuple[tuple[int, int], ...]
    vectors: np.ndarray


@dataclasses.dataclass(frozen=True)
class Step:
    """Groups of rollouts."""

    groups: tuple[Prompted, ...]


# --- random steps ---


def prompt_of(rng: np.random.Generator, text: int, grids: Sequence[tuple[int, int]]) -> Segment:
    """Frames between words, and `text` words after them."""
    parts = []
    for height, width in grids:
        parts += [rng.integers(0, 60, 1), np.full(height * width // 4, IMAGE)]
    return Segment(np.concatenate([*parts, rng.integers(0, 60, text)]), Author.PROMPT)


def played(rng: np.random.Generator, prompt: Segment, length: int) -> Played:
    """A rollout of `length` tokens after its prompt: two responses, and a tool's between them."""
    trajectory = Trajectory((prompt,))
    ends = np.sort(rng.integers(0, length + 1, 3))
    counts = np.diff([0, *ends, length])
    authors = (Author.PINNED, Author.MODEL, Author.TOOL, Author.MODEL)
    for author, count in zip(authors, counts.tolist(), strict=True):
        logprobs = None
        if author is Author.MODEL:
            logprobs = rng.normal(-4.0, 0.2, count).astype(np.float32)
        if count:
            trajectory.append(Segment(rng.integers(0, 60, count), author, logprobs))
    sampled = 1 + np.flatnonzero(trajectory.authors[len(prompt.ids) :] == Author.MODEL)
    tags = np.sort(rng.permutation(sampled)[:TAGS])
    return Played(
        trajectory,
        rng.normal(-4.0, 0.2, SUFFIX).astype(np.float32),
        tags.astype(np.int32),
        rng.integers(0, len(Kind), len(tags)).astype(np.int8),
        float(rng.random()) * 2.5,
        float(rng.choice([-0.3, 0.2, 0.7])),
        bool(rng.random() < 0.6),
    )


# Patches; four are a visual token.
GRIDS = st.lists(st.sampled_from([(2, 2), (2, 4), (4, 4)]), max_size=2).map(tuple)
LENGTH = st.integers(0, SUFFIX - 1)


class Plan(NamedTuple):
    """What hypothesis draws for a prompt: a seed of the contents, and sizes."""

    seed: int
    words: int
    grids: tuple[tuple[int, int], ...]
    lengths: tuple[int, ...]

    def play(self) -> Prompted:
        rng = np.random.default_rng(self.seed)
        prompt = prompt_of(rng, self.words, self.grids)
        vectors = sum(height * width // 4 for height, width in self.grids)
        return Prompted(
            tuple(played(rng, prompt, length) for length in self.lengths),
            self.grids,
            rng.normal(size=(vectors, 2, TEXT.hidden_size)).astype(np.float32),
        )


def plans(rollouts: int) -> st.SearchStrategy[Plan]:
    return st.builds(
        Plan,
        st.integers(0, 2**32 - 1),
        st.integers(1, 12),
        GRIDS,
        st.tuples(*[LENGTH] * rollouts),
    )


STEPS = st.lists(plans(ROLLOUTS), min_size=1, max_size=GROUPS)


def step_of(drawn: Sequence[Plan]) -> Step:
    return Step(tuple(plan.play() for plan in drawn))


# --- what PARA-GRPO reads ---


def rows_of(step: Step) -> dict[int, tuple[Played, Prompted]]:
    """The rollouts by their rows."""
    return {
        p * ROLLOUTS + g: (member, group)
        for p, group in enumerate(step.groups)
        for g, member in enumerate(group.members)
    }


def grpo_batch(step: Step) -> GRPOBatch:
    by_token = {name: np.zeros((ROWS, SUFFIX), np.float32) for name in ("behaviour", "reference")}
    mask = np.zeros((ROWS, SUFFIX), bool)
    structures = [(np.zeros(0, np.int32), np.zeros(0, np.int8))] * ROWS
    for row, (member, _) in rows_of(step).items():
        trajectory = member.trajectory
        first = len(trajectory.segments[0].ids) - 1
        length = len(trajectory.ids) - first
        mask[row, :length] = trajectory.authors[first:] == Author.MODEL
        by_token["behaviour"][row, :length] = trajectory.logprobs[first:]
        by_token["reference"][row] = member.reference
        structures[row] = member.tags, member.kinds
    size = (GROUPS, ROLLOUTS)
    by_rollout = {
        "rewards": np.zeros(size, np.float32),
        "anchor_rewards": np.zeros(size, np.float32),
        "valid": np.zeros(size, bool),
        "compliant": np.zeros(size, bool),
    }
    for p, group in enumerate(step.groups):
        for g, member in enumerate(group.members):
            by_rollout["rewards"][p, g] = member.reward
            by_rollout["anchor_rewards"][p, g] = member.anchor_reward
            by_rollout["compliant"][p, g] = member.compliant
            by_rollout["valid"][p, g] = True
    arrays = jax.tree.map(jnp.asarray, by_token | by_rollout)
    structure = jax.tree.map(jnp.asarray, pad_structures(structures, TAGS))
    return GRPOBatch(mask=jnp.asarray(mask), structure=structure, **arrays)


@functools.cache
def jitted_advantages() -> Any:
    gamma = SETTINGS.rewards.gamma
    return jax.jit(lambda batch: compute_advantages(batch, SETTINGS.grpo, gamma)[0])


# --- the slow layout ---


def slow_arrays(step: Step) -> dict[str, np.ndarray]:
    """Every trajectory alone in a row, with its own visual vectors."""
    arrays = {
        "ids": np.zeros((ROWS, LONGEST), np.int32),
        "positions": np.zeros((3, ROWS, LONGEST), np.int32),
        "segments": np.zeros((ROWS, LONGEST), np.int32),
        "visual": np.zeros((ROWS, 8, 2, TEXT.hidden_size), np.float32),
        "visual_index": np.full((ROWS, LONGEST), -1, np.int32),
        # Where in its row each token of a rollout is.
        "index": np.full((ROWS, SUFFIX), -1, np.int32),
    }
    for row, (member, group) in rows_of(step).items():
        ids = member.trajectory.ids
        length = len(ids)
        arrays["ids"][row, :length] = ids
        arrays["positions"][:, row, :length] = mrope_positions(ids, group.grids, CONFIG)
        arrays["segments"][row, :length] = 1
        arrays["visual"][row, : len(group.vectors)] = group.vectors
        arrays["visual_index"][row, :length] = visual_index(ids, IMAGE)
        first = len(member.trajectory.segments[0].ids) - 1
        arrays["index"][row, : length - first] = np.arange(first, length)
    return arrays


def slow_logprobs(text: TextDecoder, arrays: dict[str, jax.Array]) -> jax.Array:
    hidden, _ = text(
        arrays["ids"],
        arrays["positions"],
        layout=RowLayout(arrays["segments"]),
        visual=VisualBank(arrays["visual"], arrays["visual_index"]),
    )
    scored = text.token_logprobs(hidden[:, :-1], arrays["ids"][:, 1:], SETTINGS.temperature)
    # The log-prob of the token i is the one at token i - 1.
    found = jnp.take_along_axis(scored, jnp.maximum(arrays["index"] - 1, 0), axis=1)
    first = (jnp.arange(SUFFIX) == 0)[None]
    return jnp.where((arrays["index"] < 0) | first, 0.0, found)


# --- both layouts ---


@dataclasses.dataclass(frozen=True)
class Layouts:
    """The compiled programs of both layouts: a step gives a loss, metrics and gradients."""

    slow: Callable[[Step], tuple[dict[str, float], Any]]
    packed: Callable[[Step, tuple[MicrobatchShape, ...]], tuple[dict[str, float], Any]]
    slow_logprobs: Callable[[Step], np.ndarray]
    packed_logprobs: Callable[[Step, tuple[MicrobatchShape, ...]], list[np.ndarray]]


@pytest.fixture(scope="module")
def layouts() -> Layouts:
    graph, weights = nnx.split(nnx.jit(lambda: TextDecoder(TEXT, rngs=nnx.Rngs(0)))())
    weights = jax.tree.map(np.asarray, weights)
    mesh = make_mesh()
    optimizer = make_optimizer(OptimizerSettings())
    state = init_state(jax.device_put(weights, param_shardings(weights, mesh)), optimizer)
    skeleton = Skeleton(graph)
    updater = Updater(skeleton, state, optimizer, rl_loss(SETTINGS))
    score = make_logprobs(skeleton, SETTINGS.temperature, mesh)

    def loss(weights, arrays, batch, advantages):
        logprobs = slow_logprobs(nnx.merge(graph, weights), arrays)
        gamma = SETTINGS.rewards.gamma
        return paravt_loss(logprobs, advantages, batch, SETTINGS.grpo, gamma=gamma)

    slow_gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))
    score_slowly = jax.jit(lambda weights, arrays: slow_logprobs(nnx.merge(graph, weights), arrays))

    def slow(step):
        batch = grpo_batch(step)
        advantages = jitted_advantages()(batch)
        (_, metrics), grads = slow_gradients(weights, slow_arrays(step), batch, advantages)
        return {name: float(value) for name, value in metrics.items()}, grads

    def placed(step, sizes):
        microbatches, visual = pack_step(step, sizes)
        return [put(each, mesh, whole=True) for each in microbatches], put_rows(visual, mesh)

    def packed(step, sizes):
        batch = grpo_batch(step)
        advantages = jitted_advantages()(batch)
        whole = put(RLBatch(batch, advantages, batch_totals(batch)), mesh, whole=True)
        microbatches, visual = placed(step, sizes)
        gradients, metrics = updater.gradients(state.weights, Bank(visual), microbatches, whole)
        figures = {
            name: (max if name.endswith("_max") else sum)(map(float, values))
            for name, values in metrics.items()
        }
        return figures, gradients

    def packed_logprobs(step, sizes):
        microbatches, visual = placed(step, sizes)
        return [np.asarray(score(state.weights, visual, part)) for part in microbatches]

    return Layouts(
        slow,
        packed,
        lambda step: np.asarray(score_slowly(weights, slow_arrays(step))),
        packed_logprobs,
    )


def pack_step(step: Step, sizes: Sequence[MicrobatchShape]) -> tuple[list[Any], np.ndarray]:
    """The micro-batches of a step, and its bank of visual vectors."""
    bank = np.zeros((SLOTS, 2, TEXT.hidden_size), np.float32)
    groups = []
    used = 0
    for p, group in enumerate(step.groups):
        trajectories = tuple(member.trajectory for member in group.members)
        groups.append(Group(trajectories, p * ROLLOUTS, group.grids, used))
        bank[used : used + len(group.vectors)] = group.vectors
        used += len(group.vectors)
    packed = pack([group.lengths for group in groups], sizes)
    return [build(part, groups, CONFIG, ROWS, SUFFIX) for part in packed], bank


def assert_same(found: tuple[dict[str, float], Any], wanted: tuple[dict[str, float], Any]) -> None:
    """Equal losses, metrics and gradients, but for rounding."""
    metrics, grads = found
    assert metrics.keys() == wanted[0].keys()
    assert metrics["loss"] == pytest.approx(wanted[0]["loss"], rel=1e-6, abs=1e-6)
    assert metrics == pytest.approx(wanted[0], rel=1e-5, abs=1e-5)
    pairs = zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(wanted[1]), strict=True)
    # The floor is for gradients that only the rounding of the largest one keeps from 0: float32
    # has a relative precision of 1e-7.
    floor = max(1e-4, 1e-2 * max(np.linalg.norm(x) for x in jax.tree.leaves(wanted[1])))
    for (path, gradient), right in pairs:
        gap = np.linalg.norm(np.asarray(gradient) - np.asarray(right))
        norm = max(floor, np.linalg.norm(np.asarray(right)))
        where = jax.tree_util.keystr(path)
        assert gap <= 1e-5 * norm, f"{where}: {gap:.1e} of {norm:.1e}"


# --- properties ---


@pytest.mark.slow
@settings(max_examples=25, phases=PHASES)
@given(drawn=STEPS, sizes=st.sampled_from(sorted(SIZES)))
def test_packed_rows_give_the_gradients_of_trajectories_alone(layouts, drawn, sizes):
    step = step_of(drawn)
    assert_same(layouts.packed(step, SIZES[sizes]), layouts.slow(step))


@pytest.mark.slow
@settings(max_examples=15, phases=PHASES)
@given(drawn=STEPS, sizes=st.sampled_from(sorted(SIZES)))
def test_every_log_prob_is_in_one_micro_batch(layouts, drawn, sizes):
    step = step_of(drawn)
    parts = layouts.packed_logprobs(step, SIZES[sizes])
    assert np.max(np.count_nonzero(parts, axis=0)) <= 1
    np.testing.assert_allclose(sum(parts), layouts.slow_logprobs(step), rtol=0, atol=2e-5)
