"""Arrays of trajectories: prompts are shared, and no token changes on the way."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from models.qwen3_vl.rope import mrope_positions
from paravt_jax.method.records import Author, Trajectory
from train.learn.batch import BatchShape, build, mismatches
from train.learn.rollouts import roll_out

SHAPE = BatchShape(groups=3, rows=5, prompt=144, visual=16, suffix=144)


@pytest.fixture(scope="module")
def groups(road, small) -> list[list[Trajectory]]:
    """Two groups of four rollouts of one or two turns."""
    rollouts = roll_out(
        small.Script(road), road.environment, road.data.questions[:2], road.run.rl, seed=0, step=1
    )
    return [[episode.trajectory for episode in group] for group in rollouts.groups]


@pytest.fixture(scope="module")
def batch(road, groups):
    return build(groups, road.environment.features, SHAPE)


def rows(groups):
    return [
        (p * SHAPE.rows + g, p, trajectory)
        for p, group in enumerate(groups)
        for g, trajectory in enumerate(group)
    ]


def test_rollouts_of_a_group_share_overview_and_question(groups, batch):
    for p, group in enumerate(groups):
        prompt = np.concatenate([segment.ids for segment in group[0].segments[:2]])[:-1]
        np.testing.assert_array_equal(batch.prompt_ids[p, : len(prompt)], prompt)
        assert batch.prompt_segments[p].sum() == len(prompt)


def test_each_row_holds_its_trajectory(road, groups, batch):
    config, features = road.model.config, road.environment.features
    assert any((t.authors == Author.TOOL).any() for _, _, t in rows(groups)), (
        "this test needs a rollout with a tool response"
    )
    for row, p, trajectory in rows(groups):
        length = int(batch.prompt_segments[p].sum())
        own = int(batch.segments[row].sum())
        ids = np.concatenate([batch.prompt_ids[p, :length], batch.ids[row, :own]])
        np.testing.assert_array_equal(ids, trajectory.ids)
        np.testing.assert_array_equal(
            batch.sampled[row, :own], trajectory.authors[length:] == Author.MODEL
        )
        np.testing.assert_array_equal(batch.logprobs[row, :own], trajectory.logprobs[length:])
        whole = mrope_positions(
            trajectory.ids, [features.grid(f.video) for f in trajectory.frames], config
        )
        np.testing.assert_array_equal(batch.prompt_positions[:, p, :length], whole[:, :length])
        np.testing.assert_array_equal(batch.positions[:, row, :own], whole[:, length:])
        np.testing.assert_array_equal(
            batch.visual[p, : len(trajectory.frames)], features(trajectory.frames)
        )
        assert not batch.sampled[row, own:].any()
        assert not batch.logprobs[row, own:].any()
        assert not batch.segments[row, own:].any()


def test_a_rows_first_token_is_never_sampled(batch):
    assert batch.sampled.any() and not batch.sampled[:, 0].any()


def test_missing_groups_and_rows_are_padding(groups, batch):
    used = [row for row, _, _ in rows(groups)]
    missing = sorted(set(range(SHAPE.groups * SHAPE.rows)) - set(used))
    assert missing and not batch.segments[missing].any() and not batch.sampled[missing].any()
    assert not batch.prompt_segments[2].any() and not batch.visual[2].any()


def test_arrays_have_the_sampled_ids(groups, batch):
    assert mismatches(batch, groups) == 0


@pytest.mark.parametrize("where", ["sampled", "pinned", "tool"])
def test_a_changed_token_is_counted_as_a_mismatch(groups, batch, where):
    row, _, trajectory = next(r for r in rows(groups) if (r[2].authors == Author.TOOL).any())
    author = {"sampled": Author.MODEL, "pinned": Author.PINNED, "tool": Author.TOOL}[where]
    prompt = len(trajectory.ids) - int(batch.segments[row].sum())
    ids = batch.ids.copy()
    ids[row, np.flatnonzero(trajectory.authors[prompt:] == author)[0]] += 1
    assert mismatches(dataclasses.replace(batch, ids=ids), groups) == 1


def test_a_changed_prompt_counts_for_each_row_of_its_group(groups, batch):
    prompt_ids = batch.prompt_ids.copy()
    prompt_ids[1, 5] += 1
    assert mismatches(dataclasses.replace(batch, prompt_ids=prompt_ids), groups) == 4


@pytest.mark.parametrize("field", ["groups", "rows", "prompt", "visual", "suffix"])
def test_trajectories_that_do_not_fit_are_refused(road, groups, field):
    too_small = {"groups": 1, "rows": 3, "prompt": 40, "visual": 3, "suffix": 20}[field]
    with pytest.raises(ValueError, match=rf"batch\.{field}: \d+ .*{too_small}"):
        build(groups, road.environment.features, dataclasses.replace(SHAPE, **{field: too_small}))


@pytest.mark.parametrize(
    ("field", "value"), [("groups", 0), ("rows", -1), ("prompt", 0), ("suffix", 0), ("visual", -1)]
)
def test_sizes_below_their_minimum_are_refused(field, value):
    fields = {"groups": 1, "rows": 1, "prompt": 8, "visual": 0, "suffix": 8} | {field: value}
    with pytest.raises(ValueError, match=rf"BatchShape\.{field}: {value}"):
        BatchShape(**fields)
