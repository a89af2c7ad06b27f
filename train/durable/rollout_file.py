"""The finished episodes of the step under way, on disk: a run that is killed before their update was saved does not play them again.

Owns the file and its form, JSON with arrays as base64, so that reading one runs nothing. Invariant: what is read equals what was played,
bit for bit, and only the first step after a checkpoint reads: those episodes were written by the very weights that were restored.
Episodes are kept when the last of a step has ended; a step cut off before that plays all of its own again.
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

_RECORDS = {
    kind.__name__: kind
    for kind in (
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
}
_ENUMS = {kind.__name__: kind for kind in (Author, CallStatus, QuestionKind, StopReason)}


def rollout_file_name(process: int = 0, processes: int = 1) -> str:
    """Each process of a run keeps its own share."""
    return f"rollouts-{process}-of-{processes}.json"


def forget_others(folder: pathlib.Path, processes: int) -> None:
    """Removes what runs of another number of processes have left: it may be of the same step, and of other weights, up to rounding."""
    for file in folder.glob("rollouts-*-of-*.json"):
        if not file.stem.endswith(f"-of-{processes}"):
            file.unlink()


class RolloutFile:
    """The episodes of one step in `path`. `first` is the number of updates behind the weights that a process starts from."""

    def __init__(self, path: pathlib.Path, first: int):
        self._path, self._first = path, first

    def roll_out(
        self,
        engine: Sampler,
        environment: Environment,
        questions: Sequence[Question],
        settings: RLSettings,
        seed: int,
        step: int,
        judge: RemoteJudge | None = None,
    ) -> Rollouts:
        """As `train.learn.rollouts.roll_out`, whose episodes are written down; or those that were, where they are this step's.

        Raises ValueError for a file that cannot be read.
        """
        asked = [question.id for question in questions]
        found = self._read() if step == self._first else None
        if found is not None and (found["step"], found["questions"]) == (step, asked):
            if judge is not None:
                judge.counts = _unpack(found["judge"])
            return _unpack(found["rollouts"])
        rollouts = roll_out(engine, environment, questions, settings, seed, step, judge)
        content = {
            "step": step,
            "questions": asked,
            "judge": _pack(judge and judge.counts),
            "rollouts": _pack(rollouts),
        }
        write_atomically(self._path, json.dumps(content))
        return rollouts

    def remove(self) -> None:
        """Once the last step is saved."""
        self._path.unlink(missing_ok=True)

    def _read(self) -> dict[str, Any] | None:
        if not self._path.exists():
            return None
        try:
            return json.loads(self._path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(
                f"{self._path}: damaged ({error}); delete it, and its step is played again"
            ) from error


def _pack(value: Any) -> Any:
    """`value` as JSON holds it. TypeError for what would not come back."""
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
        return {"is": kind} | {
            field.name: _pack(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, tuple):
        return [_pack(item) for item in value]
    if isinstance(value, dict):  # a call's arguments: JSON, whose lists stay lists
        return {"is": kind, "text": json.dumps(value)}
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(
        f"rollouts: {value!r}, a {kind}, has no form on disk; name it in train.durable.rollout_file"
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
        return (
            np.frombuffer(base64.b64decode(value["bytes"]), np.dtype(value["type"]))
            .reshape(value["shape"])
            .copy()
        )
    fields = {name: _unpack(item) for name, item in value.items() if name != "is"}
    return (
        Trajectory(fields["segments"]) if kind == Trajectory.__name__ else _RECORDS[kind](**fields)
    )
