"""Reads answers and calls that a model writes in a form of its own.

Text in that form is rewritten to this project's: `<tool_call>` with JSON, `<answer>`. Everything
after that (the episode, scores, transcripts' turns) knows one form only. Token ids stay as sampled.

There are two ways to find calls and answers:

    patterns       call = '<zoom>(.*?)</zoom>'       finds  <zoom>{"segment": [4, 6]}</zoom>
    a JSON agent   json_calls = 'next.calls'         finds  {"next": {"calls": [...]}}

A call is then an object. `tools`, `arguments` and the names of fields translate it:

    {"do": "zoom", "with": {"segment": [4, 6]}}                               as the model writes
    {"name": "crop_video", "arguments": {"start_time": 4, "end_time": 6}}     as it is read
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paravt_jax.method.parsing import call_text, extract_answer, find_calls
from paravt_jax.method.tools.crop_video import CropVideo, read_seconds

# Quantifiers are possessive ("++"), so that a long text that does not match fails at once.
_PAIR = re.compile(r"""(?<!\w)(\w++)\s*+=\s*("[^"]*"|'[^']*'|[^\s,()]+)""")
_TIME = r"\d++(?::\d++)*+(?:\.\d++)?+"
_UNIT = r"(?:\s*+s(?:ec(?:ond)?s?)?\b)?+"
_BRACKETS = r"[\s\[\]()<>]*+"
_JOINT = rf"{_BRACKETS}(?:-{{1,2}}>|[,;~–—→-]|(?:to|and|until)\b)?+{_BRACKETS}"
_NUMBER_OR_TIME = re.compile(_TIME)
# "4 to 6", "[0:04-0:06, 0:08-0:09]", "<4.0 seconds> - <6.0 seconds>". No other units or signs.
_TIMES = re.compile(
    rf"{_BRACKETS}(?:(?:from|between)\b)?{_BRACKETS}"
    rf"{_TIME}{_UNIT}(?:{_JOINT}{_TIME}{_UNIT})*+{_BRACKETS}",
    re.IGNORECASE,
)
_MILLISECONDS = re.compile(r"(?<=:[0-5]\d),(?=\d{3}(?![\d:.]))")  # "00:01:13,500" of subtitles
# Where an object may begin. Braces around a word are LaTeX, not JSON.
_OBJECT = re.compile(r'\{\s*["}]')
# From the first brace to the last one.
_BRACES = re.compile(rf"(?={_OBJECT.pattern})\{{.*\}}", re.DOTALL)
_DECODER = json.JSONDecoder(strict=False)
# Names that other formats give to arguments of crop_video.
_ARGUMENTS = {"start": "start_time", "end": "end_time"}
_EMPTY = (None, "", [], {})


@dataclasses.dataclass(frozen=True)
class NativeFormat:
    """How a model writes; by default in our own form.

    In patterns, which are regular expressions, a dot matches line breaks, too.
    """

    answer: str = ""
    """Pattern with one group. The answer is the last group with text, unless there is an answer
    block."""
    call: str = ""
    """Pattern whose matches are calls. Its groups are fields of a call if they have names. A single
    group without a name is JSON (a call, arguments, or a list of them) or `name=value` pairs."""
    json_answer: str = ""
    """For a JSON agent, whose response is an object: the field of its answer, such as `final` or
    `result.answer`. A response with an answer calls nothing. Of several objects, the last one with
    an answer or a call counts."""
    json_calls: str = ""
    """For a JSON agent: the field of its call or of its list of calls."""
    name_field: str = "name"
    """The field of a call with the name of the tool."""
    arguments_field: str = "arguments"
    """The field of a call with the arguments; without it, the other fields are arguments."""
    tool: str = "crop_video"
    """The tool of calls that name none."""
    tools: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Our names of tools, by the model's."""
    arguments: Mapping[str, str | Sequence[str]] = dataclasses.field(default_factory=dict)
    """Our names of arguments, by the model's. A list of names splits a value: they get the numbers
    and times in it, in order. Further numbers are further calls."""

    def __post_init__(self):
        for field in ("answer", "call"):
            _check_pattern(field, getattr(self, field), named=field == "call")
        for field in ("json_answer", "json_calls", "name_field", "arguments_field"):
            path = getattr(self, field)
            if path and not all(path.split(".")):
                raise ValueError(f"{field}: {path!r} has an empty name; give names joined by dots")

    @property
    def has_own_calls(self) -> bool:
        """Whether calls are read in another form than ours."""
        return bool(self.call or self.json_calls)

    def settings(self) -> dict[str, Any]:
        """The fields that differ from our own form."""
        ours = dataclasses.asdict(NativeFormat())
        return {key: x for key, x in dataclasses.asdict(self).items() if x != ours[key]}

    def __call__(self, text: str) -> str:
        """Rewrite a response. Whatever is in our form already stays.

        A call that cannot be read becomes one that cannot be parsed, so that the model is told.
        """
        try:
            return self._rewrite(text)
        except RecursionError:  # JSON that is nested too deeply
            return text

    def _rewrite(self, text: str) -> str:
        in_our_form = find_calls(text) or extract_answer(text) is not None
        if (self.json_answer or self.json_calls) and not in_our_form:
            text = self._read_agent(text)
        if self.call:
            text = re.sub(self.call, self._read_match, text, flags=re.DOTALL)
        if self.answer and extract_answer(text) is None:
            found = [*re.finditer(self.answer, text, flags=re.DOTALL)]
            # A pattern may match without its group, or with an empty one.
            found = [match for match in found if match[1] and match[1].strip()]
            if found:
                start, end = found[-1].span()
                text = f"{text[:start]}<answer>{found[-1][1]}</answer>{text[end:]}"
        return text

    def _read_agent(self, text: str) -> str:
        """Rewrite the object of a JSON agent: the last one that has an answer or calls.

        If there is none, everything between braces becomes a call that cannot be read.
        """
        # Braces in the thought are no response.
        after_thought = max(text.rfind("</think>"), 0)
        braces = _BRACES.search(text, after_thought)
        if not braces:
            return text
        start, end = braces.span()
        answer: Any = None
        calls: Any = None
        for found, span in _objects(text, after_thought):
            fields = _value_at(found, self.json_answer), _value_at(found, self.json_calls)
            if any(field not in _EMPTY for field in fields):
                answer, calls = fields
                start, end = span
        if answer not in _EMPTY:
            answer = answer if isinstance(answer, str) else json.dumps(answer)
            written = f"<answer>{answer}</answer>"
        else:
            written = self._write_calls(calls, text[start:end])
        return text[:start] + written + text[end:]

    def _read_match(self, match: re.Match[str]) -> str:
        """Rewrite a match of `call`."""
        groups = [group for group in match.groups() if group and group.strip()]
        if not groups:  # empty tags call nothing
            return match[0]
        named = {name: group for name, group in match.groupdict().items() if group}
        return self._write_calls(named or _read_object(groups[0]), groups[0])

    def _write_calls(self, found: Any, text: str) -> str:
        """The calls in an object or a list of objects; if there are none, `text` as a call."""
        read: list[str] = []
        # A list without an object, such as [4, 6], is one call that cannot be read, not two.
        several = isinstance(found, list) and any(isinstance(call, dict) for call in found)
        for call in found if several else [found]:
            if isinstance(call, dict) and call:
                read += self._read_call(call)
            elif call:
                read.append(json.dumps(call))
        return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in read or [text])

    def _read_call(self, call: Mapping[str, Any]) -> list[str]:
        """The JSON of the calls that a call stands for."""
        name = _value_at(call, self.name_field)
        name = self.tools.get(name, name) if isinstance(name, str) else self.tool
        arguments = _value_at(call, self.arguments_field)
        if isinstance(arguments, str):
            arguments = _read_object(arguments)
        if not isinstance(arguments, dict):
            arguments = {key: value for key, value in call.items() if key != self.name_field}
        calls: list[dict[str, Any]] = [{}]
        for key, value in arguments.items():
            ours = self.arguments.get(key, key)
            found = [{ours: value}] if isinstance(ours, str) else _split_numbers(value, ours)
            found = found or [{key: value}]
            calls = [known | more for more in found for known in calls]
        if name == CropVideo.name:
            calls = [_crop_arguments(fields) for fields in calls]
        return [call_text(name, fields) for fields in calls]


def _check_pattern(field: str, pattern: str, named: bool) -> None:
    """Raise ValueError for a pattern without the one group, or the `named` ones, that are read."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{field}: not a regular expression ({error})") from error
    groups = compiled.groups
    if named and groups and groups == len(compiled.groupindex):
        return
    if pattern and groups != 1:
        or_named = ", or name all of them" if named else ""
        raise ValueError(f"{field}: has {groups} groups; give one, around what is read{or_named}")


def _read_json(text: str) -> Any:
    """The value of a JSON text; None if it is none."""
    try:
        return json.loads(text, strict=False)
    except ValueError:
        return None


def _read_object(text: str) -> Any:
    """The JSON value, or an object of the `name=value` pairs, in a text."""
    found = _read_json(text)
    if isinstance(found, dict | list):
        return found
    return {key: value.strip("\"'") for key, value in _PAIR.findall(text)}


def _objects(text: str, start: int) -> Iterator[tuple[dict[str, Any], tuple[int, int]]]:
    """The JSON objects in a text from `start` on, each with its span; none inside another."""
    match = _OBJECT.search(text, start)
    while match:
        end = match.start() + 1
        try:
            found, end = _DECODER.raw_decode(text, match.start())
            yield found, (match.start(), end)
        except ValueError:
            pass
        match = _OBJECT.search(text, end)


def _value_at(found: Any, path: str) -> Any:
    """The value at a path of names joined by dots; None if it is not there."""
    for name in path.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _split_numbers(value: Any, names: Sequence[str]) -> list[dict[str, Any]]:
    """The numbers and times of a value as arguments, for one or several calls.

    [4, 6], [[4, 6], [8, 9]] and "0:04-0:06, 0:08-0:09" have two names' values once or twice.

    Returns:
        The arguments of each call; empty if a text is not only numbers, times in seconds and what
        joins them.
    """
    values: list[Any] = []
    for item in value if isinstance(value, list) else [value]:
        for part in item if isinstance(item, list) else [item]:
            if not isinstance(part, str):
                values.append(part)
                continue
            part = _MILLISECONDS.sub(".", part)
            if not _TIMES.fullmatch(part):
                return []
            values += _NUMBER_OR_TIME.findall(part)
    count = len(names)
    return [
        dict(zip(names, values[start : start + count], strict=False))
        for start in range(0, len(values), count)
    ]


def _crop_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of crop_video by their names; `fps` becomes the number of frames."""
    named = {_ARGUMENTS.get(key, key): value for key, value in arguments.items()}
    start, end, rate = (read_seconds(named.get(key)) for key in ("start_time", "end_time", "fps"))
    if start is None or end is None or rate is None or "num_frames" in named:
        return named
    frames = rate * (end - start)
    return named | {"num_frames": max(1, int(frames))} if math.isfinite(frames) else named
