"""Seconds in which hosts waited, over all hosts."""

from __future__ import annotations

import pytest

from models.features import FrameFeatures
from paravt_jax.processes import hosts
from train.durable.usage import Usage


@pytest.fixture
def features() -> FrameFeatures:
    """What the waiting of a host is read from, without a model."""
    features = FrameFeatures.__new__(FrameFeatures)
    features.waited = 7.0
    return features


def idle(usage: Usage) -> dict[str, float]:
    return {name: x for name, x in usage.metrics({}).items() if name.startswith("idle/")}


def test_waiting_counts_from_the_beginning_of_the_step(features):
    usage = Usage()
    assert not idle(usage)
    usage.watch(features)
    features.waited += 0.5
    usage.compilations.seconds += 0.25
    wanted = {"idle/files": 0.5, "idle/hosts": 0.0, "idle/compile": 0.25}
    assert idle(usage) == wanted
    usage.reset()
    assert set(idle(usage).values()) == {0.0}


def test_what_compiles_after_the_first_steps_is_counted(features):
    usage = Usage()
    usage.watch(features)
    counts = []
    for _ in range(Usage.WARM_UP + 2):
        usage.reset()
        usage.compilations.count += 2
        counts.append(usage.metrics({})["recompilations"])
    assert counts == [0, 0, 0, 2, 2]
    usage.reset()
    assert usage.metrics({})["recompilations"] == 0


def test_several_hosts_report_their_mean(features, monkeypatch):
    usage = Usage()
    usage.watch(features)
    features.waited += 1.0
    monkeypatch.setattr(hosts, "gather", lambda own: [own, ([], own[1] | {"files": 3.0})])
    assert idle(usage)["idle/files"] == 2.0
