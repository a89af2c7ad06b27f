"""Stores the finished episodes of the current step, so that a killed run need not play them again.

The file is JSON with arrays in base64, so reading it executes no code (a pickle would). Episodes
come back bit for bit. They are written when the last episode of a round has ended: the questions of
the step are the first round, and dynamic sampling may add others. A step that is killed earlier
plays the episodes of that round again.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from paravt_jax.data.atomic import write_atomically
from paravt_jax.method.judge import Judge
from paravt_jax.method.records import (
    Author,
    CallOutcome,
    CallStatus,
    CropCall,
    Episode,
    Frame,
    Question,
    QuestionKind,
    Segment,
    StopReason,
    ToolCall,
    Trajectory,
    Turn,
)
from paravt_jax.method.rewards import Rewards
from paravt_jax.method.subtitles import Subtitle
from paravt_jax.remote.judge import JudgeCounts, RemoteJudge
from rollout.agent.episode import Environment
from rollout.engine.requests import Sampler
from train.learn.rl_settings import RLSettings
from train.learn.rollouts import Rollouts, roll_out

_RECORD_TYPES = (
    Rollouts,
    Episode,
    Question,
    Segment,
    Frame,
    Turn,
    CallOutcome,
    CropCall,
    ToolCall,
    Subtitle,
    Rewards,
    JudgeCounts,
)
# Types by their name in the file, which is the value of the key "is".
_RECORDS = {kind.__name__: kind for kind in _RECORD_TYPES}
_ENUMS = {kind.__name__: kind for kind in (Author, CallStatus, QuestionKind, StopReason)}


def rollout_file_name(process: int = 0, processes: int = 1) -> str:
    """File name of one process's share of the episodes."""
    return f"rollouts-{process}-of-{processes}.json"


def forget_others(folder: pathlib.Path, processes: int) -> None:
    """Removes files left by a run with another number of processes.

    They may be from the same step, but slightly different weights played them: with another number
    of devices, sums round differently.
    """
    for file in folder.glob("rollouts-*-of-*.json"):
        if not file.stem.endswith(f"-of-{processes}"):
            file.unlink()


class RolloutFile:
    """The stored episodes of one step.

    Args:
        path: the file.
        first: number of steps in the checkpoint that this process started from.
    """

    def __init__(self, path: pathlib.Path, first: int):
        self._path = path
        self._first = first
        # Rounds of the current step, as they are stored.
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
            ValueError: the file is damaged.
        """
        if first == 0:
            self._rounds = []
        head = {
            "step": step,
            "questions": [question.id for question in questions],
            "places": places if places is None else list(places),
            "first": first,
        }
        # Only the first step after a checkpoint may read the file: its episodes were played with
        # exactly the restored weights.
        stored = self._read(len(self._rounds)) if step == self._first else None
        if stored is not None and {name: stored[name] for name in head} == head:
            self._rounds.append(stored)
            if isinstance(judge, RemoteJudge):
                judge.counts = _unpack(stored["judge"])
            return _unpack(stored["rollouts"])
        rollouts = roll_out(
            engine, environment, questions, settings, seed, step, judge, places, first
        )
        played = {
            "judge": _pack(judge.counts) if isinstance(judge, RemoteJudge) else None,
            "rollouts": _pack(rollouts),
        }
        self._rounds.append(head | played)
        write_atomically(self._path, json.dumps({"rounds": self._rounds}))
        return rollouts

    def remove(self) -> None:
        """Removes the file. Call it after the last step is saved."""
        self._path.unlink(missing_ok=True)

    def _read(self, number: int) -> dict[str, Any] | None:
        """A stored round, counted from 0; None if there is none."""
        if not self._path.exists():
            return None
        try:
            rounds = json.loads(self._path.read_text(encoding="utf-8"))["rounds"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{self._path}: damaged ({error}); delete it and the step's episodes are played "
                "again"
            ) from error
        return rounds[number] if number < len(rounds) else None


def _pack(value: Any) -> Any:
    """Encodes a value as JSON: tuples as lists; records, enums, arrays and dicts tagged by "is".

    Raises:
        TypeError: `_unpack` could not restore the value.
    """
    kind = type(value).__name__
    if isinstance(value, enum.Enum):
        return {"is": kind, "value": value.value}
    if isinstance(value, np.ndarray):
        return {
            "is": "array",
            "type": value.dtype.str,
            "shape": value.shape,
            "bytes": base64.b64encode(value.tobytes()).decode(),
        }
    if isinstance(value, Trajectory):
        return {"is": kind, "segments": _pack(value.segments)}
    if kind in _RECORDS:
        fields = [field.name for field in dataclasses.fields(value)]
        return {"is": kind} | {name: _pack(getattr(value, name)) for name in fields}
    if isinstance(value, tuple):
        return [_pack(item) for item in value]
    if isinstance(value, dict):
        # A tool call's arguments. `_unpack` turns lists into tuples, so keep these as JSON text.
        return {"is": kind, "text": json.dumps(value)}
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(
        f"rollouts: {value!r} is a {kind}, which cannot be stored; add the type to "
        "train.durable.rollout_file"
    )


def _unpack(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_unpack(item) for item in value)
    if not isinstance(value, dict):
        return value
    kind = value["is"]
    if kind in _ENUMS:
        return _ENUMS[kind](value["value"])
    if kind == "dict":
        return json.loads(value["text"])
    if kind == "array":
        data = base64.b64decode(value["bytes"])
        array = np.frombuffer(data, np.dtype(value["type"])).reshape(value["shape"])
        # frombuffer gives a read-only view of the bytes.
        return array.copy()
    fields = {name: _unpack(item) for name, item in value.items() if name != "is"}
    if kind == Trajectory.__name__:
        return Trajectory(fields["segments"])
    return _RECORDS[kind](**fields)
