"""Stored episodes: exact, and read only by the first step after a checkpoint."""

from __future__ import annotations

import dataclasses
import json
import zlib
from typing import Any

import numpy as np
import pytest

from paravt_jax.data.stored_json import DamagedFileError
from paravt_jax.method.parsing import call_text
from paravt_jax.method.protocol import Protocol
from paravt_jax.method.records import ToolCall, Trajectory
from paravt_jax.method.scoring import Rules
from paravt_jax.method.subtitles import Subtitle
from paravt_jax.processes import hosts
from rollout.engine.requests import Completion, Request
from tests.rollout.conftest import Scripted
from train.durable.rollout_file import RolloutFile
from train.learn.rollouts import roll_out


def plain(value: Any) -> Any:
    """A value that `==` compares by content, types of arrays included."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, Trajectory):
        return [plain(segment) for segment in value.segments]
    if dataclasses.is_dataclass(value):
        fields = [field.name for field in dataclasses.fields(value)]
        return type(value).__name__, [plain(getattr(value, name)) for name in fields]
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    return type(value).__name__, value


class Idle:
    """A sampler that must not be used."""

    def submit(self, request: Request) -> int:
        raise AssertionError("played again")

    def step(self) -> list[Completion]:
        raise AssertionError("played again")

    def cancel(self, ticket: int) -> None:
        raise AssertionError("played again")


IDLE = Idle()


def questions_of(road):
    return [
        dataclasses.replace(road.data.questions[0], video="lost.mp4"),
        *road.data.questions[1:4],
    ]


def test_stored_episodes_are_equal_bit_for_bit(road, small, tmp_path):
    arguments = (road.environment, questions_of(road), road.run.rl, 0, 3)

    class Counting(Rules):
        def metrics(self):
            return {"judge/asked": 3.0}

    rules = Counting()
    file = RolloutFile(tmp_path / "rollouts.json", 3)
    played = file.roll_out(small.Script(road), *arguments, rules)
    assert plain(played) == plain(roll_out(small.Script(road), *arguments, rules))
    assert played.unreadable == 1 and played.judged == {"judge/asked": 3.0}
    assert any(e.turns[0].calls for e in played.episodes), "every kind of record should occur"
    found = RolloutFile(tmp_path / "rollouts.json", 3).roll_out(IDLE, *arguments, rules)
    assert plain(found) == plain(played)


def test_calls_of_every_tool_are_stored(road, small, tmp_path):
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
    arguments = (environment, questions, road.run.rl, 0, 3, Rules())
    script = Scripted(environment.protocol.vocabulary, [line])
    played = RolloutFile(tmp_path / "rollouts.json", 3).roll_out(script, *arguments)
    (outcome,) = played.episodes[0].turns[0].calls
    assert outcome.call == ToolCall("search_subtitles", {"query": "bread"})
    found = RolloutFile(tmp_path / "rollouts.json", 3).roll_out(IDLE, *arguments)
    assert plain(found) == plain(played)


@pytest.mark.parametrize(("first", "step", "shift"), [(2, 3, 0), (4, 3, 0), (3, 3, 1), (4, 4, 0)])
def test_episodes_of_another_step_or_other_questions_are_played_again(
    road, small, tmp_path, first, step, shift
):
    RolloutFile(tmp_path / "rollouts.json", 0).roll_out(
        small.Script(road), road.environment, road.data.questions[:2], road.run.rl, 0, 3, Rules()
    )
    questions = road.data.questions[shift : shift + 2]
    file = RolloutFile(tmp_path / "rollouts.json", first)
    with pytest.raises(AssertionError, match="played again"):
        file.roll_out(IDLE, road.environment, questions, road.run.rl, 0, step, Rules())
    file.remove()
    file.remove()
    assert not list(tmp_path.iterdir())


def test_episodes_of_another_number_of_processes_are_played_again(
    road, small, tmp_path, monkeypatch
):
    arguments = (road.environment, road.data.questions[:2], road.run.rl, 0, 3, Rules())
    RolloutFile(tmp_path / "rollouts.json", 3).roll_out(small.Script(road), *arguments)
    monkeypatch.setattr(hosts, "process_count", lambda: 2)
    monkeypatch.setattr(hosts, "from_first", lambda make: make())
    with pytest.raises(AssertionError, match="played again"):
        RolloutFile(tmp_path / "rollouts.json", 3).roll_out(IDLE, *arguments)


@pytest.mark.parametrize(
    "content", ['{"step": 3', "[]", "{}", "3", '{"rounds": [3]}', '{"rounds": [{"step": 3}]}']
)
def test_a_damaged_file_is_an_error(road, tmp_path, content):
    (tmp_path / "rollouts.json").write_text(content)
    require_damaged(road, tmp_path)


@pytest.mark.parametrize(
    "stored",
    [{}, {"is": "Rewards"}, {"is": "Unknown"}, {"is": "Rollouts"}, {"is": "dict", "text": "{}"}],
)
def test_damaged_episodes_are_an_error(road, small, tmp_path, stored):
    arguments = (road.environment, questions_of(road), road.run.rl, 0, 3, Rules())
    file = tmp_path / "rollouts.json"
    RolloutFile(file, 3).roll_out(small.Script(road), *arguments)
    content = json.loads(file.read_text())
    content["rounds"][0]["rollouts"] = stored
    content["crc32"] = zlib.crc32(json.dumps(content["rounds"]).encode())
    file.write_text(json.dumps(content))
    require_damaged(road, tmp_path)


def test_a_changed_log_prob_is_an_error(road, small, tmp_path):
    """The arrays are base64, so another character is another number."""
    arguments = (road.environment, questions_of(road), road.run.rl, 0, 3, Rules())
    file = tmp_path / "rollouts.json"
    RolloutFile(file, 3).roll_out(small.Script(road), *arguments)
    text = file.read_text()
    place = text.index('"bytes": "') + 12
    file.write_text(text[:place] + ("B" if text[place] == "A" else "A") + text[place + 1 :])
    require_damaged(road, tmp_path)


def require_damaged(road, folder):
    words = r"rollouts\.json: damaged: .*; delete it, and the step's episodes are played again"
    with pytest.raises(DamagedFileError, match=words) as error:
        RolloutFile(folder / "rollouts.json", 3).roll_out(
            IDLE, road.environment, questions_of(road), road.run.rl, 0, 3, Rules()
        )
    assert "\n" not in str(error.value)
