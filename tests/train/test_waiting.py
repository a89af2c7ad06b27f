"""Seconds in which hosts waited, over all hosts."""

from __future__ import annotations

import pytest

from models.features import FrameFeatures
from paravt_jax.processes import hosts
from rollout.engine.engine import Engine, EngineCounts, _Occupancy
from train.durable.usage import Usage


def test_empty_rows_count_by_their_share_of_the_most_that_were_busy():
    occupancy = _Occupancy()
    assert occupancy.empty_seconds == 0
    occupancy.add(8, 2.0)
    occupancy.add(8, 1.0)
    assert occupancy.empty_seconds == 0
    occupancy.add(2, 4.0)
    assert occupancy.empty_seconds == pytest.approx(3.0)


@pytest.fixture
def counters() -> tuple[Engine, FrameFeatures]:
    """What the waiting of a host is read from, without a model."""
    engine = Engine.__new__(Engine)
    engine.counts = EngineCounts(tail_seconds=5.0)
    features = FrameFeatures.__new__(FrameFeatures)
    features.waited = 7.0
    return engine, features


def idle(usage: Usage) -> dict[str, float]:
    return {name: x for name, x in usage.metrics({}).items() if name.startswith("idle/")}


def test_waiting_counts_from_the_beginning_of_the_step(counters):
    engine, features = counters
    usage = Usage()
    assert not idle(usage)
    usage.watch(*counters)
    engine.counts.tail_seconds += 1.0
    features.waited += 0.5
    usage.compilations.seconds += 0.25
    wanted = {"idle/files": 0.5, "idle/hosts": 0.0, "idle/tail": 1.0, "idle/compile": 0.25}
    assert idle(usage) == wanted
    usage.reset()
    assert set(idle(usage).values()) == {0.0}


def test_what_compiles_after_the_first_steps_is_counted(counters):
    usage = Usage()
    usage.watch(*counters)
    counts = []
    for _ in range(Usage.WARM_UP + 2):
        usage.reset()
        usage.compilations.count += 2
        counts.append(usage.metrics({})["recompilations"])
    assert counts == [0, 0, 0, 2, 2]
    usage.reset()
    assert usage.metrics({})["recompilations"] == 0


def test_several_hosts_report_their_mean(counters, monkeypatch):
    usage = Usage()
    usage.watch(*counters)
    counters[1].waited += 1.0
    monkeypatch.setattr(hosts, "gather", lambda own: [own, ([], own[1] | {"files": 3.0})])
    assert idle(usage)["idle/files"] == 2.0
