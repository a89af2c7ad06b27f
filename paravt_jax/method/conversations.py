"""Demonstrations for the cold start: conversations, and their token ids.

`render` uses the protocol's prompts and tool responses, so a demonstration has exactly the tokens
that an agent in an episode would see and write.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from paravt_jax.method.parsing import JSON_CALLS, CallSyntax, block_spans, find_tags
from paravt_jax.method.protocol import PINNED, Protocol, system_text
from paravt_jax.method.records import Author, Frame, Segment, Trajectory
from paravt_jax.method.wording import ANSWER_NOW


@dataclasses.dataclass(frozen=True)
class Clip:
    """The frames of one file that a conversation shows."""

    path: str
    """Path relative to the data root, or absolute."""
    indices: tuple[int, ...]
    """Frames by their index among the decoded ones."""
    times: tuple[float, ...]
    """Timestamps of these frames, in seconds."""
    height: int
    """Height of the file in pixels."""
    width: int
    """Width of the file in pixels."""
    still: bool = False
    """Whether the file is a picture: one frame without a timestamp."""
    crop: bool = False
    """Whether a crop shows these frames, which may have size limits of its own."""

    @property
    def frames(self) -> tuple[Frame, ...]:
        return tuple(
            Frame(self.path, index, time, self.crop)
            for index, time in zip(self.indices, self.times, strict=True)
        )


@dataclasses.dataclass(frozen=True)
class ChatTurn:
    """One turn of a conversation."""

    role: str
    """`user`, `assistant` (trained on) or `tool` (one tool response)."""
    content: tuple[str | Clip, ...]
    """Texts and clips, in order."""

    @property
    def clips(self) -> tuple[Clip, ...]:
        return tuple(item for item in self.content if isinstance(item, Clip))


@dataclasses.dataclass(frozen=True)
class Conversation:
    """One demonstration."""

    id: str
    tools: bool
    """Whether its system turn offers tools."""
    turns: tuple[ChatTurn, ...]
    tokens: int = 0
    """Length in tokens as `render` writes it; 0 if it was not counted."""
    subagent: bool = False
    """A sub-agent's conversation: a turn with the clip of its window, then its report."""

    @property
    def clips(self) -> tuple[Clip, ...]:
        return tuple(clip for turn in self.turns for clip in turn.clips)


def render(
    conversation: Conversation, protocol: Protocol, image_tokens: Callable[[Clip], int]
) -> Trajectory:
    """Render a conversation as the trajectory of the agent that wrote it.

    Whole responses are MODEL tokens, `<think>` included: recipes that do not pin it must learn to
    write it. Log-probs are 0, because nothing was sampled.

    Args:
        conversation: The demonstration.
        protocol: Prompts, tools and tokenizer.
        image_tokens: Returns the visual tokens per frame of a clip.
    """
    if conversation.subagent:
        asked, report = conversation.turns
        (clip,) = asked.clips
        prompt = protocol.window(clip.frames, image_tokens(clip))
        return Trajectory((prompt, _response(report, protocol)))
    dialect = protocol.dialect
    system = system_text(
        dialect,
        [*protocol.tools.values()] if conversation.tools else (),
        video=any(not clip.still for clip in conversation.clips),
    )
    opening = system + dialect.open("user")
    trajectory = Trajectory()
    tool_turns = 0
    for role, group in itertools.groupby(conversation.turns, key=lambda turn: turn.role):
        turns = list(group)
        if role == "assistant":
            trajectory.append(_response(turns[0], protocol))
        elif role == "tool":
            tool_turns += 1
            last = tool_turns >= protocol.settings.max_tool_turns
            trajectory.append(_results(turns, protocol, image_tokens, last))
        else:
            # Only the first user turn has the system turn before it.
            pieces = [
                protocol.encode(opening),
                *_render_content(turns[0], protocol, protocol.plain, image_tokens),
                protocol.encode(dialect.to_assistant),
            ]
            trajectory.append(_segment(pieces, Author.PROMPT, turns[:1]))
            opening = "\n" + dialect.open("user")
    return trajectory


def _response(turn: ChatTurn, protocol: Protocol) -> Segment:
    text = rewrite_calls(str(turn.content[0]), protocol.dialect.calls)
    # In an episode the pinned opening is a separate segment, so encode it separately here too.
    # Otherwise its last characters could share a token with the text after it.
    opening = PINNED if text.startswith(PINNED) else ""
    rest = text.removeprefix(opening) + protocol.dialect.end
    ids = np.concatenate([protocol.encode(opening), protocol.encode(rest)])
    return Segment(ids, Author.MODEL, np.zeros(len(ids), np.float32))


def _results(
    turns: Sequence[ChatTurn],
    protocol: Protocol,
    image_tokens: Callable[[Clip], int],
    last: bool,
) -> Segment:
    """Return the user turn with tool responses, as in an episode. Here, responses may also show
    clips."""
    if not any(turn.clips for turn in turns):
        texts = ["\n".join(str(item) for item in turn.content) for turn in turns]
        return protocol.tool_results(texts, ended=True, last=last)
    pieces = [protocol.encode("\n" + protocol.dialect.open("user"))]
    for number, turn in enumerate(turns):
        separator = "\n" if number > 0 else ""
        pieces += [
            protocol.encode(f"{separator}<tool_response>\n"),
            *_render_content(turn, protocol, protocol.cut, image_tokens),
            protocol.encode("\n</tool_response>"),
        ]
    request = ANSWER_NOW if last else ""
    pieces.append(protocol.encode(request + protocol.dialect.to_assistant))
    return _segment(pieces, Author.TOOL, turns)


def _render_content(
    turn: ChatTurn,
    protocol: Protocol,
    clean: Callable[[str], str],
    image_tokens: Callable[[Clip], int],
) -> list[np.ndarray]:
    """Return the ids of a turn's texts and clips, in pieces.

    A line break separates two items, except two clips.
    """
    pieces: list[np.ndarray] = []
    previous: str | Clip | None = None
    for item in turn.content:
        if isinstance(item, Clip):
            if isinstance(previous, str):
                pieces.append(protocol.encode("\n"))
            pieces += protocol.images(item.frames, image_tokens(item), timed=not item.still)
        else:
            separator = "" if previous is None else "\n"
            pieces.append(protocol.encode(clean(separator + item)))
        previous = item
    return pieces


def _segment(pieces: Sequence[np.ndarray], author: Author, turns: Sequence[ChatTurn]) -> Segment:
    frames = tuple(frame for turn in turns for clip in turn.clips for frame in clip.frames)
    return Segment(np.concatenate(pieces), author, frames=frames)


def rewrite_calls(text: str, syntax: CallSyntax) -> str:
    """Write the calls of a stored response in another syntax; those that cannot be read stay."""
    for opening, closing in reversed(block_spans(find_tags(text), "tool_call")):
        with contextlib.suppress(ValueError):
            name, arguments = JSON_CALLS.read(text[opening.end : closing.start])
            if arguments is not None:
                call = syntax.write(name, arguments)
                text = f"{text[: opening.end]}\n{call}\n{text[closing.start :]}"
    return text
