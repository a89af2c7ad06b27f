"""Counts XLA compilations, to check that nothing compiles again after warm-up."""

from __future__ import annotations

from typing import Any

import jax

_COMPILED = "/jax/core/compile/backend_compile_duration"


class Compilations:
    """Number and seconds of the compilations of this process since this was created.

    A program that is loaded from disk (`models.compile_cache`) counts as well.
    """

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == _COMPILED:
            self.count += 1
            self.seconds += duration_secs
