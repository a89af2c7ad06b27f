"""Agents in waves: everything that is asked at one time goes to the sampler together, and answers find their way back."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from rollout.requests import Request, Sample, SampleStop, ask, run


def request(number: int) -> Request:
    return Request(np.array([number], np.int32), (), np.zeros(1, np.int32), 1.0, 4, number, (0,))


class Doubling:
    """Answers a request with twice its number, and remembers the waves."""

    def __init__(self):
        self.waves: list[list[int]] = []

    def generate(self, requests):
        numbers = [int(r.prompt[0]) for r in requests]
        self.waves.append(numbers)
        return [Sample(np.array([2 * n]), np.zeros(1), SampleStop.LENGTH, 0, "") for n in numbers]


async def agent(start: int, rounds: int, width: int = 1) -> list[int]:
    """Asks `width` requests side by side, `rounds` times; the numbers tell whose they are."""
    heard = []
    for turn in range(rounds):
        heard += [int(s.ids[0]) for s in await ask(*(request(start + 10 * turn + n) for n in range(width)))]
    return heard


def test_results_stand_in_the_order_of_the_agents_whenever_they_end():
    sampler = Doubling()
    assert run(sampler, [agent(100, 3), agent(200, 0), agent(300, 1, width=2)]) == [[200, 220, 240], [], [600, 602]]


def test_one_wave_is_one_batch_and_ended_agents_ask_no_more():
    sampler = Doubling()
    run(sampler, [agent(100, 3), agent(200, 1, width=2), agent(300, 2)])
    assert sampler.waves == [[100, 200, 201, 300], [110, 310], [120]]


def test_progress_is_told_after_each_wave():
    told = []
    run(Doubling(), [agent(100, 3), agent(200, 1), agent(300, 1)], lambda done, all: told.append((done, all)))
    assert told == [(2, 3), (2, 3), (3, 3)]


def test_asking_for_nothing_waits_for_nothing():
    sampler = Doubling()
    assert run(sampler, [agent(100, 2, width=0)]) == [[]]
    assert run(sampler, []) == [] and sampler.waves == []


@pytest.mark.parametrize("at", [0, 1])
def test_an_error_reaches_the_caller_and_ends_the_other_agents(at):
    ended = []

    async def careful(number: int) -> None:
        try:
            await agent(number, 5)
        finally:
            ended.append(number)

    async def failing() -> None:
        await agent(500, at)
        raise KeyError("broken agent")

    agents = [careful(100), failing(), careful(300)]
    with pytest.raises(KeyError, match="broken agent"):
        run(Doubling(), agents)
    assert [inspect.getcoroutinestate(agent) for agent in agents] == [inspect.CORO_CLOSED] * 3
    assert ended == ([100] if at == 0 else [100, 300])  # one that had not begun has nothing to end


def test_an_error_of_the_sampler_reaches_the_caller():
    class Broken:
        def generate(self, requests):
            raise ValueError("no shape")

    with pytest.raises(ValueError, match="no shape"):
        run(Broken(), [agent(100, 1)])
