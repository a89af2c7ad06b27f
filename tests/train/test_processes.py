"""A run of two processes is a run: what one process with as many devices makes of it, and what a death leaves."""

import json
import os
import pathlib
import signal
import subprocess
import time

import pytest

from train import hosts
from train.metrics import read_metrics

PROGRAM = str(pathlib.Path(__file__).with_name("small.py"))
LONG = 900.0  # seconds: two processes of four devices compile everything, on two cores


SHORT = "--sft.steps 2 --rl.steps 4 --evaluation.frames 4 --evaluation.dispatch parallel --evaluation.temperatures 0.7".split()


def command(folder: pathlib.Path, *arguments: str) -> list[str]:
    return [PROGRAM, "--config=small", "--mesh.fsdp", "8", *SHORT, "--run-dir", str(folder), *arguments]


def figures(folder: pathlib.Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl without what a clock says."""
    drop = ("time/", "speed/", "wall", "recompilations")
    return [{k: v for k, v in line.items() if not k.startswith(drop)} for line in read_metrics(folder / "metrics.jsonl")]


def require_close(found: list[dict[str, float]], wanted: list[dict[str, float]], bound: float) -> None:
    assert [(line["phase"], line["step"]) for line in found] == [(line["phase"], line["step"]) for line in wanted]
    for mine, other in zip(found, wanted, strict=True):
        assert mine == {"phase": mine["phase"], **{k: pytest.approx(v, rel=bound, abs=bound) for k, v in other.items() if k != "phase"}}


@pytest.fixture(scope="module")
def two(together, tmp_path_factory) -> pathlib.Path:
    """The folder of a run by two processes that nobody disturbed."""
    folder = tmp_path_factory.mktemp("processes") / "two"
    for ended in together(command(folder), 2, devices=4, timeout=LONG):
        assert ended.code == 0, ended.err[-3000:]
    return folder


@pytest.mark.slow
def test_two_processes_make_the_run_that_one_makes(together, two, tmp_path):
    (ended,) = together(command(tmp_path / "one"), 1, devices=8, timeout=LONG)
    assert ended.code == 0, ended.err[-3000:]
    # Sums over devices are taken in another order.
    require_close(figures(two), figures(tmp_path / "one"), 2e-3)
    ours, theirs = (json.loads((folder / "result.json").read_text()) for folder in (two, tmp_path / "one"))
    assert ours["before"] == theirs["before"] and ours["token_mismatches"] == 0


@pytest.mark.slow
def test_a_killed_process_ends_the_others_and_the_same_command_goes_on(together, two, tmp_path):
    folder, killed_at = tmp_path / "killed", []

    def kill(processes: list[subprocess.Popen]) -> None:
        deadline = time.monotonic() + LONG
        while not any(line["phase"] == "rl" and line["step"] >= 3 for line in read_metrics(folder / "metrics.jsonl")):
            assert time.monotonic() < deadline and all(process.poll() is None for process in processes)
            time.sleep(0.2)
        os.kill(processes[1].pid, signal.SIGKILL)
        killed_at.append(time.monotonic())

    first, second = together(command(folder, "--hosts.heartbeat", "10"), 2, devices=4, timeout=LONG, disturb=kill)
    assert second.code == -signal.SIGKILL and first.code in (hosts.LOST, -signal.SIGABRT)
    assert time.monotonic() - killed_at[0] < 60
    assert "another process of this run ended" in first.err or "another task died" in first.err
    for ended in together(command(folder), 2, devices=4, timeout=LONG):
        assert ended.code == 0, ended.err[-3000:]
    assert figures(folder) == figures(two)
