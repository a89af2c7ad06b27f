"""Agents side by side, and refused requests.

Requests go to the sampler at once, and an agent continues as soon as its own answers are there.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
import re

import numpy as np
import pytest

from rollout.engine.requests import (
    Request,
    Sample,
    SampleStop,
    Sampling,
    Scheduler,
    ask,
    run,
    together,
)


def request(number: int) -> Request:
    return Request(np.array([number], np.int32), (), Sampling(4), 0)


class Doubling:
    """Answers a request with twice its number, after `patience(number)` steps.

    Answers of one step come in reverse order: no agent may rely on their order.

    Attributes:
        asked: (steps done before, number) of every request.
        open: by ticket, the step of the answer and the request.
        cancelled: numbers of cancelled requests.
    """

    def __init__(self, patience=lambda number: 1):
        self.patience = patience
        self.tickets = itertools.count()
        self.steps = 0
        self.asked: list[tuple[int, int]] = []
        self.open: dict[int, tuple[int, Request]] = {}
        self.cancelled: list[int] = []

    def submit(self, request):
        number = int(request.ids[0])
        ticket = next(self.tickets)
        self.asked.append((self.steps, number))
        self.open[ticket] = (self.steps + self.patience(number), request)
        return ticket

    def step(self):
        self.steps += 1
        done = [ticket for ticket, (due, _) in self.open.items() if due <= self.steps][::-1]
        return [(ticket, self._sample(self.open.pop(ticket)[1])) for ticket in done]

    def cancel(self, ticket):
        # Otherwise it was answered in the very step that failed.
        if ticket in self.open:
            self.cancelled.append(int(self.open.pop(ticket)[1].ids[0]))

    def _sample(self, request) -> Sample:
        return Sample(
            2 * request.ids,
            np.zeros(1, np.float32),
            SampleStop.LENGTH,
            np.zeros(1, np.int32),
            "",
        )

    @property
    def waves(self) -> list[list[int]]:
        """The numbers asked for before each step."""
        waves: list[list[int]] = [[] for _ in range(self.steps)]
        for step, number in self.asked:
            waves[step].append(number)
        return [sorted(numbers) for numbers in waves]


async def agent(start: int, rounds: int, width: int = 1) -> list[int]:
    """Asks `width` requests side by side, `rounds` times, with numbers from `start` on."""
    answers = []
    for turn in range(rounds):
        first = start + 10 * turn
        given = await ask(*(request(number) for number in range(first, first + width)))
        answers += [int(sample.ids[0]) for sample in given]
    return answers


def test_results_come_in_the_order_of_the_agents():
    sampler = Doubling()
    assert run(sampler, [agent(100, 3), agent(200, 0), agent(300, 1, width=2)]) == [
        [200, 220, 240],
        [],
        [600, 602],
    ]
    assert not sampler.open


def test_an_agent_continues_as_soon_as_its_own_answers_are_there():
    sampler = Doubling(lambda number: 5 if number in (100, 301) else 1)
    assert run(sampler, [agent(100, 2), agent(200, 3), agent(300, 2, width=2)]) == [
        [200, 220],
        [400, 420, 440],
        [600, 602, 620, 622],
    ]
    step_of = {number: step for step, number in sampler.asked}
    # Agent 200 does not wait for slow answers to others.
    assert (step_of[200], step_of[210], step_of[220]) == (0, 1, 2)
    # The others wait for their own slow answer, even if another of theirs is there already.
    assert (step_of[110], step_of[310], step_of[311]) == (5, 5, 5)
    assert sampler.steps == 6
    assert not sampler.open


def test_agents_of_an_agent_run_side_by_side():
    async def leader():
        results = await together(*[agent(number, 2) for number in (1, 5, 3)])
        assert await together() == []
        [sample] = await ask(request(9))
        return results, sample.ids.tolist()

    sampler = Doubling(lambda number: 3 if number == 1 else 1)
    [(results, last)] = run(sampler, [leader()])
    assert results == [run(Doubling(), [agent(number, 2)])[0] for number in (1, 5, 3)]
    assert last == [18]
    # The slowest of the three decides when their leader goes on.
    assert [number for step, number in sampler.asked if step == 0] == [1, 5, 3]
    assert sampler.asked[-1][1] == 9


def test_an_error_of_an_agents_agent_closes_all_of_them():
    closed = []

    async def waiting(number):
        try:
            await ask(request(number))
        finally:
            closed.append(number)

    async def failing():
        raise RuntimeError("broken")

    async def leader():
        await together(waiting(1), failing(), waiting(2))

    sampler = Doubling(lambda number: 5)
    with pytest.raises(RuntimeError, match="broken"):
        run(sampler, [leader(), waiting(3)])
    assert closed == [1] and sampler.cancelled == [1]


@pytest.mark.parametrize("turn", [0, 1, 2])
def test_an_error_of_an_agent_cancels_requests_and_closes_the_other_agents(turn):
    """The agent fails after `turn` turns, and the caller gets its error."""
    ended = []

    async def careful(number: int) -> None:
        try:
            await agent(number, 5, width=2)
        finally:
            ended.append(number)

    async def failing() -> None:
        await agent(500, turn)
        raise KeyError("broken agent")

    sampler = Doubling(lambda number: 9 if number == 101 else 1)
    agents = [careful(100), failing(), careful(300)]
    with pytest.raises(KeyError, match="broken agent"):
        run(sampler, agents)
    assert [inspect.getcoroutinestate(agent) for agent in agents] == [inspect.CORO_CLOSED] * 3
    # At turn 0, agent 300 has not begun, so its `finally` does not run.
    assert ended == ([100] if turn == 0 else [100, 300])
    assert not sampler.open
    assert sampler.cancelled == [[100, 101], [101, 310, 311], [101]][turn]


def test_an_error_of_the_sampler_cancels_requests():
    class Broken(Doubling):
        def step(self):
            if self.steps == 2:
                raise KeyboardInterrupt
            return super().step()

    sampler = Broken(lambda number: 3 if number == 200 else 1)
    with pytest.raises(KeyboardInterrupt):
        run(sampler, [agent(100, 9), agent(200, 1)])
    assert sorted(sampler.cancelled) == [120, 200]
    assert not sampler.open


def test_a_refused_request_cancels_all_others():
    class Strict(Doubling):
        def submit(self, request):
            if request.ids[0] == 201:
                raise ValueError("too long")
            return super().submit(request)

    sampler = Strict()
    with pytest.raises(ValueError, match="too long"):
        run(sampler, [agent(100, 1), agent(200, 1, width=3), agent(300, 1)])
    assert sorted(sampler.cancelled) == [100, 200]
    assert not sampler.open


def test_a_dropped_agent_and_its_own_agents_leave_nothing():
    closed = []

    async def leader():
        try:
            await together(*[agent(number, 2) for number in (1, 5)])
        finally:
            closed.append("leader")

    sampler = Doubling(lambda number: 2 if number == 1 else 4)
    scheduler = Scheduler(sampler)
    scheduler.add(0, leader())
    scheduler.add(1, agent(300, 1))
    for _ in range(3):
        scheduler.step()
    scheduler.drop(0)
    scheduler.drop(0)
    assert (closed, sorted(sampler.cancelled), scheduler.playing) == (["leader"], [5, 11], 1)
    assert len(scheduler.running) == len(scheduler.tickets) == 1
    scheduler.step()
    assert scheduler.take_finished() == [(1, [600])] and not scheduler.playing


# --- refused input ---


@pytest.mark.parametrize(
    "wrong",
    [{"max_new_tokens": -1}, {"temperature": math.nan}, {"deadline": 0.0}],
)
def test_sampling_without_a_meaning_is_refused_by_name(unchecked, wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=re.escape(f"Sampling.{name}: {value!r}; ")):
        Sampling(**({"max_new_tokens": 4} | wrong))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"ids": np.ones((1, 3), int)}, "Request.ids: shape (1, 3) of int64"),
        ({"ids": np.array([1.5, 2.0])}, "Request.ids: shape (2,) of float64"),
    ],
)
def test_ids_of_a_wrong_shape_or_type_are_refused_by_name(unchecked, change, named):
    with pytest.raises(ValueError, match=re.escape(named)):
        dataclasses.replace(request(1), **change)
