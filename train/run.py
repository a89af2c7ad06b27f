"""The training command: `python -m train.run --config=NAME [--field value ...]`.

A run is a sequence of phases: prepare, align, cold start, evaluate, reinforce, evaluate, export.
Wrong settings are reported before any device work. Ctrl-C and SIGTERM stop a run after it has saved
its progress; the same command continues it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import logging
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

from configs import RECIPES
from models.compilation import use_cache
from models.devices import reserve_memory, reuse_freed_memory
from models.model import VisionLanguageModel
from models.sharding import make_mesh
from paravt_extras.check import as_text, check, require_ready
from paravt_extras.fit import fit
from paravt_extras.slices import found_devices
from paravt_jax.data.frame_reader import FrameReader
from paravt_jax.data.stored import as_json, naming_full_disk
from paravt_jax.method.records import Question
from paravt_jax.processes import cluster, hosts
from paravt_jax.processes.exit_codes import Stopped
from paravt_jax.processes.interrupts import Interrupts
from paravt_jax.remote.judge import RemoteJudge
from train.actor import open_actor, open_environment
from train.cli import parse
from train.data import Data, QuestionStream
from train.durable.metrics import MetricsWriter
from train.durable.run_folder import RunFolder, begin_with, read_config
from train.durable.saver import Home, Saver
from train.evaluations import Evaluator
from train.learn.align import CaptionedFrames, align
from train.learn.rl import Learner
from train.learn.rollouts import draw_budgets
from train.learn.sft import SFTBatches
from train.model import first_model, require_model, take_apart
from train.model_folder import export_run
from train.prepare import note_unreadable, prepare
from train.result import is_finished, set_damaged_aside, write_result
from train.rl import train_rl
from train.settings import Run
from train.sft import train_sft

# A resumed run may change the first ones; with others of the second it is another run.
_LESS_MEMORY = (
    "the same command continues with lower --engine.cache-tokens, --engine.slots or "
    "--rl.microbatch-tokens, more --sft.microbatches, or --sft.remat full --rl.remat full (those "
    "of now are under `fitted` in config.json); else lower, in a new --run-dir, --sft.row-tokens, "
    "--rl.frame-budgets, --rl.prompts, --evaluation.frames or --frames.max-pixels"
)


def resolved(run: Run) -> dict[str, Any]:
    """Return the settings that define the results of a run, as JSON.

    They are stored in the run's folder, and a run can only be resumed with the same settings.
    Fields that are chosen for the devices are stored as they were given, open.
    Settings that may change between two starts are left out: the path of the folder, the step to
    trace, and how files are read.
    """
    settings = dataclasses.asdict(run)
    del settings["run_dir"]
    del settings["profile"]
    if run.data is not None:
        del settings["data"]["decoder"]
    return as_json(settings)


def execute(
    run: Run, interrupts: Interrupts | None = None, questions: Sequence[Question] | None = None
) -> pathlib.Path:
    """Run every phase that is not finished yet.

    Each phase writes its result atomically and skips what it finds on disk, so a run that was
    killed and started again ends with the same result as an uninterrupted one. A finished run
    returns at once, whatever else was deleted from its folder.

    Args:
        run: The settings.
        interrupts: Records signals; by default, no signal stops the run.
        questions: Your own questions, instead of the file or the data set in `run.data`; see
            `train.prepare.prepare`.

    Returns:
        The folder of the run's files.

    Raises:
        Stopped: If `interrupts` noticed a signal.
        ValueError: If the settings do not fit the data, the weights or the devices.
        LeftOutError: If too many rows or videos cannot be used.
        RunFolderError: If the folder belongs to another run.
        CheckpointError: If a checkpoint does not belong to this run.
    """
    interrupts = interrupts or Interrupts()
    config = resolved(run)
    fitted = fit(run, found_devices())
    run = fitted.run
    config |= {"fitted": fitted.chosen}
    hosts.require_same("the run's settings", config)
    mesh = make_mesh(*run.mesh.sizes)
    cluster.require_even(mesh)
    require_model(run)
    with contextlib.ExitStack() as stack:
        judge = None
        if run.rl is not None and run.rl.rewards.judge is not None:
            judge = RemoteJudge(run.rl.rewards.judge)
            stack.enter_context(contextlib.closing(judge.client))
        home = _open_home(run, config, interrupts, stack)
        if hosts.from_first(lambda: is_finished(home.folder)):
            return home.folder
        hosts.from_first(lambda: set_damaged_aside(home.folder))
        data = _prepare(run, home, questions)
        model, origin = first_model(run, data, mesh)
        if run.align is not None:
            _align(run, home, data, model, mesh, origin)

        # Training donates its input weights: their memory is reused, and only the weights that a
        # phase returns are still valid.
        parts, weights = take_apart(model, run, mesh, origin)
        decoder = "pyav" if run.data is None else run.data.decoder
        reader = stack.enter_context(FrameReader(decoder=decoder))
        environment = open_environment(run, data, parts, reader)
        home = _checking(run, home, data, environment.features.unreadable)
        actor = None
        if run.plays_episodes:
            actor = open_actor(run, parts, environment, weights, judge)
        evaluator = Evaluator(run, home, data, actor)
        # The frames of the small world stay in memory, so nothing is read ahead of time.
        ahead = None if run.data is None else environment.features

        if run.sft is not None:
            batches = SFTBatches(run.sft, data, ahead, run.seed, environment, mesh)
            with Saver(
                "sft", run.sft.steps, _save_every(run.sft.steps), home, parts.origin, parts
            ) as saver:
                weights = train_sft(parts, weights, batches, saver)
        evaluator.evaluate(weights, "before")
        if run.rl is not None:
            assert actor is not None, "a run with RL plays episodes"
            learner = Learner(parts.skeleton, weights, model.config, run.rl, run.rl_shape)
            # Draws the same budgets as the steps will, so that the right frames are read ahead.
            budgets = functools.partial(draw_budgets, run.rl, run.seed, prompts=run.rl.prompts)
            # Another seed than for conversations, so that the two orders are independent.
            stream = QuestionStream(data, ahead, run.seed + 2, run.rl.grpo.group_size, budgets)
            with Saver("rl", run.rl.steps, run.rl.save_every, home, parts.origin, parts) as saver:
                weights = train_rl(learner, actor, stream, saver, evaluator, run.seed)
            del learner
        evaluator.evaluate(weights, "after")
        export_run(run, home.folder, parts, weights)
        hosts.from_first(lambda: write_result(home.folder, run.name, run.seed, data.root))
        return home.folder


def _run_folder(run: Run) -> RunFolder:
    return RunFolder(run.run_dir or f"runs/{run.name}")


def _open_home(
    run: Run, config: dict[str, Any], interrupts: Interrupts, stack: contextlib.ExitStack
) -> Home:
    """Lock the run until `stack` closes."""
    run_folder = _run_folder(run)
    stack.enter_context(naming_full_disk(run_folder.folder))
    # One lock serves all processes of a run, so only the first one takes it.
    hosts.from_first(lambda: run_folder.claim(config, stack))
    run_folder.pull()
    run_folder.require_shared()
    use_cache(run_folder.address)
    metrics = MetricsWriter(run_folder.folder)
    stack.enter_context(contextlib.closing(metrics))
    config = read_config(run_folder.folder, "--run-dir")
    return Home(run_folder, config, metrics, interrupts=interrupts, profile=run.profile)


def _prepare(run: Run, home: Home, questions: Sequence[Question] | None) -> Data:
    """Prepare the data in the first process; the others open the result."""

    def check() -> None:
        # The other processes are waiting and cannot vote, so the first one decides alone. They
        # receive its `Stopped` from `on_all` below.
        asked = home.interrupts.asked()
        if asked is not None and hosts.is_first():
            raise Stopped(asked, "stopped while preparing the data; finished videos are kept")

    def prepare_here() -> Data:
        home.run_folder.pull()
        own = prepare(run, home.folder, check, questions)
        home.run_folder.push()
        return own

    first = hosts.on_all(lambda: prepare_here() if hosts.is_first() else None)
    data = hosts.on_all(lambda: first or prepare_here())
    if run.data is not None:
        hosts.require_same(f"data.folder: {run.data.folder}, the prepared set", data.digest)
    return data


def _checking(run: Run, home: Home, data: Data, unreadable: dict[str, str]) -> Home:
    """Return the home of a phase that saves nothing once too many videos have become unreadable.

    `unreadable` are videos that this process could not decode, each with the reason; it grows.
    """
    check = functools.partial(note_unreadable, run, data, unreadable)
    return dataclasses.replace(home, check=check)


def _align(
    run: Run, home: Home, data: Data, model: VisionLanguageModel, mesh: Mesh, origin: dict[str, Any]
) -> None:
    """Teach the fresh vision tower of a tiny model to see."""
    assert run.align is not None
    rules = run.frames.rules(model.config.vision)
    captioned = CaptionedFrames(data.captions, data.vocabulary, data.root, rules)
    # The tiny model is replicated: every process trains the whole model.
    whole = NamedSharding(mesh, PartitionSpec())
    nnx.update(model, jax.device_put(nnx.state(model), whole))
    home = _checking(run, home, data, captioned.unreadable)
    with Saver("align", run.align.steps, _save_every(run.align.steps), home, origin) as saver:
        align(model, captioned, run.align, run.seed, saver)


def _save_every(steps: int) -> int:
    """Return the steps between checkpoints of a phase without rollouts: a fifth, at most 100."""
    return min(100, -(-steps // 5))


def _show(run: Run, topology: str) -> int:
    """Print what the run needs. Returns 1 if it would stop, else 0."""
    if not topology:
        cluster.connect()
    findings = check(run, resolved(run), _run_folder(run), topology)
    if hosts.is_first():
        print(as_text(findings))
    return int(any(finding.code for finding in findings))


def train(run: Run, prepared: Callable[[Run], Run] = lambda run: run, resume_from: str = "") -> int:
    """Run every unfinished phase, and say how to see the result.

    Args:
        run: The settings.
        prepared: Replaces settings once the processes have joined.
        resume_from: A checkpoint of another run to begin with.

    Returns:
        The exit code.
    """
    begin = time.monotonic()
    # Processes have to join before JAX sees a device: afterwards it cannot add other hosts.
    cluster.connect()
    with Interrupts() as interrupts:
        run = prepared(run)
        if resume_from:
            config, folder = resolved(run), _run_folder(run).shown
            hosts.from_first(lambda: begin_with(resume_from, config, folder))
        require_ready(run, resolved(run), _run_folder(run))
        execute(run, interrupts)
    seconds = tqdm.format_interval(time.monotonic() - begin)
    print(f"done in {seconds}; for its page: paravt report {_run_folder(run).shown}")
    return 0


def command(run: Run, work: Callable[[Run], int]) -> int:
    """Do some work for a run, such as `train`. Returns the exit code; an error has one line."""
    reuse_freed_memory()
    reserve_memory()
    _silence_stacks()
    in_words = functools.partial(_in_words, run=run)
    return cluster.run_command(lambda: work(run), _LESS_MEMORY, in_words)


def _silence_stacks() -> None:
    """Keep Orbax and gcsfs from printing the stacks of failures, which they raise as well."""
    for name in ("absl", "asyncio", "gcsfs"):
        logging.getLogger(name).setLevel(logging.CRITICAL)

    def report(unraisable: Any) -> None:
        # At its first failed write Orbax closes its event loop, and cannot be told of others.
        if str(unraisable.exc_value) != "Event loop is closed":
            sys.__unraisablehook__(unraisable)

    sys.unraisablehook = report


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser("python -m train.run", add_help=False, allow_abbrev=False)
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--check", action="store_true", help="print what the run needs, and exit")
    group.add_argument(
        "--resume-from", default="", help="begin a new --run-dir with RUN/checkpoints/PHASE/STEP"
    )
    parser.add_argument(
        "--topology", default="", help="with --check: a TPU slice, such as v5e:4x4 or 2*v5e:4x4"
    )
    options, arguments = parser.parse_known_args(argv)
    if options.topology and not options.check:
        parser.error("--topology: only with --check; a run uses the devices that it finds")
    run = parse(arguments, RECIPES, parser.prog, __doc__, [parser])
    work = functools.partial(train, resume_from=options.resume_from)
    if options.check:
        work = functools.partial(_show, topology=options.topology)
    return command(run, work)


def _in_words(error: Exception, run: Run) -> str:
    """Return the message of an error, with paths of a bucket."""
    # Without its package, a bucket has no paths.
    with contextlib.suppress(ModuleNotFoundError):
        return _run_folder(run).in_words(str(error))
    return str(error)


if __name__ == "__main__":
    raise SystemExit(main())
