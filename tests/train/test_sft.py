"""The cold start: the content of a batch, the loss, and that it learns."""

from __future__ import annotations

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from models.features import FrameFeatures
from models.sharding import make_mesh
from paravt_jax.data import video
from paravt_jax.method.protocol import PINNED
from train.data import pack_rows
from train.learn.sft import SFTBatch, SFTBatches, sft_step, start_sft


def batches(road, features=None) -> SFTBatches:
    return SFTBatches(
        road.run.sft,
        road.data,
        None,
        road.run.seed,
        road.environment.protocol,
        features or road.environment.features,
        make_mesh(),
    )


@pytest.fixture(scope="module")
def batch(road) -> SFTBatch:
    return next(batches(road))[0]


@pytest.fixture(scope="module")
def update(road):
    """The jitted update, shared by all tests. Each makes a state of its own."""
    return start_sft(road.graph, road.fresh(), road.image, road.run.sft)[1]


def test_a_step_trains_on_the_responses_of_agents(road):
    """A row has its conversations' responses in order; main agents' include the opening."""
    steps, packing = batches(road), pack_rows(road.data, road.run.sft.row_tokens, road.run.seed)
    said = {
        "".join(
            f"{turn.content[0]}<|im_end|>"
            for conversation in road.data.row(numbers)
            for turn in conversation.turns
            if turn.role == "assistant"
        )
        for numbers in packing.rows
    }
    assert any(PINNED in text for text in said)
    for _ in range(2):
        packed = next(steps)[0].packed
        for ids, sampled in zip(np.asarray(packed.ids), np.asarray(packed.sampled), strict=True):
            assert road.data.vocabulary.decode(ids[sampled]) in said


def test_the_loss_is_a_mean_over_tokens(road, batch, update):
    """With weights of zero every token costs log(vocabulary)."""
    state, _ = start_sft(road.graph, road.fresh(), road.image, road.run.sft)
    state = dataclasses.replace(state, weights=jax.tree.map(lambda x: x * 0, state.weights))
    _, figures = update(state, batch)
    assert float(figures["loss"]) == pytest.approx(
        np.log(road.model.config.text.vocab_size), rel=1e-5
    )
    assert figures["tokens"] == batch.tokens == np.asarray(batch.packed.sampled).sum()
    assert figures["conversations"] == np.asarray(batch.packed.segments).max(1).sum()


def test_missing_files_leave_padding_and_are_named(road, tmp_path):
    lost = road.data.conversations[0].clips[0].path
    for file in road.data.root.rglob("*.mp4"):
        there = tmp_path / file.relative_to(road.data.root)
        there.parent.mkdir(parents=True, exist_ok=True)
        if str(file.relative_to(road.data.root)) != lost:
            shutil.copy(file, there)
    features = FrameFeatures(
        road.model.vision, road.model.config, road.run.frames, tmp_path, source=video
    )
    whole, steps = batches(road), batches(road, features)
    missing = tokens = fewer = 0.0
    while not missing:
        tokens = float(next(whole)[0].tokens)
        found, _, figures = next(steps)
        missing = figures["missing"]
        fewer = tokens - float(found.tokens)
    assert features.unreadable == {lost: "no such file"} and 0 < fewer < tokens


def test_the_order_of_conversations_resumes_exactly(road):
    steps = batches(road)
    next(steps)
    state = json.loads(json.dumps(steps.get_state()))
    wanted, again = next(steps)[0], batches(road)
    again.set_state(state)
    for found, expected in zip(
        jax.tree.leaves(next(again)[0]), jax.tree.leaves(wanted), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


def test_the_next_batches_are_prepared_during_an_update(road, monkeypatch):
    """While the devices compute, the next step is laid out, and the frames after it are encoded."""
    frames = dataclasses.replace(road.run.frames, cache_mib=0)
    features = FrameFeatures(
        road.model.vision, road.model.config, frames, road.data.root, source=video
    )
    steps, plain = batches(road, features), batches(road)
    encoded = []
    start, started = features.start, []

    def recorded(frames):
        started.append(len(frames))
        start(frames)

    monkeypatch.setattr(features, "start", recorded)

    class Running:
        """The metric of an update that still runs until a number is asked for."""

        def __float__(self) -> float:
            encoded.append(features.encoded_frames)
            return 0.0

    def update(state, batch):
        encoded.append(features.encoded_frames)
        for found, expected in zip(
            jax.tree.leaves(batch), jax.tree.leaves(next(plain)[0]), strict=True
        ):
            np.testing.assert_array_equal(found, expected)
        return state, {"loss": Running()}

    for step in range(4):
        _, _, metrics = sft_step(update, None, steps, left=3 - step)
        assert metrics == {"loss": 0.0, "missing": 0.0}
        assert steps.get_state() == plain.get_state()
    # Frames that were encoded at the start of each update, and at its end.
    starts, ends = encoded[0::2], encoded[1::2]
    assert 0 < starts[0] < ends[0] < ends[1], encoded
    assert starts[1:] == ends[:-1], "frames were encoded while no update ran"
    assert ends[-1] == starts[-1], "frames were encoded for a step that does not exist"
    assert min(started[:-1]) > 0 and started[-1] == 0, "frames stay on the devices at the end"


def test_steps_on_the_same_batch_lower_its_loss(road, batch, update):
    state, _ = start_sft(road.graph, road.fresh(), road.image, road.run.sft)
    losses = []
    for _ in range(4):
        state, figures = update(state, batch)
        losses.append(float(figures["loss"]))
    assert int(state.step) == 4 and losses[-1] < losses[0] - 0.5, losses


def test_a_schedule_that_ends_before_the_last_step_is_refused(road):
    schedule = dataclasses.replace(road.run.sft.optimizer, schedule="cosine", horizon=7)
    with pytest.raises(ValueError, match=r"sft\.optimizer\.horizon: 7, .* the 8 updates"):
        dataclasses.replace(road.run.sft, steps=8, optimizer=schedule)


def test_counts_below_one_are_refused(road):
    for name in ("steps", "rows", "row_tokens", "save_every"):
        with pytest.raises(ValueError, match=rf"sft\.{name}: 0"):
            dataclasses.replace(road.run.sft, **{name: 0})
    with pytest.raises(ValueError, match=r"sft\.microbatches: -1"):
        dataclasses.replace(road.run.sft, microbatches=-1)
