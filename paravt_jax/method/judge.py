"""The interface of a judge that scores answers, and the settings of one behind a server.

That judge is `paravt_jax.remote.judge`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from paravt_jax.checks import require_above, require_at_least
from paravt_jax.method.records import Question


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
        """Return counts for the latest batch, named "judge/..."; counts of several processes add
        up."""
        ...


@dataclasses.dataclass(frozen=True)
class JudgeSettings:
    """The language model that scores answers, and the limits of asking it. Times are in seconds."""

    endpoint: str
    """Address of an OpenAI-compatible API without /chat/completions: "http://localhost:8000/v1"."""
    key_variable: str = "OPENAI_API_KEY"
    """Environment variable with the key, which is sent to `endpoint` only. Empty: no key."""
    timeout: float = 30.0
    """Time limit of connecting, of waiting for a reply to begin, and of the reply itself."""
    attempts: int = 3
    """Upper bound on requests per answer, the first included."""
    concurrency: int = 16
    """Upper bound on open requests, including those that wait for their next attempt."""
    model: str = dataclasses.field(kw_only=True)
    """Name of the model at the endpoint. It must not think before it replies: there is no
    room for that."""
    time_limit: float = 120.0
    """Time limit of a whole batch. Answers without a score by then are scored by F1."""

    def __post_init__(self):
        if not re.fullmatch("(?:[A-Z_][A-Z0-9_]*)?", self.key_variable):
            # The value is not shown: it may be a key.
            raise ValueError(
                "judge.key_variable: not a name of capitals, digits and _; "
                "give the name of the environment variable that holds the key, not the key"
            )
        require_above("judge", self, 0, "timeout", "time_limit")
        require_at_least("judge", self, 1, "attempts", "concurrency")
        if not self.model.strip():
            raise ValueError(
                f"judge.model: {self.model!r} is empty; give the model's name at the endpoint"
            )
        # The client adds /chat/completions.
        base = r"https?://[^\s/:@?#]+(:\d+)?(/[^\s@?#]*)?(?<!/chat/completions)"
        if not re.fullmatch(base, self.endpoint.rstrip("/")):
            # A user, a query and a fragment may be secret, and messages are logged.
            is_secret = any(mark in self.endpoint for mark in "@?#")
            shown = "(not shown: it may hold a secret)" if is_secret else repr(self.endpoint)
            raise ValueError(
                f"judge: the address {shown} is not the base of an API; give one such as "
                "http://localhost:8000/v1, and the key in the environment variable "
                f"{self.key_variable}"
            )
