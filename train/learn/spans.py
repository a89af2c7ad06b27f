"""Names the parts of a step, in its metrics and in a trace (`train.durable.profile`)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import jax


class Spans:
    """The parts of one step.

    Attributes:
        seconds: How long each part took, by name.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measure the block, which is an event of this name in a trace."""
        start = time.perf_counter()
        with jax.profiler.TraceAnnotation(name):
            yield
        self.seconds[name] = time.perf_counter() - start
