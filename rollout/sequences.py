"""What the engine samples: a prompt, and the sequences that go on from it.

Owns their state and nothing that acts on it: `engine` decides what becomes of a sequence, `runner` computes it.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Bool, Int

from rollout.pages import Node, Tokens
from rollout.requests import Request


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


class Sequence:
    """One sample on its way. Its pages are those of `path`, then `lent`; `computed` tokens are on them."""

    def __init__(self, ticket: int, number: int, prompt: Prompt):
        self.ticket, self.number, self.prompt, self.sampling = ticket, number, prompt, prompt.request.sampling
        self.version = 0
        self.path: list[Node] = []
        self.lent: list[int] = []
        self.source: Node | None = None  # whose first tokens the first lent page takes over
        self.computed = 0
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
        return np.concatenate([self.prompt.request.ids, np.array(self.drawn, np.int32)]).astype(np.int32)
