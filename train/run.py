"""The command: `python -m train.run --config=NAME [--field value ...]`.

Owns the order of a run: settings, run directory, data, phases, result, report. A mistake in the settings ends it before any
device work; Ctrl-C or SIGTERM end it with a word on how to go on, and the same command goes on.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

from configs import RECIPES
from configs.base import Run
from train.allocator import reuse_freed_memory
from train.checkpoint import CheckpointError
from train.cli import parse
from train.interrupts import Interrupts
from train.metrics import MetricsWriter, format_seconds, read_metrics
from train.prepare import UnreadableVideosError, prepare
from train.report import write_report
from train.run_directory import RunDirectory, RunDirectoryError, take_over, write_atomically
from train.session import Session

STOPPED = 130  # the exit code of a run that was asked to stop: the same command goes on


def resolved(run: Run) -> dict[str, Any]:
    """The settings that decide what is computed, as they are written down."""
    settings = dataclasses.asdict(run)
    del settings["run_dir"]
    del settings["unreadable_share"]  # may be raised when a run goes on: it decides whether to go on, not what is computed
    return settings


def execute(run: Run, check: Callable[[], None] = lambda: None) -> pathlib.Path:
    """Run every phase that is not done yet; returns the report's path. `check` is called at every step and may raise to stop.

    Raises what `train.prepare.prepare` and `RunDirectory` raise.
    """
    settings = resolved(run)
    with RunDirectory(run.run_dir or f"runs/{run.name}", settings) as directory, _Clock(directory.path / "seconds.json") as clock:

        def tick() -> None:
            clock.save()
            check()

        if run.start:
            take_over(run.start, directory.path, settings)
        data = prepare(run, directory.path, check)
        log = run.log
        with contextlib.closing(MetricsWriter(directory.path, log.tensorboard, log.wandb, log.wandb_project, settings)) as metrics:
            session = Session(run, directory.path, data, metrics, tick)
            session.align()
            session.open()
            session.cold_start()
            before = session.evaluate("before")
            session.reinforce()
            after = session.evaluate("after")
            session.export()
        result = {"name": run.name, "seed": run.seed, "before": before, "after": after, **_counts(directory.path)}
        result |= {**_judged(directory.path), "seconds": clock.total}
        write_atomically(directory.path / "result.json", json.dumps(result, indent=1))
        _collect_episodes(directory.path)
        return write_report(directory.path)


def _counts(folder: pathlib.Path) -> dict[str, Any]:
    """What has to be zero, or small, over the whole of RL."""
    steps = [line for line in read_metrics(folder / "metrics.jsonl") if line["phase"] == "rl"]
    gaps = [line["logprob_gap"] for line in steps]
    return {
        "token_mismatches": int(sum(line["token_mismatches"] for line in steps)),
        "logprob_gap": max(gaps, default=0.0),
        "recompilations_after_warmup": int(sum(line["recompilations"] for line in steps)),
    }


def _judged(folder: pathlib.Path) -> dict[str, dict[str, int]]:
    """What became of the answers that a judge was to score, summed over both evaluations; nothing where a run has no judge."""
    contents = [json.loads(file.read_text()) for file in (folder / "evaluation").glob("*.json")]
    counts = [content["judge"] for content in contents if "judge" in content]
    total: collections.Counter[str] = collections.Counter()
    for count in counts:
        total.update(count)
    return {"judge": dict(total)} if counts else {}


def _collect_episodes(folder: pathlib.Path) -> None:
    """episodes.jsonl: the transcripts of all phases, in order."""
    order = ("before", "rl", "after")
    files = sorted((folder / "evaluation").glob("*.json"), key=lambda f: (order.index(f.stem.split("-")[0]), int(f.stem.split("-")[1])))
    lines = [
        json.dumps({**episode, "video": f"videos/{episode['video']}"}) for f in files for episode in json.loads(f.read_text())["episodes"]
    ]
    write_atomically(folder / "episodes.jsonl", "".join(line + "\n" for line in lines))


class _Clock:
    """Seconds that the run has taken, over all its processes."""

    def __init__(self, file: pathlib.Path):
        self._file, self._start = file, time.monotonic()
        self._earlier = json.loads(file.read_text()) if file.exists() else 0.0

    @property
    def total(self) -> float:
        return self._earlier + time.monotonic() - self._start

    def save(self) -> None:
        write_atomically(self._file, json.dumps(self.total))

    def __enter__(self) -> _Clock:
        return self

    def __exit__(self, *_: object) -> None:
        self.save()


def main(argv: list[str] | None = None) -> int:
    """The command's exit code."""
    run = parse(sys.argv[1:] if argv is None else argv, RECIPES)
    reuse_freed_memory()
    start = time.monotonic()
    try:
        with Interrupts() as interrupts:
            report = execute(run, interrupts.check)
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from the last checkpoint", file=sys.stderr)
        return STOPPED
    except (RunDirectoryError, CheckpointError, UnreadableVideosError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"done in {format_seconds(time.monotonic() - start)}; see {report}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
