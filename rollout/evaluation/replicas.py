"""Plays an evaluation on all devices of a host: several replicas of the model, one thread each.

A replica has its own weights, KV cache and frame features, on `--tensor` devices. While the engine
plays, `ReadAhead` reads the overviews of the questions that come next.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator, Sequence

import jax

from paravt_jax.data.frame_reader import FrameReader
from rollout.evaluation.benchmarks import Item, VideoFolder
from rollout.evaluation.folder import Line
from rollout.evaluation.sharing import Deal
from rollout.evaluation.split import Player

Devices = tuple[jax.Device, ...]


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


def play_all(
    players: Sequence[Player],
    groups: Sequence[Devices],
    take: Callable[[], Iterator[Item]],
    check: Callable[[], None],
) -> Generator[Line, None, None]:
    """Play all items that this host gets, and yield one line per question as it is done.

    Args:
        players: one player per replica.
        groups: their devices. One player alone uses the default device.
        take: gives a replica its items, one after another.
        check: called before every step of a replica; may raise an exception to stop.
    """
    if len(players) == 1:
        yield from players[0].lines(take(), check)
        return
    stop = threading.Event()

    def check_both() -> None:
        if stop.is_set():
            raise _StopError
        check()

    # Lines, exceptions, and None at the end of a replica.
    done: queue.SimpleQueue[Line | BaseException | None] = queue.SimpleQueue()

    def play(player: Player, devices: Devices) -> None:
        try:
            with jax.default_device(devices[0]):
                for line in player.lines(take(), check_both):
                    done.put(line)
            done.put(None)
        except BaseException as error:
            done.put(error)

    threads = [
        threading.Thread(target=play, args=replica, daemon=True)
        for replica in zip(players, groups, strict=True)
    ]
    for thread in threads:
        thread.start()
    try:
        playing = len(players)
        while playing:
            line = done.get()
            if isinstance(line, BaseException):
                raise line
            if line is None:
                playing -= 1
            else:
                yield line
    finally:
        # A thread that is inside a device program at the end of the process would crash it.
        stop.set()
        for thread in threads:
            thread.join()


class _StopError(Exception):
    """Another replica has failed, or the caller stops."""


class ReadAhead:
    """Requests overviews ahead, for all replicas of a host.

    Args:
        reader: reads them, and keeps a bounded number of them.
        videos: finds the files.
        frames: number of frames of an overview.
        count: number of questions to look ahead, which is also how many are played side by side.
    """

    def __init__(self, reader: FrameReader, videos: VideoFolder, frames: int, count: int):
        self._reader = reader
        self._videos = videos
        self._frames = frames
        self._count = count
        self._lock = threading.Lock()
        self._count_taken = 0
        self._known: set[str] = set()  # videos that were taken or requested

    def items(self, deal: Deal) -> Iterator[Item]:
        """Take items from the deal, and request the overviews of those that come next."""
        for item in deal.items():
            with self._lock:
                self._count_taken += 1
                self._known.add(item.question.video)
                # The first ones are played at once, and ask for their overviews themselves.
                if self._count_taken >= self._count:
                    self._request(deal.coming(self._count))
            yield item

    def _request(self, items: list[Item]) -> None:
        for name in [item.question.video for item in items]:
            path = self._videos.find(name)
            if path is not None and name not in self._known:
                self._known.add(name)
                self._reader.ahead(self._videos.root / path, self._frames)
