"""The jitted programs: a shared prompt is only a saving, padding is nothing, and the steps' figures stay what they were."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.qwen3_vl.rope import mrope_positions, visual_index
from models.sharding import make_mesh
from paravt_jax.method import protocol
from paravt_jax.method.protocol import render_call
from paravt_jax.method.records import CropCall, Demonstration, Message, Question, QuestionKind
from paravt_jax.method.tokenizer import Vocabulary
from paravt_jax.method.tools.crop_video import CropVideo
from paravt_jax.world.vocabulary import build_tokenizer
from train.learn.batch import build
from train.learn.rl import Learner
from train.learn.sft import SFTBatch, render, sft_batch, sft_loss, start_sft
from train.learn.step import row_logprobs

MEANT = "the figures of a step changed: update them only together with a deliberate change of loss, optimiser, model, protocol or videos"


@pytest.fixture(scope="module")
def groups(road):
    """Two groups of demonstrations whose questions differ, so that the cut between shared and own lies inside the prompt."""
    return [
        [render(d, road.scene.protocol, road.scene.features) for d in group]
        for group in road.data.demonstrations[:2]
    ]


@pytest.fixture(scope="module")
def batch(road, groups):
    return build(groups, road.scene.features, road.run.sft_shapes[0])


def whole_rows(road, groups) -> dict:
    """Every trajectory as a row of its own, prompt and frames and all: what a batch would be if nothing were shared."""
    trajectories, features = [t for group in groups for t in group], road.scene.features
    length, visual = max(len(t.ids) for t in trajectories), road.run.sft_shapes[0].visual
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


def test_a_shared_prompt_equals_the_plain_computation_and_so_do_the_gradients(road, groups, batch):
    rows = whole_rows(road, groups)
    weight = (
        np.random.default_rng(0).normal(size=batch.ids.shape).astype(np.float32) * batch.sampled
    )
    # The same token in both layouts: its row, its place among the row's own tokens, its place in the whole row.
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


def test_padding_changes_nothing(road, groups, batch):
    settings = road.run.sft
    shape = road.run.sft_shapes[0]
    larger = dataclasses.replace(
        shape, groups=3, rows=5, prompt=shape.prompt + 24, visual=24, suffix=shape.suffix + 9
    )
    padded = build(groups, road.scene.features, larger)

    @jax.jit
    def values(weights, batch):
        text = nnx.merge(road.graph, weights)
        return row_logprobs(text, batch, road.image, 1.0), *sft_loss(road.image, settings)(
            text, SFTBatch.of(batch)
        )

    (want, value, figures), (found, same, more) = (
        values(road.weights, batch),
        values(road.weights, padded),
    )
    for p in range(2):
        for g in range(4):
            own = batch.sampled[p * 4 + g]
            np.testing.assert_allclose(
                np.asarray(found)[p * 5 + g, : len(own)][own],
                np.asarray(want)[p * 4 + g][own],
                atol=1e-5,
            )
    np.testing.assert_allclose(value, same, rtol=1e-5)
    assert (
        int(figures["tokens"]) == int(more["tokens"]) == batch.sampled.sum()
        and int(more["groups"]) == 2
    )


# --- figures that were written down ---

PLAN = "look\n" + render_call(CropCall(0, 16))


def figures_of(metrics, names) -> dict[str, float]:
    return {name: float(metrics[name]) for name in names}


@pytest.fixture(scope="module")
def fixed(road, small):
    """The road with this test's own texts, so that the wording of the world has no part in the figures."""
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
    demonstrations = []
    for question in questions:
        group = []
        for n, texts in enumerate(said):
            messages = [Message("assistant", texts[0])]
            messages += [
                m
                for text in texts[1:]
                for m in (Message("tool", "one"), Message("assistant", text))
            ]
            group.append(Demonstration(f"d{n}", question.video, 4, None, question, tuple(messages)))
        demonstrations.append(tuple(group))
    windows = [
        Demonstration(
            "w", f"train/000{n}.mp4", 16, (0.0, 16.0), None, (Message("assistant", "one"),)
        )
        for n in range(4)
    ]
    data = dataclasses.replace(
        road.data,
        vocabulary=Vocabulary(build_tokenizer(pieces)),
        questions=questions,
        demonstrations=tuple(demonstrations),
        windows=tuple((window,) for window in windows),
    )
    limits = dataclasses.replace(
        road.run.protocol, text_tokens=112
    )  # this vocabulary has no word for a question
    run = dataclasses.replace(
        road.run, protocol=limits, rl=dataclasses.replace(road.run.rl, frame_budgets=(4, 8))
    )
    return small.lay_road(run, data)


def test_figures_of_cold_start_steps(fixed):
    windows = [d for (d,) in fixed.data.windows]
    batches = sft_batch(
        fixed.data.demonstrations,
        windows,
        fixed.scene.protocol,
        fixed.scene.features,
        fixed.run.sft_shapes,
        make_mesh(),
    )
    state, update = start_sft(fixed.graph, fixed.fresh(), fixed.image, fixed.run.sft)
    state, first = update(state, batches)
    state, second = update(state, batches)
    assert int(state.step) == 2
    wanted = {"loss": 6.00748, "grad_norm": 6.49874, "tokens": 156, "groups": 6}
    assert figures_of(first, wanted) == pytest.approx(wanted, rel=1e-3), MEANT
    assert float(second["loss"]) == pytest.approx(5.43673, rel=1e-3), MEANT


def test_figures_of_an_rl_step(fixed, small):
    """The sampler is a script, so no rounding of a sampled token reaches these."""
    learner = Learner(
        fixed.graph, fixed.fresh(), fixed.model.config, fixed.run.rl, fixed.run.rl_shapes
    )
    state, metrics = learner.step(
        learner.start, small.Script(fixed), fixed.scene, fixed.data.questions, seed=0
    )
    assert int(state.step) == 1
    wanted = {
        "loss": -0.0132514,
        "grad_norm": 1.35247,
        "advantage_rms": 1.04151,
        "logprob_gap": 0.225982,
        "accuracy": 0.375,
        "format": 0.625,
        "calls": 0.75,
        "reward/total": 1.5125,
        "reward/tool": 0.35,
        "length/response": 48.125,
        "groups/silent": 0.0,
        "token_mismatches": 0.0,
    }
    assert figures_of(metrics, wanted) == pytest.approx(wanted, rel=2e-3), MEANT
