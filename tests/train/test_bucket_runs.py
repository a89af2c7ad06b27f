"""Whole runs in a bucket equal runs on a disk, also after kills and on machines without files."""

from __future__ import annotations

import filecmp
import json
import os
import pathlib
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
from train.durable.metrics import MEASURED, read_metrics

PROGRAM = pathlib.Path(__file__).with_name("small.py")
LONG = 900.0  # seconds
SHORT = """
--sft.steps 2 --rl.steps 3
--evaluation.frames 4 --evaluation.dispatch parallel --evaluation.temperatures 0.7 0
""".split()


def command(run_dir: object, *arguments: str) -> list[str]:
    return ["--config=small", *SHORT, "--run-dir", str(run_dir), *arguments]


def figures(lines: bytes, tmp_path: pathlib.Path) -> list[dict[str, float]]:
    """The lines of a metrics.jsonl without what differs between equal runs."""
    file = tmp_path / "compared.jsonl"
    file.write_bytes(lines)
    return [
        {k: v for k, v in line.items() if not k.startswith(MEASURED)} for line in read_metrics(file)
    ]


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
    wait_until(process, lambda: store.newest_step("runs/equal", "sft"))
    process.kill()
    process.communicate()

    machine("second")
    process = start(address)
    wait_until(process, lambda: store.newest_step("runs/equal", "rl"))
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
