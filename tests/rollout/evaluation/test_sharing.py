"""Questions are shared between hosts and replicas; a failure ends all."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.model import abstract_model
from models.weights.hf import save
from paravt_jax.data import tokenizer_file
from paravt_jax.method.records import Question, QuestionKind
from rollout.evaluation.benchmarks import Item
from rollout.evaluation.folder import latest, read_json
from rollout.evaluation.replicas import Queue, device_groups, play_all, units_of
from tests.processes import lost_others


def items_on(*videos: str) -> list[Item]:
    """One item per name of a video."""
    return [
        Item(Question(f"{n}", video, "?", QuestionKind.OPEN_ENDED, "x"))
        for n, video in enumerate(videos)
    ]


def ids(items) -> list[str]:
    return [item.question.id for item in items]


def test_questions_on_one_video_stay_together_up_to_a_bound():
    units = units_of(items_on("a", "b", "a", "a", "c", "b"), most=2)
    assert [ids(unit) for unit in units] == [["0", "2"], ["3"], ["1", "5"], ["4"]]


def test_overviews_are_read_ahead_once_each_except_the_first():
    asked: list[str] = []
    queue = Queue(units_of(items_on("a", "b", "a", "c", "d"), most=1), asked.append, count=2)
    before = [(item.question.video, "".join(asked)) for item in queue.items()]
    assert before == [("a", "b"), ("a", "bc"), ("b", "bcd"), ("c", "bcd"), ("d", "bcd")]


# --- replicas ---


class Counting:
    """A player that makes a line of every item, and may fail."""

    def __init__(self, fails_after: int = 10_000):
        self.fails_after = fails_after
        self.played: list[str] = []

    def lines(self, items):
        for item in items:
            if len(self.played) == self.fails_after:
                raise OSError("no memory")
            self.played.append(item.question.id)
            time.sleep(0.002)
            yield {"id": item.question.id}


@pytest.fixture
def play(unchecked) -> Callable[..., list[str]]:
    """play(players, items) returns the ids of the lines."""

    def run(players, items) -> list[str]:
        groups = [tuple(jax.local_devices()[:1])] * len(players)
        queue = Queue(units_of(items, 2), lambda _: None, len(players))
        return [line["id"] for line in play_all(players, groups, queue)]

    return run


@pytest.mark.parametrize("count", [1, 3])
def test_replicas_take_from_one_queue(play, count):
    players = [Counting() for _ in range(count)]
    items = items_on(*(f"v{n}" for n in range(40)))
    assert sorted(play(players, items), key=int) == ids(items)
    assert all(player.played for player in players)


def test_a_failure_of_one_replica_ends_the_others(play):
    players = [Counting(), Counting(fails_after=3)]
    items = items_on(*(f"v{n}" for n in range(4000)))
    threads = threading.active_count()
    with pytest.raises(OSError, match="no memory"):
        play(players, items)
    assert sum(len(player.played) for player in players) < 2000
    # Other tests may have left threads of their own.
    assert threading.active_count() <= threads


def test_too_few_devices_are_named():
    with pytest.raises(ValueError, match="--tensor 64: this host has .* give at most that many"):
        device_groups(64)


# --- the whole command, on several devices and hosts ---


@pytest.fixture(scope="module")
def checkpoint(small_model, small_vocabulary, tmp_path_factory) -> pathlib.Path:
    """A small model of which every array divides over two devices."""
    text = dataclasses.replace(
        small_model.config.text,
        vocab_size=small_vocabulary.size + small_vocabulary.size % 2,
        num_key_value_heads=2,
    )
    config = dataclasses.replace(small_model.config, text=text)
    graph, state = nnx.split(abstract_model(config))
    rng = np.random.default_rng(0)
    noise = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(0.1, 0.2, leaf.shape), leaf.dtype), state
    )
    folder = tmp_path_factory.mktemp("even")
    tokenizer_file.save(small_vocabulary, folder / "tokenizer")
    model = nnx.merge(graph, noise)
    save(model, folder / "model", files=sorted((folder / "tokenizer").iterdir()))
    return folder / "model"


@pytest.fixture(scope="module")
def arguments(checkpoint, videos, tmp_path_factory) -> list[str]:
    """The command's arguments, without --out. One question is on a missing video."""
    file = tmp_path_factory.mktemp("own") / "own.jsonl"
    shutil.copytree(videos / "data", file.parent / "data")
    records = [
        {
            "id": str(n),
            "video": ("data/w0.mp4", "data/w1.mp4")[n % 2] if n else "data/gone.mp4",
            "question": f"How many of number {n}?",
            "options": ["one", "two", "three"],
            "answer": "ABC"[n % 3],
        }
        for n in range(24)
    ]
    file.write_text("\n".join(map(json.dumps, records)))
    return [
        *("-m", "rollout.evaluate"),
        f"--model={checkpoint}",
        f"--data={file}",
        "--frames=4",
        "--episodes=2",
        "--protocol.turn-tokens=24",
        "--protocol.summary-tokens=8",
        "--protocol.trajectory-tokens=128",
        "--protocol.text-tokens=2048",
        *("--pixels", "4096", "4096"),
    ]


def played(folder: pathlib.Path) -> dict[str, dict[str, Any]]:
    """The line of each question with its transcript, without the time that it took."""
    files = sorted(folder.glob("questions*.jsonl"))
    lines = (json.loads(line) for file in files for line in file.read_text().splitlines())
    counting = latest(lines)
    return {id: {k: v for k, v in line.items() if k != "spent"} for id, line in counting.items()}


def count_lines(folder: pathlib.Path) -> int:
    return sum(file.read_bytes().count(b"\n") for file in folder.glob("questions*.jsonl"))


@pytest.fixture(scope="module")
def alone(together, arguments, tmp_path_factory) -> pathlib.Path:
    """The folder of a run on one device."""
    out = tmp_path_factory.mktemp("alone") / "out"
    (ended,) = together([*arguments, f"--out={out}"], 1, devices=1)
    assert ended.code == 0, ended.err
    assert len(played(out)) == 24
    return out


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [1, 2])
def test_all_devices_of_a_host_play_and_nothing_changes(
    together, arguments, alone, tmp_path, tensor
):
    """Two replicas, of one device or of two."""
    out = tmp_path / "out"
    command = [*arguments, f"--out={out}", f"--tensor={tensor}"]
    (ended,) = together(command, 1, devices=2 * tensor)
    assert ended.code == 0, ended.err
    assert same_answers(out, alone)


def words_of(turn: dict[str, Any]) -> list[str]:
    return [token["text"] for token in turn["tokens"]]


def same_answers(first: pathlib.Path, second: pathlib.Path) -> bool:
    """Whether all texts are the same. Log-probs differ in their last bits."""
    lines = played(first), played(second)
    assert lines[0].keys() == lines[1].keys()
    fields = ("left_out", "read", "score", "calls", "stop", "file")
    for id in lines[0]:
        mine, other = ({field: side[id].get(field) for field in fields} for side in lines)
        assert mine == other
        texts = [[words_of(turn) for turn in side[id].get("turns", ())] for side in lines]
        assert texts[0] == texts[1]
    return True


@pytest.mark.slow
def test_two_hosts_of_two_devices_print_one_table_and_equal_one_device(
    together, arguments, alone, tmp_path
):
    out = tmp_path / "out"
    first, second = together([*arguments, f"--out={out}"], 2, devices=2)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert same_answers(out, alone)
    assert "summary.json" in first.err
    assert "summary.json" not in second.err
    names = sorted(file.name for file in out.glob("questions*.jsonl"))
    assert names == ["questions-1.jsonl", "questions.jsonl"]
    ours, theirs = (read_json(folder / "summary.json") for folder in (out, alone))
    for name in ("n", "accuracy", "calls", "left_out", "questions"):
        assert ours[name] == theirs[name]


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
def test_a_killed_host_ends_the_other_and_the_same_command_continues(
    together, arguments, alone, tmp_path, who
):
    out = tmp_path / "out"
    command = [*arguments, f"--out={out}"]

    def kill(processes) -> None:
        deadline = time.monotonic() + 300
        while count_lines(out) < 3:
            assert time.monotonic() < deadline
            assert all(process.poll() is None for process in processes)
            time.sleep(0.01)
        os.kill(processes[who].pid, signal.SIGKILL)

    ended = together(command, 2, devices=1, disturb=kill, heartbeat=10)
    assert ended[who].code == -signal.SIGKILL
    assert lost_others(ended[1 - who]), ended[1 - who]
    assert not (out / "summary.json").exists()
    before = count_lines(out)
    # On one host, because a slice may have become another one.
    (again,) = together(command, 1, devices=1)
    assert again.code == 0, again.err
    assert before >= 3
    assert same_answers(out, alone)
