"""Finished episodes on disk are reused by the first step after a checkpoint, and by no other."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paravt_jax.method.parsing import call_text
from paravt_jax.method.protocol import Protocol
from paravt_jax.method.records import ToolCall, Trajectory
from paravt_jax.method.subtitles import Subtitle
from paravt_jax.remote.judge import JudgeCounts
from tests.rollout.conftest import Scripted
from train.durable.rollout_file import RolloutFile
from train.learn.rollouts import roll_out


def plain(value: Any) -> Any:
    """A value that `==` can compare: records by content, arrays with their type."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, Trajectory):
        return [plain(segment) for segment in value.segments]
    if dataclasses.is_dataclass(value):
        return type(value).__name__, [
            plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        ]
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    return type(value).__name__, value


class Idle:
    """A sampler that must not be used."""

    def submit(self, request: Any) -> int:
        raise AssertionError("played again")

    def step(self) -> list[Any]:
        raise AssertionError("played again")

    def cancel(self, ticket: int) -> None:
        raise AssertionError("played again")


IDLE: Any = Idle()


def questions_of(road):
    return [
        dataclasses.replace(road.data.questions[0], video="lost.mp4"),
        *road.data.questions[1:4],
    ]


def test_played_episodes_are_restored_bit_for_bit(road, small, tmp_path):
    arguments = (road.environment, questions_of(road), road.run.rl, 0, 3)
    judge: Any = SimpleNamespace(counts=JudgeCounts(asked=3, answered=3))
    file = RolloutFile(tmp_path / "rollouts.json", 3)
    played = file.roll_out(small.Script(road), *arguments)
    assert plain(played) == plain(roll_out(small.Script(road), *arguments))
    assert played.unreadable == 1 and any(e.turns[0].calls for e in played.episodes), (
        "the file should hold every kind of record"
    )
    found = RolloutFile(tmp_path / "rollouts.json", 3).roll_out(IDLE, *arguments)
    assert plain(found) == plain(played)
    content = json.loads((tmp_path / "rollouts.json").read_text())
    (tmp_path / "rollouts.json").write_text(
        json.dumps(content | {"judge": {"is": "JudgeCounts", **dataclasses.asdict(judge.counts)}})
    )
    judge.counts = JudgeCounts()
    RolloutFile(tmp_path / "rollouts.json", 3).roll_out(IDLE, *arguments, judge)
    assert judge.counts.asked == 3


def test_calls_of_every_tool_are_restored(road, small, tmp_path):
    settings = dataclasses.replace(
        road.run.protocol,
        tools=("crop_video", "search_subtitles"),
        turn_tokens=128,
        trajectory_tokens=512,
    )
    environment = dataclasses.replace(
        road.environment, protocol=Protocol(road.environment.protocol.vocabulary, settings)
    )
    written = call_text("search_subtitles", {"query": "bread"})
    line = f"look closer\n</think><tool_call>{written}</tool_call>"
    spoken = (Subtitle(1.0, 2.0, "The bread rises"),)
    questions = (dataclasses.replace(road.data.questions[0], subtitles=spoken),)
    arguments = (environment, questions, road.run.rl, 0, 3)
    script = Scripted(environment.protocol.vocabulary, [line])
    played = RolloutFile(tmp_path / "rollouts.json", 3).roll_out(script, *arguments)
    (outcome,) = played.episodes[0].turns[0].calls
    assert outcome.call == ToolCall("search_subtitles", {"query": "bread"})
    found = RolloutFile(tmp_path / "rollouts.json", 3).roll_out(IDLE, *arguments)
    assert plain(found) == plain(played)


@pytest.mark.parametrize(("first", "step", "shift"), [(2, 3, 0), (4, 3, 0), (3, 3, 1), (4, 4, 0)])
def test_episodes_of_another_step_are_played_again(road, small, tmp_path, first, step, shift):
    """So are those of other questions, and those of a step that is not the process's first."""
    RolloutFile(tmp_path / "rollouts.json", 0).roll_out(
        small.Script(road), road.environment, road.data.questions[:2], road.run.rl, 0, 3
    )
    questions = road.data.questions[shift : shift + 2]
    file = RolloutFile(tmp_path / "rollouts.json", first)
    with pytest.raises(AssertionError, match="played again"):
        file.roll_out(IDLE, road.environment, questions, road.run.rl, 0, step)
    file.remove()
    file.remove()
    assert not list(tmp_path.iterdir())


def test_a_damaged_file_is_refused(road, tmp_path):
    (tmp_path / "rollouts.json").write_text('{"step": 3')
    with pytest.raises(ValueError, match=r"rollouts\.json: damaged"):
        RolloutFile(tmp_path / "rollouts.json", 3).roll_out(
            IDLE, road.environment, questions_of(road), road.run.rl, 0, 3
        )
