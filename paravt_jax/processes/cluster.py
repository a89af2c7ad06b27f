"""Connects the processes of a run, and ends them together when one is lost."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import importlib.util
import os
import pathlib
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator

import jax

from paravt_jax.processes import hosts

_GOOGLE = "0x1ae0"  # PCI vendor of TPU chips
LOST = 70
"""Exit code of a process that lost contact with the others. Restart all of them to resume."""
REMEDY = "start the same command on every host; see --hosts.coordinator"
"""What to do if not all processes join."""
_SAY = 5.0  # seconds until a process says that it waits for the others
_PATIENCE = 300.0  # seconds; hosts of a slice may start minutes apart
_MARGIN = 60.0  # seconds after which JAX ends a process that this module did not end
_STDERR = 2  # the file descriptor


@dataclasses.dataclass(frozen=True)
class HostSettings:
    """How the processes of a run connect. They share one run directory; results do not change."""

    coordinator: str = ""
    """address:port of process 0. Empty: found on TPU pods, GKE and SLURM. none: one process."""
    count: int = 1
    """Number of processes, when the coordinator is an address."""
    index: int = 0
    """Index of this process, from 0, when the coordinator is an address."""
    heartbeat: int = 100
    """Seconds of silence after which a process counts as dead and the others exit."""

    def __post_init__(self):
        if self.count < 1:
            raise ValueError(f"hosts.count: {self.count}; give at least 1")
        host, _, port = self.coordinator.rpartition(":")
        if self.coordinator in ("", "none"):
            if (self.count, self.index) != (1, 0):
                raise ValueError(
                    f"hosts.count, hosts.index: {self.count}, {self.index} with hosts.coordinator "
                    f"{self.coordinator!r}: they need an address; give process 0's address:port"
                )
        elif not host or not port.isdigit():
            raise ValueError(
                f"hosts.coordinator: {self.coordinator!r}; give address:port of process 0, none "
                "for a single process, or leave it empty"
            )
        if not 0 <= self.index < self.count:
            raise ValueError(
                f"hosts.index: {self.index} of hosts.count = {self.count}; give a number from 0 "
                f"to {self.count - 1}"
            )
        if self.heartbeat < 1:
            raise ValueError(f"hosts.heartbeat: {self.heartbeat}; give at least 1 second")


def connect(
    settings: HostSettings, patience: float = _PATIENCE, late: str = "", file: int = _STDERR
) -> None:
    """Connects to the other processes and returns when all of them have joined.

    Says on stderr if it has to wait. If they do not all join, it ends this process with code 1.
    Call it before anything touches a device: jax fixes its list of devices at first use.

    Args:
        settings: How to find the others.
        patience: Seconds until all of them must have joined.
        late: Printed if they have not; by default, an error with its remedy.
        file: Descriptor of the file that `late` is printed to.
    """
    by_address = settings.coordinator not in ("", "none")
    if not by_address and (settings.coordinator == "none" or not _in_cluster()):
        return
    # With asynchronous dispatch a CPU runs independent programs at the same time. Collectives of
    # two programs could then start in a different order on each process and deadlock.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    # None lets jax detect the value from the cluster's environment.
    address = settings.coordinator if by_address else None
    count = settings.count if by_address else None
    index = settings.index if by_address else None
    wait = f"waiting up to {patience:.0f} s for the other processes; {REMEDY}"
    late = late or f"error: hosts: not all processes joined within {patience:.0f} s; {REMEDY}"
    try:
        with _printing(_SAY, wait, _STDERR), _ending(patience, late, file), _interruptible():
            jax.distributed.initialize(
                address,
                count,
                index,
                initialization_timeout=int(patience + _MARGIN),
                heartbeat_timeout_seconds=settings.heartbeat,
                shutdown_timeout_seconds=settings.heartbeat,
            )
    except ValueError as error:
        if by_address:
            raise
        raise ValueError(
            f"hosts.coordinator: empty, and the other hosts cannot be found ({error}); give "
            "address:port, hosts.count and hosts.index, or none for a single process"
        ) from error


# Prints its second argument after a delay, unless standard input closes first.
_PRINT_LATE = """
import select, sys
if not select.select([0], [], [], float(sys.argv[1]))[0]:
    print(sys.argv[2])
"""


@contextlib.contextmanager
def _printing(seconds: float, text: str, file: int) -> Iterator[None]:
    """Prints `text` if the block takes longer.

    JAX waits for the other processes without a chance for other threads of Python, so a child
    prints it.
    """
    command = [sys.executable, "-c", _PRINT_LATE, str(seconds), text]
    # In a session of its own, the child gets no Ctrl-C, for which it would print a traceback.
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=file, start_new_session=True):
        yield


@contextlib.contextmanager
def _ending(seconds: float, text: str, file: int) -> Iterator[None]:
    """Prints `text` and ends this process with code 1 if the block takes longer.

    JAX would abort. Threads of Python do not run meanwhile; that of faulthandler is none.
    """
    with open(os.devnull, "w") as nowhere, _printing(seconds, text, file):
        faulthandler.dump_traceback_later(seconds + 1, exit=True, file=nowhere)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Lets Ctrl-C end the process at once. Python's own handler would run after the block only."""
    handler = signal.getsignal(signal.SIGINT)
    main = threading.current_thread() is threading.main_thread()
    if not main or handler is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _in_cluster() -> bool:
    """Whether this process is one of several: of SLURM, of GKE, or on a TPU VM, which JAX asks.

    Elsewhere nothing is looked for, so a laptop does not wait for an answer from a network.
    """
    environment = os.environ
    # Outside of `srun`, SLURM starts a single process, whatever the number of tasks.
    if "SLURM_STEP_NODELIST" in environment:
        return int(environment.get("SLURM_NTASKS", "1")) > 1
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
    """Whether this host has device files of TPU chips.

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
    """Raises ValueError on every process if `folder` is not the same directory for all of them.

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


@contextlib.contextmanager
def ending_with_the_others() -> Iterator[None]:
    """Exits with code `LOST` and one line if a program fails because another process is gone.

    If no connection breaks, jax's own heartbeat ends the process with SIGABRT and a message, after
    `HostSettings.heartbeat` seconds.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        local = any(word in str(error) for word in _LOCAL_ERRORS)
        if hosts.process_count() == 1 or local:
            raise
        print(
            "error: another process of this run ended or cannot be reached "
            f"({_shortened(error)}); start all of them again",
            file=sys.stderr,
        )
        sys.stderr.flush()
        # Skip `finally` blocks and atexit handlers: some of them wait for the other processes and
        # would never return.
        os._exit(LOST)


def _shortened(error: Exception) -> str:
    """The error on one line of at most 200 characters."""
    line = " ".join(str(error).split())
    return line if len(line) <= 200 else f"{line[:200]} ..."
