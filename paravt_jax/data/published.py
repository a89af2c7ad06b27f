"""Reads examples of the published training data (docs/reference.md, 5).

Those of `rl` files become questions, and those of `sft` files become conversations. An example that
the protocol cannot express is refused with a reason. None is repaired by guessing.

Calls are rewritten in the protocol's own form, and only the assistant's words are trained on. Tool
responses are a tool's turn, or blocks of <tool_response> in a message of the tool, the user or the
assistant, with their files inside. Relative paths refer to the user's root, and `file://` paths are
absolute; `frames.join` refuses those that leave the root when a file is opened.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import pyarrow
import pyarrow.parquet
import pydantic
import pydantic_core

from paravt_jax.data import foreign
from paravt_jax.data.question_files import Span
from paravt_jax.method.accuracy import accuracy, read_range
from paravt_jax.method.conversations import ChatTurn, Clip, Conversation
from paravt_jax.method.parsing import block_spans, extract_answer, find_tags, parse_calls
from paravt_jax.method.protocol import PINNED, VIDEO_NAME, ProtocolSettings, render_call
from paravt_jax.method.records import CropCall, FailedCall, Question, QuestionKind
from paravt_jax.method.tools.crop_video import CropVideo

# The name under which texts mention a picture. The first video is `VIDEO_NAME`.
_PICTURE_NAME = "image.jpg"
# A call's argument that names a picture, or another video than the first.
_OTHER_FILE = re.compile(r'"(?:image(?:_\d+)?\.jpg|video_\d+\.mp4)"')
# Marks the place of a file in the published texts. The protocol places files itself.
_PLACEHOLDER = re.compile(r"<(?:video|image)>\n?")
# Forbidden in a response. Special tokens would end its turn when it is rendered, and an agent
# of this protocol writes neither tool responses nor <tool_code>.
_FOREIGN = re.compile(r"<\|\w+\|>|</?tool_response>|<tool_code>")
_END_MARK = re.compile(r"\s*<\|\w+\|>$")
_RESPONSE_TAGS = ("<tool_response>", "</tool_response>")
_RESPONSE_TAG = re.compile(f"({'|'.join(_RESPONSE_TAGS)})")


@dataclasses.dataclass(frozen=True)
class _File:
    """A file that a message shows."""

    path: str
    picture: bool


_Item = str | _File
_Columns = TypeVar("_Columns", bound=pydantic.BaseModel)


class _Url(pydantic.BaseModel):
    url: str


class _Entry(pydantic.BaseModel):
    """A text or a file of a message."""

    type: Literal["text", "video_url", "image_url"]
    text: str | None = None
    video_url: _Url | None = None
    image_url: _Url | None = None

    @property
    def item(self) -> _Item:
        if self.type == "text" and self.text is not None:
            return self.text
        file = self.video_url if self.type == "video_url" else self.image_url
        if self.type == "text" or file is None:
            raise Refused(Reason.BROKEN, f"an entry of type {self.type} holds none")
        return _File(file.url.removeprefix("file://"), self.type == "image_url")


def _as_entries(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class _Message(pydantic.BaseModel):
    role: Literal["system", "user", "assistant", "tool"]
    content: Annotated[
        list[_Entry], pydantic.Field(min_length=1), pydantic.BeforeValidator(_as_entries)
    ]


class _Video(pydantic.BaseModel):
    video: str


class _About(pydantic.BaseModel):
    """What `extra_info` tells of a question."""

    question_type: QuestionKind = QuestionKind.OPEN_ENDED
    answer: pydantic.JsonValue = None
    evidence: Span | None = None
    """When the video shows the answer, in seconds. Only drawn scenes say it."""


def _from_json(value: Any) -> Any:
    """Parse a text of JSON. Columns hold either it or its content."""
    # A lone surrogate fails in `encode`, with a ValueError.
    return pydantic_core.from_json(value.encode()) if isinstance(value, str) else value


_Messages = Annotated[list[_Message], pydantic.Field(min_length=1)]


class _QuestionColumns(pydantic.BaseModel):
    """The columns of an rl file."""

    prompt: _Messages
    videos: tuple[_Video]
    extra_info: Annotated[_About, pydantic.BeforeValidator(_from_json)]


class _ConversationColumns(pydantic.BaseModel):
    """The columns of an sft file."""

    messages: Annotated[_Messages, pydantic.BeforeValidator(_from_json)]


Look = Callable[[str, bool, CropCall | None], Clip]
"""A function that chooses the frames of a file for a conversation.

Its arguments are the path, whether the file is a picture, and the call whose window is shown (None
for an overview). It raises Refused and VideoError.
"""


class Reason(enum.StrEnum):
    """Why an example is left out."""

    BROKEN = "broken row"
    NO_ANSWER = "no answer"
    IMPOSSIBLE = "impossible answer"
    PROTOCOL = "not in the protocol"
    MISSING = "missing video"
    UNREADABLE = "unreadable video"
    SLOW = "too slow"


class Refused(Exception):
    """An example cannot be used. Carries the reason and the details."""

    def __init__(self, reason: Reason, detail: str):
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclasses.dataclass(frozen=True)
class Table:
    """One parquet file.

    Attributes:
        path: The file.
        columns: The published columns: those of an rl or of an sft file.
        count: Number of examples.
    """

    path: pathlib.Path
    columns: tuple[str, ...]
    count: int


def open_table(path: pathlib.Path) -> Table:
    """Read a parquet file's kind and number of examples.

    Raises:
        ValueError: It is not a parquet file, or has neither the columns of rl nor of sft files.
    """
    with _open_parquet(path) as file:
        names, count = file.schema_arrow.names, file.metadata.num_rows
    kinds = [tuple(kind.model_fields) for kind in (_QuestionColumns, _ConversationColumns)]
    for columns in kinds:
        if set(columns) <= set(names):
            return Table(path, columns, count)
    rl, sft = map(", ".join, kinds)
    raise ValueError(
        f"{path}: its columns are {', '.join(sorted(names))}; rl files have {rl}, sft files {sft}: "
        "give the files of ParaVT/ParaVT-Parquet"
    )


def read_table(table: Table, batch: int = 256) -> Iterator[dict[str, Any]]:
    """Yield the examples of a file in order, with the published columns only.

    Args:
        table: The file.
        batch: Examples to read at a time.

    Raises:
        ValueError: The file is damaged, or holds a value that Python cannot, such as a text that is
            not UTF-8.
    """
    with _open_parquet(table.path) as file:
        for record_batch in file.iter_batches(batch, columns=list(table.columns)):
            yield from record_batch.to_pylist()


@contextlib.contextmanager
def _open_parquet(path: pathlib.Path) -> Iterator[pyarrow.parquet.ParquetFile]:
    """Open a file. What pyarrow raises until it is closed becomes an error that names it."""
    foreign.open_regular(path).close()  # refuses a pointer of git-lfs
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield file
    # ValueError: a text that is not UTF-8. OverflowError: a time that Python cannot hold.
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        reason = foreign.shortened(error)
        raise ValueError(
            f"{path}: not a readable parquet file ({reason}); download it again"
        ) from error


def read_question(columns: Mapping[str, Any], id: str) -> Question:
    """Read the question of an rl file.

    Raises:
        Refused: The example is broken, has no answer, or is not about one video.
    """
    read = _checked(_QuestionColumns, columns)
    turns = [turn for turn in read.prompt if turn.role != "system"]
    asked = [entry.item for turn in turns if turn.role == "user" for entry in turn.content]
    if len(turns) != 1 or len(asked) != 1 or not isinstance(asked[0], str):
        raise Refused(Reason.BROKEN, "prompt is not one user turn of text")
    path = read.videos[0].video.removeprefix("file://")
    text = _PLACEHOLDER.sub("", asked[0])
    text = _hide_paths(text, {path: VIDEO_NAME}).strip()
    if not text:
        raise Refused(Reason.BROKEN, "the question is empty")
    about = read.extra_info
    answer = _answer(about.answer)
    return Question(id, path, text, about.question_type, answer, evidence=about.evidence)


def _answer(answer: pydantic.JsonValue) -> str:
    """Return the answer as text. Numbers and lists, such as the span of a grounding question, as
    JSON."""
    text = (answer if isinstance(answer, str) else json.dumps(answer)).strip()
    if text in ("", "[]", "null"):
        raise Refused(Reason.NO_ANSWER, "the answer is empty")
    return text


def require_earnable(question: Question) -> None:
    """Raise Refused if no answer could earn the reward."""
    span = read_range(question.answer)
    grounding = question.kind is QuestionKind.TEMPORAL_GROUNDING
    if grounding and (span is None or span[0] >= span[1]):
        raise Refused(Reason.IMPOSSIBLE, f"{question.answer[:80]!r} is no span of time")
    if accuracy(question, question.answer) == 0:
        raise Refused(Reason.IMPOSSIBLE, f"{question.answer[:80]!r} earns no reward itself")


@dataclasses.dataclass(frozen=True)
class _Turn:
    """A message of the file, or a turn of an episode."""

    role: str
    items: list[_Item]
    call: CropCall | None = None
    """The call that a tool turn of an episode responds to."""


def read_conversation(
    columns: Mapping[str, Any], id: str, limits: ProtocolSettings, look: Look
) -> Conversation:
    """Read the conversation of an sft file.

    Args:
        columns: The columns of an sft table.
        id: Id of the conversation.
        limits: Limits of the protocol, which the conversation must keep.
        look: Chooses the frames of a file. It opens the file, so it is called only after all other
            checks.

    Raises:
        Refused: The example is broken, or the protocol cannot express it.
        VideoError: From `look`.
    """
    messages = _read_messages(_checked(_ConversationColumns, columns).messages)
    split = [turn for message in messages if message.role != "system" for turn in _split(message)]
    turns = _arrange(split, limits)
    shown_files = [item for turn in turns for item in turn.items if isinstance(item, _File)]
    main_video = next((file.path for file in shown_files if not file.picture), None)

    def shown(item: _Item, call: CropCall | None) -> str | Clip:
        if isinstance(item, str):
            return item
        # If a tool returns the main video, show the window of its call. Any other file, such as a
        # crop that was cut out beforehand, is shown whole.
        window = call if item.path == main_video else None
        return look(item.path, item.picture, window)

    return Conversation(
        id,
        _offers_tools(messages, turns),
        tuple(
            ChatTurn(turn.role, tuple(shown(item, turn.call) for item in turn.items))
            for turn in turns
        ),
    )


def _offers_tools(messages: Sequence[_Turn], turns: Sequence[_Turn]) -> bool:
    """Return whether the prompt names the tool, or a tool is used."""
    prompts = [message for message in messages if message.role in ("system", "user")]
    texts = [item for message in prompts for item in message.items if isinstance(item, str)]
    return "crop_video" in " ".join(texts) or any(turn.role == "tool" for turn in turns)


def _read_messages(messages: Sequence[_Message]) -> list[_Turn]:
    """Read roles, texts and files. File paths in texts become the names that the model uses."""
    contents = [[entry.item for entry in message.content] for message in messages]
    files = [item for items in contents for item in items if isinstance(item, _File)]
    pictures = _numbered(_PICTURE_NAME, [file.path for file in files if file.picture])
    videos = _numbered(VIDEO_NAME, [file.path for file in files if not file.picture])
    names = pictures | videos
    read = []
    for message, items in zip(messages, contents, strict=True):
        shown = [
            _hide_paths(_PLACEHOLDER.sub("", item), names) if isinstance(item, str) else item
            for item in items
        ]
        read.append(_Turn(message.role, shown))
    return read


def _numbered(name: str, paths: Sequence[str]) -> dict[str, str]:
    """Return a name for each path: video.mp4, video_2.mp4, video_3.mp4, ..."""
    stem, _, suffix = name.partition(".")
    names = [name, *(f"{stem}_{n}.{suffix}" for n in range(2, len(paths) + 1))]
    return dict(zip(dict.fromkeys(paths), names, strict=False))


def _split(message: _Turn) -> list[_Turn]:
    """Split a message into turns, with a tool's turn for each block of <tool_response> in it.

    Such blocks stand in a tool's turn, in a user's or in the assistant's own message. A tool's turn
    without them is one response. What stands beside a block keeps the role of the message.
    """
    pieces: list[_Item] = []
    for item in message.items:
        pieces += _RESPONSE_TAG.split(item) if isinstance(item, str) else [item]
    tags = [piece for piece in pieces if piece in _RESPONSE_TAGS]
    if tags != [*_RESPONSE_TAGS] * (len(tags) // 2):
        raise Refused(Reason.PROTOCOL, "a <tool_response> does not end, or does not begin")
    if not tags:
        return [message]
    turns = [_Turn(message.role, [])]
    for piece in pieces:
        if piece in _RESPONSE_TAGS:
            turns.append(_Turn("tool" if piece == _RESPONSE_TAGS[0] else message.role, []))
        elif isinstance(piece, _File) or piece.strip():
            turns[-1].items.append(piece)
    beside = turns[::2]
    # It would count as one more response.
    if message.role == "tool" and any(turn.items for turn in beside):
        raise Refused(Reason.PROTOCOL, "a text or file stands beside a <tool_response>")
    # A response may be empty.
    return [turn for number, turn in enumerate(turns) if turn.items or number % 2]


def _arrange(turns: Sequence[_Turn], limits: ProtocolSettings) -> list[_Turn]:
    """Check turns, without a system turn, as those of an episode, and pair calls and responses.

    user -> assistant with calls -> one tool turn per call -> ... -> assistant without calls
    """
    arranged: list[_Turn] = []
    # Calls that still need a response.
    open_calls: list[CropCall] = []
    tool_turns = 0
    before = "no"
    for turn in turns:
        if turn.role == "tool":
            if not open_calls:
                raise Refused(Reason.PROTOCOL, "more tool responses than calls")
            arranged.append(_Turn("tool", _strip_texts(turn.items), open_calls.pop(0)))
        elif open_calls:
            raise Refused(Reason.PROTOCOL, f"{len(open_calls)} calls have no tool response")
        elif (turn.role == "assistant") != (before in ("user", "tool")):
            raise Refused(Reason.PROTOCOL, f"after {before} turn comes one of the {turn.role}")
        elif turn.role == "user":
            arranged.append(_Turn("user", _user_turn(turn.items)))
        else:
            text, open_calls = _response(turn.items, limits)
            tool_turns += bool(open_calls)
            arranged.append(_Turn("assistant", [text]))
        before = turn.role
    if tool_turns > limits.max_tool_turns:
        raise Refused(Reason.PROTOCOL, "more turns with calls than protocol.max_tool_turns")
    if open_calls:
        raise Refused(Reason.PROTOCOL, f"{len(open_calls)} calls have no tool response")
    if before != "assistant":
        raise Refused(Reason.NO_ANSWER, "the conversation does not end with a response")
    return arranged


def _response(items: Sequence[_Item], limits: ProtocolSettings) -> tuple[str, list[CropCall]]:
    """Return a response's text, with its calls in the protocol's form, and the calls."""
    texts = [item for item in items if isinstance(item, str)]
    if len(texts) < len(items):
        raise Refused(Reason.PROTOCOL, "a response shows a file")
    # Some published responses have the mark of their turn's end.
    text = _END_MARK.sub("", "".join(texts).strip())
    if not text:
        raise Refused(Reason.NO_ANSWER, "a response is empty")
    foreign = _FOREIGN.search(text)
    if foreign:
        raise Refused(Reason.PROTOCOL, f"a response contains {foreign[0]}")
    calls: list[CropCall] = []
    for call in parse_calls(text, (CropVideo(),)):
        if isinstance(call, FailedCall):
            raise Refused(Reason.PROTOCOL, f"a call cannot be read: {call.reason}")
        if isinstance(call, CropCall):
            calls.append(call)
    if len(calls) > limits.max_calls:
        raise Refused(Reason.PROTOCOL, "more calls in a turn than protocol.max_calls")
    if calls and extract_answer(text) is not None:
        raise Refused(Reason.PROTOCOL, "a response both calls and answers")
    if text.find("<think>") > 0:
        raise Refused(Reason.PROTOCOL, "a response has text before its <think>")
    # Replace from last to first, so that the spans of earlier calls stay valid.
    spans = block_spans(find_tags(text), "tool_call")
    for (opening, closing), call in reversed(list(zip(spans, calls, strict=True))):
        if _OTHER_FILE.search(text, opening.end, closing.start):
            raise Refused(Reason.PROTOCOL, "a call is not about the first video")
        text = text[: opening.start] + render_call(call) + text[closing.end :]
    # The published responses differ in the white space after <think>. An episode pins one form.
    tag = PINNED.strip()
    if text.startswith(tag):
        text = PINNED + text.removeprefix(tag).lstrip()
    return text, calls


def _user_turn(items: Sequence[_Item]) -> list[_Item]:
    shown = _strip_texts(items)
    texts = [item for item in shown if isinstance(item, str)]
    if not texts:
        raise Refused(Reason.BROKEN, "a user turn asks nothing")
    if len(texts) > 1:
        return shown
    # The protocol puts a question after the files that it is about.
    return [item for item in shown if isinstance(item, _File)] + texts


def _strip_texts(items: Sequence[_Item]) -> list[_Item]:
    """Strip white space around texts, and drop empty texts."""
    stripped = [item.strip() if isinstance(item, str) else item for item in items]
    return [item for item in stripped if item]


def _hide_paths(text: str, names: Mapping[str, str]) -> str:
    """Replace the paths in a text with the names that the model uses for these files."""
    if not names:
        return text
    # Longest first: a path may be a prefix of another one.
    paths = "|".join(re.escape(path) for path in sorted(names, key=len, reverse=True))
    # Whole paths only: with the video "a", the text "what a/b" stays as it is.
    pattern = rf"(?:file://|(?<![\w/.-]))({paths})(?![\w/-])"
    return re.sub(pattern, lambda match: names[match[1]], text)


def _checked(kind: type[_Columns], columns: Mapping[str, Any]) -> _Columns:
    """Validate the columns of an example.

    Raises:
        Refused: It is not of the published schema.
    """
    try:
        return kind.model_validate(dict(columns))
    except pydantic.ValidationError as error:
        first = error.errors(include_input=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise Refused(Reason.BROKEN, f"{field}: {first['msg']}") from error
