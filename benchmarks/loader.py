"""Measures how fast frames are read: `python -m benchmarks.loader --videos FOLDER --workers 2`.

Imitates a training loop: batches of packed rows come in the loader's order, `FrameReader` reads
their frames ahead, and a step only sleeps. Prints frames per second, the time that a step waits for
its frames, and whether the reader keeps up with the given step time.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64

from paravt_jax.data import video
from paravt_jax.data.frame_reader import FrameReader, ReaderSettings
from paravt_jax.data.frames import ReadTask, VideoError, overview_indices
from paravt_jax.data.loader import Ahead, stream

# The rows of a batch. A row is a tuple of clips, given as file numbers.
Batch = tuple[tuple[int, ...], ...]
# Number of different rows from which batches are drawn.
_ROWS = 64


def measure(
    folder: pathlib.Path,
    workers: int,
    rows: int,
    clips: int,
    frames: int,
    steps: int,
    step_seconds: float,
    ahead: int,
) -> dict:
    """Time the frames of a training loop.

    Args:
        folder: Videos to draw clips from.
        workers: Number of worker processes.
        rows: Packed rows per batch.
        clips: Clips per row.
        frames: Frames per clip.
        steps: Batches to read.
        step_seconds: Duration of a step in seconds.
        ahead: Batches to read ahead.
    """
    counts = _readable_videos(folder)
    if not counts:
        raise SystemExit(f"{folder}: no readable videos")
    files = list(counts)
    rng = np.random.default_rng(0)
    packed_rows = [
        tuple(int(n) for n in rng.integers(len(files), size=clips)) for _ in range(_ROWS)
    ]

    def clips_of(batch: Batch) -> list[tuple[pathlib.Path, Int64[np.ndarray, " m"]]]:
        paths = [files[n] for row in batch for n in row]
        return [(path, overview_indices(counts[path], frames)) for path in paths]

    settings = ReaderSettings(workers=workers, ready=4 * rows * clips * (ahead + 1))
    with FrameReader(settings) as reader:

        def read(path: pathlib.Path, indices: Sequence[int]) -> int:
            task = ReadTask(str(path), tuple(indices), settings.rules)
            return len(reader.request(task).result().frames)

        # Start the processes before the clock.
        read(files[0], (0,))

        def request(batch: Batch) -> None:
            for path, indices in clips_of(batch):
                reader.ahead(path, indices)

        batches = Ahead(stream(packed_rows, 0, rows), ahead, request)
        waits = []
        frames_read = 0
        start = time.perf_counter()
        for _ in range(steps):
            wait_start = time.perf_counter()
            for path, indices in clips_of(next(batches)):
                frames_read += read(path, indices.tolist())
            waits.append(time.perf_counter() - wait_start)
            time.sleep(step_seconds)
        seconds = time.perf_counter() - start
    # The frames of the first step cannot be read ahead.
    steady = waits[1:] or waits
    return {
        "videos": len(files),
        "workers": workers,
        "frames": frames_read,
        "frames_a_second": round(frames_read / seconds, 1),
        "step_seconds": step_seconds,
        "first_wait": round(waits[0], 3),
        "mean_wait": round(float(np.mean(steady)), 3),
        "most_wait": round(float(np.max(steady)), 3),
        "keeps_up": bool(np.mean(steady) < 0.05 * step_seconds) if step_seconds else None,
    }


def _readable_videos(folder: pathlib.Path) -> dict[pathlib.Path, int]:
    """Number of frames of each video whose first and last frame can be decoded."""
    counts = {}
    for path in sorted(folder.rglob("*")):
        try:
            frames = video.probe(path).frames
            video.read(path, [0, frames - 1])
        except VideoError:
            continue
        counts[path] = frames
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--videos", type=pathlib.Path, required=True, help="folder of videos")
    parser.add_argument("--workers", type=int, default=2, help="worker processes")
    parser.add_argument("--rows", type=int, default=4, help="packed rows per batch")
    parser.add_argument("--clips", type=int, default=3, help="clips per row")
    parser.add_argument("--frames", type=int, default=32, help="frames per clip")
    parser.add_argument("--steps", type=int, default=6, help="batches to read")
    parser.add_argument("--ahead", type=int, default=2, help="batches to read ahead")
    parser.add_argument(
        "--step-seconds",
        type=float,
        default=5.0,
        help="duration of a step in seconds; 0 measures the highest rate of frames",
    )
    options = vars(parser.parse_args())
    print(json.dumps(measure(options.pop("videos"), **options), indent=1))


if __name__ == "__main__":
    main()
