"""Memory, compiling and goodput in the metrics of a step."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from models.device_memory import used_memory
from paravt_jax.processes import hosts
from train.durable import usage
from train.durable.clock import Clock
from train.durable.metrics import MetricsWriter, read_metrics
from train.durable.usage import Usage, counted_seconds


class Time:
    """A clock that stands still, and which counts from anew in another process."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


class Starts:
    """The starts of a run whose time is `time`."""

    def __init__(self, folder):
        self.folder = folder
        self.time = Time()
        self.metrics = MetricsWriter(folder)

    def begin(self, after: int) -> None:
        """Start, and go on after a step."""
        self.clock = Clock(self.folder / "seconds.json", now=self.time, ticks=self.time)
        self.clock.save()
        self.metrics.truncate("sft", after)
        self.usage = Usage(self.clock)
        self.usage.resume(read_metrics(self.metrics.path))

    def step(self, number: int, seconds: float, other: float = 0.0) -> float:
        """A step and what comes before it; returns the goodput."""
        self.time.now += other + seconds
        figures = {"time/step": seconds, "loss": 1.0}
        figures |= self.usage.metrics(figures)
        self.metrics.write("sft", number, figures)
        self.clock.save()
        return figures["goodput/share"]


def test_goodput_is_the_share_of_the_steps(tmp_path):
    run = Starts(tmp_path)
    run.begin(after=-1)
    assert run.step(1, seconds=10, other=30) == pytest.approx(10 / 40)
    assert run.step(2, seconds=10) == pytest.approx(20 / 50)


def test_pauses_between_starts_and_repeated_steps_are_lost(tmp_path):
    run = Starts(tmp_path)
    run.begin(after=-1)
    run.step(1, seconds=10)
    run.step(2, seconds=10)
    run.step(3, seconds=10)
    # Killed; the last checkpoint is that of step 1, and the next start is 60 s later.
    run.time.now += 60
    run.begin(after=1)
    assert run.step(2, seconds=10) == pytest.approx(20 / 100)
    rows = read_metrics(run.metrics.path)
    assert [row["goodput/seconds"] for row in rows] == [10, 10]
    assert run.clock.total == 40 and run.clock.since_began == 100


def test_rows_of_an_earlier_version_count_nothing(tmp_path):
    run = Starts(tmp_path)
    run.metrics.write("sft", 1, {"loss": 1.0, "time/step": 10.0})
    (tmp_path / "seconds.json").write_text("30.0")
    run.begin(after=1)
    assert run.clock.since_began == 30
    assert run.step(2, seconds=10) == pytest.approx(10 / 40)


def test_a_clock_that_is_behind_gives_no_share_above_1(tmp_path):
    run = Starts(tmp_path)
    run.begin(after=-1)
    run.step(1, seconds=10)
    run.time.now -= 500
    run.begin(after=1)
    assert run.step(2, seconds=10) == pytest.approx(1.0)


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
    run = Usage(Clock(tmp_path / "seconds.json"))
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
    figures = Usage(Clock(tmp_path / "seconds.json")).metrics({})
    assert (figures["memory/in_use"], figures["memory/peak"]) == (3.0, 6.0)


def test_devices_that_do_not_count_their_memory_have_no_metric(tmp_path):
    assert used_memory([Device(None), Device({}), Device({"num_allocs": 3})]) == []
    figures = Usage(Clock(tmp_path / "seconds.json")).metrics({})
    counts = jax.devices()[0].memory_stats() is not None
    assert ("memory/peak" in figures) == counts
