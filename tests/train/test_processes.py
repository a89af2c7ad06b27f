"""A run of two processes equals a run of one, and survives the death of a process."""

import json
import os
import pathlib
import re
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.processes import lost_others
from train.durable.metrics import MEASURED, read_metrics

PROGRAM = pathlib.Path(__file__).with_name("small.py")
# Seconds. Two processes of four devices compile everything, on two cores.
LONG = 900.0
SHORT = """
--mesh.fsdp 8 --sft.steps 2 --rl.steps 4 --rl.max-staleness 2
--evaluation.frames 4 --evaluation.dispatch parallel --evaluation.temperatures 0.7 0
""".split()


def command(folder: object, *arguments: str) -> list[str]:
    return [str(PROGRAM), "--config=small", *SHORT, "--run-dir", str(folder), *arguments]


def figures(folder: pathlib.Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl without times and compilations."""
    drop = (*MEASURED, "packing/", "weights/", "recompilations")
    return [
        {k: v for k, v in line.items() if not k.startswith(drop)}
        for line in read_metrics(folder / "metrics.jsonl")
    ]


def require_close(
    ours: list[dict[str, float]], wanted: list[dict[str, float]], bound: float
) -> None:
    for mine, other in zip(ours, wanted, strict=True):
        assert mine["phase"] == other["phase"]
        assert mine["step"] == other["step"]
        numbers = {name: value for name, value in other.items() if name != "phase"}
        close = {k: pytest.approx(v, rel=bound, abs=bound) for k, v in numbers.items()}
        assert mine == {"phase": mine["phase"], **close}


def done(folder: pathlib.Path, phase: str) -> int:
    """Number of recorded steps of a phase."""
    lines = read_metrics(folder / "metrics.jsonl")
    return max((line["step"] for line in lines if line["phase"] == phase), default=0)


def signalling(
    number: int, who: int, ready: Callable[[], Any], at: list[float] | None = None
) -> Callable[[list[subprocess.Popen]], None]:
    """Returns a function that sends process `who` a signal once `ready()`; `at` gets the time."""

    def disturb(processes: list[subprocess.Popen]) -> None:
        deadline = time.monotonic() + LONG
        while not ready():
            assert time.monotonic() < deadline
            assert all(process.poll() is None for process in processes)
            time.sleep(0.05)
        os.kill(processes[who].pid, number)
        if at is not None:
            at.append(time.monotonic())

    return disturb


@pytest.fixture(scope="module")
def two(together, tmp_path_factory) -> pathlib.Path:
    """The folder of an undisturbed run of two processes, with episodes in flight."""
    folder = tmp_path_factory.mktemp("processes") / "two"
    for ended in together(command(folder), 2, devices=4, timeout=LONG):
        assert ended.code == 0, ended.err[-3000:]
    assert max(line.get("staleness/max", 0) for line in figures(folder)) >= 1
    return folder


@pytest.mark.slow
def test_a_run_may_change_its_number_of_processes(together, two, tmp_path):
    """Two processes begin and are stopped in RL; one process, with all eight devices, finishes."""
    folder = tmp_path / "turns"
    for ended in together(
        command(folder),
        2,
        devices=4,
        timeout=LONG,
        disturb=signalling(signal.SIGTERM, 1, lambda: done(folder, "rl")),
    ):
        assert ended.code == 143, ended.err[-3000:]
        assert re.search(r"stopped after PARA-GRPO \d/4, which is saved", ended.err)
    assert 1 <= done(folder, "rl") < 4
    assert not (folder / "result.json").exists()
    (ended,) = together(command(folder), 1, devices=8, timeout=LONG)
    assert ended.code == 0, ended.err[-3000:]
    # The order of sums over devices differs.
    require_close(figures(folder), figures(two), 2e-3)
    ours, theirs = (json.loads((each / "result.json").read_text()) for each in (two, folder))
    assert ours["before"] == theirs["before"]
    assert ours["token_mismatches"] == theirs["token_mismatches"] == 0


@pytest.mark.slow
def test_a_killed_process_ends_the_others_and_other_machines_go_on(
    together, two, store, machine, tmp_path
):
    """In a bucket, on machines without files: bit for bit like on a disk, with episodes in
    flight."""
    killed: list[float] = []
    again = command("gs://bucket/runs/two")
    kill = signalling(signal.SIGKILL, 1, lambda: store.newest_step("runs/two", "rl") >= 2, killed)
    first, second = together(again, 2, devices=4, timeout=LONG, disturb=kill, heartbeat=10)
    assert time.monotonic() - killed[0] < 60
    assert second.code == -signal.SIGKILL
    assert lost_others(first), first
    machine("second")
    for ended in together(again, 2, devices=4, timeout=LONG):
        assert ended.code == 0, ended.err[-3000:]
    (tmp_path / "metrics.jsonl").write_bytes(store.read("runs/two/metrics.jsonl"))
    assert figures(tmp_path) == figures(two)
    weights = store.read("runs/two/model/model.safetensors")
    assert weights == (two / "model/model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_stop_during_data_preparation_stops_all(together, tmp_path):
    videos = tmp_path / "run" / "videos"
    stop = signalling(signal.SIGTERM, 0, lambda: any(videos.glob("**/*.mp4")))
    many = command(tmp_path / "run", "--mesh.fsdp", "2", "--world.train-videos", "1500")
    for ended in together(many, 2, devices=1, disturb=stop):
        assert ended.code == 143
        assert ended.err.splitlines()[-1].startswith("stopped while preparing the data")


@pytest.mark.slow
def test_two_processes_train_adapters_like_one_device(together, road, small, tmp_path):
    """Each process samples with its own copy of the base, and checks that it has the weights."""
    program = str(PROGRAM.with_name("hosts_program.py"))
    ended = together([program, "adapt", str(tmp_path)], 2, devices=4)
    assert [process.code for process in ended] == [0, 0], ended[0].err[-3000:]
    first, second = (json.loads(process.out.splitlines()[-1])["figures"] for process in ended)
    wanted = small.learn(small.adapted(road))
    assert first == second == [pytest.approx(step, rel=2e-3, abs=2e-3) for step in wanted]


@pytest.mark.slow
def test_two_processes_learn_like_one_device(together, road, small, tmp_path):
    """Only the second process plays sub-agents."""
    program = str(PROGRAM.with_name("hosts_program.py"))
    ended = together([program, "learn", str(tmp_path)], 2, devices=4)
    assert [process.code for process in ended] == [0, 0], ended[0].err[-3000:]
    first, second = (json.loads(process.out.splitlines()[-1])["figures"] for process in ended)
    wanted = small.learn(road)
    assert first == second == [pytest.approx(step, rel=1e-4, abs=1e-4) for step in wanted]
