"""What do rollouts that outlive an update cost? `python -m paravt_extras.studies.staleness`

Each seed has a cold start (`sft_tiny`). From its weights, RL runs with the settings of
`paravt_tiny` and `rl.max_staleness` 0, 1 and 2. Everything else is equal.
"""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import tyro

from configs.paravt_tiny import paravt_tiny, sft_tiny
from paravt_extras.report.claim import weighted_mean
from paravt_extras.report.discovery import greedy
from paravt_extras.report.result import read_result
from paravt_extras.studies import study
from paravt_extras.studies.study import Figures, rl_steps
from train.settings import Run, change

MAX_STALENESS = (0, 1, 2)
LAST = 10


@dataclasses.dataclass(frozen=True)
class Staleness(study.Command):
    """Trains with rollouts that may outlive no, one and two updates."""

    run_dir: str = "runs/staleness"
    """Folder of all runs (start-SEED, stale0-SEED, ...), the table and the figures."""
    seeds: tuple[int, ...] = (4, 5, 6)
    """Seeds of world, questions, demonstrations and run."""


def runs_of(command: Staleness, seed: int) -> list[Run]:
    """Return the runs of a seed: the cold start, and one for each bound."""
    evaluation = dataclasses.replace(study.greedy_evaluation(), curve=False)
    same = {"seed": seed, "world.seed": seed, "text.seed": seed, "evaluation": evaluation}
    folder = f"{command.run_dir}/start-{seed}"
    start = change(sft_tiny(), "start", same | {"run_dir": folder})
    runs = [start]
    for bound in MAX_STALENESS:
        arm = study.from_cold_start(start) | {
            "rl.max_staleness": bound,
            "run_dir": f"{command.run_dir}/stale{bound}-{seed}",
        }
        runs.append(change(paravt_tiny(), f"stale{bound}", same | arm))
    return runs


def figures(run: Run) -> Figures:
    """Return the figures of a finished run of RL."""
    evaluated = greedy(read_result(pathlib.Path(run.run_dir))["after"])
    steps = rl_steps(run)
    measured: Figures = {
        "accuracy after RL, mean over K": _mean(evaluated, "accuracy"),
        # KL changes as the model learns.
        f"KL, last {LAST} steps": _mean(steps[-LAST:], "kl_reference"),
        "tokens per episode, trained": _mean(steps, "length/response"),
    }
    if "staleness/mean" in steps[-1]:
        measured["age of trained tokens, updates"] = _mean(steps, "staleness/mean")
        ended = [
            (line["length/sampled"], line["in_flight/ended"])
            for line in steps
            if line["in_flight/ended"]
        ]
        measured["tokens per episode, all that ended"] = weighted_mean(ended)
    return measured


def _mean(lines: Sequence[Mapping[str, Any]], name: str) -> float:
    return statistics.mean(line[name] for line in lines if name in line)


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit code. Writes table.md and results.json."""
    command = tyro.cli(Staleness, args=argv, prog="python -m paravt_extras.studies.staleness")
    runs = [runs_of(command, seed) for seed in command.seeds]
    arms = {
        f"max_staleness {bound}": [of_seed[number] for of_seed in runs]
        for number, bound in enumerate(MAX_STALENESS, 1)
    }
    order = [run for of_seed in runs for run in of_seed]
    return study.carry_out(order, pathlib.Path(command.run_dir), arms, figures)


if __name__ == "__main__":
    raise SystemExit(main())
