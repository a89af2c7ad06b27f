"""Shared by the tests of rollouts: the small world's questions, and a sampler with a script."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from models.features import FrameFeatures, FrameSettings
from paravt_jax.data import video
from paravt_jax.method.protocol import Protocol, ProtocolSettings
from paravt_jax.method.records import Question, QuestionKind, digest
from paravt_jax.method.tokenizer import Vocabulary
from paravt_jax.world import text as world_text
from rollout.agent.episode import Environment
from rollout.engine.requests import Completion, Request, Sample, SampleStop


@dataclasses.dataclass(frozen=True)
class Cut:
    """A response that the sampler ends with `stop`, unless `line` has a stop id before that."""

    line: str | Sequence[int]
    stop: SampleStop
    reason: str = ""


# A response: text, to which the end of the turn is added; or ids as they are; or one cut short.
Line = str | Sequence[int] | Cut


class Scripted:
    """A sampler that answers from a script, with stop ids and limits as in the engine.

    Main agents get `turns` one after another, and then the last one again and again. Sub-agents
    always get `report`. Both may be functions of the request.

    `asked` and `said` are all requests and their samples, `waves` the requests per step, `waiting`
    the requests without an answer.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        turns: Sequence[Line] | Callable[[Request], Line],
        report: Line | Callable[[Request], Line] = " seven from 8 to 10",
    ):
        self.vocabulary = vocabulary
        self.turns = turns
        self.report = report
        self.waves: list[list[Request]] = []
        self.asked: list[Request] = []
        self.said: list[Sample] = []
        self.spoken = 0
        self.waiting: dict[int, Request] = {}
        self.tickets = itertools.count()

    def is_main(self, request: Request) -> bool:
        return self.vocabulary.decode(request.ids[:3]).startswith(
            self.vocabulary.dialect.open("system").rstrip()
        )

    def is_first(self, request: Request) -> bool:
        """Whether this is a main agent's first turn."""
        return self.vocabulary["<tool_response>"] not in request.ids

    def submit(self, request: Request) -> int:
        ticket = next(self.tickets)
        self.waiting[ticket] = request
        return ticket

    def step(self) -> list[Completion]:
        waiting = self.waiting
        self.waiting = {}
        samples = [self._answer(request) for request in waiting.values()]
        self.waves.append(list(waiting.values()))
        self.asked += waiting.values()
        self.said += samples
        return list(zip(waiting, samples, strict=True))

    def cancel(self, ticket: int) -> None:
        self.waiting.pop(ticket, None)

    def _answer(self, request: Request) -> Sample:
        line: Line
        if not self.is_main(request):
            line = self.report(request) if callable(self.report) else self.report
        elif callable(self.turns):
            line = self.turns(request)
        else:
            line = self.turns[min(self.spoken, len(self.turns) - 1)]
            self.spoken += 1
        cut = line if isinstance(line, Cut) else Cut(line, SampleStop.LENGTH)
        said = cut.line
        if isinstance(said, str):
            said = self.vocabulary.encode(
                said if cut is line else said + self.vocabulary.dialect.end
            )
        ids = np.asarray(said, np.int32)

        stop = cut.stop
        limit = request.sampling.max_new_tokens
        ends = np.flatnonzero(np.isin(ids, request.sampling.stop_ids))
        if ends.size and ends[0] < limit:
            ids = ids[: ends[0] + 1]
            stop = SampleStop.STOP_ID
        elif len(ids) >= limit:
            ids = ids[:limit]
            stop = SampleStop.LENGTH
        logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32) / 8
        fed = digest(np.concatenate([request.ids, ids]))
        versions = np.full(len(ids), 7, np.int32)
        return Sample(ids, logprobs, stop, versions, digest=fed, reason=cut.reason)

    @property
    def main(self) -> list[tuple[Request, Sample]]:
        """The requests of main agents with their samples."""
        return [(r, s) for r, s in zip(self.asked, self.said, strict=True) if self.is_main(r)]

    @property
    def sub(self) -> list[tuple[Request, Sample]]:
        """The requests of sub-agents with their samples."""
        return [(r, s) for r, s in zip(self.asked, self.said, strict=True) if not self.is_main(r)]


@pytest.fixture(scope="session")
def scripted(small_vocabulary) -> Callable[..., Scripted]:
    """scripted(turns, report) makes a sampler with this script."""
    return lambda *arguments, **fields: Scripted(small_vocabulary, *arguments, **fields)


@pytest.fixture(scope="session")
def limits() -> ProtocolSettings:
    return ProtocolSettings(
        max_tool_turns=2, max_calls=3, turn_tokens=64, summary_tokens=16, trajectory_tokens=256
    )


@pytest.fixture(scope="session")
def small_features(small_world, small_model) -> FrameFeatures:
    return FrameFeatures(
        small_model.vision,
        small_model.config,
        FrameSettings(batch=128),
        small_world.folder,
        source=video,
    )


@pytest.fixture(scope="session")
def small_environment(small_vocabulary, limits, small_features) -> Environment:
    return Environment(Protocol(small_vocabulary, limits), small_features)


@pytest.fixture(scope="session")
def small_questions(small_world) -> list[Question]:
    """The small world's questions, multiple choice first."""
    questions = world_text.questions(small_world.videos, world_text.TextSettings())
    return sorted(questions, key=lambda question: question.kind is not QuestionKind.MULTIPLE_CHOICE)
