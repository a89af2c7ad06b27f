"""The last phase: writes the result, the episodes of all phases, and the report."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from paravt_jax.data.atomic import write_atomically
from paravt_jax.processes import hosts
from train.left_out import read_rows
from train.phases.context import Context
from train.report.page import write_report
from train.report.result import (
    checks,
    collect_episodes,
    goodput,
    judged,
    read_by_temperature,
    read_curve,
)
from train.report.reward import describe

Rows = list[dict[str, Any]]


def report(context: Context, rows: dict[str, Rows], seconds: float) -> pathlib.Path:
    """Write result.json, episodes.jsonl and report.html; returns the path of report.html.

    Args:
        context: The run.
        rows: Rows of each evaluation, by its name.
        seconds: Duration of the run.
    """
    folder = context.folder
    with hosts.one_after_another():
        if hosts.is_first():
            result = {"name": context.run.name, "seed": context.run.seed}
            if context.run.rl is not None:
                result["reward"] = describe(context.run.rl.rewards)
            rows_of_sources = read_rows(folder)
            if rows_of_sources:
                result["data"] = rows_of_sources
            result |= rows | {"curve": read_curve(folder)}
            result["by_temperature"] = read_by_temperature(folder)
            result |= checks(folder) | judged(folder) | {"seconds": seconds} | goodput(folder)
            write_atomically(folder / "result.json", json.dumps(result, indent=1))
            collect_episodes(folder, context.data.root)
            write_report(folder)
    return folder / "report.html"
