"""A run of two processes is a run: what one process with as many devices makes of it, and what a death leaves."""

import json
import os
import pathlib
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest

from train.durable import cluster
from train.durable.metrics import read_metrics

PROGRAM = pathlib.Path(__file__).with_name("small.py")
LONG = 900.0  # seconds: two processes of four devices compile everything, on two cores


SHORT = "--sft.steps 2 --rl.steps 4 --evaluation.frames 4 --evaluation.dispatch parallel --evaluation.temperatures 0.7".split()


def command(folder: pathlib.Path, *arguments: str) -> list[str]:
    return [
        str(PROGRAM),
        "--config=small",
        "--mesh.fsdp",
        "8",
        *SHORT,
        "--run-dir",
        str(folder),
        *arguments,
    ]


def figures(folder: pathlib.Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl without what a clock says."""
    drop = ("time/", "speed/", "wall", "recompilations")
    return [
        {k: v for k, v in line.items() if not k.startswith(drop)}
        for line in read_metrics(folder / "metrics.jsonl")
    ]


def require_close(
    found: list[dict[str, float]], wanted: list[dict[str, float]], bound: float
) -> None:
    assert [(line["phase"], line["step"]) for line in found] == [
        (line["phase"], line["step"]) for line in wanted
    ]
    for mine, other in zip(found, wanted, strict=True):
        assert mine == {
            "phase": mine["phase"],
            **{k: pytest.approx(v, rel=bound, abs=bound) for k, v in other.items() if k != "phase"},
        }


def done(folder: pathlib.Path, phase: str) -> int:
    """How many steps of a phase are written down."""
    return max(
        (line["step"] for line in read_metrics(folder / "metrics.jsonl") if line["phase"] == phase),
        default=0,
    )


def signalling(
    number: int, who: int, ready: Callable[[], Any], at: list[float] | None = None
) -> Callable[[list[subprocess.Popen]], None]:
    """What sends a signal to one of the processes as soon as `ready` says so; `at` gets the time."""

    def disturb(processes: list[subprocess.Popen]) -> None:
        deadline = time.monotonic() + LONG
        while not ready():
            assert time.monotonic() < deadline and all(
                process.poll() is None for process in processes
            )
            time.sleep(0.05)
        os.kill(processes[who].pid, number)
        if at is not None:
            at.append(time.monotonic())

    return disturb


@pytest.fixture(scope="module")
def two(together, tmp_path_factory) -> pathlib.Path:
    """The folder of a run by two processes that nobody disturbed."""
    folder = tmp_path_factory.mktemp("processes") / "two"
    for ended in together(command(folder), 2, devices=4, timeout=LONG):
        assert ended.code == 0, ended.err[-3000:]
    return folder


@pytest.mark.slow
def test_one_process_and_two_take_turns_and_make_the_run_that_two_make(together, two, tmp_path):
    """Stopped in the cold start, one process with eight devices leaves it to two with four each; of these one is stopped in RL, both save,
    and one process goes on to the end."""
    folder = tmp_path / "turns"
    (ended,) = together(
        command(folder),
        1,
        devices=8,
        timeout=LONG,
        disturb=signalling(signal.SIGTERM, 0, lambda: done(folder, "sft")),
    )
    assert ended.code == 143 and " of sft, which is saved; the same command" in ended.err, (
        ended.err[-3000:]
    )
    for ended in together(
        command(folder),
        2,
        devices=4,
        timeout=LONG,
        disturb=signalling(signal.SIGTERM, 1, lambda: done(folder, "rl")),
    ):
        assert ended.code == 143 and " of 4 of rl, which is saved; the same command" in ended.err, (
            ended.err[-3000:]
        )
    assert 1 <= done(folder, "rl") < 4 and not (folder / "result.json").exists()
    (ended,) = together(command(folder), 1, devices=8, timeout=LONG)
    assert ended.code == 0, ended.err[-3000:]
    assert not list(folder.glob("rollouts-*"))
    # Sums over devices are taken in another order.
    require_close(figures(folder), figures(two), 2e-3)
    ours, theirs = (json.loads((each / "result.json").read_text()) for each in (two, folder))
    assert (
        ours["before"] == theirs["before"]
        and ours["token_mismatches"] == theirs["token_mismatches"] == 0
    )


@pytest.mark.slow
def test_a_killed_process_ends_the_others_and_the_same_command_goes_on(together, two, tmp_path):
    folder, killed = tmp_path / "killed", list[float]()
    again = command(folder, "--start", str(two))  # with the cold start of the other
    kill = signalling(signal.SIGKILL, 1, lambda: done(folder, "rl") >= 3, killed)
    first, second = together(
        [*again, "--hosts.heartbeat", "10"], 2, devices=4, timeout=LONG, disturb=kill
    )
    assert time.monotonic() - killed[0] < 60
    assert second.code == -signal.SIGKILL and first.code in (cluster.LOST, -signal.SIGABRT)
    assert "another process of this run ended" in first.err or "another task died" in first.err
    for ended in together(again, 2, devices=4, timeout=LONG):
        assert ended.code == 0, ended.err[-3000:]
    assert figures(folder) == [line for line in figures(two) if line["phase"] == "rl"]


@pytest.mark.slow
def test_a_stop_while_data_is_prepared_stops_all(together, tmp_path):
    stop = signalling(
        signal.SIGTERM, 0, lambda: any((tmp_path / "run" / "videos").glob("**/*.mp4"))
    )
    many = command(tmp_path / "run", "--mesh.fsdp", "2", "--world.train-videos", "5000")
    for ended in together(many, 2, devices=1, disturb=stop):
        assert ended.code == 143 and ended.err.splitlines()[-1] == (
            "stopped while preparing the data; finished videos are kept; the same command"
        )


@pytest.mark.slow
def test_subagents_that_one_process_called_for_are_learned_from_by_all(
    together, road, small, tmp_path
):
    """Eight of the second process, of which it has room for four: none is dropped, and the steps are those of one device."""
    ended = together(
        [str(PROGRAM.with_name("hosts_program.py")), "learn", str(tmp_path)], 2, devices=4
    )
    assert [process.code for process in ended] == [0, 0], ended[0].err[-3000:]
    first, second = (json.loads(process.out.splitlines()[-1])["figures"] for process in ended)
    wanted = small.learn(road)
    assert [(step["subagents/trained"], step["subagents/left_out"]) for step in wanted] == [
        (8, 0)
    ] * 2
    assert first == second == [pytest.approx(step, rel=2e-3, abs=2e-3) for step in wanted]
