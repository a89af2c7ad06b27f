"""Plays an evaluation on all devices of a host: several replicas of the model, one thread each.

A replica has its own weights, KV cache and frame features, on `--tensor` devices. All replicas of a
host take questions from one queue. Who plays a question does not change the result: an episode
depends only on its question, the settings, the seed and the weights.
"""

from __future__ import annotations

import collections
import queue
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import jax

from rollout.evaluation.benchmarks import Item
from rollout.evaluation.folder import Line
from rollout.evaluation.split import SplitPlayer

Devices = tuple[jax.Device, ...]
Unit = tuple[Item, ...]


def device_groups(tensor: int) -> list[Devices]:
    """Group the devices of this host, one group per replica. Devices that are left over idle.

    Args:
        tensor: number of devices per replica.

    Raises:
        ValueError: the host has fewer devices.
    """
    devices = jax.local_devices()
    if len(devices) < tensor:
        raise ValueError(
            f"--tensor {tensor}: this host has {len(devices)} devices; give at most that many"
        )
    return [
        tuple(devices[first : first + tensor])
        for first in range(0, len(devices) - tensor + 1, tensor)
    ]


def units_of(items: Sequence[Item], most: int) -> list[Unit]:
    """Group items by video, so that its frames are encoded once, up to `most` items in a unit."""
    by_video: dict[str, list[Item]] = collections.defaultdict(list)
    for item in items:
        by_video[item.question.video].append(item)
    return [
        tuple(group[first : first + most])
        for group in by_video.values()
        for first in range(0, len(group), most)
    ]


class Queue:
    """Gives every unit to one replica. Several threads may take units.

    Args:
        units: the units of this host.
        ahead: begins to read the overview of a video. It is called while earlier units are played.
        count: number of units to look ahead.
    """

    def __init__(self, units: Sequence[Unit], ahead: Callable[[str], None], count: int):
        videos = [unit[0].question.video for unit in units]
        # A video is read once, although several units in a row may be about it.
        new = ["" if videos[n - 1 : n] == [video] else video for n, video in enumerate(videos)]
        # The first units are taken at once, and ask for their overviews themselves.
        self._waiting = zip(units, [*new[count:], *[""] * count], strict=False)
        self._ahead = ahead
        self._lock = threading.Lock()

    def items(self) -> Iterator[Item]:
        """Take units, one after another, and yield their items."""
        while True:
            with self._lock:
                unit, coming = next(self._waiting, ((), ""))
                if coming:
                    self._ahead(coming)
            if not unit:
                return
            yield from unit


def play_all(
    players: Sequence[SplitPlayer], groups: Sequence[Devices], items: Queue
) -> Generator[Line, None, None]:
    """Play all items of this host, and yield one line per question as it is done.

    Args:
        players: one player per replica.
        groups: their devices. One player alone uses the default device.
        items: what they play.
    """
    if len(players) == 1:
        yield from players[0].lines(items.items())
        return
    stop = threading.Event()  # another replica has failed, or the caller stops
    # Lines, and each replica at its end.
    done: queue.SimpleQueue[Line | Future[None]] = queue.SimpleQueue()

    def play_items(player: SplitPlayer, devices: Devices) -> None:
        with jax.default_device(devices[0]):
            for line in player.lines(items.items()):
                done.put(line)
                if stop.is_set():
                    return

    # It waits for its threads: one that is inside a device program at the end of the process would
    # crash it.
    with ThreadPoolExecutor(len(players)) as pool:
        try:
            for replica in zip(players, groups, strict=True):
                pool.submit(play_items, *replica).add_done_callback(done.put)
            playing = len(players)
            while playing:
                line = done.get()
                if isinstance(line, Future):
                    line.result()
                    playing -= 1
                else:
                    yield line
        finally:
            stop.set()
