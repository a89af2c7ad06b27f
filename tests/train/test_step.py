"""The jitted programs: sharing prompts and padding change no number; golden figures of steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.attention import RowLayout
from models.qwen3_vl.dialect import DIALECT
from models.rope import mrope_positions, visual_index
from models.text import VisualBank
from paravt_jax.method import protocol
from paravt_jax.method.conversations import ChatTurn, Clip, Conversation
from paravt_jax.method.protocol import PINNED, render_call
from paravt_jax.method.records import CropCall, Question, QuestionKind
from paravt_jax.method.scoring import Rules
from paravt_jax.method.tools.crop_video import CropVideo
from paravt_jax.world.vocabulary import build_vocabulary, recurring_texts
from tests.train.steps import road_learner, skeleton_of, take_step
from train.learn.batch import Group, Microbatch, build
from train.learn.conversation_rows import RowsShape, lay_out_rows, render_rows
from train.learn.packing import MicrobatchShape, pack
from train.learn.rollouts import Actor, begin, roll_out
from train.learn.sft import SFTBatch, make_sft_updater
from train.learn.update import score_rollouts, to_floats

MEANT = (
    "the figures of a step changed: update them only together with a deliberate change of loss, "
    "optimizer, model, protocol or videos"
)


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
    # Each token of a rollout in both layouts: `place` without the prompt, `spot` in its own row.
    row, place = np.nonzero(packed.index[:, 1:] >= 0)
    place += 1
    spot = place + prompts[row]
    assert len(row) > 100
    assert (packed.ids.reshape(-1)[packed.index[row, place]] == rows["ids"][row, spot]).all()
    weight = np.random.default_rng(0).normal(size=len(row)).astype(np.float32)

    def shared(weights):
        text = nnx.merge(road.graph, weights)
        values = score_rollouts(text, visual, packed, 0.7).logprobs[row, place]
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
        return score_rollouts(nnx.merge(road.graph, weights), visual, part, 1.0).logprobs

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


# --- golden figures ---

PLAN = "look\n" + render_call(CropCall(0, 16))


def figures_of(metrics, names) -> dict[str, float]:
    return {name: float(metrics[name]) for name in names}


def clip(path: str, indices: Sequence[int]) -> Clip:
    return Clip(path, tuple(indices), tuple(2.0 * index for index in indices), 32, 32)


@pytest.fixture(scope="module")
def fixed(road, small):
    """The road with texts of this test, so that figures do not depend on the world's wording."""
    pieces = (*recurring_texts((CropVideo(),), DIALECT), *map(str, range(129)), ".0 seconds>")
    questions = tuple(
        Question(
            f"q{n}",
            f"train/000{n}.mp4",
            "Which one?",
            QuestionKind.MULTIPLE_CHOICE,
            "AB"[n],
            ("one", "two"),
        )
        for n in range(2)
    )
    said = ([PLAN, "</think><answer>A</answer>"], ["it is two\n</think><answer>B</answer>"])
    conversations = []
    for question in questions:
        frames = (0, 21, 42, 63)
        asked = (clip(question.video, frames), protocol.question_text(question)[1:])
        for n, (first, *others) in enumerate(said):
            turns = [ChatTurn("user", asked), ChatTurn("assistant", (PINNED + first,))]
            for text in others:
                turns += [ChatTurn("tool", ("one",)), ChatTurn("assistant", (PINNED + text,))]
            conversations.append(Conversation(f"d{n}", "train", True, tuple(turns)))
    for n in range(4):
        shown = ChatTurn("user", (clip(f"train/000{n}.mp4", range(8)),))
        turns = shown, ChatTurn("assistant", ("one",))
        conversations.append(Conversation("w", "train", False, turns, subagent=True))
    data = dataclasses.replace(
        road.data,
        vocabulary=build_vocabulary(pieces, DIALECT),
        questions=questions,
        conversations=tuple(conversations),
    )
    # This vocabulary spells questions in many tokens.
    limits = dataclasses.replace(road.run.protocol, text_tokens=112)
    run = dataclasses.replace(
        road.run, protocol=limits, rl=dataclasses.replace(road.run.rl, frame_budgets=(4, 8))
    )
    return small.lay_road(run, data)


def test_figures_of_cold_start_steps(fixed):
    """Four main agents' conversations and four sub-agents', in two rows."""
    chats, features = fixed.data.conversations, fixed.environment.features
    rows, missing = render_rows([chats[::2], chats[1::2]], fixed.environment.protocol, features)
    assert not missing
    tokens = max(sum(len(t.ids) for t, _ in row) for row in rows)
    shape = RowsShape(2, tokens, tokens)
    own = lay_out_rows(rows, features, shape, devices=1)
    updater = make_sft_updater(skeleton_of(fixed), fixed.fresh(), fixed.run.sft, shape)
    state, figures = updater.start, []
    batch = SFTBatch(jnp.asarray(own.mask), jnp.float32(own.mask.sum()))
    bank = updater.place_bank(own.visual, own.grids)
    for step in range(2):
        gradients, metrics = updater.gradients(
            state.weights, bank, own.microbatches, batch, (0, step)
        )
        state, norm = updater.apply(state, gradients)
        figures.append(to_floats(metrics | {"grad_norm": [norm]}))
    assert int(state.step) == 2 and own.mask.sum() == 156
    wanted = {"loss": 6.08554, "grad_norm": 4.91452}
    assert figures[0] == pytest.approx(wanted, rel=1e-3), MEANT
    assert figures[1]["loss"] == pytest.approx(5.58258, rel=1e-3), MEANT


@pytest.mark.slow
def test_figures_of_an_rl_step(fixed, small):
    """The sampler is a script, so rounding cannot change a sampled token."""
    learner = road_learner(fixed)
    state, metrics = take_step(
        learner, learner.start, small.Script(fixed), fixed.environment, fixed.data.questions, seed=0
    )
    assert int(state.step) == 1
    wanted = {
        "loss": -0.0132514,
        "grad_norm": 1.35247,
        "advantage_rms": 1.04151,
        "logprob_gap": 0.225982,
        "accuracy": 0.375,
        "compliance": 0.625,
        "calls": 0.75,
        "reward/total": 1.5125,
        "reward/tool": 0.35,
        "length/response": 48.125,
        "groups/silent": 0.0,
        "token_mismatches": 0.0,
    }
    assert figures_of(metrics, wanted) == pytest.approx(wanted, rel=2e-3), MEANT
