"""Rollouts that outlive an update: ages, resuming, and any number of processes."""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import pytest

from models.features import FrameFeatures
from paravt_jax.data.frames import VideoError
from paravt_jax.method.accuracy import Rules
from paravt_jax.method.records import Trajectory
from paravt_jax.processes import hosts
from rollout.engine.engine import Engine
from rollout.engine.programs import MOST_STOP_IDS
from rollout.engine.requests import Sample
from train.data import QuestionStream
from train.durable.saver import pack, unpack
from train.learn.in_flight import Player
from train.learn.rl_settings import RLSettings
from train.learn.rollouts import (
    Actor,
    RolloutPool,
    Rollouts,
    begin,
    draw_budgets,
    require_fresh,
    score,
    token_ages,
)

STEPS = 4
TWO = pytest.param(2, marks=pytest.mark.slow)


def plain(value: Any) -> Any:
    """A value that `==` compares by content, types of arrays included."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, Trajectory):
        return [plain(segment) for segment in value.segments]
    if dataclasses.is_dataclass(value):
        fields = [field.name for field in dataclasses.fields(value)]
        return type(value).__name__, [plain(getattr(value, name)) for name in fields]
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    return type(value).__name__, value


def settings_of(road, max_staleness: int, prompts: int = 2) -> RLSettings:
    return dataclasses.replace(
        road.run.rl,
        prompts=prompts,
        max_staleness=max_staleness,
        frame_budgets=(4,),
        temperature=1.0,
    )


def stream_of(road, settings) -> QuestionStream:
    budgets = functools.partial(draw_budgets, settings, 0, prompts=settings.prompts)
    return QuestionStream(road.data, None, 7, settings.grpo.group_size, budgets)


class Stopping(Engine):
    """Ends a response at common tokens too: random weights seldom end one."""

    def __init__(self, road):
        words = road.data.vocabulary
        ends = [id for id in range(words.size) if b"d" in words.token_bytes(id)]
        self.ends = tuple(ends[: MOST_STOP_IDS - 2])
        super().__init__(road.model, road.environment.features, road.run.engine_sizes)

    def submit(self, request):
        stop_ids = (*request.sampling.stop_ids, *self.ends)
        sampling = dataclasses.replace(request.sampling, stop_ids=stop_ids)
        return super().submit(dataclasses.replace(request, sampling=sampling))


class Run:
    """Steps of a run without updates: version n of the weights is the n-th scaling of them."""

    def __init__(self, road, engine: Engine, settings: RLSettings, pool: RolloutPool | None = None):
        self.road = road
        self.engine = engine
        self.settings = settings
        self.questions = stream_of(road, settings)
        self.pool = pool or RolloutPool()
        self.saved: list[tuple[str, Any]] = []

    def step(self, step: int) -> Rollouts:
        self.engine.sleep()
        scaled = jax.tree.map(lambda x: x * (1 + step / 8), self.road.weights)
        self.engine.load(scaled, step)
        actor = Actor(self.engine, self.road.environment, Rules())
        played = self.pool.play_step(actor, self.questions, self.settings, 0, step)
        assert self.engine.idle
        self.saved.append((pack(self.pool.state), self.questions.get_state()))
        return played


@pytest.fixture(scope="module", params=[1, TWO])
def stale(road, request) -> tuple[Run, list[Rollouts]]:
    """Some steps at staleness 1 or 2."""
    run = Run(road, Stopping(road), settings_of(road, request.param))
    return run, [run.step(step) for step in range(STEPS)]


def test_trajectories_mix_versions_and_none_is_too_old(stale):
    run, steps = stale
    staleness = run.settings.max_staleness
    mixed = 0
    for step, played in enumerate(steps):
        assert len(played.groups) == 2
        require_fresh(played, step, staleness)
        for episode in played.episodes:
            found = episode.trajectory.versions
            found = found[found >= 0]
            assert (np.diff(found) >= 0).all()
            mixed += len(set(found.tolist())) > 1
        ages = np.concatenate(token_ages(played, step))
        assert played.metrics["staleness/max"] == ages.max()
        assert played.metrics["staleness/mean"] == pytest.approx(ages.mean())
        shares = [played.metrics[f"staleness/age{age}"] for age in range(staleness + 1)]
        assert sum(shares) == pytest.approx(1)
        assert played.metrics["in_flight/groups"] == 2
    assert mixed


def test_every_group_is_trained_once(stale):
    run, steps = stale
    trained = [group.episodes[0].question.id for played in steps for group in played.groups]
    trained += [group.question.id for group in run.pool.state.groups]
    questions = stream_of(run.road, run.settings)
    drawn = [question.id for step in range(STEPS + 1) for question in questions.draw(step)]
    assert sorted(trained) == sorted(drawn)


def test_all_episodes_of_the_first_step_have_seeds_of_their_own(road):
    settings = settings_of(road, 1)
    drawn = stream_of(road, settings).draw(0)
    groups = begin(drawn, settings, 0, 0) + begin(drawn, settings, 0, 0, settings.prompts)
    seeds = [flight.seed for group in groups for flight in group.flights]
    assert len(set(seeds)) == 2 * settings.prompts * settings.grpo.group_size


@pytest.mark.slow
def test_a_pool_goes_on_bit_for_bit_from_what_is_stored(road, stale):
    """With another engine and new coroutines, as after a restart."""
    run, steps = stale
    for step in (1, STEPS - 1):
        text, cursor = run.saved[step - 1]
        again = Run(road, Stopping(road), run.settings, RolloutPool(unpack(text)))
        again.questions.set_state(cursor)
        found = again.step(step)
        assert plain(found) == plain(steps[step])
        assert found.metrics == steps[step].metrics
        ((again_text, again_cursor),) = again.saved
        saved_text, saved_cursor = run.saved[step]
        assert plain(unpack(again_text)) == plain(unpack(saved_text))
        assert again_cursor == saved_cursor


class Parts:
    """Wraps a scripted sampler so that it writes its texts in parts (`Request.begun`)."""

    def __init__(self, script):
        self.script = script
        self.script._sample = self._sample
        self._whole = type(script)._sample

    def _sample(self, request) -> Sample:
        whole = self._whole(self.script, dataclasses.replace(request, begun=None))
        end = request.sampling.max_new_tokens
        begun = request.begun
        first = 0 if begun is None else len(begun.ids)
        versions = np.full(len(whole.ids), self.script.version, np.int32)
        if begun is not None:
            versions[:first] = begun.versions
        if len(whole.ids) <= end:
            return dataclasses.replace(whole, versions=versions)
        stop = type(whole.stop).LENGTH
        return dataclasses.replace(
            whole,
            ids=whole.ids[:end],
            logprobs=whole.logprobs[:end],
            versions=versions[:end],
            stop=stop,
        )


def play_on(road, small, processes: int, monkeypatch) -> list[Rollouts]:
    """Four steps on some processes: each is a thread, and `gather` a barrier between them."""
    settings = settings_of(road, 1, prompts=3)
    pools = [RolloutPool() for _ in range(processes)]
    local = threading.local()
    barrier = threading.Barrier(processes)
    sent: list[Any] = [None] * processes

    def gather(value):
        sent[local.index] = value
        barrier.wait()
        found = list(sent)
        barrier.wait()
        return found

    monkeypatch.setattr(hosts, "process_count", lambda: processes)
    monkeypatch.setattr(hosts, "process_index", lambda: local.index)
    monkeypatch.setattr(hosts, "gather", gather)

    def work(index: int) -> list[Rollouts]:
        local.index = index
        script = small.Script(road)
        Parts(script)
        questions = stream_of(road, settings)
        played = []
        for step in range(4):
            script.load(None, step)
            actor = Actor(script, road.environment, Rules())
            played.append(pools[index].play_step(actor, questions, settings, 0, step))
        return played

    with ThreadPoolExecutor(processes) as threads:
        results = list(threads.map(work, range(processes), timeout=120))
    first, *others = [plain(pool.state) for pool in pools]
    assert all(other == first for other in others), "all processes know the same"
    return results[0]


def test_a_pool_of_two_processes_goes_on_in_one(road, small, monkeypatch):
    """Episodes that had ended were played by a process that there is no more."""
    settings = settings_of(road, 1)
    script = small.Script(road)
    questions = stream_of(road, settings)
    groups = begin(questions.draw(0), settings, 0, 0)
    player = Player(road.environment, settings.temperature)
    player.deal(groups, now=0)
    player.play(script, groups, math.inf)
    player.share(groups)
    for flight in groups[1].flights:
        flight.process = 1
    Player(road.environment, settings.temperature).deal(groups, now=10)
    rollouts = score(Actor(script, road.environment, Rules()), groups, settings)
    assert [group.players for group in rollouts.groups] == [(0,) * len(groups[0].flights)] * 2


def test_an_episode_whose_video_disappears_ends_as_unreadable(road, small, monkeypatch):
    """A restarted run reads the frames of episodes in flight again."""
    settings = settings_of(road, 1)
    engine = small.Script(road)
    Parts(engine)
    groups = begin(stream_of(road, settings).draw(0), settings, 0, 0)
    player = Player(road.environment, settings.temperature)
    player.deal(groups, now=0)
    clock = 0
    while not any(flight.log.told for flight in groups[0].flights):
        clock += 1
        player.play(engine, groups, clock)
        player.share(groups)
    gone = groups[0].question.video
    request = FrameFeatures.request_overview

    def failing(features, name, count):
        if name == gone:
            raise VideoError(name, "gone")
        return request(features, name, count)

    monkeypatch.setattr(FrameFeatures, "request_overview", failing)
    player = Player(road.environment, settings.temperature)
    player.deal(groups, clock)
    player.play(engine, groups, math.inf)
    player.share(groups)
    rollouts = score(Actor(engine, road.environment, Rules()), groups, settings)
    lost = sum(group.question.video == gone for group in groups)
    assert rollouts.unreadable == lost >= 1
    assert len(rollouts.groups) == len(groups) - lost


@pytest.mark.slow
def test_results_do_not_depend_on_the_number_of_processes(road, small, monkeypatch):
    one, two, three = (play_on(road, small, count, monkeypatch) for count in (1, 2, 3))
    for step, others in enumerate(zip(one, two, three, strict=True)):
        batches = [
            [plain(dataclasses.replace(group, players=())) for group in played.groups]
            for played in others
        ]
        assert batches[0] == batches[1] == batches[2]
        players = {process for group in others[2].groups for process in group.players}
        assert players <= {0, 1, 2} and (step or len(players) > 1)
