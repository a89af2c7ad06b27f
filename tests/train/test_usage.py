"""What a step uses besides its work: memory over all hosts, and compilations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from paravt_jax.processes import hosts
from train.durable import usage
from train.durable.usage import Compilations


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
    other = [(2 * 2**30, 6 * 2**30)]
    monkeypatch.setattr(hosts, "gather", lambda own: [own, other])
    assert usage.memory() == {"memory/in_use": 3.0, "memory/peak": 6.0}
