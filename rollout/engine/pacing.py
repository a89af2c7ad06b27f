"""Agents that are played up to a point of virtual time, and go on later, maybe in another process.

Virtual time counts work, not seconds: one for each token that an agent waits for, and a charge for
each `ask` after the first, since a file was read and a prompt prefilled in between. Requests of one
`ask` are decoded side by side, so the longest counts. How far an agent comes until some virtual
time therefore depends on its own tokens only, not on slots, speed, or other agents.

A coroutine cannot be stored. What it was told can: a new one that is told the same asks the same.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

from rollout.engine.requests import Request, Sample, SampleStop, ask

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class AgentLog:
    """All that an agent was told: enough to go on with it from the start of its coroutine."""

    clock: int = 0
    """Virtual time at which its latest answers were complete."""
    answered: tuple[tuple[tuple[Sample, ...], ...], ...] = ()
    """The answers to each `ask`: one tuple per request."""
    begun: tuple[Sample | None, ...] = ()
    """What the requests of the next `ask` have been told so far; empty if nothing."""


class PacedAgent(Generic[Result]):
    """An agent whose requests have one seed each.

    Args:
        agent: The coroutine, which awaits nothing but `ask`. It has not started.
        charge: Virtual time of an `ask` after the first, besides its tokens.
        log: What an earlier coroutine of this agent was told.

    Attributes:
        log: What the agent was told.
        done: Whether it has ended, at `log.clock`. Its result is then in `result`.
    """

    def __init__(
        self, agent: Coroutine[Any, Any, Result], charge: int, log: AgentLog | None = None
    ):
        self.log = log or AgentLog()
        self.done = False
        self.result: Result | None = None
        self._agent = agent
        self._charge = charge
        self._started = False
        self._requests: tuple[Request, ...] = ()

    async def play(self, until: float) -> None:
        """Play up to virtual time `until`. An agent for `run`: it awaits nothing but `ask`.

        The tokens are the same in whatever parts they are played, up to rounding. If `until` is
        infinite, the sampler gets the agent's own requests, as if it were not paced.
        """
        if not self._started:
            self._start()
        while not self.done:
            start = self.log.clock + (self._charge if self.log.answered else 0)
            if until <= start:
                return
            samples = await self._ask(until - start)
            if any(sample.stop is SampleStop.PAUSED for sample in samples):
                self.log = dataclasses.replace(self.log, begun=samples)
                return
            clock = start + max(len(sample.ids) for sample in samples)
            answers = tuple((sample,) for sample in samples)
            self.log = AgentLog(clock, (*self.log.answered, answers))
            self._tell([*answers])

    def close(self) -> None:
        """Give the agent up."""
        self._agent.close()

    def _start(self) -> None:
        self._started = True
        self._tell(None)
        for answers in self.log.answered:
            self._tell([*answers])

    def _tell(self, answers: list[tuple[Sample, ...]] | None) -> None:
        """Resume the agent until it asks again or returns."""
        try:
            self._requests = self._agent.send(answers).requests
        except StopIteration as end:
            self.done = True
            self.result = end.value

    async def _ask(self, most: float) -> tuple[Sample, ...]:
        """The samples of the open requests, of at most `most` tokens each."""
        samples = list(self.log.begun or (None,) * len(self._requests))
        parts = {
            number: _part(request, begun, most)
            for number, (request, begun) in enumerate(zip(self._requests, samples, strict=True))
            if begun is None or begun.stop is SampleStop.PAUSED
        }
        for number, (sample,) in zip(parts, await ask(*parts.values()), strict=True):
            limit = parts[number].sampling.max_new_tokens
            cut = sample.stop is SampleStop.LENGTH and len(sample.ids) == limit
            if cut and limit < self._requests[number].sampling.max_new_tokens:
                sample = dataclasses.replace(sample, stop=SampleStop.PAUSED)
            samples[number] = sample
        return tuple(sample for sample in samples if sample is not None)


def _part(request: Request, begun: Sample | None, most: float) -> Request:
    """The next part of a request, which ends when `most` tokens of its response are there."""
    if begun is not None:
        request = dataclasses.replace(request, begun=begun)
    if most >= request.sampling.max_new_tokens:
        return request
    sampling = dataclasses.replace(request.sampling, max_new_tokens=math.floor(most))
    return dataclasses.replace(request, sampling=sampling)
