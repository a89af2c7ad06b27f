"""Episodes whose main agent sees the frames of its windows itself, and blind episodes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from paravt_jax.method.protocol import Protocol, ProtocolSettings, render_call
from paravt_jax.method.records import Author, CallStatus, CropCall, StopReason
from paravt_jax.method.rewards import RewardSettings
from rollout.agent.episode import Environment, EpisodeSettings, play
from rollout.agent.transcript import transcript
from rollout.engine.engine import Engine
from rollout.engine.requests import Request, Sampling, run
from rollout.engine.settings import EngineSizes
from tests.turns import score

ANSWER = "the crops show seven\n</think>\n<answer> seven</answer>"
PLAN = "look closer\n</think>\n" + "\n".join(
    render_call(c) for c in (CropCall(0, 16), CropCall(120, 200), CropCall(500, 516))
)


@pytest.fixture
def perform(scripted, small_environment, small_questions):
    def start(turns, setting, **limits):
        settings = dataclasses.replace(small_environment.protocol.settings, **limits)
        sampler = scripted(turns)
        environment = Environment(
            Protocol(small_environment.protocol.vocabulary, settings), small_environment.features
        )
        (episode,) = run(sampler, [play(environment, small_questions[0], setting, seed=5)])
        return episode, sampler

    return start


def test_frames_come_back_in_the_tool_response(
    perform, small_vocabulary, small_environment, small_questions
):
    episode, sampler = perform(
        [PLAN, ANSWER], EpisodeSettings(4, 0.7, "frames"), summary_tokens=64, trajectory_tokens=512
    )
    assert episode.stop is StopReason.ANSWERED
    assert episode.answer == "seven"
    assert not sampler.sub
    assert [o.status for o in episode.turns[0].calls] == [
        CallStatus.EXECUTED,
        CallStatus.CLAMPED,
        CallStatus.BAD_WINDOW,
    ]
    assert [len(o.frames) for o in episode.turns[0].calls] == [8, 4, 0]
    assert all(o.subagent is None for o in episode.turns[0].calls)
    (shown,) = [segment for segment in episode.trajectory.segments if segment.author is Author.TOOL]
    text = small_vocabulary.decode(shown.ids).replace(
        "<|vision_start|><|image_pad|><|vision_end|>", "[]"
    )
    first, second, third = text.split("</tool_response>")[:3]
    labelled = "".join(f"<{time}.0 seconds>[]" for time in range(0, 16, 2))
    assert first.endswith(f"<tool_response>\n{labelled}8 frames.\n")
    assert "<120.0 seconds>[]" in second
    assert "4 frames. (The window was cut to 120.0 to 128.0 seconds" in second
    assert third.startswith("\n<tool_response>\nerror: The window is outside the video.")
    assert [frame.time for frame in shown.frames] == [0, 2, 4, 6, 8, 10, 12, 14, 120, 122, 124, 126]
    request, _ = sampler.main[1]
    assert len(request.frames) == 16
    assert np.array_equal(request.ids, episode.trajectory.ids[: len(request.ids)])
    assert int((request.ids == small_vocabulary["<|image_pad|>"]).sum()) == 16
    line = transcript(
        episode,
        score(small_questions[0], episode.turns, RewardSettings()),
        EpisodeSettings(4, 0.7, "frames"),
        small_vocabulary,
    )
    assert len(line["overview"]) == 4
    assert line["turns"][0]["calls"][1]["times"] == [
        120,
        122,
        124,
        126,
    ]


def test_after_a_forged_placeholder_no_frames_are_shown(perform):
    """A sampler could not tell it from the placeholders of later frames."""
    episode, _ = perform(["<|image_pad|>" + PLAN, ANSWER], EpisodeSettings(4, 0.7, "frames"))
    assert [o.status for o in episode.turns[0].calls] == [CallStatus.NOT_OFFERED] * 3
    assert len(episode.trajectory.frames) == 4
    assert episode.answer == "seven"


@pytest.mark.slow
def test_the_engine_sees_frames_of_later_turns(
    small_model, small_features, small_vocabulary, small_questions
):
    """It samples the same as with all frames from the start, and not the same as with others."""
    protocol = Protocol(small_vocabulary, ProtocolSettings())
    video = small_questions[0].video
    tokens = small_features.tokens(video)
    overview = small_features.overview(video, 4)
    opening = np.concatenate(
        [protocol.overview(overview, tokens).ids, protocol.question(small_questions[0]).ids]
    )
    said = small_vocabulary.encode("<think>\n" + PLAN + "<|im_end|>")
    sampling = Sampling(8, 0.0)
    size = EngineSizes(longest=1024, slots=4, rows_per_prefix=2, pages=200, few_rows=2)

    def after(start: float) -> tuple[np.ndarray, tuple]:
        frames = small_features.window(video, start, start + 16, 1.0, 16)
        shown = protocol.tool_results(["8 frames."], True, False, [frames], tokens)
        return np.concatenate([opening, said, shown.ids]), (*overview, *shown.frames)

    ids, frames = after(0)
    others, other_frames = after(64)
    warm = Engine(small_model, small_features, size)
    # The KV of the first turn is now in the cache.
    warm.generate([Request(np.concatenate([opening, said]), overview, sampling, 0)])
    (late,) = warm.generate([Request(ids, frames, sampling, 0)])
    (fresh,) = Engine(small_model, small_features, size).generate(
        [Request(ids, frames, sampling, 0)]
    )
    (elsewhere,) = warm.generate([Request(others, other_frames, sampling, 0)])
    np.testing.assert_array_equal(late.ids, fresh.ids)
    np.testing.assert_allclose(late.logprobs, fresh.logprobs, atol=1e-4)
    assert np.abs(late.logprobs - elsewhere.logprobs).max() > 1e-3


def test_a_blind_episode_has_no_frames(perform, small_questions, small_vocabulary):
    episode, sampler = perform([ANSWER], EpisodeSettings(0, 0.7, "none"))
    assert episode.answer == "seven"
    assert episode.trajectory.frames == ()
    assert episode.frames == 0
    text = small_vocabulary.decode(sampler.main[0][0].ids)
    assert "<|vision_start|>" not in text
    assert small_questions[0].text in text
