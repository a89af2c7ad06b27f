"""PARA-GRPO, one step at a time: draw, roll out, score, update.

Owns the settings of RL and the course of a step; the algorithm's formulas are `paravt_jax.grpo`'s, the episodes
`rollout.episode`'s. Invariant: a step is a function of (seed, step number, weights, questions) alone, and the tokens that are
scored are the tokens that were sampled (`token_mismatches` counts the exceptions).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct
from jaxtyping import Array, Float

from models.qwen3_vl.text import TextDecoder
from paravt_jax.grpo import GRPOBatch, GRPOSettings, advantages, check_anchor, paravt_loss
from paravt_jax.records import CallStatus, Episode, Question, StopReason, Trajectory
from paravt_jax.rewards import Rewards, RewardSettings, score
from paravt_jax.structure import find_structure, pad_structures
from rollout.engine import Engine
from rollout.episode import Scene, Setting, play, split_prompt
from rollout.evaluate import executed_calls, seed_of
from rollout.requests import run
from train.batch import BatchShape, Sequences, build, mismatches
from train.optimizer import OptimizerSettings, make_optimizer, require_counts
from train.step import Loss, TrainState, init_state, make_logprobs, make_update, row_logprobs


@dataclasses.dataclass(frozen=True)
class RLSettings:
    """Settings of PARA-GRPO; REFERENCE 3 has the published values. `frame_budgets` are what K is drawn from, once a prompt (gating)."""

    steps: int
    shape: BatchShape
    optimizer: OptimizerSettings = OptimizerSettings()
    grpo: GRPOSettings = GRPOSettings()
    rewards: RewardSettings = RewardSettings()
    frame_budgets: tuple[int, ...] = (4, 8, 16, 32, 64)
    temperature: float = 0.7
    save_every: int = 10
    remat: bool = False
    logprob_chunk: int | None = None

    def __post_init__(self):
        require_counts("rl", steps=self.steps, save_every=self.save_every)
        if not self.temperature > 0:
            raise ValueError(f"rl.temperature: {self.temperature}; rollouts that are learned from are sampled, give a number above 0")
        check_anchor(self.rewards, self.grpo)
        if self.shape.rows != self.grpo.group_size:
            raise ValueError(
                f"rl.shape.rows: {self.shape.rows}; a group has rl.grpo.group_size = {self.grpo.group_size} rollouts, make them equal"
            )
        if not self.frame_budgets or min(self.frame_budgets) < 1:
            raise ValueError(f"rl.frame_budgets: {self.frame_budgets}; name at least one number of frames, each 1 or more")


@struct.dataclass
class RLBatch:
    """What an update reads: the arrays, what the rollouts earned, and each token's advantage."""

    sequences: Sequences
    rollouts: GRPOBatch
    advantages: Float[Array, "b t"]


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """A step's groups of episodes and what each earned; groups whose video could not be read are left out and counted."""

    groups: tuple[tuple[Episode, ...], ...]
    rewards: tuple[tuple[Rewards, ...], ...]
    unreadable: int


def draw_budgets(settings: RLSettings, seed: int, step: int, prompts: int) -> list[int]:
    """K of each prompt of a step, shared by its group (paper, nFrames gating): a function of the seed and the step only."""
    return [int(k) for k in np.random.default_rng([seed, step, 0x4B]).choice(settings.frame_budgets, prompts)]


def roll_out(engine: Engine, scene: Scene, questions: Sequence[Question], settings: RLSettings, seed: int, step: int) -> Rollouts:
    """Play a group of episodes on every question and score them."""
    budgets = draw_budgets(settings, seed, step, len(questions))
    size = settings.grpo.group_size
    agents = [
        play(scene, question, Setting(budget, settings.temperature), seed_of(seed, step, n, g))
        for n, (question, budget) in enumerate(zip(questions, budgets, strict=True))
        for g in range(size)
    ]
    episodes = run(engine, agents)
    groups = [tuple(episodes[n * size : (n + 1) * size]) for n in range(len(questions))]
    readable = tuple(group for group in groups if all(e.stop is not StopReason.UNREADABLE for e in group))
    rewards = tuple(tuple(score(e.question, e.turns, settings.rewards) for e in group) for group in readable)
    return Rollouts(readable, rewards, len(groups) - len(readable))


def rl_loss(image_token_id: int, settings: RLSettings) -> Loss:
    """PARA-GRPO's loss of an `RLBatch`."""

    def loss(text: TextDecoder, batch: RLBatch) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        logprobs = row_logprobs(text, batch.sequences, image_token_id, settings.temperature, settings.remat, settings.logprob_chunk)
        return paravt_loss(logprobs, batch.advantages, batch.rollouts, settings.grpo)

    return loss


class Learner:
    """The jitted programs of RL and how a step runs through them. `reference` are the weights it starts from and is held to."""

    def __init__(self, graph: nnx.GraphDef, reference: Any, image_token_id: int, settings: RLSettings):
        self.settings, self.reference = settings, reference
        optimizer = make_optimizer(settings.optimizer, settings.steps)
        self.start = init_state(jax.tree.map(jnp.copy, reference), optimizer)  # copies: an update donates its state
        self._logprobs = make_logprobs(graph, image_token_id, settings.temperature, settings.logprob_chunk)
        self._advantages = jax.jit(lambda batch: advantages(batch, settings.grpo))
        self._update = make_update(graph, optimizer, rl_loss(image_token_id, settings), self.start)

    def step(
        self,
        state: TrainState,
        engine: Engine,
        scene: Scene,
        questions: Sequence[Question],
        seed: int,
        on_rollouts: Callable[..., None] | None = None,
    ) -> tuple[TrainState, dict[str, float]]:
        """One step of PARA-GRPO: rollouts under the engine's weights, one update, and the new weights into the engine.

        `on_rollouts(rollouts, advantages)` may look at the episodes. Returns the state and the step's metrics; times in seconds.
        """
        number, clock = int(state.step), [time.perf_counter()]
        rollouts = roll_out(engine, scene, questions, self.settings, seed, number)
        if not rollouts.groups:
            raise ValueError(f"rl: step {number} has no question with a readable video; check the data root")
        clock.append(time.perf_counter())
        groups = [[episode.trajectory for episode in group] for group in rollouts.groups]
        sequences = build(groups, scene.features, self.settings.shape)
        wrong = mismatches(sequences, groups)
        clock.append(time.perf_counter())
        reference = jax.block_until_ready(self._logprobs(self.reference, sequences))
        clock.append(time.perf_counter())
        batch = self._batch(rollouts, sequences, reference, scene)
        gains, figures = self._advantages(batch)
        if on_rollouts:
            on_rollouts(rollouts, np.asarray(gains))
        state, updated = self._update(state, RLBatch(sequences, batch, gains))
        metrics = {name: float(value) for name, value in (figures | updated).items()}
        engine.load(state.weights, number + 1)
        clock.append(time.perf_counter())
        spans = dict(zip(("rollout", "data", "reference", "update"), np.diff(clock), strict=True))
        return state, _describe(rollouts, metrics, wrong) | {f"time/{name}": float(span) for name, span in spans.items()}

    def _batch(self, rollouts: Rollouts, sequences: Sequences, reference: jax.Array, scene: Scene) -> GRPOBatch:
        """What the algorithm needs to know of the rollouts, padded to the batch's groups and rows."""
        shape = self.settings.shape
        earned, anchors = np.zeros((2, shape.groups, shape.rows), np.float32)
        valid, parseable = np.zeros((2, shape.groups, shape.rows), bool)
        none = (np.zeros(0, np.int32), np.zeros(0, np.int8))
        structures = [none] * (shape.groups * shape.rows)
        for p, (group, rewards) in enumerate(zip(rollouts.groups, rollouts.rewards, strict=True)):
            for g, (episode, reward) in enumerate(zip(group, rewards, strict=True)):
                earned[p, g], anchors[p, g], valid[p, g], parseable[p, g] = reward.total, reward.anchor, True, reward.compliant
                structures[p * shape.rows + g] = _structure(episode.trajectory, scene)
        return GRPOBatch(
            mask=jnp.asarray(sequences.sampled),
            behaviour=jnp.asarray(sequences.logprobs),
            reference=reference,
            rewards=jnp.asarray(earned),
            anchor_rewards=jnp.asarray(anchors),
            valid=jnp.asarray(valid),
            parseable=jnp.asarray(parseable.reshape(-1)),
            structure=pad_structures(structures, multiple=2 * shape.suffix),  # every token breaks and opens at most one block: one shape
        )


def _structure(trajectory: Trajectory, scene: Scene) -> tuple[np.ndarray, np.ndarray]:
    """struct(o) of a rollout, positions counted from the end of its prompt."""
    prompt, _ = split_prompt(trajectory)
    positions, kinds = find_structure(scene.protocol.vocabulary.token_bytes, trajectory.ids, trajectory.authors)
    return positions - len(prompt), kinds


def _describe(rollouts: Rollouts, metrics: dict[str, float], wrong: int) -> dict[str, float]:
    """The metrics of a step under the names the report knows."""
    episodes = [episode for group in rollouts.groups for episode in group]
    rewards = [reward for group in rollouts.rewards for reward in group]
    outcomes = [outcome for episode in episodes for turn in episode.turns for outcome in turn.calls]

    def mean(values: Sequence[float]) -> float:
        return float(np.mean(values)) if len(values) else 0.0

    described = {
        "accuracy": mean([r.accuracy for r in rewards]),
        "format": mean([r.compliant for r in rewards]),
        "calls": mean([executed_calls(e) for e in episodes]),
        **{f"reward/{name}": mean([getattr(r, name) for r in rewards]) for name in ("accuracy", "format", "anchor", "tool", "total")},
        "length/response": mean([float(np.sum([len(s.ids) for s in e.trajectory.segments if s.logprobs is not None])) for e in episodes]),
        "length/turns": mean([len(e.turns) for e in episodes]),
        "k/mean": mean([e.frames for e in episodes]),
        "calls/refused": mean([not outcome.status.executed for outcome in outcomes]),
        "groups/silent": metrics.pop("silent_groups"),
        "groups/unreadable": float(rollouts.unreadable),
        "logprob_gap": metrics.pop("behaviour_gap"),
        "token_mismatches": float(wrong),
    }
    described |= {f"call/{status}": mean([outcome.status is status for outcome in outcomes]) for status in CallStatus}
    described |= {f"stop/{reason}": mean([e.stop is reason for e in episodes]) for reason in StopReason}
    return described | metrics
