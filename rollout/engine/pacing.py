"""Agents that are played up to a point of virtual time, and go on later, maybe in another process.

Virtual time counts work, not seconds: one for each token that an agent waits for, and a charge for
each time it waits for files. Of requests and agents that are waited for together, the slowest
counts. How far an agent comes until some virtual time therefore depends on its own tokens only, not
on slots, speed, or other agents.

A coroutine cannot be stored. What it was told can: a new one that is told the same asks the same.
Files are read again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Coroutine, Generator
from typing import Any, Generic, TypeVar

from models.features import FrameReading
from rollout.engine.requests import (
    Asking,
    Gathering,
    Request,
    Sample,
    SampleStop,
    ask,
    together,
)

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class AgentLog:
    """All that an agent was told: enough to go on with it from the start of its coroutine."""

    clock: int = 0
    """Virtual time at which it had been told the last of it."""
    told: tuple[tuple[Sample, ...] | tuple[AgentLog, ...], ...] = ()
    """The answers to each `ask`, one per request, and the logs of the agents of each `together`."""
    begun: tuple[Sample | None, ...] | tuple[AgentLog, ...] = ()
    """The same of what it waits for now, as far as it has come; empty if nothing has begun."""


class PacedAgent(Generic[Result]):
    """An agent that can be played in parts.

    Args:
        agent: The coroutine, as for `run`. It has not started.
        charge: Virtual time of waiting for files.
        log: What an earlier coroutine of this agent was told.

    Attributes:
        log: What the agent was told.
        clock: Its virtual time.
        done: Whether it has ended. Its result is then in `result`.
        strayed: Whether it has not asked again for what its log answers: a file that it had read
            can no longer be read. Its result is then worth nothing.
    """

    def __init__(
        self, agent: Coroutine[Any, Any, Result], charge: int, log: AgentLog | None = None
    ):
        self.log = log or AgentLog()
        self.clock = self.log.clock
        self.done = False
        self.strayed = False
        self.result: Result | None = None
        self._agent = agent
        self._charge = charge
        self._awaited: Asking | Gathering | None = None
        # The agents that it has started and waits for.
        self._others: list[PacedAgent[Any]] = []

    async def restore(self) -> None:
        """Start the agent, and tell it its log. Awaits readings only: the sampler is not asked."""
        await self._tell(None)
        for told in self.log.told:
            if self.done:
                self.strayed = True
                return
            if isinstance(self._awaited, Gathering):
                await self._restore_others(told)
                if self.strayed:
                    return
                await self._tell([other.result for other in self._others])
            else:
                await self._tell(list(told))
        if self.done:
            # A file that nothing was drawn from yet can no longer be read.
            self.log = dataclasses.replace(self.log, begun=())
        elif isinstance(self._awaited, Gathering) and self.log.begun:
            await self._restore_others(self.log.begun)

    async def play(self, until: float) -> None:
        """Play up to virtual time `until`. An agent for `run`.

        The tokens are the same in whatever parts they are played, up to rounding. If `until` is
        infinite, the sampler gets the agent's own requests, as if it were not paced.
        """
        if self._awaited is None and not self.done:
            await self.restore()
        while not self.done:
            if isinstance(self._awaited, Gathering):
                told, values, clock = await self._gather(until)
            elif self._awaited is not None and self.clock < until:
                told, values, clock = await self._ask(self._awaited.requests, until - self.clock)
            else:
                return
            if clock is None:
                self.log = dataclasses.replace(self.log, begun=told)
                return
            self.log = AgentLog(clock, (*self.log.told, told))
            await self._tell(values)

    def close(self) -> None:
        """Give the agent up."""
        for other in self._others:
            other.close()
        self._agent.close()

    async def _tell(self, values: list[Any] | None) -> None:
        """Resume the agent until it asks, starts other agents, or returns."""
        self.clock = self.log.clock
        self._others = []
        try:
            awaited = self._agent.send(values)
            while isinstance(awaited, FrameReading):
                await _HandedOn(awaited)
                self.clock += self._charge
                awaited = self._agent.send(None)
        except StopIteration as end:
            self.done = True
            self.result = end.value
        else:
            self._awaited = awaited

    def end(self, result: Result) -> None:
        """Give the agent up, with a result in its place."""
        self.close()
        self.done = True
        self.result = result

    async def _restore_others(self, logs: Any) -> None:
        self._start_others(logs)
        await together(*[other.restore() for other in self._others])
        self.strayed = any(other.strayed for other in self._others)

    def _start_others(self, logs: Any) -> None:
        assert isinstance(self._awaited, Gathering)
        self._others = [
            PacedAgent(agent, self._charge, log)
            for agent, log in zip(self._awaited.agents, logs, strict=True)
        ]

    async def _gather(self, until: float) -> tuple[Any, list[Any], int | None]:
        """Play the other agents: their logs, their results, and the time if all are done."""
        assert isinstance(self._awaited, Gathering)
        if not self._others:
            self._start_others([AgentLog(self.clock)] * len(self._awaited.agents))
        await together(*[other.play(until) for other in self._others])
        done = all(other.done for other in self._others)
        clock = max(other.clock for other in self._others)
        logs = tuple(other.log for other in self._others)
        return logs, [other.result for other in self._others], clock if done else None

    async def _ask(
        self, requests: tuple[Request, ...], most: float
    ) -> tuple[Any, list[Any], int | None]:
        """Return the samples of at most `most` tokens, as answers, and the time if all have
        ended."""
        samples: Any = list(self.log.begun or (None,) * len(requests))
        pieces = {
            number: _piece(request, begun, most)
            for number, (request, begun) in enumerate(zip(requests, samples, strict=True))
            if begun is None or begun.stop is SampleStop.PAUSED
        }
        for number, sample in zip(pieces, await ask(*pieces.values()), strict=True):
            limit = pieces[number].sampling.max_new_tokens
            cut = sample.stop is SampleStop.LENGTH and len(sample.ids) == limit
            if cut and limit < requests[number].sampling.max_new_tokens:
                sample = dataclasses.replace(sample, stop=SampleStop.PAUSED)
            samples[number] = sample
        paused = any(sample.stop is SampleStop.PAUSED for sample in samples)
        clock = self.clock + max(len(sample.ids) for sample in samples)
        return tuple(samples), samples, None if paused else clock


@dataclasses.dataclass(frozen=True)
class _HandedOn:
    """Hands what an agent awaits to the scheduler. The agent itself takes the result."""

    awaited: FrameReading

    def __await__(self) -> Generator[FrameReading, None, None]:
        yield self.awaited


def _piece(request: Request, begun: Sample | None, most: float) -> Request:
    """Return the next part of a request, which ends when `most` tokens of its response are
    there."""
    if begun is not None:
        request = dataclasses.replace(request, begun=begun)
    if most >= request.sampling.max_new_tokens:
        return request
    sampling = dataclasses.replace(request.sampling, max_new_tokens=math.floor(most))
    return dataclasses.replace(request, sampling=sampling)
