"""Memory, compiling and goodput in the metrics of a step."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from models.device_memory import used_memory
from paravt_extras.report.result import durations
from paravt_jax.processes import hosts
from train.durable import usage
from train.durable.usage import Usage, counted_seconds


def test_goodput_is_the_share_of_the_time_since_the_first_step_began(tmp_path):
    """A killed run repeats steps, and pauses between two starts."""
    lines = [
        {"phase": phase, "step": 1, "wall": wall, "time/step": 10.0, "goodput/seconds": 8.0}
        for phase, wall in (("sft", 1010.0), ("rl", 1080.0))
    ]
    assert durations(tmp_path) == {}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert durations(tmp_path) == {"seconds": 80.0, "goodput": 16 / 80}


@pytest.mark.parametrize(
    ("figures", "compiling", "seconds"),
    [
        ({"time/step": 10.0}, 0.0, 10.0),
        ({"time/step": 10.0}, 4.0, 6.0),
        ({"time/step": 10.0}, 40.0, 0.0),
        ({"time/rollout": 7.0, "time/update": 3.0, "loss": 5.0}, 0.0, 10.0),
        ({"time/rollout": 10.0, "idle/files": 1.0, "idle/hosts": 2.0, "idle/tail": 3.0}, 0.0, 7.0),
        # What compiled before the step does not shorten it.
        ({"time/rollout": 10.0, "idle/compile": 1.0}, 30.0, 9.0),
    ],
)
def test_compiling_and_waiting_do_not_count(figures, compiling, seconds):
    assert counted_seconds(figures, compiling) == seconds


def test_compiling_is_counted_since_the_step_before(tmp_path):
    run = Usage()
    program = jax.jit(lambda x: x * 7 - 1)
    program(np.zeros(3, np.float32))
    figures = run.metrics({})
    assert figures["compile/programs"] >= 1
    assert figures["compile/seconds"] > 0
    figures = run.metrics({})
    assert figures["compile/programs"] == figures["compile/seconds"] == 0


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
    other = [(2 * 2**30, 6 * 2**30)]
    monkeypatch.setattr(hosts, "gather", lambda own: [own, other])
    figures = Usage().metrics({})
    assert (figures["memory/in_use"], figures["memory/peak"]) == (3.0, 6.0)


def test_devices_that_do_not_count_their_memory_have_no_metric(tmp_path):
    assert used_memory([Device(None), Device({}), Device({"num_allocs": 3})]) == []
    figures = Usage().metrics({})
    counts = jax.devices()[0].memory_stats() is not None
    assert ("memory/peak" in figures) == counts
