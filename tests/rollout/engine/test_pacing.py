"""Agents that are played in parts of virtual time: the same tokens, and a log to go on from."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest

from models.features import FrameReading
from paravt_jax.data.frames import VideoError
from paravt_jax.method.records import digest
from rollout.engine.pacing import PacedAgent
from rollout.engine.requests import Request, Sample, SampleStop, Sampling, ask, run, together

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
        return [(ticket, self._sample(request)) for ticket, request in waiting.items()]

    def cancel(self, ticket):
        self.waiting.pop(ticket, None)

    def _sample(self, request: Request) -> Sample:
        seed = request.seed
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


class Files(FrameReading):
    """A reading that is done at once and counts how often it was awaited."""

    awaited = 0

    def __init__(self):
        """Reads nothing."""

    @property
    def steps(self):
        return 1

    def done(self):
        return True

    def result(self):
        Files.awaited += 1


async def turn(seeds: tuple[int, ...]) -> list[Sample]:
    request = Request(np.array([1], np.int32), (), Sampling(40), 0)
    return await ask(*(dataclasses.replace(request, seed=seed) for seed in seeds))


async def look(seed: int) -> list[Sample]:
    await Files()
    return await turn((seed,))


async def agent(*turns: tuple[int, ...]):
    """Reads a file; asks with the seeds of each turn, or sends an agent for each of a negative one.

    Returns all tokens and all versions.
    """
    found: list[Sample] = []
    await Files()
    for seeds in turns:
        if seeds[0] < 0:
            reports = await together(*[look(-seed) for seed in seeds])
            found += [sample for report in reports for sample in report]
        else:
            found += await turn(seeds)
    return [sample.ids.tolist() for sample in found], [sample.versions.tolist() for sample in found]


TURNS = ((5,), (-7, -2, -11), (0,), (3, 8), (45,))
STARTS = [CHARGE, *[2 * CHARGE + 6] * 3, 2 * CHARGE + 18, *[2 * CHARGE + 19] * 2, 2 * CHARGE + 28]
END_OF_ALL = STARTS[-1] + 40


def played(ends: list[float]) -> tuple[PacedAgent, Counting]:
    sampler = Counting()
    paced = PacedAgent(agent(*TURNS), CHARGE)
    for end in ends:
        run(sampler, [paced.play(end)])
    return paced, sampler


def test_parts_of_any_length_give_the_same_tokens_and_the_same_clock():
    whole, sampler = played([math.inf])
    assert len(sampler.asked) == 8 and all(request.begun is None for request in sampler.asked)
    # A charge and 6 tokens; a charge and 12, the longest of three; 1; 9; the limit of 40.
    assert whole.clock == END_OF_ALL
    for step in (1, 2, 3, 5, 8, 13, 29):
        paced, _ = played([*range(step, 100, step)])
        assert paced.done and paced.clock == whole.clock
        assert paced.result == whole.result


def test_an_agent_stops_exactly_at_its_time():
    """Tokens before it have the old version, all others the new one."""
    for end in range(1, END_OF_ALL, 2):
        sampler = Counting()
        paced = PacedAgent(agent(*TURNS), CHARGE)
        run(sampler, [paced.play(end)])
        sampler.version = 1
        run(sampler, [paced.play(math.inf)])
        assert paced.result is not None
        _, versions = paced.result
        for start, found in zip(STARTS, versions, strict=True):
            assert found == [int(start + n >= end) for n in range(len(found))]


@pytest.mark.parametrize("end", [1, 4, 9, 13, 15, 26, 50])
def test_a_new_coroutine_goes_on_from_the_log(end):
    whole, _ = played([math.inf])
    first, _ = played([end])
    Files.awaited = 0
    sampler = Counting()
    again = PacedAgent(agent(*TURNS), CHARGE, first.log)
    run(sampler, [again.restore()])
    assert not sampler.asked, "what it was told is not asked again"
    assert again.clock == first.clock and again.log == first.log
    # What was waited for before is read again, and nothing else.
    assert Files.awaited == 1 + 3 * (end >= STARTS[1] - CHARGE)
    run(sampler, [again.play(math.inf)])
    assert again.done and again.result == whole.result and again.clock == whole.clock


class Vanishing(Files):
    """A reading of a file that can be read `left` more times."""

    left = 0

    def result(self):
        Vanishing.left -= 1
        if Vanishing.left < 0:
            raise VideoError("a.mp4", "gone")


async def agent_of_files() -> str:
    """Reads a file and asks, sends another agent to do the same, and asks again."""

    async def other() -> str:
        try:
            await Vanishing()
        except VideoError:
            return "unreadable"
        await turn((4,))
        return "read"

    try:
        await Vanishing()
    except VideoError:
        return "unreadable"
    await turn((4,))
    (found,) = await together(other())
    await turn((4,))
    return found


# The first answer ends at 8, the other agent begins at 11 and ends at 16, the last answer at 21.
@pytest.mark.parametrize(
    ("end", "reads", "strayed", "result"),
    [
        (5, 0, False, "unreadable"),  # in its first answer, of which nothing was told
        (10, 0, True, None),
        (13, 0, True, None),
        (13, 1, False, "unreadable"),  # the other agent goes on without its file
        (18, 1, True, None),  # its report has been told
        (18, 2, False, "read"),
    ],
)
def test_an_agent_whose_file_disappears_meanwhile_does_not_crash(end, reads, strayed, result):
    Vanishing.left = 9
    first = PacedAgent(agent_of_files(), CHARGE)
    run(Counting(), [first.play(end)])
    Vanishing.left = reads
    again = PacedAgent(agent_of_files(), CHARGE, first.log)
    sampler = Counting()
    run(sampler, [again.restore()])
    assert again.strayed == strayed
    if strayed:
        again.end("given up")
        run(sampler, [again.play(math.inf)])
        assert again.done and again.result == "given up" and not sampler.asked
    else:
        run(sampler, [again.play(math.inf)])
        assert again.done and again.result == result
