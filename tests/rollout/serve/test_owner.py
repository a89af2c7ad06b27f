"""The queue and the thread: every job ends, once, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from rollout.agent.episode import EpisodeSettings, play
from rollout.engine.requests import ask, together
from rollout.serve.chat_reply import value_of
from rollout.serve.errors import ApiError
from rollout.serve.owner import Job, Owner, Result
from tests.rollout.conftest import Scripted
from tests.rollout.engine.test_requests import request
from tests.rollout.serve.conftest import Held, eventually, no_one
from tests.rollout.serve.test_episodes import crop


@contextlib.contextmanager
def owning(sampler: Scripted, episodes: int = 1, waiting: int = 9, patience: float = 60):
    owner = Owner(sampler, episodes, waiting, patience)
    owner.start(lambda: None)
    try:
        yield owner
    finally:
        owner.close()
    assert not (owner.playing or owner.waiting or sampler.waiting)


async def heard(job: Job) -> list[Any]:
    async with asyncio.timeout(20):
        return [event async for event in job.events()]


def simple(number: int = 1):
    """A job that asks one request and returns its number."""

    async def agent(job: Job) -> int:
        await ask(request(number))
        return number

    return agent


@pytest.fixture
def held(small_vocabulary) -> Held:
    """A sampler that answers nothing yet."""
    sampler = Held(small_vocabulary)
    sampler.held = lambda request: True
    return sampler


pytestmark = pytest.mark.anyio


async def test_the_queue_tells_places_and_refuses_and_gives_up(held):
    with owning(held, waiting=2) as owner:
        jobs = [owner.submit(simple(number)) for number in range(3)]
        with pytest.raises(ApiError) as caught:
            owner.submit(simple())
        assert caught.value.status == 429
        eventually(lambda: len(owner.waiting) == 2)
        owner.cancel(jobs[1])
        eventually(lambda: len(owner.waiting) == 1)
        owner.cancel(jobs[1])  # no place becomes free twice
        jobs.append(owner.submit(simple(3)))
        with pytest.raises(ApiError):
            owner.submit(simple())
        held.held = no_one
        events = [await heard(job) for job in jobs]
    places = [[event["place"] for event in each[:-1]] for each in events]
    assert places == [[0], [1], [2, 1, 0], [2, 1, 0]]
    assert [each[-1].value for each in events] == [0, None, 2, 3]
    assert events[1][-1].error.status == 499


async def test_a_job_that_waits_too_long_is_given_up(held):
    with owning(held, patience=0.1) as owner:
        first, second = owner.submit(simple(1)), owner.submit(simple(2))
        with pytest.raises(ApiError) as caught:
            value_of((await heard(second))[-1])
        assert caught.value.status == 503
        held.held = no_one
        assert (await heard(first))[-1].value == 1


async def test_a_job_that_is_played_too_long_is_given_up(held):
    with owning(held, patience=0.1) as owner:
        error = (await heard(owner.submit(simple())))[-1].error
        assert error.status == 503 and not held.waiting
        held.held = no_one
        assert (await heard(owner.submit(simple(2))))[-1].value == 2


@pytest.mark.parametrize("phase", ["queued", "reading", "main", "subs"])
async def test_a_cancelled_episode_leaves_nothing(
    held, phase, small_environment, small_questions, monkeypatch
):
    ended = []

    async def episode(job: Job) -> Any:
        try:
            return await play(small_environment, small_questions[0], EpisodeSettings(4, 0.0), 0)
        finally:
            ended.append(phase)

    held.turns = [f"look</think>\n{crop(0, 8)}{crop(8, 16)}"]
    with owning(held) as owner, monkeypatch.context() as patch:
        if phase == "queued":
            owner.submit(simple())
            eventually(lambda: held.waiting)
        if phase == "reading":
            patch.setattr("rollout.engine.requests._Waiting.is_due", lambda *_: False)
        if phase == "subs":
            held.held = lambda request: not held.is_main(request)
        before = len(held.waiting)
        job = owner.submit(episode)
        eventually(
            {
                "queued": lambda: owner.waiting,
                "reading": lambda: owner._scheduler.readings,
                "main": lambda: held.waiting,
                "subs": lambda: len(held.waiting) == 2,
            }[phase]
        )
        owner.cancel(job)
        assert (await heard(job))[-1].error.status == 499
        assert ended == ([] if phase == "queued" else [phase])
        assert len(held.waiting) == before and not owner._scheduler.readings
        held.held = no_one
        assert (await heard(owner.submit(simple(5))))[-1].value == 5


class Strict(Held):
    """Refuses some requests at once, as the engine does with those that are too long."""

    def submit(self, request):
        if request.ids[0] == 13:
            raise ValueError("too long")
        return super().submit(request)


async def quick() -> None:
    await ask(request(1))


async def failing() -> None:
    raise ValueError("broken")


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize(
    "fail",
    [failing, lambda: together(quick(), failing()), lambda: ask(request(1), request(13))],
    ids=["agent", "its agent", "refused request"],
)
async def test_an_error_ends_only_its_own_job(small_vocabulary, fail, begun):
    async def agent(job: Job) -> None:
        if begun:
            await ask(request(1))
        await fail()

    held = Strict(small_vocabulary)
    held.held = lambda request: request.ids[0] == 7
    with owning(held, episodes=2) as owner:
        innocent = owner.submit(simple(7))
        eventually(lambda: held.waiting)
        error = (await heard(owner.submit(agent)))[-1].error
        assert isinstance(error, ValueError) and str(error) in ("broken", "too long")
        held.held = no_one
        assert (await heard(innocent))[-1] == Result(7)


async def test_an_error_of_the_engine_fails_what_is_played_and_nothing_later(held):
    with owning(held, episodes=2) as owner:
        jobs = [owner.submit(simple(number)) for number in range(3)]
        eventually(lambda: len(held.waiting) == 2)
        held.held = no_one
        held.broken = MemoryError("no room")
        results = [(await heard(job))[-1] for job in jobs]
    assert [str(result.error) for result in results] == ["no room", "no room", "None"]


async def test_closing_ends_all_jobs(held):
    with owning(held) as owner:
        jobs = [owner.submit(simple(number)) for number in range(3)]
        eventually(lambda: held.waiting)
    for job in [*jobs, owner.submit(simple())]:
        assert (await heard(job))[-1].error.status == 503


async def test_a_thread_that_cannot_prepare_fails_its_jobs(held):
    def broken() -> None:
        raise MemoryError

    owner = Owner(held, 1, 1, 60)
    owner.start(broken)
    for _ in range(2):
        assert isinstance((await heard(owner.submit(simple())))[-1].error, MemoryError)
    owner.close()
