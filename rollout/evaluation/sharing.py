"""Shares the questions of an evaluation between replicas and hosts, as the work is done.

Questions on one video stay together, so that its frames are encoded once. Each replica takes the
next such unit when it has room for it, so no host waits long for another at the end. Who plays a
question does not change the result: an episode depends only on its question, the settings, the seed
and the weights.

Hosts meet in a folder that they all see. A unit belongs to the host that creates its file there. A
host that fails says so there, and the others stop.
"""

from __future__ import annotations

import collections
import contextlib
import os
import pathlib
import shutil
import threading
import time
import uuid
from collections.abc import Iterator, Sequence

from paravt_jax.data.atomic import write_atomically
from paravt_jax.processes import hosts
from paravt_jax.processes.hosts import HostsError
from rollout.evaluation.benchmarks import Item

Unit = tuple[Item, ...]

_PLACE = ".hosts-"
_UNIT = "unit-"
_LOOK_EVERY = 2.0  # seconds between two looks at the other hosts


def units_of(items: Sequence[Item], most: int) -> list[Unit]:
    """Group items by video, in the order in which the videos come.

    Args:
        items: the items.
        most: upper bound on the items of a unit.
    """
    by_video: dict[str, list[Item]] = {}
    for item in items:
        by_video.setdefault(item.question.video, []).append(item)
    return [
        tuple(group[first : first + most])
        for group in by_video.values()
        for first in range(0, len(group), most)
    ]


def meet(folder: pathlib.Path) -> Peers:
    """Make a place below `folder` where all hosts of this start meet.

    Every process calls it. A start has a place of its own, so what an earlier one left does not
    matter.
    """
    if hosts.process_count() == 1:
        return Peers()

    def make() -> str:
        forget_meetings(folder)
        place = folder / f"{_PLACE}{uuid.uuid4().hex}"
        place.mkdir()
        return place.name

    place = folder / hosts.from_first(make)
    return Peers(place, hosts.process_index(), hosts.process_count())


def forget_meetings(folder: pathlib.Path) -> None:
    """Delete all such places. Call it on the first process, when the others need none any more."""
    for place in folder.glob(f"{_PLACE}*"):
        shutil.rmtree(place, ignore_errors=True)


class Peers:
    """The hosts of an evaluation.

    Args:
        folder: an empty folder that all hosts see; None for a single host.
        index: index of this host.
        count: number of hosts.
    """

    def __init__(self, folder: pathlib.Path | None = None, index: int = 0, count: int = 1):
        self.folder = folder
        self.index = index
        self.count = count
        self._next_look = 0.0

    def claim(self, name: str) -> bool:
        """Whether this host is the first to ask for something of this name."""
        if self.folder is None:
            return True
        try:
            # O_EXCL is atomic on network disks, too.
            os.close(os.open(self.folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True

    def claimed(self) -> list[str]:
        """All names that hosts have asked for."""
        return [] if self.folder is None else os.listdir(self.folder)

    def check(self) -> None:
        """Look at the other hosts, unless that was a moment ago.

        Raises:
            HostsError: one of them has failed.
        """
        if self.folder is None or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _LOOK_EVERY
        for file in self.folder.glob("failed-*"):
            if file.suffix != ".tmp":
                reason = file.read_text(encoding="utf-8")
                raise HostsError(f"process {file.name.partition('-')[2]} failed first: {reason}")

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Wait after the block until all hosts have left theirs; fail if one of them does."""
        if self.folder is None:
            yield
            return
        try:
            yield
        except BaseException as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            # The error itself matters more than that the others hear of it.
            with contextlib.suppress(OSError):
                write_atomically(self.folder / f"failed-{self.index}", reason)
            raise
        (self.folder / f"finished-{self.index}").touch()
        while len(list(self.folder.glob("finished-*"))) < self.count:
            self.check()
            time.sleep(0.2)


class Deal:
    """Gives every unit to one replica of one host. Several threads may take units.

    Args:
        units: the units, the same on all hosts.
        peers: the hosts.
    """

    def __init__(self, units: Sequence[Unit], peers: Peers):
        self._units = units
        self._peers = peers
        self._lock = threading.Lock()
        # A host starts with its own share, and then helps the others from behind.
        numbers = range(len(units))
        own = [n for n in numbers if n % peers.count == peers.index]
        others = [n for n in reversed(numbers) if n % peers.count != peers.index]
        self._waiting = collections.deque([*own, *others])
        self._taken: set[int] = set()
        self._given_to_others = 0
        self._next_look = 0.0

    def items(self) -> Iterator[Item]:
        """Take units, one after another, and yield their items."""
        while (unit := self._take()) is not None:
            yield from unit

    def coming(self, count: int) -> list[Item]:
        """The next items that this host takes, if no other host is faster: at least `count`."""
        found: list[Item] = []
        with self._lock:
            for number in self._waiting:
                if len(found) >= count:
                    break
                found += self._units[number]
        return found

    def given_to_others(self) -> int:
        """Number of items that other hosts had taken a moment ago."""
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _LOOK_EVERY
            names = self._peers.claimed()
            numbers = {int(name[len(_UNIT) :]) for name in names if name.startswith(_UNIT)}
            with self._lock:
                numbers -= self._taken
            self._given_to_others = sum(len(self._units[number]) for number in numbers)
        return self._given_to_others

    def _take(self) -> Unit | None:
        with self._lock:
            while self._waiting:
                number = self._waiting.popleft()
                if self._peers.claim(f"{_UNIT}{number}"):
                    self._taken.add(number)
                    return self._units[number]
        return None
