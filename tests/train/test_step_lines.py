"""The lines that a phase prints: one per step, at most one a second."""

from __future__ import annotations

from typing import Any

import pytest

from train.durable.metrics import StepLines

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
    ("metrics", "text"),
    [
        (SFT, "cold start 120/500 · loss 0.812 · 4,204 tok/s · MFU 38.1% · 31.2 s"),
        (
            RL,
            "PARA-GRPO 12/500 · reward 0.93 · accuracy 0.61 · compliance 0.84 · calls 1.90 · "
            "1,530 tok/s · MFU 3.9% · 118.3 s",
        ),
        (
            SFT | {"loss": 3e-5, "time/step": 0.012},
            "cold start 120/500 · loss 3.00e-05 · 4,204 tok/s · MFU 38.1% · 0.012 s",
        ),
    ],
)
def test_a_line_has_what_its_phase_records(metrics: dict[str, Any], text: str, capsys):
    StepLines(500).add(metrics)
    assert capsys.readouterr().err == f"{text}\n"


class Printed:
    """The lines of a cold start whose steps take some seconds each."""

    def __init__(self, capsys, steps: int, seconds: float):
        self.seconds = seconds
        self.capsys = capsys
        self.lines = StepLines(steps)

    def add(self, *steps: int) -> list[str]:
        for step in steps:
            wall = 5000 + step * self.seconds
            self.lines.add(SFT | {"step": step, "wall": wall, "time/step": self.seconds})
        return self.capsys.readouterr().err.splitlines()


def test_short_steps_have_a_line_a_second_and_the_first_and_the_last(capsys):
    printed = Printed(capsys, steps=35, seconds=0.125).add(*range(1, 36))
    assert [line.split()[2] for line in printed] == [
        "1/35",
        "9/35",
        "17/35",
        "25/35",
        "33/35",
        "35/35",
    ]


def test_long_steps_have_a_line_each_with_the_time_left(capsys):
    printed = Printed(capsys, steps=4, seconds=30.0).add(1, 2, 3, 4)
    left = [line.rpartition(" · ")[2] for line in printed]
    assert left == [
        "30.0 s",
        "1 min 00 s left",
        "30 s left",
        "30.0 s",
    ]
