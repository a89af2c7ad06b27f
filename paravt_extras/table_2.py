"""Table 2 of the paper, with f and kappa of finished runs beside it.

A run belongs to the line whose settings it has, by its resolved configuration. Other runs stand at
the end, with what they change. Benchmark scores of runs are in `rollout.evaluate --table`.
"""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from configs.ablations import ABLATIONS
from configs.paravt_8b import paravt_8b
from configs.table_2 import TABLE_2, TABLE_2_SPLITS
from paravt_extras.markdown import table, wrapped
from paravt_extras.published_scores import COLUMNS
from paravt_extras.report.result import read_result
from paravt_jax.data.stored import as_json
from train.durable.metrics import read_metrics
from train.durable.run_folder import read_config

TEMPERATURE = 0.7
"""Sampling temperature of rollouts in the paper."""

CHANGES = {key: ABLATIONS[key].changes for key in TABLE_2 if key in ABLATIONS} | {"paravt": {}}
"""What each trained line of the table changes of the full recipe, by its key in `TABLE_2`."""

FIELDS = (
    *sorted({field for changed in CHANGES.values() for field in changed}),
    "rl.rewards.format_weight",
    "rl.rewards.tool_turn_cost",
    "rl.temperature",
)
"""The settings that distinguish lines."""

NOTES = (
    "- Lines with a dot in front are runs of this project, the others the paper's.",
    "- f: mean format reward (R_fmt as published) of training rollouts. kappa: executed calls per "
    "rollout. Both are means over all steps of RL; for a cold start, over its rollouts on held-out "
    "questions at temperature 0.7.",
)


@dataclasses.dataclass(frozen=True)
class RunLine:
    """A line of this project: a run, or its cold start."""

    label: str
    key: str
    """Line of the table to which the figures belong; "" for own settings."""
    f: float | None
    """Mean of R_fmt as published."""
    kappa: float | None
    """Mean number of executed calls per rollout."""
    note: str = ""

    def cells(self) -> list[str]:
        """Return the figures as the table shows them."""
        return ["" if value is None else f"{value:.2f}" for value in (self.f, self.kappa)]


def changes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a run changes of full PARA-GRPO, among the settings that distinguish lines."""
    full = as_json(dataclasses.asdict(paravt_8b()), "paravt_8b")
    own = {field: _value(config, field) for field in FIELDS}
    return {field: value for field, value in own.items() if value != _value(full, field)}


def _value(config: Mapping[str, Any], field: str) -> Any:
    value: Any = config
    for name in field.split("."):
        value = value[name]
    # Where the anchor acts makes no line of its own.
    return "anchored" if field == "rl.grpo.anchor" and value != "none" else value


def key_of(config: Mapping[str, Any]) -> str:
    """Return the line of table 2 that a run belongs to; "" if it has settings of its own."""
    if config["rl"] is None:
        return "sft" if config["sft"] else ""
    own = changes(config)
    return next((key for key, changed in CHANGES.items() if as_json(dict(changed), key) == own), "")


def read_finished(folder: pathlib.Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the configuration and the result of a finished run.

    Raises:
        FileNotFoundError: the run is not finished.
        RunFolderError: another version of this code made the run.
    """
    if not (folder / "result.json").exists():
        raise FileNotFoundError(
            f"{folder / 'result.json'} does not exist; give the folders of finished runs"
        )
    return read_config(folder, "RUN"), read_result(folder)


def read_run(folder: pathlib.Path) -> list[RunLine]:
    """Return the lines of a finished run: its cold start, if measured, and its RL.

    Raises an error as `read_finished` does.
    """
    config, result = read_finished(folder)
    rl = config["rl"]
    label = f"{folder.name}, {config['model']['size']}"
    # Sampled rollouts on held-out questions.
    cold_start = [
        record
        for record in result.get("before", [])
        if record["temperature"] == TEMPERATURE and record["dispatch"] == "parallel"
    ]
    lines = []
    if config["sft"] and cold_start:
        counts = [record["n"] for record in cold_start]
        f, kappa = (
            statistics.fmean([record[field] for record in cold_start], counts)
            for field in ("format_reward", "calls")
        )
        lines.append(RunLine(label, "sft", f, kappa))
    if rl is None:
        return lines
    steps = [step for step in read_metrics(folder / "metrics.jsonl") if step["phase"] == "rl"]
    f, kappa = (
        statistics.mean(step[field] for step in steps) if steps else None
        for field in ("format_reward", "calls")
    )
    own = "; ".join(f"{field} {value}" for field, value in changes(config).items())
    note = f"{len(steps)} steps of {rl['prompts']} x {rl['grpo']['group_size']} rollouts; {own}"
    return [*lines, RunLine(label, key_of(config), f, kappa, note.removesuffix("; "))]


def table_2(lines: Sequence[RunLine]) -> str:
    """Format the paper's table with the lines of this project below those they belong to."""
    cells: list[list[str]] = []
    for key, setting in TABLE_2.items():
        published = RunLine(setting.title, key, setting.f, setting.kappa)
        scores = [f"{score:.1f}" for score in setting.scores.values()]
        cells.append([f"{setting.block}: {setting.title}", *published.cells(), *scores])
        cells += [[f"· {line.label}", *line.cells()] for line in lines if line.key == key]
    cells += [[f"· {line.label}, own settings", *line.cells()] for line in lines if not line.key]
    headings = ["", "f", "kappa", *(COLUMNS[split] for split in TABLE_2_SPLITS)]
    notes = [*NOTES, *(f"- {line.label}: {line.note}" for line in lines if line.note)]
    return "\n".join([table(headings, cells), "", *map(wrapped, notes)])
