"""Which functions XLA compiles."""

from __future__ import annotations

from typing import Any

import jax


class CompiledNames(list[str]):
    """Names of the jitted functions that are compiled from now on, such as "jit(add)"."""

    def __init__(self):
        super().__init__()
        jax.monitoring.register_event_duration_secs_listener(self._add)

    def _add(self, event: str, duration_secs: float, **kwargs: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.append(kwargs["fun_name"])
