"""Agents side by side: what is asked goes to the sampler at once, and each agent goes on as soon as its own answers are there."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
import random

import numpy as np
import pytest

from rollout.engine.requests import Request, Sample, SampleStop, Sampling, ask, run


def request(number: int, seeds: tuple[int, ...] = (0,)) -> Request:
    return Request(np.array([number], np.int32), (), Sampling(4), seeds)


class Doubling:
    """Answers a request with twice its number, after as many steps as `patience` says of the number; keeps what it was asked and when.

    Of the answers of one step the last asked for comes first: nobody may rely on an order.
    """

    def __init__(self, patience=lambda number: 1):
        self.patience = patience
        self.tickets = itertools.count()
        self.steps = 0
        self.asked: list[tuple[int, int]] = []  # (steps done before, number)
        self.open: dict[int, tuple[int, Request]] = {}  # ticket -> the step in which it is answered
        self.cancelled: list[int] = []

    def submit(self, request):
        number, ticket = int(request.ids[0]), next(self.tickets)
        self.asked.append((self.steps, number))
        self.open[ticket] = (self.steps + self.patience(number), request)
        return ticket

    def step(self):
        self.steps += 1
        done = [ticket for ticket, (due, _) in self.open.items() if due <= self.steps][::-1]
        return [(ticket, self._samples(self.open.pop(ticket)[1])) for ticket in done]

    def cancel(self, ticket):
        if ticket in self.open:  # else it was answered in the step that went wrong
            self.cancelled.append(int(self.open.pop(ticket)[1].ids[0]))

    def _samples(self, request) -> tuple[Sample, ...]:
        return tuple(
            Sample(2 * request.ids + s, np.zeros(1, np.float32), SampleStop.LENGTH, 0, "")
            for s in request.seeds
        )

    @property
    def waves(self) -> list[list[int]]:
        """The numbers asked for before each step."""
        return [
            sorted(number for at, number in self.asked if at == step) for step in range(self.steps)
        ]


async def agent(start: int, rounds: int, width: int = 1) -> list[int]:
    """Asks `width` requests side by side, `rounds` times; the numbers tell whose they are."""
    heard = []
    for turn in range(rounds):
        heard += [
            int(s.ids[0])
            for (s,) in await ask(*(request(start + 10 * turn + n) for n in range(width)))
        ]
    return heard


def test_results_stand_in_the_order_of_the_agents_whenever_they_end():
    sampler = Doubling()
    assert run(sampler, [agent(100, 3), agent(200, 0), agent(300, 1, width=2)]) == [
        [200, 220, 240],
        [],
        [600, 602],
    ]
    assert not sampler.open


def test_all_that_is_asked_at_one_time_is_there_before_the_next_step_and_ended_agents_ask_no_more():
    sampler = Doubling()
    run(sampler, [agent(100, 3), agent(200, 1, width=2), agent(300, 2)])
    assert sampler.waves == [[100, 200, 201, 300], [110, 310], [120]]


def test_an_agent_goes_on_as_soon_as_its_own_answers_are_there():
    sampler = Doubling(lambda number: 5 if number in (100, 301) else 1)
    assert run(sampler, [agent(100, 2), agent(200, 3), agent(300, 2, width=2)]) == [
        [200, 220],
        [400, 420, 440],
        [600, 602, 620, 622],
    ]
    at = {number: step for step, number in sampler.asked}
    assert (at[200], at[210], at[220]) == (0, 1, 2)  # nobody else's wait is its own
    assert (at[110], at[310], at[311]) == (
        5,
        5,
        5,
    )  # an agent's own slow answer is: it wants all it asked for
    assert sampler.steps == 6 and not sampler.open


def test_each_request_has_its_samples_in_the_order_asked_for():
    async def curious() -> list[list[int]]:
        given = await ask(request(7, (0, 1, 2)), request(8), request(9, (5, 4)))
        return [[int(sample.ids[0]) for sample in samples] for samples in given]

    assert run(Doubling(lambda number: {7: 3, 8: 1, 9: 2}[number]), [curious()]) == [
        [[14, 15, 16], [16], [23, 22]]
    ]


def test_progress_is_told_when_some_are_done():
    told = []
    run(
        Doubling(),
        [agent(100, 3), agent(200, 1), agent(300, 1)],
        lambda done, all: told.append((done, all)),
    )
    assert told == [(2, 3), (3, 3)]


def test_asking_for_nothing_waits_for_nothing():
    sampler = Doubling()
    assert run(sampler, [agent(100, 2, width=0)]) == [[]]
    assert run(sampler, []) == [] and sampler.steps == 0


def test_a_run_repeats_exactly_and_results_do_not_depend_on_who_is_slow():
    def play(patience):
        sampler = Doubling(patience)
        return run(
            sampler, [agent(100 * n, n % 4, width=1 + n % 3) for n in range(1, 12)]
        ), sampler.asked

    slow = lambda number: 1 + random.Random(number).randrange(6)  # noqa: E731
    assert play(slow) == play(slow)
    assert play(slow)[0] == play(lambda number: 1)[0]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_error_reaches_the_caller_cancels_what_is_asked_and_ends_the_other_agents(at):
    ended = []

    async def careful(number: int) -> None:
        try:
            await agent(number, 5, width=2)
        finally:
            ended.append(number)

    async def failing() -> None:
        await agent(500, at)
        raise KeyError("broken agent")

    sampler = Doubling(lambda number: 9 if number == 101 else 1)
    agents = [careful(100), failing(), careful(300)]
    with pytest.raises(KeyError, match="broken agent"):
        run(sampler, agents)
    assert [inspect.getcoroutinestate(agent) for agent in agents] == [inspect.CORO_CLOSED] * 3
    assert ended == ([100] if at == 0 else [100, 300])  # one that had not begun has nothing to end
    assert not sampler.open and sampler.cancelled == [[100, 101], [101, 310, 311], [101]][at]


def test_an_error_of_the_sampler_reaches_the_caller_and_cancels_what_is_asked():
    class Broken(Doubling):
        def step(self):
            if self.steps == 2:
                raise KeyboardInterrupt
            return super().step()

    sampler = Broken(lambda number: 3 if number == 200 else 1)
    with pytest.raises(KeyboardInterrupt):
        run(sampler, [agent(100, 9), agent(200, 1)])
    assert sorted(sampler.cancelled) == [120, 200] and not sampler.open


def test_a_request_that_the_sampler_refuses_ends_all():
    class Strict(Doubling):
        def submit(self, request):
            if request.ids[0] == 201:
                raise ValueError("too long")
            return super().submit(request)

    sampler = Strict()
    with pytest.raises(ValueError, match="too long"):
        run(sampler, [agent(100, 1), agent(200, 1, width=3), agent(300, 1)])
    assert sorted(sampler.cancelled) == [100, 200] and not sampler.open


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_new_tokens": -1}, "-1; a number of tokens, give 0 or more"),
        ({"max_new_tokens": 8.0}, "8.0; a "),
        ({"temperature": -0.1}, "-0.1; give 0 .* or a number above it"),
        ({"temperature": math.nan}, "nan"),
        ({"temperature": math.inf}, "inf"),
        ({"temperature": "1"}, "'1'; a "),
        ({"top_k": -1}, "-1; a number of words, give 0"),
        ({"top_k": 2**31}, "2147483648; a number of words.*below 2"),
        ({"top_p": 0.0}, "0.0; a share of probability, give a number above 0 and up to 1"),
        ({"top_p": 1.01}, "1.01"),
        ({"top_p": math.nan}, "nan"),
        ({"top_p": None}, "None; a "),
        ({"deadline": 0.0}, "0.0; seconds from now, give a number above 0 or leave it out"),
        ({"deadline": math.nan}, "nan"),
        ({"stop_ids": (3, -1)}, r"\(3, -1\); ids of words are 0 or more"),
        ({"stop_ids": (2**31,)}, ".*below 2"),
        ({"stop_ids": {3}}, r"\{3\}; a "),
        ({"stop_ids": (3.5,)}, r"\(3.5,\); a "),
        ({"stop_strings": (b"a", b"")}, ".*; an empty one ends everything, leave it out"),
        ({"stop_strings": ("a",)}, ".*; a tuple, such as .*encode"),
    ],
)
def test_sampling_that_means_nothing_is_refused_by_name(wrong, message):
    with pytest.raises(ValueError, match=f"Sampling.{next(iter(wrong))}: {message}"):
        Sampling(**({"max_new_tokens": 4} | wrong))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": np.ones((1, 3), int)}, r"Request.ids: shape \(1, 3\) of int64"),
        ({"ids": np.array([1.5, 2.0])}, r"Request.ids: shape \(2,\) of float64"),
        ({"seeds": 3}, "Request.seeds: 3; a tuple of whole numbers"),
        ({"seeds": (None,)}, r"Request.seeds: \(None,\)"),
        ({"frames": (3,)}, r"Request.frames: \(3,\); a tuple of frames"),
    ],
)
def test_requests_of_other_types_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(request(1), **change)
