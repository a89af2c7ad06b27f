"""`Tool`: what the model reads about a tool, how its calls are read, and what a call does.

A tool opens no file and samples nothing. The episode gives it what is known about the question's
video, and carries out what it asks for.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from paravt_jax.method.records import Call, CropCall, FailedCall
from paravt_jax.method.subtitles import Subtitle


@runtime_checkable
class Video(Protocol):
    """The question's video as a tool sees it. Each value is read when it is asked for."""

    @property
    def duration(self) -> float:
        """Seconds."""
        ...

    @property
    def subtitles(self) -> Sequence[Subtitle]:
        """The entries in order; empty where the question has no subtitles."""
        ...


@dataclasses.dataclass(frozen=True)
class Look:
    """A window for a sub-agent to look at. Its report is the response, followed by `note`.

    `note` says why the window differs from the one that was called for; empty where it does not.
    """

    window: CropCall
    note: str = ""


class Tool(abc.ABC):
    """One tool."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of each argument, by name."""
    required: Sequence[str]
    """The arguments that every call must have."""
    example: Mapping[str, Any]
    """Arguments of a good call. The model is shown it after a call that could not be read."""
    hint: str
    """A sentence of the system turn `agentic`: when to call the tool."""

    @property
    def schema(self) -> dict[str, Any]:
        """The function signature in the system turn."""
        parameters = {
            "type": "object",
            "properties": self.parameters,
            "required": list(self.required),
        }
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    @abc.abstractmethod
    def parse(self, arguments: Mapping[str, Any]) -> Call | FailedCall:
        """Reads a call's arguments, which may hold any JSON. The video is not known yet.

        Tools other than crop_video return a `ToolCall` with their own name.
        """

    @abc.abstractmethod
    def run(self, call: Any, video: Video) -> str | Look | FailedCall:
        """What a call that `parse` returned does: text is the response as it stands."""
