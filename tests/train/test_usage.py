"""What a step uses besides its work: memory, compilations, and waiting over all hosts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.features import FrameFeatures
from paravt_jax.processes import hosts
from train.durable import usage
from train.durable.usage import Compilations, Usage


@pytest.fixture
def features() -> FrameFeatures:
    """What the waiting of a host is read from, without a model."""
    features = FrameFeatures.__new__(FrameFeatures)
    features.waited = 7.0
    return features


def idle(usage: Usage) -> dict[str, float]:
    return {name: x for name, x in usage.metrics({}).items() if name.startswith("idle/")}


def test_waiting_counts_from_the_beginning_of_the_step(features):
    used = Usage()
    assert not idle(used)
    used.watch(features)
    features.waited += 0.5
    used.compilations.seconds += 0.25
    wanted = {"idle/files": 0.5, "idle/hosts": 0.0, "idle/compile": 0.25}
    assert idle(used) == wanted
    used.reset()
    assert set(idle(used).values()) == {0.0}


def test_what_compiles_after_the_first_steps_is_counted(features):
    used = Usage()
    used.watch(features)
    counts = []
    for _ in range(Usage.WARM_UP + 2):
        used.reset()
        used.compilations.count += 2
        counts.append(used.metrics({})["recompilations"])
    assert counts == [0, 0, 0, 2, 2]
    used.reset()
    assert used.metrics({})["recompilations"] == 0


def test_several_hosts_report_their_mean(features, monkeypatch):
    used = Usage()
    used.watch(features)
    features.waited += 1.0
    monkeypatch.setattr(hosts, "gather", lambda own: [own, ([], own[1] | {"files": 3.0})])
    assert idle(used)["idle/files"] == 2.0


def test_every_new_shape_counts_and_nothing_else():
    program = jax.jit(lambda x: jnp.tanh(x) * 3 + 1)
    program(np.zeros(7, np.float32))
    counter = Compilations()
    assert counter.count == 0, "what was compiled before does not count"
    program(np.zeros(5, np.float32))
    first = counter.count
    assert first >= 1
    program(np.ones(5, np.float32))
    assert counter.count == first
    program(np.zeros(6, np.float32))
    assert counter.count == first + 1


class Device:
    """A device that counts its memory, or does not."""

    def __init__(self, stats: dict[str, int] | None):
        self.stats = stats

    def memory_stats(self) -> dict[str, int] | None:
        return self.stats


def test_memory_is_that_of_the_fullest_device_of_all_hosts(monkeypatch):
    devices = [
        Device({"bytes_in_use": 2**30, "peak_bytes_in_use": 5 * 2**30}),
        Device({"bytes_in_use": 3 * 2**30, "peak_bytes_in_use": 4 * 2**30}),
    ]
    monkeypatch.setattr(usage.jax, "local_devices", lambda: devices)
    # As GiB: 3 in use and a peak of 5 here, 2 and 6 on the other host.
    other = ([(2 * 2**30, 6 * 2**30)], {})
    monkeypatch.setattr(hosts, "gather", lambda own: [own, other])
    figures = Usage().metrics({})
    assert (figures["memory/in_use"], figures["memory/peak"]) == (3.0, 6.0)
