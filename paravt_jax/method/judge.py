"""The interface of a judge that scores answers, and its settings.

The client of a remote judge is `paravt_jax.remote.judge`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Protocol, runtime_checkable

from paravt_jax.method.records import Question
from paravt_jax.method.server import ServerSettings


@runtime_checkable
class Judge(Protocol):
    """Scores answers to open-ended questions."""

    def scores(self, items: Sequence[tuple[Question, str | None]]) -> list[float]:
        """Score answers.

        Args:
            items: Questions with answers; None for an episode without an answer.

        Returns:
            R_acc of each answer, in [0, 1].
        """
        ...

    def metrics(self) -> dict[str, float]:
        """Counts for the latest batch, named "judge/..."; counts of several processes add up."""
        ...


@dataclasses.dataclass(frozen=True)
class JudgeSettings(ServerSettings):
    """The language model that scores answers, and the time limits. Times are in seconds."""

    name: ClassVar[str] = "rl.rewards.judge"
    timeout: float = 30.0
    attempts: int = 3
    wait_limit: float = 20.0
    model: str = dataclasses.field(kw_only=True)
    """Name of the model at the endpoint. It must not think before it replies: `reply_tokens` leaves
    no room for that."""
    time_limit: float = 120.0
    """Time limit of a whole batch. Answers without a score by then are scored by F1."""
    answer_chars: int = 2000
    """Length limit of an answer, in characters. The judge sees the beginning of a longer one."""
    reply_tokens: int = 16
    """Length limit of the judge's reply, in tokens."""

    def __post_init__(self):
        super().__post_init__()
        if not self.model.strip():
            raise ValueError(
                f"{self.name}.model: {self.model!r} is empty; give the model's name at the endpoint"
            )
        self._require_time("time_limit", zero=False)
        self._require_count("answer_chars", "reply_tokens")
