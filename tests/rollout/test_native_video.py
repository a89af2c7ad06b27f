"""An overview as a native video: what the model gets is what Qwen3-VL's processor makes."""

from __future__ import annotations

import base64
import dataclasses
import json

import numpy as np
import pytest

from models.features import FrameFeatures, FrameSettings
from models.processor import Processor
from models.vision import frame_layout
from models.weights.hf_config import from_hf
from paravt_jax.data import video
from paravt_jax.data.sizes import video_size
from paravt_jax.method import tokenizer
from paravt_jax.method.protocol import Protocol, ProtocolSettings, question_text
from rollout.agent.endpoint import FrameImages, messages
from rollout.agent.episode import Environment, EpisodeSettings, play
from rollout.engine.engine import Engine
from rollout.engine.requests import Request, Sampling, run
from rollout.engine.sequences import make_prompt
from rollout.engine.settings import EngineSizes
from rollout.evaluation.native_video import (
    VideoRules,
    most_video_tokens,
    read_video_overview,
    video_overview,
)
from rollout.evaluation.settings import BenchmarkSettings


def test_frames_come_in_pairs_with_both_ends(small_features, small_questions):
    name = small_questions[0].video
    last = small_features.info(name).frames - 1
    pairs = video_overview(small_features, name, 7)
    assert len(pairs) == 4 and {pair.rules.frames for pair in pairs} == {7}
    assert pairs[0].index == 0 and pairs[-1].index == pairs[-1].second == last
    times = small_features.info(name).times
    for pair in pairs:
        assert pair.time == (times[pair.index] + times[pair.second]) / 2


def test_a_pair_has_features_of_its_own(small_features, small_questions):
    pairs = video_overview(small_features, small_questions[0].video, 6)
    single = dataclasses.replace(pairs[0], second=None, rules=None)
    other = dataclasses.replace(pairs[0], second=pairs[1].second)
    assert len({small_features.key(frame) for frame in (pairs[0], single, other)}) == 3
    vectors = small_features([pairs[0], single, other])
    tokens = small_features.tokens(pairs[0])
    assert not np.array_equal(vectors[:tokens], vectors[-tokens:])
    encoded = small_features.encoded_frames
    np.testing.assert_array_equal(small_features([pairs[0]]), vectors[:tokens])
    assert small_features.encoded_frames == encoded


@pytest.mark.parametrize("frames", [4, 5, 60, 399, 768])
def test_no_video_has_more_tokens_than_the_bound(frames):
    rules = VideoRules(frames)
    for size in ((720, 1280), (1080, 1920), (2160, 3840), (480, 360)):
        height, width = rules.sizes(*size)[0]
        assert (height, width) == video_size(frames, *size, (4096, 25_165_824))
        tokens = height * width // 1024
        assert tokens <= rules.most_tokens
        assert -(-frames // 2) * tokens <= most_video_tokens(frames)


@pytest.fixture(scope="module")
def published(assets) -> Processor:
    """The published processor, with its tokenizer and token ids."""
    folder = assets / "qwen3_vl"
    return Processor.load(folder, from_hf(folder / "config.json"))


@pytest.mark.slow
@pytest.mark.parametrize("most", [6, 7])
def test_tokens_positions_and_pixels_equal_the_processors(
    assets, published, small_world, small_model, small_questions, most
):
    config = dataclasses.replace(
        published.config, vision=small_model.config.vision, text=small_model.config.text
    )
    processor = dataclasses.replace(published, config=config)
    features = FrameFeatures(
        small_model.vision, config, FrameSettings(batch=2), small_world.folder, source=video
    )
    vocabulary = tokenizer.load(assets / "qwen3_vl")
    settings = ProtocolSettings(frame_times=False)
    protocol = Protocol(vocabulary, settings)
    question = small_questions[0]

    pairs = video_overview(features, question.video, most)
    overview = protocol.overview(pairs, features.tokens(pairs[0]))
    ids = np.concatenate([overview.ids, protocol.question(question).ids])
    prompt = make_prompt(Request(ids, pairs, Sampling(4, 0.0), (0,)), features, config, 1.0)

    indices = [i for pair in pairs for i in pair.indices][:most]
    frames = video.read(small_world.folder / question.video, indices)
    clip = (frames, features.info(question.video).times[indices].tolist())
    system = protocol.system().removeprefix("<|im_start|>system\n")
    messages = [
        {"role": "system", "content": system.removesuffix("<|im_end|>\n")},
        {
            "role": "user",
            "content": [
                {"type": "video", "video": clip},
                {"type": "text", "text": question_text(question)},
            ],
        },
    ]
    inputs = processor(messages)
    np.testing.assert_array_equal(ids, inputs.ids)
    np.testing.assert_array_equal(prompt.positions, inputs.positions)
    np.testing.assert_array_equal(prompt.visual, inputs.visual_index >= 0)
    assert inputs.grids == [(len(pairs), *features.grid(pairs[0]))]
    layout = frame_layout(features.grid(pairs[0]), config.vision)
    patches = inputs.patches.reshape(len(pairs), -1, config.vision.patch_dim)
    expected = np.asarray(small_model.vision(patches, layout))
    np.testing.assert_allclose(
        features(pairs), expected.reshape(-1, *expected.shape[2:]), atol=1e-5
    )


def test_an_episode_shows_the_video_and_the_engine_reads_it(
    small_model, small_features, small_vocabulary, small_questions
):
    limits = ProtocolSettings(turn_tokens=8, summary_tokens=8, trajectory_tokens=128)
    protocol = Protocol(small_vocabulary, limits)
    environment = Environment(protocol, small_features, overview=read_video_overview)
    sizes = EngineSizes(
        row_lengths=(1024,), prefill_lengths=(256,), slots=4, rows_per_prefix=2, pages=200
    )
    engine = Engine(small_model, small_features, sizes)
    setting = EpisodeSettings(8, 0.0, "none")
    (episode,) = run(engine, [play(environment, small_questions[0], setting, seed=0)])
    assert len(episode.trajectory.frames) == 4 and episode.turns
    pads = episode.trajectory.segments[0].ids == small_vocabulary["<|video_pad|>"]
    assert pads.sum() == 4 * small_features.tokens(episode.trajectory.frames[0])


def test_a_server_gets_the_file_itself(small_model, small_world, small_vocabulary, small_questions):
    question = small_questions[0]
    images = FrameImages(small_model.config, FrameSettings(), small_world.folder, source=video)
    protocol = Protocol(small_vocabulary, ProtocolSettings())
    pairs = video_overview(images, question.video, 6)
    overview = protocol.overview(pairs, images.tokens(pairs[0]))
    ids = np.concatenate([overview.ids, protocol.question(question).ids])
    chat = messages(Request(ids, pairs, Sampling(4, 0.0), (0,)), small_vocabulary, images)
    shown, asked = chat[1]["content"]
    content = shown["video_url"]["url"].removeprefix("data:video/mp4;base64,")
    assert base64.b64decode(content) == (small_world.folder / question.video).read_bytes()
    assert asked["type"] == "text" and question.text in asked["text"]
    assert "seconds>" not in json.dumps(asked)


def test_a_native_video_of_fewer_than_four_frames_is_refused():
    with pytest.raises(ValueError, match="at least 4 frames"):
        BenchmarkSettings("m", native_video=True, k=3)
