"""What an agent asks of an engine, what comes back, and how many agents ask at once.

An agent is a coroutine that awaits `ask(...)`. `run` advances all agents until each waits or is done, hands everything they
ask for to the engine as one batch, and goes on with the answers. Nothing here depends on time, so a run repeats exactly.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from paravt_jax.records import Frame

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Request:
    """One response to sample: int32 ids of the prompt (shared by content) and of what followed it.

    `temperature` 0 is greedy. `stop_ids` end the response and belong to it. Equal seeds give equal tokens, whatever else is in the batch.
    """

    prompt: np.ndarray
    frames: tuple[Frame, ...]
    suffix: np.ndarray
    temperature: float
    max_new_tokens: int
    seed: int
    stop_ids: tuple[int, ...]


class SampleStop(enum.StrEnum):
    """Why sampling ended."""

    STOP_ID = "stop_id"
    LENGTH = "length"


@dataclasses.dataclass(frozen=True)
class Sample:
    """A sampled response: int32 ids, their float32 log-probs under the sampling distribution, and the version of the weights.

    `digest` is that of every token the model was really fed, the sampled ones included: see `paravt_jax.records.digest`.
    """

    ids: np.ndarray
    logprobs: np.ndarray
    stop: SampleStop
    version: int
    digest: str


class Sampler(Protocol):
    """Anything that answers requests: the engine, or a script in a test."""

    def generate(self, requests: Sequence[Request]) -> list[Sample]: ...


@dataclasses.dataclass(frozen=True)
class _Asking:
    requests: tuple[Request, ...]

    def __await__(self) -> Generator[_Asking, list[Sample], list[Sample]]:
        return (yield self)


async def ask(*requests: Request) -> list[Sample]:
    """Wait for samples of all `requests`; they are decoded side by side."""
    return await _Asking(requests) if requests else []


def run(
    sampler: Sampler, agents: Sequence[Coroutine[Any, Any, Result]], progress: Callable[[int, int], None] | None = None
) -> list[Result]:
    """Run all agents to their end and return their results in order. `progress(done, all)` is told after each wave."""
    results: dict[int, Result] = {}
    waiting: dict[int, tuple[Request, ...]] = {}

    def advance(index: int, answer: list[Sample] | None) -> None:
        waiting.pop(index, None)
        try:
            waiting[index] = agents[index].send(answer).requests
        except StopIteration as end:
            results[index] = end.value

    try:
        for index in range(len(agents)):
            advance(index, None)
        while waiting:
            wave = dict(waiting)
            samples = iter(sampler.generate([request for requests in wave.values() for request in requests]))
            for index, requests in wave.items():
                advance(index, [next(samples) for _ in requests])
            if progress:
                progress(len(results), len(agents))
    finally:
        for agent in agents:  # where one failed, the others end with it
            agent.close()
    return [results[index] for index in range(len(agents))]
