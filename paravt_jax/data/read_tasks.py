"""Carries out tasks of reading in the calling thread, for any source of frames."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
from jaxtyping import UInt8

from paravt_jax.data.frames import ReadFrames, ReadTask, VideoError, VideoInfo, overview_indices
from paravt_jax.data.sizes import PixelRules


def carry_out(
    task: ReadTask,
    probe: Callable[[str], VideoInfo],
    read: Callable[[str, Sequence[int], PixelRules | None], UInt8[np.ndarray, "m h w 3"]],
) -> ReadFrames:
    """List the frames of a file with `probe`, choose those that are wanted, and `read` them.

    Raises:
        VideoError: The file cannot be read.
    """
    info = probe(task.path)
    wanted = task.wanted
    if isinstance(wanted, int):
        whole = info.frames <= task.whole
        wanted = range(info.frames) if whole else overview_indices(info.frames, wanted).tolist()
    if not wanted or not 0 <= min(wanted) <= max(wanted) < info.frames:
        return ReadFrames(info, (), np.zeros((0, 0, 0, 3), np.uint8))
    try:
        frames = read(task.path, wanted, task.rules)
    except IndexError as error:
        raise VideoError(task.path, "it has changed while it was read") from error
    return ReadFrames(info, tuple(wanted), frames)


def read_now(read: Callable[[], ReadFrames]) -> Future[ReadFrames]:
    """Return a future with the result of `read`, which is called at once."""
    future: Future[ReadFrames] = Future()
    try:
        future.set_result(read())
    except VideoError as error:
        future.set_exception(error)
    return future
