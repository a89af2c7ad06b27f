"""Table 2 of the paper beside finished runs: f and kappa over training, and benchmark scores.

A run belongs to the row whose settings it has, by its resolved configuration. Other runs are listed
as own settings, with what they change.
"""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from configs.ablations import ABLATIONS
from configs.paravt_8b import paravt_8b
from configs.table_2 import TABLE_2, TABLE_2_SPLITS, Setting
from paravt_extras.markdown import table as markdown
from paravt_extras.markdown import wrapped
from paravt_extras.published_scores import COLUMNS
from paravt_extras.report.claim import weighted_mean
from paravt_extras.report.result import read_result
from paravt_jax.data.stored_settings import as_json
from rollout.evaluation.folder import read_json
from rollout.evaluation.summary import score_of
from train.durable.metrics import read_metrics
from train.durable.run_directory import read_config

Row = dict[str, Any]

BLOCKS = {
    "A": "A: stages, and the two parts of PARA-GRPO",
    "B": "B: terms of the reward",
    "C": "C: dispatch of calls, same weights",
}
TEMPERATURE = 0.7
"""Sampling temperature of rollouts in the paper."""

CHANGES = {key: row.changes for key, row in ABLATIONS.items() if key in TABLE_2} | {"paravt": {}}
"""What each trained row of the table changes of the full recipe, by its key in `TABLE_2`."""

FIELDS = (
    *sorted({field for changed in CHANGES.values() for field in changed}),
    "rl.rewards.format_weight",
    "rl.rewards.tool_turn_cost",
    "rl.temperature",
)
"""The settings that distinguish rows."""


@dataclasses.dataclass(frozen=True)
class Figures:
    """A line of this project: a run, or its cold start."""

    label: str
    key: str
    """Row of the table to which the line belongs; "" for own settings."""
    f: float | None
    """Mean of R_fmt as published."""
    kappa: float | None
    """Mean number of executed calls per rollout."""
    compliance: float | None
    """Share of rollouts that keep the whole format."""
    scores: Mapping[str, float]
    """In per cent, by split."""
    note: str = ""


def changes(config: Mapping[str, Any]) -> Row:
    """Return what a run with RL changes of full PARA-GRPO, among the settings that distinguish
    rows."""
    full = as_json(dataclasses.asdict(paravt_8b()), "paravt_8b")
    found = {field: _value(config, field) for field in FIELDS}
    return {field: value for field, value in found.items() if value != _value(full, field)}


def _value(config: Mapping[str, Any], field: str) -> Any:
    value: Any = config
    for part in field.split("."):
        value = value[part]
    # Where the anchor acts makes no row of its own.
    return "anchored" if field == "rl.grpo.anchor" and value != "none" else value


def key_of(config: Mapping[str, Any]) -> str:
    """Return the row of table 2 that a run belongs to; "" if it has settings of its own."""
    if config["rl"] is None:
        return "sft" if config["sft"] else ""
    own = changes(config)
    return next((key for key, changed in CHANGES.items() if as_json(dict(changed), key) == own), "")


# --- runs ---


def read_run(folder: pathlib.Path, evaluations: Sequence[pathlib.Path]) -> list[Figures]:
    """Return the lines of a finished run: one for its cold start, if measured, and one for its RL.

    Args:
        folder: the run's directory.
        evaluations: folders of finished evaluations. Those of the run's weights fill its scores.

    Raises:
        FileNotFoundError: the run is not finished.
        RunDirectoryError: another version of this code made the run.
    """
    result_file = folder / "result.json"
    if not result_file.exists():
        raise FileNotFoundError(f"{result_file} does not exist; give the folders of finished runs")
    config = read_config(folder, "--table-2")
    result = read_result(folder)
    scores = _scores(folder, evaluations)
    name = f"{folder.name}, {config['model']['size']}"
    started = _cold_start(name, result, {} if config["rl"] else scores["parallel"])
    lines = [started] if config["sft"] and started else []
    if config["rl"] is None:
        return lines
    steps = [row for row in read_metrics(folder / "metrics.jsonl") if row["phase"] == "rl"]
    rl = config["rl"]
    own = "; ".join(f"{field} {value}" for field, value in changes(config).items())
    key = key_of(config)
    note = f"{len(steps)} steps of {rl['prompts']} x {rl['grpo']['group_size']} rollouts"
    lines.append(
        Figures(
            name,
            key,
            *(_mean(steps, field) for field in ("format_reward", "calls", "compliance")),
            scores=scores["parallel"],
            note=note if key else f"{note}; {own}",
        )
    )
    if scores["sequential"]:
        lines.append(Figures(name, "sequential", None, None, None, scores["sequential"]))
    return lines


def _mean(rows: Sequence[Row], field: str) -> float | None:
    return statistics.mean(row[field] for row in rows) if rows else None


def _cold_start(name: str, result: Row, scores: Mapping[str, float]) -> Figures | None:
    """Return the sampled rollouts on held-out questions before RL; None if none were played."""
    rows = _sampled(result.get("before", []))
    if not rows:
        return None
    total = sum(row["n"] for row in rows)
    figures = (
        weighted_mean([(row[field], row["n"]) for row in rows])
        for field in ("format_reward", "calls", "compliance")
    )
    note = f"in the row of SFT, {total} rollouts before RL on held-out questions"
    return Figures(name, "sft", *figures, scores=scores, note=note)


def _sampled(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of parallel episodes at the paper's temperature."""
    return [
        row for row in rows if row["temperature"] == TEMPERATURE and row["dispatch"] == "parallel"
    ]


def _scores(
    folder: pathlib.Path, evaluations: Sequence[pathlib.Path]
) -> dict[str, dict[str, float]]:
    """Return the scores of a run's final weights in per cent, by dispatch and split.

    Raises:
        ValueError: two evaluations are of the same weights, dispatch and split.
    """
    found: dict[str, dict[str, float]] = {"parallel": {}, "sequential": {}}
    for evaluation in evaluations:
        summary = read_json(evaluation / "summary.json")
        model = pathlib.Path(summary["config"]["settings"]["model"]).resolve()
        dispatch = summary["config"]["identity"]["dispatch"]
        score = score_of(summary)
        if model == (folder / "model").resolve() and dispatch in found and score is not None:
            split = summary["benchmark"]
            if split in found[dispatch]:
                raise ValueError(
                    f"--evaluations {evaluation}: {split} of {folder}, dispatch {dispatch}, is "
                    "given twice; name one folder per split and dispatch"
                )
            found[dispatch][split] = 100 * score
    return found


# --- as text ---


def text(lines: Sequence[Figures]) -> str:
    """Format the paper's table with the lines of this project below the rows they belong to."""
    rows: list[list[str]] = []
    block = ""
    for key, setting in TABLE_2.items():
        if setting.block != block:
            block = setting.block
            rows.append([BLOCKS[block]])
        rows.append(_paper_row(setting))
        rows += [_row(line) for line in lines if line.key == key]
    own = [line for line in lines if not line.key]
    if own:
        rows += [["own settings"], *map(_row, own)]
    headings = ["", "f", "kappa", "compliance", *(COLUMNS[split] for split in TABLE_2_SPLITS)]
    notes = [
        "- Rows with a dot in front are runs of this project, the others the paper's.",
        "- f: mean format reward (R_fmt as published) of training rollouts. kappa: executed calls "
        "per rollout. Both are means over all steps of RL; for a cold start, over its rollouts at "
        "temperature 0.7.",
        "- compliance: share of those rollouts in which every turn parses and the last one has an "
        "answer block. The paper has no such figure.",
    ]
    notes += [f"- {line.label}: {line.note}" for line in lines if line.note]
    return "\n".join([markdown(headings, rows), "", *map(wrapped, notes)])


def _paper_row(setting: Setting) -> list[str]:
    scores = [f"{setting.scores[split]:.1f}" for split in TABLE_2_SPLITS]
    return [setting.title, _two_digits(setting.f), _two_digits(setting.kappa), "", *scores]


def _row(line: Figures) -> list[str]:
    figures = map(_two_digits, (line.f, line.kappa, line.compliance))
    scores = (line.scores.get(split) for split in TABLE_2_SPLITS)
    return [f"· {line.label}", *figures, *("" if s is None else f"{s:.1f}" for s in scores)]


def _two_digits(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
