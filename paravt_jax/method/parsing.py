"""Reads what the model wrote: tool calls, answers, and whether a turn keeps the format.

Owns the grammar of tags and the shape of a `crop_video` call. Refuses to guess: what cannot be read becomes a `Malformed`
value with a sentence the model can act on. Invariant: no text whatever makes a function here raise, each block is read on its
own, and nothing the model wrote is executed or opened (`video_path` is ignored, `<tool_code>` is only recognised).
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Sequence

from paravt_jax.method.records import CallStatus, CropCall, Turn

TOOL_NAME = "crop_video"
BLOCKS = ("think", "tool_call", "tool_code", "tool_response", "answer")
TAG_PATTERN = "<(/?)(" + "|".join(BLOCKS) + ")>"
MIN_THINK = 10  # characters of a substantive think (REFERENCE 3)

_TAG = re.compile(TAG_PATTERN)
_END_TOKENS = re.compile(r"<\|im_end\|>|<\|endoftext\|>")
_PLAIN_NUMBER = re.compile(
    r"([+-]?[0-9]+(?:\.[0-9]*)?|[+-]?\.[0-9]+)\s*(?:s|secs?|seconds?)?", re.IGNORECASE
)
_CLOCK = re.compile(r"(?:([0-9]+):)?([0-9]+):([0-5]?[0-9](?:\.[0-9]+)?)")
_FORM = '{"name": "crop_video", "arguments": {"start_time": 12, "end_time": 28}}'


@dataclasses.dataclass(frozen=True)
class Malformed:
    """A call that cannot be run: why, as a sentence for the model, and how it is counted."""

    reason: str
    status: CallStatus = CallStatus.MALFORMED


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


def read_seconds(value: object) -> float | None:
    """Seconds from a JSON value: a number, or text as "16", "16.5s", "16 seconds", "00:16", "1:00:05". None where it is none of these.

    The result may be infinite where the number is too large for a float; the caller refuses it.
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    if not isinstance(value, str):
        return None
    text = value.strip()
    if number := _PLAIN_NUMBER.fullmatch(text):
        return float(number.group(1))
    if clock := _CLOCK.fullmatch(text):
        hours, minutes, seconds = clock.groups()
        return float(hours or 0) * 3600 + float(minutes) * 60 + float(seconds)
    return None


def _read_call(body: str) -> CropCall | Malformed:
    """One call from the text between its tags."""
    try:
        call = json.loads(body, strict=False)
    except RecursionError:
        return Malformed(f"The tool call is nested too deeply. Write it as {_FORM}.")
    except ValueError:  # not JSON, or an integer with more digits than Python converts
        return Malformed(f"The tool call is not valid JSON. Write it as {_FORM}.")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return Malformed(f"The tool call names no tool. Write it as {_FORM}.")
    if call["name"] != TOOL_NAME:
        return Malformed(
            f"There is no such tool. The only tool is {TOOL_NAME}.", CallStatus.UNKNOWN_TOOL
        )
    arguments = call.get("arguments")
    if isinstance(arguments, str):  # some chat formats write the arguments as JSON text
        try:
            arguments = json.loads(arguments, strict=False)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        return Malformed(f"The arguments of the tool call are missing. Write it as {_FORM}.")
    times = []
    for field in ("start_time", "end_time"):
        if field not in arguments:
            return Malformed(f"{field} is missing. Give start_time and end_time in seconds.")
        seconds = read_seconds(arguments[field])
        if seconds is None:
            return Malformed(f"{field} is not a time. Give start_time and end_time in seconds.")
        if not math.isfinite(seconds):
            return Malformed(
                f"{field} is not a finite number. Give start_time and end_time in seconds.",
                CallStatus.BAD_WINDOW,
            )
        times.append(seconds)
    return CropCall(*times)


def parse_calls(text: str) -> list[CropCall | Malformed]:
    """Every tool call of one response, in order, each read on its own: a malformed one does not void the others.

    A `<tool_call>` ends at its `</tool_call>`; where another opens first, or none closes, it is malformed. Each `<tool_code>`
    is a `Malformed` that names the right form: code is never run.
    """
    calls: list[CropCall | Malformed] = []
    opened: Tag | None = None
    unclosed = Malformed(
        f"The tool call was not closed. Write it between tool_call tags as {_FORM}."
    )
    for tag in find_tags(text):
        if tag.name == "tool_call" and tag.closing:
            if opened is not None:
                calls.append(_read_call(text[opened.end : tag.start]))
            opened = None
        elif not tag.closing and tag.name in ("tool_call", "tool_code"):
            if opened is not None:
                calls.append(unclosed)
            opened = tag if tag.name == "tool_call" else None
            if tag.name == "tool_code":
                calls.append(
                    Malformed(f"Code is not run. Write the call between tool_call tags as {_FORM}.")
                )
    if opened is not None:
        calls.append(unclosed)
    return calls


def resolve_window(call: CropCall, duration: float) -> tuple[CropCall, CallStatus, str]:
    """The window to show of a video of `duration` seconds, what becomes of the call, and a sentence for the model ("" if as asked).

    A window that reaches over an end is cut to [0, duration] (CLAMPED); reversed, empty, outside or not finite: BAD_WINDOW.
    """

    def refuse(why: str) -> tuple[CropCall, CallStatus, str]:
        return (
            call,
            CallStatus.BAD_WINDOW,
            f"{why} The video runs from 0 to {duration:.1f} seconds.",
        )

    if not (math.isfinite(call.start) and math.isfinite(call.end)):
        return refuse("The window is not finite.")
    if call.start > call.end:
        return refuse("The window is reversed: start_time is after end_time.")
    if call.start == call.end:
        return refuse("The window is empty: start_time equals end_time.")
    if call.start >= duration or call.end <= 0:
        return refuse("The window is outside the video.")
    window = CropCall(max(call.start, 0.0), min(call.end, duration))
    if window == call:
        return window, CallStatus.EXECUTED, ""
    return (
        window,
        CallStatus.CLAMPED,
        f"The window was cut to {window.start:.1f} to {window.end:.1f} seconds, where the video is.",
    )


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


def turn_is_well_formed(text: str, final: bool) -> bool:
    """Whether a response keeps the format: one closed `<think>` first, then, if `final`, one non-empty answer block that ends the
    response, else at least one call, all of them readable. No `<tool_code>`, no `<tool_response>`, no tag more or less.
    """
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
        len(names) > 2
        and set(names[2:]) == {"tool_call"}
        and all(isinstance(call, CropCall) for call in parse_calls(text))
    )


def format_compliant(turns: Sequence[Turn]) -> bool:
    """The f of one episode: every turn is finished and well formed, and the last one ends in an answer block."""
    return bool(turns) and all(
        not turn.truncated and turn_is_well_formed(turn.text, final=i == len(turns) - 1)
        for i, turn in enumerate(turns)
    )
