"""The evaluation phases, before and after RL: episodes on held-out questions, per setting."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Sequence
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


def evaluate(
    context: Context, actor: Actor | None, weights: Any, name: str
) -> list[dict[str, Any]]:
    """Play held-out questions under every setting, and write one file per K.

    An interrupted evaluation resumes with the first K that has no file. With a judge, a file also
    holds the sums of `JudgeCounts`.

    Args:
        context: The run.
        actor: Plays the episodes; None: nothing is played.
        weights: The weights to evaluate.
        name: `before` or `after` RL.

    Returns:
        One row of results per setting; [] if the run plays no episodes or has no held-out
        questions.
    """
    settings = context.run.evaluation
    questions = context.data.heldout[: settings.questions]
    if actor is None or not questions:
        return []
    rows = []
    files = [context.folder / "evaluation" / f"{name}-{k}.json" for k in settings.frames]
    if not hosts.from_first(lambda: all(file.exists() for file in files)):
        actor.wake(weights, actor.engine.version + 1)
    with Progress(f"evaluate {name} RL", "setting", shown=hosts.is_first()) as progress:
        for k, file in zip(settings.frames, files, strict=True):
            if not hosts.from_first(file.exists):
                content = _evaluate_budget(context, actor, questions, name, k, progress, len(rows))
                with hosts.one_after_another():
                    if hosts.is_first():
                        file.parent.mkdir(exist_ok=True)
                        write_atomically(file, json.dumps(content))
            rows += json.loads(file.read_text())["rows"]
    # The next phase needs the engine's memory.
    actor.engine.sleep()
    return rows


def _evaluate_budget(
    context: Context,
    actor: Actor,
    questions: Sequence[Question],
    name: str,
    k: int,
    progress: Progress,
    done: int,
) -> dict[str, Any]:
    """Play all settings with `k` frames; `done` settings came before them.

    Returns:
        The content of the file: rows, episodes, and the judge's counts.
    """
    # Start with an empty cache: results must not depend on where an interrupted evaluation resumed.
    actor.engine.forget()
    content: dict[str, Any] = {"rows": [], "episodes": []}
    if actor.judge is not None:
        content["judge"] = collections.Counter()
    settings = context.run.evaluation.episode_settings()
    for setting in [s for s in settings if s.frames == k]:
        context.interrupts.check(
            f"stopped while evaluating {name} RL; finished K are kept, K = {k} starts again"
        )
        row, lines = _play(context, actor, questions, name, setting)
        content["rows"].append(row)
        content["episodes"] += lines
        if actor.judge is not None:
            for counts in hosts.gather(dataclasses.asdict(actor.judge.counts)):
                content["judge"].update(counts)
        progress.update(done + len(content["rows"]), len(settings))
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
    # The report shows only episodes with parallel dispatch.
    shown = played[: run.log.episodes] if setting.dispatch == "parallel" else []
    lines = [
        {"phase": name, "step": 0}
        | transcript(outcome.episode, outcome.rewards, setting, vocabulary)
        for outcome in shown
    ]
    return row(setting, played), lines
