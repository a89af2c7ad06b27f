"""Evaluations on held-out questions: before, during and after RL."""

from __future__ import annotations

import collections
import dataclasses
import functools
import pathlib
from typing import Any, Literal, NamedTuple

import jax
from tqdm import tqdm

from paravt_jax.data.stored import write_checked_json
from paravt_jax.method.rewards import RewardSettings
from paravt_jax.processes import hosts
from paravt_jax.remote.judge import RemoteJudge
from rollout.agent.episode import EpisodeSettings
from rollout.agent.transcript import transcript
from rollout.evaluation.figures import summarise_setting
from rollout.evaluation.play import Played, Scoring, play_and_score, play_question
from train.actor import EngineActor
from train.data import Data
from train.durable.saver import Home
from train.rl import Trained
from train.settings import Run

_TRANSCRIPTS = 8  # per setting, to look at


class _Evaluation(NamedTuple):
    """What is played, and the weights that play it."""

    name: str
    """Prefix of the file names."""
    phase: str
    """Phase of the weights."""
    step: int
    """Step of that phase."""
    settings: tuple[EpisodeSettings, ...]


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

    def evaluate(self, weights: Any, name: Literal["before", "after"]) -> None:
        """Play held-out questions under every setting, if there are any.

        With a judge, a file also holds the sums of `RemoteJudge.counts`.

        Args:
            weights: The weights to evaluate.
            name: Whether it is the evaluation before or after RL.
        """
        run, actor = self.run, self.actor
        if actor is None or not self.data.heldout:
            return
        phase, trained = ("sft", run.sft) if name == "before" else ("rl", run.rl)
        step = trained.steps if trained is not None else 0
        evaluation = _Evaluation(name, phase, step, run.evaluation.episode_settings())
        files = [self._file(name, k) for k in run.evaluation.frames]
        if not hosts.from_first(lambda: all(file.exists() for file in files)):
            actor.compile()
            actor.load(weights, actor.sampler.version + 1)
        self._play_missing(actor, evaluation)
        # The next phase needs the engine's memory.
        actor.sleep()

    @functools.partial(jax.profiler.annotate_function, name="evaluation")
    def evaluate_step(self, step: int) -> None:
        """Play held-out questions greedily with the actor's weights, those after a step of RL.

        Does nothing unless the evaluation before and after RL plays them greedily, too.
        """
        settings = self.run.evaluation.greedy_settings()
        if self.actor is None or not settings or not self.data.heldout:
            return
        self._play_missing(self.actor, _Evaluation(f"curve-{step:06d}", "rl", step, settings))
        # Rollouts must find the same empty cache in a run that was stopped here and resumed.
        self.actor.sampler.forget()

    def show(self, step: int, trained: Trained) -> None:
        """Write the first episode of each group of a step of RL, for the report."""
        settings = self.run.rl
        if settings is None or not hosts.is_first():
            return
        episodes = []
        for p, group in enumerate(trained.rollouts.groups):
            episode, reward = group.episodes[0], group.rewards[0]
            setting = EpisodeSettings(episode.frames, settings.temperature)
            advantages = trained.advantages[p * settings.grpo.group_size]
            shown = transcript(episode, reward, setting, self.data.vocabulary, advantages)
            episodes.append({"phase": "rl", "step": step} | shown)
        content = {"phase": "rl", "step": step, "rows": [], "episodes": episodes}
        self._write(self._file("rl", f"{step:06d}"), content)

    def _file(self, name: str, number: object) -> pathlib.Path:
        return self.home.folder / "evaluation" / f"{name}-{number}.json"

    def _write(self, file: pathlib.Path, content: dict[str, Any]) -> None:
        """Write a file. Only the first process calls it."""
        file.parent.mkdir(exist_ok=True)
        write_checked_json(file, content)
        self.home.run_folder.push()

    def _play_missing(self, actor: EngineActor, evaluation: _Evaluation) -> None:
        """Play the settings whose K has no file yet."""
        budgets = self.run.evaluation.frames
        title = f"evaluate {evaluation.name}"
        with tqdm(budgets, title, unit="K", disable=not hosts.is_first()) as bar:
            for k in bar:
                file = self._file(evaluation.name, k)
                if not hosts.from_first(file.exists):
                    content = self._play_k(actor, evaluation, k)
                    hosts.from_first(functools.partial(self._write, file, content))

    def _play_k(self, actor: EngineActor, evaluation: _Evaluation, k: int) -> dict[str, Any]:
        """Play all settings with `k` frames.

        Returns:
            The content of the file: the results, episodes, and the judge's counts.
        """
        # Start with an empty cache: results must not depend on where an interrupted evaluation
        # resumed.
        actor.sampler.forget()
        content: dict[str, Any] = {"phase": evaluation.phase, "step": evaluation.step}
        content |= {"rows": [], "episodes": []}
        for setting in [setting for setting in evaluation.settings if setting.frames == k]:
            self.home.interrupts.check(
                f"stopped while evaluating ({evaluation.name}); finished K are kept, K = {k} "
                "starts again"
            )
            played = self._play(actor, setting)
            content["rows"].append(summarise_setting(setting, played))
            if setting.dispatch == "parallel":
                phase = evaluation.name.partition("-")[0]
                content["episodes"] += [
                    {"phase": phase, "step": 0 if phase == "before" else evaluation.step}
                    | transcript(each.episode, each.rewards, setting, self.data.vocabulary)
                    for each in played[:_TRANSCRIPTS]
                ]
            if isinstance(actor.judge, RemoteJudge):
                judged = content.setdefault("judge", collections.Counter())
                for counts in hosts.gather(actor.judge.counts):
                    judged.update(counts)
        return content

    def _play(self, actor: EngineActor, setting: EpisodeSettings) -> list[Played]:
        """Play the held-out questions under one setting, on all processes."""
        run = self.run
        questions = self.data.heldout[: run.evaluation.questions]
        agents = (
            play_question(actor.environment, question, setting, run.seed)
            for question in questions[hosts.share_of(len(questions))]
        )
        scoring = Scoring(
            run.rl.rewards if run.rl else RewardSettings(),
            actor.judge,
            run.rl.grpo.sequence_anchor if run.rl else 0.0,
        )
        outcomes = play_and_score(actor.sampler, agents, scoring)
        own = [outcome for _, outcome in outcomes if isinstance(outcome, Played)]
        return [outcome for others in hosts.gather(own) for outcome in others]
