"""Conversations to imitate, and their token ids.

The cold start learns from these, whether they were published or written about the small world.
`render` writes them with the protocol's own prompts and tool responses, so that they are token for
token what an agent would see and write.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from paravt_jax.method.protocol import ANSWER_NOW, PINNED, TO_ASSISTANT, Protocol, system_text
from paravt_jax.method.records import Author, Frame, Segment, Trajectory


@dataclasses.dataclass(frozen=True)
class Clip:
    """What a conversation shows of one file: frames by number with their times in seconds, and the
    file's own height and width in pixels.

    `still`: a picture, which has one frame and no time. `path` is relative to the data root, or
    absolute.
    """

    path: str
    indices: tuple[int, ...]
    times: tuple[float, ...]
    height: int
    width: int
    still: bool = False

    @property
    def frames(self) -> tuple[Frame, ...]:
        return tuple(
            Frame(self.path, index, time)
            for index, time in zip(self.indices, self.times, strict=True)
        )


@dataclasses.dataclass(frozen=True)
class ChatTurn:
    """One turn of a conversation: role `user`, `assistant` (trained on), or `tool` (one tool
    response); its texts and clips in order."""

    role: str
    content: tuple[str | Clip, ...]

    @property
    def clips(self) -> tuple[Clip, ...]:
        return tuple(part for part in self.content if isinstance(part, Clip))


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A demonstration: turns with texts, videos and pictures.

    `source` is the split it comes from. `tools` says whether tools are offered in it. A
    sub-agent's (`subagent`) is one clip, the window it looks at, and its report. `tokens` is its
    length as `render` writes it, 0 where it was not counted.
    """

    id: str
    source: str
    tools: bool
    turns: tuple[ChatTurn, ...]
    tokens: int = 0
    subagent: bool = False

    @property
    def clips(self) -> tuple[Clip, ...]:
        return tuple(clip for turn in self.turns for clip in turn.clips)


def render(
    conversation: Conversation, protocol: Protocol, image_tokens: Callable[[Clip], int]
) -> Trajectory:
    """A conversation as the trajectory of an agent that does likewise; its log-probs are 0, for it
    was not sampled.

    `image_tokens(clip)` tells how many visual tokens a frame of the clip takes. Responses learn to
    write `<think>` whether rollouts pin it or not: recipes that do not pin it need it.
    """
    if conversation.subagent:
        asked, report = conversation.turns
        (clip,) = asked.clips
        return Trajectory(
            (protocol.window(clip.frames, image_tokens(clip)), _response(report, protocol))
        )
    system = system_text(
        [*protocol.tools.values()] if conversation.tools else (),
        video=any(not clip.still for clip in conversation.clips),
    )
    opening = system + "<|im_start|>user\n"
    trajectory, rounds = Trajectory(), 0
    for role, group in itertools.groupby(conversation.turns, key=lambda turn: turn.role):
        turns = list(group)
        if role == "assistant":
            trajectory.append(_response(turns[0], protocol))
        elif role == "tool":
            rounds += 1
            last = rounds >= protocol.settings.max_tool_turns
            trajectory.append(_results(turns, protocol, image_tokens, last))
        else:
            pieces = [
                protocol.encode(opening),
                *_shown(turns[0], protocol, protocol.plain, image_tokens),
                protocol.encode(TO_ASSISTANT),
            ]
            trajectory.append(_segment(pieces, Author.PROMPT, turns[:1]))
            opening = "\n<|im_start|>user\n"
    return trajectory


def _response(turn: ChatTurn, protocol: Protocol) -> Segment:
    """A response; the opening of one that thinks is encoded by itself, as a pinned one is."""
    text = str(turn.content[0])
    opening = PINNED if text.startswith(PINNED) else ""
    pieces = (protocol.encode(opening), protocol.encode(text[len(opening) :] + "<|im_end|>"))
    ids = np.concatenate(pieces)
    return Segment(ids, Author.MODEL, np.zeros(len(ids), np.float32))


def _results(
    turns: Sequence[ChatTurn],
    protocol: Protocol,
    image_tokens: Callable[[Clip], int],
    last: bool,
) -> Segment:
    """Tool responses as an episode has them, but that some show clips."""
    if not any(turn.clips for turn in turns):
        texts = ["\n".join(str(part) for part in turn.content) for turn in turns]
        return protocol.tool_results(texts, ended=True, last=last)
    pieces = [protocol.encode("\n<|im_start|>user\n")]
    for number, turn in enumerate(turns):
        pieces += [
            protocol.encode("\n" * (number > 0) + "<tool_response>\n"),
            *_shown(turn, protocol, protocol.cut, image_tokens),
            protocol.encode("\n</tool_response>"),
        ]
    pieces.append(protocol.encode((ANSWER_NOW if last else "") + TO_ASSISTANT))
    return _segment(pieces, Author.TOOL, turns)


def _shown(
    turn: ChatTurn,
    protocol: Protocol,
    clean: Callable[[str], str],
    image_tokens: Callable[[Clip], int],
) -> list[np.ndarray]:
    """The pieces of a turn's texts and clips, a line end where one follows the other."""
    pieces: list[np.ndarray] = []
    for before, part in zip((None, *turn.content), turn.content, strict=False):
        if isinstance(part, Clip):
            if isinstance(before, str):
                pieces.append(protocol.encode("\n"))
            pieces += protocol.images(part.frames, image_tokens(part), timed=not part.still)
        else:
            pieces.append(protocol.encode(clean("\n" * (before is not None) + part)))
    return pieces


def _segment(pieces: Sequence[np.ndarray], author: Author, turns: Sequence[ChatTurn]) -> Segment:
    frames = tuple(frame for turn in turns for clip in turn.clips for frame in clip.frames)
    return Segment(np.concatenate(pieces), author, frames=frames)
