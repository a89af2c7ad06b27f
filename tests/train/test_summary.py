"""The table of several runs."""

from __future__ import annotations

import itertools
import json

import pytest

from train import summary


def result_with(accuracy: float) -> dict:
    """A result whose parallel episodes have `accuracy` * K; greedy rows must not be counted."""

    def row(k: int, dispatch: str, temperature: float) -> dict:
        value = accuracy * k if dispatch == "parallel" else 0.0
        return {
            "k": k,
            "dispatch": dispatch,
            "temperature": temperature,
            "accuracy": value if temperature > 0 else 99.0,
            "format": 1.0,
            "calls": float(k),
            "turns": 2.0,
            "n": 4,
        }

    settings = itertools.product((4, 8), ("parallel", "sequential", "none"), (0.7, 0.0))
    rows = [row(*setting) for setting in settings]
    return {
        "before": rows,
        "after": rows,
        "token_mismatches": 0,
        "logprob_gap": 1e-6,
        "recompilations_after_warmup": 0,
        "seconds": 60.0,
    }


def test_figures_average_over_budgets_and_pick_the_smallest():
    found = summary.figures(result_with(0.1))
    assert found["accuracy after"] == pytest.approx(0.6)  # mean of 0.4 and 0.8
    assert found["accuracy, smallest K"] == pytest.approx(0.4)
    assert found["... without tools"] == 0
    assert found["kappa, smallest K"] == 4
    assert found["minutes"] == 1


def test_the_command_prints_means_over_runs(tmp_path, capsys):
    for name, accuracy in (("a", 0.1), ("b", 0.2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(json.dumps(result_with(accuracy)))
    assert summary.main([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["| | a | b | mean ± std |", "|---|---|---|---|"]
    assert "| accuracy after | 0.60 | 1.20 | 0.90 ± 0.42 |" in lines
    assert "| token_mismatches | 0 | 0 | at most 0 |" in lines


def test_the_command_needs_folders_of_finished_runs(tmp_path, capsys):
    assert summary.main([str(tmp_path)]) == 1
    assert "result.json does not exist" in capsys.readouterr().err
    assert summary.main([]) == 2
