"""The command: `python -m train.run --config=NAME [--field value ...]`.

Owns the order of a run: settings, run directory, data, phases, result, report. A mistake in the settings ends it before any
device work; Ctrl-C or SIGTERM end it with what is done saved, exit codes of their own and a word on how to go on.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import pathlib
import sys
import time
from typing import Any

from configs import RECIPES
from models.sharding import make_mesh
from paravt_jax.data.atomic import write_atomically
from train.cli import parse
from train.durable import hosts
from train.durable.allocator import reuse_freed_memory
from train.durable.checkpoint import CheckpointError
from train.durable.interrupts import Interrupts, Stopped
from train.durable.metrics import MetricsWriter, SilentMetrics, format_seconds, read_metrics
from train.durable.run_directory import RunDirectory, RunDirectoryError, as_json, take_over
from train.learn.placement import require_even
from train.prepare import UnreadableVideosError, prepare
from train.published_model import config_of, require_weights
from train.report.page import write_report
from train.session import Session
from train.settings import Run


def resolved(run: Run) -> dict[str, Any]:
    """The settings as they are written down: all but the folder's own name, where its processes are, and what reads its files."""
    settings = dataclasses.asdict(run)
    del settings["run_dir"], settings["hosts"]
    if run.data is not None:
        del settings["data"]["workers"], settings["data"]["deadline"]
    return as_json(settings, "the run's settings")


def execute(run: Run, interrupts: Interrupts | None = None) -> pathlib.Path:
    """Run every phase that is not done yet; returns the report's path. Raises Stopped where `interrupts` heard a signal.

    Raises what `train.prepare.prepare`, `RunDirectory`, `train.durable.phase.Phase` and, for
    more devices than there are, `make_mesh` raise.
    """
    settings, interrupts, log = resolved(run), interrupts or Interrupts(), run.log
    folder = pathlib.Path(run.run_dir or f"runs/{run.name}").absolute()
    hosts.require_same("the run's settings", settings)
    require_even(
        make_mesh(run.mesh.data, run.mesh.fsdp, run.mesh.tensor)
    )  # refuses what is not there before any work on data
    if run.model.path:
        config_of(run.model.path, run.model.size)  # and weights of another size, or none
        require_weights(run.model.path)
    with contextlib.ExitStack() as stack:
        with hosts.one_after_another():
            if hosts.is_first():
                stack.enter_context(RunDirectory(folder, settings))
                if run.start:
                    take_over(run.start, folder, settings)
        hosts.require_shared(folder)
        with hosts.one_after_another(alike=Stopped):
            kept = "stopped while preparing the data; finished videos are kept"
            # The first one works, and stops for all; the others find what it made, and stop with it at the next step.
            data = prepare(
                run,
                folder,
                (lambda: interrupts.check_alone(kept)) if hosts.is_first() else lambda: None,
            )
        if data.digest:
            hosts.require_same(
                f"data.folder: {run.data.folder if run.data else ''}, the prepared set",
                data.digest,
            )
        clock = stack.enter_context(_Clock(folder / "seconds.json"))
        if hosts.is_first():
            metrics = MetricsWriter(folder, log.tensorboard, log.wandb, log.wandb_project, settings)
        else:
            metrics = SilentMetrics(folder)
        stack.enter_context(contextlib.closing(metrics))
        with contextlib.closing(
            Session(run, settings, folder, data, metrics, interrupts, clock.save)
        ) as session:
            session.align()
            session.open()
            session.cold_start()
            before = session.evaluate("before")
            session.reinforce()
            after = session.evaluate("after")
            session.export()
        with hosts.one_after_another():
            if hosts.is_first():
                result = {
                    "name": run.name,
                    "seed": run.seed,
                    "before": before,
                    "after": after,
                    **_counts(folder),
                }
                result |= {**_judged(folder), "seconds": clock.total}
                write_atomically(folder / "result.json", json.dumps(result, indent=1))
                _collect_episodes(folder, data.root)
                write_report(folder)
        return folder / "report.html"


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


def _collect_episodes(folder: pathlib.Path, root: pathlib.Path) -> None:
    """episodes.jsonl: the transcripts of all phases, in order. Videos of a world are named from `folder`, others by their whole path."""
    videos = root.relative_to(folder) if root.is_relative_to(folder) else root
    order = ("before", "rl", "after")
    files = sorted(
        (folder / "evaluation").glob("*.json"),
        key=lambda f: (order.index(f.stem.split("-")[0]), int(f.stem.split("-")[1])),
    )
    lines = [
        json.dumps({**episode, "video": str(videos / episode["video"])})
        for f in files
        for episode in _episodes(f)
    ]
    write_atomically(folder / "episodes.jsonl", "".join(line + "\n" for line in lines))


def _episodes(file: pathlib.Path) -> list[dict[str, Any]]:
    return json.loads(file.read_text())["episodes"]


class _Clock:
    """Seconds that the run has taken, over all its processes."""

    def __init__(self, file: pathlib.Path):
        self._file, self._start = file, time.monotonic()
        self._earlier = json.loads(file.read_text()) if file.exists() else 0.0

    @property
    def total(self) -> float:
        return self._earlier + time.monotonic() - self._start

    def save(self) -> None:
        if hosts.is_first():
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
        hosts.connect(run.hosts)
        with Interrupts() as interrupts, hosts.ending_with_the_others():
            report = execute(run, interrupts)
    except Stopped as stop:
        print(f"\n{stop}; the same command goes on from there", file=sys.stderr)
        return stop.code
    except (
        RunDirectoryError,
        CheckpointError,
        UnreadableVideosError,
        hosts.HostsError,
        ValueError,
        OSError,
        ModuleNotFoundError,
    ) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"done in {format_seconds(time.monotonic() - start)}; see {report}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
