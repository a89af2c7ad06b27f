"""What a step uses besides its work: memory of the devices, seconds of compiling and waiting.

The seconds that count towards goodput are those of a step's parts (`time/...`), less compiling and
waiting for files and other hosts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from models.config import ModelConfig
from models.device_memory import used_memory
from models.features import FrameFeatures
from paravt_jax.processes import hosts
from rollout.engine.engine import Engine
from train.learn.packing import GroupLengths
from train.learn.speed import speeds

_WAITING = ("idle/files", "idle/hosts")
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
        self._ended = (0, 0.0)
        self.reset()

    def trains(self, config: ModelConfig, devices: int) -> None:
        """Measure from now on the speed of updates of a model on a number of devices."""
        self._trained = (config, devices)

    def watch(self, engine: Engine, features: FrameFeatures) -> None:
        """Measure from now on where steps wait, and what compiles after the first ones.

        - `files`: nothing to sample while files were read;
        - `hosts`: for other hosts, for example for their last rollouts;
        - `tail`: decoding while rows were empty, by their share of the most that were busy;
        - `compile`: compilation.
        """
        self._waited = {
            "files": lambda: features.waited,
            "hosts": hosts.seconds_waited,
            "tail": lambda: engine.counts.tail_seconds,
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
        """Return speed, memory, compiling and waiting of a step. All processes call this.

        Args:
            figures: The other metrics of the step.
            lengths: Lengths of the sequences of its updates.
        """
        measured = _memory()
        if self._trained is not None and lengths:
            config, devices = self._trained
            seconds = figures.get("time/update", figures.get("time/step", math.inf))
            measured |= speeds(lengths, config, seconds, devices)
        if self._waited:
            measured |= self._idle()
            self._warm_up -= 1
            if self._warm_up < 0:
                measured["recompilations"] = float(self.compilations.count - self._compiled)
        before, self._ended = self._ended, (self.compilations.count, self.compilations.seconds)
        programs, compiled = (end - start for end, start in zip(self._ended, before, strict=True))
        return measured | {
            "compile/seconds": compiled,
            "compile/programs": float(programs),
            "goodput/seconds": counted_seconds({**figures, **measured}, compiled),
        }

    def _idle(self) -> dict[str, float]:
        """Return means over hosts, and the most of any host if there are several."""
        own = {name: seconds() - self._before[name] for name, seconds in self._waited.items()}
        found = {"recompilations": 0.0}
        everyone = hosts.gather(own)
        for name in own:
            seconds = [host[name] for host in everyone]
            found[f"idle/{name}"] = sum(seconds) / len(seconds)
            if len(seconds) > 1:
                found[f"idle/{name}_max"] = max(seconds)
        return found


def counted_seconds(figures: Mapping[str, float], compiled: float) -> float:
    """Return the seconds of a step that count towards goodput.

    Args:
        figures: The metrics of the step.
        compiled: Seconds of compiling since the step before. Of RL it is known how many of them lie
            within the step.
    """
    parts = sum(seconds for name, seconds in figures.items() if name.startswith("time/"))
    waited = sum(figures.get(name, 0.0) for name in _WAITING)
    return max(0.0, parts - waited - figures.get("idle/compile", compiled))


def _memory() -> dict[str, float]:
    """Return GiB in use, and at most, on the fullest device; {} where JAX has no counts."""
    found = [used for part in hosts.gather(used_memory(jax.local_devices())) for used in part]
    if not found:
        return {}
    return {
        "memory/in_use": max(used for used, _ in found) / 2**30,
        "memory/peak": max(peak for _, peak in found) / 2**30,
    }
