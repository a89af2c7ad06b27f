"""Counting what XLA compiles: after warm-up the count must stand still."""

from __future__ import annotations

from typing import Any

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


class Compilations:
    """Counts compilations in this process from its making on."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._hear)

    def _hear(self, event: str, duration_secs: float, **_: Any) -> None:
        self.count += event == _EVENT
