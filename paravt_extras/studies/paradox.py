"""The paper's paradox in miniature: trains four settings from one cold start and compares them.

    python -m paravt_extras.studies.paradox
    python -m paravt_extras.studies.paradox --prior weak

docs/paradox.md explains the figures.
"""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import tyro
from matplotlib.figure import Figure

from configs.paradox import ARMS, WEAK_PRIOR, paradox_tiny
from paravt_extras.report.chart import moving_mean
from paravt_extras.report.claim import (
    KINDS,
    budgets,
    gaps,
    tag_probabilities,
    weighted_mean,
)
from paravt_extras.report.result import read_result
from paravt_extras.studies import study
from paravt_extras.studies.study import STYLES, Figures, rl_steps
from paravt_jax.method.rewards import RewardSettings
from train.settings import Run, change

COLD_START = "cold start"
MEASURES = {"accuracy": "accuracy", "compliance": "compliance", "calls": "κ"}
# The steps at the end of training over which its rollouts are averaged.
LAST_STEPS = 5


@dataclasses.dataclass(frozen=True)
class Paradox(study.Command):
    """Trains plain GRPO, GRPO with either remedy, and with both, from one cold start."""

    run_dir: str = "runs/paradox"
    """Folder of the cold start, and of a folder per choice of rewards and prior."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of each setting."""
    rewards: Literal["outcome", "published"] = "outcome"
    """Rewards beside the anchor. outcome: right answers only. published: format and calls too."""
    prior: Literal["strong", "weak"] = "strong"
    """Calls in the cold start. weak: in at most 10 %, without leaks; trains two settings only."""

    @property
    def folder(self) -> pathlib.Path:
        """The folder of the runs, the table and the figure."""
        suffix = "-weak" if self.prior == "weak" else ""
        return pathlib.Path(self.run_dir) / f"{self.rewards}{suffix}"


def runs_of(command: Paradox) -> dict[str, list[Run]]:
    """Return the runs of each setting: one cold start, and one run per setting and seed."""
    run = paradox_tiny()
    weak = command.prior == "weak"
    changes: dict[str, Any] = dict(WEAK_PRIOR) if weak else {}
    if command.rewards == "published":
        changes["rl.rewards"] = RewardSettings(format_cap=False)
    base = change(run, run.name, changes)
    cold_start = f"{command.run_dir}/cold-start{'-weak' if weak else ''}"
    start = dataclasses.replace(base, name="cold_start", rl=None, run_dir=cold_start)
    runs = {COLD_START: [start]}
    for arm in ("GRPO", "PARA-GRPO") if weak else ARMS:
        name = "-".join(arm.lower().replace("+", "").split())
        changed = change(base, name, {**ARMS[arm], **study.from_cold_start(start)})
        runs[arm] = [
            dataclasses.replace(changed, seed=seed, run_dir=str(command.folder / f"{name}-{seed}"))
            for seed in command.seeds
        ]
    return runs


def figures(run: Run) -> Figures:
    """Return the figures of a finished run; only those of held-out questions for a cold start."""
    result = read_result(pathlib.Path(run.run_dir))
    measured: Figures = {}
    after = result["after"]
    for k, line in by_k(after).items():
        measured |= {f"{title}, K = {k}": line[name] for name, title in MEASURES.items()}
        measured[f"tool gap of accuracy, K = {k}"] = line.get("tool_gap")
    for k, line in by_k(result["before"]).items():
        measured[f"κ before RL, K = {k}"] = line["calls"]
    for temperature in sorted({line["temperature"] for line in after}):
        hot = [
            (line["compliance"], line["n"]) for line in after if line["temperature"] == temperature
        ]
        measured[f"compliance, temperature {temperature:g}"] = weighted_mean(hot)
    steps = rl_steps(run)
    last = steps[-LAST_STEPS:]
    if steps:
        for name, title in MEASURES.items():
            measured[f"{title}, training"] = statistics.mean(step[name] for step in last)
    for k in budgets(steps):
        values = [value for step in steps for value in gaps(step, k)]
        measured[f"tool gap of the reward, training, K = {k}"] = weighted_mean(values)
    for kind, tag in KINDS.items():
        values = [value for step in last for value in tag_probabilities(step, kind)]
        if steps:
            measured[f"probability of `{tag}`, training"] = weighted_mean(values)
    return measured


def by_k(lines: Sequence[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """Return the lines of an evaluation at its first temperature, by K."""
    return {line["k"]: line for line in lines if line["temperature"] == lines[0]["temperature"]}


def draw(runs: Mapping[str, Sequence[Run]]) -> Figure:
    """Draw accuracy, compliance and κ of each setting, by step and by K after training."""
    drawing = Figure(figsize=(9.4, 7.4), layout="constrained")
    panels = drawing.subplots(len(MEASURES), 2, sharex="col", sharey="row")
    arms = {name: of_arm for name, of_arm in runs.items() if name != COLD_START}
    for (measure, title), (left, right) in zip(MEASURES.items(), panels, strict=True):
        for (name, of_arm), style in zip(arms.items(), STYLES, strict=False):
            histories = [
                [(line["step"], line[measure]) for line in rl_steps(run)] for run in of_arm
            ]
            study.band(left, [_smooth(points) for points in histories], style, name)
            study.band(right, [_held_out(run, measure) for run in of_arm], style, name)
        (start,) = runs[COLD_START]
        right.plot(*zip(*_held_out(start, measure), strict=True), color="#8a8a8a", label=COLD_START)
        left.set_ylabel(title)
        left.set_ylim(0)
    panels[0, 0].set_title("training rollouts by step, moving mean")
    panels[0, 1].set_title("held-out questions by K, after training")
    panels[-1, 1].set_xscale("log", base=2)
    ks = [k for k, _ in _held_out(runs[COLD_START][0], "calls")]
    panels[-1, 1].set_xticks(ks, [f"K = {k}" for k in ks])
    keys = panels[0, 1].get_legend_handles_labels()
    drawing.legend(*keys, loc="outside upper center", ncols=len(runs), frameon=False)
    return drawing


def _smooth(points: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
    """Return moving means over a twelfth of the points to each side."""
    steps, values = np.array(points, float).T
    return [*zip(steps, moving_mean(values, max(1, len(points) // 12)), strict=True)]


def _held_out(run: Run, measure: str) -> list[tuple[int, float]]:
    lines = by_k(read_result(pathlib.Path(run.run_dir))["after"])
    return [(k, lines[k][measure]) for k in sorted(lines)]


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit code. Writes table.md, figure.svg and results.json."""
    command = tyro.cli(Paradox, args=argv, prog="python -m paravt_extras.studies.paradox")
    runs = runs_of(command)
    (start,), *arms = runs.values()
    # All settings of a seed come before the next seed.
    order = [start, *(run for seed in zip(*arms, strict=True) for run in seed)]
    return study.carry_out(order, command.folder, runs, figures, draw)


if __name__ == "__main__":
    raise SystemExit(main())
