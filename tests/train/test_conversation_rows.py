"""Conversations packed into rows: each is computed as in a row of its own."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.features import FrameFeatures, FrameSettings
from models.sharding import make_mesh, param_shardings
from models.trained import Skeleton, split
from paravt_jax.data import video
from paravt_jax.method.conversations import ChatTurn, Clip, Conversation
from paravt_jax.method.protocol import Protocol, ProtocolSettings
from paravt_jax.method.records import Author, Segment, Trajectory
from train.learn.batch import Microbatch
from train.learn.conversation_rows import (
    Rendered,
    RowsShape,
    lay_out_rows,
    most_visual,
    render_rows,
)
from train.learn.optimizer import OptimizerSettings
from train.learn.placement import BankPlacer
from train.learn.sft import SFTSettings, make_sft_updater
from train.learn.update import make_logprobs


@pytest.fixture(scope="module")
def features(small_model, small_world):
    settings = FrameSettings(min_pixels=1024, max_pixels=1024, batch=8)
    return FrameFeatures(
        small_model.vision, small_model.config, settings, small_world.folder, source=video
    )


def conversation(n: int, path: str, frames: int, answer: str) -> Conversation:
    clip = Clip(
        path, tuple(range(0, 2 * frames, 2)), tuple(float(4 * i) for i in range(frames)), 32, 32
    )
    asked = ChatTurn(
        "user", (clip, "Which digit appears?") if frames else ("Which digit appears?",)
    )
    return Conversation(str(n), False, (asked, ChatTurn("assistant", (answer,))))


@pytest.fixture(scope="module")
def rendered(small_world, small_vocabulary, features):
    paths = [v.path for v in small_world.videos]
    chats = [
        conversation(0, paths[0], 4, "two"),
        conversation(1, "", 0, " seven seven"),
        conversation(2, paths[1], 2, "<think>a</think>six"),
    ]
    rules = Protocol(small_vocabulary, ProtocolSettings())
    rows = [chats, [conversation(3, "gone.mp4", 2, "x"), chats[1]]]
    found, missing = render_rows(rows, rules, features)
    assert [len(row) for row in found] == [3, 1]
    assert missing.keys() == {"3"} and str(missing["3"]).endswith("gone.mp4: no such file")
    return found


@pytest.fixture(scope="module")
def model(small_model) -> tuple[Skeleton, Any]:
    """The model without its weights, and a copy of them."""
    graph, weights, frozen = split(small_model)
    return Skeleton(graph, frozen), jax.tree.map(np.asarray, weights)


def on_mesh(weights: Any) -> Any:
    return jax.device_put(weights, param_shardings(weights, make_mesh(1, 1, 1)))


@pytest.mark.slow
def test_packing_changes_no_conversation(model, features, rendered):
    """Log-probs and the mask are the same in a shared row and in a row of its own."""
    skeleton, weights = model
    row = rendered[0]
    length = sum(len(t.ids) for t, _ in row) + 7
    shape = RowsShape(rows=4, tokens=length, visual=8)
    score = make_logprobs(skeleton, 1.0, make_mesh(1, 1, 1))

    def scored(rows) -> tuple[Microbatch, np.ndarray, np.ndarray]:
        own = lay_out_rows(rows, features, shape, devices=1)
        bank = np.zeros((1, shape.room(1).slots, *features.vector), features.dtype)
        bank[0, : len(own.visual)] = own.visual
        (part,) = own.microbatches
        return part, own.mask, np.asarray(score(on_mesh(weights), bank, part))

    together, mask, logprobs = scored([row])
    apart, own_mask, alone = scored([[each] for each in row])
    at = 0
    for n, (trajectory, _) in enumerate(row):
        part, own = slice(at, at + len(trajectory.ids)), slice(0, len(trajectory.ids))
        np.testing.assert_array_equal(mask[0, part], own_mask[n, own])
        np.testing.assert_array_equal(together.positions[:, 0, part], apart.positions[:, n, own])
        np.testing.assert_allclose(logprobs[0, part][1:], alone[n, own][1:], atol=2e-5)
        assert mask[0, part].any() and not mask[0, at]
        at = part.stop
    numbers = [n for n, (t, _) in enumerate(row, 1) for _ in t.ids]
    assert together.segments[0].tolist() == numbers + [0] * 7
    assert not together.segments[1:].any() and not mask[1:].any()


@pytest.mark.slow
def test_micro_batches_give_the_gradients_of_one(model, features, rendered):
    """The gradients of rows that are split are those of all rows at once, and so is the loss."""
    skeleton, weights = model
    rows = [[each] for each in rendered[0]]
    tokens = max(len(t.ids) for t, _ in rendered[0])
    settings = SFTSettings(1, len(rows), OptimizerSettings())
    found = []
    for limit in (1, 3):
        shape = RowsShape(len(rows), tokens, visual=8).fitted(limit, devices=1)
        assert shape.microbatches == limit
        own = lay_out_rows(rows, features, shape, devices=1)
        updater = make_sft_updater(skeleton, on_mesh(weights), settings, shape)
        bank = BankPlacer(updater.mesh, shape.room(devices=1), None)(own.visual, own.grids)
        batch = jnp.asarray(own.mask)
        parts = own.microbatches
        gradients, metrics = updater.gradients(updater.initial.weights, bank, parts, batch)
        found.append((gradients, sum(map(float, metrics["loss"]))))
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-5)
    for ours, theirs in zip(*(jax.tree.leaves(gradients) for gradients, _ in found), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_frames_follow_one_another_and_tool_responses_have_no_loss(features, small_world):
    """Three conversations with frames, each with tokens by every author."""
    image = features.config.image_token_id
    row = []
    for number, shown in enumerate(small_world.videos[:3], 1):
        frames = features.overview(shown.path, number)
        prompt = np.array([3, *[image] * sum(features.tokens(f.video) for f in frames), 4])
        segments = (
            Segment(prompt, Author.PROMPT, frames=frames),
            Segment(np.array([5]), Author.PINNED),
            Segment(np.array([6, 7]), Author.MODEL, np.zeros(2, np.float32)),
            Segment(np.array([8]), Author.TOOL),
        )
        row.append(Rendered(Trajectory(segments), features(frames)))
    tokens = sum(len(trajectory.ids) for trajectory, _ in row)
    own = lay_out_rows([row], features, RowsShape(rows=1, tokens=tokens, visual=8), devices=1)
    np.testing.assert_array_equal(own.visual, np.concatenate([vectors for _, vectors in row]))
    (part,) = own.microbatches
    assert part.ids[own.mask].tolist() == [6, 7] * 3
    slots = part.visual_index[part.ids == image]
    assert slots.tolist() == list(range(len(own.visual)))


def test_the_room_of_a_row_is_what_its_conversations_show(features, rendered, small_world):
    """Sizes come from the records of conversations: no file is opened."""
    path = small_world.videos[0].path
    shown, text, two = (conversation(n, path, frames, "x") for n, frames in enumerate((4, 0, 2)))
    large = dataclasses.replace(shown.clips[0], height=64, width=64, crop=True)
    crop = dataclasses.replace(shown, turns=(ChatTurn("user", (large,)),))
    odd = dataclasses.replace(large, height=1, width=999)
    thin = dataclasses.replace(shown, turns=(ChatTurn("user", (odd,)),))
    settings = dataclasses.replace(features.settings, crop_max_pixels=4096)
    vision = features.config.vision
    assert most_visual([[shown, text], [two]], settings, vision) == 4
    assert most_visual([[shown, two, thin], [two]], settings, vision) == 6
    assert most_visual([[shown, crop]], settings, vision) == 4 + 4 * 4
    assert most_visual([[text]], settings, vision) == 0


@pytest.mark.parametrize(
    ("rows", "devices", "limit", "parts", "wanted"),
    [
        (16, 16, 1, 1, 16),
        (5, 8, 1, 1, 8),
        (16, 8, 4, 2, 16),
        (16, 16, 4, 1, 16),
        (3, 1, 2, 2, 4),
        (17, 8, 4, 3, 24),
    ],
)
def test_rows_are_padded_to_divide_over_devices(rows, devices, limit, parts, wanted):
    fitted = RowsShape(rows, 24, 5, frames=2).fitted(limit, devices)
    assert fitted == RowsShape(wanted, 24, 5, frames=2, microbatches=parts)
    assert fitted.microbatch.rows * parts == wanted
    assert fitted.room(devices) == (wanted // devices * 5, wanted // devices * 2)


def test_frames_are_encoded_once_and_changed_files_are_missing(
    small_model, small_world, small_vocabulary
):
    """Even if the store of frames keeps nothing."""
    settings = FrameSettings(min_pixels=1024, max_pixels=1024, batch=8, cache_mib=0)
    features = FrameFeatures(
        small_model.vision, small_model.config, settings, small_world.folder, source=video
    )
    chat = conversation(0, small_world.videos[0].path, 4, "two")
    rules = Protocol(small_vocabulary, ProtocolSettings())
    ((found,),), missing = render_rows([[chat]], rules, features)
    length = len(found.trajectory.ids)
    lay_out_rows([[found]], features, RowsShape(1, length, 4), devices=1)
    assert not missing and features.encoded_frames == 4
    same = dataclasses.replace(chat, tokens=length)
    changed = dataclasses.replace(chat, id="1", tokens=length + 1)
    rows, missing = render_rows([[same, changed]], rules, features)
    assert len(rows[0]) == 1
    assert missing.keys() == {"1"} and "size" in str(missing["1"])
