"""The command: `python -m train.run --config=NAME [--field value ...]`.

A run is a sequence of phases: prepare, align, cold start, evaluate, reinforce, evaluate, export,
report. A mistake in the settings ends it before any device work. Ctrl-C and SIGTERM end it with
what is done saved, exit codes of their own and a word on how to go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh

from configs import RECIPES
from models.sharding import make_mesh
from paravt_jax.data.stored_settings import as_json
from paravt_jax.method.records import Question
from paravt_jax.remote.judge import RemoteJudge
from train.cli import parse
from train.data import Data
from train.durable import cluster, hosts
from train.durable.allocator import reuse_freed_memory
from train.durable.checkpoint import CheckpointError
from train.durable.clock import Clock
from train.durable.interrupts import Interrupts, Stopped
from train.durable.metrics import MetricsWriter, SilentMetrics, format_seconds
from train.durable.run_directory import RunDirectory, RunDirectoryError, take_over
from train.learn.placement import require_even
from train.phases.actor import open_actor, open_environment
from train.phases.align import align
from train.phases.cold_start import cold_start
from train.phases.context import Context
from train.phases.evaluation import evaluate
from train.phases.export import export
from train.phases.model import first_model, take_apart
from train.phases.reinforce import reinforce
from train.phases.report import report
from train.prepare import prepare
from train.published_data import open_reader
from train.published_model import config_of, require_weights
from train.settings import Run
from train.unreadable import UnreadableVideosError


def resolved(run: Run) -> dict[str, Any]:
    """The settings as they are written down: all but the folder's own name, where its processes are, and what reads its files."""
    settings = dataclasses.asdict(run)
    del settings["run_dir"], settings["hosts"]
    if run.data is not None:
        del settings["data"]["workers"], settings["data"]["deadline"]
    return as_json(settings, "the run's settings")


def execute(
    run: Run, interrupts: Interrupts | None = None, questions: Sequence[Question] | None = None
) -> pathlib.Path:
    """Runs every phase that is not done yet; returns the report's path.

    `questions` are asked instead of a file's or of published ones; see `train.prepare.prepare`.

    What a phase leaves on disk is written atomically and decides what follows, so a run that is
    killed and started again ends like one that was not. Phases donate the weights they are given.

    Raises Stopped where `interrupts` heard a signal, and what `train.prepare.prepare`,
    `RunDirectory`, `train.durable.phase.Phase` and `make_mesh` raise.
    """
    settings, interrupts, log = resolved(run), interrupts or Interrupts(), run.log
    folder = pathlib.Path(run.run_dir or f"runs/{run.name}").absolute()
    mesh = _check(run, settings)
    with contextlib.ExitStack() as stack:
        judge = None
        if run.rl is not None and run.rl.rewards.judge is not None:
            judge = stack.enter_context(contextlib.closing(RemoteJudge(run.rl.rewards.judge)))
        _claim(run, folder, settings, stack)
        data = _prepare(run, folder, interrupts, questions)
        clock = stack.enter_context(Clock(folder / "seconds.json"))
        if hosts.is_first():
            metrics = MetricsWriter(folder, log.tensorboard, log.wandb, log.wandb_project, settings)
        else:
            metrics = SilentMetrics(folder)
        stack.enter_context(contextlib.closing(metrics))
        model, origin = first_model(run, data, mesh)
        context = Context(
            run=run,
            settings=settings,
            folder=folder,
            data=data,
            mesh=mesh,
            origin=origin,
            param_dtype=model.text.embedding[...].dtype.name,
            metrics=metrics,
            interrupts=interrupts,
            tick=clock.save,
        )
        align(context, model)
        parts, weights = take_apart(model, mesh)
        reader = None
        if run.data is not None:
            reader = open_reader(run.data, run.frames, model.config.vision)
            stack.enter_context(contextlib.closing(reader))
        environment = open_environment(run, data, model, reader)
        actor = open_actor(run, model, environment, judge, weights)
        weights = cold_start(context, parts, environment, reader, weights)
        before = evaluate(context, actor, weights, "before")
        weights = reinforce(context, parts, actor, reader, weights)
        after = evaluate(context, actor, weights, "after")
        export(context, parts, weights)
        return report(context, before, after, clock.total)


def _check(run: Run, settings: dict[str, Any]) -> Mesh:
    """The run's mesh. Refuses what is not there before any work on data."""
    hosts.require_same("the run's settings", settings)
    mesh = make_mesh(run.mesh.data, run.mesh.fsdp, run.mesh.tensor)
    require_even(mesh)
    if run.model.path:
        config_of(run.model.path, run.model.size)
        require_weights(run.model.path)
    return mesh


def _claim(
    run: Run, folder: pathlib.Path, settings: dict[str, Any], stack: contextlib.ExitStack
) -> None:
    """Takes the run's folder until `stack` ends, and what another run has made for it."""
    with hosts.one_after_another():
        if hosts.is_first():
            stack.enter_context(RunDirectory(folder, settings))
            if run.start:
                take_over(run.start, folder, settings)
    cluster.require_shared(folder)


def _prepare(
    run: Run,
    folder: pathlib.Path,
    interrupts: Interrupts,
    questions: Sequence[Question] | None,
) -> Data:
    """The first process works, and stops for all; the others find what it made, and stop with it
    at the next step."""

    def check() -> None:
        if hosts.is_first():
            interrupts.check_alone("stopped while preparing the data; finished videos are kept")

    with hosts.one_after_another(alike=Stopped):
        data = prepare(run, folder, check, questions)
    if run.data is not None:
        hosts.require_same(f"data.folder: {run.data.folder}, the prepared set", data.digest)
    return data


def main(argv: list[str] | None = None) -> int:
    """The command's exit code."""
    run = parse(sys.argv[1:] if argv is None else argv, RECIPES)
    reuse_freed_memory()
    start = time.monotonic()
    try:
        cluster.connect(run.hosts)
        with Interrupts() as interrupts, cluster.ending_with_the_others():
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
