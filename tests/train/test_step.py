"""The jitted programs: sharing prompts and padding change no number; golden figures of steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.qwen3_vl.rope import mrope_positions, visual_index
from paravt_jax.method import protocol
from paravt_jax.method.conversations import ChatTurn, Clip, Conversation
from paravt_jax.method.protocol import PINNED, render_call
from paravt_jax.method.records import CropCall, Question, QuestionKind
from paravt_jax.method.tokenizer import Vocabulary
from paravt_jax.method.tools.crop_video import CropVideo
from paravt_jax.world.vocabulary import build_tokenizer
from train.learn.batch import BatchShape, build
from train.learn.packed_batch import PackedShape, build_packed, render_rows
from train.learn.rl import Learner
from train.learn.rollouts import roll_out
from train.learn.sft import SFTBatch, start_sft
from train.learn.step import row_logprobs

MEANT = (
    "the figures of a step changed: update them only together with a deliberate change of loss, "
    "optimizer, model, protocol or videos"
)

SHAPE = BatchShape(groups=2, rows=4, prompt=144, visual=16, suffix=144)


@pytest.fixture(scope="module")
def groups(road, small):
    """Two groups of rollouts."""
    rollouts = roll_out(
        small.Script(road), road.environment, road.data.questions[:2], road.run.rl, seed=0, step=1
    )
    return [[episode.trajectory for episode in group] for group in rollouts.groups]


@pytest.fixture(scope="module")
def batch(road, groups):
    return build(groups, road.environment.features, SHAPE)


def whole_rows(road, groups) -> dict:
    """Each trajectory as one whole row with its prompt and frames, so that nothing is shared."""
    trajectories, features = [t for group in groups for t in group], road.environment.features
    length, visual = max(len(t.ids) for t in trajectories), SHAPE.visual
    ids, segments = np.zeros((2, len(trajectories), length), np.int32)
    positions = np.zeros((3, len(trajectories), length), np.int32)
    bank = np.zeros((len(trajectories), visual, 2, road.model.config.text.hidden_size), np.float32)
    for row, t in enumerate(trajectories):
        n, grids = len(t.ids), [features.grid(f.video) for f in t.frames]
        ids[row, :n], segments[row, :n], bank[row, : len(t.frames)] = t.ids, 1, features(t.frames)
        positions[:, row, :n] = mrope_positions(t.ids, grids, road.model.config)
    index = visual_index(jnp.asarray(ids), road.image)
    return {
        "ids": ids,
        "positions": positions,
        "segment_ids": segments,
        "visual": bank,
        "visual_index": index,
    }


def test_sharing_a_prompt_changes_neither_values_nor_gradients(road, groups, batch):
    rows = whole_rows(road, groups)
    weight = (
        np.random.default_rng(0).normal(size=batch.ids.shape).astype(np.float32) * batch.sampled
    )
    # Each sampled token in both layouts: `place` without the prompt, `spot` in the whole row.
    row, place = np.nonzero(batch.sampled)
    spot = place + batch.prompt_segments.sum(1).repeat(4)[row]
    assert len(row) > 100 and (batch.ids[row, place] == rows["ids"][row, spot]).all()

    def shared(weights):
        values = row_logprobs(nnx.merge(road.graph, weights), batch, road.image, 0.7)
        return (values * weight).sum(), values[row, place]

    def plain(weights):
        text = nnx.merge(road.graph, weights)
        values = text.token_logprobs(text(**rows)[0][:, :-1], rows["ids"][:, 1:], 0.7)[
            row, spot - 1
        ]
        return (values * weight[row, place]).sum(), values

    (_, values), gradients = jax.jit(jax.value_and_grad(shared, has_aux=True))(road.weights)
    (_, wanted), plain_gradients = jax.jit(jax.value_and_grad(plain, has_aux=True))(road.weights)
    np.testing.assert_allclose(values, wanted, atol=2e-5)
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(plain_gradients), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * float(np.abs(b).max()))


def test_padding_changes_no_logprob(road, groups, batch):
    larger = dataclasses.replace(
        SHAPE, groups=3, rows=5, prompt=SHAPE.prompt + 24, visual=24, suffix=SHAPE.suffix + 9
    )
    padded = build(groups, road.environment.features, larger)

    @jax.jit
    def values(weights, batch):
        return row_logprobs(nnx.merge(road.graph, weights), batch, road.image, 1.0)

    want, found = values(road.weights, batch), values(road.weights, padded)
    for p in range(2):
        for g in range(4):
            own = batch.sampled[p * 4 + g]
            np.testing.assert_allclose(
                np.asarray(found)[p * 5 + g, : len(own)][own],
                np.asarray(want)[p * 4 + g][own],
                atol=1e-5,
            )


# --- golden figures ---

PLAN = "look\n" + render_call(CropCall(0, 16))


def figures_of(metrics, names) -> dict[str, float]:
    return {name: float(metrics[name]) for name in names}


def clip(path: str, indices: Sequence[int]) -> Clip:
    return Clip(path, tuple(indices), tuple(2.0 * index for index in indices), 32, 32)


@pytest.fixture(scope="module")
def fixed(road, small):
    """The road with texts of this test, so that figures do not depend on the world's wording."""
    pieces = (*protocol.recurring_texts((CropVideo(),)), *map(str, range(129)), ".0 seconds>")
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
        vocabulary=Vocabulary(build_tokenizer(pieces)),
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
    batches = SFTBatch.of(build_packed(rows, features, PackedShape(2, tokens, tokens)))
    state, update = start_sft(fixed.graph, fixed.fresh(), fixed.image, fixed.run.sft)
    state, first = update(state, batches)
    state, second = update(state, batches)
    assert int(state.step) == 2
    wanted = {"loss": 6.08554, "grad_norm": 4.91452, "tokens": 156, "conversations": 8}
    assert figures_of(first, wanted) == pytest.approx(wanted, rel=1e-3), MEANT
    assert float(second["loss"]) == pytest.approx(5.58258, rel=1e-3), MEANT


def test_figures_of_an_rl_step(fixed, small):
    """The sampler is a script, so rounding cannot change a sampled token."""
    learner = Learner(
        fixed.graph, fixed.fresh(), fixed.model.config, fixed.run.rl, fixed.run.rl_shapes
    )
    state, metrics = learner.step(
        learner.start, small.Script(fixed), fixed.environment, fixed.data.questions, seed=0
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
