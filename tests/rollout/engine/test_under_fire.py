"""Thousands of episodes with a model that writes anything (`fire`).

What is guarded:

1. No episode fails: every end and every call has a named status, and rewards are finite.
2. A trajectory is exactly what the sampler was fed and said.
3. No file but the question's own video is opened.
4. With the real engine too, and the trainer computes the same log-probs as the engine.
5. An interrupted run frees all pages.
"""

from __future__ import annotations

import collections
import dataclasses
import gc
import hashlib
import itertools
import json
import math
import os
import pathlib
import random
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flax import nnx

from models.features import FrameFeatures, FrameSettings
from models.sharding import make_mesh
from models.trained import Skeleton
from paravt_jax.data import video
from paravt_jax.method.parsing import extract_answer
from paravt_jax.method.protocol import Protocol, ProtocolSettings
from paravt_jax.method.records import (
    Author,
    CallOutcome,
    CallStatus,
    CropCall,
    Episode,
    Question,
    QuestionKind,
    StopReason,
)
from paravt_jax.method.rewards import Rewards, RewardSettings
from paravt_jax.method.structure import find_structure
from paravt_jax.method.tokenizer import Vocabulary
from rollout.agent.episode import Environment, EpisodeSettings, play, split_prompt
from rollout.agent.transcript import transcript
from rollout.engine.engine import Engine
from rollout.engine.requests import Completion, Request, Sample, SampleStop, run
from rollout.engine.settings import EngineSizes
from tests.rollout.conftest import Cut, Scripted
from tests.rollout.engine.fire import GRAMMAR, Fuzzer, watch
from tests.rollout.engine.reference import assert_nothing_held
from tests.turns import score
from train.learn.batch import Group, build, mismatches
from train.learn.packing import MicrobatchShape, pack
from train.learn.update import make_logprobs

BATCH = 50  # episodes side by side, all on one video
LIMITS = (
    ProtocolSettings(
        max_tool_turns=2, max_calls=3, turn_tokens=192, summary_tokens=16, trajectory_tokens=256
    ),
    ProtocolSettings(
        max_tool_turns=3, max_calls=5, turn_tokens=512, summary_tokens=64, trajectory_tokens=1024
    ),
    ProtocolSettings(
        max_tool_turns=1, max_calls=8, turn_tokens=8192, summary_tokens=48, trajectory_tokens=30_000
    ),
)
REWARDS = (
    RewardSettings(),
    RewardSettings(format_cap=False, answer_suffix=False),
)


@dataclasses.dataclass
class Battle:
    """Many episodes, counted: how they ended, and what they opened."""

    fuzzer: Fuzzer
    episodes: int = 0
    stops: collections.Counter[StopReason] = dataclasses.field(default_factory=collections.Counter)
    calls: collections.Counter[CallStatus] = dataclasses.field(default_factory=collections.Counter)
    samples: collections.Counter[SampleStop] = dataclasses.field(
        default_factory=collections.Counter
    )
    most_calls: int = 0  # in one turn
    foreign: list[str] = dataclasses.field(default_factory=list)
    videos: set[str] = dataclasses.field(default_factory=set)
    written: Any = dataclasses.field(default_factory=hashlib.blake2b)


@pytest.fixture(scope="module")
def field(
    small_model, small_world, small_questions, tmp_path_factory
) -> tuple[FrameFeatures, list[Question]]:
    """Features over a folder with videos, secrets and a damaged file, and questions about them.

    One question is about a file that does not exist.
    """
    root: pathlib.Path = tmp_path_factory.mktemp("field")
    names = sorted({question.video for question in small_questions})
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(small_world.folder / name, root / name)
    whole = (root / names[0]).read_bytes()
    (root / "secret.mp4").write_bytes(whole)
    (root / "secret.txt").write_text("secret")
    (root / "damaged.mp4").write_bytes(whole[: len(whole) // 2])
    features = FrameFeatures(
        small_model.vision,
        small_model.config,
        FrameSettings(batch=128),
        root,
        source=video,
    )
    features(features.overview(names[0], 1))  # compiles
    open_ended = [
        dataclasses.replace(q, kind=QuestionKind.OPEN_ENDED, options=())
        for q in small_questions[:4]
    ]
    lost = [
        dataclasses.replace(small_questions[0], video=name)
        for name in ("damaged.mp4", "nowhere.mp4")
    ]
    return features, [*small_questions, *open_ended, *lost]


@pytest.fixture(scope="module")
def fight(field, small_vocabulary) -> Callable[..., Battle]:
    """fight(count, seed) plays `count` episodes, checks each, and counts."""
    features, questions = field
    by_video = collections.defaultdict(list)
    for question in questions:
        by_video[question.video].append(question)
    *good, damaged, missing = dict.fromkeys(question.video for question in questions)
    videos = [*good, damaged, *good, missing, *good]
    protocols = [Protocol(small_vocabulary, limits) for limits in LIMITS]
    EpisodeSettings(1, 0.7)  # the first of a class evaluates its annotations

    def fight(count: int, seed: int = 0) -> Battle:
        battle = Battle(Fuzzer(small_vocabulary, small_vocabulary.size + 300))
        for number in range(0, count, BATCH):
            rng = random.Random(f"{seed} {number}")
            name = videos[(number // BATCH) % len(videos)]
            (features.root / name).touch()  # so that it is read anew
            with watch() as (heard, opened):
                play_batch(
                    battle, protocols, features, by_video[name], min(BATCH, count - number), rng
                )
            own = str(features.root / name)
            battle.foreign += heard + [path for path in opened if path != own]
            battle.videos.update(opened)
        return battle

    return fight


def play_batch(
    battle: Battle,
    protocols: list[Protocol],
    features: FrameFeatures,
    questions: list[Question],
    count: int,
    rng: random.Random,
) -> None:
    """One batch: `count` episodes on one video, side by side."""
    vocabulary = battle.fuzzer.vocabulary

    def say(request: Request) -> list[int] | Cut:
        ids, stop = battle.fuzzer.line(request.seed, request.sampling.max_new_tokens)
        return ids if stop is None else Cut(ids, stop)

    sampler = Scripted(vocabulary, say, say)
    ticks = itertools.count()
    environments = [
        Environment(protocol, features, clock=lambda: float(next(ticks))) for protocol in protocols
    ]
    drafted = []
    for number in range(count):
        environment = rng.choices(environments, (5, 3, 2))[0]
        dispatch = rng.choices(("parallel", "sequential", "none"), (6, 2, 1))[0]
        seconds = rng.choices((math.inf, 3.0 * count, 1.0), (20, 5, 1))[0]
        frames = rng.choice((1, 4, 16))
        setting = EpisodeSettings(frames, 0.7, dispatch, seconds, report_seconds=5.0)
        question = rng.choice(questions)
        seed = rng.getrandbits(32) * 100_000 + number
        drafted.append((environment, setting, question, seed))
    agents = [
        play(environment, question, setting, seed)
        for environment, setting, question, seed in drafted
    ]
    episodes = run(sampler, agents)
    said = {
        request.seed: (request, sample)
        for request, sample in zip(sampler.asked, sampler.said, strict=True)
    }
    assert len(said) == len(sampler.asked)
    assert not sampler.waiting
    for (environment, setting, question, seed), episode in zip(drafted, episodes, strict=True):
        assert episode.question is question
        assert episode.frames == setting.frames
        inspect(episode, environment, setting, seed, said)
        battle.episodes += 1
        battle.stops[episode.stop] += 1
        battle.calls.update(outcome.status for turn in episode.turns for outcome in turn.calls)
        battle.most_calls = max([battle.most_calls, *(len(turn.calls) for turn in episode.turns)])
        for segment in episode.trajectory.segments:
            battle.written.update(segment.ids.astype(np.int32).tobytes())
    battle.samples.update(sample.stop for sample in sampler.said)
    assert not said, "every sample is in an episode"


def inspect(
    episode: Episode,
    environment: Environment,
    setting: EpisodeSettings,
    seed: int,
    said: dict[int, tuple[Request, Sample]],
) -> None:
    """What is true of every episode. Removes the episode's samples from `said`."""
    assert isinstance(episode.stop, StopReason)
    assert (episode.answer is not None) == (episode.stop is StopReason.ANSWERED)
    if episode.stop is StopReason.ANSWERED:
        assert episode.answer == extract_answer(episode.turns[-1].text)
    for settings in REWARDS:
        earned = score(episode.question, episode.turns, settings)
        assert_finite(earned)
    if not episode.trajectory.segments:
        assert episode.stop is StopReason.UNREADABLE
        assert not episode.turns
        return
    inspect_trajectory(episode, environment.protocol.settings, setting, seed, said)
    for number, turn in enumerate(episode.turns):
        executed = sum(outcome.status.executed for outcome in turn.calls)
        most = environment.protocol.settings.max_calls
        assert executed <= (1 if setting.dispatch == "sequential" else most)
        for n, outcome in enumerate(turn.calls):
            call_seed = seed + 1000 * (number + 1) + n
            inspect_call(outcome, episode.question, environment, call_seed, said)
        if turn.calls:
            inspect_responses(episode, number, environment.protocol.vocabulary)

    vocabulary = environment.protocol.vocabulary
    ids, authors = episode.trajectory.ids, episode.trajectory.authors
    positions, _ = find_structure(vocabulary.token_bytes, ids, authors)
    assert (authors[positions] == Author.MODEL).all()
    line = transcript(episode, earned, setting, vocabulary, np.zeros(len(ids), np.float32))
    assert len(line["turns"]) == len(episode.turns)
    assert json.dumps(line, allow_nan=False)


def inspect_trajectory(
    episode: Episode,
    limits: ProtocolSettings,
    setting: EpisodeSettings,
    seed: int,
    said: dict[int, tuple[Request, Sample]],
) -> None:
    """The trajectory is what the sampler was fed and said, and no more."""
    segments = episode.trajectory.segments
    tool_turns = limits.max_tool_turns if setting.dispatch != "none" else 0
    assert len(episode.turns) <= tool_turns + 2
    assert len(split_prompt(episode.trajectory)[1]) <= limits.trajectory_tokens
    written = [n for n, segment in enumerate(segments) if segment.author is Author.MODEL]
    assert len(written) == len(episode.turns)
    authors = [segment.author for segment in segments[2:]]
    cycle = [Author.PINNED, Author.MODEL, Author.TOOL] * len(authors)
    assert authors == cycle[: len(authors)]
    assert authors[-1:] == [Author.MODEL] or episode.stop is StopReason.TIME_LIMIT
    for turn, place in enumerate(written):
        request, sample = said.pop(seed + turn)
        segment = segments[place]
        fed = np.concatenate([earlier.ids for earlier in segments[:place]])
        assert np.array_equal(request.ids, fed)
        assert np.array_equal(segment.ids, sample.ids)
        assert segment.digest == sample.digest
        assert segment.logprobs is sample.logprobs
        assert request.sampling.max_new_tokens <= limits.turn_tokens
        assert request.sampling.deadline <= setting.seconds


STATUS_OF_STOP = {
    SampleStop.DEADLINE: CallStatus.TIMED_OUT,
    SampleStop.UNREADABLE: CallStatus.UNREADABLE,
}


def inspect_call(
    outcome: CallOutcome,
    question: Question,
    environment: Environment,
    seed: int,
    said: dict[int, tuple[Request, Sample]],
) -> None:
    """A call has a named outcome. An executed one looked at a window of the question's video."""
    assert isinstance(outcome.status, CallStatus)
    assert outcome.response == environment.protocol.cut(outcome.response)
    assert outcome.status.executed or outcome.response.startswith("error: ")
    if outcome.subagent is None:
        assert not outcome.status.executed
        return
    duration = environment.features.info(question.video).duration
    assert isinstance(outcome.call, CropCall)
    assert 0 <= outcome.call.start < outcome.call.end <= duration
    request, sample = said.pop(seed)
    assert np.array_equal(outcome.subagent.ids, np.concatenate([request.ids, sample.ids]))
    assert 1 <= len(request.frames) <= environment.protocol.settings.crop_frames
    assert {frame.video for frame in request.frames} == {question.video}
    if sample.stop in STATUS_OF_STOP:
        assert outcome.status is STATUS_OF_STOP[sample.stop]
    else:
        assert outcome.status.executed


def assert_finite(earned: Rewards) -> None:
    assert all(map(math.isfinite, [x for name, x in vars(earned).items() if name != "uncounted"]))


def inspect_responses(episode: Episode, number: int, vocabulary: Vocabulary) -> None:
    """The model reads the recorded responses to the calls of a turn, if there is a next turn."""
    segments = episode.trajectory.segments
    # Two segments of the prompt, then pinned, model and tool in every turn.
    place = 3 * number + 4
    if place >= len(segments):
        return
    text = vocabulary.decode(segments[place].ids)
    bodies = [
        part.partition("\n</tool_response>")[0] for part in text.split("<tool_response>\n")[1:]
    ]
    assert bodies == [outcome.response for outcome in episode.turns[number].calls]


@pytest.fixture(scope="module")
def battle(fight) -> Battle:
    return fight(300)


def check_battle(battle: Battle, episodes: int) -> None:
    """All episodes are counted, every kind of end was met, and nothing foreign was opened."""
    assert battle.episodes == episodes == sum(battle.stops.values())
    assert set(battle.stops) == set(StopReason) - {StopReason.STOPPED}  # no person is there
    assert set(battle.calls) == set(CallStatus)
    assert battle.most_calls >= 200
    # Episodes are not paced here.
    assert set(battle.samples) == set(SampleStop) - {SampleStop.PAUSED}
    assert battle.foreign == []


def test_every_end_is_named_and_counted(battle):
    check_battle(battle, 300)
    assert min(battle.stops.values()) >= 4 and min(battle.calls.values()) >= 4
    assert sum(battle.calls.values()) > 1000


def test_the_fuzzer_uses_its_whole_grammar(battle):
    assert {name for name, _ in battle.fuzzer.used} == set(GRAMMAR)
    assert len(battle.fuzzer.accidents) == 11


def test_only_the_questions_own_video_is_opened(battle, field):
    features, questions = field
    assert battle.foreign == []
    assert battle.videos == {str(features.root / q.video) for q in questions} - {
        str(features.root / "nowhere.mp4")
    }


def test_the_watch_sees_what_is_opened(field, tmp_path):
    features, _ = field
    (features.root / "secret.mp4").touch()  # so that it is read anew
    with watch() as (heard, videos):
        (features.root / "secret.txt").read_text()
        features(features.overview("secret.mp4", 1))
    assert any("secret.txt" in line for line in heard) and set(videos) == {
        str(features.root / "secret.mp4")
    }
    with watch() as (heard, videos):
        pass
    assert not heard and not videos


@pytest.mark.slow
def test_thousands_of_episodes(fight):
    """PARAVT_TEST_EPISODES=5000 plays ten thousand, in ten minutes."""
    episodes = int(os.environ.get("PARAVT_TEST_EPISODES", "600"))
    first = fight(episodes, seed=7)
    check_battle(first, episodes)
    assert set(first.fuzzer.used) == {(name, text) for name in GRAMMAR for text in GRAMMAR[name]}
    gc.collect()
    before = resident()  # by now the tokenizer's cache and the allocator have what they want
    check_battle(fight(episodes, seed=8), episodes)
    gc.collect()
    assert resident() - before < 16 * 2**20


def resident() -> int:
    """Bytes of memory that this process holds."""
    status = pathlib.Path("/proc/self/status")
    if not status.exists():
        pytest.skip("no /proc here: memory is not measured")
    lines = status.read_text().splitlines()
    _, kilobytes, _ = next(line for line in lines if line.startswith("VmRSS")).split()
    return 1024 * int(kilobytes)


# --- the real engine ---

ROOM = ProtocolSettings(
    max_tool_turns=2,
    max_calls=3,
    turn_tokens=160,
    summary_tokens=12,
    trajectory_tokens=320,
    crop_frames=4,
)
SIZES = EngineSizes(
    longest=464,
    slots=8,
    rows_per_prefix=4,
    page=16,
    pages=160,
    prefill_tokens=320,
    few_rows=4,
    steps=4,
)


class Possessed:
    """The real engine, except that a main agent's first turn is fuzz.

    So the engine meets tool calls, and prompts that no model would write.
    """

    def __init__(self, engine: Engine, fuzzer: Fuzzer):
        self.engine, self.fuzzer = engine, fuzzer
        self.script = Scripted(fuzzer.vocabulary, self._say)
        self.tickets = itertools.count()
        self.owner: dict[tuple[bool, int], int] = {}  # (scripted, ticket there) -> ticket

    def _say(self, request: Request) -> list[int]:
        vocabulary = self.fuzzer.vocabulary
        strange = [
            vocabulary[f"<|{name}|>"]
            for name in ("image_pad", "vision_start", "image_pad", "video_pad", "im_start")
        ]
        line, _ = self.fuzzer.line(request.seed, request.sampling.max_new_tokens)
        return [*strange, vocabulary.size, *line]

    def submit(self, request: Request) -> int:
        scripted = self.script.is_main(request) and self.script.is_first(request)
        sampler = self.script if scripted else self.engine
        ticket = next(self.tickets)
        self.owner[scripted, sampler.submit(request)] = ticket
        return ticket

    def step(self) -> list[Completion]:
        answers = [((True, ticket), sample) for ticket, sample in self.script.step()]
        answers += [((False, ticket), sample) for ticket, sample in self.engine.step()]
        return [(self.owner.pop(key), sample) for key, sample in answers]

    def cancel(self, ticket: int) -> None:
        for (scripted, inner), outer in list(self.owner.items()):
            if outer == ticket:
                (self.script if scripted else self.engine).cancel(inner)
                del self.owner[scripted, inner]


@pytest.fixture(scope="module")
def possessed(small_model, small_vocabulary, field) -> Callable[[], tuple[Possessed, Environment]]:
    """possessed() gives an idle fuzzed engine, and an environment with its clock.

    The clock ticks whenever it is read.
    """
    engine = Engine(small_model, field[0], SIZES)

    def make() -> tuple[Possessed, Environment]:
        ticks = itertools.count()
        engine.clock = clock = lambda: float(next(ticks))
        engine.forget()
        fuzzer = Fuzzer(small_vocabulary, small_model.config.text.vocab_size)
        return Possessed(engine, fuzzer), Environment(
            Protocol(small_vocabulary, ROOM), field[0], clock
        )

    return make


def draft(environment: Environment, questions: list[Question], count: int) -> list:
    """Episodes, at a temperature at which an untrained model writes varied tokens."""
    rng = random.Random(3)
    agents = []
    for number in range(count):
        frames = rng.choice((1, 4))
        dispatch = rng.choices(("parallel", "sequential", "none"), (6, 1, 1))[0]
        seconds = rng.choices((math.inf, 2.0 * count), (4, 1))[0]
        report_seconds = rng.choice((math.inf, 6.0))
        setting = EpisodeSettings(
            frames, 2.5, dispatch, seconds=seconds, report_seconds=report_seconds
        )
        agents.append(play(environment, rng.choice(questions), setting, 10_000 * number))
    return agents


def ids_of(episodes: list[Episode]) -> list[list[int]]:
    """All tokens of the episodes, those of sub-agents included."""
    everyone = [
        *(episode.trajectory for episode in episodes),
        *(outcome.subagent for outcome in outcomes_of(episodes) if outcome.subagent is not None),
    ]
    return [[int(id) for segment in agent.segments for id in segment.ids] for agent in everyone]


def outcomes_of(episodes: list[Episode]) -> list[CallOutcome]:
    return [outcome for episode in episodes for turn in episode.turns for outcome in turn.calls]


def scripted(logprobs: np.ndarray) -> bool:
    """Whether these are the log-probs that `Scripted` invents, not the engine's."""
    return bool((logprobs == -np.arange(1, len(logprobs) + 1) / 8).all())


@pytest.mark.slow
def test_a_real_engine_under_fire(possessed, field, small_model):
    features, questions = field
    sampler, environment = possessed()
    once = run(sampler, draft(environment, questions, 80))  # compiles
    sampler, environment = possessed()
    with watch() as (heard, opened):
        episodes = run(sampler, draft(environment, questions, 80))
    assert ids_of(episodes) == ids_of(once)
    assert [episode.stop for episode in episodes] == [episode.stop for episode in once]
    assert not heard
    # The readable videos are encoded already.
    assert {pathlib.Path(path).name for path in opened} <= {"damaged.mp4"}
    assert_nothing_held(sampler.engine)
    assert not sampler.owner
    outcomes = outcomes_of(episodes)
    # The missing ones are rare here.
    rare = {StopReason.TOKEN_LIMIT, StopReason.TURN_LIMIT, StopReason.STOPPED}
    assert {episode.stop for episode in episodes} >= set(StopReason) - rare
    rare = {CallStatus.CLAMPED, CallStatus.TOO_MANY, CallStatus.UNREADABLE}
    assert {outcome.status for outcome in outcomes} >= set(CallStatus) - rare
    for episode in episodes:
        earned = score(episode.question, episode.turns, REWARDS[0])
        assert_finite(earned)

    # The trainer scores what the engine was fed and agrees with it, whatever was written:
    # placeholders and ids beyond the vocabulary too.
    graph, weights = nnx.split(small_model.text)
    row = [MicrobatchShape(rows=1, tokens=512)]
    logprobs = make_logprobs(Skeleton(graph), 2.5, make_mesh())
    compared = 0
    agents = [
        *(episode.trajectory for episode in episodes if episode.trajectory.segments),
        *(outcome.subagent for outcome in outcomes if outcome.subagent is not None),
    ]
    for trajectory in agents:
        vectors = features(trajectory.frames)
        visual = np.zeros((16, *vectors.shape[1:]), vectors.dtype)
        visual[: len(vectors)] = vectors
        grids = tuple(features.grid(frame) for frame in trajectory.frames)
        group = Group((trajectory,), 0, grids, slot=0)
        (packed,) = pack([group.lengths], row)
        batch = build(packed, [group], small_model.config, 1, ROOM.trajectory_tokens)
        assert mismatches([batch], [group]) == 0
        again = np.asarray(logprobs(weights, visual, batch))[0]
        # The log-probs begin with the last token of the prompt.
        start = -len(split_prompt(trajectory)[0])
        for segment in trajectory.segments:
            count = len(segment.ids)
            if segment.logprobs is not None and not scripted(segment.logprobs):
                part = again[start : start + count]
                np.testing.assert_allclose(part, segment.logprobs, atol=2e-4)
                compared += count
            start += count
    assert compared > 500
