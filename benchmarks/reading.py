"""Measures what crops and overviews cost to read: `python -m benchmarks.reading --videos FOLDER`.

Reads 16 frames, one per second, from the middle of each file, and 64 frames spread over all of it,
in three ways: plain PyAV with a seek, and this project's reader with either decoder. Prints CPU
seconds (the best of several rounds) and megabytes that were read, and the cost of the index apart.
All three have to return the same pixels. The first file is a generated one of 46 minutes.

Linux only: bytes are those that /proc/self/io counts.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import av
import av.error
import numpy as np
from jaxtyping import Int64, UInt8

from paravt_jax.data import index_store, video
from paravt_jax.data.frames import VideoError, overview_indices, shown, window_indices
from paravt_jax.data.sizes import PixelRules

MINUTES = 46
CROP = 16
OVERVIEW = 64
_SUFFIXES = {".avi", ".mkv", ".mov", ".mp4", ".mpg", ".ts", ".webm"}
_RULES = PixelRules()

Pixels = UInt8[np.ndarray, "m h w 3"]


class Cost(NamedTuple):
    """What a call costs: CPU seconds, and megabytes read."""

    cpu: float
    megabytes: float


def write_long_video(file: pathlib.Path, minutes: int) -> None:
    """Write a video of 640 x 360 pixels at 30 frames per second, about 2.5 MB per minute.

    Only its first minute is encoded: the others repeat its packets.
    """
    width, height, fps = 640, 360, 30
    rng = np.random.default_rng(0)
    picture = rng.integers(0, 232, (height // 8, width // 8), np.uint8).repeat(8, 0).repeat(8, 1)
    minute = file.with_name("minute.mp4")
    with av.open(str(minute), "w") as container:
        options = {"preset": "veryfast", "b": "330k"}
        stream = container.add_stream("libx264", rate=fps, options=options)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for n in range(60 * fps):
            # A picture has at most 231, so the noise does not overflow.
            noise = rng.integers(0, 24, picture.shape, np.uint8)
            moved = np.roll(picture, (n, 2 * n), (0, 1)) + noise
            container.mux(stream.encode(av.VideoFrame.from_ndarray(moved, format="gray")))
        container.mux(stream.encode(None))
    with av.open(str(file), "w") as container:
        copy = None
        for n in range(minutes):
            with av.open(str(minute)) as source:
                stream = source.streams.video[0]
                copy = copy or container.add_stream_from_template(stream)
                assert stream.time_base is not None
                shift = n * round(60 / stream.time_base)
                for packet in source.demux(stream):
                    # The last packet is empty, and only flushes a decoder.
                    if packet.pts is None or packet.dts is None:
                        continue
                    packet.pts += shift
                    packet.dts += shift
                    packet.stream = copy
                    container.mux(packet)
    minute.unlink()


def plain_crop(file: pathlib.Path, stamps: Sequence[int]) -> Pixels:
    """Frames with these timestamps by plain PyAV: one seek, then all frames up to the last."""
    found = []
    missing = set(stamps)
    with av.open(str(file), metadata_errors="replace") as container:
        stream: Any = container.streams.best("video")
        container.seek(stamps[0], stream=stream)
        for frame in container.decode(stream):
            if frame.pts in missing:
                found.append(_pixels(frame))
                missing.remove(frame.pts)
            if not missing:
                break
    if missing:
        raise LookupError(f"timestamps {sorted(missing)} were not found after the seek")
    return np.stack(found)


def plain_overview(file: pathlib.Path, stamps: Sequence[int]) -> Pixels:
    """Frames with these timestamps by plain PyAV: a seek for each of them."""
    found = []
    with av.open(str(file), metadata_errors="replace") as container:
        stream: Any = container.streams.best("video")
        for stamp in stamps:
            container.seek(stamp, stream=stream)
            frame = next((f for f in container.decode(stream) if f.pts == stamp), None)
            if frame is None:
                raise LookupError(f"timestamp {stamp} was not found after the seek")
            found.append(_pixels(frame))
    return np.stack(found)


def _pixels(frame: Any) -> UInt8[np.ndarray, "h w 3"]:
    pixels = np.rot90(frame.to_ndarray(format="rgb24", threads=1), (frame.rotation // 90) % 4)
    return shown(np.ascontiguousarray(pixels), _RULES)


def measure(call: Callable[[], Any], rounds: int) -> tuple[Any, Cost]:
    """The result of a call, and its cost: the CPU time is that of the cheapest round."""
    best, megabytes, result = float("inf"), 0.0, None
    for _ in range(rounds):
        # As in a new process: the index is on disk, and not in memory.
        index_store.forget()
        before = _bytes_read()
        start = time.process_time()
        result = call()
        best = min(best, time.process_time() - start)
        megabytes = (_bytes_read() - before) / 1e6
    return result, Cost(round(best, 4), round(megabytes, 3))


def _bytes_read() -> int:
    """Bytes that this process has read so far."""
    lines = pathlib.Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def compare(file: pathlib.Path, rounds: int) -> list[dict[str, Any]]:
    """The costs of a file's crop and overview.

    Raises:
        ValueError: The ways of reading return different pixels.
    """
    info, index_cost = measure(lambda: video.probe(file), 1)
    middle = info.duration / 2
    stamps = _stamps(file)
    found = []
    requests = {
        "crop": (window_indices(info, middle, middle + CROP, 1.0, CROP), plain_crop),
        "overview": (overview_indices(info.frames, OVERVIEW), plain_overview),
    }
    for name, (indices, plain) in requests.items():
        wanted = stamps[indices].tolist()
        ways: dict[str, Callable[[], Any]] = {
            "PyAV with a seek": lambda plain=plain, wanted=wanted: plain(file, wanted),
            "reader": lambda indices=indices: video.read(file, indices, _RULES),
        }
        if video.decord is not None:
            ways["reader with decord"] = lambda indices=indices: video.read(
                file, indices, _RULES, "decord"
            )
        results = {way: measure(call, rounds) for way, call in ways.items()}
        expected, plain_cost = results["PyAV with a seek"]
        for way, (pixels, _) in results.items():
            if not np.array_equal(pixels, expected):
                raise ValueError(f"{file}, {name}: {way} returns other pixels")
        reader_cost = results["reader"][1]
        found.append(
            {
                "file": file.name,
                "request": name,
                "frames": len(indices),
                **{way: cost._asdict() for way, (_, cost) in results.items()},
                "cpu_ratio": round(reader_cost.cpu / plain_cost.cpu, 2),
                "bytes_ratio": round(reader_cost.megabytes / plain_cost.megabytes, 2),
                "index": index_cost._asdict(),
            }
        )
    return found


def _stamps(file: pathlib.Path) -> Int64[np.ndarray, " frames"]:
    """Timestamps of all frames, which plain PyAV is given for free."""
    with av.open(str(file), metadata_errors="replace") as container:
        packets = container.demux(container.streams.best("video"))
        stamps = [packet.pts for packet in packets if packet.size and not packet.is_discard]
    return np.sort(np.array(stamps, np.int64))


def table(rows: list[dict[str, Any]]) -> str:
    """The costs in Markdown, as CPU seconds / megabytes."""
    ways = [way for way in ("PyAV with a seek", "reader", "reader with decord") if way in rows[0]]
    heads = ["file", "request", *ways, "ratio", "index, once"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in rows:
        costs = [f"{row[way]['cpu']:.3f} / {row[way]['megabytes']:.2f}" for way in ways]
        ratio = f"{row['cpu_ratio']:.2f} / {row['bytes_ratio']:.2f}"
        index = f"{row['index']['cpu']:.3f} / {row['index']['megabytes']:.2f}"
        cells = [row["file"], row["request"], *costs, ratio, index]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--videos", type=pathlib.Path, help="folder of further videos")
    parser.add_argument("--minutes", type=int, default=MINUTES, help="length of the first file")
    parser.add_argument("--rounds", type=int, default=2, help="rounds, of which the best counts")
    parser.add_argument("--json", type=pathlib.Path, help="file for the figures")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PARAVT_VIDEO_INDEXES"] = str(pathlib.Path(folder) / "indexes")
        long = pathlib.Path(folder) / f"{options.minutes}_minutes.mp4"
        write_long_video(long, options.minutes)
        print(f"{long.name}: {long.stat().st_size / 1e6:.1f} MB")
        others = sorted(options.videos.rglob("*")) if options.videos else []
        for file in [long, *(other for other in others if other.suffix in _SUFFIXES)]:
            try:
                rows += compare(file, options.rounds)
            # Plain PyAV cannot seek in some of them, or finds no timestamps.
            except (VideoError, av.error.FFmpegError, LookupError, TypeError) as error:
                print(f"{file.name} is left out ({type(error).__name__}: {error})")
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
