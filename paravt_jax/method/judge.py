"""What rewards need of a judge, and the settings that name one. The client is `paravt_jax.remote.judge`."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Protocol

from paravt_jax.method.address import check_address
from paravt_jax.method.records import Question


class Judge(Protocol):
    """Scores answers to open-ended questions."""

    def scores(self, items: Sequence[tuple[Question, str | None]]) -> list[float]:
        """R_acc of each answer, in [0, 1] and in order; None is an episode without an answer."""
        ...

    def metrics(self) -> dict[str, float]:
        """Counts of the latest batch, named "judge/..."; those of several processes add up."""
        ...


@dataclasses.dataclass(frozen=True)
class JudgeSettings:
    """Which judge is asked, and how long to wait for it. Times are in seconds."""

    endpoint: str
    """Address of an OpenAI-compatible API, up to and without /chat/completions: "http://localhost:8000/v1"."""
    model: str
    """The model's name at the endpoint. It must answer at once: `reply_tokens` leave no room for thinking aloud."""
    key_variable: str = "OPENAI_API_KEY"
    """Environment variable that holds the key, which is sent to `endpoint` only. Empty: no key is sent."""
    timeout: float = 30.0
    """For one request, from connecting to the last byte."""
    time_limit: float = 120.0
    """For a whole batch; answers without a score by then are scored by F1."""
    attempts: int = 3
    """Requests per answer, the first included."""
    wait: float = 1.0
    """Before the second attempt; it doubles with each further one."""
    wait_limit: float = 20.0
    """The longest wait between two attempts, also where the server asks for more (Retry-After)."""
    concurrency: int = 16
    """Answers judged at once; one that waits for its next attempt keeps its place, so a busy server is asked less."""
    answer_chars: int = 2000
    """Characters of an answer that the judge sees, from its start."""
    reply_tokens: int = 16
    """Tokens that the judge may write."""

    def __post_init__(self):
        key_place = "the environment variable of JudgeSettings.key_variable"
        check_address("JudgeSettings.endpoint", self.endpoint, key_place)
        if not self.model.strip():
            raise ValueError(
                f"JudgeSettings.model: {self.model!r} names no model; "
                "give the name the endpoint knows"
            )
        if not re.fullmatch("(?:[A-Z_][A-Z0-9_]*)?", self.key_variable):
            raise ValueError(  # the value is not shown: it may be a key
                "JudgeSettings.key_variable: its value is no name of capitals, digits and _; "
                "give the name of the environment variable that holds the key, not the key"
            )
        for name in ("timeout", "time_limit"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(
                    f"JudgeSettings.{name}: {getattr(self, name)} is no time to wait; "
                    "give seconds above 0"
                )
        for name in ("wait", "wait_limit"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"JudgeSettings.{name}: {getattr(self, name)} is no time to wait; "
                    "give seconds of at least 0"
                )
        for name in ("attempts", "concurrency", "answer_chars", "reply_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"JudgeSettings.{name}: {getattr(self, name)}; give 1 or more")
