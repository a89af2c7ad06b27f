"""Connects the processes of a run, and ends them when one is lost."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pathlib
import re
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import NoReturn

import jax

from paravt_jax.processes import hosts
from paravt_jax.processes.exit_codes import LOST, TEMPORARY

_GOOGLE = "0x1ae0"  # PCI vendor of TPU chips
# jax 0.10 reads only the first of these itself.
_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_ADDRESS, _COUNT, _INDEX = _VARIABLES
REMEDY = f"start the same command on every host; see {_ADDRESS} in docs/tpu.md"
"""What to do if not all processes join."""
HEARTBEAT = 100
"""Seconds of silence after which a process counts as dead and the others exit."""
_SAY = 5.0  # seconds until a process says that it waits for the others
_PATIENCE = 300.0  # seconds; hosts of a slice may start minutes apart
_MARGIN = 60.0  # seconds after which JAX ends a process that this module did not end
_SHUTDOWN = 3600  # seconds
_STDERR = 2  # the file descriptor


def connect(patience: float = _PATIENCE) -> None:
    """Connect to the other processes, and return when all of them have joined.

    JAX finds them on TPU pods, GKE, SLURM and Open MPI. Elsewhere each process has
    JAX_COORDINATOR_ADDRESS (address:port of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID (from
    0). With JAX_NUM_PROCESSES=1 a process runs alone.

    Says on stderr if it has to wait. If they do not all join, it ends this process with the code
    `TEMPORARY`. Call it before anything touches a device: jax fixes its list of devices at first
    use.

    Once they have joined, JAX aborts a process whose heartbeats fail (SIGABRT, exit status 134).

    Args:
        patience: Seconds until all of them must have joined.

    Raises:
        ValueError: The variables are wrong, or the other processes cannot be found.
    """
    given = (_address(), _number(_COUNT, 1), _number(_INDEX, 0))
    if given[1] == 1:
        return
    if None in given and not _in_cluster():
        if given == (None, None, None):
            return
        raise _not_found("some of these variables are not set")
    # With asynchronous dispatch a CPU runs independent programs at the same time. Collectives of
    # two programs could then start in a different order on each process and deadlock.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    wait = f"waiting up to {patience:.0f} s for the other processes; {REMEDY}"
    too_late = f"error: hosts: not all processes joined within {patience:.0f} s; {REMEDY}"
    try:
        with (
            _after(_SAY, lambda: os.write(_STDERR, f"{wait}\n".encode())),
            _after(patience, lambda: end(TEMPORARY, too_late)),
        ):
            jax.distributed.initialize(
                # JAX asks the cluster for what is None.
                *given,
                initialization_timeout=int(patience + _MARGIN),
                heartbeat_timeout_seconds=HEARTBEAT,
                # A process that is done waits for the others, which may still write files.
                shutdown_timeout_seconds=_SHUTDOWN,
            )
    except ValueError as error:
        raise _not_found(error) from error
    except RuntimeError as error:
        # For example, one of them was started again while the others still ran.
        end(TEMPORARY, f"error: hosts: joining failed ({_shortened(error)}); {REMEDY}")


def _not_found(cause: object) -> ValueError:
    values = ", ".join(f"{name}={os.environ.get(name, '')}" for name in _VARIABLES)
    return ValueError(
        f"{values}: the other processes cannot be found ({cause}); give all three on every host, "
        f"or {_COUNT}=1 for a process that runs alone"
    )


def is_named() -> bool:
    """Return whether the environment names the other processes."""
    return any(os.environ.get(name) for name in _VARIABLES)


def _address() -> str | None:
    """Return the address of process 0 from the environment."""
    address = os.environ.get(_ADDRESS) or None
    if address is not None and not re.fullmatch(r".+:[0-9]+", address):
        raise ValueError(f"{_ADDRESS}: {address!r}; give address:port of process 0")
    return address


def _number(variable: str, least: int) -> int | None:
    """Return a number from the environment."""
    text = os.environ.get(variable)
    if not text:
        return None
    if not re.fullmatch("[0-9]+", text) or int(text) < least:
        raise ValueError(f"{variable}: {text!r}; give a whole number, {least} or more")
    return int(text)


@contextlib.contextmanager
def _after(seconds: float, act: Callable[[], object]) -> Iterator[None]:
    """Call `act` in another thread if the block takes longer."""
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


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


def leave(code: int, text: str) -> int:
    """Print a text on stderr and end a program: return `code`, or exit with it at once.

    It exits at once if there are other processes: those may be waiting for this one, which would
    wait for them in jax's exit handler.
    """
    if hosts.process_count() > 1:
        sys.stdout.flush()
        end(code, text)
    print(text, file=sys.stderr)
    return code


def _in_cluster() -> bool:
    """Return whether this is one of several processes that JAX finds: SLURM, Open MPI, GKE, a TPU
    VM.

    Elsewhere nothing is looked for, so a laptop does not wait for an answer from a network.
    """
    environment = os.environ
    # Outside of `srun`, SLURM starts a single process, whatever the number of tasks.
    if "SLURM_STEP_NODELIST" in environment:
        return int(environment.get("SLURM_NTASKS", "1")) > 1
    if "OMPI_COMM_WORLD_SIZE" in environment:
        return int(environment["OMPI_COMM_WORLD_SIZE"]) > 1
    if environment.get("JAX_PLATFORMS") not in (None, "", "tpu", "tpu,cpu"):
        return False
    names = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES")
    if names:
        slices = int(environment.get("MEGASCALE_NUM_SLICES") or 1)
        return "," in names or slices > 1
    # Only the metadata server of a TPU VM knows the other hosts of its slice.
    return (
        has_tpu_chips()
        and "TPU_SKIP_MDS_QUERY" not in environment
        and importlib.util.find_spec("libtpu") is not None
    )


def has_tpu_chips(root: pathlib.Path = pathlib.Path("/")) -> bool:
    """Return whether this host has device files of TPU chips.

    Args:
        root: Folder with `dev` and `sys`.
    """
    # Drivers of other accelerators make a folder named accel.
    if any(root.glob("dev/accel[0-9]*")):
        return True
    # Newer TPU VMs pass chips through VFIO, as other hosts pass other devices.
    vendors = root.glob("sys/bus/pci/devices/*/vendor")
    google = any(file.read_text().strip() == _GOOGLE for file in vendors)
    return google and any(root.glob("dev/vfio/[0-9]*"))


def require_shared(folder: pathlib.Path, field: str = "run_dir") -> None:
    """Raise ValueError on every process if `folder` is not the same directory for all of them.

    Args:
        folder: The first process must have created it.
        field: The setting that names it, for the message.
    """
    if hosts.process_count() == 1:
        return

    def make_marker() -> str:
        # A network disk may cache that a name does not exist. This name is new, so no process can
        # have a cached answer for it.
        marker = folder / f".seen-by-all-{uuid.uuid4().hex}"
        marker.touch()
        return marker.name

    marker = folder / hosts.from_first(make_marker)
    answers = hosts.gather((marker.exists(), str(folder)))
    if hosts.is_first():
        marker.unlink()
    for index, (found, path) in enumerate(answers):
        if not found:
            raise ValueError(
                f"{field}: {path} on process {index} is another directory than {answers[0][1]} on "
                "process 0; name a directory on a disk that all hosts share"
            )


# Errors that this process caused itself, such as running out of memory. It reports them as they
# are; the other processes notice the broken connection.
_LOCAL_ERRORS = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "UNIMPLEMENTED")
# How messages of XLA begin: jax raises some of its errors as ValueError.
_XLA_ERROR = re.compile(r"[A-Z]+(_[A-Z]+)*: ")


@contextlib.contextmanager
def ending_with_the_others() -> Iterator[None]:
    """Exit with code `LOST` and one line if a program fails because another process is gone."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        text = str(error)
        local = any(word in text for word in _LOCAL_ERRORS) or not _XLA_ERROR.match(text)
        if hosts.process_count() == 1 or local:
            raise
        end_without_others(error)


def end_without_others(error: Exception) -> NoReturn:
    """Exit with code `LOST` and one line, because of an error that says that others are gone."""
    end(
        LOST,
        "error: another process of this run ended or cannot be reached "
        f"({_shortened(error)}); start all of them again",
    )


def _shortened(error: Exception) -> str:
    """Return the error on one line of at most 200 characters."""
    line = " ".join(str(error).split())
    return line if len(line) <= 200 else f"{line[:200]} ..."
