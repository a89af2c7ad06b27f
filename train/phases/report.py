"""The last phase: writes the result, the episodes of all phases, and the report."""

from __future__ import annotations

import collections
import json
import pathlib
from typing import Any

from paravt_jax.data.atomic import write_atomically
from paravt_jax.method.rewards import describe
from train.durable import hosts
from train.durable.metrics import read_metrics
from train.phases.context import Context
from train.phases.evaluation import read_curve
from train.report.page import write_report

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
            result |= rows | {"curve": read_curve(folder)}
            result |= _counts(folder) | _judged(folder) | {"seconds": seconds}
            write_atomically(folder / "result.json", json.dumps(result, indent=1))
            _collect_episodes(folder, context.data.root)
            write_report(folder)
    return folder / "report.html"


def _counts(folder: pathlib.Path) -> dict[str, Any]:
    """Checks over all RL steps: two counts that must be 0, and a gap that must be small."""
    steps = [line for line in read_metrics(folder / "metrics.jsonl") if line["phase"] == "rl"]
    gaps = [line["logprob_gap"] for line in steps]
    return {
        "token_mismatches": int(sum(line["token_mismatches"] for line in steps)),
        "logprob_gap": max(gaps, default=0.0),
        "recompilations_after_warmup": int(sum(line["recompilations"] for line in steps)),
    }


def _judged(folder: pathlib.Path) -> dict[str, dict[str, int]]:
    """The judge's counts, summed over all evaluations; {} for a run without a judge."""
    contents = [json.loads(file.read_text()) for file in (folder / "evaluation").glob("*.json")]
    counts = [content["judge"] for content in contents if "judge" in content]
    total: collections.Counter[str] = collections.Counter()
    for count in counts:
        total.update(count)
    return {"judge": dict(total)} if counts else {}


def _collect_episodes(folder: pathlib.Path, root: pathlib.Path) -> None:
    """Write episodes.jsonl: the transcripts of all phases, in order.

    Videos inside `folder` are named relative to it, others by their absolute path.
    """
    videos = root.relative_to(folder) if root.is_relative_to(folder) else root
    files: list[pathlib.Path] = []
    # before-K.json and after-K.json hold one K each, rl-STEP.json one step.
    for phase in ("before", "rl", "after"):
        found = (folder / "evaluation").glob(f"{phase}-*.json")
        files += sorted(found, key=lambda file: int(file.stem.split("-")[1]))
    episodes = [episode for file in files for episode in json.loads(file.read_text())["episodes"]]
    lines = [json.dumps({**e, "video": str(videos / e["video"])}) + "\n" for e in episodes]
    write_atomically(folder / "episodes.jsonl", "".join(lines))
