"""Runs a program as several processes of one cluster, for tests."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence

from paravt_jax.processes.exit_codes import LOST

ROOT = pathlib.Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Ended:
    """Exit code and output of a process. `code` is the negative signal if one killed it."""

    code: int
    out: str
    err: str


def lost_others(ended: Ended) -> bool:
    """Whether a process ended because the others were gone.

    It ends by itself, with a line, if a collective fails first; JAX aborts it if its heartbeats do.
    """
    if ended.code == -signal.SIGABRT:
        return True
    last = ended.err.strip().splitlines()[-1]
    return ended.code == LOST and last.startswith("error: another process of this run ended")


def free_port() -> int:
    """A free port."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def together(
    compiled: pathlib.Path,
    args: Sequence[str],
    count: int,
    devices: int,
    timeout: float = 300,
    disturb: Callable[[list[subprocess.Popen]], None] | None = None,
    heartbeat: int = 0,
) -> list[Ended]:
    """Run `python ARGS` as `count` processes with `devices` fake devices each.

    `disturb` is called with the started processes. After `heartbeat` seconds of silence, if it is
    given, a process counts as dead. Raises AssertionError, with their stderr, if one
    does not end in time. No process is left running.
    """
    hosts = {
        "JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}",
        "JAX_NUM_PROCESSES": str(count),
    }
    if heartbeat:
        args = [str(ROOT / "tests/soon_lost.py"), str(heartbeat), *args]
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(compiled),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    # The flags of tests/conftest.py make compilation three times as fast.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    env = dict(
        os.environ, **cache, **hosts, JAX_PLATFORMS="cpu", XLA_FLAGS=flags, PYTHONPATH=str(ROOT)
    )
    with tempfile.TemporaryDirectory() as folder:
        files = [
            tuple((pathlib.Path(folder) / f"{i}.{name}").open("w+") for name in ("out", "err"))
            for i in range(count)
        ]
        started = [
            subprocess.Popen(
                [sys.executable, *args],
                stdout=out,
                stderr=err,
                env=env | {"JAX_PROCESS_ID": str(i)},
                cwd=ROOT,
            )
            for i, (out, err) in enumerate(files)
        ]
        try:
            if disturb is not None:
                disturb(started)
            codes = [process.wait(timeout) for process in started]
        except subprocess.TimeoutExpired as late:
            raise AssertionError(
                f"{late}\n" + "\n".join(_read(err)[-2000:] for _, err in files)
            ) from late
        finally:
            for process in started:
                process.kill()
                process.wait()
        return [
            Ended(code, _read(out), _read(err))
            for code, (out, err) in zip(codes, files, strict=True)
        ]


def _read(file) -> str:
    file.seek(0)
    return file.read()


def on_eight_devices(file: str) -> str:
    """What a test's file prints as a program with eight fake devices.

    The number of devices is fixed when JAX starts. The program has to end without an error.
    """
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    environment = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, file], capture_output=True, text=True, env=environment, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
