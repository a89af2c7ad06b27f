"""Evaluations on held-out questions: before, during and after RL, and of the control."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import json
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax

from models.compile_ahead import compile_ahead
from paravt_jax.data.atomic import write_atomically
from paravt_jax.method.protocol import Protocol
from paravt_jax.method.records import Question
from paravt_jax.method.rewards import RewardSettings
from paravt_jax.processes import hosts
from paravt_jax.progress import Progress
from rollout.agent.episode import EpisodeSettings
from rollout.agent.transcript import transcript
from rollout.evaluation.figures import row
from rollout.evaluation.play import Played, Scoring, episodes, play_and_score
from train.evaluation_file import read_evaluation_file
from train.phases.actor import EngineActor
from train.phases.context import Context

Rows = list[dict[str, Any]]

_TRANSCRIPTS = 8  # per setting, for the report


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is played, and the files it is written to."""

    name: str
    """Prefix of the file names."""
    title: str
    """What is evaluated, for progress and messages."""
    weights: tuple[str, int]
    """Phase and step of the weights."""
    settings: tuple[EpisodeSettings, ...]
    transcripts: int = 0
    """Episodes per setting with parallel dispatch to keep for the report."""
    measures_format: bool = False
    """Whether this is the measurement of format at several temperatures."""

    def files(self, context: Context) -> list[pathlib.Path]:
        """The file of each K."""
        folder = context.folder / "evaluation"
        return [folder / f"{self.name}-{k}.json" for k in context.run.evaluation.frames]

    def finished(self, context: Context) -> bool:
        """Whether all files exist, as the first process sees it."""
        return hosts.from_first(lambda: all(file.exists() for file in self.files(context)))


def evaluate(
    context: Context, actor: EngineActor | None, weights: Any, name: Literal["before", "after"]
) -> Rows:
    """Play held-out questions under every setting, and write one file per K.

    An interrupted evaluation resumes with the first K that has no file. With a judge, a file also
    holds the sums of `JudgeCounts`. Format at several temperatures has files of its own.

    Args:
        context: The run.
        actor: Plays the episodes; None: nothing is played.
        weights: The weights to evaluate.
        name: Whether it is the evaluation before or after RL.

    Returns:
        One row of results per setting; [] if the run plays no episodes or has no held-out
        questions.
    """
    if actor is None or not context.data.heldout:
        return []
    run = context.run
    if name == "before":
        weights_of = ("sft", run.sft.steps if run.sft is not None else 0)
    else:
        weights_of = ("rl", run.rl.steps if run.rl is not None else 0)
    plan = _Plan(name, f"{name} RL", weights_of, run.evaluation.episode_settings(), _TRANSCRIPTS)
    plans = [plan]
    if run.evaluation.format_temperatures:
        settings = run.evaluation.format_settings()
        title = f"format {name} RL"
        plans.append(_Plan(f"format_{name}", title, weights_of, settings, measures_format=True))
    return _evaluate_weights(context, actor, lambda: weights, plans)[0]


def evaluate_control(context: Context, actor: EngineActor | None, train: Callable[[], Any]) -> Rows:
    """Play held-out questions greedily with the weights of the control.

    Args:
        context: The run.
        actor: Plays the episodes.
        train: Returns the weights. It is not called if the evaluation is finished.

    Returns:
        A row per K; [] if the run has no control (`RLSettings.control`) or no held-out questions.
    """
    run = context.run
    if run.sft is None or run.rl is None or not run.rl.control or not context.data.heldout:
        return []
    assert actor is not None, "a run with RL plays episodes"
    trained = ("control", run.rl.steps)
    plan = _Plan("control", "the control", trained, run.evaluation.greedy_settings())
    return _evaluate_weights(context, actor, train, [plan])[0]


@functools.partial(jax.profiler.annotate_function, name="evaluation")
def evaluate_checkpoint(context: Context, actor: EngineActor, step: int) -> None:
    """Play held-out questions greedily with the engine's weights, those after `step` steps of RL.

    One file per K is written.
    """
    if not context.data.heldout:
        return
    settings = context.run.evaluation.greedy_settings()
    plan = _Plan(f"curve-{step:06d}", f"step {step} of RL", ("rl", step), settings)
    _play_missing(context, actor, plan)
    # Rollouts must find the same empty cache in a run that was stopped here and resumed.
    actor.sampler.forget()


def _evaluate_weights(
    context: Context, actor: EngineActor, weights: Callable[[], Any], plans: Sequence[_Plan]
) -> list[Rows]:
    """Load the weights if there is something left to play, play it, and return the plans' rows."""
    if not all(plan.finished(context) for plan in plans):
        features = actor.environment.features
        compile_ahead(
            itertools.chain(actor.sampler.lowerings(), features.lowerings(context.data.sizes)),
            shown=hosts.is_first(),
        )
        actor.load(weights(), actor.sampler.version + 1)
    rows = [_play_missing(context, actor, plan) for plan in plans]
    # The next phase needs the engine's memory.
    actor.sampler.sleep()
    return rows


def _play_missing(context: Context, actor: EngineActor, plan: _Plan) -> Rows:
    """Play the settings whose K has no file yet, and return the rows of all files."""
    rows = []
    played = False
    frames = context.run.evaluation.frames
    title = f"evaluate {plan.title}"
    with Progress(title, "setting", shown=hosts.is_first()) as progress:

        def done(count: int) -> None:
            progress.update(len(rows) + count, len(plan.settings))

        for k, file in zip(frames, plan.files(context), strict=True):
            if not hosts.from_first(file.exists):
                content = _play_k(context, actor, plan, k, done)
                with hosts.one_after_another():
                    if hosts.is_first():
                        file.parent.mkdir(exist_ok=True)
                        write_atomically(file, json.dumps(content))
                        context.history.made(file, *plan.weights)
                played = True
            rows += hosts.from_first(lambda file=file: read_evaluation_file(file)["rows"])
    if played:
        context.after_save()
    return rows


def _play_k(
    context: Context,
    actor: EngineActor,
    plan: _Plan,
    k: int,
    done: Callable[[int], None],
) -> dict[str, Any]:
    """Play all settings with `k` frames; `done` is called with the number of those played.

    Returns:
        The content of the file: rows, the seconds that each took, episodes, and the judge's counts.
    """
    # Start with an empty cache: results must not depend on where an interrupted evaluation resumed.
    actor.sampler.forget()
    content: dict[str, Any] = {"rows": [], "seconds": [], "episodes": []}
    if actor.remote is not None:
        content["judge"] = collections.Counter()
    for setting in [setting for setting in plan.settings if setting.frames == k]:
        context.interrupts.check(
            f"stopped while evaluating {plan.title}; finished K are kept, K = {k} starts again"
        )
        start = time.monotonic()
        row, lines = _play(context, actor, plan, setting)
        content["rows"].append(row)
        content["seconds"].append(time.monotonic() - start)
        content["episodes"] += lines
        if actor.remote is not None:
            for counts in hosts.gather(dataclasses.asdict(actor.remote.counts)):
                content["judge"].update(counts)
        done(len(content["rows"]))
        context.tick()
    return content


def _play(
    context: Context,
    actor: EngineActor,
    plan: _Plan,
    setting: EpisodeSettings,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Play one setting. Returns its row, and the transcripts for the report."""
    run = context.run
    vocabulary = context.data.vocabulary
    questions, samples = _questions(context, plan, setting)
    protocol = Protocol(vocabulary, run.limits(setting.dispatch))
    scoring = Scoring(
        run.rl.rewards if run.rl else RewardSettings(),
        actor.remote,
        run.rl.grpo.sequence_anchor if run.rl else 0.0,
    )
    environment = dataclasses.replace(actor.environment, protocol=protocol)
    own_questions = questions[hosts.share_of(len(questions))]
    agents = episodes(environment, own_questions, setting, run.seed, samples)
    outcomes = play_and_score(actor.sampler, agents, scoring)
    own = [outcome for _, outcome in outcomes if isinstance(outcome, Played)]
    played = [outcome for part in hosts.gather(own) for outcome in part]
    # The report shows only episodes with parallel dispatch.
    shown = played[: plan.transcripts] if setting.dispatch == "parallel" else []
    lines = [
        {"phase": plan.name, "step": 0}
        | transcript(outcome.episode, outcome.rewards, setting, vocabulary)
        for outcome in shown
    ]
    return row(setting, played), lines


def _questions(
    context: Context, plan: _Plan, setting: EpisodeSettings
) -> tuple[Sequence[Question], int]:
    """The questions to play under a setting, and the number of episodes on each of them."""
    evaluation, heldout = context.run.evaluation, context.data.heldout
    if plan.measures_format:
        return evaluation.format_questions(heldout, setting)
    # The headline setting is played several times per question.
    headline = setting.temperature > 0 and setting.dispatch == "parallel"
    return heldout[: evaluation.questions], evaluation.samples if headline else 1
