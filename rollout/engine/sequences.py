"""The state of the engine's samples: a prompt, and the sequence that continues it.

These classes only hold state: `engine` schedules the sequences, `runner` computes them.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math

import numpy as np
from jaxtyping import Bool, Int, Int32

from models.config import ModelConfig
from models.features import FrameFeatures
from models.rope import mrope_positions, next_position
from rollout.engine.pages import Content, Node
from rollout.engine.requests import Request


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A request, and everything that is known before it gets a slot.

    Tokens that an earlier request drew (`Request.begun`) are prefilled, so they belong to it.
    """

    request: Request
    """The request. Its `ids` include the tokens of `begun`."""
    content: Content
    """Identity of each token, for the page tree. Placeholders of different frames differ here."""
    visual: Bool[np.ndarray, " t"]
    """Placeholders of the request's frames. Later placeholders come from a model and are text."""
    frame_ends: Int[np.ndarray, " f"]
    """Visual tokens of each frame and of those before it."""
    positions: Int[np.ndarray, "3 t"]
    """M-RoPE positions."""
    deadline: float
    """When to stop sampling, on the engine's clock."""

    @property
    def prefill_length(self) -> int:
        """Tokens to prefill: all but the last, which is the input of the first decoding step."""
        return len(self.request.ids) - 1


class EngineSequence:
    """One sample in progress.

    Its pages, in order, are those of `shared_pages`, then `own_pages`:

        shared_pages           own_pages
        [a b c d] [e f g h]    [i j k .] [. . . .] [. . . .]
        |<------ computed = 11 ------>|

    Shared pages are in the tree, where other sequences find them. After prefill they include the
    prompt's last page, even if it is partial. (If another page of the tree begins like it, it stays
    the first own page.) All other own pages are still to be written. There are enough of them for
    the longest possible response.

    Attributes:
        ticket: the request's number.
        copy_source: a cached page that begins with the sequence's next tokens. Prefill copies it to
            the first of `own_pages`, because the sequence continues differently.
        computed: tokens whose keys and values are on the pages.
        forgotten: the engine was told to forget while this ran, so its pages are not published.
        visual: vectors of the visual tokens that are not computed yet.
        begun: tokens of the response that were drawn by an earlier request. They are the end of
            `prompt`.
        drawn: tokens sampled so far, after those. `logprobs` has their log-probs.
    """

    def __init__(self, ticket: int, prompt: Prompt):
        self.ticket = ticket
        self.prompt = prompt
        self.sampling = prompt.request.sampling
        self.shared_pages: list[Node] = []
        self.own_pages: list[int] = []
        self.copy_source: Node | None = None
        self.computed = 0
        self.forgotten = False
        self.visual = no_vectors()
        self.begun = 0 if prompt.request.begun is None else len(prompt.request.begun.ids)
        self.drawn: list[int] = []
        self.logprobs: list[float] = []

    @property
    def missing(self) -> int:
        """Tokens to prefill before decoding can start."""
        return max(0, self.prompt.prefill_length - self.computed)

    @property
    def left(self) -> int:
        """The most tokens that may still be drawn."""
        return self.sampling.max_new_tokens - self.begun - len(self.drawn)

    @property
    def pages(self) -> list[int]:
        """Numbers of all its pages, in the order of its tokens."""
        return [node.page for node in self.shared_pages] + self.own_pages

    def beginning(self, size: int) -> tuple[int, ...]:
        """Return the serials of the pages that it begins with and nobody writes any more.

        Unlike page numbers, they do not depend on what the cache held before.
        """
        return tuple(node.serial for node in self.shared_pages if len(node.tokens) == size)

    @property
    def ids(self) -> Int32[np.ndarray, " t"]:
        """The prompt and what was sampled after it."""
        drawn = np.array(self.drawn, np.int32)
        return np.concatenate([self.prompt.request.ids, drawn]).astype(np.int32)


def no_vectors() -> np.ndarray:
    """Return an empty array of visual vectors."""
    return np.zeros((0, 0, 0), np.float32)


def make_prompt(
    request: Request, features: FrameFeatures, config: ModelConfig, deadline: float
) -> Prompt:
    """Prepare a request for prefill.

    Args:
        request: the request, checked for its length and its ids.
        features: knows the frames' sizes and contents.
        config: the model's, for its special tokens.
        deadline: when to stop sampling, on the engine's clock.

    Raises:
        ValueError: placeholders and frames do not match.
        VideoError: a video cannot be read any more.
    """
    ids = np.array(request.ids, np.int32)
    if request.begun is not None:
        ids = np.concatenate([ids, request.begun.ids]).astype(np.int32)
    keys = features.keys(request.frames)
    grids = [key.grid for key in keys]
    tokens = [math.prod(grid) // config.vision.spatial_merge_size**2 for grid in grids]
    count = sum(tokens)
    # Placeholders are matched from the left. Later ones were written by a model.
    is_placeholder = (ids == config.image_token_id) | (ids == config.video_token_id)
    placeholders = np.flatnonzero(is_placeholder)[:count]
    visual_end = int(placeholders[-1]) + 1 if placeholders.size else 0
    if len(placeholders) < count:
        raise ValueError(
            f"Request.ids: {len(placeholders)} placeholders of images (id {config.image_token_id}) "
            f"or videos for {count} visual tokens of Request.frames; give one placeholder "
            "per visual token"
        )
    if visual_end == len(ids):
        raise ValueError(
            f"Request.ids: the last of {len(ids)} tokens is a visual token; "
            "give at least one text token after the frames"
        )
    visual = np.zeros(len(ids), bool)
    visual[placeholders] = True
    content = ids.astype(np.int64)
    if request.frames:
        # Every placeholder has the same id. To tell frames apart, each is numbered: fingerprint of
        # its frame + its index in the frame. The number is negative, because token ids are not.
        pieces = [
            _fingerprint(key) + np.arange(number) for key, number in zip(keys, tokens, strict=True)
        ]
        content[visual] = -1 - np.concatenate(pieces)
    return Prompt(
        request=dataclasses.replace(request, ids=ids),
        content=content,
        visual=visual,
        frame_ends=np.cumsum(tokens, dtype=int),
        positions=_positions(ids, visual_end, grids, config),
        deadline=deadline,
    )


def _positions(
    ids: Int32[np.ndarray, " t"],
    visual_end: int,
    grids: list[tuple[int, int]],
    config: ModelConfig,
) -> Int32[np.ndarray, "3 t"]:
    """Return M-RoPE positions. Placeholders after the last frame count as text."""
    with_frames = mrope_positions(ids[:visual_end], grids, config)
    text_length = len(ids) - visual_end
    text = next_position(with_frames) + np.arange(text_length)
    text = np.broadcast_to(text, (3, text_length))
    return np.concatenate([with_frames, text], axis=1).astype(np.int32)


@functools.lru_cache(maxsize=65_536)
def _fingerprint(key: tuple) -> int:
    """Return a hash of a frame, far enough from all others to number the frame's tokens from it."""
    hashed = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    # 62 bits: adding a token's index and negating stays inside int64.
    return int.from_bytes(hashed, "little") >> 2
