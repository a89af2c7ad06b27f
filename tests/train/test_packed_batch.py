"""Conversations packed into rows: each is computed as in a row of its own."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.features import FrameFeatures, FrameSettings
from models.flops import flops_per_token
from models.sharding import make_mesh
from paravt_jax.data import video
from paravt_jax.method.conversations import ChatTurn, Clip, Conversation
from paravt_jax.method.protocol import Protocol, ProtocolSettings
from paravt_jax.method.records import Author, Segment, Trajectory
from train.learn import speed
from train.learn.optimizer import OptimizerSettings
from train.learn.packed_batch import (
    PackedRows,
    PackedShape,
    Rendered,
    build_packed,
    fit_rows,
    most_visual,
    parts_of_rows,
    place_packed,
    render_rows,
)
from train.learn.sft import SFTBatch, SFTSettings, packed_logprobs, sft_loss


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
    return Conversation(str(n), "s", False, (asked, ChatTurn("assistant", (answer,))))


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


def placed(rows, features, shape: PackedShape) -> PackedRows:
    """Rows on one device, with their visual vectors."""
    packed, visual = build_packed(rows, features, shape)
    return place_packed(packed, visual, shape.visual, make_mesh(1, 1, 1))


@pytest.mark.slow
def test_packing_changes_no_conversation(small_model, features, rendered):
    """Log-probs and trained tokens are the same in a shared row and in a row of its own."""
    row = rendered[0]
    length = sum(len(t.ids) for t, _ in row) + 7
    shape = PackedShape(rows=4, tokens=length, visual=8)
    logprobs = jax.jit(
        lambda batch: packed_logprobs(small_model.text, batch, small_model.config.image_token_id)
    )
    on_device = placed([row], features, shape)
    together = np.asarray(logprobs(on_device))
    apart = np.asarray(logprobs(placed([[t] for t in row], features, shape)))
    packed, _ = build_packed([row], features, shape)
    alone, _ = build_packed([[t] for t in row], features, shape)
    at = 0
    for n, (trajectory, _) in enumerate(row):
        part = slice(at, at + len(trajectory.ids))
        own = slice(0, len(trajectory.ids))
        np.testing.assert_array_equal(packed.sampled[0, part], alone.sampled[n, own])
        np.testing.assert_array_equal(packed.positions[:, 0, part], alone.positions[:, n, own])
        np.testing.assert_allclose(together[0, part][1:], apart[n, own][1:], atol=2e-5)
        assert packed.sampled[0, part].any() and not packed.sampled[0, at]
        at = part.stop
    loss, figures = sft_loss(small_model.config.image_token_id)(
        small_model.text, SFTBatch(on_device, jnp.asarray(packed.sampled.sum(), jnp.float32))
    )
    assert float(loss) == pytest.approx(-together[packed.sampled].mean(), rel=1e-5)
    assert (int(figures["tokens"]), int(figures["conversations"])) == (packed.sampled.sum(), 3)
    numbers = [n for n, (t, _) in enumerate(row, 1) for _ in t.ids]
    assert packed.segments[0].tolist() == numbers + [0] * 7
    assert not packed.segments[1:].any() and not packed.sampled[1:].any()


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
    batch, (visual,) = build_packed([row], features, PackedShape(rows=1, tokens=tokens, visual=8))
    np.testing.assert_array_equal(visual, np.concatenate([vectors for _, vectors in row]))
    assert batch.ids[batch.sampled].tolist() == [6, 7] * 3


def test_rows_that_do_not_fit_are_refused(features, rendered):
    row = rendered[0]
    tokens = sum(len(t.ids) for t, _ in row)
    for shape, words in (
        (
            PackedShape(1, tokens - 1, 8),
            rf"packed\.tokens: {tokens} ",
        ),
        (PackedShape(1, tokens, 5), r"packed\.visual: 6 "),
    ):
        with pytest.raises(ValueError, match=words):
            build_packed([row], features, shape)
    with pytest.raises(ValueError, match="packed.rows: 2"):
        build_packed([row, row], features, PackedShape(1, tokens, 8))
    with pytest.raises(ValueError, match="PackedShape.rows: 0"):
        PackedShape(0, 1, 1)
    with pytest.raises(ValueError, match=r"sft\.rows: 0"):
        SFTSettings(1, 0, OptimizerSettings())


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


def test_flops_of_a_packed_row_are_those_of_its_conversations(small_model, features, rendered):
    """Neither the whole row as one sequence nor padding is counted."""
    lengths = [len(t.ids) for t, _ in rendered[0]]
    packed, _ = build_packed(rendered, features, PackedShape(3, sum(lengths) + 9, 8))
    alone = sum(
        flops_per_token(small_model.config, seen)
        for n in (*lengths, len(rendered[1][0].trajectory.ids))
        for seen in range(1, n + 1)
    )
    found = speed.conversation_lengths(packed)
    assert speed.update_flops(found, small_model.config) == pytest.approx(3 * alone)
    assert speed.real_tokens(found) == sum(lengths) + len(rendered[1][0].trajectory.ids)


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
    shape = PackedShape(rows, 24, 5)
    assert parts_of_rows(shape, devices, limit) == parts
    assert fit_rows(shape, devices, parts) == PackedShape(wanted, 24, 5)


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
    build_packed([[found]], features, PackedShape(1, length, 4))
    assert not missing and features.encoded_frames == 4
    same = dataclasses.replace(chat, tokens=length)
    changed = dataclasses.replace(chat, id="1", tokens=length + 1)
    rows, missing = render_rows([[same, changed]], rules, features)
    assert len(rows[0]) == 1
    assert missing.keys() == {"1"} and "size" in str(missing["1"])
