"""Gating alone: does the model learn to crop only if some training prompts need it?

    python -m paravt_extras.studies.gating

From the naive cold start of `paravt_tiny`, RL trains on multiple choice alone, once with K drawn
per prompt from {4, ..., 64} and once with K = 64 for every prompt, where every overview shows the
answer. No reward pays for calls. Each seed has a world, questions and demonstrations of its own,
and a whole run of `paravt_tiny`, from which both arms take the cold start. Every run is an ordinary
run directory (`train.run`), so the command can be interrupted and repeated; finished runs are only
read.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import tyro

from configs.ablations import UNGATED
from configs.paravt_tiny import paravt_tiny
from paravt_extras.report.discovery import greedy_curve, of_group
from paravt_extras.report.result import read_result
from paravt_extras.studies.gating_figure import figure
from paravt_extras.studies.study import require_seeds, run_study
from paravt_jax.data.any_path import require_local
from paravt_jax.data.atomic import write_atomically
from train.durable.metrics import format_seconds
from train.settings import Run, change

START, DRAWN, FIXED = "cold start", "K drawn per prompt", "K = 64"
Row = dict[str, Any]
COLUMNS = {
    "accuracy, choice": of_group("mcq", "score"),
    "accuracy, grounding": of_group("tvg", "score"),
    "crops, choice, answer not shown": of_group("mcq hidden", "calls"),
    "crops, choice, answer shown": of_group("mcq shown", "calls"),
    "crops, grounding": of_group("tvg", "calls"),
}


@dataclasses.dataclass(frozen=True)
class Gating:
    """Trains on choice from a naive cold start, with K drawn per prompt and with K = 64."""

    run_dir: str = "runs/gating"
    """Folder of all runs (start-SEED, drawn-SEED, fixed-SEED), the table and the figure."""
    seeds: tuple[int, ...] = (4, 5, 6)
    """Seeds of world, questions, demonstrations and run."""

    def __post_init__(self):
        require_seeds(self.seeds)
        require_local("run_dir", self.run_dir)


def plan(command: Gating) -> dict[str, list[Run]]:
    """The runs, one per seed: `paravt_tiny` as users start it, and both arms from its cold start.

    The arms are only evaluated greedily.
    """
    runs: dict[str, list[Run]] = {START: [], DRAWN: [], FIXED: []}
    evaluation = dataclasses.replace(
        paravt_tiny().evaluation,
        dispatch=("parallel",),
        temperatures=(0.0,),
        format_temperatures=(),
    )
    arm = {"rl.kinds": ("mcq",), "rl.control": False, "evaluation": evaluation}
    for seed in command.seeds:
        folders = {name: f"{command.run_dir}/{name}-{seed}" for name in ("start", "drawn", "fixed")}
        seeds = {"seed": seed, "world.seed": seed, "text.seed": seed}
        start = change(paravt_tiny(), "paravt_tiny", seeds | {"run_dir": folders["start"]})
        shared = arm | {"start": start.run_dir}
        runs[START].append(start)
        runs[DRAWN].append(change(start, "drawn", shared | {"run_dir": folders["drawn"]}))
        runs[FIXED].append(change(start, "fixed", UNGATED | shared | {"run_dir": folders["fixed"]}))
    return runs


def read(run: Run) -> list[Row]:
    """The greedy evaluations of a finished run: rows with `step` and `k`, in the order of steps."""
    result = read_result(pathlib.Path(run.run_dir))
    assert run.rl is not None
    return greedy_curve(result, run.rl.steps)


def _over_seeds(runs: Sequence[list[Row]], step: int, k: int, value: Callable[[Row], Any]) -> str:
    """The mean over seeds, with the lowest and the highest value; a dash for none."""
    rows = [row for run in runs for row in run if row["step"] == step and row["k"] == k]
    known = [found for found in map(value, rows) if found is not None]
    if not known:
        return "–"
    return f"{statistics.mean(known):.2f} [{min(known):.2f}, {max(known):.2f}]"


def table(results: dict[str, list[list[Row]]]) -> str:
    """A Markdown table: each arm at each K, before and after RL."""
    titles = ["trained with", "evaluated at K", "before or after RL", *COLUMNS]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for arm, runs in results.items():
        steps = sorted({row["step"] for row in runs[0]})
        for k in sorted({row["k"] for row in runs[0]}):
            for when, step in (("before", steps[0]), ("after", steps[-1])):
                cells = [_over_seeds(runs, step, k, value) for value in COLUMNS.values()]
                lines.append(f"| {arm} | {k} | {when} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code. Writes table.md, figure.svg and results.json."""
    command = tyro.cli(Gating, args=argv, prog="python -m paravt_extras.studies.gating")
    folder = pathlib.Path(command.run_dir)
    start = time.monotonic()
    runs = plan(command)
    # The run with the cold start comes first. All runs of a seed come before the next seed.
    order = [run for of_seed in zip(*runs.values(), strict=True) for run in of_seed]
    code = run_study(order)
    if code:
        return code
    results = {arm: [read(run) for run in runs[arm]] for arm in (DRAWN, FIXED)}
    write_atomically(folder / "results.json", json.dumps(results, indent=1) + "\n")
    write_atomically(folder / "table.md", table(results) + "\n")
    write_atomically(folder / "figure.svg", figure(results))
    print(table(results))
    seconds = format_seconds(time.monotonic() - start)
    print(f"done in {seconds}; see {folder / 'table.md'} and {folder / 'figure.svg'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
