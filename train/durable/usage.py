"""What a step uses besides its work: memory of the devices, seconds of compiling and waiting."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from models.config import ModelConfig
from models.devices import used_memory
from models.features import FrameFeatures
from paravt_jax.processes import hosts
from train.learn.packing import GroupLengths
from train.learn.speed import speeds


class Compilations:
    """Number and seconds of the compilations of this process since this was created.

    A program that is loaded from disk (`models.compilation`) counts as well.
    """

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.count += 1
            self.seconds += duration_secs


class Usage:
    """The metrics of a step that are measured alike in every phase."""

    WARM_UP = 3
    """Steps of a process in which programs may still compile."""

    def __init__(self) -> None:
        self.compilations = Compilations()
        self._trained: tuple[ModelConfig, int] | None = None
        # Counters of the seconds in which this host waited, by what it waited for.
        self._waited: dict[str, Callable[[], float]] = {}
        self._warm_up = self.WARM_UP
        self.reset()

    def trains(self, config: ModelConfig, devices: int) -> None:
        """Measure from now on the speed of updates of a model on a number of devices."""
        self._trained = (config, devices)

    def watch(self, features: FrameFeatures) -> None:
        """Measure from now on where steps wait, and what compiles after the first ones.

        - `files`: nothing to sample while files were read;
        - `hosts`: for other hosts, for example for their last rollouts;
        - `compile`: compilation.
        """
        self._waited = {
            "files": lambda: features.waited,
            "hosts": hosts.seconds_waited,
            "compile": lambda: self.compilations.seconds,
        }
        self._warm_up = self.WARM_UP
        self.reset()

    def reset(self) -> None:
        """Count from now on: a step begins. An evaluation since the last one is not part of it."""
        self._before = {name: seconds() for name, seconds in self._waited.items()}
        self._compiled = self.compilations.count

    def metrics(
        self, figures: Mapping[str, float], lengths: Sequence[GroupLengths] = ()
    ) -> dict[str, float]:
        """Return speed, memory and waiting of a step. All processes call this.

        Args:
            figures: The other metrics of the step.
            lengths: Lengths of the sequences of its updates.
        """
        measured = {}
        waited = {name: seconds() - self._before[name] for name, seconds in self._waited.items()}
        everyone = hosts.gather((used_memory(jax.local_devices()), waited))
        if used := [device for devices, _ in everyone for device in devices]:
            # In GiB, on the fullest device; JAX has no counts of CPUs.
            measured["memory/in_use"] = max(in_use for in_use, _ in used) / 2**30
            measured["memory/peak"] = max(peak for _, peak in used) / 2**30
        if self._trained is not None and lengths:
            config, devices = self._trained
            seconds = figures.get("time/update", figures.get("time/step", math.inf))
            measured |= speeds(lengths, config, seconds, devices)
        for name in waited:
            measured[f"idle/{name}"] = sum(host[name] for _, host in everyone) / len(everyone)
        if self._waited:
            self._warm_up -= 1
            recompiled = self.compilations.count - self._compiled if self._warm_up < 0 else 0
            measured["recompilations"] = float(recompiled)
        return measured
