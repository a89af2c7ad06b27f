"""Table 2 beside stored runs: which line a run belongs to, and what stands in it."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from configs import RECIPES
from configs.paravt_8b import paravt_8b
from configs.table_2 import TABLE_2
from paravt_extras import summary
from paravt_extras.table_2 import CHANGES, changes, key_of, read_run, table_2
from train.durable.run_folder import FORMAT
from train.run import resolved
from train.settings import Run, change


def config_of(run: Run) -> dict[str, Any]:
    """The run's configuration as config.json has it."""
    return json.loads(json.dumps(resolved(run)))


def stored(path: pathlib.Path, run: Run, **metrics: list[float]) -> pathlib.Path:
    """The folder of a finished run with these metrics of its RL steps."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"format": FORMAT, **config_of(run)}))
    before = [
        {
            "temperature": temperature,
            "dispatch": "parallel",
            "n": n,
            "format_reward": 0.1 * temperature + 0.1 * n,
            "calls": 2.0,
        }
        for temperature, n in ((0.0, 9), (0.7, 1), (0.7, 3))
    ]
    result = {"before": before, "after": []}
    (path / "result.json").write_text(json.dumps(result))
    steps = [{"phase": "sft", "step": 1, "wall": 0.0, "loss": 1.0}]
    for step, values in enumerate(zip(*metrics.values(), strict=True), 1):
        means = dict(zip(metrics, values, strict=True))
        steps.append({"phase": "rl", "step": step, "wall": 0.0, **means})
    (path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    return path


def metrics(f: float = 0.4) -> dict[str, list[float]]:
    """Two steps whose mean format reward is `f`."""
    return {"format_reward": [f - 0.1, f + 0.1], "calls": [0.2, 0.4]}


def lines_of(table: str) -> dict[str, list[str]]:
    lines = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("|")]
    return {line[0].strip(): [cell.strip() for cell in line[1:]] for line in lines}


# --- which line ---


@pytest.mark.parametrize("key", CHANGES)
def test_a_recipe_belongs_to_the_row_that_it_trains(key):
    recipe = "paravt_8b" if key == "paravt" else f"{key}_8b"
    assert key_of(config_of(RECIPES[recipe]())) == key


def test_a_cold_start_alone_is_the_row_of_sft():
    assert key_of(config_of(RECIPES["sft_8b"]())) == "sft"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rl.frame_budgets", (4, 16)),
        ("rl.rewards.tool_turn_cost", 0.2),
        ("rl.rewards.gamma", 0.1),
        ("rl.temperature", 1.0),
        ("protocol.pin_think", False),
    ],
)
def test_other_values_are_own_settings_that_are_named(field, value):
    config = config_of(change(paravt_8b(), "mine", {field: value}))
    assert key_of(config) == ""
    assert changes(config) == {field: list(value) if isinstance(value, tuple) else value}


@pytest.mark.parametrize("anchor", ["likelihood", "credit", "sequence"])
def test_the_row_does_not_depend_on_where_the_anchor_acts(anchor):
    assert key_of(config_of(change(paravt_8b(), "mine", {"rl.grpo.anchor": anchor}))) == "paravt"


def test_recipes_quote_the_table():
    for recipe, key in (
        ("paravt_8b", "paravt"),
        ("sft_8b", "sft"),
        ("no_penalty_8b", "no_penalty"),
    ):
        written = " ".join((RECIPES[recipe].__doc__ or "").split())
        assert f"Paper: {TABLE_2[key].text()}." in written


# --- its figures ---


def test_f_and_kappa_are_means_over_training(tmp_path):
    run = stored(tmp_path / "mine", paravt_8b(), **metrics())
    start, rl = read_run(run)
    assert (rl.f, rl.kappa) == pytest.approx((0.4, 0.3))
    # The cold start: rollouts at 0.7 before RL, weighted by their number.
    assert start.key == "sft"
    assert start.f == pytest.approx((1 * 0.17 + 3 * 0.37) / 4)
    table = table_2([start, rl])
    shown = lines_of(table)
    assert shown[""][:2] == ["f", "kappa"]
    assert shown["A: full PARA-GRPO"] == ["0.41", "0.21", "62.1", "69.4", "39.8", "65.0"]
    lines = table.splitlines()
    titles = [line.split("|")[1].strip("· ") for line in lines if line.startswith("|")]
    below = titles[titles.index("A: full PARA-GRPO") + 1]
    assert below == "mine, 8b" == titles[titles.index("A: + SFT") + 1]
    assert "- mine, 8b: 2 steps of 7 x 8 rollouts" in lines


def test_runs_of_own_settings_stand_at_the_end_with_their_changes(tmp_path):
    own = change(paravt_8b(), "own", {"rl.rewards.tool_turn_cost": 0.2})
    run = stored(tmp_path / "own", own, **metrics(0.6))
    table = table_2(read_run(run))
    assert lines_of(table)["· own, 8b, own settings"][:3] == ["0.60", "0.30", ""]
    assert table.index("own settings") > table.index("sequential dispatch")
    assert "rl.rewards.tool_turn_cost 0.2" in table


def test_the_command_prints_the_table(tmp_path, capsys):
    run = stored(tmp_path / "mine", paravt_8b(), **metrics())
    assert summary.main(["--table-2", str(run)]) == 0
    shown = lines_of(capsys.readouterr().out)
    assert shown["A: + SFT + GRPO"][:2] == ["0.13", "0.02"]
    (run / "result.json").unlink()
    assert summary.main(["--table-2", str(run)]) == 1
    assert "result.json does not exist" in capsys.readouterr().err
