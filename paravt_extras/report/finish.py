"""Writes the result and the report of a finished run."""

from __future__ import annotations

import json
import pathlib

from paravt_extras.report.page import write_report
from paravt_extras.report.result import collect_episodes, result_so_far
from paravt_jax.data.stored import write_atomically
from paravt_jax.processes import hosts
from train.settings import Run


def final_report(run: Run, folder: pathlib.Path, videos: pathlib.Path) -> pathlib.Path:
    """Write result.json, episodes.jsonl and report.html.

    Args:
        run: The settings.
        folder: The run's folder.
        videos: The folder that the names of videos are relative to.

    Returns:
        The path of report.html.
    """
    with hosts.one_after_another():
        if hosts.is_first():
            result = {"name": run.name, "seed": run.seed} | result_so_far(folder)
            write_atomically(folder / "result.json", json.dumps(result, indent=1))
            collect_episodes(folder, videos)
            write_report(folder)
    return folder / "report.html"
