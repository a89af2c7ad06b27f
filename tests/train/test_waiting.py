"""Seconds in which hosts waited, over all hosts."""

from __future__ import annotations

import pytest

from models.features import FrameFeatures
from models.features.reader import VideoFiles
from paravt_jax.processes import hosts
from rollout.engine.engine import Engine, EngineCounts, _Occupancy
from train.durable.usage import Compilations, Waiting


def test_empty_rows_count_by_their_share_of_the_most_that_were_busy():
    occupancy = _Occupancy()
    assert occupancy.empty_seconds == 0
    occupancy.add(8, 2.0)
    occupancy.add(8, 1.0)
    assert occupancy.empty_seconds == 0
    occupancy.add(2, 4.0)
    assert occupancy.empty_seconds == pytest.approx(3.0)


@pytest.fixture
def waiting() -> tuple[Engine, FrameFeatures, Compilations]:
    """What the waiting of a host is read from, without a model."""
    engine = Engine.__new__(Engine)
    engine.counts = EngineCounts(tail_seconds=5.0)
    features = FrameFeatures.__new__(FrameFeatures)
    features.files = VideoFiles.__new__(VideoFiles)
    features.files.waited = 7.0
    return engine, features, Compilations()


def test_waiting_counts_from_the_beginning_of_the_step(waiting):
    engine, features, compilations = waiting
    idle = Waiting(*waiting)
    engine.counts.tail_seconds += 1.0
    features.files.waited += 0.5
    compilations.seconds += 0.25
    wanted = {"idle/files": 0.5, "idle/hosts": 0.0, "idle/tail": 1.0, "idle/compile": 0.25}
    assert idle.metrics(warm=True) == wanted | {"recompilations": 0.0}


def test_what_compiles_after_the_first_steps_is_counted(waiting):
    idle = Waiting(*waiting)
    waiting[2].count += 2
    assert idle.metrics(warm=False)["recompilations"] == 0
    assert idle.metrics(warm=True)["recompilations"] == 2
    idle.reset()
    assert idle.metrics(warm=True)["recompilations"] == 0


def test_several_hosts_report_their_mean_and_the_most_of_any(waiting, monkeypatch):
    idle = Waiting(*waiting)
    waiting[1].files.waited += 1.0
    monkeypatch.setattr(hosts, "gather", lambda own: [own, own | {"files": 3.0}])
    found = idle.metrics(warm=True)
    assert (found["idle/files"], found["idle/files_max"]) == (2.0, 3.0)
