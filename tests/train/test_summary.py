"""The table of several runs."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from paravt_extras import summary
from paravt_extras.summary import SummaryLine
from paravt_jax.data.stored import write_checked_json
from train.durable.run_folder import FORMAT

Result = dict[str, Any]


def result_with(accuracy: float) -> Result:
    """A result: parallel episodes have `accuracy` * K when sampled, and 10 times that greedy."""

    def figures_of(k: int, dispatch: str, temperature: float) -> Result:
        value = accuracy * k if dispatch == "parallel" else 0.0
        return {
            "k": k,
            "dispatch": dispatch,
            "temperature": temperature,
            "accuracy": value if temperature > 0 else 10 * value,
            "compliance": 1.0,
            "calls": float(k),
            "turns": 2.0,
            "n": 4,
            "groups": {"hidden": {"n": 12 - k, "calls": float(k), "parallel": None}},
        }

    settings = itertools.product((4, 8), ("parallel", "none"), (0.7, 0.0))
    figures = [figures_of(*setting) for setting in settings]
    return {
        "before": figures,
        "after": figures,
        "token_mismatches": 0,
        "logprob_gap": 1e-6,
        "recompilations_after_warmup": 0,
        "seconds": 60.0,
    }


@pytest.mark.parametrize(
    ("line", "value"),
    [
        (SummaryLine("", "after"), 6.0),  # mean of 4 and 8
        (SummaryLine("", "after", sampled=True), 0.6),
        (SummaryLine("", "after", sampled=True, k="smallest"), 0.4),
        (SummaryLine("", "after", sampled=True, k="largest"), 0.8),
        (SummaryLine("", "after", dispatch="none"), 0.0),
        (SummaryLine("", "after", "calls", "hidden"), (8 * 4 + 4 * 8) / 12),
        (SummaryLine("", "after", "parallel", "hidden"), None),
        (SummaryLine("", "after", "calls", "mcq"), None),
        (SummaryLine("", "after", dispatch="sequential"), None),
    ],
)
def test_a_line_averages_over_the_rows_and_questions_that_it_names(line, value):
    assert line.value(result_with(0.1)) == (None if value is None else pytest.approx(value))


def test_the_command_prints_means_over_runs(tmp_path, capsys):
    for name, accuracy in (("a", 0.1), ("b", 0.2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(json.dumps(result_with(accuracy)))
        write_checked_json(tmp_path / name / "config.json", {"format": FORMAT})
    assert summary.main([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    out = capsys.readouterr().out
    figures = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in out.splitlines()]
    cells = {name: values for name, *values in figures}
    assert cells[""] == ["a", "b", "mean [lowest, highest]"]
    assert cells["accuracy after, sampled"] == ["0.6", "1.2", "0.9 [0.6, 1.2]"]
    assert cells["minutes"] == ["1", "1", "1 [1, 1]"]
    assert cells["token mismatches"] == ["0", "0", "0 [0, 0]"]
    assert "one call per turn" not in out, "no run has it"


def test_a_run_of_an_older_version_is_named(tmp_path, capsys):
    (tmp_path / "result.json").write_text(json.dumps(result_with(0.1)))
    write_checked_json(tmp_path / "config.json", {"format": 5})
    assert summary.main([str(tmp_path)]) == 1
    assert "has format 5" in capsys.readouterr().err
