"""Reads answers and calls that a model writes in a form of its own.

Text in that form is rewritten to this project's: `<tool_call>` with JSON, `<answer>`. Everything
after that (the episode, scores, transcripts' turns) knows one form only. Token ids stay as sampled.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

from paravt_jax.method.parsing import call_text, extract_answer

_PAIR = re.compile(r"""(\w+)\s*=\s*("[^"]*"|'[^']*'|[^\s,()]+)""")
# Names that other formats give to arguments of crop_video.
_ARGUMENTS = {"start": "start_time", "end": "end_time"}


@dataclasses.dataclass(frozen=True)
class NativeFormat:
    """How a model writes, as regular expressions with one group each; empty for our own form."""

    answer: str = ""
    """The last match is the answer, unless there is an answer block."""
    call: str = ""
    """Every match is a call; its group is JSON (a call, or arguments of `tool`) or `name=value`
    pairs. A match that is neither stays as it is."""
    tool: str = "crop_video"
    """The tool of calls that name none."""

    def __post_init__(self):
        for field in ("answer", "call"):
            pattern = getattr(self, field)
            try:
                groups = re.compile(pattern).groups
            except re.error as error:
                raise ValueError(f"{field}: not a regular expression ({error})") from error
            if pattern and groups != 1:
                raise ValueError(f"{field}: has {groups} groups; give one, around what is read")

    def __call__(self, text: str) -> str:
        """Rewrite a response. Whatever is in our form already stays."""
        if self.call:
            text = re.sub(self.call, self._rewritten, text, flags=re.DOTALL)
        if self.answer and extract_answer(text) is None:
            found = [*re.finditer(self.answer, text, flags=re.DOTALL)]
            if found:
                start, end = found[-1].span()
                text = f"{text[:start]}<answer>{found[-1][1]}</answer>{text[end:]}"
        return text

    def _rewritten(self, match: re.Match[str]) -> str:
        found = _read_call(match[1] or "")
        if not found:
            return match[0]
        name, arguments = self.tool, found
        if isinstance(found.get("name"), str) and isinstance(found.get("arguments"), dict):
            name, arguments = found["name"], found["arguments"]
        if name == "crop_video":
            arguments = {_ARGUMENTS.get(key, key): value for key, value in arguments.items()}
        return f"<tool_call>\n{call_text(name, arguments)}\n</tool_call>"


def _read_call(text: str) -> dict[str, Any]:
    """The object or the pairs in a text; empty if there are none."""
    try:
        found = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return {key: value.strip("\"'") for key, value in _PAIR.findall(text)}
    return found if isinstance(found, dict) else {}
