"""Reads what the model wrote: tool calls, answers, and whether a turn keeps the format.

The tool that is called reads the arguments. A call that cannot be read becomes a `FailedCall` with
a sentence that the model can act on. No text makes a function here raise, each block is read on its
own, and nothing that the model wrote is executed or opened.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from paravt_jax.method.records import Call, CallStatus, FailedCall, Turn
from paravt_jax.method.tools.tool import Tool

BLOCKS = ("think", "tool_call", "tool_code", "tool_response", "answer")
TAG_PATTERN = "<(/?)(" + "|".join(BLOCKS) + ")>"
MIN_THINK = 10  # characters of a substantive think (REFERENCE 3)

_TAG = re.compile(TAG_PATTERN)
_END_TOKENS = re.compile(r"<\|im_end\|>|<\|endoftext\|>")


@dataclasses.dataclass(frozen=True)
class Tag:
    """One tag in a text: its block's name, whether it closes, and where it stands (characters, end excluded)."""

    name: str
    closing: bool
    start: int
    end: int


def find_tags(text: str) -> list[Tag]:
    """Every tag of `BLOCKS` in order."""
    return [Tag(m.group(2), bool(m.group(1)), m.start(), m.end()) for m in _TAG.finditer(text)]


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """The JSON of a call, which stands between `<tool_call>` and `</tool_call>`."""
    return json.dumps({"name": name, "arguments": arguments})


def find_calls(text: str) -> list[tuple[Tag, str | None]]:
    """The calls of one response, in order: the opening tag, and the text up to `</tool_call>`.

    The text is None where another call opens first, where nothing closes it, and for `<tool_code>`.
    """
    calls: list[tuple[Tag, str | None]] = []
    opened: Tag | None = None
    for tag in find_tags(text):
        if tag.name == "tool_call" and tag.closing:
            if opened is not None:
                calls.append((opened, text[opened.end : tag.start]))
            opened = None
        elif not tag.closing and tag.name in ("tool_call", "tool_code"):
            if opened is not None:
                calls.append((opened, None))
            opened = tag if tag.name == "tool_call" else None
            if opened is None:
                calls.append((tag, None))
    if opened is not None:
        calls.append((opened, None))
    return calls


def parse_calls(text: str, tools: Sequence[Tool]) -> list[Call | FailedCall]:
    """Every call of one response, in order. Each is read on its own: one that is malformed does not
    void the others.

    `tools` are those that are offered, at least one. Code in a `<tool_code>` is never run.
    """
    form = call_text(tools[0].name, tools[0].example)
    calls: list[Call | FailedCall] = []
    for tag, body in find_calls(text):
        if tag.name == "tool_code":
            why = "Code is not run. Write the call between tool_call tags"
            calls.append(FailedCall(f"{why} as {form}."))
        elif body is None:
            why = "The tool call was not closed. Write it between tool_call tags"
            calls.append(FailedCall(f"{why} as {form}."))
        else:
            calls.append(_read_call(body, tools, form))
    return calls


def _read_call(body: str, tools: Sequence[Tool], form: str) -> Call | FailedCall:
    """One call from the text between its tags; `form` is how the first tool is called."""
    try:
        call = json.loads(body, strict=False)
    except RecursionError:
        return FailedCall(f"The tool call is nested too deeply. Write it as {form}.")
    except ValueError:  # not JSON, or an integer with more digits than Python converts
        return FailedCall(f"The tool call is not valid JSON. Write it as {form}.")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return FailedCall(f"The tool call names no tool. Write it as {form}.")
    tool = next((tool for tool in tools if tool.name == call["name"]), None)
    if tool is None:
        names = ", ".join(tool.name for tool in tools)
        known = f"The only tool is {names}" if len(tools) == 1 else f"The tools are {names}"
        return FailedCall(f"There is no such tool. {known}.", CallStatus.UNKNOWN_TOOL)
    arguments = call.get("arguments")
    if isinstance(arguments, str):  # some chat formats write the arguments as JSON text
        try:
            arguments = json.loads(arguments, strict=False)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        form = call_text(tool.name, tool.example)
        return FailedCall(f"The arguments of the tool call are missing. Write it as {form}.")
    return tool.parse(arguments)


def block_spans(tags: Sequence[Tag], name: str) -> list[tuple[Tag, Tag]]:
    """The closed blocks of one kind, as (opening, closing) tags. Where a block opens twice, the later opening counts."""
    spans, opened = [], None
    for tag in tags:
        if tag.name != name:
            continue
        if tag.closing and opened is not None:
            spans.append((opened, tag))
        opened = None if tag.closing else tag
    return spans


def extract_answer(text: str) -> str | None:
    """The content of the final non-empty `<answer>` block that stands outside think and tool blocks; None where there is none.

    A think that is never closed hides nothing: what follows it can still be an answer, only not a well-formed turn.
    """
    tags = find_tags(text)
    hidden = [
        (a.start, b.end) for name in BLOCKS if name != "answer" for a, b in block_spans(tags, name)
    ]
    for opening, closing in reversed(block_spans(tags, "answer")):
        content = text[opening.end : closing.start].strip()
        if (
            content
            and not _TAG.search(content)
            and not any(a < opening.start < b for a, b in hidden)
        ):
            return content
    return None


def first_think(text: str) -> tuple[str, str | None]:
    """What stands in the first think block, and the text after its `</think>`; None for the latter where nothing closes it, and then
    the thought ends at the next tag.
    """
    _, opening, rest = text.partition("<think>")
    thought, closing, after = rest.partition("</think>")
    if closing:
        return thought.strip(), after
    return _TAG.split(rest, maxsplit=1)[0].strip(), None


def has_substantive_think(text: str) -> bool:
    """Whether the first think block, closed or not, holds at least `MIN_THINK` characters."""
    return len(first_think(text)[0]) >= MIN_THINK


def tags_balanced(text: str) -> bool:
    """Whether each kind of block is opened as often as it is closed."""
    tags = [(tag.name, tag.closing) for tag in find_tags(text)]
    return all(tags.count((name, False)) == tags.count((name, True)) for name in BLOCKS)


def _strictly_paired(tags: Sequence[Tag]) -> bool:
    """Whether the tags are blocks one after the other, none inside another."""
    return len(tags) % 2 == 0 and all(
        not a.closing and b.closing and a.name == b.name
        for a, b in zip(tags[::2], tags[1::2], strict=True)
    )


def turn_is_well_formed(turn: Turn, final: bool) -> bool:
    """Whether a response keeps the format: one closed `<think>` first, then, if `final`, one non-empty answer block that ends the
    response, else at least one call, all of them readable. No `<tool_code>`, no `<tool_response>`, no tag more or less.
    """
    text = turn.text
    tags = find_tags(text)
    names = [tag.name for tag in tags]
    if (
        not _strictly_paired(tags)
        or not text.lstrip().startswith("<think>")
        or names.count("think") != 2
    ):
        return False
    if final:
        tail = _END_TOKENS.sub("", text[tags[-1].end :])
        return (
            names[2:] == ["answer", "answer"]
            and extract_answer(text) is not None
            and not tail.strip()
        )
    return (
        set(names[2:]) == {"tool_call"}
        and bool(turn.calls)
        and all(outcome.call is not None for outcome in turn.calls)
    )


def format_compliant(turns: Sequence[Turn]) -> bool:
    """The f of one episode: every turn is finished and well formed, and the last one ends in an answer block."""
    return bool(turns) and all(
        not turn.truncated and turn_is_well_formed(turn, final=i == len(turns) - 1)
        for i, turn in enumerate(turns)
    )
