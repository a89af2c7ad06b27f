"""What an agent asks of an engine, what comes back, and how many agents ask at once.

An agent is a coroutine that awaits `ask(...)`. `run` hands what any agent asks for to the sampler at once, and goes on with each agent
as soon as all it asked for is there: a slow answer holds up nobody else. Without deadlines nothing here depends on time, so a run
repeats exactly.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import math
import sys
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np

from paravt_jax.method.records import Frame

Result = TypeVar("Result")

_INTEGER = (int, np.integer)
_REAL = (int, float, np.integer, np.floating)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a response is sampled and when it ends.

    `temperature` 0 is greedy. Of the words at that temperature the `top_k` likeliest stay (0: all), and of those the fewest whose
    probabilities reach `top_p`. A response ends with one of `stop_ids` or with the token that completes one of `stop_strings` (bytes of
    the response's tokens), both of which belong to it; after `max_new_tokens`; or `deadline` seconds after it was asked for.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[bytes, ...] = ()
    deadline: float = math.inf

    def __post_init__(self):
        for name, kinds in (
            ("max_new_tokens", _INTEGER),
            ("top_k", _INTEGER),
            ("temperature", _REAL),
            ("top_p", _REAL),
            ("deadline", _REAL),
        ):
            if not isinstance(getattr(self, name), kinds):
                raise ValueError(
                    f"Sampling.{name}: {getattr(self, name)!r}; a number, {'whole' if kinds is _INTEGER else 'real'}, give one"
                )
        for name, kinds in (("stop_ids", _INTEGER), ("stop_strings", (bytes,))):
            values = getattr(self, name)
            if not isinstance(values, tuple) or any(
                not isinstance(value, kinds) for value in values
            ):
                example = "(3,)" if name == "stop_ids" else "('a'.encode(),)"
                raise ValueError(
                    f"Sampling.{name}: {values!r}; a tuple, such as {example}, is needed"
                )
        if self.max_new_tokens < 0:
            raise ValueError(
                f"Sampling.max_new_tokens: {self.max_new_tokens}; a number of tokens, give 0 or more"
            )
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(
                f"Sampling.temperature: {self.temperature}; give 0 (the likeliest token) or a number above it"
            )
        if not 0 <= self.top_k < 2**31:
            raise ValueError(
                f"Sampling.top_k: {self.top_k}; a number of words, give 0 (all of them) or more, below 2**31"
            )
        if any(not 0 <= stop < 2**31 for stop in self.stop_ids):
            raise ValueError(
                f"Sampling.stop_ids: {self.stop_ids}; ids of words are 0 or more, below 2**31"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(
                f"Sampling.top_p: {self.top_p}; a share of probability, give a number above 0 and up to 1"
            )
        if not self.deadline > 0:
            raise ValueError(
                f"Sampling.deadline: {self.deadline}; seconds from now, give a number above 0 or leave it out"
            )
        if not all(self.stop_strings):
            raise ValueError(
                f"Sampling.stop_strings: {self.stop_strings}; an empty one ends everything, leave it out"
            )


@dataclasses.dataclass(frozen=True)
class Request:
    """One response to `ids` (int32) for every seed. `frames` are those that the image placeholders in `ids` stand for, in order.

    Equal seeds (modulo 2**32) give equal tokens, whatever else is asked for (up to rounding). What requests have in common at their
    start is computed once. ValueError for ids that are not a row of whole numbers, and for frames or seeds that are no tuple of theirs.
    """

    ids: np.ndarray
    frames: tuple[Frame, ...]
    sampling: Sampling
    seeds: tuple[int, ...]

    def __post_init__(self):
        ids = np.asarray(self.ids)
        if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
            raise ValueError(
                f"Request.ids: shape {ids.shape} of {ids.dtype}; one sequence of token ids, give whole numbers [t]"
            )
        for name, kinds in (("frames", (Frame,)), ("seeds", _INTEGER)):
            values = getattr(self, name)
            if not isinstance(values, tuple) or any(
                not isinstance(value, kinds) for value in values
            ):
                raise ValueError(
                    f"Request.{name}: {values!r}; a tuple of {'frames' if name == 'frames' else 'whole numbers'} is needed"
                )


class SampleStop(enum.StrEnum):
    """Why sampling ended."""

    STOP_ID = "stop_id"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    DEADLINE = "deadline"
    UNREADABLE = "unreadable"  # the video could not be read (any more)
    REFUSED = "refused"  # a server would not answer this request, for what is in it


@dataclasses.dataclass(frozen=True)
class Sample:
    """A sampled response: int32 ids, their float32 log-probs under the sampling distribution, and the version of the weights.

    `digest` is that of every token the model was really fed, the sampled ones included: see `paravt_jax.method.records.digest`.
    `reason` says in words why a request was refused.
    """

    ids: np.ndarray
    logprobs: np.ndarray
    stop: SampleStop
    version: int
    digest: str
    reason: str = ""


Completion = tuple[int, tuple[Sample, ...]]  # the request's ticket, and a sample for every seed


@runtime_checkable
class Sampler(Protocol):
    """Anything that answers requests: the engine, or a script in a test."""

    def submit(self, request: Request) -> int:
        """Takes a request in and returns its ticket."""
        ...

    def step(self) -> list[Completion]:
        """Works for a while; returns what was finished. Every request is, after finitely many steps."""
        ...

    def cancel(self, ticket: int) -> None:
        """Gives a request up; it is not answered. One that is answered already is left alone."""
        ...


@dataclasses.dataclass(frozen=True)
class _Asking:
    requests: tuple[Request, ...]

    def __await__(self) -> Generator[_Asking, list[tuple[Sample, ...]], list[tuple[Sample, ...]]]:
        return (yield self)


async def ask(*requests: Request) -> list[tuple[Sample, ...]]:
    """Wait for the samples of all `requests`, which are decoded side by side; one tuple a request, one sample a seed."""
    return await _Asking(requests) if requests else []


def run(
    sampler: Sampler,
    agents: Sequence[Coroutine[Any, Any, Result]],
    progress: Callable[[int, int], None] | None = None,
) -> list[Result]:
    """Run all agents to their end and return their results in order. `progress(done, all)` is told whenever some are done.

    The sampler is this call's alone meanwhile: an answer to a request of somebody else's would be lost.

    Where an agent fails, or the caller is interrupted, what was still asked for is cancelled and all other agents are closed.
    """
    results: dict[int, Result] = {}
    try:
        with contextlib.closing(as_done(sampler, agents)) as finished:
            for batch in finished:
                results.update(batch)
                if progress:
                    progress(len(results), len(agents))
    finally:
        for agent in agents:
            agent.close()
    return [results[agent] for agent in range(len(agents))]


def as_done(
    sampler: Sampler, agents: Iterable[Coroutine[Any, Any, Result]], most: int = sys.maxsize
) -> Generator[list[tuple[int, Result]], None, None]:
    """Run agents, at most so many at a time, and hand out those that are done, by their numbers, whenever some are.

    An agent is taken from `agents` when there is room for it, so a long list of them need not exist at once. The sampler is this call's
    alone until it ends. Where an agent fails, or this is closed, what was asked for is cancelled and the agents that run are closed.
    """
    coming = enumerate(agents)
    running: dict[int, Coroutine[Any, Any, Result]] = {}
    asked: dict[int, list[int]] = {}  # agent -> its tickets, in the order of its requests
    owner: dict[int, int] = {}  # ticket -> agent
    answers: dict[int, tuple[Sample, ...]] = {}
    finished: list[tuple[int, Result]] = []

    def advance(agent: int, given: list[tuple[Sample, ...]] | None) -> None:
        try:
            wanted = running[agent].send(given).requests
        except StopIteration as end:
            finished.append((agent, end.value))
            del running[agent]
            return
        asked[agent] = []
        for request in wanted:
            ticket = sampler.submit(request)
            asked[agent].append(ticket)
            owner[ticket] = agent

    try:
        while True:
            while len(running) < most and (new := next(coming, None)) is not None:
                running[new[0]] = new[1]
                advance(new[0], None)
            if finished:
                batch, finished = finished, []
                yield batch
                continue
            if not running:
                return
            for ticket, samples in sampler.step():
                if ticket not in owner:
                    continue
                answers[ticket] = samples
                agent = owner.pop(ticket)
                if all(ticket in answers for ticket in asked[agent]):
                    advance(agent, [answers.pop(ticket) for ticket in asked.pop(agent)])
    finally:
        for ticket in owner:
            sampler.cancel(ticket)
        for agent in running.values():
            agent.close()
