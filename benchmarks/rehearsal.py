"""Kills a rehearsal in every phase; nothing may be lost: `python -m benchmarks.rehearsal`.

    python -m benchmarks.rehearsal --tokenizer FOLDER                          # one process
    python -m benchmarks.rehearsal --tokenizer FOLDER --devices 8              # eight fake devices
    python -m benchmarks.rehearsal --tokenizer FOLDER --devices 4 --processes 2

The command under test is `python -m paravt_extras.rehearsal --config=paravt_8b`, with
`--frames.admission=counted`: only then does a run repeat bit for bit. The hub's cache has
the tokenizer: all that a rehearsal takes from it. The first run is left alone. Two
further runs get a signal in every phase, SIGTERM in one and SIGKILL in the other, and are started
again each time. They have to end with the same results, metrics, weights and episodes, bit for bit.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

import tyro

from benchmarks.killing import EXIT_CODES, check_end, environment
from train.durable.metrics import read_metrics

MODEL = "Qwen/Qwen3-VL-8B-Instruct"
RUN = pathlib.Path("runs/paravt_8b-rehearsal")
DEADLINE = 1800.0
"""A process that has not ended after this many seconds counts as stuck."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """Which machine to imitate."""

    tokenizer: str
    """Folder with the tokenizer of Qwen3-VL and its processor's files."""
    processes: int = 1
    """Number of processes."""
    devices: int = 1
    """Number of devices of each process."""
    signals: tuple[str, ...] = ("SIGTERM", "SIGKILL")
    """One disturbed run for each."""
    arguments: tuple[str, ...] = ()
    """Further arguments of the run, such as `--rl.steps=2`."""


@dataclasses.dataclass(frozen=True)
class Interruption:
    """A moment inside of a phase."""

    phase: str
    reached: Callable[[pathlib.Path], bool]
    """Whether the run in this working directory is there."""
    near_end: bool = False
    """Whether a run may end before it notices a signal that asks it to stop."""


def _steps(phase: str) -> Callable[[pathlib.Path], bool]:
    """True after the first step of a phase."""

    def reached(home: pathlib.Path) -> bool:
        return any(line["phase"] == phase for line in read_metrics(home / RUN / "metrics.jsonl"))

    return reached


def _file(pattern: str) -> Callable[[pathlib.Path], bool]:
    """True when such a file exists."""
    return lambda home: any(home.glob(pattern))


MOMENTS = (
    Interruption("sources", _file(f"{RUN}-sources")),
    Interruption("preparation", _file(f"{RUN}-sources/set/*")),
    Interruption("cold start", _steps("sft")),
    Interruption("evaluation before RL", _file(f"{RUN}/evaluation/before*.json")),
    Interruption("PARA-GRPO", _steps("rl")),
    # Its first file comes too late: a run looks for signals between two settings only.
    Interruption("evaluation after RL", _file(f"{RUN}/checkpoints/rl/4/*")),
    Interruption("export", _file(f"{RUN}/model*"), near_end=True),
)


def cached(tokenizer: pathlib.Path, home: pathlib.Path) -> dict[str, str]:
    """Copy a tokenizer to where the hub's client caches `MODEL`, and return the client's
    variables."""
    folder = home / "hub" / f"models--{MODEL.replace('/', '--')}"
    shutil.copytree(tokenizer, folder / "snapshots" / "0")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0")
    return {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def start_processes(
    machine: Machine, home: pathlib.Path, variables: dict[str, str]
) -> list[subprocess.Popen]:
    """Start the processes of a run with `place` as their working directory."""
    line = [sys.executable, "-m", "paravt_extras.rehearsal", "--config=paravt_8b"]
    line += ["--frames.admission=counted", *machine.arguments]
    flags = os.environ.get("XLA_FLAGS", "")
    flags += f" --xla_force_host_platform_device_count={machine.devices}"
    variables = variables | {
        "XLA_FLAGS": flags,
        "JAX_COORDINATOR_ADDRESS": f"localhost:{_free_port()}",
        "JAX_NUM_PROCESSES": str(machine.processes),
    }
    started = []
    for index in range(machine.processes):
        with (home / f"{index}.log").open("ab") as log:
            started.append(
                subprocess.Popen(
                    line,
                    cwd=home,
                    env=variables | {"JAX_PROCESS_ID": str(index)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )
    return started


def wait(
    processes: Sequence[subprocess.Popen], what: str, reached: Callable[[], bool] = lambda: False
) -> bool:
    """Wait until all processes have ended, or, earlier, `reached()`; returns the latter."""
    end = time.monotonic() + DEADLINE
    while any(process.poll() is None for process in processes):
        if reached():
            return True
        if time.monotonic() > end:
            raise AssertionError(f"{what}: not reached after {DEADLINE:.0f} s")
        time.sleep(0.02)
    return False


def interrupt(
    machine: Machine,
    home: pathlib.Path,
    variables: dict[str, str],
    moment: Interruption,
    sent: signal.Signals,
) -> None:
    """Start a run, send one of its processes a signal in a phase, and wait for its end.

    Raises:
        AssertionError: The run ended before, did not end, or ended with another code.
    """
    processes = start_processes(machine, home, variables)
    what = f"{moment.phase}, {sent.name}"
    try:
        alive = wait(processes, what, lambda: moment.reached(home))
        assert alive, f"{what}: the run ended before; see {home}/0.log"
        # Of several processes, a signal may reach any one.
        processes[-1].send_signal(sent)
        wait(processes, what)
    finally:
        for process in processes:
            process.kill()
    code = processes[-1].wait()
    ended = moment.near_end and sent != signal.SIGKILL and code == 0
    assert ended or code in EXIT_CODES[sent], f"{what}: exit code {code}; see {home}/0.log"


def finish(machine: Machine, home: pathlib.Path, variables: dict[str, str]) -> float:
    """Run to the end; returns the seconds that it took."""
    begin = time.monotonic()
    processes = start_processes(machine, home, variables)
    try:
        wait(processes, "the end")
    finally:
        for process in processes:
            process.kill()
    codes = [process.wait() for process in processes]
    assert codes == [0] * len(codes), f"exit codes {codes}; see {home}/0.log"
    return time.monotonic() - begin


def compare(
    machine: Machine, folder: pathlib.Path, moments: Sequence[Interruption] = MOMENTS
) -> None:
    """Run once undisturbed, and once per signal, and compare. Prints its progress on stderr.

    Raises:
        AssertionError: A run did not end as it should, or differs.
    """
    # Episodes contain absolute paths, so all runs have the same folder.
    home = folder / "place"
    undisturbed = folder / "undisturbed"
    tokenizer = pathlib.Path(machine.tokenizer)
    variables = environment(folder / "compiled") | cached(tokenizer, folder / "hub")
    home.mkdir()
    seconds = finish(machine, home, variables)
    _say(f"left alone: {seconds / 60:.1f} min")
    home.rename(undisturbed)
    for name in machine.signals:
        home.mkdir()
        for moment in moments:
            interrupt(machine, home, variables, moment, signal.Signals[name])
            _say(f"{name} in {moment.phase}")
        finish(machine, home, variables)
        check_end(home / RUN, undisturbed / RUN)
        _say(f"{name}: equal to the run that was left alone")
        shutil.rmtree(home)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    machine = tyro.cli(Machine, prog="python -m benchmarks.rehearsal")
    begin = time.monotonic()
    folder = pathlib.Path(tempfile.mkdtemp())
    print(f"{folder}: the runs, which stay if a check fails", flush=True)
    compare(machine, folder)
    shutil.rmtree(folder)
    count = len(MOMENTS) * len(machine.signals)
    minutes = (time.monotonic() - begin) / 60
    print(
        f"{machine.processes} x {machine.devices} devices: {count} signals, all runs equal; "
        f"{minutes:.1f} min"
    )


if __name__ == "__main__":
    main()
