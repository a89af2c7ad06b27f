"""Arrays of packed rows: every token sees its own trajectory, and no token changes on the way."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from models.qwen3_vl.sizes import tiny
from models.rope import mrope_positions, visual_index
from paravt_jax.method.accuracy import Rules
from paravt_jax.method.records import Author, Segment, Trajectory
from train.learn.batch import Group, Microbatch, build, mismatches
from train.learn.packing import Chunk, MicrobatchShape, PackedMicrobatch
from train.learn.rollouts import Actor, begin, roll_out

ALL = (0, 1, 2, 3)
# Two groups of four rollouts, and three sub-agents, which are groups of one.
LAYOUTS = {
    "one row": PackedMicrobatch(
        MicrobatchShape(1, 1920),
        ((Chunk(0, ALL), Chunk(2, (0,)), Chunk(1, ALL), Chunk(3, (0,)), Chunk(4, (0,))),),
    ),
    "rows, one of them empty": PackedMicrobatch(
        MicrobatchShape(4, 1024),
        ((Chunk(1, ALL), Chunk(4, (0,))), (Chunk(3, (0,)), Chunk(2, (0,))), (Chunk(0, ALL),)),
    ),
    "chunks of a group": PackedMicrobatch(
        MicrobatchShape(2, 1280),
        (
            (Chunk(1, (2,)), Chunk(0, (0, 3)), Chunk(1, (0, 1))),
            (Chunk(0, (1,)), Chunk(2, (0,)), Chunk(1, (3,)), Chunk(0, (2,))),
        ),
    ),
    "pieces": PackedMicrobatch(
        MicrobatchShape(2, 1024, pieces=4),
        ((Chunk(0, ALL), Chunk(3, (0,))), (Chunk(1, ALL), Chunk(2, (0,)))),
    ),
}
ROLLOUTS = 12
SUFFIX = 144


@pytest.fixture(scope="module")
def groups(road, small) -> list[Group]:
    """Groups of main agents with one or two turns, and sub-agents."""
    actor = Actor(small.Script(road), road.environment, Rules())
    started = begin(road.data.questions[:2], road.run.rl, seed=0, step=1)
    rollouts = roll_out(actor, started, road.run.rl)
    trajectories = [
        tuple(episode.trajectory for episode in group.episodes) for group in rollouts.groups
    ]
    outcomes = [call for e in rollouts.episodes for turn in e.turns for call in turn.calls]
    agents = [(outcome.subagent,) for outcome in outcomes if outcome.subagent is not None]
    trajectories += agents[:3]
    groups = []
    row = slot = 0
    for members in trajectories:
        features = road.environment.features
        grids = tuple(features.grid(frame) for frame in members[0].frames)
        groups.append(Group(members, row, grids, slot))
        row += len(members)
        slot += len(features(members[0].frames))
    assert len(groups) == 5 and row == 11
    return groups


@pytest.fixture(scope="module", params=sorted(LAYOUTS))
def packed(request) -> PackedMicrobatch:
    return LAYOUTS[request.param]


@pytest.fixture(scope="module")
def batch(road, groups, packed) -> Microbatch:
    return build(packed, groups, road.model.config, ROLLOUTS, SUFFIX)


def joined(batch: Microbatch, name: str) -> np.ndarray:
    """An array by token with the pieces of each row joined, [.., rows, tokens]."""
    x = np.asarray(getattr(batch, name))
    return x.reshape(*x.shape[:-2], -1, batch.pieces * x.shape[-1])


def sight(batch: Microbatch) -> np.ndarray:
    """Which keys each query sees, [row, query, key], as `attend` documents it."""
    segments, starts = joined(batch, "segments"), joined(batch, "starts")
    tokens = np.arange(segments.shape[1])
    shared = np.asarray(batch.shared)[:: batch.pieces, None, None]
    own = tokens[None, None, :] >= starts[:, :, None]
    same = segments[:, :, None] == segments[:, None, :]
    return same & (own | (tokens < shared)) & (tokens[:, None] >= tokens)[None]


def members(packed: PackedMicrobatch, groups: Sequence[Group]) -> list[tuple[Group, int]]:
    """The trajectories of a micro-batch: their groups and numbers."""
    chunks = [chunk for row in packed.rows for chunk in row]
    return [(groups[chunk.group], number) for chunk in chunks for number in chunk.members]


def tokens_of(batch: Microbatch, row: int) -> np.ndarray:
    """The tokens of a rollout's tokens, counted over all rows."""
    tokens = np.asarray(batch.index)[row]
    return tokens[tokens >= 0]


def test_a_token_sees_the_earlier_tokens_of_its_trajectory_and_no_others(groups, packed, batch):
    seen = sight(batch)
    ids = joined(batch, "ids")
    for group, number in members(packed, groups):
        trajectory = group.trajectories[number]
        row, last = divmod(tokens_of(batch, group.rollout + number)[-1], ids.shape[1])
        tokens = np.flatnonzero(seen[row, last])
        np.testing.assert_array_equal(ids[row, tokens], trajectory.ids)
        for count, token in enumerate(tokens, 1):
            np.testing.assert_array_equal(np.flatnonzero(seen[row, token]), tokens[:count])


def test_a_token_has_the_position_and_visual_vector_of_its_trajectory(road, groups, packed, batch):
    config = road.model.config
    seen = sight(batch)
    positions, vectors = joined(batch, "positions"), joined(batch, "visual_index")
    for group, number in members(packed, groups):
        ids = group.trajectories[number].ids
        row, last = divmod(tokens_of(batch, group.rollout + number)[-1], seen.shape[1])
        tokens = np.flatnonzero(seen[row, last])
        wanted = mrope_positions(ids, group.grids, config)
        np.testing.assert_array_equal(positions[:, row, tokens], wanted)
        slots = visual_index(ids, road.image)
        assert slots.max() > 0
        wanted = np.where(slots < 0, -1, group.slot + slots)
        np.testing.assert_array_equal(vectors[row, tokens], wanted)


def test_the_index_has_a_rollout_from_the_last_token_of_its_prompt_on(groups, packed, batch):
    present = members(packed, groups)
    for group, number in present:
        trajectory = group.trajectories[number]
        prompt = int((trajectory.authors == Author.PROMPT).argmin())
        tokens = tokens_of(batch, group.rollout + number)
        assert (np.asarray(batch.index)[group.rollout + number, len(tokens) :] == -1).all()
        ids = np.asarray(batch.ids).reshape(-1)[tokens]
        np.testing.assert_array_equal(ids, trajectory.ids[prompt - 1 :])
        # The output at the token before predicts a token.
        assert (np.diff(tokens) == 1).all()
    missing = set(range(ROLLOUTS)) - {group.rollout + number for group, number in present}
    assert missing and (np.asarray(batch.index)[sorted(missing)] == -1).all()


def test_a_prompt_is_in_a_row_once_per_chunk(groups, packed, batch):
    tokens = 0
    for row, chunks in enumerate(packed.rows):
        shared = [len(groups[c.group].prompt) for c in chunks if len(c.members) > 1]
        assert np.asarray(batch.shared)[row * batch.pieces] == sum(shared)
        for chunk in chunks:
            lengths = groups[chunk.group].lengths
            tokens += lengths.prompt + sum(lengths.suffixes[member] for member in chunk.members)
    assert np.count_nonzero(batch.segments) == tokens


def test_all_other_places_are_padding(batch):
    padding = np.asarray(batch.segments) == 0
    assert padding.any()
    for name, empty in (("ids", 0), ("starts", 0), ("visual_index", -1)):
        assert (np.asarray(getattr(batch, name))[padding] == empty).all()
    assert not np.asarray(batch.positions)[:, padding].any()
    tokens = np.concatenate([tokens_of(batch, row) for row in range(ROLLOUTS)])
    assert not padding.reshape(-1)[tokens].any() and len(set(tokens.tolist())) == len(tokens)


def test_the_row_of_the_docstring():
    """Two rollouts of the prompt a b c d, and a sub-agent's trajectory k l m n."""

    def trajectory(prompt: Sequence[int], response: Sequence[int]) -> Trajectory:
        logprobs = np.zeros(len(response), np.float32)
        return Trajectory(
            (
                Segment(np.array(prompt), Author.PROMPT),
                Segment(np.array(response), Author.MODEL, logprobs),
            )
        )

    a, b, c, d, x, y, t, z, u, v, k, l, m, n = range(1, 15)  # noqa: E741
    groups = [
        Group((trajectory([k, l], [m, n]),), 2, (), 0),
        Group((trajectory([a, b, c, d], [x, y, t, z]), trajectory([a, b, c, d], [u, v])), 0, (), 0),
    ]
    packed = PackedMicrobatch(MicrobatchShape(1, 16), ((Chunk(0, (0,)), Chunk(1, (0, 1))),))
    batch: Any = build(packed, groups, tiny(100), rollouts=3, suffix=5)
    assert batch.ids[0].tolist() == [a, b, c, d, x, y, t, z, d, u, v, k, l, m, n, 0]
    assert batch.positions[:, 0].tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 3, 4, 5, 0, 1, 2, 3, 0]] * 3
    assert batch.starts[0].tolist() == [0] * 3 + [3] * 5 + [8] * 3 + [11] * 4 + [0]
    assert batch.shared.tolist() == [3]
    (main,), (agent,) = set(batch.segments[0, :11].tolist()), set(batch.segments[0, 11:15].tolist())
    assert main != agent and main > 0 and agent > 0 and batch.segments[0, 15] == 0
    assert batch.index.tolist() == [[3, 4, 5, 6, 7], [8, 9, 10, -1, -1], [12, 13, 14, -1, -1]]
    assert (np.asarray(batch.visual_index) == -1).all()


# --- what is counted as a mismatch ---


def changed(batch: Microbatch, name: str, index: int | np.ndarray, by: int) -> Microbatch:
    array = np.array(getattr(batch, name))
    array.reshape(-1)[index] += by
    return dataclasses.replace(batch, **{name: array})


def of_two_turns(groups: Sequence[Group]) -> tuple[int, Trajectory, int]:
    """A rollout that reads a tool response and goes on: its row, itself, its prompt's length."""
    for group in groups:
        for number, trajectory in enumerate(group.trajectories):
            if (trajectory.authors == Author.TOOL).any():
                return group.rollout + number, trajectory, len(group.prompt)
    raise AssertionError("this test needs a rollout with a tool response")


def test_arrays_have_the_sampled_ids(batch, groups):
    assert mismatches([batch], groups) == 0
    assert mismatches([batch, batch], groups) == 0


@pytest.mark.parametrize("author", [Author.MODEL, Author.PINNED, Author.TOOL])
def test_a_changed_token_is_counted(batch, groups, author):
    row, trajectory, prompt = of_two_turns(groups)
    first = np.flatnonzero(trajectory.authors[prompt:] == author)[0]
    wrong = changed(batch, "ids", tokens_of(batch, row)[first], 1)
    assert mismatches([wrong], groups) == 1
    assert mismatches([batch, wrong], groups) == 1


def test_a_rollout_that_sees_another_is_counted(batch, groups, packed):
    """Its segment begins a token early: at the end of another one of its group."""
    chunks = [chunk for row in packed.rows for chunk in row if len(chunk.members) > 1]
    for chunk in chunks:
        second = groups[chunk.group].rollout + chunk.members[1]
        wrong = changed(batch, "starts", tokens_of(batch, second), -1)
        assert mismatches([wrong], groups) == 1
