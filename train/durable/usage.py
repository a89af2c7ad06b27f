"""What a step uses besides its work: memory of the devices, and compilations."""

from __future__ import annotations

from typing import Any

import jax

from models.devices import used_memory
from paravt_jax.processes import hosts


class Compilations:
    """Counts the compilations of this process since it was created.

    A program that is loaded from disk (`models.compilation`) counts as well.
    """

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.count += 1


def memory() -> dict[str, float]:
    """Return the memory of the fullest device of all hosts, in GiB; CPUs have no counts.

    All processes call this.
    """
    everyone = hosts.gather(used_memory(jax.local_devices()))
    used = [device for devices in everyone for device in devices]
    if not used:
        return {}
    return {
        "memory/in_use": max(in_use for in_use, _ in used) / 2**30,
        "memory/peak": max(peak for _, peak in used) / 2**30,
    }
