"""Decides when an endpoint is hopeless, from the lines of a run.

A single question that the server refuses or fails is left out, and the next command asks it again.
But if a server is down or set up wrongly, going on would leave out every question: then the run
ends with one line.
"""

from __future__ import annotations

from rollout.agent.endpoint import REFUSAL_REMEDY, EndpointError
from rollout.evaluation.folder import Line

REFUSED_VIDEOS = 5
"""A run ends if a server refuses questions on this many videos before it has answered any."""

FAILED_AT_FIRST = 3
"""A run ends after this many failed questions in a row if the server has not answered any."""

FAILED_IN_A_ROW = 20
"""A run ends after this many failed questions in a row. Each has had all its attempts."""


class ServerWatch:
    """Counts refused and failed questions of one server.

    Args:
        endpoint: address of the server, for messages.
        proven: whether it answered questions of this evaluation in an earlier start.
    """

    def __init__(self, endpoint: str, proven: bool):
        self._endpoint = endpoint
        self._proven = proven
        self._refused = 0
        self._refused_videos: set[str] = set()
        self._failed = 0  # in a row
        self._reason = ""

    def add(self, line: Line) -> None:
        """Count a finished question. Raises EndpointError if the server is hopeless."""
        cause = line.get("left_out")
        if cause not in (None, "refused", "failed"):
            return  # the server was not asked
        self._reason = line.get("reason", "")
        if cause == "failed":
            self._failed += 1
            if self._failed == (FAILED_IN_A_ROW if self._proven else FAILED_AT_FIRST):
                raise self._hopeless()
            return
        self._failed = 0
        if cause is None:
            self._proven = True
            return
        self._refused += 1
        self._refused_videos.add(line["video"])
        if not self._proven and len(self._refused_videos) == REFUSED_VIDEOS:
            raise self._hopeless()

    def finish(self) -> None:
        """Check the whole run.

        Raises:
            EndpointError: the server has answered none of the questions that it got. Then the
                setup is at fault, not the questions.
        """
        if not self._proven and (self._failed or self._refused):
            raise self._hopeless()

    def _hopeless(self) -> EndpointError:
        if self._failed:
            what = f"{self._failed} questions in a row have no answer: {self._reason}"
            return EndpointError(
                f"--endpoint {self._endpoint}: {what}; the same command asks them again"
            )
        return EndpointError(
            f"--endpoint {self._endpoint}: refused the first {self._refused} questions, on "
            f"{len(self._refused_videos)} videos ({self._reason}); {REFUSAL_REMEDY}"
        )
