"""The paper's paradox in miniature: `python -m train.studies.paradox` trains four settings from one cold start and compares them.

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
from collections.abc import Sequence
from typing import Any, Literal

import jax
import tyro

from configs.paradox import ARMS, paradox_tiny
from configs.paravt_tiny import paravt_tiny
from paravt_jax.data.atomic import write_atomically
from paravt_jax.data.local_path import require_local
from train.durable.allocator import reuse_freed_memory
from train.durable.checkpoint import CheckpointError
from train.durable.interrupts import Interrupts, Stopped
from train.durable.metrics import format_seconds, read_metrics
from train.durable.run_directory import RunDirectory, RunDirectoryError
from train.run import execute, resolved
from train.settings import Run, change
from train.studies.paradox_figure import Result, figure
from train.unreadable import UnreadableVideosError

COLD_START = "cold start"
MEASURES = {"accuracy": "accuracy", "format": "f", "calls": "κ"}
LAST = 5  # steps of training that "at the end" means


@dataclasses.dataclass(frozen=True)
class Paradox:
    """Trains vanilla GRPO, GRPO with one of the two remedies, and with both, from one cold start, with several seeds each."""

    run_dir: str = "runs/paradox"
    """The cold start, which all share, and a folder for each choice of what follows."""
    seeds: int = 3
    quick: bool = False
    """One seed, and a third of the steps: a look, not a result."""
    rewards: Literal["outcome", "published"] = "outcome"
    """What is paid beside the anchor: right answers alone, or format and calls too, as in the published recipe."""

    def __post_init__(self):
        if self.seeds < 1:
            raise ValueError(f"seeds: {self.seeds}; give at least 1")
        require_local("run_dir", self.run_dir)


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


def folder_of(command: Paradox) -> pathlib.Path:
    """Where the arms, the table and the figure of this choice of rewards and steps are."""
    return pathlib.Path(command.run_dir) / (command.rewards + ("-quick" if command.quick else ""))


def plan(command: Paradox) -> dict[str, list[Run]]:
    """The runs of every row of the table. They are made seed by seed, so that an early look compares like with like."""
    folder, run = folder_of(command), base(command)
    start = dataclasses.replace(
        run, name="cold_start", rl=None, run_dir=str(folder.parent / "cold-start")
    )
    runs: dict[str, list[Run]] = {COLD_START: [start]}
    for arm, changes in ARMS.items():
        for seed in range(1 if command.quick else command.seeds):
            slug = "-".join(arm.lower().replace("+", "").split())
            changed = change(run, slug, changes)
            place = folder / f"{slug}-{seed}"
            runs.setdefault(arm, []).append(
                dataclasses.replace(changed, seed=seed, start=start.run_dir, run_dir=str(place))
            )
    return runs


def carry_out(runs: dict[str, list[Run]], interrupts: Interrupts) -> None:
    """Every run that has not finished yet: the cold start first, then the arms, seed by seed."""
    order = [
        *runs[COLD_START],
        *(run for column in zip(*(runs[arm] for arm in ARMS), strict=True) for run in column),
    ]
    for number, run in enumerate(order, 1):
        with RunDirectory(
            run.run_dir, resolved(run)
        ):  # refuses a run of other settings, also a finished one
            finished = (pathlib.Path(run.run_dir) / "result.json").exists()
        if not finished:
            print(f"run {number} of {len(order)}: {run.name}, seed {run.seed}", file=sys.stderr)
            execute(run, interrupts)


def read(run: Run) -> Result:
    """What a finished run left behind."""
    folder = pathlib.Path(run.run_dir)
    result = json.loads((folder / "result.json").read_text())
    before, after = (
        {row["k"]: {m: row[m] for m in MEASURES} for row in result[when]}
        for when in ("before", "after")
    )
    steps = [line for line in read_metrics(folder / "metrics.jsonl") if line["phase"] == "rl"]
    return Result(
        before, after, [{name: line[name] for name in ("step", *MEASURES)} for line in steps]
    )


def held_out(
    results: Sequence[Result],
    measure: str,
    k: int | None = None,
    when: Literal["before", "after"] = "after",
) -> list[float]:
    """A measure of each seed's run on held-out questions, at K = `k` or as the mean over K."""
    return [
        statistics.mean(row[measure] for at, row in getattr(r, when).items() if k in (None, at))
        for r in results
    ]


def at_the_end(results: Sequence[Result], measure: str) -> list[float]:
    """A measure of each seed's training rollouts, over the last steps."""
    return [statistics.mean(step[measure] for step in r.by_step[-LAST:]) for r in results]


def show(values: Sequence[float]) -> str:
    """Mean, and lowest to highest over seeds."""
    mean = f"{statistics.mean(values):.2f}"
    return mean if len(values) == 1 else f"{mean} [{min(values):.2f}, {max(values):.2f}]"


def table(results: dict[str, list[Result]]) -> str:
    """Markdown, a line for each setting: f and kappa of training rollouts, then accuracy and kappa of held-out questions at each K."""
    ks = sorted(next(iter(results.values()))[0].after)
    titles = [
        "f, training",
        "κ, training",
        *(f"{MEASURES[m]} K={k}" for m in ("accuracy", "calls") for k in ks),
    ]
    lines = [f"| setting | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    for name, column in results.items():
        trained = (
            [show(at_the_end(column, m)) for m in ("format", "calls")]
            if column[0].by_step
            else ["–", "–"]
        )
        tried = [show(held_out(column, m, k)) for m in ("accuracy", "calls") for k in ks]
        lines.append(f"| {name} | {' | '.join(trained + tried)} |")
    return "\n".join(lines)


def claims(results: dict[str, list[Result]]) -> list[tuple[str, bool, str]]:
    """The paper's claims, whether they hold here in every seed, and the figures that say so.

    One measure for all settings: calls are *lost* where kappa of held-out questions at the largest K is less than a quarter of what the
    same run had before, and *kept* where it is at least half; format *holds* where f of the last training rollouts is at least a half.
    """
    most = max(next(iter(results.values()))[0].after)
    vanilla, anchored, gated, full = ARMS
    f = {name: at_the_end(results[name], "format") for name in ARMS}
    kappa = {
        name: (
            held_out(results[name], "calls", most, "before"),
            held_out(results[name], "calls", most),
        )
        for name in ARMS
    }
    right = {name: held_out(results[name], "accuracy") for name in ARMS}

    def calls(name: str, share: float) -> list[bool]:
        return [after >= share * before for before, after in zip(*kappa[name], strict=True)]

    def figures(name: str) -> str:
        return f"κ {show(kappa[name][0])} -> {show(kappa[name][1])}, f {show(f[name])}"

    lost = {name: not any(calls(name, 0.25)) for name in ARMS}
    kept = {name: all(calls(name, 0.5)) for name in ARMS}
    best = min(right[full]) > max(max(right[name]) for name in (vanilla, anchored, gated))
    accuracies = ", ".join(f"{name} {show(right[name])}" for name in ARMS)
    return [
        (f"(1) plain GRPO at K = {most} loses its calls", lost[vanilla], figures(vanilla)),
        ("(2) its format stays poor or collapses", max(f[vanilla]) < 0.5, figures(vanilla)),
        (
            "(3) anchoring alone holds format but not calls",
            min(f[anchored]) >= 0.5 and lost[anchored],
            figures(anchored),
        ),
        (
            "(4) gating alone keeps calls at the price of format",
            kept[gated] and max(f[gated]) < 0.5,
            figures(gated),
        ),
        (
            "(5) only both win: format holds, calls are kept, and accuracy over K is the highest",
            min(f[full]) >= 0.5 and kept[full] and best,
            f"{figures(full)}; accuracy {accuracies}",
        ),
    ]


def report(results: dict[str, list[Result]]) -> str:
    """The table, then a line for each claim."""
    seeds = max(len(column) for column in results.values())
    lines = [
        f"- {'holds' if holds else 'does not hold'}: {claim} ({figures})"
        for claim, holds, figures in claims(results)
    ]
    said = f"{seeds} seeds" if seeds > 1 else "one seed: a look, not a result"
    return f"{table(results)}\n\nOf the paper's claims, with {said}:\n\n" + "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """The command's exit code. Writes table.md, figure.svg and results.json into the folder."""
    command = tyro.cli(Paradox, args=argv, prog="python -m train.studies.paradox")
    folder, start = folder_of(command), time.monotonic()
    reuse_freed_memory()
    jax.config.update(
        "jax_compilation_cache_dir", str(folder.parent.absolute() / "compiled")
    )  # the runs' programs are the same
    runs = plan(command)
    try:
        with Interrupts() as interrupts:
            carry_out(runs, interrupts)
    except Stopped as stop:
        print(f"\n{stop}; the same command goes on from there", file=sys.stderr)
        return stop.code
    except (
        RunDirectoryError,
        CheckpointError,
        UnreadableVideosError,
        ValueError,
        OSError,
    ) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    results = {name: [read(run) for run in column] for name, column in runs.items()}
    kept: dict[str, Any] = {
        name: [dataclasses.asdict(result) for result in column] for name, column in results.items()
    }
    write_atomically(folder / "results.json", json.dumps(kept, indent=1) + "\n")
    write_atomically(folder / "table.md", report(results))
    (start_result,), arms = (
        results[COLD_START],
        {name: column for name, column in results.items() if name != COLD_START},
    )
    write_atomically(folder / "figure.svg", figure(arms, start_result))
    print(report(results))
    print(
        f"done in {format_seconds(time.monotonic() - start)}; see {folder / 'table.md'} and {folder / 'figure.svg'}"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
