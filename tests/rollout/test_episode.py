"""Episodes on a script: plan, dispatch, gather, answer; every limit; every way in which a call can go wrong."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from models.features import FrameFeatures
from paravt_jax import video, world_text
from paravt_jax.protocol import PINNED, Protocol, render_call
from paravt_jax.records import Author, CallStatus, CropCall, QuestionKind, StopReason, Trajectory
from paravt_jax.video import VideoError
from paravt_jax.world import FRAMES, STEP
from rollout.episode import Dispatch, Scene, Setting, play, split_prompt
from rollout.requests import run

ANSWER = "the crops show seven\n</think>\n<answer> seven</answer>"
CALLS = (CropCall(0, 16), CropCall(112, 128))


def plan(*calls: CropCall | str) -> str:
    return "look closer\n</think>\n" + "\n".join(c if isinstance(c, str) else render_call(c) for c in calls)


def raw(arguments: str, name: str = "crop_video") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.fixture
def perform(scripted, small_scene, small_questions):
    """perform(turns, ...) plays one episode on a script and gives it with its sampler."""

    def start(
        turns, dispatch: Dispatch = "parallel", scene=small_scene, question=small_questions[0], report=" seven from 8 to 10", **limits
    ):
        if limits:
            settings = dataclasses.replace(scene.protocol.settings, **limits)
            scene = Scene(Protocol(scene.protocol.vocabulary, settings), scene.features)
        sampler = scripted(turns, report=report)
        (episode,) = run(sampler, [play(scene, question, Setting(4, 0.7, dispatch), seed=5)])
        return episode, sampler

    return start


def statuses(episode, turn: int = 0) -> list[CallStatus]:
    return [outcome.status for outcome in episode.turns[turn].calls]


def is_fed_what_it_became(episode, sampler) -> bool:
    """Whether each request and its sample are together the beginning of the trajectory, so that nothing was changed afterwards."""
    ids = episode.trajectory.ids
    fed = [np.concatenate([r.prompt, r.suffix, s.ids]) for r, s in sampler.main]
    return len(fed) == len(episode.turns) and all(np.array_equal(ids[: len(f)], f) for f in fed)


# --- the course of an episode ---


def test_plan_dispatch_gather_answer(perform, small_vocabulary, small_scene, small_questions):
    episode, sampler = perform([plan(*CALLS), ANSWER])
    assert (episode.stop, episode.answer, episode.frames) == (StopReason.ANSWERED, "seven", 4)
    assert [turn.text for turn in episode.turns] == [PINNED + plan(*CALLS), PINNED + ANSWER]
    assert statuses(episode) == [CallStatus.EXECUTED] * 2 and [o.call for o in episode.turns[0].calls] == list(CALLS)
    assert [o.response for o in episode.turns[0].calls] == [" seven from 8 to 10"] * 2
    assert [len(wave) for wave in sampler.waves] == [1, 2, 1]  # both sub-agents at once
    authors = [segment.author for segment in episode.trajectory.segments]
    assert authors == [Author.PROMPT, Author.PROMPT, Author.PINNED, Author.MODEL, Author.TOOL, Author.PINNED, Author.MODEL]
    assert [frame.index for frame in episode.trajectory.frames] == video.overview_indices(FRAMES, 4).tolist()
    for (request, sample), outcome in zip(sampler.sub, episode.turns[0].calls, strict=True):
        assert outcome.call is not None and outcome.subagent is not None
        start = int(outcome.call.start)
        assert [f.time for f in request.frames] == list(range(start, start + 16, STEP)) and request.frames == outcome.subagent.frames
        assert {f.video for f in request.frames} == {small_questions[0].video}
        assert len(request.suffix) and np.array_equal(np.concatenate([request.prompt, request.suffix, sample.ids]), outcome.subagent.ids)
        assert np.array_equal(outcome.subagent.segments[-1].logprobs, sample.logprobs)
        assert (outcome.subagent.segments[-1].digest, outcome.subagent.version) == (sample.digest, sample.version)
    written = [s for s in episode.trajectory.segments if s.author is Author.MODEL]
    assert [s.digest for s in written] == [s.digest for _, s in sampler.main] and episode.trajectory.version == 7
    assert all(np.array_equal(s.logprobs, said.logprobs) for s, (_, said) in zip(written, sampler.main, strict=True))
    assert is_fed_what_it_became(episode, sampler)


def test_every_request_has_a_seed_of_its_own_and_the_settings_temperature(perform):
    _, sampler = perform([plan(*CALLS), plan(*CALLS), ANSWER])
    assert len({request.seed for request in sampler.asked}) == len(sampler.asked) == 7
    assert {request.temperature for request in sampler.asked} == {0.7}
    assert [request.seed for request in perform([plan(*CALLS), plan(*CALLS), ANSWER])[1].asked] == [r.seed for r in sampler.asked]


def test_episodes_side_by_side_do_not_disturb_one_another(scripted, small_scene, small_questions, perform):
    lines = {q.video: [plan(CropCall(16 * n, 16 * n + 16)), ANSWER] for n, q in enumerate(small_questions)}
    sampler = scripted(lambda request: lines[request.frames[0].video][int(len(request.suffix) > 4)])
    together = run(sampler, [play(small_scene, q, Setting(4, 0.7), n) for n, q in enumerate(small_questions)])
    for n, (question, episode) in enumerate(zip(small_questions, together, strict=True)):
        (alone,) = run(scripted(lines[question.video]), [play(small_scene, question, Setting(4, 0.7), n)])
        assert (
            np.array_equal(alone.trajectory.ids, episode.trajectory.ids) and alone.turns[0].calls[0].call == episode.turns[0].calls[0].call
        )


def test_an_episode_with_a_demonstrations_texts_has_its_ids(scripted, small_scene, small_world):
    """What is learned from and what is played are written alike: ids, authors and frames."""
    groups = world_text.main_demonstrations(small_world.videos, world_text.TextSettings(leak=0.0))
    seen = set()
    for demonstration in itertools.chain.from_iterable(groups):
        assert demonstration.question is not None
        spoken = [m.content for m in demonstration.messages if m.role == "assistant"]
        reports = iter([m.content for m in demonstration.messages if m.role == "tool"])
        sampler = scripted(spoken, report=lambda request, reports=reports: next(reports))
        frames = small_scene.features.overview(demonstration.video, demonstration.frames)
        wanted = small_scene.protocol.demonstration(demonstration, frames, image_tokens=1)
        (episode,) = run(sampler, [play(small_scene, demonstration.question, Setting(demonstration.frames, 0.7), 0)])
        assert np.array_equal(episode.trajectory.ids, wanted.ids) and np.array_equal(episode.trajectory.authors, wanted.authors)
        assert episode.trajectory.frames == wanted.frames
        seen.add(len(episode.turns))
    assert seen == {1, 2, 3}


def test_a_sub_agent_with_a_demonstrations_text_has_its_ids(perform, small_scene, small_world, small_questions):
    settings = world_text.TextSettings(unaligned=1.0)
    for demonstration in world_text.window_demonstrations(small_world.videos, settings):
        question = dataclasses.replace(small_questions[0], video=demonstration.video)
        assert demonstration.window is not None
        episode, _ = perform([plan(CropCall(*demonstration.window)), ANSWER], question=question, report=demonstration.messages[0].content)
        frames = small_scene.features.window(demonstration.video, *demonstration.window, 1.0, 16)
        wanted, subagent = small_scene.protocol.demonstration(demonstration, frames, 1), episode.turns[0].calls[0].subagent
        assert subagent is not None and np.array_equal(subagent.ids, wanted.ids) and np.array_equal(subagent.authors, wanted.authors)


def test_split_prompt_cuts_before_the_token_that_predicts_the_first_one(perform):
    episode, _ = perform([plan(*CALLS), ANSWER])
    whole = np.concatenate([s.ids for s in episode.trajectory.segments[:2]])
    for segments in (episode.trajectory.segments, episode.trajectory.segments[:2]):
        prompt, rest = split_prompt(Trajectory(segments))
        assert np.array_equal(prompt, whole[:-1]) and np.array_equal(np.concatenate([prompt, rest]), Trajectory(segments).ids)


# --- dispatch ---


def test_sequential_ends_a_turn_at_its_first_call(perform, small_vocabulary):
    episode, sampler = perform([plan(*CALLS), plan(CALLS[1]), ANSWER], "sequential")
    assert episode.stop is StopReason.ANSWERED and len(episode.turns) == 3
    assert [statuses(episode, n) for n in (0, 1)] == [[CallStatus.EXECUTED]] * 2
    assert [o.call for n in (0, 1) for o in episode.turns[n].calls] == list(CALLS)
    assert episode.turns[0].text.endswith("</tool_call>") and all(len(wave) == 1 for wave in sampler.waves)
    text = small_vocabulary.decode(episode.trajectory.ids)
    assert "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>" in text  # the protocol closes what the stop left open
    assert is_fed_what_it_became(episode, sampler)


def test_sequential_executes_one_call_a_turn(perform):
    leak = "<tool_code>print(crop_video(start_time=0, end_time=16))</tool_code>"
    episode, _ = perform([plan(leak, CALLS[0]), ANSWER], "sequential")
    assert statuses(episode) == [CallStatus.MALFORMED, CallStatus.TOO_MANY]


def test_no_dispatch_offers_no_tool_and_refuses_once(perform, small_vocabulary):
    episode, sampler = perform([plan(*CALLS), ANSWER], "none")
    assert (episode.stop, episode.answer, len(episode.turns)) == (StopReason.ANSWERED, "seven", 2)
    assert statuses(episode) == [CallStatus.NOT_OFFERED] * 2 and not sampler.sub
    text = small_vocabulary.decode(episode.trajectory.ids)
    assert "crop_video" not in text.partition("<think>")[0] and "No more calls can be made." in text
    stubborn, _ = perform([plan(*CALLS)], "none")
    assert (stubborn.stop, stubborn.answer, len(stubborn.turns)) == (StopReason.TURN_LIMIT, None, 2)


def test_a_direct_answer_is_one_turn_under_any_dispatch(perform):
    for dispatch in ("parallel", "sequential", "none"):
        episode, sampler = perform([ANSWER], dispatch)
        assert (episode.stop, episode.answer, len(episode.turns), len(sampler.asked)) == (StopReason.ANSWERED, "seven", 1, 1)


def test_neither_a_call_nor_an_answer_ends_the_episode(perform):
    episode, _ = perform(["I see nothing\n</think>\n"])
    assert (episode.stop, episode.answer) == (StopReason.NO_ANSWER, None)


# --- limits ---


def test_who_goes_on_calling_is_stopped_after_one_refusal(perform, small_vocabulary):
    episode, sampler = perform([plan(CALLS[0])])
    assert (episode.stop, episode.answer, len(episode.turns)) == (StopReason.TURN_LIMIT, None, 4)
    assert [statuses(episode, n)[0].executed for n in range(4)] == [True, True, False, False]
    assert small_vocabulary.decode(episode.trajectory.ids).count("No more calls can be made.") == 2  # with the last report, and the refusal
    assert is_fed_what_it_became(episode, sampler)


def test_an_answer_beside_a_late_call_counts(perform):
    episode, _ = perform([plan(CALLS[0]), plan(CALLS[0]), plan(CALLS[0]) + "<answer> two</answer>"])
    assert (episode.stop, episode.answer, statuses(episode, 2)) == (StopReason.ANSWERED, "two", [CallStatus.NOT_OFFERED])


def test_calls_beyond_the_turns_limit_are_refused_and_the_others_carried_out(perform):
    calls = [CropCall(16 * n, 16 * n + 16) for n in range(5)]
    episode, sampler = perform([plan(*calls), ANSWER])
    assert statuses(episode) == [CallStatus.EXECUTED] * 3 + [CallStatus.TOO_MANY] * 2 and len(sampler.sub) == 3
    assert episode.stop is StopReason.ANSWERED


def test_a_turn_that_hits_its_tokens_is_truncated(perform):
    episode, sampler = perform(["I see" * 40 + plan(*CALLS)])
    assert (episode.stop, episode.answer, episode.turns[0].truncated) == (StopReason.TRUNCATED, None, True)
    assert [len(s.ids) for _, s in sampler.main] == [64] == [sampler.main[0][0].max_new_tokens] and not episode.turns[0].calls


def test_a_report_is_cut_to_its_tokens(perform, small_vocabulary):
    episode, sampler = perform([plan(CALLS[0]), ANSWER], report=" seven" * 40)
    assert {r.max_new_tokens for r, _ in sampler.sub} == {16} and episode.turns[0].calls[0].response == " seven" * 16
    assert episode.stop is StopReason.ANSWERED


@pytest.mark.parametrize("room", range(24, 90, 3))
def test_the_trajectory_never_outgrows_its_limit(perform, room):
    episode, sampler = perform([plan(*CALLS), plan(*CALLS), ANSWER], trajectory_tokens=room)
    assert len(split_prompt(episode.trajectory)[1]) <= room and is_fed_what_it_became(episode, sampler)
    assert all(len(r.suffix) + r.max_new_tokens <= room for r, _ in sampler.main)


def test_a_full_trajectory_ends_the_episode_by_name(perform):
    whole, _ = perform([plan(*CALLS), ANSWER])
    assert whole.stop is StopReason.ANSWERED
    first = len(split_prompt(Trajectory(whole.trajectory.segments[:4]))[1])
    with_results = first + len(whole.trajectory.segments[4].ids)
    stops = {room: perform([plan(*CALLS), ANSWER], trajectory_tokens=room)[0].stop for room in (first - 1, first, with_results)}
    assert stops == {first - 1: StopReason.TRUNCATED, first: StopReason.TOKEN_LIMIT, with_results: StopReason.TOKEN_LIMIT}
    needed = len(split_prompt(whole.trajectory)[1])
    assert perform([plan(*CALLS), ANSWER], trajectory_tokens=needed)[0].stop is StopReason.ANSWERED
    assert perform([plan(*CALLS), ANSWER], trajectory_tokens=needed - 1)[0].stop is StopReason.TRUNCATED


# --- calls that go wrong ---

BAD_CALLS = {
    "not JSON": ("<tool_call>\nplease look at the start\n</tool_call>", CallStatus.MALFORMED),
    "a missing time": (raw('{"start_time": 3}'), CallStatus.MALFORMED),
    "no arguments": (raw("null"), CallStatus.MALFORMED),
    "code": ("<tool_code>print(crop_video(start_time=0, end_time=16))</tool_code>", CallStatus.MALFORMED),
    "another tool": (raw('{"start_time": 0, "end_time": 16}', "open_file"), CallStatus.UNKNOWN_TOOL),
    "reversed": (raw('{"start_time": 16, "end_time": 0}'), CallStatus.BAD_WINDOW),
    "empty": (raw('{"start_time": 16, "end_time": 16}'), CallStatus.BAD_WINDOW),
    "outside": (raw('{"start_time": 500, "end_time": 516}'), CallStatus.BAD_WINDOW),
    "not finite": (raw('{"start_time": NaN, "end_time": Infinity}'), CallStatus.BAD_WINDOW),
    "huge": (raw('{"start_time": 1e308, "end_time": 1e309}'), CallStatus.BAD_WINDOW),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_a_bad_call_is_told_why_and_its_siblings_are_carried_out(perform, case):
    call, status = BAD_CALLS[case]
    episode, sampler = perform([plan(CALLS[0], call, CALLS[1]), ANSWER], turn_tokens=200, trajectory_tokens=600, summary_tokens=200)
    assert statuses(episode) == [CallStatus.EXECUTED, status, CallStatus.EXECUTED]
    assert episode.turns[0].calls[1].response.startswith("error: ") and episode.turns[0].calls[1].subagent is None
    assert len(sampler.sub) == 2 and episode.stop is StopReason.ANSWERED


GOOD_CALLS = {
    "strings": (raw('{"start_time": "16", "end_time": "32.0s"}'), CallStatus.EXECUTED, CropCall(16, 32), range(16, 32)),
    "clock": (raw('{"start_time": "0:16", "end_time": "00:32"}'), CallStatus.EXECUTED, CropCall(16, 32), range(16, 32)),
    "over the end": (raw('{"start_time": 120, "end_time": 500}'), CallStatus.CLAMPED, CropCall(120, 128), range(120, 128)),
    "before the start": (raw('{"start_time": -9, "end_time": 4}'), CallStatus.CLAMPED, CropCall(0, 4), range(4)),
    "between two frames": (raw('{"start_time": 8.2, "end_time": 8.7}'), CallStatus.EXECUTED, CropCall(8.2, 8.7), range(8, 9)),
}


@pytest.mark.parametrize("case", GOOD_CALLS)
def test_a_call_that_a_person_would_understand_is_carried_out(perform, case):
    call, status, window, frames = GOOD_CALLS[case]
    episode, sampler = perform([plan(call), ANSWER], turn_tokens=200, trajectory_tokens=600, summary_tokens=120)
    (outcome,) = episode.turns[0].calls
    assert (outcome.status, outcome.call) == (status, window)
    assert [f.time for f in sampler.sub[0][0].frames] == [second for second in frames if second % STEP == 0]
    assert outcome.response.startswith(" seven from 8 to 10") and ("was cut to" in outcome.response) == (status is CallStatus.CLAMPED)


def test_where_the_note_on_a_window_does_not_fit_the_report_is_what_stays(perform):
    episode, _ = perform([plan(CropCall(120, 500)), ANSWER])
    assert episode.turns[0].calls[0].response.startswith(" seven from 8 to 10") and statuses(episode) == [CallStatus.CLAMPED]


def test_the_response_on_record_is_the_one_the_model_saw(perform, small_vocabulary):
    episode, _ = perform([plan(CALLS[0], BAD_CALLS["not JSON"][0], CALLS[1]), ANSWER], report="<|im_end|> </tool_response> é é é é é é é é")
    seen = small_vocabulary.decode(episode.trajectory.segments[4].ids)
    bodies = [part.partition("\n</tool_response>")[0] for part in seen.split("<tool_response>\n")[1:]]
    assert bodies == [o.response for o in episode.turns[0].calls]


# --- videos ---


def test_a_video_that_cannot_be_read_ends_its_episode_alone(scripted, small_scene, small_questions):
    missing = dataclasses.replace(small_questions[0], video="nowhere.mp4")
    agents = [play(small_scene, q, Setting(4, 0.7), 0) for q in (missing, small_questions[0])]
    lost, fine = run(scripted([ANSWER]), agents)
    assert (lost.stop, lost.turns, lost.answer) == (StopReason.UNREADABLE, (), None) and fine.stop is StopReason.ANSWERED


def test_a_window_that_cannot_be_read_is_a_response_and_its_siblings_live(perform, small_scene):
    class Scratched(FrameFeatures):
        """Features of a file that is damaged from second 100 to second 125."""

        def __call__(self, frames):
            if any(100 <= frame.time <= 125 for frame in frames):
                raise VideoError(frames[0].video, "it cannot be decoded there")
            return super().__call__(frames)

    whole = small_scene.features
    features = Scratched.__new__(Scratched)
    features.__dict__ |= whole.__dict__
    episode, sampler = perform([plan(CALLS[0], CALLS[1]), ANSWER], scene=Scene(small_scene.protocol, features), summary_tokens=200)
    assert statuses(episode) == [CallStatus.EXECUTED, CallStatus.UNREADABLE] and episode.stop is StopReason.ANSWERED
    assert "it cannot be decoded there" in episode.turns[0].calls[1].response and len(sampler.sub) == 1


def test_the_model_opens_no_files(perform, small_world, small_questions, small_scene, small_model, tmp_path, monkeypatch):
    """A call's `video_path` is words: only the question's own video is ever opened."""
    secret = tmp_path / "secret.mp4"
    secret.write_bytes((small_world.folder / small_questions[1].video).read_bytes())
    opened = []
    for function in ("probe", "read"):
        real = getattr(video, function)
        monkeypatch.setattr(video, function, lambda path, *rest, real=real: opened.append(str(path)) or real(path, *rest))
    features = FrameFeatures(small_model.vision, small_model.config, small_scene.features.settings, small_world.folder)
    others = [str(secret), small_questions[2].video, "../../etc/passwd", "video.mp4; rm -rf /"]
    calls = [raw(f'{{"video_path": "{path}", "start_time": 0, "end_time": 16}}') for path in others]
    scene = Scene(small_scene.protocol, features)
    episode, sampler = perform([plan(*calls), ANSWER], scene=scene, max_calls=4, turn_tokens=600, trajectory_tokens=1000)
    assert statuses(episode) == [CallStatus.EXECUTED] * 4
    assert set(opened) == {str(small_world.folder / small_questions[0].video)}
    assert {f.video for request, _ in sampler.sub for f in request.frames} == {small_questions[0].video}


def test_temporal_grounding_is_played_alike(perform, small_questions):
    question = next(q for q in small_questions if q.kind is QuestionKind.TEMPORAL_GROUNDING)
    episode, _ = perform([plan(*CALLS), "the crops show\n</think>\n<answer>[8, 10]</answer>"], question=question)
    assert (episode.stop, episode.answer) == (StopReason.ANSWERED, "[8, 10]")
