"""Evaluations on held-out questions: before, during and after RL, and of the control."""

from __future__ import annotations

import collections
import dataclasses
import functools
import pathlib
import time
from collections.abc import Sequence
from typing import Any, Literal

import jax

from paravt_jax.data.stored_json import write_checked_json
from paravt_jax.method.protocol import Protocol
from paravt_jax.method.records import Question
from paravt_jax.method.rewards import RewardSettings
from paravt_jax.processes import hosts
from paravt_jax.progress import Progress
from rollout.agent.episode import EpisodeSettings
from rollout.agent.transcript import transcript
from rollout.evaluation.figures import row
from rollout.evaluation.play import Played, Scoring, play_and_score, play_question
from train.actor import EngineActor
from train.data import Data
from train.durable.home import Home
from train.evaluation_file import read_evaluation_file
from train.rl import Trained
from train.settings import Run

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


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """Plays the held-out questions of a run, and writes one file per evaluation and K.

    An interrupted evaluation resumes with the first K that has no file.
    """

    run: Run
    home: Home
    data: Data
    actor: EngineActor | None
    """Plays the episodes; None: the run plays none."""

    def evaluate(self, weights: Any, name: Literal["before", "after"]) -> Rows:
        """Play held-out questions under every setting.

        With a judge, a file also holds the sums of `JudgeCounts`. Format at several temperatures
        has files of its own.

        Args:
            weights: The weights to evaluate.
            name: Whether it is the evaluation before or after RL.

        Returns:
            One row of results per setting; [] if the run plays no episodes or has no held-out
            questions.
        """
        run = self.run
        phase, settings = ("sft", run.sft) if name == "before" else ("rl", run.rl)
        weights_of = (phase, settings.steps if settings is not None else 0)
        chosen = run.evaluation
        plans = [_Plan(name, f"{name} RL", weights_of, chosen.episode_settings(), _TRANSCRIPTS)]
        if chosen.format_temperatures:
            title = f"format {name} RL"
            plans.append(
                _Plan(f"format_{name}", title, weights_of, chosen.format_settings(), 0, True)
            )
        return self._evaluate_weights(weights, plans)

    @property
    def has_control(self) -> bool:
        """Whether the run compares RL with further steps on demonstrations."""
        run = self.run
        wanted = run.sft is not None and run.rl is not None and run.rl.control
        return wanted and bool(self.data.heldout)

    @property
    def is_control_finished(self) -> bool:
        """Whether the control is evaluated already."""
        return self._is_finished(self._control())

    def evaluate_control(self, weights: Any) -> Rows:
        """Play held-out questions greedily with the weights of the control.

        Args:
            weights: The weights; not needed if the evaluation is finished.

        Returns:
            A row per K.
        """
        return self._evaluate_weights(weights, [self._control()])

    @functools.partial(jax.profiler.annotate_function, name="evaluation")
    def evaluate_step(self, step: int) -> None:
        """Play held-out questions greedily with the actor's weights, those after a step of RL.

        Does nothing without `evaluation.curve`.
        """
        if self.actor is None or not self.run.evaluation.curve or not self.data.heldout:
            return
        settings = self.run.evaluation.greedy_settings()
        plan = _Plan(f"curve-{step:06d}", f"step {step} of RL", ("rl", step), settings)
        self._play_missing(self.actor, plan)
        # Rollouts must find the same empty cache in a run that was stopped here and resumed.
        self.actor.sampler.forget()

    def show(self, step: int, trained: Trained) -> None:
        """Write the first episode of each group of a step of RL, for the report."""
        settings = self.run.rl
        if settings is None or not hosts.is_first():
            return
        lines = []
        for p, group in enumerate(trained.rollouts.groups):
            episode, reward = group.episodes[0], group.rewards[0]
            setting = EpisodeSettings(episode.frames, settings.temperature)
            advantages = trained.advantages[p * settings.grpo.group_size]
            shown = transcript(episode, reward, setting, self.data.vocabulary, advantages)
            lines.append({"phase": "rl", "step": step} | shown)
        self._write(f"rl-{step:06d}", {"rows": [], "episodes": lines}, ("rl", step))

    def _control(self) -> _Plan:
        run = self.run
        steps = run.rl.steps if run.rl is not None else 0
        settings = run.evaluation.greedy_settings()
        return _Plan("control", "the control", ("control", steps), settings)

    def _files(self, plan: _Plan) -> list[pathlib.Path]:
        """Return the file of each K."""
        return [self._file(f"{plan.name}-{k}") for k in self.run.evaluation.frames]

    def _file(self, name: str) -> pathlib.Path:
        return self.home.folder / "evaluation" / f"{name}.json"

    def _is_finished(self, plan: _Plan) -> bool:
        """Return whether all files exist, as the first process sees it."""
        return hosts.from_first(lambda: all(file.exists() for file in self._files(plan)))

    def _write(self, name: str, content: dict[str, Any], weights: tuple[str, int]) -> None:
        """Write a file, with the weights that it was made from. Only the first process calls it."""
        file = self._file(name)
        file.parent.mkdir(exist_ok=True)
        phase, step = weights
        write_checked_json(file, {"phase": phase, "step": step, **content})
        self.home.place.push()

    def _evaluate_weights(self, weights: Any, plans: Sequence[_Plan]) -> Rows:
        """Load the weights if there is something left to play, play it; rows of the first plan."""
        actor = self.actor
        if actor is None or not self.data.heldout:
            return []
        if not all(self._is_finished(plan) for plan in plans):
            actor.compile()
            actor.load(weights, actor.sampler.version + 1)
        rows = [self._play_missing(actor, plan) for plan in plans]
        # The next phase needs the engine's memory.
        actor.sleep()
        return rows[0]

    def _play_missing(self, actor: EngineActor, plan: _Plan) -> Rows:
        """Play the settings whose K has no file yet, and return the rows of all files."""
        rows = []
        played = False
        with Progress(f"evaluate {plan.title}", "setting", shown=hosts.is_first()) as progress:
            for k, file in zip(self.run.evaluation.frames, self._files(plan), strict=True):
                if not hosts.from_first(file.exists):
                    content = self._play_k(actor, plan, k, progress, len(rows))
                    with hosts.one_after_another():
                        if hosts.is_first():
                            self._write(file.stem, content, plan.weights)
                    played = True
                rows += hosts.from_first(lambda file=file: read_evaluation_file(file)["rows"])
        if played:
            self.home.report()
        return rows

    def _play_k(
        self, actor: EngineActor, plan: _Plan, k: int, progress: Progress, before: int
    ) -> dict[str, Any]:
        """Play all settings with `k` frames, after `before` other settings.

        Returns:
            The content of the file: rows, the seconds that each took, episodes, and the judge's
            counts.
        """
        # Start with an empty cache: results must not depend on where an interrupted evaluation
        # resumed.
        actor.sampler.forget()
        content: dict[str, Any] = {"rows": [], "seconds": [], "episodes": []}
        if actor.remote is not None:
            content["judge"] = collections.Counter()
        for setting in [setting for setting in plan.settings if setting.frames == k]:
            self.home.interrupts.check(
                f"stopped while evaluating {plan.title}; finished K are kept, K = {k} starts again"
            )
            start = time.monotonic()
            figures, lines = self._play(actor, plan, setting)
            content["rows"].append(figures)
            content["seconds"].append(time.monotonic() - start)
            content["episodes"] += lines
            if actor.remote is not None:
                for counts in hosts.gather(dataclasses.asdict(actor.remote.counts)):
                    content["judge"].update(counts)
            progress.update(before + len(content["rows"]), len(plan.settings))
        return content

    def _play(
        self, actor: EngineActor, plan: _Plan, setting: EpisodeSettings
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Play one setting. Returns its row, and the transcripts for the report."""
        run, vocabulary = self.run, self.data.vocabulary
        questions = self._questions(plan, setting)
        protocol = Protocol(vocabulary, run.limits(setting.dispatch))
        scoring = Scoring(
            run.rl.rewards if run.rl else RewardSettings(),
            actor.remote,
            run.rl.grpo.sequence_anchor if run.rl else 0.0,
        )
        environment = dataclasses.replace(actor.environment, protocol=protocol)
        own_questions = questions[hosts.share_of(len(questions))]
        agents = (
            play_question(environment, question, setting, run.seed) for question in own_questions
        )
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

    def _questions(self, plan: _Plan, setting: EpisodeSettings) -> Sequence[Question]:
        """Return the questions to play under a setting."""
        evaluation, heldout = self.run.evaluation, self.data.heldout
        if plan.measures_format:
            return evaluation.format_questions(heldout, setting)
        return heldout[: evaluation.questions]
