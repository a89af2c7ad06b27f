"""How fast frames come: `python -m benchmarks.loader --videos FOLDER --workers 2 --step-seconds 5`.

Plays a training loop: batches of packed rows in the loader's order, their frames read ahead by `FrameReader`, a step that only waits.
Prints frames a second, how long a step had to wait for its frames, and whether the loader keeps up with the stated step time.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time

import numpy as np

from paravt_jax.data import video
from paravt_jax.data.frame_reader import FrameReader, ReaderSettings
from paravt_jax.data.frames import VideoError, overview_indices
from paravt_jax.data.loader import Ahead, stream


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
    """Figures of `steps` batches of `rows` rows with `clips` clips of `frames` frames each, drawn from the folder's videos."""
    files, counts = [], {}
    for path in sorted(folder.rglob("*")):
        try:
            counts[path] = video.probe(path).frames
            video.read(path, [0, counts[path] - 1])
        except VideoError:
            continue
        files.append(path)
    if not files:
        raise SystemExit(f"{folder}: no readable videos")
    rng = np.random.default_rng(0)
    packs = [tuple(int(n) for n in rng.integers(len(files), size=clips)) for _ in range(64)]

    def wanted(batch):
        return [
            (files[n], overview_indices(counts[files[n]], frames)) for row in batch for n in row
        ]

    with FrameReader(
        ReaderSettings(workers=workers, ready=4 * rows * clips * (ahead + 1))
    ) as reader:
        reader.read(files[0], [0])  # processes start, and that is no part of a step

        def start(batch) -> None:
            for path, indices in wanted(batch):
                reader.ahead(path, indices)

        source = Ahead(stream(packs, 0, rows), ahead, start)
        waits, begun = [], time.perf_counter()
        for _ in range(steps):
            asked = time.perf_counter()
            for path, indices in wanted(next(source)):
                reader.read(path, indices)
            waits.append(time.perf_counter() - asked)
            time.sleep(step_seconds)
        seconds = time.perf_counter() - begun
        read = reader.frames
    steady = waits[1:] or waits  # nothing could be read ahead of the first
    return {
        "videos": len(files),
        "workers": workers,
        "frames": read,
        "frames_a_second": round(read / seconds, 1),
        "step_seconds": step_seconds,
        "first_wait": round(waits[0], 3),
        "mean_wait": round(float(np.mean(steady)), 3),
        "most_wait": round(float(np.max(steady)), 3),
        "keeps_up": bool(np.mean(steady) < 0.05 * step_seconds) if step_seconds else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--videos", type=pathlib.Path, required=True)
    for name, value in (
        ("workers", 2),
        ("rows", 4),
        ("clips", 3),
        ("frames", 32),
        ("steps", 6),
        ("ahead", 2),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument(
        "--step-seconds",
        type=float,
        default=5.0,
        help="what a step takes; 0 measures how fast frames come at most",
    )
    options = vars(parser.parse_args())
    print(json.dumps(measure(options.pop("videos"), **options), indent=1))


if __name__ == "__main__":
    main()
