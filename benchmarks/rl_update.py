"""Time of an RL update and its reference pass at real lengths, against the lengths at their limits.

python -m benchmarks.rl_update
python -m benchmarks.rl_update --lengths runs/paravt_tiny/metrics.jsonl --steps 4
python -m benchmarks.rl_update --against FOLDER

The first two time packed rows at real lengths, and at the limits. The third compares whole steps
(reference pass, gradients and optimizer) with those of the padded layout. FOLDER is a checkout of
the last commit before rows were packed: `git worktree add FOLDER 210a70d`. It runs in a process of
its own (`benchmarks/padded_rl_update.py`).

Model and programs are those of `paravt_tiny`; the tokens are random. Both cases take turns, so that
the load of the machine falls on both. CPU seconds count all threads.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from configs.paravt_tiny import paravt_tiny
from models.features import FrameFeatures
from models.model import VisionLanguageModel
from models.sharding import make_mesh, param_shardings
from paravt_extras.plan.programs import planned_config
from paravt_extras.plan.workload import lengths_of, read
from paravt_jax.data import video
from paravt_jax.method.grpo import batch_totals
from paravt_jax.method.records import Author, Segment, Trajectory
from paravt_jax.method.scoring import Rules
from rollout.evaluation.markdown import table
from train.learn.batch import Group, build
from train.learn.packing import GroupLengths, pack
from train.learn.placement import place, place_whole
from train.learn.rl import Learner
from train.learn.rl_batch import RLBatch, lay_out_padding
from train.learn.step import TrainState
from train.settings import Run

LENGTHS = pathlib.Path(__file__).with_name("lengths_tiny.json")
ROUNDS = 3
_PADDED = "make a checkout of the padded layout: git worktree add FOLDER 210a70d"


class Case:
    """The update and the reference pass of one step whose trajectories have given lengths."""

    def __init__(self, learner: Learner, groups: Sequence[GroupLengths]):
        self._learner = learner
        self.tokens = sum(group.prompt + sum(group.suffixes) for group in groups)
        config = planned_config(paravt_tiny())
        shape = paravt_tiny().rl_shape
        trajectories = _trajectories(groups, shape.rollouts)
        packed = pack(groups, learner.sizes)
        self.places = sum(microbatch.shape.places for microbatch in packed)
        self.packed = packed
        self._microbatches = [
            place_whole(build(part, trajectories, config, shape.rows, shape.suffix), learner.mesh)
            for part in packed
        ]
        sizes = (1, shape.slots(1, 1), 1 + config.vision.levels, config.text.hidden_size)
        self._visual: Any = place({"visual": np.zeros(sizes, np.float32)}, learner.mesh)["visual"]

    def update(self, batch: RLBatch) -> None:
        """Gradients of the whole step, without the optimizer."""
        jax.block_until_ready(self._gradients(self._learner.start.weights, batch))

    def step(self, state: TrainState, batch: RLBatch) -> TrainState:
        """The reference pass and the update, with its optimizer. Donates the state."""
        reference = [
            self._learner.logprobs(state.weights, self._visual, part) for part in self._microbatches
        ]
        jax.block_until_ready(reference)
        gradients = self._gradients(state.weights, batch)
        return jax.block_until_ready(self._learner.update.apply(state, gradients)[0])

    def _gradients(self, weights: Any, batch: RLBatch) -> Any:
        total = self._learner.update.start(weights)
        for part in self._microbatches:
            total, _ = self._learner.update.add(weights, total, self._visual, part, batch)
        return total

    def reference(self) -> None:
        """Log-probs of the whole step."""
        weights = self._learner.start.weights
        for part in self._microbatches:
            jax.block_until_ready(self._learner.logprobs(weights, self._visual, part))


def _trajectories(groups: Sequence[GroupLengths], rollouts: int) -> list[Group]:
    """Random text of the given lengths; all but the prompts is sampled."""
    rng = np.random.default_rng(0)

    def text(length: int) -> np.ndarray:
        return rng.integers(0, 100, length).astype(np.int32)

    found = []
    for number, (prompt, suffixes) in enumerate(groups):
        # The prompt's last token belongs to its rollouts.
        begin = Segment(text(prompt + 1), Author.PROMPT)
        members = []
        for length in suffixes:
            written = text(length - 1)
            drawn = np.zeros(len(written), np.float32)
            members.append(Trajectory((begin, Segment(written, Author.MODEL, drawn))))
        found.append(Group(tuple(members), number * rollouts, (), 0))
    return found


def make_learner(run: Run) -> tuple[Learner, RLBatch]:
    """A learner with random weights, and rollouts that all count."""
    assert run.rl is not None
    config = planned_config(run)
    model = nnx.jit(lambda: VisionLanguageModel(config, rngs=nnx.Rngs(0)))()
    graph, weights = nnx.split(model.text)
    weights = jax.device_put(weights, param_shardings(weights, make_mesh()))
    learner = Learner(graph, weights, config, run.rl, run.rl_shape, Rules())
    features = FrameFeatures(None, config, run.frames, pathlib.Path(), source=video)
    empty = lay_out_padding(run.rl_shape, features, ())
    everything = {"mask": np.ones_like(empty.grpo.mask), "valid": np.ones_like(empty.grpo.valid)}
    batch = place(dataclasses.replace(empty.grpo, **everything), learner.mesh)
    advantages: Any = place({"all": np.ones(batch.mask.shape, np.float32)}, learner.mesh)["all"]
    return learner, RLBatch(batch, advantages, batch_totals(batch))


def _seconds(work: Any) -> tuple[float, float]:
    """(seconds, CPU seconds) of a call."""
    start = (time.perf_counter(), time.process_time())
    work()
    return time.perf_counter() - start[0], time.process_time() - start[1]


def measure(steps: Sequence[Sequence[GroupLengths]]) -> list[list[str]]:
    """Rows of the table: each case with its mean times over the steps."""
    learner, batch = make_learner(paravt_tiny())
    limits = Case(learner, paravt_tiny().rl_shape.at_limits)
    found: dict[str, list[list[tuple[float, float]]]] = {"packed": [], "at the limits": []}
    tokens = []
    places = []
    for groups in steps:
        packed = Case(learner, groups)
        tokens.append(packed.tokens)
        places.append(packed.places)
        for case in (packed, limits):
            case.update(batch)
            case.reference()
        rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in found}
        for _ in range(ROUNDS):
            for name, case in (("packed", packed), ("at the limits", limits)):
                update = _seconds(lambda case=case: case.update(batch))
                reference = _seconds(case.reference)
                rounds[name].append((update[0] + reference[0], update[1] + reference[1]))
        for name, times in rounds.items():
            found[name].append([min(column) for column in zip(*times, strict=True)])
    means = {name: np.mean(times, axis=0) for name, times in found.items()}
    sizes = {
        "packed": (statistics.mean(tokens), statistics.mean(places)),
        "at the limits": (limits.tokens, limits.places),
    }
    return [
        [name, *(f"{size:.0f}" for size in sizes[name]), *(f"{x:.3f}" for x in means[name])]
        + [f"{x:.2f}" for x in means["at the limits"] / means[name]]
        for name in found
    ]


def take_turns(
    ours: Callable[[int], Any], theirs: Sequence[str], lengths: Any, cwd: pathlib.Path
) -> list[list[str]]:
    """Rows of the table of `--against`: mean times of both sides, in turns, of the best rounds.

    Args:
        ours: Computes the step with a number.
        theirs: The command of the other side, which speaks as `benchmarks.padded_rl_update` does.
        lengths: The lengths of the steps, which it gets as JSON.
        cwd: Its working directory, whose modules it imports.

    Raises:
        ValueError: the other side gives no answer.
    """
    environment = {**os.environ, "PYTHONPATH": str(cwd)}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    times: dict[str, list[list[float]]] = {"packed": [], "padded": []}
    with subprocess.Popen(theirs, cwd=cwd, env=environment, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None
        questions, answers = process.stdin, process.stdout

        def ask(line: str) -> str:
            questions.write(f"{line}\n")
            questions.flush()
            answer = answers.readline()
            if not answer:
                raise ValueError(f"--against {cwd}: no answer from its steps; {_PADDED}")
            return answer

        ask(json.dumps(lengths))
        for step in range(len(lengths)):
            ours(step)
            rounds = [
                (_seconds(lambda: ours(step)), [float(x) for x in ask(str(step)).split()])  # noqa: B023
                for _ in range(ROUNDS)
            ]
            for name, side in zip(times, zip(*rounds, strict=True), strict=True):
                times[name].append([min(column) for column in zip(*side, strict=True)])
        questions.close()
    means = {name: np.mean(found, axis=0) for name, found in times.items()}
    return [
        [name, *(f"{x:.3f}" for x in means[name])]
        + [f"{x:.2f}" for x in means["padded"] / means[name]]
        for name in times
    ]


def against(folder: pathlib.Path, steps: Sequence[Sequence[GroupLengths]]) -> list[list[str]]:
    """Packed steps of this checkout and padded ones of `folder`, at the same lengths."""
    learner, batch = make_learner(paravt_tiny())
    cases = [Case(learner, groups) for groups in steps]
    state = learner.start

    def ours(step: int) -> None:
        nonlocal state
        state = cases[step].step(state, batch)

    program = pathlib.Path(__file__).with_name("padded_rl_update.py")
    # -P: modules beside the program must not hide those of the folder.
    return take_turns(ours, [sys.executable, "-P", str(program)], steps, folder.resolve())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns 2 for options that cannot work, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rl_update",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--lengths",
        type=pathlib.Path,
        default=LENGTHS,
        help="lengths of rollouts, or a tiny run's metrics.jsonl; default: lengths_tiny.json "
        "beside this file",
    )
    parser.add_argument(
        "--steps", type=int, default=4, help="steps of the file to measure; default: %(default)s"
    )
    parser.add_argument(
        "--against", type=pathlib.Path, metavar="FOLDER", help="checkout of commit 210a70d"
    )
    asked = parser.parse_args(argv)
    try:
        if asked.steps < 1:
            raise ValueError(f"--steps {asked.steps}: give 1 or more")
        if asked.against and not (asked.against / "train").is_dir():
            raise ValueError(f"--against {asked.against}: no checkout; {_PADDED}")
        workload = read(asked.lengths, paravt_tiny())
        print(workload.describe())
        steps = [lengths_of(step) for step in workload.steps[: asked.steps]]
        ratios = ("s", "CPU s", "speed-up", "speed-up by CPU")
        if asked.against:
            print(table(("layout", *ratios), against(asked.against, steps)))
        else:
            print(table(("lengths", "tokens", "places", *ratios), measure(steps)))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
