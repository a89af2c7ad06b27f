"""What an agent asks of a sampler, what it gets back, and how many agents run side by side.

An agent is a coroutine. It awaits `ask(...)`, and `run` hands its requests to the sampler at once:

    async def agent():
        [(sample,)] = await ask(Request(ids, frames, Sampling(64), seeds=(1,)))
        return sample.ids

    results = run(engine, [agent() for _ in range(64)])

An agent continues as soon as all its own answers are there. It never waits for a slow answer to
another agent. Without deadlines nothing here depends on time, so a run repeats exactly.
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
from jaxtyping import Float, Int

from paravt_jax.method.records import Frame

Result = TypeVar("Result")

_INTEGER = (int, np.integer)
_REAL = (int, float, np.integer, np.floating)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a response is sampled and when it ends.

    A response ends with the first of these: a token of `stop_ids`, the token that completes one of
    `stop_strings`, `max_new_tokens` tokens, or the deadline. The token that ends a response is part
    of it.
    """

    max_new_tokens: int
    """Upper bound on the tokens of the response."""
    temperature: float = 1.0
    """Divides the logits. 0 takes the likeliest token."""
    top_k: int = 0
    """Sample from the `top_k` likeliest tokens only. 0: from all."""
    top_p: float = 1.0
    """Of these, sample from the fewest that together have this probability."""
    stop_ids: tuple[int, ...] = ()
    """Token ids that end the response."""
    stop_strings: tuple[bytes, ...] = ()
    """Byte strings that end the response wherever they appear in it."""
    deadline: float = math.inf
    """Seconds after the request is submitted."""

    def __post_init__(self):
        self._check_types()
        if self.max_new_tokens < 0:
            raise ValueError(
                f"Sampling.max_new_tokens: {self.max_new_tokens}; give 0 or more tokens"
            )
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(
                f"Sampling.temperature: {self.temperature}; "
                "give 0 (the likeliest token) or a finite number above it"
            )
        # The compiled programs take top_k and token ids as int32.
        if not 0 <= self.top_k < 2**31:
            raise ValueError(
                f"Sampling.top_k: {self.top_k}; give 0 (all tokens) or more, below 2**31"
            )
        if any(not 0 <= stop < 2**31 for stop in self.stop_ids):
            raise ValueError(
                f"Sampling.stop_ids: {self.stop_ids}; give token ids, 0 or more and below 2**31"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(
                f"Sampling.top_p: {self.top_p}; give a probability above 0 and up to 1"
            )
        if not self.deadline > 0:
            raise ValueError(
                f"Sampling.deadline: {self.deadline}; give seconds above 0, or leave it out"
            )
        if not all(self.stop_strings):
            raise ValueError(
                f"Sampling.stop_strings: {self.stop_strings}; "
                "an empty string ends every response, leave it out"
            )

    def _check_types(self) -> None:
        for name in ("max_new_tokens", "top_k"):
            value = getattr(self, name)
            if not isinstance(value, _INTEGER):
                raise ValueError(f"Sampling.{name}: {value!r}; give a whole number")
        for name in ("temperature", "top_p", "deadline"):
            value = getattr(self, name)
            if not isinstance(value, _REAL):
                raise ValueError(f"Sampling.{name}: {value!r}; give a number")
        if not _is_tuple_of(self.stop_ids, _INTEGER):
            raise ValueError(
                f"Sampling.stop_ids: {self.stop_ids!r}; give a tuple of token ids, such as (3,)"
            )
        if not _is_tuple_of(self.stop_strings, (bytes,)):
            raise ValueError(
                f"Sampling.stop_strings: {self.stop_strings!r}; "
                "give a tuple of bytes, such as ('a'.encode(),)"
            )


@dataclasses.dataclass(frozen=True)
class Request:
    """Asks for one response to a prompt per seed.

    Equal seeds give equal tokens, whatever else the sampler is asked at the same time (up to
    rounding). A prefix that several requests share is computed once.
    """

    ids: Int[np.ndarray, " t"]
    """Token ids of the prompt."""
    frames: tuple[Frame, ...]
    """The frames of the image placeholders in `ids`, in order."""
    sampling: Sampling
    seeds: tuple[int, ...]
    """One seed per sample, taken modulo 2**32."""

    def __post_init__(self):
        ids = np.asarray(self.ids)
        # An empty list becomes an array of floats. The engine refuses it because of its length.
        whole = not ids.size or np.issubdtype(ids.dtype, np.integer)
        if ids.ndim != 1 or not whole:
            raise ValueError(
                f"Request.ids: shape {ids.shape} of {ids.dtype}; give whole numbers of shape [t]"
            )
        if not _is_tuple_of(self.frames, (Frame,)):
            raise ValueError(f"Request.frames: {self.frames!r}; give a tuple of Frame")
        if not _is_tuple_of(self.seeds, _INTEGER):
            raise ValueError(f"Request.seeds: {self.seeds!r}; give a tuple of whole numbers")


class SampleStop(enum.StrEnum):
    """Why sampling ended."""

    STOP_ID = "stop_id"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    DEADLINE = "deadline"
    UNREADABLE = "unreadable"
    """The video could not be read, or became unreadable."""
    REFUSED = "refused"
    """A server rejected the request because of its content."""
    FAILED = "failed"
    """A server gave no usable reply in all attempts."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """A sampled response."""

    ids: Int[np.ndarray, " t"]
    """The sampled tokens, int32."""
    logprobs: Float[np.ndarray, " t"]
    """Their log-probs under the distribution they were drawn from, float32."""
    stop: SampleStop
    version: int
    """Version of the weights."""
    digest: str
    """`paravt_jax.method.records.digest` of the prompt and the sampled tokens."""
    reason: str = ""
    """Why a request was refused or failed, for people."""


Completion = tuple[int, tuple[Sample, ...]]  # a request's ticket, and one sample per seed


@runtime_checkable
class Sampler(Protocol):
    """Anything that answers requests: the engine, or a scripted one in a test."""

    def submit(self, request: Request) -> int:
        """Accept a request and return its ticket."""
        ...

    def step(self) -> list[Completion]:
        """Work for a while and return finished requests. Each request finishes after some steps."""
        ...

    def cancel(self, ticket: int) -> None:
        """Give up a request: it gets no answer. If it has been answered, nothing happens."""
        ...


@dataclasses.dataclass(frozen=True)
class _Ask:
    """What an agent awaits: its requests, on their way to `as_done`.

    There is no event loop. `await` on this object runs `__await__`, whose `yield` suspends the
    whole agent and hands this object to the caller of `agent.send(...)`, which is `as_done`. Its
    next `send(answers)` resumes the agent here, and `answers` becomes the value of the `await`.
    """

    requests: tuple[Request, ...]

    def __await__(self) -> Generator[_Ask, list[tuple[Sample, ...]], list[tuple[Sample, ...]]]:
        answers = yield self
        return answers


async def ask(*requests: Request) -> list[tuple[Sample, ...]]:
    """Wait for the samples of all `requests`, which are decoded side by side.

    Returns:
        One tuple per request, with one sample per seed.
    """
    if not requests:
        return []
    return await _Ask(requests)


def run(
    sampler: Sampler,
    agents: Sequence[Coroutine[Any, Any, Result]],
    progress: Callable[[int, int], None] | None = None,
) -> list[Result]:
    """Run all agents to their end.

    Nothing else may use the sampler meanwhile: answers to other requests would be lost. If an
    agent fails or the caller is interrupted, open requests are cancelled and all agents closed.

    Args:
        sampler: answers the agents' requests.
        agents: coroutines that await nothing but `ask`.
        progress: called with (agents done, agents in total) whenever some are done.

    Returns:
        The agents' results, in their order.
    """
    results: dict[int, Result] = {}
    try:
        with contextlib.closing(as_done(sampler, agents)) as finished:
            for batch in finished:
                results.update(batch)
                if progress:
                    progress(len(results), len(agents))
    finally:
        # Agents that never started would warn that they were never awaited.
        for agent in agents:
            agent.close()
    return [results[number] for number in range(len(agents))]


def as_done(
    sampler: Sampler, agents: Iterable[Coroutine[Any, Any, Result]], limit: int = sys.maxsize
) -> Generator[list[tuple[int, Result]], None, None]:
    """Run agents side by side and yield results as they come.

    Nothing else may use the sampler until this ends. If an agent fails or this generator is closed,
    open requests are cancelled and the running agents are closed.

    Args:
        sampler: answers the agents' requests.
        agents: coroutines that await nothing but `ask`. Each is taken from the iterable when there
            is room for it, so a long list need not exist at once.
        limit: upper bound on agents that run side by side.

    Yields:
        Lists of (number of the agent, its result), whenever some are done.
    """
    scheduler = _AgentScheduler(sampler)
    coming = enumerate(agents)
    try:
        while True:
            while len(scheduler.running) < limit:
                new = next(coming, None)
                if new is None:
                    break
                scheduler.start(*new)
            if scheduler.finished:
                batch = scheduler.finished
                scheduler.finished = []
                yield batch
                continue
            if not scheduler.running:
                return
            scheduler.step()
    finally:
        scheduler.close()


class _AgentScheduler:
    """Running agents and their open requests."""

    def __init__(self, sampler: Sampler):
        self.sampler = sampler
        self.running: dict[int, Coroutine[Any, Any, Any]] = {}
        self.finished: list[tuple[int, Any]] = []
        self.tickets: dict[int, list[int]] = {}  # agent -> tickets, in the order of its requests
        self.agent_of: dict[int, int] = {}  # open ticket -> agent
        self.answers: dict[int, tuple[Sample, ...]] = {}  # ticket -> samples, until all are there

    def start(self, number: int, agent: Coroutine[Any, Any, Any]) -> None:
        self.running[number] = agent
        self._advance(number, None)

    def step(self) -> None:
        """Step the sampler, and resume every agent that then has all its answers."""
        for ticket, samples in self.sampler.step():
            if ticket not in self.agent_of:  # a request that was not made by these agents
                continue
            self.answers[ticket] = samples
            agent = self.agent_of.pop(ticket)
            if all(ticket in self.answers for ticket in self.tickets[agent]):
                tickets = self.tickets.pop(agent)
                self._advance(agent, [self.answers.pop(ticket) for ticket in tickets])

    def close(self) -> None:
        for ticket in self.agent_of:
            self.sampler.cancel(ticket)
        for agent in self.running.values():
            agent.close()

    def _advance(self, number: int, answers: list[tuple[Sample, ...]] | None) -> None:
        """Resume an agent until it asks again or returns, and submit what it asks."""
        try:
            asked = self.running[number].send(answers)
        except StopIteration as end:
            self.finished.append((number, end.value))
            del self.running[number]
            return
        # Record every ticket at once: if the next request is refused, `close` cancels this one.
        self.tickets[number] = []
        for request in asked.requests:
            ticket = self.sampler.submit(request)
            self.tickets[number].append(ticket)
            self.agent_of[ticket] = number


def _is_tuple_of(values: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(values, tuple) and all(isinstance(value, kinds) for value in values)
