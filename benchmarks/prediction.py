"""Predicted and measured times of RL steps of the tiny model, on the machine at hand.

python -m benchmarks.prediction --model runs/paravt_tiny/model --keep FOLDER

First calibrates the machine (`benchmarks.calibration`), within a minute and without the programs
of the steps. Then, for each configuration, runs some steps from the weights of a finished tiny run,
and predicts their time from the lengths of their rollouts: rounds of the engine as
`paravt_extras.plan` simulates them, micro-batches as they are packed. Frames are in the cache, so
vision takes no time.

There are 12 configurations. All of them take about 8 minutes on two cores. A finished one is stored
in FOLDER: the same command goes on after it. It fails if the median error is above 25 %.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from benchmarks.calibration import Machine, calibrate, engine_costs, reference_work, update_work
from configs import RECIPES
from models.config import ModelConfig
from models.features import FrameFeatures
from models.sharding import make_mesh, param_shardings
from models.weights.hf import load
from paravt_extras.plan.programs import microbatch_sizes, planned_config
from paravt_extras.plan.rollouts import play
from paravt_extras.plan.workload import Group, Rollout, Workload, lengths_of
from paravt_jax.data import video
from paravt_jax.data.atomic import write_atomically
from paravt_jax.method.protocol import Protocol
from paravt_jax.method.records import Author, Episode
from paravt_jax.method.scoring import rules_of
from rollout.agent.episode import Environment
from rollout.engine.engine import Engine
from rollout.evaluation.markdown import table
from train.learn.packing import pack
from train.learn.rl import Learner
from train.learn.rollouts import Rollouts
from train.prepare import prepare
from train.published_model import check_vocabulary, config_of
from train.settings import Run, change

STEPS = 5
"""Steps per configuration."""
MOST_ERROR = 0.25
PHASES = ("rollout", "reference", "update")
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "2 prompts": {"rl.prompts": 2},
    "12 prompts": {"rl.prompts": 12},
    "4 frames": {"rl.frame_budgets": (4,)},
    "16 frames": {"rl.frame_budgets": (16,)},
    "64 frames": {"rl.frame_budgets": (64,)},
    "groups of 4": {"rl.grpo.group_size": 4},
    "groups of 16": {"rl.prompts": 4, "rl.grpo.group_size": 16},
    "16 slots": {"engine.slots": 16},
    "32 slots": {"engine.slots": 32},
    "full remat": {"rl.remat": "full"},
    "micro-batches of 3,328": {"rl.microbatch_tokens": 3328},
}


def base() -> Run:
    """The tiny recipe with few videos."""
    videos = {"world.train_videos": 8, "world.heldout_videos": 2}
    return change(RECIPES["paravt_tiny"](), "prediction", videos)


def predict(run: Run, groups: Sequence[Group], weights: int, machine: Machine) -> dict[str, float]:
    """Seconds of each phase of a step.

    Args:
        run: the configuration.
        groups: lengths of the step's rollouts.
        weights: number of the model's weights.
        machine: speeds of this model.
    """
    assert run.rl is not None
    sizes = run.engine_sizes
    config = planned_config(run)
    workload = Workload("", (tuple(groups),), crop_prompt=run.lengths(1).crop_prompt)
    played = play(groups, workload, sizes, run.protocol.turn_tokens, engine_costs(run, machine))
    host = sum(machine.host.seconds((frames,)) for frames in requests_of(groups, run))
    lengths = lengths_of(tuple(groups))
    parts = pack(lengths, microbatch_sizes(run))
    reference = [reference_work(config, part, lengths) for part in parts]
    update = [update_work(config, part, lengths, run.rl.remat) for part in parts]
    pool = sizes.pages * sizes.page * token_bytes(config)
    after = machine.optimizer.seconds((weights,)) + machine.pool.seconds((pool,))
    return {
        "rollout": played.total + host,
        "reference": sum(machine.reference.seconds(work) for work in reference),
        "update": sum(machine.update.seconds(work) for work in update) + after,
    }


def requests_of(groups: Sequence[Group], run: Run) -> list[int]:
    """Frames of every request of a step."""
    found = []
    for group in groups:
        for rollout in group.rollouts:
            # A rollout with calls asks again after them.
            turns = 2 if rollout.reports else 1
            found += [group.frames] * turns
            found += [run.protocol.crop_frames] * len(rollout.reports)
    return found


def token_bytes(config: ModelConfig) -> int:
    """Bytes of a token's keys and values, in float32."""
    text = config.text
    return 2 * 4 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim


class World:
    """The data and the model that all configurations share.

    Args:
        weights: folder of a tiny model, as a run exports it.
        folder: where videos are rendered.
    """

    def __init__(self, weights: pathlib.Path, folder: pathlib.Path):
        run = base()
        self.data = prepare(run, folder)
        config = config_of(str(weights), run.model)
        check_vocabulary(config, self.data.vocabulary, str(weights))
        self.model = load(weights, config, mesh=make_mesh(1, 1, 1))
        self.features = FrameFeatures(
            self.model.vision, config, run.frames, self.data.root, source=video
        )
        self.graph, self.weights = nnx.split(self.model.text)

    def environment(self, run: Run) -> Environment:
        """The protocol of a configuration, and the frames' features."""
        return Environment(Protocol(self.data.vocabulary, run.protocol), self.features)

    def measure(self, run: Run) -> tuple[dict[str, float], list[Group]]:
        """Seconds of each phase of a step, and the lengths of its rollouts.

        Runs some steps with the same questions. The shortest counts: in later steps, frames and
        programs are there.
        """
        assert run.rl is not None
        # The first update donates its weights.
        weights = jax.tree.map(lambda x: x.copy(), self.weights)
        weights = jax.device_put(weights, param_shardings(weights, make_mesh(1, 1, 1)))
        learner = Learner(
            self.graph, weights, self.model.config, run.rl, run.rl_shape, rules_of(run.rl.rewards)
        )
        state = learner.start
        engine = Engine(self.model, self.features, run.engine_sizes)
        engine.load(learner.sync(state.weights), 0)
        engine.warm_up()
        learner.warm_up(state.weights, self.features)
        questions = self.data.questions[: run.rl.prompts]
        steps: list[dict[str, float]] = []
        played: list[Rollouts] = []

        def remember(rollouts: Rollouts, _: Any) -> None:
            played.append(rollouts)

        for _ in range(STEPS):
            environment = self.environment(run)
            state, metrics = learner.step(state, engine, environment, questions, 0, remember)
            steps.append({phase: metrics[f"time/{phase}"] for phase in PHASES})
        shortest = min(range(STEPS), key=lambda n: sum(steps[n].values()))
        return steps[shortest], groups_of(played[shortest])


def groups_of(rollouts: Rollouts) -> list[Group]:
    """The lengths of played rollouts."""
    found = []
    for episodes in rollouts.groups:
        prompt = len(episodes[0].trajectory.segments[0].ids)
        rollouts_of_group = tuple(
            Rollout(len(episode.trajectory.ids) - prompt, reports_of(episode))
            for episode in episodes
        )
        found.append(Group(prompt, 0, episodes[0].frames, rollouts_of_group))
    return found


def reports_of(episode: Episode) -> tuple[int, ...]:
    """Sampled tokens of an episode's sub-agents."""
    agents = [call.subagent for turn in episode.turns for call in turn.calls]
    return tuple(
        int((agent.authors == Author.MODEL).sum()) for agent in agents if agent is not None
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.prediction",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=pathlib.Path, required=True, help="a tiny run's model")
    parser.add_argument("--keep", type=pathlib.Path, required=True, help="folder for the results")
    arguments = parser.parse_args(argv)
    keep = arguments.keep
    try:
        _check_paths(arguments.model, keep)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    runs = {name: change(base(), "prediction", dict(f)) for name, f in CONFIGURATIONS.items()}
    files = {name: keep / f"{name.replace(' ', '-')}.json" for name in runs}
    missing = [name for name in runs if not files[name].exists()]
    if missing:
        world = World(arguments.model, keep / "data")
        count = sum(x.size for x in jax.tree.leaves(world.weights))
        start = time.monotonic()
        run = base()
        machine = calibrate(run, world.model, world.environment(run), world.data.questions[:4])
        print(f"calibrated in {time.monotonic() - start:.0f} s", file=sys.stderr)
        for name in missing:
            measured, groups = world.measure(runs[name])
            predicted = predict(runs[name], groups, count, machine)
            result = {"predicted": predicted, "measured": measured}
            write_atomically(files[name], json.dumps(result))
            print(f"{name}: done", file=sys.stderr)
    return report({name: json.loads(file.read_text()) for name, file in files.items()})


def _check_paths(model: pathlib.Path, keep: pathlib.Path) -> None:
    """Makes the folder for the results. Raises ValueError for paths that cannot work."""
    if not (model / "config.json").is_file():
        raise ValueError(
            f"--model {model}: no model; give that of a run, such as runs/paravt_tiny/model"
        )
    try:
        keep.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--keep {keep}: {error.strerror}; name a writable folder") from error


def report(results: dict[str, dict[str, dict[str, float]]]) -> int:
    """Prints the table. Returns 1 if the median error is too large, else 0."""
    lines = []
    errors = []
    for name, result in results.items():
        totals = {kind: sum(result[kind].values()) for kind in ("predicted", "measured")}
        errors.append(abs(totals["predicted"] / totals["measured"] - 1))
        cells = [
            f"{result['predicted'][phase]:.2f} / {result['measured'][phase]:.2f}"
            for phase in PHASES
        ]
        total = f"{totals['predicted']:.2f} / {totals['measured']:.2f}"
        lines.append([name, *cells, total, f"{errors[-1]:.0%}"])
    heading = [f"{phase} s" for phase in PHASES]
    print(table(["predicted / measured", *heading, "step s", "error"], lines))
    median = statistics.median(errors)
    print(f"\nMedian error of {len(errors)} configurations: {median:.0%}.")
    return int(median > MOST_ERROR)


if __name__ == "__main__":
    sys.exit(main())
