"""Encoded frames by key. A key holds everything that the features of a frame depend on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple
from weakref import WeakValueDictionary

import jax
import numpy as np
from jaxtyping import Shaped

from paravt_jax.data.frames import PixelRules

Grid = tuple[int, int]
"""Height and width of a frame in patches."""


class FrameKey(NamedTuple):
    """Everything that the features of a frame depend on. Its timestamp is only a label."""

    video: str
    stamp: tuple[int, int] | None
    """Stands for the content of the video's file (`models.features.reader.VideoFiles.stamp`)."""
    index: int
    """The frame's number in the video."""
    grid: Grid
    rules: PixelRules
    """How the frame is resized."""
    version: int | None = None
    """Version of the trained weights that computed the features; None: only frozen ones did."""


class Encoded(NamedTuple):
    """Features of one frame, inside the batch in which they were computed.

    The batch may still be on the devices, and not computed yet.
    """

    batch: jax.Array | Shaped[np.ndarray, "m padded ..."]
    index: int
    tokens: int | None = None
    """Visual tokens of the frame, which may be padded on the right; None: it is not."""

    def fetch(self) -> Shaped[np.ndarray, "tokens ..."]:
        """Wait for the features and return them."""
        # A copy: a view would keep the features of the whole batch in memory.
        return np.asarray(self.batch)[self.index, : self.tokens].copy()


class FeatureCache:
    """Keeps features up to a limit in bytes; the least recently used are evicted first.

    Evicted features are still there for as long as somebody holds them.

    Attributes:
        bytes: Size of all features that are stored.
    """

    def __init__(self, limit: int):
        self.bytes = 0
        self._limit = limit
        # The least recently used first.
        self._stored: dict[FrameKey, np.ndarray] = {}
        # All that are stored or held.
        self._alive: WeakValueDictionary[FrameKey, np.ndarray] = WeakValueDictionary()
        self._pending: dict[FrameKey, Encoded] = {}

    def __len__(self) -> int:
        return len(self._stored)

    def find(self, keys: Iterable[FrameKey]) -> dict[FrameKey, np.ndarray]:
        """Return the features of those keys that are known. Pending ones are waited for.

        Pass what is used to `add`, so that it counts as used.
        """
        features = {}
        for key in dict.fromkeys(keys):
            if key in self._pending:
                features[key] = self._alive[key] = self._pending.pop(key).fetch()
            elif key in self._alive:
                features[key] = self._alive[key]
        return features

    def add(self, features: Mapping[FrameKey, np.ndarray]) -> None:
        """Store features as the last that were used, and evict others if the limit is exceeded."""
        for key, array in features.items():
            if key in self._stored:
                self._evict(key)
            self._stored[key] = self._alive[key] = array
            self.bytes += array.nbytes
        while self.bytes > self._limit:
            self._evict(next(iter(self._stored)))

    def add_pending(self, encoded: Mapping[FrameKey, Encoded]) -> None:
        """Take over features that are being computed. They stay on the devices until `find`."""
        self._pending.update(encoded)

    def settle(self) -> None:
        """Fetch and store the features that are still pending."""
        self.add({key: encoded.fetch() for key, encoded in self._pending.items()})
        self._pending = {}

    def drop(self, condition: Callable[[FrameKey], bool]) -> None:
        """Forget all features whose keys meet a condition, also those that somebody holds."""
        for key in [*filter(condition, self._stored)]:
            self._evict(key)
        for features in (self._alive, self._pending):
            for key in [*filter(condition, features)]:
                del features[key]

    def _evict(self, key: FrameKey) -> None:
        self.bytes -= self._stored.pop(key).nbytes
