"""Agents that are played in parts of virtual time: the same tokens, and a log to go on from."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest

from paravt_jax.method.records import digest
from rollout.engine.pacing import AgentLog, PacedAgent
from rollout.engine.requests import Request, Sample, SampleStop, Sampling, ask, run

CHARGE = 3
END = 99


class Counting:
    """Draws seed * 100 + number as token `number`, and `END` as token `seed`."""

    def __init__(self):
        self.version = 0
        self.asked: list[Request] = []
        self.waiting: dict[int, Request] = {}
        self.tickets = itertools.count()

    def submit(self, request):
        ticket = next(self.tickets)
        self.asked.append(request)
        self.waiting[ticket] = request
        return ticket

    def step(self):
        waiting, self.waiting = self.waiting, {}
        return [(ticket, (self._sample(request),)) for ticket, request in waiting.items()]

    def cancel(self, ticket):
        self.waiting.pop(ticket, None)

    def _sample(self, request: Request) -> Sample:
        (seed,) = request.seeds
        begun = request.begun
        first = 0 if begun is None else len(begun.ids)
        end = min(seed + 1, request.sampling.max_new_tokens)
        stop = SampleStop.STOP_ID if end == seed + 1 else SampleStop.LENGTH
        ids = [END if n == seed else seed * 100 + n for n in range(end)]
        old = [] if begun is None else begun.versions.tolist()
        versions = np.array(old + [self.version] * (end - first), np.int32)
        return Sample(
            np.array(ids, np.int32),
            np.zeros(end, np.float32),
            stop,
            versions,
            digest(np.append(request.ids, ids)),
        )


async def agent(*turns: tuple[int, ...]):
    """Asks with the seeds of each turn; returns all tokens and all versions."""
    tokens, versions = [], []
    for seeds in turns:
        answers = await ask(
            *(Request(np.array([1], np.int32), (), Sampling(40), (seed,)) for seed in seeds)
        )
        for (sample,) in answers:
            tokens.append(sample.ids.tolist())
            versions.append(sample.versions.tolist())
    return tokens, versions


TURNS = ((5,), (7, 2, 11), (0,), (45,))


def played(ends: list[float]) -> tuple[PacedAgent, Counting]:
    sampler = Counting()
    paced = PacedAgent(agent(*TURNS), CHARGE)
    for end in ends:
        run(sampler, [paced.play(end)])
    return paced, sampler


def test_parts_of_any_length_give_the_same_tokens_and_the_same_clock():
    whole, sampler = played([math.inf])
    assert len(sampler.asked) == 6 and all(request.begun is None for request in sampler.asked)
    # 6 tokens; a charge and 12, the longest of three; a charge and 1; a charge and the limit of 40.
    assert whole.log.clock == 6 + CHARGE + 12 + CHARGE + 1 + CHARGE + 40
    for step in range(1, 30):
        paced, _ = played([*range(step, 100, step)])
        assert paced.done and paced.log.clock == whole.log.clock
        assert paced.result == whole.result


def test_an_agent_stops_exactly_at_its_time():
    """Tokens before it have the old version, all others the new one."""
    for end in range(1, 68):
        sampler = Counting()
        paced = PacedAgent(agent(*TURNS), CHARGE)
        run(sampler, [paced.play(end)])
        sampler.version = 1
        run(sampler, [paced.play(math.inf)])
        assert paced.result is not None
        _, versions = paced.result
        # The virtual time at which each token of each request is drawn.
        starts = [0, 6 + CHARGE, 6 + CHARGE, 6 + CHARGE, 18 + 2 * CHARGE, 19 + 3 * CHARGE]
        for start, found in zip(starts, versions, strict=True):
            assert found == [int(start + n >= end) for n in range(len(found))]


@pytest.mark.parametrize("end", [1, 6, 8, 9, 10, 13, 25, 30, 50])
def test_a_new_coroutine_goes_on_from_the_log(end):
    whole, _ = played([math.inf])
    first, _ = played([end])
    sampler = Counting()
    again = PacedAgent(agent(*TURNS), CHARGE, first.log)
    run(sampler, [again.play(math.inf)])
    assert again.done and again.log.clock == whole.log.clock
    assert again.result == whole.result
    # It asks for nothing that it was told already.
    told = sum(len(answers) for answers in first.log.answered)
    finished = [s for s in first.log.begun if s is not None and s.stop is not SampleStop.PAUSED]
    assert len(sampler.asked) == 6 - told - len(finished)


def test_requests_are_left_as_they_are_without_a_limit():
    wanted = Request(np.array([1], np.int32), (), Sampling(4), (1,))

    async def one():
        return await ask(wanted)

    sampler = Counting()
    run(sampler, [PacedAgent(one(), CHARGE).play(math.inf)])
    assert sampler.asked[0] is wanted


def test_an_agent_that_asks_nothing_is_done_at_once():
    paced = PacedAgent(agent(), CHARGE)
    run(Counting(), [paced.play(0)])
    assert paced.done and paced.log == AgentLog() and dataclasses.asdict(paced.log)["clock"] == 0
