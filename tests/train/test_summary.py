from __future__ import annotations

import json

from train import summary


def _result(accuracy: float) -> dict:
    def row(k: int, dispatch: str, temperature: float, value: float) -> dict:
        return {
            "k": k,
            "dispatch": dispatch,
            "temperature": temperature,
            "accuracy": value,
            "format": 1.0,
            "calls": float(k),
            "turns": 2.0,
            "n": 4,
        }

    rows = [
        row(k, d, t, accuracy * k * (d == "parallel"))
        for k in (4, 8)
        for d in ("parallel", "sequential", "none")
        for t in (0.7, 0.0)
    ]
    rows[1]["accuracy"] = 99.0  # greedy: not in the table
    return {
        "before": rows,
        "after": rows,
        "token_mismatches": 0,
        "logprob_gap": 1e-6,
        "recompilations_after_warmup": 0,
        "seconds": 60.0,
    }


def test_figures_average_over_budgets_and_pick_the_smallest():
    found = summary.figures(_result(0.1))
    assert abs(found["accuracy after"] - 0.6) < 1e-9  # of 0.4 and 0.8
    assert abs(found["accuracy, smallest K"] - 0.4) < 1e-9 and found["... without tools"] == 0
    assert found["kappa, smallest K"] == 4 and found["minutes"] == 1


def test_the_command_prints_means_and_refuses_what_is_no_run(tmp_path, capsys):
    for n, accuracy in enumerate((0.1, 0.2)):
        (tmp_path / str(n)).mkdir()
        (tmp_path / str(n) / "result.json").write_text(json.dumps(_result(accuracy)))
    assert summary.main([str(tmp_path / "0"), str(tmp_path / "1")]) == 0
    assert "| accuracy after | 0.60 | 1.20 | 0.90 ± 0.42 |" in capsys.readouterr().out
    assert summary.main([str(tmp_path / "2")]) == 1 and "does not exist" in capsys.readouterr().err
    assert summary.main([]) == 2
