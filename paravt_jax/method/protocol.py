"""The protocol writes everything an agent reads: prompts, timestamps, placeholders and turns.

Demonstrations, rollouts and evaluation all render through `Protocol`, so they agree token by token.
Marks and the form of a call are those of the model's family (`Dialect`). Here, START and END are
the marks of a turn, and FRAME stands for the marks and placeholders of a frame. An episode of two
turns looks like this:

    START system
    You answer a question about a video. ...          system_text: task, tool schemas
    END START user
    <0.0 seconds> FRAME <2.0 seconds> FRAME ...
    Which comes first?                                question_text
    A. a dog
    B. a cat END
    START assistant
    <think>                                           pinned
    The frames are far apart ...</think>              the model, up to its END
    <tool_call>
    crop_video from 12 to 28
    </tool_call> END
    START user                                        tool_results
    <tool_response>
    A dog at 13 seconds.
    </tool_response> END
    START assistant
    <think>                                           pinned again, then the model answers

and the sub-agent that wrote the report saw this (`Protocol.window`):

    START user
    <12.0 seconds> FRAME <13.0 seconds> FRAME ...
    Say in one short sentence what these frames show, with times in seconds. END
    START assistant

Each piece is encoded once, on its own, and appended; text is never encoded again. Text from outside
(questions, reports) cannot forge a special token, because `Protocol.plain` breaks it up.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import re
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Int32

from paravt_jax.checks import require_at_least, require_choices
from paravt_jax.method import wording
from paravt_jax.method.parsing import JSON_CALLS
from paravt_jax.method.records import (
    Author,
    CropCall,
    Frame,
    Question,
    Segment,
)
from paravt_jax.method.tokenizer import Dialect, Vocabulary
from paravt_jax.method.tools.crop_video import CropVideo
from paravt_jax.method.tools.tool import Tool
from paravt_jax.method.wording import Prompt, fill

# Tools of this project that are off by default, and so only imported if `tools` names them.
_FURTHER_TOOLS = {"search_subtitles": "paravt_jax.method.tools.search_subtitles:SearchSubtitles"}

PINNED = "<think>\n"
VIDEO_NAME = "video.mp4"  # the model never sees a path; in its calls this is only text

# `<answer>` is ordinary text everywhere.
_TAGS = tuple(
    f"<{slash}{name}>" for name in ("think", "tool_call", "tool_response") for slash in ("", "/")
)


@dataclasses.dataclass(frozen=True)
class ProtocolSettings:
    """Prompts, tools and limits of an episode (`docs/reference.md`). Lengths are in tokens."""

    max_tool_turns: int = 3
    """Turns in which the main agent may call tools."""
    max_calls: int = 5
    """Calls per turn that are executed; further ones get an error response."""
    turn_tokens: int = 2048
    """Length limit of one turn of the main agent."""
    summary_tokens: int = 512
    """Length limit of a sub-agent's report and of every tool response."""
    trajectory_tokens: int = 8192
    """Length limit of everything after the main agent's prompt: responses and tool results."""
    text_tokens: int = 1216
    """Length limit of system turn and question together. Longer questions are left out."""
    # The cold start teaches `<think>` in both cases.
    pin_think: bool = True
    """Begin every response of the main agent with `<think>` (paper, constrained generation)."""
    crop_frames: int = 16
    """Upper bound on a sub-agent's frames."""
    tools: tuple[str, ...] = ("crop_video",)
    """Tools of the main agent: crop_video, search_subtitles, or MODULE:CLASS (docs/tools.md)."""
    # Demonstrations use `agentic`. `agentic-minimal` has little more than the tools' schemas.
    prompt: Prompt = "agentic"
    """The system turn. `reasoning` and `direct` offer no tools, and `direct` does not think."""

    def __post_init__(self):
        require_choices("protocol", self)
        if self.prompt == "direct" and self.pin_think:
            raise ValueError(
                "protocol.pin_think: True with protocol.prompt 'direct', which does not think; "
                "set it to False"
            )
        require_at_least("protocol", self, 0, "max_tool_turns")
        tokens = ("turn_tokens", "summary_tokens", "trajectory_tokens")
        require_at_least("protocol", self, 1, "max_calls", "crop_frames", "text_tokens", *tokens)
        self.make_tools()  # unknown names fail here

    def make_tools(self) -> tuple[Tool, ...]:
        """Make the tools that `tools` names.

        Raises:
            ValueError: A name is unknown or given twice, or there is none.
        """
        if not self.tools:
            raise ValueError(
                "protocol.tools: empty; name at least one (dispatch 'none' offers no tool)"
            )
        crop = CropVideo()
        tools = tuple(
            crop if name == crop.name else _load_tool(_FURTHER_TOOLS.get(name, name))
            for name in self.tools
        )
        names = [tool.name for tool in tools]
        if len(set(names)) < len(names):
            raise ValueError(f"protocol.tools: {', '.join(names)}; give each tool once")
        return tools


@dataclasses.dataclass(frozen=True)
class Lengths:
    """The longest sequences of a run, in tokens. Derived from settings, never set by hand."""

    prompt: int
    """A main agent's prompt: system turn, labelled frames, question."""
    visual: int
    """Visual tokens in that prompt."""
    response: int
    """Everything after the prompt: responses and tool results."""
    crop_prompt: int
    """A sub-agent's prompt."""
    report: int
    """A sub-agent's report, and the last token of its prompt, which is decoded with it."""
    frames: int = 0
    """Frames in a main agent's prompt."""


def _load_tool(name: str) -> Tool:
    """Import and make the tool "MODULE:CLASS"."""
    module, _, class_name = name.partition(":")
    try:
        tool = getattr(importlib.import_module(module), class_name)
    except (ImportError, AttributeError, SyntaxError, TypeError, ValueError) as error:
        raise ValueError(
            f"protocol.tools: {name!r} cannot be imported ({error}); "
            "give crop_video, search_subtitles, or MODULE:CLASS of your own"
        ) from error
    if not (isinstance(tool, type) and issubclass(tool, Tool)):
        raise ValueError(
            f"protocol.tools: {name!r} is not a tool; "
            f"give a class derived from {Tool.__module__}.Tool"
        )
    try:
        return tool()
    except TypeError as error:  # abstract methods are missing, or the constructor has arguments
        raise ValueError(
            f"protocol.tools: {name!r} cannot be made ({error}); "
            "define parse and run, and a constructor without arguments"
        ) from error


def render_call(call: CropCall, video: str = VIDEO_NAME) -> str:
    """Write a `crop_video` call as it is stored in demonstrations."""
    arguments = {
        "video_path": video,
        "start_time": _number(call.start),
        "end_time": _number(call.end),
    }
    return f"<tool_call>\n{JSON_CALLS.write(call.tool, arguments)}\n</tool_call>"


def system_text(
    dialect: Dialect,
    tools: Sequence[Tool],
    prompt: Prompt = "agentic",
    video: bool = True,
) -> str:
    """Return the system turn.

    Args:
        dialect: The marks of a turn, and the form of a call.
        tools: Tools whose schemas are shown; empty offers none.
        prompt: Which opening to use.
        video: False for conversations about pictures or text alone. The turn then states only the
            answer format and does not mention a video.

    Raises:
        ValueError: `prompt` has no place for tools.
    """
    if not video:
        text = wording.SYSTEM_PICTURES
    elif not tools:
        text = wording.SYSTEM_ALONE[prompt]
    elif prompt not in wording.SYSTEM:
        raise ValueError(
            f"protocol.prompt: {prompt!r} offers no tools; use it with dispatch 'none'"
        )
    else:
        text = fill(
            wording.SYSTEM[prompt],
            hints="".join(f"{tool.hint}\n" for tool in tools),
            tools="\n".join(json.dumps(tool.schema) for tool in tools),
            request=dialect.calls.request,
        )
    return f"{dialect.open('system')}{text}{dialect.end}\n"


def question_text(question: Question, filled: Callable[..., str] = fill) -> str:
    """Return the text of a question in its prompt. Options of multiple choice are lines "A. ...".

    `filled` fills in the template, as `fill` or `Protocol.filled` do.
    """
    return filled(
        wording.QUESTION[question.kind],
        question=question.text,
        options="".join(
            fill(wording.OPTION, letter=chr(ord("A") + number), option=option.strip())
            for number, option in enumerate(question.options)
        ),
    )


class Protocol:
    """Renders prompts and tool results as segments of token ids.

    Several methods take `image_tokens`, the visual tokens per frame after the vision tower's merge:
    one number for all frames, or one per frame.

    Args:
        vocabulary: Encodes texts.
        settings: Prompts, tools and limits.
    """

    def __init__(self, vocabulary: Vocabulary, settings: ProtocolSettings):
        self.vocabulary = vocabulary
        self.dialect = vocabulary.dialect
        self.settings = settings
        self.tools = {tool.name: tool for tool in settings.make_tools()}
        # Tags are special in all tokenizers, also where they take several tokens. Longest first: a
        # regular expression takes the first alternative that matches.
        special_texts = sorted({*vocabulary.special_texts, *_TAGS}, key=len, reverse=True)
        self._special = re.compile("|".join(re.escape(text) for text in special_texts))

    def prompt(
        self,
        question: Question,
        frames: Sequence[Frame],
        image_tokens: int | Sequence[int],
        tools: bool = True,
    ) -> tuple[Segment, Segment]:
        """Return the main agent's prompt in two parts, which are encoded apart: `overview`,
        `question`."""
        return self.overview(frames, image_tokens, tools), self.question(question)

    def system(self, tools: bool = True) -> str:
        """Return the system turn of this protocol's prompt; see `system_text`."""
        offered = [*self.tools.values()] if tools else ()
        return system_text(self.dialect, offered, self.settings.prompt)

    def overview(
        self, frames: Sequence[Frame], image_tokens: int | Sequence[int], tools: bool = True
    ) -> Segment:
        """Return the first part of the main agent's prompt: system turn and overview frames.

        All questions about a video share this segment, and so its KV cache.
        """
        opening = self.system(tools) + self.dialect.open("user")
        ids = self._labelled_frames(opening, frames, image_tokens)
        return Segment(ids, Author.PROMPT, frames=tuple(frames))

    def question(self, question: Question) -> Segment:
        """Return the rest of the main agent's prompt: the question and the opening of the
        response."""
        text = question_text(question, self.filled)
        ids = [self.encode(text), self.encode(self.dialect.to_assistant)]
        return Segment(np.concatenate(ids), Author.PROMPT)

    def window(self, frames: Sequence[Frame], image_tokens: int | Sequence[int]) -> Segment:
        """Return a sub-agent's whole prompt: the frames of its window and its task.

        Args:
            frames: The frames.
            image_tokens: Visual tokens per frame.
        """
        shown = self._labelled_frames(self.dialect.open("user"), frames, image_tokens)
        ids = np.concatenate([shown, self.encode(wording.SUBAGENT + self.dialect.to_assistant)])
        return Segment(ids, Author.PROMPT, frames=tuple(frames))

    @functools.cached_property
    def pinned(self) -> Segment:
        """`<think>`, which opens every response of the main agent; empty without pin_think."""
        return Segment(self.encode(PINNED if self.settings.pin_think else ""), Author.PINNED)

    def tool_results(self, responses: Sequence[str], ended: bool, last: bool) -> Segment:
        """Return the user turn with the responses to the calls of one turn.

        Args:
            responses: One text per call.
            ended: Whether the model closed its turn itself.
            last: Whether this was the last turn with calls. If so, the segment asks for the answer.
        """
        close = "" if ended else self.dialect.end
        bodies = "\n".join(
            f"<tool_response>\n{self.cut(response)}\n</tool_response>" for response in responses
        )
        request = wording.ANSWER_NOW if last else ""
        turn = f"{close}\n{self.dialect.open('user')}{bodies}{request}{self.dialect.to_assistant}"
        return Segment(self.encode(turn), Author.TOOL)

    def cut(self, text: str) -> str:
        """Return a tool response as the model reads it: plain, and at most `summary_tokens`
        long."""
        limit = self.settings.summary_tokens
        text = self.plain(text)
        ids = self.vocabulary.encode(text)
        if len(ids) <= limit:
            return text
        text = self.vocabulary.decode(ids[:limit])
        # A character that was cut decodes to U+FFFD, which may encode to more tokens than it had.
        while len(self.vocabulary.encode(text)) > limit:
            text = text[:-1]
        return text

    def plain(self, text: str) -> str:
        """Make text from outside the protocol safe: a space breaks special tokens and tags."""
        return self._special.sub(lambda match: match[0][0] + " " + match[0][1:], text)

    def filled(self, template: str, **values: str) -> str:
        """Fill in a template. Its own special tokens stay, those of the values are broken."""
        text = fill(template, **{name: self.plain(value) for name, value in values.items()})
        # Values that have no special token may form one with their neighbours.
        forged = len(self._special.findall(text)) > len(self._special.findall(template))
        return self.plain(text) if forged else text

    def images(
        self, frames: Sequence[Frame], image_tokens: int | Sequence[int], timed: bool = True
    ) -> list[Int32[np.ndarray, " n"]]:
        """Return the ids of frames in pieces: timestamps, if `timed`, and placeholders."""
        if isinstance(image_tokens, int):
            counts = [image_tokens] * len(frames)
        else:
            counts = list(image_tokens)
        if len(counts) != len(frames):
            raise ValueError(
                f"image_tokens: {len(counts)} counts for {len(frames)} frames; give one per frame"
            )
        marks = (self.dialect.vision_start, self.dialect.image, self.dialect.vision_end)
        start, pad, end = (self.vocabulary[mark] for mark in marks)
        tokens: list[np.ndarray] = []
        for frame, count in zip(frames, counts, strict=True):
            if timed:
                tokens.append(self._timestamp(frame.time))
            tokens.append(np.array([start, *[pad] * count, end], np.int32))
        return tokens

    def encode(self, text: str) -> Int32[np.ndarray, " n"]:
        """Return the token ids of a text of the protocol; special tokens in it become their ids."""
        return self.vocabulary.encode(text)

    def _labelled_frames(
        self, opening: str, frames: Sequence[Frame], image_tokens: int | Sequence[int]
    ) -> Int32[np.ndarray, " n"]:
        return np.concatenate([self.encode(opening), *self.images(frames, image_tokens)])

    # Cached, because every frame of every prompt needs a timestamp, and times recur.
    @functools.lru_cache(maxsize=65_536)  # noqa: B019  a protocol lives as long as its run
    def _timestamp(self, time: float) -> Int32[np.ndarray, " n"]:
        return self.encode(f"<{time:.1f} seconds>")


def _number(value: float) -> float | int:
    """Return whole seconds without a decimal point."""
    return int(value) if float(value).is_integer() else value
