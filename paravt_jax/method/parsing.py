"""Parses the model's text: finds tool calls and answers, and checks the format of turns.

A well-formed turn is one of

    <think>...</think> <tool_call>...</tool_call> ...more calls
    <think>...</think> <answer>...</answer>

What is between the tags of a call depends on the model's family (`CallSyntax`). A call that cannot
be parsed becomes a `FailedCall` with a sentence that the model can act on. The functions raise on
no text, and they neither execute nor open anything that the model wrote.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paravt_jax.method.records import Call, CallStatus, FailedCall, Turn
from paravt_jax.method.tools.tool import Tool

BLOCKS = ("think", "tool_call", "tool_code", "tool_response", "answer")
TAG_PATTERN = "<(/?)(" + "|".join(BLOCKS) + ")>"
MIN_THINK = 10  # a substantive think has at least this many characters (the release's rule)

_TAG = re.compile(TAG_PATTERN)


@dataclasses.dataclass(frozen=True)
class Tag:
    """One tag in a text."""

    name: str
    """Name of its block, one of `BLOCKS`."""
    closing: bool
    start: int
    """Index of its first character."""
    end: int
    """Index after its last character."""


def find_tags(text: str) -> list[Tag]:
    """Return all tags of `BLOCKS`, in order."""
    return [Tag(m.group(2), bool(m.group(1)), m.start(), m.end()) for m in _TAG.finditer(text)]


@dataclasses.dataclass(frozen=True)
class CallSyntax:
    """How a call is written between `<tool_call>` and `</tool_call>`."""

    request: str
    """Asks the model to write its calls in this way."""
    write: Callable[[str, Mapping[str, Any]], str]
    """The text of a call, from the name of a tool and its arguments."""
    read: Callable[[str], tuple[str, Mapping[str, Any] | None]]
    """Parse a call into its name and arguments (None if missing). Raises ValueError for a text that
    is no call, with the reason, a sentence without its period."""


def _write_json(name: str, arguments: Mapping[str, Any]) -> str:
    return json.dumps({"name": name, "arguments": arguments})


def _read_json(text: str) -> tuple[str, Mapping[str, Any] | None]:
    try:
        call = json.loads(text, strict=False)
    except RecursionError:
        raise ValueError("The tool call is nested too deeply") from None
    except ValueError:  # not JSON, or an integer with more digits than Python converts
        raise ValueError("The tool call is not valid JSON") from None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError("The tool call names no tool")
    arguments = call.get("arguments")
    # Some chat formats write the arguments as JSON text.
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, strict=False)
        except (ValueError, RecursionError):
            arguments = None
    return call["name"], arguments if isinstance(arguments, dict) else None


JSON_CALLS = CallSyntax(
    "For each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>',
    _write_json,
    _read_json,
)
"""Calls as JSON objects. Conversations are stored with such calls, whatever is trained on them."""


def find_calls(text: str) -> list[tuple[Tag, str | None]]:
    """Find the calls of one response, in order.

    Returns:
        For each call its opening tag and its text up to `</tool_call>`. The text is None for a call
        that is not closed before the next one, and for `<tool_code>`.
    """
    calls: list[tuple[Tag, str | None]] = []
    opened: Tag | None = None
    for tag in find_tags(text):
        if tag.name != "tool_call" and (tag.name != "tool_code" or tag.closing):
            continue
        if opened is not None:
            closed = tag.closing and opened.name == "tool_call"
            calls.append((opened, text[opened.end : tag.start] if closed else None))
        opened = None if tag.closing else tag
    if opened is not None:
        calls.append((opened, None))
    return calls


def parse_calls(
    text: str, tools: Sequence[Tool], syntax: CallSyntax = JSON_CALLS
) -> list[Call | FailedCall]:
    """Parse the calls of one response, in order. A malformed call does not void the others.

    Args:
        text: The response.
        tools: The offered tools, at least one.
        syntax: How calls are written.

    Returns:
        A call or a `FailedCall` for each. Code in a `<tool_code>` is a `FailedCall` and never run.
    """
    form = syntax.write(tools[0].name, tools[0].example)
    calls: list[Call | FailedCall] = []
    for tag, body in find_calls(text):
        if body is None:
            why = "The tool call was not closed. Write it"
            if tag.name == "tool_code":
                why = "Code is not run. Write the call"
            calls.append(FailedCall(f"{why} between tool_call tags as {form}."))
            continue
        try:
            name, arguments = syntax.read(body)
        except ValueError as error:
            calls.append(FailedCall(f"{error}. Write it as {form}."))
        else:
            calls.append(_read_call(name, arguments, tools, syntax))
    return calls


def _read_call(
    name: str, arguments: Mapping[str, Any] | None, tools: Sequence[Tool], syntax: CallSyntax
) -> Call | FailedCall:
    tool = next((tool for tool in tools if tool.name == name), None)
    if tool is None:
        names = ", ".join(tool.name for tool in tools)
        known = f"The only tool is {names}" if len(tools) == 1 else f"The tools are {names}"
        return FailedCall(f"There is no such tool. {known}.", CallStatus.UNKNOWN_TOOL)
    if arguments is None and tool.required:
        form = syntax.write(tool.name, tool.example)
        return FailedCall(f"The arguments of the tool call are missing. Write it as {form}.")
    return tool.parse(arguments or {})


def block_spans(tags: Sequence[Tag], name: str) -> list[tuple[Tag, Tag]]:
    """Return all closed blocks of one name, as (opening, closing) tags.

    If a block is opened twice, the later opening counts.
    """
    spans: list[tuple[Tag, Tag]] = []
    opened: Tag | None = None
    for tag in tags:
        if tag.name != name:
            continue
        # A closing tag without an opening one is skipped.
        if tag.closing and opened is not None:
            spans.append((opened, tag))
        opened = None if tag.closing else tag
    return spans


def extract_answer(text: str) -> str | None:
    """Return the content of the last non-empty `<answer>` block outside think and tool blocks, or
    None.

    A think that is never closed does not hide an answer after it, although the turn is not well
    formed.
    """
    tags = find_tags(text)
    hidden: list[tuple[int, int]] = []
    for name in BLOCKS:
        if name != "answer":
            hidden += [(start.start, end.end) for start, end in block_spans(tags, name)]
    for opening, closing in reversed(block_spans(tags, "answer")):
        content = text[opening.end : closing.start].strip()
        is_hidden = any(start < opening.start < end for start, end in hidden)
        if content and not is_hidden and not _TAG.search(content):
            return content
    return None


def first_think(text: str) -> tuple[str, str | None]:
    """Return the content of the first think block, and the text after its `</think>`.

    If nothing closes the block, its content ends at the next tag and the second value is None.
    """
    _, opening, rest = text.partition("<think>")
    thought, closing, after = rest.partition("</think>")
    if closing:
        return thought.strip(), after
    return _TAG.split(rest, maxsplit=1)[0].strip(), None


def has_substantive_think(text: str) -> bool:
    """Return whether the first think block, closed or not, has at least `MIN_THINK` characters."""
    return len(first_think(text)[0]) >= MIN_THINK


def tags_balanced(text: str) -> bool:
    """Return whether every kind of block has equal numbers of opening and closing tags."""
    tags = [(tag.name, tag.closing) for tag in find_tags(text)]
    return all(tags.count((name, False)) == tags.count((name, True)) for name in BLOCKS)


def turn_is_well_formed(turn: Turn, final: bool) -> bool:
    """Return whether a response keeps the format.

    It has to start with one closed `<think>`. A final turn then has one non-empty answer block and
    nothing after it. Any other turn then has one or more calls, all of them readable. No other tags
    are allowed.
    """
    text = turn.text
    tags = find_tags(text)
    form = "".join(text[tag.start : tag.end] for tag in tags)
    if not text.lstrip().startswith("<think>"):
        return False
    if final:
        has_answer = form == "<think></think><answer></answer>" and extract_answer(text) is not None
        return has_answer and not text[tags[-1].end :].strip()
    readable = bool(turn.calls) and all(outcome.call is not None for outcome in turn.calls)
    return readable and re.fullmatch("<think></think>(<tool_call></tool_call>)+", form) is not None


def format_compliant(turns: Sequence[Turn]) -> bool:
    """Return whether an episode keeps the format (f): all turns are well formed, and none is
    truncated."""
    return bool(turns) and all(
        not turn.truncated and turn_is_well_formed(turn, final=number == len(turns))
        for number, turn in enumerate(turns, start=1)
    )
