"""What rewards need of a judge, and the settings that name one. The client is `paravt_jax.remote.judge`."""

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
        """R_acc of each answer, in [0, 1] and in order; None is an episode without an answer."""
        ...

    def metrics(self) -> dict[str, float]:
        """Counts of the latest batch, named "judge/..."; those of several processes add up."""
        ...


@dataclasses.dataclass(frozen=True)
class JudgeSettings(ServerSettings):
    """Which judge is asked, and how long to wait for it. Times are in seconds."""

    name: ClassVar[str] = "rl.rewards.judge"
    timeout: float = 30.0
    attempts: int = 3
    wait_limit: float = 20.0
    model: str = dataclasses.field(kw_only=True)
    """Its name at the endpoint. It must answer at once: `reply_tokens` leave no room for thoughts."""
    time_limit: float = 120.0
    """For a whole batch; answers without a score by then are scored by F1."""
    answer_chars: int = 2000
    """Characters of an answer that the judge sees, from its start."""
    reply_tokens: int = 16
    """Tokens that the judge may write."""

    def __post_init__(self):
        super().__post_init__()
        if not self.model.strip():
            raise ValueError(
                f"{self.name}.model: {self.model!r} names no model; give its name at the endpoint"
            )
        self._require_time("time_limit", zero=False)
        self._require_count("answer_chars", "reply_tokens")
