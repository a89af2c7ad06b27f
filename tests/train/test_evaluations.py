"""The judge's counts in the results of an evaluation. A script plays, a local server judges."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

import train.run
from models.sharding import Lowering
from paravt_jax.method.accuracy import Rules
from paravt_jax.method.judge import JudgeSettings
from paravt_jax.method.records import QuestionKind
from paravt_jax.method.rewards import RewardSettings
from rollout.engine.engine import Engine
from tests.paravt_jax.judge_server import Reply, says, serving
from train.actor import EngineActor
from train.learn.weight_sync import WeightSync

# An error that is not retried.
REFUSED = Reply(status=401)


@pytest.fixture
def evaluated(road, small, monkeypatch):
    """`f(folder, rewards) -> result` of a run with both evaluations and no training.

    Questions are open-ended.
    """
    monkeypatch.setenv("NO_PROXY", "*")
    heldout = tuple(
        dataclasses.replace(q, kind=QuestionKind.OPEN_ENDED, answer="B or C", options=())
        for q in road.data.heldout
    )

    class Script(small.Script, Engine):
        """Stands for an engine whose weights never change."""

        version = 0
        plans = ("guess\n</think><answer>B</answer>",)

        def __init__(self):
            small.Script.__init__(self, road)

        def forget(self) -> None:
            """Nothing is cached."""

        def lowerings(self) -> Iterator[Lowering]:
            """Nothing is compiled."""
            return iter(())

    class NoSync(WeightSync):
        def __init__(self):
            """Compiles no program."""

        def load(self, sampler, weights, version, features):
            sampler.load(weights, version)
            return 0

    def scripted(run, parts, environment, weights, judge=None) -> EngineActor:
        scores = judge or Rules()
        return EngineActor(Script(), road.environment, scores, NoSync())

    def untrained(parts, weights, batches, saver) -> Any:
        """The cold start without a step."""
        return weights

    def evaluate(folder: pathlib.Path, rewards: RewardSettings) -> dict[str, Any]:
        run = dataclasses.replace(
            road.run,
            run_dir=str(folder),
            rl=dataclasses.replace(road.run.rl, rewards=rewards),
        )
        train.run.execute(run)
        return json.loads((folder / "result.json").read_text())

    monkeypatch.setattr(
        train.run, "prepare", lambda *_: dataclasses.replace(road.data, heldout=heldout)
    )
    monkeypatch.setattr(train.run, "open_actor", scripted)
    monkeypatch.setattr(train.run, "align", lambda *_: None)
    monkeypatch.setattr(train.run, "train_sft", untrained)
    monkeypatch.setattr(train.run, "train_rl", lambda learner, *_: learner.initial.weights)
    monkeypatch.setattr(train.run, "export_run", lambda *_: None)
    return evaluate


def judged_by(endpoint: str) -> RewardSettings:
    judge = JudgeSettings(endpoint, model="judge-1", key_variable="", attempts=1)
    return RewardSettings(format_cap=False, judge=judge)


def counts_in(folder: pathlib.Path) -> dict[str, dict[str, int]]:
    """The judge's counts in each file of the evaluations."""
    return {
        file.stem: json.loads(file.read_text())["judge"]
        for file in (folder / "evaluation").glob("*.json")
    }


@pytest.mark.slow
def test_without_the_judge_answers_are_scored_by_f1_and_counted(evaluated, tmp_path):
    f1 = evaluated(tmp_path / "f1", RewardSettings(format_cap=False))
    assert "judge" not in f1 and all(
        "judge" not in json.loads(f.read_text())
        for f in (tmp_path / "f1" / "evaluation").glob("*.json")
    )
    with serving(lambda *_: REFUSED) as server:
        result = evaluated(tmp_path / "judged", judged_by(server.endpoint))
    assert (result["before"], result["after"]) == (f1["before"], f1["after"]), "it is scored by F1"
    assert 0 < max(row["accuracy"] for row in result["after"]) < 1
    asked = len(server.received)
    told = {name: count for name, count in result["judge"].items() if count}
    assert asked > 0 and told == {"asked": asked, "fell_back": asked}
    assert result["judge"]["answered"] == 0, "zero counts are written too"


@pytest.mark.slow
def test_counts_cover_every_setting_and_survive_a_restart(evaluated, tmp_path):
    with serving(lambda number, _: REFUSED if number % 3 else says("0.5")) as server:
        result = evaluated(tmp_path, judged_by(server.endpoint))
        files, asked = counts_in(tmp_path), len(server.received)
        assert set(files) == {f"{name}-{k}" for name in ("before", "after") for k in (4, 16)}
        assert all(
            counts["asked"] == counts["answered"] + counts["fell_back"] > 0
            for counts in files.values()
        )
        assert result["judge"] == {
            name: sum(counts[name] for counts in files.values()) for name in files["after-4"]
        }
        assert (result["judge"]["asked"], result["judge"]["answered"]) == (asked, -(-asked // 3)), (
            "every third request, beginning with the first"
        )

        # As if the run had been killed before it wrote this file.
        (tmp_path / "evaluation" / "after-16.json").unlink()
        again = evaluated(tmp_path, judged_by(server.endpoint))
        assert len(server.received) == asked + files["after-16"]["asked"], (
            "other files are not judged again"
        )
        assert again["judge"]["asked"] == asked, "each answer is counted once"
