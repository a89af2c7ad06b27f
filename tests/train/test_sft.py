"""The cold start: what a step is made of, what it averages over, and that it learns."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from models.sharding import make_mesh
from paravt_jax.method.protocol import PINNED
from paravt_jax.method.records import Author
from train.learn.placement import place
from train.learn.sft import SFTBatch, render, sft_batch, start_sft


@pytest.fixture(scope="module")
def windows(road):
    return [d for (d,) in road.data.windows[:4]]


@pytest.fixture(scope="module")
def batches(road, windows):
    return sft_batch(
        road.data.demonstrations[:2],
        windows,
        road.scene.protocol,
        road.scene.features,
        road.run.sft_shapes,
        make_mesh(),
    )


@pytest.fixture(scope="module")
def update(road):
    """The jitted update, which all tests share: each makes a state of its own."""
    return start_sft(road.graph, road.fresh(), road.image, road.run.sft)[1]


def test_a_demonstration_is_rendered_with_the_frames_it_speaks_of(road, windows):
    features = road.scene.features
    main = road.data.demonstrations[0][0]
    assert render(main, road.scene.protocol, features).frames == features.overview(
        main.video, main.frames
    )
    seen = render(windows[0], road.scene.protocol, features).frames
    start, end = windows[0].window
    assert len(seen) == windows[0].frames and all(start <= frame.time <= end for frame in seen)


def test_a_step_trains_on_what_an_agent_would_write(road, windows, batches):
    main, alone = batches.sequences
    text = road.data.vocabulary.decode(main.ids[0][main.sampled[0]])
    demonstration = road.data.demonstrations[0][0]
    said = "".join(
        PINNED + m.content + "<|im_end|>" for m in demonstration.messages if m.role == "assistant"
    )
    assert text == said
    assert (
        road.data.vocabulary.decode(alone.ids[0][alone.sampled[0]])
        == windows[0].messages[0].content + "<|im_end|>"
    )


def test_the_loss_weighs_both_batches_alike_however_many_tokens_they_have(road, batches, update):
    main, alone = batches.sequences

    def figures(*batches, scale=1.0):
        state, _ = start_sft(road.graph, road.fresh(), road.image, road.run.sft)
        state = dataclasses.replace(state, weights=jax.tree.map(lambda x: x * scale, state.weights))
        return {
            name: float(value) for name, value in update(state, SFTBatch.of(*batches))[1].items()
        }

    def silent(batch):
        return place(
            dataclasses.replace(batch, sampled=np.zeros_like(batch.sampled)), make_mesh()
        )  # as the others: compiled once

    both = figures(main, alone)
    assert both["tokens"] == main.sampled.sum() + alone.sampled.sum() and both["groups"] == 2 + 4
    assert main.sampled.sum() > 5 * alone.sampled.sum()
    parts = figures(main, silent(alone))["loss"], figures(silent(main), alone)["loss"]
    assert both["loss"] == pytest.approx(sum(parts), rel=1e-5) and min(parts) > 0.4 * both["loss"]
    # From weights of zero every token costs log(vocabulary).
    assert figures(main, alone, scale=0.0)["loss"] == pytest.approx(
        np.log(road.model.config.text.vocab_size), rel=1e-5
    )


def test_what_cannot_be_read_is_left_out_and_counted(road, windows):
    groups = list(road.data.demonstrations[:2])
    lost = [dataclasses.replace(d, video="lost.mp4") for d in groups[0]]
    parts = [lost, groups[1]], windows[1:]
    main, alone = sft_batch(
        *parts, road.scene.protocol, road.scene.features, road.run.sft_shapes, make_mesh()
    ).sequences
    assert (
        main.prompt_segments.any(1).tolist() == [True, False]
        and alone.prompt_segments.any(1).sum() == 3
    )
    want = render(groups[1][0], road.scene.protocol, road.scene.features)
    assert main.sampled[0].sum() == (want.authors == Author.MODEL).sum()


def test_steps_on_the_same_batch_lower_its_loss(road, batches, update):
    state, _ = start_sft(road.graph, road.fresh(), road.image, road.run.sft)
    losses = []
    for _ in range(4):
        state, figures = update(state, batches)
        losses.append(float(figures["loss"]))
    assert int(state.step) == 4 and losses[-1] < losses[0] - 0.5, losses


def test_counts_below_one_are_refused(road):
    for name in ("steps", "groups", "windows", "save_every", "microbatches"):
        with pytest.raises(ValueError, match=rf"sft\.{name}: 0; give a whole number of at least 1"):
            dataclasses.replace(road.run.sft, **{name: 0})
