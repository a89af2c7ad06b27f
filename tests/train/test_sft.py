"""The cold start: the content of a batch, the loss, and that it learns."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train.learn.sft
from models.features import FrameFeatures
from models.sharding import make_mesh
from paravt_jax.data import video
from paravt_jax.method.protocol import PINNED
from tests.train.steps import skeleton_of
from train.data import pack_rows
from train.learn.optimizer import OptimizerSettings
from train.learn.sft import SFTBatches, SFTSettings, SFTStep, make_sft_updater, sft_step
from train.learn.update import TrainState, Updater


def batches(road, features=None) -> SFTBatches:
    return SFTBatches(
        road.run.sft,
        road.data,
        None,
        road.run.seed,
        dataclasses.replace(road.environment, features=features or road.environment.features),
        make_mesh(),
    )


@pytest.fixture(scope="module")
def updater(road) -> Updater:
    """The jitted update, shared by all tests. Each makes a state of its own."""
    shape = batches(road).shape
    return make_sft_updater(skeleton_of(road), road.fresh(), road.run.sft, shape)


@pytest.fixture
def start(updater) -> TrainState:
    """A state that an update may donate."""
    return jax.tree.map(lambda x: jax.device_put(np.asarray(x), x.sharding), updater.initial)


@pytest.fixture
def one_batch(road) -> Any:
    """The same batch again and again."""
    return Repeated(batches(road))


class Repeated:
    """The first of some batches, again and again."""

    def __init__(self, source: SFTBatches):
        self.step = next(source)

    def prepare(self, left: int) -> None:
        pass

    def close(self) -> None:
        pass

    def __next__(self) -> SFTStep:
        return self.step


def placed_rows(step: SFTStep) -> tuple[np.ndarray, np.ndarray]:
    """The ids and the mask of a step's rows."""
    index = np.stack([np.asarray(part.index) for part in step.microbatches])
    ids = np.stack(
        [
            np.asarray(part.ids).reshape(-1)[np.maximum(places, 0)] * (places >= 0)
            for part, places in zip(step.microbatches, index, strict=True)
        ]
    )
    return ids.sum(0), np.asarray(step.mask)


def test_a_step_trains_on_the_responses_of_agents(road):
    """A row has its conversations' responses in order; main agents' include the opening."""
    steps, packed = batches(road), pack_rows(road.data, road.run.sft.row_tokens, road.run.seed)
    said = {
        "".join(
            f"{turn.content[0]}<|im_end|>"
            for conversation in road.data.row(numbers)
            for turn in conversation.turns
            if turn.role == "assistant"
        )
        for numbers in packed
    }
    assert any(PINNED in text for text in said)
    for _ in range(2):
        for ids, mask in zip(*placed_rows(next(steps)), strict=True):
            assert road.data.vocabulary.decode(ids[mask]) in said


def test_the_loss_is_a_mean_over_tokens(road, updater, start, one_batch):
    """With weights of zero every token costs log(vocabulary)."""
    state = dataclasses.replace(start, weights=jax.tree.map(lambda x: x * 0, start.weights))
    _, lengths, figures = sft_step(updater, state, one_batch, 1)
    assert figures["loss"] == pytest.approx(np.log(road.model.config.text.vocab_size), rel=1e-5)
    step = next(one_batch)
    assert figures["tokens"] == np.asarray(step.mask).sum()
    segments = [np.asarray(part.segments) for part in step.microbatches]
    assert figures["conversations"] == sum(rows.max(1).sum() for rows in segments)
    tokens = sum(sum(group.suffixes) for group in lengths)
    assert tokens == sum((rows > 0).sum() for rows in segments)


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
        tokens = float(np.asarray(next(whole).mask).sum())
        found = next(steps)
        missing = found.metrics["missing"]
        fewer = tokens - float(np.asarray(found.mask).sum())
    assert features.unreadable == {lost: "no such file"} and 0 < fewer < tokens


def test_the_order_of_conversations_resumes_exactly(road):
    steps = batches(road)
    next(steps)
    state = json.loads(json.dumps(steps.get_state()))
    wanted, again = next(steps), batches(road)
    again.set_state(state)
    require_equal(next(again), wanted)


def require_equal(found: Any, wanted: Any) -> None:
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_next_batches_are_prepared_during_an_update(road, updater, monkeypatch):
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

    # Updates are only dispatched.
    def gradients(weights, bank, microbatches, batch):
        encoded.append(features.encoded_frames)
        expected = next(plain)
        wanted = (expected.bank, expected.microbatches, expected.mask)
        require_equal((bank, microbatches, batch), wanted)
        return None, {"loss": [Running()]}

    def to_floats(metrics):
        return {name: float(parts[0]) for name, parts in metrics.items()}

    monkeypatch.setattr(train.learn.sft, "to_floats", to_floats)
    monkeypatch.setattr(updater, "gradients", gradients)
    monkeypatch.setattr(updater, "apply", lambda state, gradients: (state, 1.0))
    state = TrainState(None, None, jnp.int32(0))
    for step in range(4):
        _, _, metrics = sft_step(updater, state, steps, left=3 - step)
        assert (metrics["loss"], metrics["missing"]) == (0.0, 0.0)
        assert steps.get_state() == plain.get_state()
    # Frames that were encoded at the start of each update, and at its end.
    starts, ends = encoded[0::2], encoded[1::2]
    assert 0 < starts[0] < ends[0] < ends[1], encoded
    assert starts[1:] == ends[:-1], "frames were encoded while no update ran"
    assert ends[-1] == starts[-1], "frames were encoded for a step that does not exist"
    assert min(started[:-1]) > 0 and started[-1] == 0, "frames stay on the devices at the end"


def test_steps_on_the_same_batch_lower_its_loss(updater, start, one_batch):
    state, losses = start, []
    for _ in range(4):
        state, _, figures = sft_step(updater, state, one_batch, 1)
        losses.append(figures["loss"])
    assert int(state.step) == 4 and losses[-1] < losses[0] - 0.5, losses


def rates(steps: int, **fields: Any) -> list[float]:
    """The learning rate of each update and of one more, if the peak is 1."""
    rate: Any = SFTSettings(steps, 1, OptimizerSettings(), **fields).learning_rate
    by_step = rate(1.0) if callable(rate(1.0)) else lambda step: rate(1.0)
    return [float(by_step(step)) for step in range(steps + 1)]


def test_cosine_warms_up_and_ends_at_zero():
    rate = rates(10, warmup=0.2)
    assert rate[0] == 0 and rate[2] == max(rate) == 1
    assert all(a > b for a, b in itertools.pairwise(rate[2:]))
    assert rate[10] == pytest.approx(0, abs=1e-6)


def test_the_schedule_takes_as_many_updates_as_the_horizon():
    long = rates(24, warmup=0.1)
    assert rates(8, warmup=0.1, horizon=24) == long[:9]


def test_one_step_needs_no_schedule():
    assert rates(1) == [1.0, 1.0]


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": 0},
        {"row_tokens": 0},
        {"microbatches": -1},
        {"warmup": 3.0},
        {"horizon": 1},
    ],
)
def test_invalid_settings_are_refused(road, changes):
    name = list(changes)[-1]
    with pytest.raises(ValueError, match=rf"sft\.{name}: {changes[name]}"):
        dataclasses.replace(road.run.sft, **changes)
