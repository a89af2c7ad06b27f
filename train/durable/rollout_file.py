"""Stores the finished episodes of the current step, so that a killed run need not play them again.

They are written when the last episode of a round has ended: the questions of the step are the first
round, and dynamic sampling may add others. A step that is killed earlier plays the episodes of that
round again. Rollouts that outlive a step are stored in its checkpoint instead.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any, TypedDict

from paravt_jax.data.stored_json import DamagedFileError, read_checked_json, write_checked_json
from paravt_jax.method.judge import Judge
from paravt_jax.method.records import Question
from paravt_jax.processes import hosts
from rollout.agent.episode import Environment
from rollout.engine.requests import Sampler
from train.durable.stored_records import pack, unpack
from train.learn.rl_settings import RLSettings
from train.learn.rollouts import Rollouts, roll_out

ROLLOUT_FILE = "rollouts.json"


_REMEDY = "delete it, and the step's episodes are played again"


class _Round(TypedDict):
    """A stored round; other fields are compared with those of the round to play."""

    step: int
    rollouts: dict[str, Any]


class _Content(TypedDict):
    rounds: list[_Round]


class RolloutFile:
    """The stored episodes of one step. The first process reads and writes it for all.

    Args:
        path: the file.
        first: number of steps in the checkpoint that this process started from.
    """

    def __init__(self, path: pathlib.Path, first: int):
        self._path = path
        self._first = first
        # Rounds of the current step, as they are stored; only in the first process.
        self._rounds: list[dict[str, Any]] = []

    def roll_out(
        self,
        engine: Sampler,
        environment: Environment,
        questions: Sequence[Question],
        settings: RLSettings,
        seed: int,
        step: int,
        judge: Judge,
        places: Sequence[int] | None = None,
        first: int = 0,
    ) -> Rollouts:
        """Returns the stored episodes of this round of the step, or plays and stores them.

        Takes the arguments of `train.learn.rollouts.roll_out`. The first round of a step has
        `first` 0.

        Raises:
            DamagedFileError: the file is damaged.
        """
        if first == 0:
            self._rounds = []
        head = {
            "step": step,
            "questions": [question.id for question in questions],
            "places": places if places is None else list(places),
            "first": first,
            # Another number of processes would have played with slightly different weights: with
            # another number of devices, sums round differently.
            "processes": hosts.process_count(),
        }
        # Only the first step after a checkpoint may read the file: its episodes were played with
        # exactly the restored weights.
        stored = None
        if step == self._first:
            stored = hosts.from_first(lambda: self._read(len(self._rounds)))
        if stored is not None and {name: stored.get(name) for name in head} == head:
            self._rounds.append(stored)
            return self._unpacked(stored["rollouts"])
        rollouts = roll_out(
            engine, environment, questions, settings, seed, step, judge, places, first
        )
        if hosts.is_first():
            self._rounds.append(head | {"rollouts": pack(rollouts)})
            write_checked_json(self._path, {"rounds": self._rounds})
        return rollouts

    def remove(self) -> None:
        """Removes the file. Call it after the last step is saved."""
        if hosts.is_first():
            self._path.unlink(missing_ok=True)

    def _read(self, number: int) -> dict[str, Any] | None:
        """A stored round, counted from 0; None if there is none."""
        if not self._path.exists():
            return None
        rounds = read_checked_json(self._path, _Content, _REMEDY)["rounds"]
        return dict(rounds[number]) if number < len(rounds) else None

    def _unpacked(self, stored: Any) -> Rollouts:
        try:
            rollouts = unpack(stored)
        # A record lacks a field, has another type, or is unknown.
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedFileError(f"{self._path}: damaged: {error!r}; {_REMEDY}") from error
        if not isinstance(rollouts, Rollouts):
            raise DamagedFileError(f"{self._path}: damaged: it holds no rollouts; {_REMEDY}")
        return rollouts
