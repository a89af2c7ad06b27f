"""The one protocol: every prompt, tool schema, time, placeholder and turn of every agent is written here and nowhere else.

Conversations to learn from, rollouts and evaluation all render through `Protocol`. Chat markup is Qwen3-VL's (a test holds it
against the published template). Pieces are encoded one by one and appended: nothing that was encoded is encoded again.
Invariant: text that is not the protocol's own (questions, summaries) cannot forge a special token.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import math
import re
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from jaxtyping import Int32

from paravt_jax.method.parsing import call_text, parse_calls
from paravt_jax.method.records import (
    Author,
    CropCall,
    FailedCall,
    Frame,
    Question,
    QuestionKind,
    Segment,
)
from paravt_jax.method.subtitles import Subtitle, subtitle_line
from paravt_jax.method.tokenizer import Vocabulary
from paravt_jax.method.tools.crop_video import CropVideo
from paravt_jax.method.tools.search_subtitles import SearchSubtitles
from paravt_jax.method.tools.tool import Tool

Prompt = Literal["direct", "reasoning", "agentic", "agentic-minimal"]

PINNED = "<think>\n"
VIDEO_NAME = "video.mp4"  # the model never sees a path; what it writes here is text

_TASK = "You answer a question about a video. You see a few frames of it, each after its time.\n"
_FORM = "Think first, then call the tool or give the final answer as <answer>answer</answer>; a span of time is [start, end] in seconds."
_ANSWER = (
    "give the final answer as <answer>answer</answer>; a span of time is [start, end] in seconds."
)
_ALONE: dict[str, str] = {  # prompts that know no tool
    "direct": f"{_TASK}Do not think aloud: {_ANSWER}",
    "reasoning": f"{_TASK}Think first, between <think> and </think>, then {_ANSWER}",
    "agentic": f"{_TASK}{_FORM}",
    "agentic-minimal": _ANSWER.capitalize(),
}
_TOOLS_HEAD = (
    "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_TOOLS_TAIL = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
_BAD_CALLS = (
    "<tool_code></tool_code>",
    "<tool_call>",
    "<tool_call></tool_call>",
    "<tool_call>{}</tool_call>",
)  # what goes wrong most
_SUMMARY_REQUEST = "\nSay in one short sentence what these frames show, with times in seconds."
ANSWER_NOW = "\nNo more calls can be made. Give the final answer."
TO_ASSISTANT = "<|im_end|>\n<|im_start|>assistant\n"


@dataclasses.dataclass(frozen=True)
class ProtocolSettings:
    """Limits of an episode (REFERENCE 1, 3 and 5). Lengths are in tokens.

    Questions that do not fit into `text_tokens` are left out. The cold start teaches `<think>` whether
    it is pinned or not. The prompt `agentic-minimal` says little more than the tool's schema; with
    `direct` the model does not think, so that nothing is pinned.
    """

    max_tool_turns: int = 3
    """Turns of a main agent in which it may call tools."""
    max_calls: int = 5
    """Calls per turn that are carried out."""
    turn_tokens: int = 2048
    """Tokens of one turn of a main agent."""
    summary_tokens: int = 512
    """Tokens of a sub-agent's report, and of a tool response."""
    trajectory_tokens: int = 8192
    """Tokens of everything after the prompt: responses and tool results."""
    text_tokens: int = 1216
    """Tokens of a main agent's prompt beside its frames: system turn and question."""
    label_tokens: int = 12
    """Tokens of a frame's timestamp and vision marks; 12 hold 99,999.9 seconds in Qwen's tokenizer."""
    pin_think: bool = True
    """Start every response of a main agent with `<think>` (paper, constrained generation)."""
    crop_fps: float = 1.0
    """Frames per second that a sub-agent sees of its window."""
    crop_frames: int = 16
    """Frames that a sub-agent sees at most."""
    max_num_frames: int = 0
    """Most frames that a call of crop_video may ask for (num_frames); 0 offers no such argument."""
    tools: tuple[str, ...] = ("crop_video",)
    """Tools of a main agent: crop_video, search_subtitles, or MODULE:CLASS (docs/tools.md)."""
    prompt: Prompt = "agentic"
    """The system turn; demonstrations teach `agentic`, and `reasoning` and `direct` know no tool."""

    def __post_init__(self):
        if self.prompt not in get_args(Prompt):
            raise ValueError(
                f"protocol.prompt: {self.prompt!r}; choose one of {', '.join(get_args(Prompt))}"
            )
        if self.prompt == "direct" and self.pin_think:
            raise ValueError(
                "protocol.pin_think: True with protocol.prompt 'direct', which does not think; set it to False"
            )
        for name in ("max_tool_turns", "max_num_frames"):
            if getattr(self, name) < 0:
                raise ValueError(f"protocol.{name}: {getattr(self, name)}; give 0 or more")
        for name in (
            "max_calls",
            "turn_tokens",
            "summary_tokens",
            "trajectory_tokens",
            "text_tokens",
            "label_tokens",
            "crop_frames",
        ):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"protocol.{name}: {getattr(self, name)}; give a whole number of at least 1"
                )
        if not 0 < self.crop_fps < math.inf:
            raise ValueError(
                f"protocol.crop_fps: {self.crop_fps}; give frames a second, a finite number above 0"
            )
        self.make_tools()  # refuses names that are unknown

    def make_tools(self) -> tuple[Tool, ...]:
        """The tools that are named. ValueError for an unknown name, one given twice, or none."""
        if not self.tools:
            raise ValueError(
                "protocol.tools: empty; name at least one (dispatch 'none' offers no tool)"
            )
        own = {tool.name: tool for tool in (CropVideo(self.max_num_frames), SearchSubtitles())}
        tools = tuple(own[name] if name in own else _load_tool(name) for name in self.tools)
        names = [tool.name for tool in tools]
        if len(set(names)) < len(names):
            raise ValueError(f"protocol.tools: {', '.join(names)}; give each tool once")
        if self.max_num_frames and CropVideo.name not in names:
            raise ValueError(
                f"protocol.max_num_frames: {self.max_num_frames} without crop_video; "
                "add crop_video to protocol.tools, or give 0"
            )
        return tools

    @property
    def most_crop_frames(self) -> int:
        """Frames of the longest sub-agent's prompt."""
        return max(self.crop_frames, self.max_num_frames)

    def showing_frames(self, crop_tokens: int) -> ProtocolSettings:
        """The same limits where crops are shown in the trajectory itself (dispatch `frames`), which then
        has room for all of them. `crop_tokens`: tokens of one crop's frames."""
        shown = self.max_tool_turns * self.max_calls * crop_tokens
        return dataclasses.replace(self, trajectory_tokens=self.trajectory_tokens + shown)


def _load_tool(name: str) -> Tool:
    """The tool that "MODULE:CLASS" names."""
    module, _, kind = name.partition(":")
    try:
        tool = getattr(importlib.import_module(module), kind)
    except (ImportError, AttributeError, SyntaxError, TypeError, ValueError) as error:
        raise ValueError(
            f"protocol.tools: {name!r} is no tool ({error}); "
            "give crop_video, search_subtitles, or MODULE:CLASS of your own"
        ) from error
    if not (isinstance(tool, type) and issubclass(tool, Tool)):
        raise ValueError(
            f"protocol.tools: {name!r} is no tool; give a class derived from {Tool.__module__}.Tool"
        )
    try:
        return tool()
    except TypeError as error:  # abstract methods are missing, or it wants arguments
        raise ValueError(
            f"protocol.tools: {name!r} cannot be made ({error}); "
            "give it parse and run, and no arguments to be made with"
        ) from error


def render_call(call: CropCall) -> str:
    """A `crop_video` call as the model is taught to write it."""
    arguments = {
        "video_path": VIDEO_NAME,
        "start_time": _number(call.start),
        "end_time": _number(call.end),
    }
    return f"<tool_call>\n{call_text(call.tool, arguments)}\n</tool_call>"


def system_text(tools: Sequence[Tool], prompt: Prompt = "agentic", video: bool = True) -> str:
    """The system turn, with the schemas of the tools that are offered. Without `video` (pictures or
    text alone) it mentions no video. ValueError for tools with a prompt that knows none."""
    if not video:
        return f"<|im_start|>system\n{_FORM}<|im_end|>\n"
    if not tools:
        return f"<|im_start|>system\n{_ALONE[prompt]}<|im_end|>\n"
    if prompt in ("direct", "reasoning"):
        raise ValueError(f"protocol.prompt: {prompt!r} knows no tool; use it with dispatch 'none'")
    hints = "".join(f"{tool.hint}\n" for tool in tools)
    opening = f"{_TASK}{hints}{_FORM}" if prompt == "agentic" else _ALONE[prompt]
    schemas = "".join(f"\n{json.dumps(tool.schema)}" for tool in tools)
    return f"<|im_start|>system\n{opening}{_TOOLS_HEAD}{schemas}{_TOOLS_TAIL}<|im_end|>\n"


def question_text(question: Question) -> str:
    """The question as the user puts it: options as "A. ...", one a line."""
    options = "".join(
        f"\n{chr(ord('A') + i)}. {option.strip()}" for i, option in enumerate(question.options)
    )
    return "\n" + question.text + (options if question.kind is QuestionKind.MULTIPLE_CHOICE else "")


def subtitled_text(entries: Sequence[Subtitle], text: str) -> str:
    """A question's text with what is said in the video before it, each line after its time, as frames have theirs."""
    lines = "".join(f"{subtitle_line(entry)}\n" for entry in entries)
    return f"What is said in the video:\n{lines}\n{text}" if lines else text


def recurring_texts(tools: Sequence[Tool]) -> tuple[str, ...]:
    """The protocol's fixed lines, numbers of a call cut out, and the commonest errors: single pieces of a small vocabulary."""
    texts = [
        system_text(tools),
        system_text(()),
        _SUMMARY_REQUEST,
        ANSWER_NOW,
        TO_ASSISTANT,
        "<|im_start|>user\n",
        render_call(CropCall(0, 1)),
    ]
    texts += [
        f"error: {call.reason}"
        for text in _BAD_CALLS
        for call in parse_calls(text, tools)
        if isinstance(call, FailedCall)
    ]
    lines = [line for text in texts for line in re.findall(r"[^\n]*\n+|[^\n]+", text)]
    return tuple(
        dict.fromkeys(part for line in lines for part in re.split(r"(?<=_time\": )\d+", line))
    )


class Protocol:
    """Renders prompts and tool results into segments of token ids.

    Where frames are shown, `image_tokens` is the number of visual tokens of each after the vision
    tower's merge: one number for all, or one per frame.
    """

    def __init__(self, vocabulary: Vocabulary, settings: ProtocolSettings):
        self.vocabulary = vocabulary
        self.settings = settings
        self.tools = {tool.name: tool for tool in settings.make_tools()}
        self._special = re.compile(
            "|".join(re.escape(t) for t in sorted(vocabulary.special_texts, key=len, reverse=True))
        )

    def overview(
        self, frames: Sequence[Frame], image_tokens: int | Sequence[int], tools: bool = True
    ) -> Segment:
        """The opening of a main agent's prompt: system turn and timed overview frames. Shared by all questions on the video."""
        return Segment(
            self._timed_images(
                system_text([*self.tools.values()] if tools else (), self.settings.prompt)
                + "<|im_start|>user\n",
                frames,
                image_tokens,
            ),
            Author.PROMPT,
            frames=tuple(frames),
        )

    def question(self, question: Question) -> Segment:
        """The rest of a main agent's prompt."""
        return Segment(
            self._concat(self.plain(question_text(question)), TO_ASSISTANT), Author.PROMPT
        )

    def window(self, frames: Sequence[Frame], image_tokens: int | Sequence[int]) -> Segment:
        """A sub-agent's whole prompt: timed frames of one window and the request for a summary."""
        opening = self._timed_images("<|im_start|>user\n", frames, image_tokens)
        return Segment(
            np.concatenate([opening, self.encode(_SUMMARY_REQUEST + TO_ASSISTANT)]),
            Author.PROMPT,
            frames=tuple(frames),
        )

    @functools.cached_property
    def pinned(self) -> Segment:
        """The `<think>` every response of a main agent is started with; nothing where it is the model's to write."""
        return Segment(self.encode(PINNED if self.settings.pin_think else ""), Author.PINNED)

    def tool_results(
        self,
        responses: Sequence[str],
        ended: bool,
        last: bool,
        shown: Sequence[Sequence[Frame]] = (),
        image_tokens: int = 0,
    ) -> Segment:
        """The user turn that brings a turn's tool responses back.

        `ended`: whether the response before it closed its turn itself; `last`: whether no further calls will be accepted.
        `shown`: frames that stand before each response, of `image_tokens` each; none at all where sub-agents looked.
        """
        close = "" if ended else "<|im_end|>"
        if any(shown):
            parts = [self.encode(f"{close}\n<|im_start|>user")]
            for text, frames in zip(responses, shown, strict=True):
                images = self._timed_images("\n<tool_response>\n", frames, image_tokens)
                parts += [images, self.encode(f"{self.cut(text)}\n</tool_response>")]
            parts.append(self.encode(f"{ANSWER_NOW if last else ''}{TO_ASSISTANT}"))
            return Segment(
                np.concatenate(parts),
                Author.TOOL,
                frames=tuple(frame for frames in shown for frame in frames),
            )
        bodies = "\n".join(
            f"<tool_response>\n{self.cut(text)}\n</tool_response>" for text in responses
        )
        text = f"{close}\n<|im_start|>user\n{bodies}{ANSWER_NOW if last else ''}{TO_ASSISTANT}"
        return Segment(self.encode(text), Author.TOOL)

    def cut(self, text: str) -> str:
        """A tool response as the model reads it: plain, and within its limit of tokens."""
        text, limit = self.plain(text), self.settings.summary_tokens
        ids = self.vocabulary.encode(text)
        if len(ids) <= limit:
            return text
        text = self.vocabulary.decode(ids[:limit])
        while (
            len(self.vocabulary.encode(text)) > limit
        ):  # half a character became a replacement, of more tokens
            text = text[:-1]
        return text

    def plain(self, text: str) -> str:
        """Text from outside the protocol: special tokens in it are broken by a space, so that they are only words."""
        return self._special.sub(lambda match: match[0][0] + " " + match[0][1:], text)

    def label_tokens(self, time: float) -> int:
        """Tokens of a frame's timestamp, `time` in seconds, and of its vision marks."""
        return len(self._time(_timestamp(time))) + 2

    def _timed_images(
        self, opening: str, frames: Sequence[Frame], image_tokens: int | Sequence[int]
    ) -> np.ndarray:
        return np.concatenate([self.encode(opening), *self.images(frames, image_tokens)])

    def images(
        self, frames: Sequence[Frame], image_tokens: int | Sequence[int], timed: bool = True
    ) -> list[Int32[np.ndarray, " n"]]:
        """The placeholders of frames, each after its time where `timed`."""
        counts = (
            [image_tokens] * len(frames) if isinstance(image_tokens, int) else list(image_tokens)
        )
        if len(counts) != len(frames):
            raise ValueError(
                f"image_tokens: {len(counts)} counts for {len(frames)} frames; give one a frame"
            )
        special = self.vocabulary
        parts: list[np.ndarray] = []
        for frame, count in zip(frames, counts, strict=True):
            image = [
                special["<|vision_start|>"],
                *[special["<|image_pad|>"]] * count,
                special["<|vision_end|>"],
            ]
            parts += [self._time(_timestamp(frame.time))] * timed + [np.array(image, np.int32)]
        return parts

    def _concat(self, *texts: str) -> np.ndarray:
        return np.concatenate([self.encode(text) for text in texts])

    @functools.lru_cache(maxsize=65_536)  # noqa: B019  one protocol lives as long as the run
    def _time(self, text: str) -> np.ndarray:
        return self.encode(text)

    def encode(self, text: str) -> np.ndarray:
        """Token ids of a text, int32[n]; special tokens in it are taken as such."""
        return np.asarray(self.vocabulary.encode(text), np.int32)


def _timestamp(time: float) -> str:
    return f"<{time:.1f} seconds>"


def _number(value: float) -> float | int:
    return int(value) if float(value).is_integer() else value
