"""Seconds of a step in which hosts waited, by what they waited for."""

from __future__ import annotations

from models.features import FrameFeatures
from paravt_jax.processes import hosts
from rollout.engine.engine import Engine
from train.durable.compilations import Compilations


class IdleTime:
    """Waiting of all hosts since this was created.

    - `files`: nothing to sample while files were read;
    - `hosts`: for other hosts, for example for their last rollouts;
    - `tail`: decoding while rows were empty, by their share of the most that were busy in the step;
    - `compile`: compilation.
    """

    def __init__(self, engine: Engine, features: FrameFeatures, compilations: Compilations):
        self._engine = engine
        self._features = features
        self._compilations = compilations
        self._before = self._seconds()

    def metrics(self) -> dict[str, float]:
        """Means over hosts, and the most of any host if there are several. All hosts call this."""
        own = {name: end - self._before[name] for name, end in self._seconds().items()}
        everyone = hosts.gather(own)
        found = {}
        for name in own:
            seconds = [host[name] for host in everyone]
            found[f"idle/{name}"] = sum(seconds) / len(seconds)
            if len(seconds) > 1:
                found[f"idle/{name}_max"] = max(seconds)
        return found

    def _seconds(self) -> dict[str, float]:
        return {
            "files": self._features.waited,
            "hosts": hosts.seconds_waited(),
            "tail": self._engine.counts.tail_seconds,
            "compile": self._compilations.seconds,
        }
