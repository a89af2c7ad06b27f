"""The paper's paradox in miniature: trains four settings from one cold start and compares them.

    python -m paravt_extras.studies.paradox
    python -m paravt_extras.studies.paradox --prior weak

Every run is an ordinary run directory (`train.run`), so the command can be interrupted and
repeated. Finished runs are only read. The tables and the figure are computed from result.json and
metrics.jsonl of the runs.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any, Literal

import tyro

from configs.paradox import ARMS, WEAK_PRIOR, paradox_tiny
from paravt_extras.report.claim import is_shown
from paravt_extras.report.result import read_result
from paravt_extras.studies.paradox_figure import Result, figure
from paravt_extras.studies.paradox_tables import claim_tables, show
from paravt_extras.studies.study import run_study
from paravt_jax.data.any_path import require_local
from paravt_jax.data.atomic import write_atomically
from paravt_jax.method.rewards import RewardSettings
from train.durable.metrics import format_seconds, read_metrics
from train.settings import Run, change

COLD_START = "cold start"
MEASURES = {"accuracy": "accuracy", "compliance": "compliance", "calls": "κ"}
FORMAT = ("phase", "k", "temperature", "n", "compliance", "format_reward")
# The steps at the end of training over which its rollouts are averaged.
LAST_STEPS = 5


@dataclasses.dataclass(frozen=True)
class Paradox:
    """Trains plain GRPO, GRPO with either remedy, and with both, from one cold start.

    The tables show accuracy, compliance and calls, what calls earn by K, the likelihood of tags,
    and format at several temperatures. The same command continues a study that was stopped.
    """

    run_dir: str = "runs/paradox"
    """Directory of the shared cold start, and of a folder per choice of rewards and steps."""
    seeds: int = 3
    """Number of seeds per setting."""
    quick: bool = False
    """One seed and a third of the steps: enough for a first look, not for a result."""
    rewards: Literal["outcome", "published"] = "outcome"
    """Rewards beside the anchor. outcome: right answers only. published: format and calls too."""
    prior: Literal["strong", "weak"] = "strong"
    """Calls in the cold start. weak: in at most 10 %, without leaks; trains two settings only."""

    def __post_init__(self):
        if self.seeds < 1:
            raise ValueError(f"seeds: {self.seeds}; give at least 1")
        require_local("run_dir", self.run_dir)


def base(command: Paradox) -> Run:
    """The recipe from which all settings are derived."""
    run = paradox_tiny()
    if command.prior == "weak":
        run = change(run, run.name, WEAK_PRIOR)
    assert run.rl is not None
    rl = run.rl
    if command.rewards == "published":
        rl = dataclasses.replace(rl, rewards=RewardSettings(format_cap=False))
    if command.quick:
        rl = dataclasses.replace(rl, steps=rl.steps // 3)
    return dataclasses.replace(run, rl=rl)


def folder_of(command: Paradox) -> pathlib.Path:
    """The folder of the runs, the table and the figure for this choice of rewards and steps."""
    name = command.rewards + _prior_suffix(command)
    return pathlib.Path(command.run_dir) / (f"{name}-quick" if command.quick else name)


def _prior_suffix(command: Paradox) -> str:
    return "-weak" if command.prior == "weak" else ""


def arms_of(command: Paradox) -> tuple[str, ...]:
    """The settings of a study: with a weak prior, plain GRPO and PARA-GRPO."""
    return ("GRPO", "PARA-GRPO") if command.prior == "weak" else tuple(ARMS)


def plan(command: Paradox) -> dict[str, list[Run]]:
    """The runs of each row of the table: one cold start, and one run per setting and seed."""
    folder = folder_of(command)
    run = base(command)
    cold_start_dir = str(folder.parent / f"cold-start{_prior_suffix(command)}")
    start = dataclasses.replace(run, name="cold_start", rl=None, run_dir=cold_start_dir)
    seeds = 1 if command.quick else command.seeds
    runs: dict[str, list[Run]] = {COLD_START: [start]}
    for arm in arms_of(command):
        slug = "-".join(arm.lower().replace("+", "").split())
        changed = change(run, slug, ARMS[arm])
        runs[arm] = []
        for seed in range(seeds):
            run_dir = str(folder / f"{slug}-{seed}")
            arm_run = dataclasses.replace(changed, seed=seed, start=start.run_dir, run_dir=run_dir)
            runs[arm].append(arm_run)
    return runs


def order(runs: dict[str, list[Run]]) -> list[Run]:
    """The cold start first, then the settings.

    All settings of one seed come before the next seed, so that an early look compares like with
    like.
    """
    start, *arms = runs.values()
    by_seed = zip(*arms, strict=True)
    return [*start, *itertools.chain.from_iterable(by_seed)]


def read(run: Run) -> Result:
    """Read the measures of a finished run.

    Raises:
        ValueError: An older version of this code made the run.
    """
    folder = pathlib.Path(run.run_dir)
    result = read_result(folder)
    steps = [line for line in read_metrics(folder / "metrics.jsonl") if line["phase"] == "rl"]
    rows = [*result["before"], *result["after"]]
    if (
        not result.get("by_temperature")
        or any("tool_gap" not in row for row in rows)
        or any("tags/count" not in line for line in steps)
    ):
        raise ValueError(
            f"{folder}: no tool gap, likelihood of tags or format by temperature, so an older "
            "version of this code made the run; delete the folder, or give another --run-dir"
        )

    def by_k(rows: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
        return {row["k"]: {name: row[name] for name in (*MEASURES, "tool_gap")} for row in rows}

    def measured(line: dict[str, Any]) -> dict[str, float]:
        return {name: line[name] for name in line if name in ("step", *MEASURES) or is_shown(name)}

    by_temperature = [{name: row[name] for name in FORMAT} for row in result["by_temperature"]]
    return Result(
        by_k(result["before"]),
        by_k(result["after"]),
        [measured(line) for line in steps],
        by_temperature,
    )


def held_out(
    results: Sequence[Result],
    measure: str,
    k: int | None = None,
    when: Literal["before", "after"] = "after",
) -> list[float]:
    """A measure on held-out questions, by run.

    Args:
        results: The runs of a setting, one per seed.
        measure: `accuracy`, `compliance` or `calls`.
        k: Number of overview frames; None: the mean over all K.
        when: Before or after the run.
    """
    values = []
    for result in results:
        rows = result.before if when == "before" else result.after
        budgets = rows if k is None else [k]
        values.append(statistics.mean(rows[budget][measure] for budget in budgets))
    return values


def at_the_end(results: Sequence[Result], measure: str) -> list[float]:
    """A measure of training rollouts by run, as the mean over the last steps."""
    return [statistics.mean(step[measure] for step in r.by_step[-LAST_STEPS:]) for r in results]


def table(results: dict[str, list[Result]]) -> str:
    """A Markdown table with a row per setting.

    Its columns are compliance and kappa of training rollouts, then accuracy and kappa of held-out
    questions at each K.
    """
    ks = sorted(next(iter(results.values()))[0].after)
    columns = [(measure, k) for measure in ("accuracy", "calls") for k in ks]
    titles = ["compliance, training", "κ, training", *(f"{MEASURES[m]} K={k}" for m, k in columns)]
    lines = [f"| setting | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    for name, runs in results.items():
        cells = ["–", "–"]
        # The cold start has no training rollouts.
        if runs[0].by_step:
            cells = [show(at_the_end(runs, measure)) for measure in ("compliance", "calls")]
        cells += [show(held_out(runs, measure, k)) for measure, k in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def claims(results: dict[str, list[Result]]) -> list[tuple[str, bool, str]]:
    """The paper's claims, each with whether it holds in every seed, and the figures behind it.

    The same criteria apply to all settings. Kappa is that of held-out questions at the largest K,
    compliance that of the last training rollouts.

    - Calls are lost if kappa falls below a quarter of its value before the run.
    - Calls are kept if kappa stays at half of that value or more.
    - Format holds if compliance is at least 0.5.
    """
    largest = max(next(iter(results.values()))[0].after)
    vanilla, anchored, gated, full = ARMS
    compliance = {name: at_the_end(results[name], "compliance") for name in ARMS}
    before = {name: held_out(results[name], "calls", largest, "before") for name in ARMS}
    after = {name: held_out(results[name], "calls", largest) for name in ARMS}
    accuracy = {name: held_out(results[name], "accuracy") for name in ARMS}

    def retains(name: str, share: float) -> list[bool]:
        """By seed: whether kappa is at least this share of its value before."""
        pairs = zip(before[name], after[name], strict=True)
        return [now >= share * then for then, now in pairs]

    def figures(name: str) -> str:
        return f"κ {show(before[name])} -> {show(after[name])}, compliance {show(compliance[name])}"

    lost = {name: not any(retains(name, 0.25)) for name in ARMS}
    kept = {name: all(retains(name, 0.5)) for name in ARMS}
    others = max(max(accuracy[name]) for name in (vanilla, anchored, gated))
    highest = min(accuracy[full]) > others
    accuracies = ", ".join(f"{name} {show(accuracy[name])}" for name in ARMS)
    return [
        (f"(1) plain GRPO at K = {largest} loses its calls", lost[vanilla], figures(vanilla)),
        (
            "(2) its format stays poor or collapses",
            max(compliance[vanilla]) < 0.5,
            figures(vanilla),
        ),
        (
            "(3) anchoring alone holds format but not calls",
            min(compliance[anchored]) >= 0.5 and lost[anchored],
            figures(anchored),
        ),
        (
            "(4) gating alone keeps calls at the price of format",
            kept[gated] and max(compliance[gated]) < 0.5,
            figures(gated),
        ),
        (
            "(5) only both win: format holds, calls are kept, and accuracy over K is the highest",
            min(compliance[full]) >= 0.5 and kept[full] and highest,
            f"{figures(full)}; accuracy {accuracies}",
        ),
    ]


def report(results: dict[str, list[Result]]) -> str:
    """The table, a line per claim, and the tables of tool gap, likelihood of tags and format.

    The claims are about all of `ARMS`; without one of them they are left out.
    """
    tables = f"{table(results)}\n\n"
    if not ARMS.keys() <= results.keys():
        return f"{tables}{claim_tables(results)}\n"
    seeds = max(len(runs) for runs in results.values())
    counted = f"{seeds} seeds" if seeds > 1 else "one seed: a look, not a result"
    lines = []
    for claim, holds, figures in claims(results):
        lines.append(f"- {'holds' if holds else 'does not hold'}: {claim} ({figures})\n")
    return (
        f"{tables}Of the paper's claims, with {counted}:\n\n"
        f"{''.join(lines)}\n{claim_tables(results)}\n"
    )


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code.

    Writes table.md, figure.svg and results.json.
    """
    command = tyro.cli(Paradox, args=argv, prog="python -m paravt_extras.studies.paradox")
    folder = folder_of(command)
    start = time.monotonic()
    runs = plan(command)
    code = run_study(order(runs))
    if code:
        return code
    try:
        results = {name: [read(run) for run in column] for name, column in runs.items()}
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    _write(folder, results)
    seconds = format_seconds(time.monotonic() - start)
    print(f"done in {seconds}; see {folder / 'table.md'} and {folder / 'figure.svg'}")
    return 0


def _write(folder: pathlib.Path, results: dict[str, list[Result]]) -> None:
    """Write the results, the table and the figure, and print the table."""
    content: dict[str, Any] = {
        name: [dataclasses.asdict(result) for result in runs] for name, runs in results.items()
    }
    write_atomically(folder / "results.json", json.dumps(content, indent=1) + "\n")
    write_atomically(folder / "table.md", report(results))
    arms = {arm: runs for arm, runs in results.items() if arm != COLD_START}
    write_atomically(folder / "figure.svg", figure(arms, results[COLD_START][0]))
    print(report(results))


if __name__ == "__main__":
    raise SystemExit(main())
