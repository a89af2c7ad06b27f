"""The metrics of a run: one history, however often the run is killed."""

from __future__ import annotations

import json
import math
import struct
import time
from typing import Any

import pytest
from tensorboardX.proto import event_pb2

from paravt_jax.data.stored import DamagedFileError
from paravt_jax.processes import hosts
from train.durable import metrics
from train.durable.metrics import MetricsWriter, read_metrics


def steps(folder):
    return [(line["phase"], line["step"]) for line in read_metrics(folder / "metrics.jsonl")]


def written(folder):
    writer = MetricsWriter(folder)
    for phase, last in (("align", 1), ("sft", 3), ("rl", 2)):
        for step in range(last + 1):
            writer.write(phase, step, {"loss": step / 10})
    return writer


def read_events(file):
    """Read an event file as (name, step, value); "start" makes TensorBoard hide later steps."""
    # Each record is: length (8 bytes), checksum (4), event, checksum (4).
    proto: Any = event_pb2
    events = []
    data = file.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        event = proto.Event.FromString(data[12 : 12 + length])
        if event.session_log.status == proto.SessionLog.START and event.step:
            events.append(("start", event.step, 0.0))
        events += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
        data = data[16 + length :]
    return events


def test_every_line_is_flat_and_on_disk_at_once(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write("rl", 3, {"reward/accuracy": 0.5, "loss": math.nan, "kl": math.inf})
    [line] = (tmp_path / "metrics.jsonl").read_text().splitlines()
    content = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert content.pop("wall") > 1e9
    assert content == {"phase": "rl", "step": 3, "reward/accuracy": 0.5, "loss": None, "kl": None}


def test_truncating_removes_later_steps_and_later_phases(tmp_path):
    writer = written(tmp_path)
    writer.truncate("sft", 1)
    assert steps(tmp_path) == [("align", 0), ("align", 1), ("sft", 0), ("sft", 1)]
    writer.write("sft", 2, {"loss": 7.0})
    assert steps(tmp_path)[-1] == ("sft", 2)
    writer.truncate("align", 0)
    assert steps(tmp_path) == [("align", 0)]


def test_an_incomplete_last_line_is_dropped_before_the_next_is_written(tmp_path):
    written(tmp_path)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    assert steps(tmp_path)[-1] == ("rl", 1)
    resumed = MetricsWriter(tmp_path)
    resumed.truncate("rl", 1)
    resumed.write("rl", 2, {"loss": 1.0})
    assert steps(tmp_path)[-3:] == [("rl", 0), ("rl", 1), ("rl", 2)]


def test_a_line_of_an_unknown_phase_is_named(tmp_path):
    writer = written(tmp_path)
    writer.path.write_text(
        writer.path.read_text().replace('"align", "step": 1', '"aligo", "step": 1')
    )
    with pytest.raises(DamagedFileError, match="metrics.jsonl, line 2: .*phase.*restore the file"):
        writer.truncate("sft", 1)


def test_tensorboard_gets_the_finite_figures_and_hides_repeated_steps(tmp_path):
    writer = MetricsWriter(tmp_path)
    for step in range(4):
        writer.write("sft", step, {"loss": float(step), "kl": math.nan})
    writer.close()
    # The name of a file has the second in which it was opened.
    time.sleep(1.1)
    resumed = MetricsWriter(tmp_path)
    resumed.truncate("sft", 1)
    resumed.write("sft", 2, {"loss": 20.0})
    resumed.close()
    first, again = (read_events(file) for file in sorted((tmp_path / "tensorboard/sft").iterdir()))
    assert [event for event in first if event[0] == "loss"] == [
        ("loss", step, float(step)) for step in range(4)
    ]
    assert again == [("start", 2, 0.0), ("loss", 2, 20.0)]


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
    monkeypatch.setattr(metrics.jax, "local_devices", lambda: devices)
    # As GiB: 3 in use and a peak of 5 here, 2 and 6 on the other host.
    other = [(2 * 2**30, 6 * 2**30)]
    monkeypatch.setattr(hosts, "gather", lambda own: [own, other])
    assert metrics.memory() == {"memory/in_use": 3.0, "memory/peak": 6.0}
