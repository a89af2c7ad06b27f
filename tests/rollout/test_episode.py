"""Episodes with a scripted sampler: their course, dispatch, limits, time, and calls that fail."""

from __future__ import annotations

import dataclasses
import math
import shutil

import numpy as np
import pytest

from models.features import FrameFeatures, FrameSettings
from paravt_jax.data import video
from paravt_jax.data.frames import overview_indices
from paravt_jax.method.conversations import render
from paravt_jax.method.protocol import PINNED, Protocol, render_call
from paravt_jax.method.records import (
    Author,
    CallStatus,
    CropCall,
    Question,
    QuestionKind,
    StopReason,
    Trajectory,
)
from paravt_jax.world import text as world_text
from paravt_jax.world.videos import FRAMES, STEP, WINDOW
from rollout.agent.episode import Dispatch, Environment, EpisodeSettings, play, split_prompt
from rollout.engine.requests import Request, SampleStop, run
from tests.rollout.conftest import Cut, Scripted

ANSWER = "the crops show seven\n</think>\n<answer> seven</answer>"
CALLS = (CropCall(0, 16), CropCall(112, 128))


def plan(*calls: CropCall | str) -> str:
    """A response that thinks and calls; texts are calls as they are."""
    texts = [call if isinstance(call, str) else render_call(call) for call in calls]
    return "look closer\n</think>\n" + "\n".join(texts)


def raw(arguments: str, name: str = "crop_video") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.fixture
def perform(scripted, small_environment, small_questions):
    """perform(turns, ...) plays one episode and returns it with its sampler."""

    def start(
        turns,
        dispatch: Dispatch = "parallel",
        frames=4,
        environment=small_environment,
        question=small_questions[0],
        report=" seven from 8 to 10",
        **limits,
    ):
        if limits:
            settings = dataclasses.replace(environment.protocol.settings, **limits)
            environment = Environment(
                Protocol(environment.protocol.vocabulary, settings), environment.features
            )
        sampler = scripted(turns, report=report)
        (episode,) = run(
            sampler, [play(environment, question, EpisodeSettings(frames, 0.7, dispatch), seed=5)]
        )
        return episode, sampler

    return start


def test_without_a_pinned_opening_the_model_writes_it(perform):
    """All tokens of a response are then MODEL, and the prompt's last token predicts the first."""
    episode, sampler = perform(
        ["<think>\n" + plan(CropCall(0, 16)), "<think>\nso\n</think><answer>A</answer>"],
        pin_think=False,
    )
    assert Author.PINNED not in episode.trajectory.authors
    assert episode.stop is StopReason.ANSWERED
    assert len(episode.turns) == 2
    assert all(turn.text.startswith("<think>\n") for turn in episode.turns)
    prompt, _ = split_prompt(episode.trajectory)
    assert episode.trajectory.authors[len(prompt)] == Author.PROMPT
    assert episode.trajectory.authors[len(prompt) + 1] == Author.MODEL
    assert sampled_ids_are_kept(episode, sampler)


def statuses(episode, turn: int = 0) -> list[CallStatus]:
    return [outcome.status for outcome in episode.turns[turn].calls]


def sampled_ids_are_kept(episode, sampler) -> bool:
    """Whether the trajectory begins with each request's ids and sample: no id was changed."""
    ids = episode.trajectory.ids
    fed = [np.concatenate([request.ids, sample.ids]) for request, sample in sampler.main]
    if len(fed) != len(episode.turns):
        return False
    return all(np.array_equal(ids[: len(beginning)], beginning) for beginning in fed)


# --- course ---


def test_plan_dispatch_gather_answer(perform, small_vocabulary, small_environment, small_questions):
    episode, sampler = perform([plan(*CALLS), ANSWER])
    assert episode.stop is StopReason.ANSWERED
    assert episode.answer == "seven"
    assert episode.frames == 4
    assert [turn.text for turn in episode.turns] == [PINNED + plan(*CALLS), PINNED + ANSWER]
    assert statuses(episode) == [CallStatus.EXECUTED] * 2
    assert [o.call for o in episode.turns[0].calls] == list(CALLS)
    assert [o.response for o in episode.turns[0].calls] == [" seven from 8 to 10"] * 2
    assert [len(wave) for wave in sampler.waves] == [1, 2, 1]  # both sub-agents at once
    authors = [segment.author for segment in episode.trajectory.segments]
    assert authors == [
        Author.PROMPT,
        Author.PROMPT,
        Author.PINNED,
        Author.MODEL,
        Author.TOOL,
        Author.PINNED,
        Author.MODEL,
    ]
    assert [frame.index for frame in episode.trajectory.frames] == overview_indices(
        FRAMES, 4
    ).tolist()
    for (request, sample), outcome in zip(sampler.sub, episode.turns[0].calls, strict=True):
        assert outcome.call is not None
        assert outcome.subagent is not None
        start = int(outcome.call.start)
        assert [f.time for f in request.frames] == list(range(start, start + 16, STEP))
        assert request.frames == outcome.subagent.frames
        assert {f.video for f in request.frames} == {small_questions[0].video}
        assert len(request.ids)
        assert np.array_equal(np.concatenate([request.ids, sample.ids]), outcome.subagent.ids)
        assert np.array_equal(outcome.subagent.segments[-1].logprobs, sample.logprobs)
        assert outcome.subagent.segments[-1].digest == sample.digest
        assert (outcome.subagent.versions[-len(sample.ids) :] == sample.versions).all()
    written = [s for s in episode.trajectory.segments if s.author is Author.MODEL]
    assert [s.digest for s in written] == [s.digest for _, s in sampler.main]
    assert set(episode.trajectory.versions.tolist()) == {-1, 7}
    assert all(
        np.array_equal(s.logprobs, said.logprobs)
        for s, (_, said) in zip(written, sampler.main, strict=True)
    )
    assert sampled_ids_are_kept(episode, sampler)


def test_every_request_has_a_seed_of_its_own_and_the_settings_temperature(perform):
    _, sampler = perform([plan(*CALLS), plan(*CALLS), ANSWER])
    assert len({request.seed for request in sampler.asked}) == len(sampler.asked) == 7
    assert {request.sampling.temperature for request in sampler.asked} == {0.7}
    assert [request.seed for request in perform([plan(*CALLS), plan(*CALLS), ANSWER])[1].asked] == [
        r.seed for r in sampler.asked
    ]


def test_an_episode_with_a_demonstrations_texts_has_its_ids(
    scripted, small_environment, small_world
):
    """What is learned from and what is played are written alike: ids, authors and frames."""
    settings = world_text.TextSettings(
        leak=0.0, groups=3, look=1.0, look_when_shown=0.5, both=1.0, one_by_one=0.3
    )
    seen = set()
    for conversation in world_text.main_conversations(small_world.videos, settings):
        (clip,) = conversation.clips
        asked = str(conversation.turns[0].content[1])  # with its options, if any
        question = Question(conversation.id, clip.path, asked, QuestionKind.OPEN_ENDED, "")
        spoken = [
            str(turn.content[0]).removeprefix(PINNED)
            for turn in conversation.turns
            if turn.role == "assistant"
        ]
        reports = iter([t.content[0] for t in conversation.turns if t.role == "tool"])
        sampler = scripted(spoken, report=lambda request, reports=reports: next(reports))
        wanted = render(conversation, small_environment.protocol, lambda _: 1)
        dispatch = "parallel" if conversation.tools else "none"
        setting = EpisodeSettings(len(clip.indices), 0.7, dispatch)
        (episode,) = run(sampler, [play(small_environment, question, setting, 0)])
        # A demonstration trains on the opening that an episode pins.
        authors = episode.trajectory.authors
        played = np.where(authors == Author.PINNED, Author.MODEL, authors)
        assert np.array_equal(episode.trajectory.ids, wanted.ids)
        assert np.array_equal(played, wanted.authors)
        assert episode.trajectory.frames == wanted.frames
        seen.add((dispatch, len(episode.turns)))
    assert seen == {("none", 1), ("parallel", 1), ("parallel", 2), ("parallel", 3)}


def test_a_sub_agent_with_a_demonstrations_text_has_its_ids(
    perform, small_environment, small_world, small_questions
):
    settings = world_text.TextSettings()
    limits = small_environment.protocol.settings
    starts = set()
    for conversation in world_text.window_conversations(small_world.videos, settings, limits):
        (clip,) = conversation.clips
        report = conversation.turns[1].content[0]
        question = dataclasses.replace(small_questions[0], video=clip.path)
        start = int(conversation.id.rpartition(":")[2])
        episode, _ = perform(
            [plan(CropCall(start, start + WINDOW)), ANSWER], question=question, report=report
        )
        wanted = render(conversation, small_environment.protocol, lambda _: 1)
        subagent = episode.turns[0].calls[0].subagent
        assert subagent is not None
        assert subagent.frames == wanted.frames
        assert np.array_equal(subagent.ids, wanted.ids)
        assert np.array_equal(subagent.authors, wanted.authors)
        starts.add(start % WINDOW)
    assert len(starts) > 2, "windows start anywhere"


def test_split_prompt_cuts_before_the_token_that_predicts_the_first_one(perform):
    episode, _ = perform([plan(*CALLS), ANSWER])
    whole = np.concatenate([s.ids for s in episode.trajectory.segments[:2]])
    for segments in (episode.trajectory.segments, episode.trajectory.segments[:2]):
        prompt, rest = split_prompt(Trajectory(segments))
        assert np.array_equal(prompt, whole[:-1])
        assert np.array_equal(np.concatenate([prompt, rest]), Trajectory(segments).ids)


# --- dispatch ---


def test_sequential_ends_a_turn_at_its_first_call(perform, small_vocabulary):
    episode, sampler = perform([plan(*CALLS), plan(CALLS[1]), ANSWER], "sequential")
    assert episode.stop is StopReason.ANSWERED
    assert len(episode.turns) == 3
    assert [statuses(episode, n) for n in (0, 1)] == [[CallStatus.EXECUTED]] * 2
    assert [o.call for n in (0, 1) for o in episode.turns[n].calls] == list(CALLS)
    assert episode.turns[0].text.endswith("</tool_call>")
    assert all(len(wave) == 1 for wave in sampler.waves)
    text = small_vocabulary.decode(episode.trajectory.ids)
    # The protocol closes the turn that the stop token left open.
    assert "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>" in text
    assert sampled_ids_are_kept(episode, sampler)


def test_no_dispatch_offers_no_tool_and_refuses_once(perform, small_vocabulary):
    episode, sampler = perform([plan(*CALLS), ANSWER], "none")
    assert episode.stop is StopReason.ANSWERED
    assert episode.answer == "seven"
    assert len(episode.turns) == 2
    assert statuses(episode) == [CallStatus.NOT_OFFERED] * 2
    assert not sampler.sub
    text = small_vocabulary.decode(episode.trajectory.ids)
    assert "crop_video" not in text.partition("<think>")[0]
    assert "No more calls can be made." in text
    stubborn, _ = perform([plan(*CALLS)], "none")
    assert stubborn.stop is StopReason.TURN_LIMIT
    assert stubborn.answer is None
    assert len(stubborn.turns) == 2


def test_a_blind_episode_has_no_frames(perform, small_questions, small_vocabulary):
    episode, sampler = perform([ANSWER], "none", frames=0)
    assert episode.answer == "seven"
    assert episode.trajectory.frames == ()
    text = small_vocabulary.decode(sampler.main[0][0].ids)
    assert "<|vision_start|>" not in text
    assert small_questions[0].text in text


def test_neither_a_call_nor_an_answer_ends_the_episode(perform):
    episode, _ = perform(["I see nothing\n</think>\n"])
    assert episode.stop is StopReason.NO_ANSWER
    assert episode.answer is None


# --- limits ---


def test_a_model_that_keeps_calling_is_stopped_after_one_refusal(perform, small_vocabulary):
    episode, sampler = perform([plan(CALLS[0])])
    assert episode.stop is StopReason.TURN_LIMIT
    assert episode.answer is None
    assert len(episode.turns) == 4
    assert [statuses(episode, n)[0].executed for n in range(4)] == [True, True, False, False]
    # Once with the last report, and once with the refusal.
    text = small_vocabulary.decode(episode.trajectory.ids)
    assert text.count("No more calls can be made.") == 2
    assert sampled_ids_are_kept(episode, sampler)


def test_an_answer_beside_a_late_call_counts(perform):
    episode, _ = perform([plan(CALLS[0]), plan(CALLS[0]), plan(CALLS[0]) + "<answer> two</answer>"])
    assert episode.stop is StopReason.ANSWERED
    assert episode.answer == "two"
    assert statuses(episode, 2) == [CallStatus.NOT_OFFERED]


def test_a_turn_that_hits_its_tokens_is_truncated(perform):
    episode, sampler = perform(["I see" * 40 + plan(*CALLS)])
    assert episode.stop is StopReason.TRUNCATED
    assert episode.answer is None
    assert episode.turns[0].truncated is True
    assert (
        [len(s.ids) for _, s in sampler.main]
        == [64]
        == [sampler.main[0][0].sampling.max_new_tokens]
    )
    assert not episode.turns[0].calls


def test_a_report_is_cut_to_its_tokens(perform, small_vocabulary):
    episode, sampler = perform([plan(CALLS[0]), ANSWER], report=" seven" * 40)
    assert {r.sampling.max_new_tokens for r, _ in sampler.sub} == {16}
    assert episode.turns[0].calls[0].response == " seven" * 16
    assert episode.stop is StopReason.ANSWERED


def test_a_full_trajectory_ends_the_episode(perform):
    whole, _ = perform([plan(*CALLS), ANSWER])
    assert whole.stop is StopReason.ANSWERED
    first = len(split_prompt(Trajectory(whole.trajectory.segments[:4]))[1])
    with_results = first + len(whole.trajectory.segments[4].ids)
    stops = {
        room: perform([plan(*CALLS), ANSWER], trajectory_tokens=room)[0].stop
        for room in (first - 1, first, with_results)
    }
    assert stops == {
        first - 1: StopReason.TRUNCATED,
        first: StopReason.TOKEN_LIMIT,
        with_results: StopReason.TOKEN_LIMIT,
    }
    needed = len(split_prompt(whole.trajectory)[1])
    assert perform([plan(*CALLS), ANSWER], trajectory_tokens=needed)[0].stop is StopReason.ANSWERED
    assert (
        perform([plan(*CALLS), ANSWER], trajectory_tokens=needed - 1)[0].stop
        is StopReason.TRUNCATED
    )


def test_calls_beyond_the_limit_of_a_turn_are_refused_one_by_one(perform):
    calls = [CropCall(n % 100, n % 100 + 16) for n in range(300)]
    episode, sampler = perform([plan(*calls), ANSWER], turn_tokens=8192, trajectory_tokens=30_000)
    assert statuses(episode) == [CallStatus.EXECUTED] * 3 + [CallStatus.TOO_MANY] * 297
    assert len(sampler.sub) == 3
    assert episode.stop is StopReason.ANSWERED
    assert sampled_ids_are_kept(episode, sampler)
    full, _ = perform([plan(*calls), ANSWER], turn_tokens=8192, trajectory_tokens=8192)
    # The 300 responses do not fit.
    assert full.stop is StopReason.TOKEN_LIMIT
    assert len(full.turns[0].calls) == 300


# --- time ---


class Slow(Scripted):
    """A sampler with a clock of its own, on which an answer takes `takes(request)` seconds.

    At its deadline an answer is cut to its first half.
    """

    def __init__(self, vocabulary, turns, report, takes):
        super().__init__(vocabulary, turns, report)
        self.takes = takes
        self.now = 0.0
        self.due: dict[int, float] = {}

    def submit(self, request: Request) -> int:
        ticket = super().submit(request)
        self.due[ticket] = self.now + min(self.takes(request), request.sampling.deadline)
        return ticket

    def step(self):
        self.now = min(self.due[ticket] for ticket in self.waiting)
        everything = self.waiting
        later = {t: request for t, request in everything.items() if self.due[t] > self.now}
        self.waiting = {t: request for t, request in everything.items() if t not in later}
        answers = super().step()
        self.waiting = later
        return answers

    def _answer(self, request: Request):
        sample = super()._answer(request)
        if self.takes(request) <= request.sampling.deadline:
            return sample
        half = len(sample.ids) // 2
        return dataclasses.replace(
            sample,
            ids=sample.ids[:half],
            logprobs=sample.logprobs[:half],
            versions=sample.versions[:half],
            stop=SampleStop.DEADLINE,
        )


@pytest.fixture
def perform_slowly(small_vocabulary, small_environment, small_questions):
    """perform_slowly(turns, takes, ...) plays an episode with a `Slow` sampler; returns both."""
    protocol = Protocol(
        small_vocabulary,
        dataclasses.replace(small_environment.protocol.settings, summary_tokens=64),
    )

    def start(turns, takes, **limits):
        sampler = Slow(small_vocabulary, turns, " seven from 8 to 10", takes)
        environment = Environment(protocol, small_environment.features, lambda: sampler.now)
        (episode,) = run(
            sampler,
            [play(environment, small_questions[0], EpisodeSettings(4, 0.7, **limits), seed=5)],
        )
        return episode, sampler

    return start


def test_the_episodes_time_cuts_a_turn(perform_slowly):
    episode, sampler = perform_slowly(
        [plan(*CALLS), plan(*CALLS), ANSWER], lambda request: 3.0, seconds=13.5
    )
    assert [r.sampling.deadline for r, _ in sampler.main] == [13.5, 7.5, 1.5]
    assert episode.stop is StopReason.TIME_LIMIT
    assert episode.answer is None
    assert len(episode.turns) == 3
    assert episode.turns[2].truncated
    assert PINNED < episode.turns[2].text < PINNED + ANSWER
    assert sampled_ids_are_kept(episode, sampler)
    assert (
        perform_slowly([plan(*CALLS), plan(*CALLS), ANSWER], lambda request: 3.0, seconds=15.0)[
            0
        ].stop
        is StopReason.ANSWERED
    )


def test_a_sub_agent_that_takes_too_long_costs_its_own_report_only(
    perform_slowly, small_vocabulary
):
    calls = (CropCall(0, 16), CropCall(40, 56), CropCall(112, 128))

    def slow(request):
        return len(request.frames) > 4 and request.frames[0].time == 40

    episode, sampler = perform_slowly(
        [plan(*calls), ANSWER], lambda r: 9.0 if slow(r) else 1.0, report_seconds=4.0
    )
    assert statuses(episode) == [CallStatus.EXECUTED, CallStatus.TIMED_OUT, CallStatus.EXECUTED]
    first, late, last = episode.turns[0].calls
    assert first.response == last.response == " seven from 8 to 10"
    assert late.response == "error: no report in time"
    assert episode.stop is StopReason.ANSWERED
    assert episode.answer == "seven"
    assert [r.sampling.deadline for r, _ in sampler.sub] == [4.0] * 3
    assert sampler.now == 1 + 4 + 1
    seen = small_vocabulary.decode(episode.trajectory.segments[4].ids)
    assert "<tool_response>\nerror: no report in time\n</tool_response>" in seen
    assert seen.count(" seven from 8 to 10") == 2
    assert late.subagent is not None
    assert late.call == calls[1]
    (said,) = [sample for request, sample in sampler.sub if slow(request)]
    assert np.array_equal(late.subagent.segments[-1].ids, said.ids)
    assert 0 < len(said.ids)
    assert said.stop is SampleStop.DEADLINE


@pytest.mark.parametrize(
    ("name", "value"),
    [("seconds", math.nan), ("report_seconds", -1.0), ("temperature", math.inf), ("frames", 0)],
)
def test_settings_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}(:| =) {value}"):
        EpisodeSettings(**({"frames": 4, "temperature": 0.7} | {name: value}))


# --- calls that go wrong ---


def test_each_call_gets_its_own_status_and_response(perform):
    """`test_parsing` has every form of a call."""
    expected = {
        CALLS[0]: CallStatus.EXECUTED,
        "<tool_call>\nplease look at the start\n</tool_call>": CallStatus.MALFORMED,
        raw('{"start_time": 0, "end_time": 16}', "open_file"): CallStatus.UNKNOWN_TOOL,
        raw('{"start_time": 500, "end_time": 516}'): CallStatus.BAD_WINDOW,
        raw('{"start_time": 120, "end_time": 500}'): CallStatus.CLAMPED,
    }
    episode, sampler = perform(
        [plan(*expected), ANSWER],
        max_calls=5,
        turn_tokens=600,
        trajectory_tokens=2000,
        summary_tokens=200,
    )
    assert statuses(episode) == list(expected.values())
    assert episode.stop is StopReason.ANSWERED
    shown = [[frame.time for frame in request.frames] for request, _ in sampler.sub]
    assert shown == [list(range(0, 16, STEP)), list(range(120, 128, STEP))]
    for outcome in episode.turns[0].calls:
        assert (outcome.subagent is not None) == outcome.status.executed
        assert outcome.response.startswith("error: ") != outcome.status.executed
        assert ("was cut to" in outcome.response) == (outcome.status is CallStatus.CLAMPED)


# --- videos ---


def test_a_bad_video_ends_one_episode(scripted, small_environment, small_questions):
    bad = dataclasses.replace(small_questions[0], video="nowhere.mp4")
    agents = [
        play(small_environment, q, EpisodeSettings(4, 0.7), 0) for q in (bad, small_questions[0])
    ]
    lost, fine = run(scripted([ANSWER]), agents)
    assert lost.stop is StopReason.UNREADABLE
    assert lost.turns == ()
    assert lost.answer is None
    assert fine.stop is StopReason.ANSWERED


def test_an_episode_whose_video_is_gone_ends_with_what_was_said(perform):
    episode, sampler = perform([plan(*CALLS), Cut("the crops", SampleStop.UNREADABLE)])
    assert episode.stop is StopReason.UNREADABLE
    assert episode.answer is None
    assert [turn.truncated for turn in episode.turns] == [False, True]
    assert sampled_ids_are_kept(episode, sampler)


def test_a_file_that_is_damaged_while_an_episode_lasts(
    scripted, small_world, small_model, small_environment, small_questions, tmp_path
):
    """Its window gets an error response, which does not show the path."""
    name = small_questions[0].video
    (tmp_path / name).parent.mkdir()
    shutil.copy(small_world.folder / name, tmp_path / name)
    features = FrameFeatures(
        small_model.vision,
        small_model.config,
        FrameSettings(batch=64, cache_mib=0),
        tmp_path,
        source=video,
    )

    def turns(request: Request) -> str:
        if sampler.is_first(request):
            (tmp_path / name).write_bytes(bytes(range(256)) * 64)
            return plan(CALLS[0])
        return ANSWER

    sampler = scripted(turns)
    settings = dataclasses.replace(small_environment.protocol.settings, summary_tokens=1024)
    environment = Environment(Protocol(small_environment.protocol.vocabulary, settings), features)
    (episode,) = run(sampler, [play(environment, small_questions[0], EpisodeSettings(4, 0.7), 0)])
    (outcome,) = episode.turns[0].calls
    assert outcome.status is CallStatus.UNREADABLE
    assert episode.stop is StopReason.ANSWERED
    assert not sampler.sub
    assert outcome.response.startswith("error: the video cannot be read there (")
    assert str(tmp_path) not in outcome.response
