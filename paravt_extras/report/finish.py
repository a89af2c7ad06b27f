"""Writes the report of a run: at its saves as far as it is, and with the result at its end."""

from __future__ import annotations

import json
import pathlib

from paravt_extras.report.page import write_report
from paravt_extras.report.result import collect_episodes, result_so_far
from paravt_jax.data.stored import write_atomically
from paravt_jax.processes import hosts
from train.durable.metrics import say
from train.settings import Run

# Bound on reading frames of videos for the page of an unfinished run.
_FRAME_SECONDS = 3.0


def interim_report(folder: pathlib.Path, videos: pathlib.Path) -> None:
    """Write episodes.jsonl and report.html as far as the run is.

    A page that cannot be written does not end the run: the reason is printed.

    Args:
        folder: The run's folder.
        videos: The folder that the names of videos are relative to.
    """
    if not hosts.is_first():
        return
    try:
        collect_episodes(folder, videos)
        write_report(folder, frame_seconds=_FRAME_SECONDS)
    except Exception as error:
        say(
            f"warning: report.html was not written ({type(error).__name__}: {error}); training "
            "goes on, and the next save writes it again"
        )


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
