"""Evaluations on held-out questions: before, during and after RL, and of the control."""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from paravt_jax.data.atomic import write_atomically
from paravt_jax.method.protocol import Protocol
from paravt_jax.method.records import Question
from paravt_jax.method.rewards import RewardSettings
from paravt_jax.progress import Progress
from rollout.agent.episode import EpisodeSettings
from rollout.agent.transcript import transcript
from rollout.evaluation.play import Played, Scoring, play_and_score
from rollout.evaluation.summary import row
from train.durable import hosts
from train.phases.actor import Actor
from train.phases.context import Context

_TITLES = {"before": "before RL", "control": "the control", "after": "after RL"}


def evaluate(
    context: Context, actor: Actor | None, weights: Any, name: str
) -> list[dict[str, Any]]:
    """Play held-out questions and write one file per K.

    An interrupted evaluation resumes with the first K that has no file. With a judge, a file also
    holds the sums of `JudgeCounts`.

    Args:
        context: The run.
        actor: Plays the episodes; None: nothing is played.
        weights: The weights to evaluate.
        name: `before` or `after` RL, under every setting; or `control`, with greedy decoding only.

    Returns:
        One row of results per setting; [] if nothing is played or there are no held-out questions.
    """
    if actor is None or not context.data.heldout:
        return []
    evaluation = context.run.evaluation
    files = _files(context, name)
    if not hosts.from_first(lambda: all(file.exists() for file in files)):
        actor.wake(weights, actor.engine.version + 1)
    brief = name == "control"
    settings = evaluation.greedy_settings() if brief else evaluation.episode_settings()
    rows = _evaluate(context, actor, name, _TITLES[name], settings)
    # The next phase needs the engine's memory.
    actor.engine.sleep()
    return rows


def evaluate_during(context: Context, actor: Actor, step: int) -> None:
    """Evaluate the engine's weights, those after `step` steps of RL, if it is time to.

    Decoding is greedy. One file per K is written; `read_curve` reads them.
    """
    every = context.run.evaluation.every
    if not every or step % every or not step or not context.data.heldout:
        return
    settings = context.run.evaluation.greedy_settings()
    _evaluate(context, actor, f"curve-{step:06d}", f"step {step} of RL", settings)
    # Rollouts must find the same empty cache in a run that was stopped here and resumed.
    actor.engine.forget()


def read_curve(folder: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of all evaluations during RL, each with its `step`."""
    rows = []
    for file in sorted((folder / "evaluation").glob("curve-*.json")):
        step = int(file.stem.split("-")[1])
        rows += [{"step": step} | row for row in json.loads(file.read_text())["rows"]]
    return sorted(rows, key=lambda row: (row["step"], row["k"]))


def _files(context: Context, name: str) -> list[pathlib.Path]:
    """The file of each K."""
    folder = context.folder / "evaluation"
    return [folder / f"{name}-{k}.json" for k in context.run.evaluation.frames]


def _evaluate(
    context: Context, actor: Actor, name: str, title: str, settings: Sequence[EpisodeSettings]
) -> list[dict[str, Any]]:
    """Play the settings whose K has no file yet, and return the rows of all files."""
    rows = []
    frames = context.run.evaluation.frames
    with Progress(f"evaluate {title}", "setting", shown=hosts.is_first()) as progress:

        def done(count: int) -> None:
            progress.update(len(rows) + count, len(settings))

        for k, file in zip(frames, _files(context, name), strict=True):
            if not hosts.from_first(file.exists):
                of_k = [setting for setting in settings if setting.frames == k]
                content = _evaluate_budget(context, actor, name, title, of_k, done)
                with hosts.one_after_another():
                    if hosts.is_first():
                        file.parent.mkdir(exist_ok=True)
                        write_atomically(file, json.dumps(content))
            rows += json.loads(file.read_text())["rows"]
    return rows


def _evaluate_budget(
    context: Context,
    actor: Actor,
    name: str,
    title: str,
    settings: Sequence[EpisodeSettings],
    done: Callable[[int], None],
) -> dict[str, Any]:
    """Play all settings of one K; `done` is called with the number of those that are played.

    Returns:
        The content of the file: rows, episodes, and the judge's counts.
    """
    questions = context.data.heldout[: context.run.evaluation.questions]
    # Start with an empty cache: results must not depend on where an interrupted evaluation resumed.
    actor.engine.forget()
    content: dict[str, Any] = {"rows": [], "episodes": []}
    if actor.judge is not None:
        content["judge"] = collections.Counter()
    for setting in settings:
        context.interrupts.check(
            f"stopped while evaluating {title}; finished K are kept, K = {setting.frames} starts "
            "again"
        )
        row, lines = _play(context, actor, questions, name, setting)
        content["rows"].append(row)
        content["episodes"] += lines
        if actor.judge is not None:
            for counts in hosts.gather(dataclasses.asdict(actor.judge.counts)):
                content["judge"].update(counts)
        done(len(content["rows"]))
        context.tick()
    return content


def _play(
    context: Context,
    actor: Actor,
    questions: Sequence[Question],
    name: str,
    setting: EpisodeSettings,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Play one setting. Returns its row, and the transcripts for the report."""
    run = context.run
    vocabulary = context.data.vocabulary
    # The headline setting is played several times per question.
    headline = setting.temperature > 0 and setting.dispatch == "parallel"
    protocol = Protocol(vocabulary, run.limits(setting.dispatch))
    scoring = Scoring(
        run.rl.rewards if run.rl else RewardSettings(),
        actor.judge,
        run.rl.grpo.sequence_anchor if run.rl else 0.0,
    )
    outcomes = play_and_score(
        actor.engine,
        dataclasses.replace(actor.environment, protocol=protocol),
        questions[hosts.share_of(len(questions))],
        setting,
        scoring,
        run.seed,
        run.evaluation.samples if headline else 1,
    )
    own = [outcome for _, outcome in outcomes if isinstance(outcome, Played)]
    played = [outcome for part in hosts.gather(own) for outcome in part]
    # The report shows only episodes with parallel dispatch, before and after RL.
    shown = []
    if name in ("before", "after") and setting.dispatch == "parallel":
        shown = played[: run.log.episodes]
    lines = [
        {"phase": name, "step": 0}
        | transcript(outcome.episode, outcome.rewards, setting, vocabulary)
        for outcome in shown
    ]
    return row(setting, played), lines
