"""What an agent asks of a sampler, what it gets back, and how many agents run side by side.

An agent is a coroutine. It awaits `ask(...)`, and `run` hands its requests to the sampler at once:

    async def agent():
        [sample] = await ask(Request(ids, frames, Sampling(64), seed=1))
        return sample.ids

    results = run(engine, [agent() for _ in range(64)])

An agent continues as soon as all its own answers are there. It never waits for a slow answer to
another agent. It awaits frames in the same way (`FrameFeatures.request`): worker processes read
them while the sampler goes on with the requests of the others. An agent may also start agents of
its own, and await their results:

    reports = await together(*[look(window) for window in windows])

Frames join in one of two ways (`FrameSettings.admission`). With `arrival`, an agent continues when
its frames are there. With `counted`, it continues after a number of the sampler's steps that
follows from the number of frames, and the sampler waits if they are late. Then, without deadlines,
nothing here depends on time, so a run repeats exactly.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import math
import sys
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
from jaxtyping import Float, Int, Int32

from models.features import FrameReading, wait_for_one
from paravt_jax.checks import require_at_least
from paravt_jax.method.records import Frame

Result = TypeVar("Result")

_MISSING = object()


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a response is sampled and when it ends.

    A response ends with the first of these: a token of `stop_ids`, `max_new_tokens` tokens, or the
    deadline. The token that ends a response is part of it.
    """

    max_new_tokens: int
    """Upper bound on the tokens of the response."""
    temperature: float = 1.0
    """Divides the logits. 0 takes the likeliest token."""
    stop_ids: tuple[int, ...] = ()
    """Token ids that end the response."""
    deadline: float = math.inf
    """Seconds after the request is submitted."""

    def __post_init__(self):
        require_at_least("Sampling", self, 0, "max_new_tokens", "temperature")
        if not self.deadline > 0:
            raise ValueError(
                f"Sampling.deadline: {self.deadline}; give seconds above 0, or leave it out"
            )


@dataclasses.dataclass(frozen=True)
class Request:
    """Asks for a response to a prompt.

    Equal seeds give equal tokens, whatever else the sampler is asked at the same time (up to
    rounding). A prefix that several requests share is computed once.
    """

    ids: Int[np.ndarray, " t"]
    """Token ids of the prompt."""
    frames: tuple[Frame, ...]
    """The frames of the image placeholders in `ids`, in order."""
    sampling: Sampling
    seed: int
    """The seed, taken modulo 2**32."""
    begun: Sample | None = None
    """A response to the same prompt and seed that was cut short, maybe under other weights.
    Sampling goes on after its tokens, which count against `max_new_tokens` and are part of the
    sample. Keys and values that are not cached are computed again."""
    progress: Callable[[Sequence[int]], Any] | None = None
    """Gets all tokens that are drawn so far, after each step that draws some. When it returns
    something true, the sample ends as if with a token of `stop_ids`."""

    def __post_init__(self):
        ids = np.asarray(self.ids)
        # An empty list becomes an array of floats. The engine refuses it because of its length.
        whole = not ids.size or np.issubdtype(ids.dtype, np.integer)
        if ids.ndim != 1 or not whole:
            raise ValueError(
                f"Request.ids: shape {ids.shape} of {ids.dtype}; give whole numbers of shape [t]"
            )
        if self.begun is None:
            return
        begun = len(self.begun.ids)
        if begun > self.sampling.max_new_tokens:
            raise ValueError(
                f"Request.begun: {begun} tokens, and Sampling.max_new_tokens is "
                f"{self.sampling.max_new_tokens}; give the limit of the whole response"
            )


class SampleStop(enum.StrEnum):
    """Why sampling ended."""

    STOP_ID = "stop_id"
    LENGTH = "length"
    DEADLINE = "deadline"
    UNREADABLE = "unreadable"
    """The video could not be read, or became unreadable."""
    PAUSED = "paused"
    """It is to go on later (`rollout.engine.pacing`)."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """A sampled response."""

    ids: Int[np.ndarray, " t"]
    """The sampled tokens, int32."""
    logprobs: Float[np.ndarray, " t"]
    """Their log-probs under the distribution they were drawn from, float32."""
    stop: SampleStop
    versions: Int32[np.ndarray, " t"]
    """The version of the weights that drew each token."""
    digest: str
    """`paravt_jax.method.records.digest` of the prompt and the sampled tokens."""
    reason: str = ""
    """Why the video is unreadable, for people."""


Completion = tuple[int, Sample]  # a request's ticket, and its sample


@runtime_checkable
class Sampler(Protocol):
    """Anything that answers requests: the engine, or what stands in for it."""

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
class Asking:
    """What an agent awaits: its requests, on their way to `as_done`.

    There is no event loop. `await` on this object runs `__await__`, whose `yield` suspends the
    whole agent and hands this object to the caller of `agent.send(...)`, which is `as_done`. Its
    next `send(answers)` resumes the agent here, and `answers` becomes the value of the `await`.
    Frames that are being read (`models.features.FrameReading`) are awaited in the same way.
    """

    requests: tuple[Request, ...]

    def __await__(self) -> Generator[Asking, list[Sample], list[Sample]]:
        answers = yield self
        return answers


@dataclasses.dataclass(frozen=True)
class Gathering:
    """What an agent awaits: other agents, on their way to `as_done`."""

    agents: tuple[Coroutine[Any, Any, Any], ...]

    def __await__(self) -> Generator[Gathering, list[Any], list[Any]]:
        results = yield self
        return results


async def ask(*requests: Request) -> list[Sample]:
    """Wait for the samples of all `requests`, which are decoded side by side."""
    if not requests:
        return []
    return await Asking(requests)


async def together(*agents: Coroutine[Any, Any, Result]) -> list[Result]:
    """Run agents side by side, wait for all of them, and return their results in order."""
    if not agents:
        return []
    return await Gathering(agents)


def run(sampler: Sampler, agents: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run all agents to their end.

    Nothing else may use the sampler meanwhile: answers to other requests would be lost. If an
    agent fails or the caller is interrupted, open requests are cancelled and all agents closed.

    Args:
        sampler: answers the agents' requests.
        agents: coroutines that await nothing but `ask`, `together` and readings of frames.

    Returns:
        The agents' results, in their order.
    """
    results: dict[int, Result] = {}
    try:
        with contextlib.closing(as_done(sampler, agents)) as finished:
            for batch in finished:
                results.update(batch)
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
        agents: coroutines as for `run`. Each is taken from the iterable when there
            is room for it, so a long list need not exist at once.
        limit: upper bound on agents that run side by side.

    Yields:
        Lists of (number of the agent, its result), whenever some are done.
    """
    scheduler = Scheduler(sampler)
    coming = enumerate(agents)
    try:
        while True:
            while scheduler.playing < limit:
                new = next(coming, None)
                if new is None:
                    break
                scheduler.add(*new)
            batch = scheduler.take_finished()
            if batch:
                yield batch
                continue
            if not scheduler.playing:
                return
            scheduler.step()
    finally:
        scheduler.close()


@dataclasses.dataclass(frozen=True, eq=False)
class _Waiting:
    """An agent that waits for frames."""

    agent: Coroutine[Any, Any, Any]
    reading: FrameReading
    step: int | None
    """The step of the sampler at which it is resumed; None: as soon as the frames are there."""

    def is_due(self, step: int) -> bool:
        return self.reading.done() if self.step is None else self.step <= step


class _Running(NamedTuple):
    """A running agent: the number of the caller's agent that started it, and who takes its
    result."""

    number: int
    take: Callable[[Any], None]


class Scheduler:
    """Running agents, and what each of them waits for: answers, files, or other agents.

    Args:
        sampler: answers the agents' requests.
        patience: upper bound in seconds on a wait for files, if there is nothing else to do; None:
            as long as it takes.
        fail: gets the number of an agent that ended with an error, and the error: its own, that of
            an agent that it has started, or that of the sampler which refused its request. None:
            the error is raised.

    Attributes:
        playing: number of the caller's agents that run.
    """

    def __init__(
        self,
        sampler: Sampler,
        patience: float | None = None,
        fail: Callable[[int, Exception], Any] | None = None,
    ):
        self.sampler = sampler
        self.patience = patience
        self.fail = fail
        self.playing = 0
        self.finished: list[tuple[int, Any]] = []
        # All running agents, with those they have started themselves.
        self.running: dict[Coroutine[Any, Any, Any], _Running] = {}
        # Open requests by ticket, with their agent and a function that takes the sample.
        self.tickets: dict[int, tuple[Coroutine[Any, Any, Any], Callable[[Sample], None]]] = {}
        self.readings: list[_Waiting] = []  # in the order in which they were asked for
        self.steps = 0  # of the sampler

    def add(self, number: int, agent: Coroutine[Any, Any, Any]) -> None:
        """Start an agent, whose result comes under this number."""
        self.playing += 1
        self.running[agent] = _Running(number, functools.partial(self._finish, number))
        self._advance(agent, None)

    def take_finished(self) -> list[tuple[int, Any]]:
        """Return the numbers and results of the agents that have ended since the last call."""
        finished, self.finished = self.finished, []
        return finished

    def drop(self, number: int) -> None:
        """End a running agent, and those that it has started, without a result."""
        agents = {agent for agent, run in self.running.items() if run.number == number}
        for ticket in [ticket for ticket, (agent, _) in self.tickets.items() if agent in agents]:
            del self.tickets[ticket]
            self.sampler.cancel(ticket)
        dropped = [waiting for waiting in self.readings if waiting.agent in agents]
        self.readings = [waiting for waiting in self.readings if waiting not in dropped]
        wanted = {read.future for waiting in self.readings for read in waiting.reading.reads}
        for read in [read for waiting in dropped for read in waiting.reading.reads]:
            if read.future not in wanted:
                read.future.cancel()
        for agent in agents:
            del self.running[agent]
            agent.close()
        self.playing -= bool(agents)

    def _finish(self, number: int, result: Any) -> None:
        self.playing -= 1
        self.finished.append((number, result))

    def step(self) -> None:
        """Resume the agents whose files are there, and step the sampler."""
        if self.readings and not self.tickets:
            self._pass_time()
        due = [waiting for waiting in self.readings if waiting.is_due(self.steps)]
        self.readings = [waiting for waiting in self.readings if waiting not in due]
        for waiting in due:
            if waiting.agent in self.running:  # otherwise another agent has failed, and it with it
                self._advance(waiting.agent, None)  # waits for a counted reading that is late
        if self.tickets:
            self.steps += 1
            for ticket, sample in self.sampler.step():
                if ticket in self.tickets:  # otherwise a request that was not made by these agents
                    _, take = self.tickets.pop(ticket)
                    take(sample)

    def close(self) -> None:
        """Cancel all requests, and end all agents."""
        for ticket in self.tickets:
            self.sampler.cancel(ticket)
        for agent in self.running:
            agent.close()

    def _pass_time(self) -> None:
        """Go to the first step at which a reading is due, if there is nothing to sample."""
        counted = [waiting.step for waiting in self.readings if waiting.step is not None]
        if counted:
            self.steps = max(self.steps, min(counted))
        else:
            wait_for_one([waiting.reading for waiting in self.readings], self.patience)

    def _advance(self, agent: Coroutine[Any, Any, Any], value: Any) -> None:
        """Resume an agent until it waits again or returns."""
        try:
            awaited = agent.send(value)
        except StopIteration as end:
            result = end.value
        except Exception as error:
            self._fail(agent, error)
            return
        else:
            self._begin(agent, awaited)
            return
        self.running.pop(agent).take(result)

    def _fail(self, agent: Coroutine[Any, Any, Any], error: Exception) -> None:
        """End the caller's agent to which this one belongs."""
        if self.fail is None:
            raise error
        number = self.running[agent].number
        self.drop(number)
        self.fail(number, error)

    def _begin(
        self, agent: Coroutine[Any, Any, Any], awaited: Asking | Gathering | FrameReading
    ) -> None:
        """Start what an agent waits for."""
        resume = functools.partial(self._advance, agent)
        if isinstance(awaited, FrameReading):
            step = None if awaited.steps is None else self.steps + awaited.steps
            self.readings.append(_Waiting(agent, awaited, step))
        elif isinstance(awaited, Gathering):
            takes = _collect(len(awaited.agents), resume)
            number = self.running[agent].number
            # Record all of them at once: if one fails at its start, `close` closes the others.
            for child, take in zip(awaited.agents, takes, strict=True):
                self.running[child] = _Running(number, take)
            for child in awaited.agents:
                if child in self.running:  # otherwise one before it has failed, and it with it
                    self._advance(child, None)
        else:
            takes = _collect(len(awaited.requests), resume)
            for request, take in zip(awaited.requests, takes, strict=True):
                try:
                    ticket = self.sampler.submit(request)
                except Exception as error:
                    self._fail(agent, error)
                    return
                # Record each ticket at once: if the next request is refused, it is cancelled.
                self.tickets[ticket] = agent, take


def _collect(count: int, resume: Callable[[list[Any]], None]) -> list[Callable[[Any], None]]:
    """Return functions that take one value each. The last call passes all values to `resume`."""
    values = [_MISSING] * count
    return [functools.partial(_take, values, resume, number) for number in range(count)]


def _take(values: list[Any], resume: Callable[[list[Any]], None], number: int, value: Any) -> None:
    values[number] = value
    if not any(each is _MISSING for each in values):
        resume(values)
