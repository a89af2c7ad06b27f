"""What plays the questions."""

from __future__ import annotations

import contextlib

import pytest

from paravt_jax.remote.judge import RemoteJudge
from rollout.evaluation import players
from rollout.evaluation.benchmarks import VideoFolder
from rollout.evaluation.packs import own_pack
from rollout.evaluation.settings import BenchmarkSettings


@pytest.mark.parametrize(("replicas", "most"), [(1, 16), (3, 5), (99, 1)])
def test_replicas_share_the_requests_that_a_judge_may_get_at_once(
    replicas, most, tmp_path, monkeypatch
):
    opened = []

    class Judge(RemoteJudge):
        def __init__(self, settings):
            opened.append(settings)
            super().__init__(settings)

    monkeypatch.setattr(players, "RemoteJudge", Judge)
    settings = BenchmarkSettings(
        endpoint="http://127.0.0.1:9/v1",
        endpoint_model="m",
        open_ended="judge",
        judge="http://127.0.0.1:9/v1",
        judge_model="j",
    )
    with contextlib.ExitStack() as stack:
        setup = players.Setup(settings, own_pack(), VideoFolder(tmp_path), None)
        reader = stack.enter_context(players.open_reader(setup, replicas))
        players.load_player(setup, reader, False, stack, replicas=replicas)
    assert [judge.concurrency for judge in opened] == [most]
