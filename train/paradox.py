"""The paper's paradox in miniature: `python -m train.paradox` trains four settings from one cold start and compares them.

Owns the order of the runs, the table, and what is held against each of the paper's claims. Every run is a run directory like any other
(`train.run`), so the command can be stopped at any moment and goes on; a finished run is only read. Invariant: everything that the table
and the figure show is computed from the runs' own result.json and metrics.jsonl.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import tyro

from configs.base import Run
from configs.paradox import ARMS, paradox_tiny
from configs.paravt_tiny import paravt_tiny
from train.allocator import reuse_freed_memory
from train.checkpoint import CheckpointError
from train.interrupts import Interrupts
from train.metrics import format_seconds, read_metrics
from train.paradox_figure import figure
from train.prepare import UnreadableVideosError
from train.run import STOPPED, execute, resolved
from train.run_directory import RunDirectory, RunDirectoryError, write_atomically

COLD_START = "cold start"
MEASURES = {"accuracy": "accuracy", "format": "f", "calls": "κ"}


@dataclasses.dataclass(frozen=True)
class Paradox:
    """Trains vanilla GRPO, GRPO with one of the two remedies, and with both, from one cold start, with several seeds each."""

    run_dir: str = "runs/paradox"
    seeds: int = 3
    quick: bool = False
    """One seed, and a third of the steps: a look, not a result."""
    rewards: Literal["outcome", "published"] = "outcome"
    """What is paid beside the anchor: right answers alone, or format and calls too, as in the published recipe."""

    def __post_init__(self):
        if self.seeds < 1:
            raise ValueError(f"seeds: {self.seeds}; give at least 1")


@dataclasses.dataclass(frozen=True)
class Result:
    """One run: figures of the held-out questions by K after it, and of the training rollouts by step."""

    by_k: dict[int, dict[str, float]]
    by_step: list[dict[str, float]]


def base(command: Paradox) -> Run:
    """The recipe that all runs of the command are changes of."""
    run = paradox_tiny()
    assert run.rl is not None
    rl, published = run.rl, paravt_tiny().rl
    if command.rewards == "published":
        assert published is not None
        rl = dataclasses.replace(rl, rewards=published.rewards)
    if command.quick:
        rl = dataclasses.replace(rl, steps=rl.steps // 3)
    return dataclasses.replace(run, rl=rl)


def plan(command: Paradox) -> dict[str, list[Run]]:
    """The runs of every row of the table. They are made seed by seed, so that an early look compares like with like."""
    folder, run = pathlib.Path(command.run_dir), base(command)
    start = dataclasses.replace(run, name="cold_start", rl=None, run_dir=str(folder / "cold-start"))
    runs: dict[str, list[Run]] = {COLD_START: [start]}
    for arm, change in ARMS.items():
        for seed in range(1 if command.quick else command.seeds):
            slug = "-".join(arm.lower().replace("+", "").split())
            changed = change(run, slug)
            place = folder / f"{slug}-{seed}"
            runs.setdefault(arm, []).append(dataclasses.replace(changed, seed=seed, start=start.run_dir, run_dir=str(place)))
    return runs


def carry_out(runs: dict[str, list[Run]], check: Callable[[], None]) -> None:
    """Every run that has not finished yet: the cold start first, then the arms, seed by seed."""
    order = [*runs[COLD_START], *(run for column in zip(*(runs[arm] for arm in ARMS), strict=True) for run in column)]
    for number, run in enumerate(order, 1):
        with RunDirectory(run.run_dir, resolved(run)):  # refuses a run of other settings, also a finished one
            finished = (pathlib.Path(run.run_dir) / "result.json").exists()
        if not finished:
            print(f"run {number} of {len(order)}: {run.name}, seed {run.seed}", file=sys.stderr)
            execute(run, check)


def read(run: Run) -> Result:
    """What a finished run left behind."""
    folder = pathlib.Path(run.run_dir)
    rows = json.loads((folder / "result.json").read_text())["after"]
    steps = [line for line in read_metrics(folder / "metrics.jsonl") if line["phase"] == "rl"]
    names = ("step", *MEASURES)
    return Result({row["k"]: {m: row[m] for m in MEASURES} for row in rows}, [{n: line[n] for n in names} for line in steps])


def over_seeds(results: Sequence[Result], measure: str, k: int | None = None) -> list[float]:
    """A measure of each seed's run, at K = `k` or as the mean over K."""
    return [statistics.mean(row[measure] for at, row in r.by_k.items() if k in (None, at)) for r in results]


def show(values: Sequence[float]) -> str:
    """Mean, and lowest to highest over seeds."""
    mean = f"{statistics.mean(values):.2f}"
    return mean if len(values) == 1 else f"{mean} [{min(values):.2f}, {max(values):.2f}]"


def table(results: dict[str, list[Result]]) -> str:
    """Markdown: a line for each setting; f as the mean over K, accuracy and kappa at each K."""
    ks = sorted(next(iter(results.values()))[0].by_k)
    columns = [("f", "format", None), *((f"{MEASURES[m]} K={k}", m, k) for m in ("accuracy", "calls") for k in ks)]
    lines = [f"| setting | {' | '.join(title for title, _, _ in columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, column in results.items():
        lines.append(f"| {name} | {' | '.join(show(over_seeds(column, measure, k)) for _, measure, k in columns)} |")
    return "\n".join(lines)


def claims(results: dict[str, list[Result]]) -> list[tuple[str, bool, str]]:
    """The paper's claims, whether they hold here - in every seed, where seeds are compared - and the figures that say so."""
    most = max(next(iter(results.values()))[0].by_k)

    def f(name: str) -> list[float]:
        return over_seeds(results[name], "format")

    def kappa(name: str, k: int | None = most) -> list[float]:
        return over_seeds(results[name], "calls", k)

    vanilla, anchored, gated, full = ARMS
    start_kappa, start_f = kappa(COLD_START)[0], f(COLD_START)[0]
    right = {name: over_seeds(results[name], "accuracy") for name in ARMS}
    others = [max(right[name]) for name in (vanilla, anchored, gated)]
    return [
        (
            f"(1) plain GRPO at K = {most} loses its calls: less than half of the cold start's",
            max(kappa(vanilla)) < start_kappa / 2,
            f"κ {start_kappa:.2f} -> {show(kappa(vanilla))}",
        ),
        ("(2) its format stays poor: f below one half", max(f(vanilla)) < 0.5, f"f {start_f:.2f} -> {show(f(vanilla))}"),
        (
            f"(3) anchoring alone holds format (f above plain GRPO's) and not calls (κ at K = {most} less than half of the cold start's)",
            min(f(anchored)) > max(f(vanilla)) and max(kappa(anchored)) < start_kappa / 2,
            f"f {show(f(anchored))}, κ {show(kappa(anchored))}",
        ),
        (
            "(4) gating alone keeps calls (κ over K at least the cold start's) at the price of format (f below anchoring's)",
            min(kappa(gated, None)) >= kappa(COLD_START, None)[0] and max(f(gated)) < min(f(anchored)),
            f"κ over K {kappa(COLD_START, None)[0]:.2f} -> {show(kappa(gated, None))}, f {show(f(gated))}",
        ),
        (
            "(5) only both win: accuracy over K above all others', f above gating's, κ above anchoring's",
            min(right[full]) > max(others) and min(f(full)) > max(f(gated)) and min(kappa(full, None)) > max(kappa(anchored, None)),
            f"accuracy {show(right[full])} against " + ", ".join(show(right[name]) for name in (vanilla, anchored, gated)),
        ),
    ]


def report(results: dict[str, list[Result]]) -> str:
    """The table, then a line for each claim."""
    lines = [f"- {'holds' if holds else 'does not hold'}: {claim} ({figures})" for claim, holds, figures in claims(results)]
    return table(results) + "\n\n" + "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """The command's exit code. Writes table.md, figure.svg and results.json into the folder."""
    command = tyro.cli(Paradox, args=argv, prog="python -m train.paradox")
    folder, start = pathlib.Path(command.run_dir), time.monotonic()
    reuse_freed_memory()
    jax.config.update("jax_compilation_cache_dir", str(folder.absolute() / "compiled"))  # the runs' programs are the same
    runs = plan(command)
    try:
        with Interrupts() as interrupts:
            carry_out(runs, interrupts.check)
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from the last checkpoint", file=sys.stderr)
        return STOPPED
    except (RunDirectoryError, CheckpointError, UnreadableVideosError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    results = {name: [read(run) for run in column] for name, column in runs.items()}
    kept: dict[str, Any] = {name: [dataclasses.asdict(result) for result in column] for name, column in results.items()}
    write_atomically(folder / "results.json", json.dumps(kept, indent=1) + "\n")
    write_atomically(folder / "table.md", report(results))
    (start_result,), arms = results[COLD_START], {name: column for name, column in results.items() if name != COLD_START}
    write_atomically(folder / "figure.svg", figure(arms, start_result))
    print(report(results))
    print(f"done in {format_seconds(time.monotonic() - start)}; see {folder / 'table.md'} and {folder / 'figure.svg'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
