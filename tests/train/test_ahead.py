"""The parts of a run after a phase, with the times that earlier parts tell."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest

from configs.paravt_tiny import paravt_tiny
from train.durable.time_left import Part
from train.phases.ahead import parts_after

RUN = paravt_tiny()


@pytest.fixture
def folder(tmp_path) -> pathlib.Path:
    """The files of a run after the evaluation before RL."""
    lines = [
        {"phase": "sft", "step": step, "wall": 1000.0 + 2 * step, "loss": 1.0}
        for step in range(1, 11)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "evaluation").mkdir()
    settings = [("parallel", 0.7), ("parallel", 0.0), ("none", 0.7), ("none", 0.0)]
    rows = [{"dispatch": dispatch, "temperature": t} for dispatch, t in settings]
    for k in (4, 16):
        content = {"rows": rows, "seconds": [40.0, 20.0, 4.0, 2.0], "episodes": []}
        (tmp_path / "evaluation" / f"before-{k}.json").write_text(json.dumps(content))
    content = {
        "rows": [{"dispatch": "parallel", "temperature": 0.3}],
        "seconds": [18.0],
        "episodes": [],
    }
    (tmp_path / "evaluation" / "format_before-4.json").write_text(json.dumps(content))
    return tmp_path


def test_at_first_only_the_order_is_known(tmp_path):
    parts = parts_after("align", RUN, tmp_path, evaluates=True)
    names = ["sft", "before", "control", "evaluation of the control", "rl", "after"]
    assert parts == [Part(name, None) for name in names]


def test_the_cold_start_tells_the_control_and_one_evaluation_the_other(folder):
    assert RUN.rl is not None
    assert parts_after("control", RUN, folder, evaluates=True) == [
        Part("evaluation of the control", 40.0),
        Part("rl", None),
        Part("after", 150.0),
    ]
    assert parts_after("sft", RUN, folder, evaluates=True)[1] == Part("control", 2 * RUN.rl.steps)
    assert parts_after("rl", RUN, folder, evaluates=True) == [Part("after", 150.0)]


def test_an_evaluation_with_a_part_of_unknown_length_has_no_time(folder):
    (folder / "evaluation" / "format_before-4.json").unlink()
    assert parts_after("rl", RUN, folder, evaluates=True) == [Part("after", None)]


def test_a_run_without_held_out_questions_has_no_evaluations(folder):
    assert parts_after("sft", RUN, folder, evaluates=False) == [Part("rl", None)]
    alone = dataclasses.replace(
        RUN, rl=None, evaluation=dataclasses.replace(RUN.evaluation, curve=False)
    )
    assert parts_after("sft", alone, folder, evaluates=False) == []
    assert [part.name for part in parts_after("align", alone, folder, evaluates=True)] == [
        "sft",
        "before",
        "after",
    ]


def test_evaluations_of_older_runs_have_no_times(folder):
    for file in (folder / "evaluation").iterdir():
        content = json.loads(file.read_text())
        del content["seconds"]
        file.write_text(json.dumps(content))
    assert parts_after("rl", RUN, folder, evaluates=True) == [Part("after", None)]
