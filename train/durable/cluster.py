"""How the processes of a run find each other, and how they end when one is lost."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import sys
import uuid
from collections.abc import Iterator

import jax

from train.durable import hosts

LOST = 70  # the exit code of a process that lost the others: the same command, started everywhere, goes on


@dataclasses.dataclass(frozen=True)
class HostSettings:
    """How the processes of a run find each other. They share its directory, and decide nothing of what is computed."""

    coordinator: str = ""
    """Empty: this process is the whole run. `auto`: what the cluster says (a TPU pod, SLURM). Else process 0's address:port."""
    count: int = 1
    """Processes in all, where an address is given."""
    index: int = 0
    """This one's number among them, from 0."""
    heartbeat: int = 100
    """Seconds without a sign of life after which a process counts as dead and the others end."""

    def __post_init__(self):
        if self.coordinator in ("", "auto"):
            if (self.count, self.index) != (1, 0):
                raise ValueError(
                    f"hosts.count, hosts.index: {self.count}, {self.index} with hosts.coordinator {self.coordinator!r}; they go with an "
                    "address, give process 0's address:port"
                )
        elif (
            not self.coordinator.rpartition(":")[0]
            or not self.coordinator.rpartition(":")[2].isdigit()
        ):
            raise ValueError(
                f"hosts.coordinator: {self.coordinator!r}; give address:port of process 0, auto, or nothing"
            )
        if not 0 <= self.index < self.count:
            raise ValueError(
                f"hosts.index: {self.index} of hosts.count = {self.count}; give a number from 0 to {self.count - 1}"
            )
        if self.heartbeat < 1:
            raise ValueError(f"hosts.heartbeat: {self.heartbeat}; give at least 1 second")


def connect(settings: HostSettings) -> None:
    """Joins the other processes; returns when all are there. To be called before anything touches a device."""
    if not settings.coordinator:
        return
    # On a CPU programs that do not wait for each other run at the same time, and collectives of two processes may meet crosswise.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    named = settings.coordinator != "auto"
    where = (settings.coordinator, settings.count, settings.index) if named else (None, None, None)
    try:
        jax.distributed.initialize(
            *where,
            heartbeat_timeout_seconds=settings.heartbeat,
            shutdown_timeout_seconds=settings.heartbeat,
        )
    except ValueError as error:
        if named:
            raise
        raise ValueError(
            f"hosts.coordinator = auto: no cluster that jax knows was found ({error}); give ADDRESS:PORT, hosts.count and hosts.index"
        ) from error


def require_shared(folder: pathlib.Path) -> None:
    """Raises ValueError, on every process alike, where `folder`, which the first one has made, is not the same directory for all."""
    if jax.process_count() == 1:
        return

    def make() -> str:
        # A name that nobody has asked for yet: what a network disk keeps of earlier answers says nothing of it.
        mark = folder / f".seen-by-all-{uuid.uuid4().hex}"
        mark.touch()
        return mark.name

    mark = folder / hosts.from_first(make)
    seen = hosts.gather((mark.exists(), str(folder)))
    if hosts.is_first():
        mark.unlink()
    for number, (found, theirs) in enumerate(seen):
        if not found:
            raise ValueError(
                f"run_dir: {theirs} on process {number} is another directory than {seen[0][1]} on process 0; name one that all of them "
                "see, on a disk that the hosts share"
            )


@contextlib.contextmanager
def ending_with_the_others() -> Iterator[None]:
    """Ends this process with `LOST` and one line where a program fails because another process of the run is gone.

    At once, past `finally` and `atexit`: whoever waits for the others there waits forever. Where no connection breaks, jax's own
    heartbeat ends the process (SIGABRT, and a message that says why) within `HostSettings.heartbeat` seconds.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1 or any(word in str(error) for word in _OWN):
            raise
        print(
            f"error: another process of this run ended, or cannot be reached ({_line(error)}); start all of them again",
            file=sys.stderr,
        )
        sys.stderr.flush()
        os._exit(LOST)


# What a program of this process's own fails with; the others learn of it by the broken connection.
_OWN = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "UNIMPLEMENTED")


def _line(error: Exception) -> str:
    line = " ".join(str(error).split())
    return line if len(line) <= 200 else f"{line[:200]} ..."
