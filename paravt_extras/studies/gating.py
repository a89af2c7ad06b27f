"""Gating alone: does the model learn to crop only if some training prompts need it?

    python -m paravt_extras.studies.gating

From the naive cold start of `paravt_tiny`, RL trains on multiple choice alone, once with K drawn
per prompt from {4, ..., 64} and once with K = 64 for every prompt, where every overview shows the
answer. No reward pays for calls. Each seed has a world, questions and demonstrations of its own,
and a run of `sft_tiny`, with whose model both arms begin.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import tyro
from matplotlib.figure import Figure

from configs.ablations import UNGATED
from configs.paravt_tiny import paravt_tiny, sft_tiny
from paravt_extras.report.discovery import greedy_curve, of_group
from paravt_extras.report.result import read_result
from paravt_extras.studies import study
from paravt_extras.studies.study import STYLES, Figures
from train.settings import Run, change

START, DRAWN, FIXED = "cold start", "K drawn per prompt", "K = 64"
FIGURES = {
    "accuracy, choice": of_group("mcq", "score"),
    "accuracy, grounding": of_group("tvg", "score"),
    "crops, choice, answer not shown": of_group("mcq hidden", "calls"),
    "crops, choice, answer shown": of_group("mcq shown", "calls"),
    "crops, grounding": of_group("tvg", "calls"),
}
PANELS = {
    "choice: accuracy": of_group("mcq", "score"),
    "choice: crops": of_group("mcq", "calls"),
    "grounding: IoU": of_group("tvg", "score"),
    "grounding: crops": of_group("tvg", "calls"),
}


@dataclasses.dataclass(frozen=True)
class Gating(study.Command):
    """Trains on choice from a naive cold start, with K drawn per prompt and with K = 64."""

    run_dir: str = "runs/gating"
    """Folder of all runs (start-SEED, drawn-SEED, fixed-SEED), the table and the figure."""
    seeds: tuple[int, ...] = (4, 5, 6)
    """Seeds of world, questions, demonstrations and run."""


def runs_of(command: Gating) -> dict[str, list[Run]]:
    """Return the runs, one per seed: the cold start, and both arms from its model."""
    runs: dict[str, list[Run]] = {START: [], DRAWN: [], FIXED: []}
    for seed in command.seeds:
        folders = {name: f"{command.run_dir}/{name}-{seed}" for name in ("start", "drawn", "fixed")}
        seeds = {"seed": seed, "world.seed": seed, "text.seed": seed}
        start = change(sft_tiny(), "start", seeds | {"run_dir": folders["start"]})
        arm = seeds | study.from_cold_start(start) | {"rl.kinds": ("mcq",)}
        arm["evaluation"] = study.greedy_evaluation()
        runs[START].append(start)
        runs[DRAWN].append(change(paravt_tiny(), "drawn", arm | {"run_dir": folders["drawn"]}))
        runs[FIXED].append(
            change(paravt_tiny(), "fixed", UNGATED | arm | {"run_dir": folders["fixed"]})
        )
    return runs


def curve(run: Run) -> list[dict[str, Any]]:
    """Return the greedy evaluations of a finished run: lines with `step` and `k`, by step."""
    assert run.rl is not None
    return greedy_curve(read_result(pathlib.Path(run.run_dir)), run.rl.steps)


def figures(run: Run) -> Figures:
    """Return the figures of a finished run before and after RL, by K."""
    lines = curve(run)
    ends = {"before": lines[0]["step"], "after": lines[-1]["step"]}
    return {
        f"{name}, K = {line['k']}, {when} RL": value(line)
        for name, value in FIGURES.items()
        for when, step in ends.items()
        for line in lines
        if line["step"] == step
    }


def draw(runs: Mapping[str, Sequence[Run]]) -> Figure:
    """Draw greedy accuracy and crops by K over the steps of RL, with a column per arm."""
    drawing = Figure(figsize=(8.4, 8.6), layout="constrained")
    panels = drawing.subplots(len(PANELS), len(runs), sharex=True, sharey="row", squeeze=False)
    for column, (arm, of_arm) in enumerate(runs.items()):
        curves = [curve(run) for run in of_arm]
        budgets = sorted({line["k"] for lines in curves for line in lines})
        panels[0, column].set_title(f"trained with {arm}")
        panels[-1, column].set_xlabel("step of RL")
        for axes, (name, value) in zip(panels[:, column], PANELS.items(), strict=True):
            for k, style in zip(budgets, STYLES, strict=False):
                points = [
                    [(line["step"], value(line)) for line in lines if line["k"] == k]
                    for lines in curves
                ]
                study.band(axes, points, style, f"asked with K = {k}")
            axes.set_ylim(0)
            if column == 0:
                axes.set_ylabel(name)
    keys = panels[0, 0].get_legend_handles_labels()
    drawing.legend(*keys, loc="outside upper center", ncols=len(STYLES), frameon=False)
    return drawing


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit code. Writes table.md, figure.svg and results.json."""
    command = tyro.cli(Gating, args=argv, prog="python -m paravt_extras.studies.gating")
    runs = runs_of(command)
    # All runs of a seed come before the next seed; the one with the cold start comes first.
    order = [run for seed in zip(*runs.values(), strict=True) for run in seed]
    arms = {arm: runs[arm] for arm in (DRAWN, FIXED)}
    return study.carry_out(order, pathlib.Path(command.run_dir), arms, figures, draw)


if __name__ == "__main__":
    raise SystemExit(main())
