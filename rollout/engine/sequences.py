"""What the engine samples: a prompt, and the sequences that go on from it.

Owns how a request becomes a prompt, their state, and nothing that acts on it: `engine` decides what becomes of a sequence,
`runner` computes it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib

import numpy as np
from jaxtyping import Bool, Int

from models.features import FrameFeatures
from models.qwen3_vl.config import Qwen3VLConfig
from models.qwen3_vl.rope import mrope_positions, next_position
from rollout.engine.pages import Node, Tokens
from rollout.engine.requests import Request


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A request, and what of it is worked out once for all its samples: what tells its tokens apart, and their positions.

    `visual` are the tokens that stand for pieces of the request's frames. A placeholder after those is one that a model wrote: a word.
    """

    request: Request
    content: Tokens
    visual: Bool[np.ndarray, " t"]
    positions: Int[np.ndarray, "3 t"]
    until: float

    @property
    def known(self) -> int:
        """Tokens to prefill: all but the last, with which decoding starts."""
        return len(self.request.ids) - 1


class EngineSequence:
    """One sample on its way. Its pages are those of `path`, then `lent`; `computed` tokens are on them."""

    def __init__(self, ticket: int, number: int, prompt: Prompt):
        self.ticket, self.number, self.prompt, self.sampling = (
            ticket,
            number,
            prompt,
            prompt.request.sampling,
        )
        self.version = 0
        self.path: list[Node] = []
        self.lent: list[int] = []
        self.source: Node | None = None  # whose first tokens the first lent page takes over
        self.computed = 0
        self.forgotten = False  # whether nobody is to find later what this computes
        self.visual = np.zeros((0, 0, 0), np.float32)  # of the tokens that are not computed yet
        self.drawn: list[int] = []
        self.logprobs: list[float] = []

    @property
    def missing(self) -> int:
        """Tokens to prefill before decoding can start."""
        return max(0, self.prompt.known - self.computed)

    @property
    def pages(self) -> list[int]:
        return [node.page for node in self.path] + self.lent

    @property
    def ids(self) -> np.ndarray:
        """All there is: what was asked and what was drawn."""
        return np.concatenate([self.prompt.request.ids, np.array(self.drawn, np.int32)]).astype(
            np.int32
        )


def make_prompt(
    request: Request, features: FrameFeatures, config: Qwen3VLConfig, until: float
) -> Prompt:
    """The prompt of a request that ends at `until`.

    ValueError where placeholders and frames do not match, VideoError for a video that is gone.
    """
    ids = np.asarray(request.ids, np.int32)
    count = sum(features.tokens(frame.video) for frame in request.frames)
    places = np.flatnonzero(ids == config.image_token_id)[:count]
    end = int(places[-1]) + 1 if places.size else 0
    if len(places) < count or end == len(ids):
        raise ValueError(
            f"Request.ids: {len(places)} placeholders <|image_pad|> (id {config.image_token_id}), the last before token {end} of "
            f"{len(ids)}, for {count} visual tokens of "
            "Request.frames; give as many as that, and a word after them"
        )
    visual = np.zeros(len(ids), bool)
    visual[places] = True
    # After the last frame there is text only, placeholders that a model wrote included.
    seen = mrope_positions(
        ids[:end], [features.grid(frame.video) for frame in request.frames], config
    )
    positions = np.concatenate(
        [
            seen,
            np.broadcast_to(next_position(seen) + np.arange(len(ids) - end), (3, len(ids) - end)),
        ],
        axis=1,
    )
    content = ids.astype(np.int64)
    if request.frames:  # a placeholder is the piece of a frame that it stands for
        pieces = [
            _fingerprint(features.key(frame)) + np.arange(features.tokens(frame.video))
            for frame in request.frames
        ]
        content[visual] = -1 - np.concatenate(pieces)
    return Prompt(
        dataclasses.replace(request, ids=ids), content, visual, positions.astype(np.int32), until
    )


@functools.lru_cache(maxsize=65_536)
def _fingerprint(key: tuple) -> int:
    """A number for a frame, so far from all others that its pieces can be counted up from it."""
    return (
        int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little") >> 2
    )
