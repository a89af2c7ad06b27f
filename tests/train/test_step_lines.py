"""The lines that a phase prints: one per step, at most one a second, and one per warning."""

from __future__ import annotations

import pathlib
import shutil
from types import SimpleNamespace
from typing import Any

import pytest

from train.durable.step_lines import StepLines, rows_line, step_line

SFT = {
    "phase": "sft",
    "step": 120,
    "wall": 5000.0,
    "loss": 0.8119,
    "tokens": 8000.0,
    "time/step": 31.24,
    "speed/tokens": 4204.3,
    "speed/mfu": 0.3812,
}
RL = {
    "phase": "rl",
    "step": 12,
    "wall": 5000.0,
    "loss": 1e-4,
    "reward/total": 0.931,
    "accuracy": 0.612,
    "compliance": 0.84,
    "calls": 1.9,
    "time/rollout": 100.0,
    "time/update": 18.3,
    "speed/tokens": 1530.0,
    "speed/mfu": 0.0391,
}


@pytest.mark.parametrize(
    ("row", "line"),
    [
        (SFT, "cold start 120/500 · loss 0.812 · 31.2 s · 4,204 tok/s · MFU 38.1 % · 3 h left"),
        (
            RL,
            "PARA-GRPO 12/500 · reward 0.93 · accuracy 0.61 · compliance 0.84 · calls 1.90 · "
            "118 s · 1,530 tok/s · MFU 3.9 % · 3 h left",
        ),
        (
            {"phase": "align", "step": 1, "loss": 4.5, "accuracy": 0.0, "time/step": 0.147},
            "alignment 1/500 · loss 4.50 · accuracy 0.00 · 0.15 s · 3 h left",
        ),
        (
            {"phase": "control", "step": 3, "loss": 2.0, "time/step": 2.0, "speed/mfu": None},
            "control 3/500 · loss 2.00 · 2.00 s · 3 h left",
        ),
    ],
)
def test_a_line_has_what_its_phase_records(row: dict[str, Any], line: str):
    assert step_line(row, 500, "3 h left") == line
    assert step_line(row, 500, "") == line.removesuffix(" · 3 h left")


class Printed:
    """The lines of a cold start whose steps take some seconds each."""

    def __init__(self, folder: pathlib.Path, capsys, steps: int, seconds: float, first: int = 1):
        self.now = 0.0
        self.seconds = seconds
        self.capsys = capsys
        earlier = [self.row(step) for step in range(1, first)]
        self.lines = StepLines("sft", steps, earlier, folder, lambda: self.now)

    def row(self, step: int) -> dict[str, Any]:
        return SFT | {"step": step, "wall": step * self.seconds, "time/step": self.seconds}

    def add(self, *steps: int) -> list[str]:
        for step in steps:
            self.now += self.seconds
            self.lines.add(self.row(step))
        return self.capsys.readouterr().err.splitlines()


def test_short_steps_have_a_line_a_second_and_the_first_and_the_last(tmp_path, capsys):
    printed = Printed(tmp_path, capsys, steps=35, seconds=0.125).add(*range(1, 36))
    assert [line.split()[2] for line in printed] == [
        "1/35",
        "9/35",
        "17/35",
        "25/35",
        "33/35",
        "35/35",
    ]


def test_long_steps_have_a_line_each_with_the_time_left(tmp_path, capsys):
    printed = Printed(tmp_path, capsys, steps=4, seconds=30.0).add(1, 2, 3, 4)
    left = [line.rpartition(" · ")[2] for line in printed]
    assert left == [
        "MFU 38.1 %",
        "1 min 00 s left",
        "30 s left",
        "MFU 38.1 %",
    ]


@pytest.mark.parametrize("first", [1, 6])
def test_a_phase_says_where_it_begins(first, tmp_path, capsys):
    Printed(tmp_path, capsys, steps=8, seconds=30.0, first=first).lines.begin()
    assert capsys.readouterr().err.startswith(f"cold start {first}/8 is next")


def test_the_sizes_of_packed_rows_have_a_line():
    line = "PARA-GRPO: rows of 3,328, 1,664 and 896 tokens, compiled in 1 min 00 s"
    assert rows_line("rl", (3328, 1664, 896), 60.2) == line
    assert rows_line("rl", (896,), 5.0) == "PARA-GRPO: rows of 896 tokens, compiled in 5 s"


def test_a_warning_has_a_line_even_between_the_lines_of_steps(tmp_path, capsys):
    printed = Printed(tmp_path, capsys, steps=100, seconds=0.125)
    printed.add(*range(1, 20))
    slow = printed.row(20) | {"wall": printed.row(19)["wall"] + 60, "time/step": 60.0}
    printed.lines.add(slow)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: step 20 took 1 min 00 s")


def test_a_full_disk_is_told_once_until_there_was_room(tmp_path, capsys, monkeypatch):
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "data").write_bytes(bytes(100))
    free = 50
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    printed = Printed(tmp_path, capsys, steps=100, seconds=30.0)

    def told(*steps: int) -> list[str]:
        return [line for line in printed.add(*steps) if line.startswith("warning")]

    [line] = told(2, 3)
    assert "will not fit" in line
    free = 200
    assert told(4) == []
    free = 50
    assert len(told(5, 6)) == 1
    # After the last save of a phase there is no next one.
    assert told(99) == []
    free = 200
    told(99)
    free = 50
    assert told(100) == []
