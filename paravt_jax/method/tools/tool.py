"""`Tool`, the base class of tools: a schema for the model, a parser for calls, and their execution.

A tool opens no files and samples nothing. The episode passes it the question's video and acts on
the result of `run`: a text becomes the response unchanged, and a `Look` sends a sub-agent to a
window.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from paravt_jax.method.records import Call, CropCall, FailedCall, Subtitle


# Not a typing.Protocol: an isinstance check would read the properties, and so open the file.
class Video(abc.ABC):
    """The question's video as seen by a tool. Its properties are read on access, which may fail."""

    @property
    @abc.abstractmethod
    def duration(self) -> float:
        """Length in seconds."""

    @property
    @abc.abstractmethod
    def subtitles(self) -> Sequence[Subtitle]:
        """The entries in order; empty if the question has no subtitles."""


@dataclasses.dataclass(frozen=True)
class Look:
    """A window for a sub-agent to look at.

    The response is the sub-agent's report followed by `note`, which says why the window differs
    from the requested one. The note is empty if it does not.
    """

    window: CropCall
    note: str = ""


class Tool(abc.ABC):
    """Base class of tools. `docs/tools.md` shows how to write one."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of each argument, by name."""
    required: Sequence[str]
    """Names of the required arguments."""
    example: Mapping[str, Any]
    """Arguments of a valid call. The model sees them after a call that could not be parsed."""
    hint: str
    """A sentence for the system turn `agentic` that says when to call the tool."""

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
        """Parse a call's arguments.

        Args:
            arguments: The JSON object that the model wrote; it may contain anything.

        Returns:
            The call (a `ToolCall` with the tool's name, except for crop_video), or why it failed.
        """

    @abc.abstractmethod
    def run(self, call: Any, video: Video) -> str | Look | FailedCall:
        """Execute a call that `parse` returned.

        Returns:
            The response as text, a window for a sub-agent, or why the call failed.
        """
