"""Plays an evaluation on all devices of a host: several replicas of the model, one thread each.

A replica has its own weights, KV cache and frame features, on `--tensor` devices.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator, Sequence

import jax

from rollout.evaluation.benchmarks import Item
from rollout.evaluation.folder import Line
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
