"""The figures and episodes of a run, collected from the files that its phases wrote.

`finish` stores them as result.json, which marks a finished run. Before that, a report reads them
anew.
"""

from __future__ import annotations

import collections
import json
import pathlib
from typing import Any, NotRequired

from typing_extensions import TypedDict

from paravt_jax.data.stored import parse_json, write_atomically
from train.durable.metrics import read_metrics, step_seconds
from train.evaluation_file import EvaluationRow, read_evaluation_file

Record = dict[str, Any]


class _Result(TypedDict):
    """What is read of result.json."""

    before: list[EvaluationRow]
    after: list[EvaluationRow]
    curve: NotRequired[list[EvaluationRow]]
    seconds: NotRequired[float]
    token_mismatches: NotRequired[int]
    logprob_gap: NotRequired[float]


def read_result(folder: pathlib.Path) -> Record:
    """Read result.json of a finished run.

    Raises:
        OSError: The run is not finished.
        DamagedFileError: The file holds something else.
    """
    remedy = "delete it and start the run's command again, which writes it anew"
    file = folder / "result.json"
    return parse_json(file.read_bytes(), str(file), _Result, remedy)


def read_evaluation(folder: pathlib.Path, name: str) -> list[Record]:
    """Return the lines of all finished files of an evaluation.

    Args:
        folder: The run's folder.
        name: `before` or `after`.
    """
    return [line for content in _contents(folder, name) for line in content["rows"]]


def read_curve(folder: pathlib.Path) -> list[Record]:
    """Return the lines of all evaluations during RL, each with its `step`."""
    lines = []
    for file in sorted((folder / "evaluation").glob("curve-*.json")):
        step = int(file.stem.split("-")[1])
        lines += [{"step": step} | line for line in read_evaluation_file(file)["rows"]]
    return sorted(lines, key=lambda line: (line["step"], line["k"]))


def checks(folder: pathlib.Path) -> Record:
    """Check over all RL steps: two counts that must be 0, and a gap that must be small."""
    steps = [line for line in read_metrics(folder / "metrics.jsonl") if line["phase"] == "rl"]
    # There is none in a step whose tokens were all drawn by older weights.
    gaps = [line["logprob_gap"] for line in steps if "logprob_gap" in line]
    return {
        "token_mismatches": int(sum(line["token_mismatches"] for line in steps)),
        "logprob_gap": max(gaps, default=0.0),
        "recompilations_after_warmup": int(sum(line["recompilations"] for line in steps)),
    }


def durations(folder: pathlib.Path) -> dict[str, float]:
    """Return `seconds`, from the first step's start to the last one's end; {} without steps."""
    steps = read_metrics(folder / "metrics.jsonl")
    if not steps:
        return {}
    return {"seconds": steps[-1]["wall"] - steps[0]["wall"] + step_seconds(steps[0])}


def judged(folder: pathlib.Path) -> dict[str, dict[str, int]]:
    """Return the judge's counts, summed over all evaluations; {} for a run without a judge."""
    total: collections.Counter[str] = collections.Counter()
    for file in (folder / "evaluation").glob("*.json"):
        total.update(read_evaluation_file(file).get("judge", {}))
    return {"judge": dict(total)} if total else {}


def result_so_far(folder: pathlib.Path) -> Record:
    """Return what result.json would hold if the run ended now."""
    result = {name: read_evaluation(folder, name) for name in ("before", "after")}
    result["curve"] = read_curve(folder)
    return result | checks(folder) | judged(folder) | durations(folder)


def collect_episodes(folder: pathlib.Path, root: pathlib.Path) -> None:
    """Write episodes.jsonl: the transcripts of all phases so far, in order.

    Videos inside `folder` are named relative to it, others by their absolute path.

    Args:
        folder: The run's folder.
        root: The directory that the names of videos are relative to.
    """
    videos = root.relative_to(folder) if root.is_relative_to(folder) else root
    # before-K.json and after-K.json hold one K each, rl-STEP.json one step.
    episodes = [
        episode
        for phase in ("before", "rl", "after")
        for content in _contents(folder, phase)
        for episode in content["episodes"]
    ]
    lines = [json.dumps({**e, "video": str(videos / e["video"])}) + "\n" for e in episodes]
    write_atomically(folder / "episodes.jsonl", "".join(lines))


def _contents(folder: pathlib.Path, name: str) -> list[Record]:
    """Return the contents of an evaluation's files NAME-NUMBER.json, by number."""
    paths = (folder / "evaluation").glob(f"{name}-*.json")
    files = sorted(paths, key=lambda file: int(file.stem.split("-")[1]))
    return [read_evaluation_file(file) for file in files]
