"""Property-based: for any text of the model, an episode ends with valid outcomes and ids."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paravt_jax.method.parsing import extract_answer
from paravt_jax.method.protocol import Protocol
from paravt_jax.method.records import Author, CallStatus, CropCall, StopReason
from paravt_jax.method.rewards import RewardSettings
from paravt_jax.method.scoring import score
from paravt_jax.method.structure import find_structure
from rollout.agent.episode import Environment, EpisodeSettings, play, split_prompt
from rollout.agent.transcript import transcript
from rollout.engine.requests import run

_TAGS = [
    f"<{slash}{name}>"
    for name in ("think", "tool_call", "tool_code", "tool_response", "answer")
    for slash in ("", "/")
]
_CONTROL = [
    "<|im_end|>",
    "<|im_start|>",
    "<|endoftext|>",
    "<|image_pad|>",
    "<|vision_start|>",
    "<|video_pad|>",
]
_NUMBERS = [
    "0",
    "16",
    "-5",
    "128",
    "1e308",
    "1e999",
    "NaN",
    "Infinity",
    "-Infinity",
    "1e-320",
    "9" * 30,
    '"16"',
    '"0:16"',
    "true",
    "null",
    "[]",
]
_WORDS = [
    " seven",
    "\n",
    "{",
    "}",
    '"',
    '"name": "crop_video"',
    '"arguments": ',
    "crop_video",
    "\ud7ff",
    "é",
    "\x00",
    "[8, 10]",
    "../../etc/passwd",
]


def _call(path: str, start: str, end: str) -> str:
    arguments = f'{{"video_path": "{path}", "start_time": {start}, "end_time": {end}}}'
    return f'<tool_call>\n{{"name": "crop_video", "arguments": {arguments}}}\n</tool_call>'


_TIMES = st.one_of(st.sampled_from(_NUMBERS), st.integers(-20, 200).map(str), st.floats().map(str))
_CALLS = st.builds(_call, st.sampled_from(["video.mp4", "/etc/passwd"]), _TIMES, _TIMES)
_PARTS = st.one_of(
    _CALLS,
    _CALLS,
    st.sampled_from(_TAGS),
    st.sampled_from(_CONTROL),
    st.sampled_from(_WORDS),
    _CALLS,
    st.text(max_size=6),
)
_LINES = st.lists(_PARTS, max_size=8).map("".join)


@st.composite
def lines(draw, vocabulary) -> list[int]:
    """A response as ids: text, sometimes arbitrary or unused ids, with or without an end."""
    ids = vocabulary.encode(draw(_LINES)).tolist()
    if draw(st.integers(0, 3)) == 0:
        ids += draw(
            st.lists(st.integers(0, vocabulary.size + 1) | st.just(vocabulary.size), max_size=8)
        )
    return ids + draw(st.sampled_from([[vocabulary.eos], [vocabulary.eos], []]))


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["parallel", "sequential", "none"])
@settings(max_examples=60)
@given(data=st.data())
def test_any_text_gives_a_typed_outcome_and_ids_that_only_grow(
    scripted, small_environment, small_questions, dispatch, data
):
    vocabulary = small_environment.protocol.vocabulary
    room = data.draw(st.sampled_from([1, 2, 8]))
    limits = dataclasses.replace(
        small_environment.protocol.settings, turn_tokens=64 * room, trajectory_tokens=200 * room
    )
    turns = data.draw(st.lists(lines(vocabulary), min_size=1, max_size=4))
    report = data.draw(lines(vocabulary))
    sampler = scripted(turns, report=report)
    setting = EpisodeSettings(4, 0.7, dispatch)
    environment = Environment(Protocol(vocabulary, limits), small_environment.features)
    (episode,) = run(sampler, [play(environment, small_questions[0], setting, seed=1)])

    ids = episode.trajectory.ids
    for request, sample in sampler.main:
        fed = np.concatenate([request.ids, sample.ids])
        assert np.array_equal(ids[: len(fed)], fed)
    assert (
        len(episode.turns)
        == len(sampler.main)
        <= (limits.max_tool_turns if dispatch != "none" else 0) + 2
    )
    assert len(split_prompt(episode.trajectory)[1]) <= limits.trajectory_tokens
    segments = [
        segment for segment in episode.trajectory.segments if segment.author is Author.MODEL
    ]
    assert [s.ids.tolist() for s in segments] == [s.ids.tolist() for _, s in sampler.main]

    assert isinstance(episode.stop, StopReason)
    assert episode.stop is not StopReason.UNREADABLE
    assert (episode.answer is not None) == (episode.stop is StopReason.ANSWERED)
    if episode.stop is StopReason.ANSWERED:
        assert episode.answer == extract_answer(episode.turns[-1].text)
    outcomes = [outcome for turn in episode.turns for outcome in turn.calls]
    assert all(
        isinstance(o.status, CallStatus) and (o.subagent is not None) == o.status.executed
        for o in outcomes
    )
    assert len(sampler.sub) == sum(o.status.executed for o in outcomes)
    assert all(
        sum(o.status.executed for o in turn.calls)
        <= (1 if dispatch == "sequential" else limits.max_calls)
        for turn in episode.turns
    )
    assert all(len(vocabulary.encode(o.response)) <= limits.summary_tokens for o in outcomes)
    for outcome in outcomes:
        if outcome.subagent is not None and isinstance(outcome.call, CropCall):
            assert 0 <= outcome.call.start < outcome.call.end <= 128
            assert 1 <= len(outcome.subagent.frames) <= limits.crop_frames

    positions, _ = find_structure(vocabulary.token_bytes, ids, episode.trajectory.authors)
    assert all(episode.trajectory.authors[p] == Author.MODEL for p in positions)
    rewards = score(episode.question, episode.turns, RewardSettings())
    assert np.isfinite(rewards.total)
    json.dumps(
        transcript(episode, rewards, setting, vocabulary, np.zeros(len(ids))), allow_nan=False
    )
