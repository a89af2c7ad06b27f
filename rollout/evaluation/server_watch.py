"""Ends a run whose server answers nothing, instead of leaving out one question after another."""

from __future__ import annotations

from rollout.agent.endpoint import REFUSAL_REMEDY, EndpointError
from rollout.evaluation.folder import Line

HOPELESS = 20
"""A run ends after this many questions in a row without an answer. Each has had all its attempts,
and the next command asks them again."""


class ServerWatch:
    """Counts the questions in a row that a server failed to answer.

    A refusal of one question is no fault of a server that has answered others.

    Args:
        endpoint: address of the server, for messages.
        proven: whether it answered questions of this evaluation in an earlier start.
    """

    def __init__(self, endpoint: str, proven: bool):
        self._endpoint = endpoint
        self._proven = proven
        self._in_a_row = 0

    def add(self, line: Line) -> None:
        """Count a finished question. Raises EndpointError if the server is hopeless."""
        cause = line.get("left_out")
        if cause is None:
            self._proven = True
            self._in_a_row = 0
        elif cause == "failed" or (cause == "refused" and not self._proven):
            self._in_a_row += 1
        if self._in_a_row == HOPELESS:
            raise EndpointError(
                f"--endpoint {self._endpoint}: {HOPELESS} questions in a row have no answer "
                f"({line['reason']}); {REFUSAL_REMEDY}; the same command asks them again"
            )
