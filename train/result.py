"""What a run found out, collected from the files of its evaluations and from its metrics.

Each file of `evaluation/` holds the lines of one K, or the episodes of one step of RL. A finished
run has their contents in result.json, and all transcripts in episodes.jsonl.
"""

from __future__ import annotations

import collections
import json
import pathlib
from typing import Any

from typing_extensions import TypedDict

from paravt_jax.data.stored import (
    DamagedFileError,
    parse_json,
    read_checked_json,
    write_atomically,
)
from train.durable.metrics import is_up_to, read_metrics, say, step_seconds

Record = dict[str, Any]


class _Result(TypedDict):
    """What is read of result.json."""

    before: list[Record]
    after: list[Record]


def read_evaluation_file(file: pathlib.Path) -> Record:
    """Read a file of `evaluation/`.

    Returns:
        `phase` and `step` of the weights that it was made from, the lines `rows`, `episodes`, and
        some have `judge`.

    Raises:
        DamagedFileError: It is damaged.
    """
    return read_checked_json(file, Record, "the run plays it again, or does without it")


def is_finished(folder: pathlib.Path) -> bool:
    """Return whether a run has its result and its model."""
    return all((folder / name).exists() for name in ("result.json", "model"))


def set_damaged_aside(folder: pathlib.Path) -> None:
    """Rename damaged files of evaluations, so that the run goes on without them."""
    for file in (folder / "evaluation").glob("*.json"):
        try:
            read_evaluation_file(file)
        except DamagedFileError as error:
            say(f"{error}; it is renamed to end with .damaged")
            file.rename(file.with_suffix(".damaged"))


def forget_after(folder: pathlib.Path, phase: str, step: int) -> None:
    """Delete what was made from weights after a step, because training goes on from it.

    Args:
        folder: The run's folder.
        phase: The phase that goes on.
        step: The last step that is kept.
    """
    # It marks a finished run.
    (folder / "result.json").unlink(missing_ok=True)
    for file in (folder / "evaluation").glob("*.json"):
        if not is_up_to(read_evaluation_file(file), phase, step):
            file.unlink()


def read_result(folder: pathlib.Path) -> Record:
    """Read result.json of a finished run.

    Raises:
        OSError: The run is not finished.
        DamagedFileError: The file holds something else.
    """
    remedy = "delete it and start the run's command again, which writes it anew"
    file = folder / "result.json"
    return parse_json(file.read_bytes(), str(file), _Result, remedy)


def result_so_far(folder: pathlib.Path) -> Record:
    """Return what result.json would hold if the run ended now."""
    steps = read_metrics(folder / "metrics.jsonl")
    result: Record = {
        name: [line for content in _contents(folder, name) for line in content["rows"]]
        for name in ("before", "after")
    }
    curve = [
        {"step": content["step"]} | line
        for content in _contents(folder, "curve")
        for line in content["rows"]
    ]
    result["curve"] = sorted(curve, key=lambda line: (line["step"], line["k"]))
    result |= _checks([line for line in steps if line["phase"] == "rl"])
    judged = collections.Counter[str]()
    for file in (folder / "evaluation").glob("*.json"):
        judged.update(read_evaluation_file(file).get("judge", {}))
    if judged:
        result["judge"] = dict(judged)
    if steps:
        # From the first step's start to the last one's end.
        result["seconds"] = steps[-1]["wall"] - steps[0]["wall"] + step_seconds(steps[0])
    return result


def write_result(folder: pathlib.Path, name: str, seed: int, videos: pathlib.Path) -> None:
    """Write result.json and episodes.jsonl, the transcripts of all phases in order.

    Args:
        folder: The run's folder.
        name: The run's name.
        seed: The run's seed.
        videos: The folder that the names of videos are relative to. Videos inside `folder` are
            named relative to `folder`, others by their absolute path.
    """
    if videos.is_relative_to(folder):
        videos = videos.relative_to(folder)
    # before-K.json, curve-STEP-K.json and after-K.json hold one K each, rl-STEP.json one step.
    episodes = [
        episode | {"video": str(videos / episode["video"])}
        for phase in ("before", "curve", "rl", "after")
        for content in _contents(folder, phase)
        for episode in content["episodes"]
    ]
    lines = [json.dumps(episode) + "\n" for episode in episodes]
    write_atomically(folder / "episodes.jsonl", "".join(lines))
    # Last, because it marks a finished run.
    result = {"name": name, "seed": seed} | result_so_far(folder)
    write_atomically(folder / "result.json", json.dumps(result, indent=1))


def _checks(steps: list[Record]) -> Record:
    """Check over all RL steps: two counts that must be 0, and a gap that must be small."""
    # There is none in a step whose tokens were all drawn by older weights.
    gaps = [line["logprob_gap"] for line in steps if "logprob_gap" in line]
    return {
        "token_mismatches": int(sum(line["token_mismatches"] for line in steps)),
        "logprob_gap": max(gaps, default=0.0),
        "recompilations_after_warmup": int(sum(line["recompilations"] for line in steps)),
    }


def _contents(folder: pathlib.Path, name: str) -> list[Record]:
    """Return the contents of an evaluation's files NAME-NUMBER.json, by number."""
    paths = (folder / "evaluation").glob(f"{name}-*.json")
    files = sorted(paths, key=lambda file: [int(part) for part in file.stem.split("-")[1:]])
    return [read_evaluation_file(file) for file in files]
