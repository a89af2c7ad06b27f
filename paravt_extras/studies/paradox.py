"""The paper's paradox in miniature: trains four settings from one cold start and compares them.

    python -m paravt_extras.studies.paradox

The study is a set of ordinary run directories, so it can be interrupted and repeated: finished runs
are only read. docs/paradox.md explains the figures.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.typing import RcKeyType

import train.run
from configs.ablations import UNANCHORED, UNGATED
from configs.paradox import paradox_tiny
from paravt_extras import markdown
from paravt_extras.report.chart import moving_mean
from paravt_extras.report.claim import (
    KINDS,
    budgets,
    gaps,
    tag_probabilities,
    weighted_mean,
)
from paravt_jax.data.any_path import require_local
from paravt_jax.data.stored import write_atomically
from paravt_jax.processes.interrupts import Interrupts
from train.durable.metrics import read_metrics
from train.durable.run_folder import claim_folder
from train.result import read_result
from train.settings import Run, change

Figures = dict[str, float | None]
"""Figures of a run, by the name of their line; None: not measured."""
Points = Sequence[tuple[float, float | None]]

# The columns of the paper's ablation, each with its changes.
ARMS: dict[str, Mapping[str, Any]] = {
    "GRPO": UNGATED | UNANCHORED,
    "+ exploration anchoring": UNGATED,
    "+ nFrames gating": UNANCHORED,
    "PARA-GRPO": {},
}
COLD_START = "cold start"
MEASURES = {"accuracy": "accuracy", "compliance": "compliance", "calls": "κ"}
# The steps at the end of training over which its rollouts are averaged.
LAST_STEPS = 5


class Style(NamedTuple):
    """The look of a line. The colours, by Okabe and Ito, suit colour-blind readers."""

    color: str
    linestyle: str
    marker: str


STYLES = (
    Style("#0072b2", ":", "o"),
    Style("#e69f00", "--", "s"),
    Style("#009e73", "-.", "^"),
    Style("#d55e00", "-", "D"),
)
_LOOK: dict[RcKeyType, Any] = {
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.color": "#e4e4e4",
    # Keep text as text, and ids the same in every drawing.
    "svg.fonttype": "none",
    "svg.hashsalt": "study",
}


@dataclasses.dataclass(frozen=True)
class Command:
    """What a comparison of runs is asked for.

    Raises:
        ValueError: The seeds are not different numbers, or the folder is in a bucket.
    """

    run_dir: str
    seeds: tuple[int, ...]

    def __post_init__(self):
        if not self.seeds or min(self.seeds) < 0 or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds: {self.seeds}; give different numbers of at least 0")
        require_local("run_dir", self.run_dir)


@dataclasses.dataclass(frozen=True)
class Paradox(Command):
    """Trains plain GRPO, GRPO with either remedy, and with both, from one cold start."""

    run_dir: str = "runs/paradox"
    """Folder of the runs, the table and the figure."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of each setting."""


def runs_of(command: Paradox) -> dict[str, list[Run]]:
    """Return the runs of each setting: one cold start, and one run per setting and seed."""
    base = paradox_tiny()
    folder = command.run_dir
    cold_start = f"{folder}/cold-start"
    start = dataclasses.replace(base, name="cold_start", rl=None, run_dir=cold_start)
    from_cold_start = {"sft.steps": 0, "model.path": f"{cold_start}/model"}
    runs = {COLD_START: [start]}
    for arm, changes in ARMS.items():
        name = "-".join(arm.lower().replace("+", "").split())
        changed = change(base, name, {**changes, **from_cold_start})
        runs[arm] = [
            dataclasses.replace(changed, seed=seed, run_dir=f"{folder}/{name}-{seed}")
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
            band(left, [_smooth(points) for points in histories], style, name)
            band(right, [_held_out(run, measure) for run in of_arm], style, name)
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


def band(axes: Axes, seeds: Sequence[Points], style: Style, label: str) -> None:
    """Draw the mean over seeds of a curve, shaded from the lowest to the highest value."""
    by_x: dict[float, list[float]] = {}
    for x, y in itertools.chain(*seeds):
        if y is not None:
            by_x.setdefault(x, []).append(y)
    xs, ys = sorted(by_x), [by_x[x] for x in sorted(by_x)]
    means = [*map(statistics.mean, ys)]
    axes.plot(xs, means, **style._asdict(), markevery=max(1, len(xs) // 6), label=label)
    low, high = [*map(min, ys)], [*map(max, ys)]
    axes.fill_between(xs, low, high, color=style.color, alpha=0.15, linewidth=0)


def write(
    folder: pathlib.Path, table: Mapping[str, Sequence[Figures]], drawing: Figure | None = None
) -> None:
    """Write results.json, table.md and, if there is a drawing, figure.svg; print the table.

    The same results give the same bytes.
    """
    content = markdown.table_of_figures(table) + "\n"
    write_atomically(folder / "results.json", json.dumps(table, indent=1) + "\n")
    write_atomically(folder / "table.md", content)
    if drawing is not None:
        file = io.BytesIO()
        with matplotlib.rc_context(_LOOK):
            drawing.savefig(file, format="svg", metadata={"Date": None})
        write_atomically(folder / "figure.svg", file.getvalue().decode())
    print(content)


def rl_steps(run: Run) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl of a run's RL steps."""
    lines = read_metrics(pathlib.Path(run.run_dir) / "metrics.jsonl")
    return [line for line in lines if line["phase"] == "rl"]


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit code. Writes table.md, figure.svg and results.json."""
    asked = tyro.cli(Paradox, args=argv, prog="python -m paravt_extras.studies.paradox")
    arms = runs_of(asked)
    (start,), *others = arms.values()
    # All settings of a seed come before the next seed.
    runs = [start, *(run for seed in zip(*others, strict=True) for run in seed)]

    def work(_: Run) -> int:
        with Interrupts() as interrupts:
            for number, run in enumerate(runs, 1):
                # Open the directory of a finished run, too: it may be one with other settings.
                with claim_folder(run.run_dir, train.run.resolved(run)):
                    finished = (pathlib.Path(run.run_dir) / "result.json").exists()
                if not finished:
                    print(f"run {number} of {len(runs)}: {run.run_dir}", file=sys.stderr)
                    train.run.execute(run, interrupts)
        table = {arm: [*map(figures, of_arm)] for arm, of_arm in arms.items()}
        write(pathlib.Path(asked.run_dir), table, draw(arms))
        return 0

    return train.run.command(start, work)


if __name__ == "__main__":
    raise SystemExit(main())
