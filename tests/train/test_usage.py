"""Memory of the devices in the metrics of a step."""

from __future__ import annotations

from paravt_jax.processes import hosts
from train.durable import usage
from train.durable.usage import Usage


class Device:
    """A device that counts its memory, or does not."""

    def __init__(self, stats: dict[str, int] | None):
        self.stats = stats

    def memory_stats(self) -> dict[str, int] | None:
        return self.stats


def test_memory_is_that_of_the_fullest_device_of_all_hosts(tmp_path, monkeypatch):
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
