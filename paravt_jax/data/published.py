"""Rows of the published training data (docs/reference.md, 5) as records: questions of `rl` files, conversations of `sft` files.

Owns the published schema and what of it the protocol can say. Refuses a row by raising `Refused` with the reason and its detail; no row
is mended by guessing. Paths stay what the files say: relative ones are meant under the root that the user names, `file://` ones are
absolute already, and one that would leave the root is refused.
Invariant: nothing of a row that is let through is trained on but the assistant's words, with its calls written as the protocol writes them.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow
import pyarrow.parquet

from paravt_jax.method.accuracy import read_range
from paravt_jax.method.conversations import ChatTurn, Clip, Conversation
from paravt_jax.method.parsing import block_spans, extract_answer, find_tags, parse_calls
from paravt_jax.method.protocol import PINNED, VIDEO_NAME, ProtocolSettings, render_call
from paravt_jax.method.records import CropCall, FailedCall, Question, QuestionKind
from paravt_jax.method.tools.crop_video import CropVideo

RL_COLUMNS, SFT_COLUMNS = ("prompt", "videos", "extra_info"), ("messages",)
_NAME = re.compile(r"paravt_(?:sft|rl)_(.+?)(?:_\d+k\d*)?")
_MEDIA = {"video_url": False, "image_url": True}  # content type -> whether it is a picture
_MARKS = re.compile(r"<(?:video|image)>\n?")
_FOREIGN = re.compile(r"<\|\w+\|>|</?tool_response>|<tool_code>")
_RESPONSE = re.compile(r"(</?tool_response>)")

Part = str | tuple[str, bool]  # a text, or a path and whether it is a picture
Look = Callable[[str, bool, CropCall | None], Clip]
"""What is shown of a file: (path, whether it is a picture, the call that asked for it or None). Raises Refused and VideoError."""


class Reason(enum.StrEnum):
    """Why a row is left out."""

    BROKEN = "broken row"
    NO_ANSWER = "no answer"
    PROTOCOL = "not in the protocol"
    MISSING = "missing video"
    UNREADABLE = "unreadable video"
    SLOW = "too slow"


class Refused(Exception):
    """A row that is left out, why, and what exactly was met."""

    def __init__(self, reason: Reason, detail: str):
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail

    def __reduce__(self):
        return Refused, (self.reason, self.detail)


@dataclasses.dataclass(frozen=True)
class Table:
    """One parquet file: `split` is the name of its source, `rl` whether it holds questions to reinforce on."""

    path: pathlib.Path
    split: str
    rl: bool
    rows: int


def open_table(path: pathlib.Path) -> Table:
    """What a parquet file holds. ValueError for another format, or for columns that are neither those of rl nor of sft rows."""
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns, rows = set(file.schema_arrow.names), file.metadata.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(
            f"{path}: no readable parquet file ({error}); download it again"
        ) from error
    if not set(RL_COLUMNS) <= columns and not set(SFT_COLUMNS) <= columns:
        raise ValueError(
            f"{path}: its columns are {', '.join(sorted(columns))}; rl rows have {', '.join(RL_COLUMNS)}, sft rows "
            f"{', '.join(SFT_COLUMNS)}: give the files of ParaVT/ParaVT-Parquet"
        )
    named = _NAME.fullmatch(path.stem)
    return Table(path, named[1] if named else path.stem, set(RL_COLUMNS) <= columns, rows)


def read_rows(table: Table, batch: int = 256) -> Iterator[dict[str, Any] | Refused]:
    """The rows of a file in order, with their known columns only.

    A `Refused` stands for a row that has no Python values.
    """
    with pyarrow.parquet.ParquetFile(table.path) as file:
        for part in file.iter_batches(batch, columns=list(RL_COLUMNS if table.rl else SFT_COLUMNS)):
            yield from _rows(part)


def _rows(part: pyarrow.RecordBatch) -> list[dict[str, Any] | Refused]:
    try:
        return part.to_pylist()
    except ValueError as error:  # Arrow checks neither that texts are UTF-8 nor that dates exist
        if part.num_rows == 1:
            return [Refused(Reason.BROKEN, f"a value cannot be read ({error})")]
        return [row for number in range(part.num_rows) for row in _rows(part.slice(number, 1))]


def local_path(path: Any) -> str:
    """The path of a row as records hold it: relative to the root, or absolute. Raises Refused."""
    if not isinstance(path, str) or not path.removeprefix("file://"):
        raise Refused(Reason.BROKEN, f"a path is {path!r}")
    path = path.removeprefix("file://")
    _sound(path)
    if "://" in path or "\0" in path or ".." in pathlib.PurePosixPath(path).parts:
        raise Refused(
            Reason.BROKEN, f"the path {path!r} is not one under the root, nor a file:// one"
        )
    return path


def read_question(row: Mapping[str, Any], id: str) -> Question:
    """The question of an rl row. Raises Refused."""
    turns = [
        turn for turn in _list(row.get("prompt"), "prompt") if _field(turn, "role") != "system"
    ]
    if [turn["role"] for turn in turns] != ["user"] or not isinstance(turns[0].get("content"), str):
        raise Refused(Reason.BROKEN, "prompt is not one user turn of text")
    paths = [_field(video, "video") for video in _list(row.get("videos"), "videos")]
    if len(paths) != 1:
        raise Refused(Reason.PROTOCOL, f"{len(paths)} videos, a question is about one")
    extra = row.get("extra_info")
    if isinstance(extra, str):
        extra = _json(extra, "extra_info")
    if not isinstance(extra, Mapping):
        raise Refused(Reason.BROKEN, f"extra_info is {type(extra).__name__}")
    path, kind = (
        local_path(paths[0]),
        _kind(extra.get("question_type", QuestionKind.OPEN_ENDED.value)),
    )
    text = _without(_MARKS.sub("", _sound(turns[0]["content"])), [path]).strip()
    if not text:
        raise Refused(Reason.BROKEN, "the question is empty")
    return Question(id, path, text, kind, _answer(extra.get("answer"), kind))


def _kind(name: Any) -> QuestionKind:
    try:
        return QuestionKind(name)
    except ValueError:
        raise Refused(
            Reason.BROKEN, f"question_type is {name!r}, none of {', '.join(QuestionKind)}"
        ) from None


def _answer(answer: Any, kind: QuestionKind) -> str:
    try:
        written = (
            answer if isinstance(answer, str) else "" if answer is None else json.dumps(answer)
        )
    except TypeError as error:  # a column may hold bytes, dates and decimals
        raise Refused(Reason.BROKEN, f"the answer is no JSON ({error})") from error
    text = _sound(written).strip()
    if not text or text == "[]":
        raise Refused(Reason.NO_ANSWER, "the answer is empty")
    if kind is QuestionKind.TEMPORAL_GROUNDING and read_range(text) is None:
        raise Refused(Reason.NO_ANSWER, f"{text[:80]!r} is no span of time")
    return text


def read_conversation(
    row: Mapping[str, Any], id: str, source: str, limits: ProtocolSettings, look: Look
) -> Conversation:
    """The conversation of an sft row; files are looked at once all else is known to be right. Raises Refused, and what `look` raises."""
    messages = row.get("messages")
    turns = _read_turns(_json(messages, "messages") if isinstance(messages, str) else messages)
    spoken = " ".join(
        part
        for role, parts in turns
        if role in ("system", "user")
        for part in parts
        if isinstance(part, str)
    )
    chat = _arrange([(role, parts) for role, parts in turns if role != "system"], limits)
    tools = "crop_video" in spoken or any(role == "tool" for role, _, _ in chat)
    main = next(
        (
            part[0]
            for _, parts, _ in chat
            for part in parts
            if isinstance(part, tuple) and not part[1]
        ),
        None,
    )

    def shown(part: Part, call: CropCall | None) -> str | Clip:
        return part if isinstance(part, str) else look(*part, call if part[0] == main else None)

    return Conversation(
        id,
        source,
        tools,
        tuple(
            ChatTurn(role, tuple(shown(part, call) for part in parts)) for role, parts, call in chat
        ),
    )


def _read_turns(messages: Any) -> list[tuple[str, list[Part]]]:
    """Roles, texts and paths of the messages; the paths in texts give way to the name under which the model knows its video."""
    turns: list[tuple[str, list[Part]]] = []
    for message in _list(messages, "messages"):
        role, content = _field(message, "role"), _field(message, "content")
        if role not in ("system", "user", "assistant", "tool"):
            raise Refused(Reason.BROKEN, f"a role is {role!r}")
        items = (
            [{"type": "text", "text": content}]
            if isinstance(content, str)
            else _list(content, f"the {role}'s content")
        )
        parts: list[Part] = []
        for item in items:
            kind = _field(item, "type")
            if kind == "text" and isinstance(item.get("text"), str):
                parts.append(_sound(item["text"]))
            elif isinstance(kind, str) and kind in _MEDIA:
                parts.append((local_path(_field(item.get(kind), "url")), _MEDIA[kind]))
            else:
                raise Refused(Reason.BROKEN, f"the {role}'s content holds a {kind!r}")
        turns.append((role, parts))
    paths = [part[0] for _, parts in turns for part in parts if isinstance(part, tuple)]
    return [
        (role, [_without(part, paths) if isinstance(part, str) else part for part in parts])
        for role, parts in turns
    ]


def _arrange(
    turns: Sequence[tuple[str, list[Part]]], limits: ProtocolSettings
) -> list[tuple[str, list[Part], CropCall | None]]:
    """Turns as an episode has them: a question, then responses, each call followed by its own tool turn, a response last."""
    chat: list[tuple[str, list[Part], CropCall | None]] = []
    calls: list[CropCall] = []
    rounds, before = 0, ""
    for role, parts in turns:
        if role == "assistant":
            if before in ("", "assistant"):
                raise Refused(
                    Reason.PROTOCOL, "a response stands where a question or a tool response is due"
                )
            _require_answered(calls)
            text, calls = _response(parts, limits)
            rounds += bool(calls)
            if rounds > limits.max_tool_turns:
                raise Refused(
                    Reason.PROTOCOL,
                    f"more than protocol.max_tool_turns = {limits.max_tool_turns} turns with calls",
                )
            chat.append((role, [text], None))
        elif calls or role == "tool":
            found = _responses(parts, role)
            if len(found) > len(calls):
                raise Refused(
                    Reason.PROTOCOL, f"{len(found)} tool responses for {len(calls)} calls"
                )
            chat += [("tool", response, call) for response, call in zip(found, calls, strict=False)]
            calls = calls[len(found) :]
            role = "tool"
        elif before in ("", "assistant"):
            chat.append(("user", _question(parts), None))
        else:
            raise Refused(Reason.PROTOCOL, "two user turns in a row")
        before = role
    _require_answered(calls)
    if before != "assistant":
        raise Refused(Reason.NO_ANSWER, "the conversation does not end with a response")
    return chat


def _require_answered(calls: Sequence[CropCall]) -> None:
    if calls:
        raise Refused(Reason.PROTOCOL, f"{len(calls)} calls have no tool response")


def _response(parts: Sequence[Part], limits: ProtocolSettings) -> tuple[str, list[CropCall]]:
    """The text of a response with its calls as the protocol writes them, and these."""
    if not all(isinstance(part, str) for part in parts):
        raise Refused(Reason.PROTOCOL, "a response shows a file")
    text = "".join(str(part) for part in parts).strip().removesuffix("<|im_end|>").rstrip()
    if not text:
        raise Refused(Reason.NO_ANSWER, "a response is empty")
    if foreign := _FOREIGN.search(text):
        raise Refused(Reason.PROTOCOL, f"a response holds {foreign[0]}")
    calls = parse_calls(text, (CropVideo(),))
    for call in calls:
        if isinstance(call, FailedCall):
            raise Refused(Reason.PROTOCOL, f"a call cannot be read: {call.reason}")
    if len(calls) > limits.max_calls:
        raise Refused(
            Reason.PROTOCOL,
            f"{len(calls)} calls in a turn, protocol.max_calls = {limits.max_calls}",
        )
    read = [call for call in calls if isinstance(call, CropCall)]
    spans = block_spans(find_tags(text), "tool_call")
    for (opening, closing), call in reversed(list(zip(spans, read, strict=True))):
        text = text[: opening.start] + render_call(call) + text[closing.end :]
    tag = PINNED.strip()
    if text.startswith(tag):  # it opens as a pinned one does
        text = PINNED + text.removeprefix(tag).lstrip()
    return text, read


def _responses(parts: Sequence[Part], role: str) -> list[list[Part]]:
    """The tool responses of a turn: one between each pair of tags, or a tool's turn as a whole. A file is the response's before it."""
    if not any(isinstance(part, str) and "<tool_response>" in part for part in parts):
        if role == "user":
            raise Refused(Reason.PROTOCOL, "a user turn stands where a tool response is due")
        return [_texts(parts)]
    found: list[list[Part]] = []
    inside = False
    for part in parts:
        for piece in _RESPONSE.split(part) if isinstance(part, str) else [part]:
            if piece == "<tool_response>":
                found.append([])
            if isinstance(piece, str) and _RESPONSE.fullmatch(piece):
                inside = piece == "<tool_response>"
            elif isinstance(piece, tuple) and found or inside:
                found[-1].append(piece)
            elif isinstance(piece, tuple) or piece.strip():
                raise Refused(Reason.PROTOCOL, "a tool's turn holds more than its responses")
    return [_texts(response) for response in found]


def _question(parts: Sequence[Part]) -> list[Part]:
    """A user's turn; a single text follows the files that it is about, as in the protocol."""
    shown = _texts([_MARKS.sub("", part) if isinstance(part, str) else part for part in parts])
    if not any(isinstance(part, str) for part in shown):
        raise Refused(Reason.BROKEN, "a user turn asks nothing")
    texts = sum(isinstance(part, str) for part in shown)
    return sorted(shown, key=lambda part: isinstance(part, str)) if texts == 1 else shown


def _texts(parts: Sequence[Part]) -> list[Part]:
    """The parts without the white space around texts, and without texts that are nothing else."""
    stripped = [part.strip() if isinstance(part, str) else part for part in parts]
    return [part for part in stripped if part]


def _without(text: str, paths: Sequence[str]) -> str:
    """The text with the name under which the model knows its video where a path stands as a whole."""
    for path in sorted({path.removeprefix("file://") for path in paths}, key=len, reverse=True):
        text = re.sub(rf"(?:file://|(?<![\w/.-])){re.escape(path)}(?![\w/-])", VIDEO_NAME, text)
    return text


def _sound(text: str) -> str:
    """The text, if it is one: JSON can hold halves of characters, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Refused(Reason.BROKEN, f"a text is no Unicode ({error.reason})") from error
    return text


def _list(value: Any, field: str) -> list[Any]:
    if not isinstance(value, list | tuple) or not value:
        raise Refused(
            Reason.BROKEN,
            f"{field} is {type(value).__name__ if not isinstance(value, list | tuple) else 'an empty list'}",
        )
    return list(value)


def _field(value: Any, field: str) -> Any:
    if not isinstance(value, Mapping) or field not in value:
        raise Refused(Reason.BROKEN, f"{field} is missing")
    return value[field]


def _json(text: str, field: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refused(Reason.BROKEN, f"{field} is no JSON ({str(error)[:80]})") from error


def ends_with_answer(conversation: Conversation) -> bool:
    """Whether the last response holds an answer between the protocol's tags."""
    return extract_answer(str(conversation.turns[-1].content[0])) is not None
