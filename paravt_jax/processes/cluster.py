"""Connects the processes of a command, and ends them in one way."""

from __future__ import annotations

import collections
import errno
import io
import os
import pathlib
import re
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn

import jax
from jax.sharding import Mesh

from paravt_jax.processes import hosts
from paravt_jax.processes.exit_codes import (
    FAILED,
    LOST,
    TEMPORARY,
    USER_ERRORS,
    Stopped,
    exit_code,
    one_line,
)

# jax 0.10 reads only the first of these itself.
_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
REMEDY = f"start the same command on all hosts, or set {_VARIABLES[1]}=1 to run alone (docs/tpu.md)"
"""What to do if not all processes join."""
HEARTBEAT = 100
"""Seconds of silence after which a process counts as dead and the others exit."""
_SHUTDOWN = 3600  # seconds
# File descriptors.
_STDOUT = 1
_STDERR = 2


def connect(patience: int = 300) -> None:
    """Connect to the other processes, and return when all of them have joined.

    JAX finds them on TPU pods, GKE, SLURM and Open MPI. Elsewhere each process has
    JAX_COORDINATOR_ADDRESS (address:port of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID (from
    0). With JAX_NUM_PROCESSES=1 a process runs alone, and so it does where JAX finds no others.

    If they do not all join, it ends this process with the code `TEMPORARY`. Call it before anything
    touches a device: jax fixes its list of devices at first use. Once they have joined, JAX aborts
    a process whose heartbeats fail (SIGABRT, exit status 134).

    Args:
        patience: Seconds until all of them must have joined. Hosts of a slice may start minutes
            apart.

    Raises:
        ValueError: The variables are wrong.
    """
    address, count, index = (os.environ.get(name) or None for name in _VARIABLES)
    if count == "1" or jax.distributed.is_initialized():
        return
    # In an interactive step, SLURM_NTASKS still counts the tasks of the job.
    sizes = ("OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    size = next(filter(None, map(os.environ.get, sizes)), None)
    if size == "1" and not is_named():
        # JAX would leave one GPU to a cluster of one process.
        return
    # gRPC would ask a proxy for the first process, and JAX warns of that. Empty: it asks none, also
    # where http_proxy is set.
    os.environ["grpc_proxy"] = ""
    jax.config.update("jax_check_proxy_envs", False)
    if is_named() or {"SLURM_STEP_NODELIST", "OMPI_COMM_WORLD_SIZE"} & os.environ.keys():
        print(f"waiting up to {patience} s for the other processes; {REMEDY}", file=sys.stderr)
    too_late = f"error: hosts: not all processes joined within {patience} s; {REMEDY}"
    timer = threading.Timer(patience, end, (TEMPORARY, too_late))
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(
            # JAX asks the cluster for what is None.
            address,
            None if count is None else int(count),
            None if index is None else int(index),
            # Later than `end`: JAX would abort with a stack of C++.
            initialization_timeout=patience + 60,
            heartbeat_timeout_seconds=HEARTBEAT,
            # A process that is done waits for the others, which may still write files.
            shutdown_timeout_seconds=_SHUTDOWN,
        )
    # IndexError: the address has no port.
    except (ValueError, IndexError) as error:
        if not is_named():
            return
        values = ", ".join(f"{name}={os.environ.get(name, '')}" for name in _VARIABLES)
        raise ValueError(
            f"{values}: the other processes cannot be found ({error}); give all three on every "
            f"host, the address with a port, or {_VARIABLES[1]}=1 for a process that runs alone"
        ) from error
    except RuntimeError as error:
        # A notebook or a test that has used its devices already runs alone.
        if not is_named() and "must be called before" in str(error):
            return
        # For example, one of them was started again while the others still ran.
        end(TEMPORARY, f"error: hosts: joining failed ({one_line(error)}); {REMEDY}")
    finally:
        timer.cancel()
    # With asynchronous dispatch a CPU runs independent programs at the same time. Collectives of
    # two programs could then start in a different order on each process and deadlock.
    jax.config.update("jax_cpu_enable_async_dispatch", False)


def is_named() -> bool:
    """Return whether the environment names the other processes."""
    return any(os.environ.get(name) for name in _VARIABLES)


def end(code: int, text: str) -> NoReturn:
    """Print a text and end this process at once, from any thread.

    `finally` blocks and exit handlers do not run: some of them wait for other processes.
    """
    try:
        # Threads of jaxlib log until the process is gone; the text has to be the last line.
        own = os.dup(_STDERR)
        os.dup2(os.open(os.devnull, os.O_WRONLY), _STDERR)
        # os.write, because another thread may be in the middle of a print and hold its lock.
        os.write(own, f"{text}\n".encode())
    finally:
        # Also if stderr is closed.
        os._exit(code)


def require_shared(folder: pathlib.Path, field: str = "run_dir") -> None:
    """Raise ValueError on every process if `folder` is not the same directory for all of them.

    Args:
        folder: The first process must have created it.
        field: The setting that names it, for the message.
    """
    if hosts.process_count() == 1:
        return

    # A network disk may cache that a name does not exist. This name is new, so no process can have
    # a cached answer for it.
    made = hosts.from_first(lambda: tempfile.mkdtemp(prefix=".seen-by-all-", dir=folder))
    marker = folder / pathlib.Path(made).name
    seen = hosts.gather(marker.exists())
    if hosts.is_first():
        marker.rmdir()
    if not all(seen):
        raise ValueError(
            f"{field}: {folder} on process {seen.index(False)} is another directory than on "
            "process 0; name a directory on a disk that all hosts share"
        )


# Errors that this process caused itself, such as running out of memory. It reports them as they
# are; the other processes notice the broken connection.
_LOCAL_ERRORS = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "UNIMPLEMENTED")
# How messages of XLA about other processes begin: jax raises some of its errors as ValueError.
_XLA_ERROR = re.compile(
    "(ABORTED|CANCELLED|DATA_LOSS|DEADLINE_EXCEEDED|FAILED_PRECONDITION|INTERNAL|NOT_FOUND|UNAVAILABLE"
    "|UNKNOWN): "
)


def require_even(mesh: Mesh) -> None:
    """Raise ValueError, on every process, unless rows divide equally over the processes."""
    order = [device.process_index for device in mesh.devices.flat]
    if order != sorted(order):
        raise ValueError(
            "JAX_PROCESS_ID: the processes of a slice are not numbered one after another; give "
            "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, slice by slice"
        )
    devices = collections.Counter(order)
    all_take_part = len(devices) == jax.process_count()
    equal = len(set(devices.values())) == 1
    if not all_take_part or not equal or mesh.shape["data"] * mesh.shape["fsdp"] % len(devices):
        taken = " + ".join(str(devices[process]) for process in range(jax.process_count()))
        raise ValueError(
            f"--mesh.data {mesh.shape['data']} --mesh.fsdp {mesh.shape['fsdp']} "
            f"--mesh.tensor {mesh.shape['tensor']}: takes {taken} devices of the "
            f"{jax.process_count()} processes; use the same number of devices of each process, and "
            f"make --mesh.data times --mesh.fsdp a multiple of {jax.process_count()}"
        )


def is_lost(error: Exception) -> bool:
    """Return whether an error says that another process is gone."""
    text = str(error)
    if isinstance(error, TimeoutError):
        # The others did not come to a barrier of Orbax.
        lost = "barrier" in text
    else:
        local = any(word in text for word in _LOCAL_ERRORS) or not _XLA_ERROR.match(text)
        lost = isinstance(error, jax.errors.JaxRuntimeError | ValueError) and not local
    return lost and hosts.process_count() > 1


def _has_devices() -> bool:
    """Return whether JAX has the devices that it was told to use."""
    try:
        return bool(jax.devices())
    except (RuntimeError, AssertionError):
        return False


def run_command(
    work: Callable[[], int | None],
    less_memory: str = "use larger devices",
    in_words: Callable[[Exception], str] = str,
) -> int:
    """Do the work of a command, and return its exit code.

    Whatever ends it, the last line on stderr says what happened. Only an unforeseen error has a
    traceback before that line.

    Args:
        work: Returns the exit code; None is 0.
        less_memory: What to do if no memory is left.
        in_words: Returns the message of an error that a user can mend.
    """
    # Its programs compute in types of 32 bits and less, whatever JAX_ENABLE_X64 says.
    jax.config.update("jax_enable_x64", False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A character that a terminal cannot show is no reason to lose the rest.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = work() or 0
        # Not sys.stdout.flush(): where stdout is closed, sys.stdout is None.
        print(end="", flush=True)
        return code
    except Stopped as stop:
        print(f"\n{stop}; give the same command again", file=sys.stderr)
        return stop.code
    except KeyboardInterrupt:
        code, line = 130, "\nstopped; give the same command again"
    except Exception as error:
        if is_lost(error):
            code = LOST
            reason = (
                "another process of this run ended or cannot be reached "
                f"({one_line(error)}); start all of them again"
            )
        elif isinstance(error, BrokenPipeError):
            # What reads the output, such as `head`, has ended. Nor can Python flush it at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), _STDOUT)
            code, reason = 128 + signal.SIGPIPE, "nothing reads the output any more"
        elif isinstance(error, USER_ERRORS):
            code, reason = exit_code(error), in_words(error)
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                reason += "; make room, and give the same command again"
        elif isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            code = FAILED
            reason = f"no memory is left ({one_line(error)}); {less_memory}"
        elif os.environ.get("JAX_PLATFORMS") and not _has_devices():
            code = FAILED
            platforms = os.environ["JAX_PLATFORMS"]
            reason = f"JAX_PLATFORMS={platforms}: JAX finds no such device here; unset it"
        else:
            traceback.print_exc()
            code = LOST
            reason = f"unforeseen, {type(error).__name__} (above); give the same command again"
        line = f"error: {reason}"
    if hosts.process_count() > 1:
        # The others may wait for this process, which would wait for them in jax's exit handler.
        print(end="", flush=True)
        end(code, line)
    print(line, file=sys.stderr)
    return code
