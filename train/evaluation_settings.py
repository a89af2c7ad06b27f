"""Settings of the evaluation of a training run."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from paravt_jax.checks import require_at_least
from paravt_jax.method.records import Question
from rollout.agent.episode import Dispatch, EpisodeSettings


@dataclasses.dataclass(frozen=True)
class EvaluationSettings:
    """The evaluation before and after RL, on held-out questions.

    Every combination of overview budget, dispatch and temperature is played.
    """

    # A video is held out with all its questions.
    questions: int = 64
    """Number of questions that are not trained on, but played before and after RL; 0: none."""
    frames: tuple[int, ...] = (4, 16, 64)
    """Overview budgets K, in frames."""
    dispatch: tuple[Dispatch, ...] = ("parallel", "sequential", "none")
    """How tool calls are executed."""
    temperatures: tuple[float, ...] = (0.7, 0.0)
    """Sampling temperatures; 0 is greedy."""
    curve: bool = False
    """Also evaluate greedily every `rl.save_every` steps of RL, for the curves of the report."""
    format_temperatures: tuple[float, ...] = ()
    """Temperatures at which format is measured before and after RL, with parallel dispatch."""

    def __post_init__(self):
        require_at_least("evaluation", self, 0, "questions")
        # These raise if a K or a temperature is out of range.
        self.episode_settings()
        self.format_settings()
        least = len(self.frames) if self.format_temperatures else int(self.curve)
        if self.questions < least:
            raise ValueError(
                f"evaluation.questions: {self.questions} with evaluation.curve {self.curve} and "
                f"evaluation.format_temperatures {self.format_temperatures}, which need {least} at "
                "least: raise it, or switch them off"
            )

    def episode_settings(self) -> tuple[EpisodeSettings, ...]:
        """Return every combination of overview budget, dispatch and temperature."""
        combinations = itertools.product(self.frames, self.dispatch, self.temperatures)
        return tuple(
            EpisodeSettings(frames, temperature, dispatch)
            for frames, dispatch, temperature in combinations
        )

    def greedy_settings(self) -> tuple[EpisodeSettings, ...]:
        """Greedy decoding with parallel dispatch at each overview budget: a quick evaluation."""
        return tuple(EpisodeSettings(frames, 0.0, "parallel") for frames in self.frames)

    def format_settings(self) -> tuple[EpisodeSettings, ...]:
        """Parallel dispatch at each overview budget and each of `format_temperatures`."""
        combinations = itertools.product(self.frames, self.format_temperatures)
        return tuple(EpisodeSettings(frames, temperature) for frames, temperature in combinations)

    def format_questions(
        self, heldout: Sequence[Question], setting: EpisodeSettings
    ) -> Sequence[Question]:
        """Return the questions of a format measurement, of which every budget has its share."""
        return heldout[self.frames.index(setting.frames) : self.questions : len(self.frames)]
