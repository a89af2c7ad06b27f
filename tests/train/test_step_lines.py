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
    "speed/mfu_update": 0.3812,
}
RL = {
    "phase": "rl",
    "step": 12,
    "wall": 5000.0,
    "loss": 1e-4,
    "reward/total": 0.931,
    "accuracy": 0.612,
    "time/rollout": 0.2,
    "time/update": 0.1,
}


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        (SFT, "cold start 120/500 · loss 0.812 · 4,204 tok/s · MFU 38.1% · 31.2 s"),
        (RL, "PARA-GRPO 12/500 · reward 0.93 · accuracy 0.61 · 0.300 s"),
    ],
)
def test_a_line_has_what_its_phase_records(metrics: dict[str, Any], text: str, capsys):
    StepLines(500).add(metrics)
    assert capsys.readouterr().err == f"{text}\n"


def printed(capsys, steps: int, seconds: float) -> list[str]:
    """Return the lines of a cold start whose steps take some seconds each."""
    lines = StepLines(steps)
    for step in range(1, steps + 1):
        wall = 5000 + step * seconds
        lines.add(SFT | {"step": step, "wall": wall, "time/step": seconds})
    return capsys.readouterr().err.splitlines()


def test_short_steps_have_a_line_a_second_and_the_first_and_the_last(capsys):
    shown = [line.split()[2] for line in printed(capsys, steps=35, seconds=0.125)]
    assert shown == ["1/35", "9/35", "17/35", "25/35", "33/35", "35/35"]


def test_long_steps_have_a_line_each_with_the_time_left(capsys):
    left = [line.rpartition(" · ")[2] for line in printed(capsys, steps=4, seconds=30.0)]
    assert left == ["30.0 s", "01:00 left", "00:30 left", "30.0 s"]
