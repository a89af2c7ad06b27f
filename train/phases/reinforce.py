"""The RL phase: PARA-GRPO from the weights of the cold start."""

from __future__ import annotations

import functools
import itertools
import json
import time
from typing import Any

from models.compile_ahead import compile_ahead
from paravt_jax.data.atomic import write_atomically
from paravt_jax.data.frame_reader import FrameReader
from paravt_jax.processes import hosts
from rollout.agent.episode import EpisodeSettings
from rollout.agent.transcript import transcript
from train.data import QuestionStream
from train.durable.compilations import Compilations
from train.durable.step_lines import rows_line, say
from train.durable.stored_records import pack, unpack
from train.learn.rl import Learner
from train.learn.rl_settings import RLSettings
from train.learn.rollout_pool import RolloutPool
from train.learn.rollouts import draw_budgets
from train.learn.speed import speeds
from train.phases.actor import EngineActor
from train.phases.context import Context, as_saved, resume
from train.phases.evaluation import evaluate_checkpoint
from train.phases.idle import IdleTime
from train.phases.model import Parts
from train.rl import Trained, rl_step

# Programs may still compile in the first steps of a process.
WARM_UP = 3


def reinforce(
    context: Context,
    parts: Parts,
    actor: EngineActor | None,
    reader: FrameReader | None,
    weights: Any,
) -> Any:
    """Train `weights` with RL. They are donated; a copy stays as the reference.

    Returns:
        The weights after the last step.
    """
    run = context.run
    settings = run.rl
    if settings is None:
        return weights
    assert actor is not None, "a run with RL plays episodes"
    engine, environment = actor.sampler, actor.environment
    config, features = parts.model.config, environment.features
    compilations = Compilations()
    learner = Learner(parts.skeleton, weights, config, settings, run.rl_shape)
    with context.open_phase("rl", settings, features.unreadable) as phase:
        questions = _questions(context, settings, reader)
        pool = RolloutPool() if settings.max_staleness else None
        state, cursor = resume(phase, learner.start, parts)
        if cursor is not None:
            questions.set_state(cursor["questions"])
            if pool is not None:
                pool.state = unpack(cursor["pool"])
        if phase.left:
            start = time.monotonic()
            programs = itertools.chain(
                learner.lowerings(state, features),
                engine.lowerings(),
                features.lowerings(context.data.sizes),
            )
            compile_ahead(programs, shown=hosts.is_first())
            # Before the engine takes its memory.
            learner.warm_up(state.weights, features)
            if hosts.is_first():
                lengths = [shape.tokens for shape in learner.room.sizes]
                say(rows_line("rl", lengths, time.monotonic() - start))
            actor.load(state.weights, phase.finished_steps)
            engine.warm_up()
        for step in phase.each():
            compiled_before = compilations.count
            # Before the next step, so that a run stopped at a checkpoint still evaluates it.
            if run.evaluation.curve and step > 1 and phase.has_checkpoint(step - 1):
                evaluate_checkpoint(context, actor, step - 1)
            idle = IdleTime(engine, features, compilations)
            state, trained, metrics = rl_step(state, learner, actor, questions, run.seed, pool)
            if phase.has_checkpoint(step):
                _write_transcripts(context, settings, step, trained)
            one_update = metrics["time/update"] / settings.updates_per_batch
            metrics |= speeds(trained.lengths, config, one_update, context.mesh.size)
            warm = step > phase.finished_steps + WARM_UP
            recompilations = compilations.count - compiled_before if warm else 0
            metrics["recompilations"] = float(recompilations)
            metrics |= idle.metrics()
            cursor = {"questions": questions.get_state()}
            if pool is not None:
                cursor["pool"] = pack(pool.state)
            phase.done(step, metrics, as_saved(state, parts), cursor)
    actor.sleep()
    return state.weights


def _questions(
    context: Context, settings: RLSettings, reader: FrameReader | None
) -> QuestionStream:
    """The questions of the steps."""
    seed = context.run.seed
    # Draws the same budgets as the step will, so that the right frames are read in advance.
    budgets = functools.partial(draw_budgets, settings, seed, prompts=settings.prompts)
    # Another seed than for conversations, so that the two orders are independent.
    return QuestionStream(context.data, reader, seed + 2, settings.grpo.group_size, budgets)


def _write_transcripts(context: Context, settings: RLSettings, step: int, trained: Trained) -> None:
    """Write the first episode of each group, for the report."""
    if not hosts.is_first():
        return
    lines = []
    groups = zip(trained.rollouts.groups, trained.rollouts.rewards, strict=True)
    for p, (group, rewards) in enumerate(groups):
        setting = EpisodeSettings(group[0].frames, settings.temperature)
        advantages = trained.advantages[p * settings.grpo.group_size]
        shown = transcript(group[0], rewards[0], setting, context.data.vocabulary, advantages)
        lines.append({"phase": "rl", "step": step} | shown)
    folder = context.folder / "evaluation"
    folder.mkdir(exist_ok=True)
    file = folder / f"rl-{step:06d}.json"
    write_atomically(file, json.dumps({"rows": [], "episodes": lines}))
    context.history.made(file, "rl", step)
