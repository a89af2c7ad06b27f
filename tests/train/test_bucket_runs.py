"""Whole runs in a bucket equal runs on a disk, also after kills and on machines without files."""

from __future__ import annotations

import filecmp
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

import train.export
import train.run
from paravt_extras.report import __main__ as report
from paravt_jax.processes.exit_codes import LOST
from train.durable.metrics import MEASURED, read_metrics

PROGRAM = pathlib.Path(__file__).with_name("small.py")
# Seconds. Two processes of four devices compile everything, on two cores.
LONG = 900.0
SHORT = """
--sft.steps 2 --rl.steps 3
--evaluation.frames 4 --evaluation.dispatch parallel --evaluation.temperatures 0.7 0
""".split()
TWO = ["--mesh.fsdp", "8"]


def command(run_dir: object, *arguments: str) -> list[str]:
    return ["--config=small", *SHORT, "--run-dir", str(run_dir), *arguments]


def figures(lines: bytes, tmp_path: pathlib.Path) -> list[dict[str, float]]:
    """The lines of a metrics.jsonl without what differs between equal runs."""
    file = tmp_path / "compared.jsonl"
    file.write_bytes(lines)
    return [
        {k: v for k, v in line.items() if not k.startswith(MEASURED)} for line in read_metrics(file)
    ]


def done(store, run: str, phase: str) -> int:
    """The newest complete checkpoint of a phase."""
    names = store.names(f"{run}/checkpoints/{phase}/")
    steps = [re.fullmatch(r".*/(\d+)/commit_success.txt", name) for name in names]
    return max((int(step[1]) for step in steps if step), default=0)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Moves the runs that follow to another machine, without local files."""

    def move(name: str) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))

    move("first")
    return move


@pytest.fixture(scope="module")
def whole(small, tmp_path_factory) -> pathlib.Path:
    """An undisturbed run on a disk."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert train.run.main(command(folder)) == 0
    return folder


@pytest.fixture
def start(compiled):
    """Starts a run in a process of its own."""

    def begin(run_dir: str) -> subprocess.Popen:
        root = str(PROGRAM.parents[2])
        env = dict(os.environ, PYTHONPATH=root, JAX_COMPILATION_CACHE_DIR=str(compiled))
        return subprocess.Popen(
            [sys.executable, str(PROGRAM), *command(run_dir)],
            stderr=subprocess.PIPE,
            text=True,
            env=env,
            cwd=root,
        )

    return begin


def wait_until(process: subprocess.Popen, ready: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LONG
    while not ready():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()[1][-3000:]
        time.sleep(0.05)


@pytest.mark.slow
def test_a_run_equals_one_on_a_disk(store, machine, start, whole, tmp_path, capsys):
    """Each time continued on a machine without its files:

    1. It is killed in the cold start.
    2. It is stopped in RL while the store is away for ten seconds, and waits for the store.
    3. A flipped bit of a checkpoint ends it with a line that names the checkpoint.
    """
    address = "gs://bucket/runs/equal"
    process = start(address)
    wait_until(process, lambda: done(store, "runs/equal", "sft"))
    process.kill()
    process.communicate()

    machine("second")
    process = start(address)
    wait_until(process, lambda: done(store, "runs/equal", "rl"))
    with store.outage():
        process.send_signal(signal.SIGTERM)
        time.sleep(10)
    said = process.communicate(timeout=LONG)[1]
    assert process.returncode == 143, said[-3000:]
    assert "did not say that it ended" in said

    machine("third")
    state = store.names("runs/equal/checkpoints/sft/2/state/")
    largest = max(state, key=lambda name: len(store.read(name)))
    store.flip(largest)
    capsys.readouterr()
    assert train.run.main(command(address)) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"{address}/checkpoints/sft" in last
    assert str(tmp_path) not in last
    store.flip(largest)

    assert train.run.main(command(address)) == 0
    assert f"paravt report {address}" in capsys.readouterr().out
    lines = figures(store.read("runs/equal/metrics.jsonl"), tmp_path)
    assert lines == figures((whole / "metrics.jsonl").read_bytes(), tmp_path)
    weights = store.read("runs/equal/model/model.safetensors")
    assert weights == (whole / "model/model.safetensors").read_bytes()
    ours = json.loads(store.read("runs/equal/result.json"))
    theirs = json.loads((whole / "result.json").read_text())
    for name in ("before", "after", "curve"):
        assert ours[name] == theirs[name]
    assert "runs/equal/in-use.txt" not in store.names("runs/equal/")
    assert report.main([address]) == 0
    assert b"<svg" in store.read("runs/equal/report.html")

    for target in (str(tmp_path / "model"), "gs://bucket/exported"):
        assert train.export.main(["--run-dir", address, "--to", target]) == 0
    kept = whole / "model"
    names = sorted(file.name for file in kept.iterdir())
    assert filecmp.cmpfiles(kept, tmp_path / "model", names, shallow=False)[1:] == ([], [])
    assert store.names("exported/") == [f"exported/{name}" for name in names]
    assert store.read("exported/model.safetensors") == weights
    capsys.readouterr()
    assert train.export.main(["--run-dir", address, "--to", "gs://bucket/exported"]) == 1
    assert "--to gs://bucket/exported: exists" in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_are_killed_and_go_on_elsewhere(together, store, machine, tmp_path):
    """Bit for bit like an undisturbed run of two processes on a disk."""
    program = [str(PROGRAM)]
    for ended in together(
        [*program, *command(tmp_path / "disk", *TWO)], 2, devices=4, timeout=LONG
    ):
        assert ended.code == 0, ended.err[-3000:]
    again = [*program, *command("gs://bucket/runs/two", *TWO)]

    def kill(processes: list[subprocess.Popen]) -> None:
        kill_when_ready(processes, lambda: done(store, "runs/two", "rl") >= 2)

    first, second = together(again, 2, devices=4, timeout=LONG, disturb=kill, heartbeat=10)
    assert second.code == -signal.SIGKILL
    assert first.code == LOST
    machine("second")
    for ended in together(again, 2, devices=4, timeout=LONG):
        assert ended.code == 0, ended.err[-3000:]
    lines = figures(store.read("runs/two/metrics.jsonl"), tmp_path)
    assert lines == figures((tmp_path / "disk/metrics.jsonl").read_bytes(), tmp_path)
    weights = store.read("runs/two/model/model.safetensors")
    assert weights == (tmp_path / "disk/model/model.safetensors").read_bytes()


def kill_when_ready(processes: list[subprocess.Popen], ready) -> None:
    deadline = time.monotonic() + LONG
    while not ready():
        assert time.monotonic() < deadline
        assert all(process.poll() is None for process in processes)
        time.sleep(0.05)
    os.kill(processes[1].pid, signal.SIGKILL)
