"""The jitted programs: sharing prompts and padding change no number."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.attention import RowLayout
from models.rope import mrope_positions, visual_index
from models.text import VisualBank
from paravt_jax.method.accuracy import Rules
from train.learn.batch import Group, Microbatch, build
from train.learn.packing import MicrobatchShape, pack
from train.learn.rollouts import Actor, begin, roll_out
from train.learn.update import score_rollouts


@pytest.fixture(scope="module")
def groups(road, small) -> list[Group]:
    """Two groups of rollouts; the second prompt's visual vectors follow the first's."""
    actor = Actor(small.Script(road), road.environment, Rules())
    started = begin(road.data.questions[:2], road.run.rl, seed=0, step=1)
    rollouts = roll_out(actor, started, road.run.rl)
    features, found, slot = road.environment.features, [], 0
    for n, group in enumerate(rollouts.groups):
        trajectories = tuple(episode.trajectory for episode in group.episodes)
        grids = tuple(features.grid(frame) for frame in trajectories[0].frames)
        found.append(Group(trajectories, 4 * n, grids, slot))
        slot += len(grids)
    return found


def rows_of(road, groups, *tokens: int) -> list[Microbatch]:
    """Packed rows of these lengths, one per micro-batch; the first holds any trajectory."""
    lengths = [group.lengths for group in groups]
    packed = pack(lengths, [MicrobatchShape(1, n) for n in tokens])
    return [build(part, groups, road.model.config, 8, 144) for part in packed]


def bank(road, groups) -> jax.Array:
    features = road.environment.features
    return jnp.concatenate([features(group.trajectories[0].frames) for group in groups])


def alone(road, groups) -> dict:
    """Each trajectory as one whole row with its prompt and frames, so that nothing is shared."""
    features = road.environment.features
    trajectories = [t for group in groups for t in group.trajectories]
    length = max(len(t.ids) for t in trajectories)
    most_frames = max(len(t.frames) for t in trajectories)
    ids, segments = np.zeros((2, len(trajectories), length), np.int32)
    positions = np.zeros((3, len(trajectories), length), np.int32)
    width = road.model.config.text.hidden_size
    vectors = np.zeros((len(trajectories), most_frames, 2, width), np.float32)
    for row, t in enumerate(trajectories):
        n = len(t.ids)
        ids[row, :n] = t.ids
        segments[row, :n] = 1
        vectors[row, : len(t.frames)] = features(t.frames)
        grids = [features.grid(frame) for frame in t.frames]
        positions[:, row, :n] = mrope_positions(t.ids, grids, road.model.config)
    return {
        "ids": ids,
        "positions": positions,
        "layout": RowLayout(segments),
        "visual": VisualBank(vectors, visual_index(jnp.asarray(ids), road.image)),
    }


def test_sharing_a_prompt_changes_neither_values_nor_gradients(road, groups):
    rows, visual = alone(road, groups), bank(road, groups)
    (packed,) = rows_of(road, groups, 1024)
    prompts = np.repeat([len(group.prompt) for group in groups], 4)
    # Each token of a rollout in both layouts: `token` without the prompt, `spot` in its own row.
    row, token = np.nonzero(packed.index[:, 1:] >= 0)
    token += 1
    spot = token + prompts[row]
    assert len(row) > 100
    assert (packed.ids.reshape(-1)[packed.index[row, token]] == rows["ids"][row, spot]).all()
    weight = np.random.default_rng(0).normal(size=len(row)).astype(np.float32)

    def shared(weights):
        text = nnx.merge(road.graph, weights)
        values = score_rollouts(text, visual, packed, 0.7)[row, token]
        return (values * weight).sum(), values

    def plain(weights):
        text = nnx.merge(road.graph, weights)
        hidden, _ = text(**rows)
        values = text.token_logprobs(hidden[:, :-1], rows["ids"][:, 1:], 0.7)[row, spot - 1]
        return (values * weight).sum(), values

    (_, values), gradients = jax.jit(jax.value_and_grad(shared, has_aux=True))(road.weights)
    (_, wanted), plain_gradients = jax.jit(jax.value_and_grad(plain, has_aux=True))(road.weights)
    np.testing.assert_allclose(values, wanted, atol=2e-5)
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(plain_gradients), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * float(np.abs(b).max()))


def test_neither_padding_nor_micro_batches_change_a_logprob(road, groups):
    visual = bank(road, groups)

    @jax.jit
    def values(weights, part):
        return score_rollouts(nnx.merge(road.graph, weights), visual, part, 1.0)

    def of_all(parts):
        return np.sum([values(road.weights, part) for part in parts], axis=0)

    (whole,) = rows_of(road, groups, 1024)
    wanted = of_all([whole])
    assert np.count_nonzero(wanted) == (whole.index[:, 1:] >= 0).sum()
    (padded,) = rows_of(road, groups, 1536)
    longest = max(len(t.ids) for group in groups for t in group.trajectories)
    cut = rows_of(road, groups, longest)
    assert len(cut) > 1
    np.testing.assert_allclose(of_all([padded]), wanted, atol=1e-5)
    np.testing.assert_allclose(of_all(cut), wanted, atol=1e-5)
