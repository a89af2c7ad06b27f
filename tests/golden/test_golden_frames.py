"""frame_sampling.json against ours: which frames an overview and a crop show, and at which size."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from paravt_jax.data.frames import VideoInfo, overview_indices, window_indices
from paravt_jax.data.sizes import smart_resize
from tests.golden.conftest import Excuse, check_examples

FACTOR = 32  # patch size 16 x merge size 2: the grid of the models here

# Frames of an overview -----------------------------------------------------------------------------------------------------------


def wanted(record: dict) -> int:
    """How many frames are asked for: K itself, or the most that an fps allows (64 is the recipe's and 768 the library's)."""
    return record["ele"].get("nframes") or record["ele"].get("max_frames", 768)


def is_window(record: dict) -> bool:
    return "video_start" in record["ele"] or "video_end" in record["ele"]


def overview(record: dict) -> np.ndarray:
    return overview_indices(record["total_frames"], wanted(record))


def same_frames(record: dict, got: np.ndarray) -> bool:
    """The frames of the table, and its times: a frame's number over the rate."""
    expected = record["expected"]
    if expected["error"] is not None or got.tolist() != expected["indices"]:
        return False
    return np.allclose(got / record["video_fps"], expected["timestamps"], rtol=1e-9, atol=1e-9)


def evenly_spread(record: dict, got: np.ndarray) -> bool:
    """As many different frames as asked for or as there are, in order, at even distances, from the first to the last one."""
    total, count = record["total_frames"], min(wanted(record), record["total_frames"])
    ends = len(got) == count and got[0] == 0 and (count == 1 or got[-1] == total - 1)
    return bool(
        ends
        and np.allclose(got, np.linspace(0, total - 1, count), atol=0.51)
        and (np.diff(got) > 0).all()
    )


def asked_alike(record: dict) -> bool:
    """Asked for the number of frames that the release takes, ours are the same."""
    expected = record["expected"]
    return expected["error"] is not None or same_frames(
        record, overview_indices(record["total_frames"], expected["nframes"])
    )


def frames(total: int, indices: list[int] | None, fps: float = 1.0, **ele: float) -> dict:
    """A record of frame_sampling."""
    if indices is None:
        return {
            "id": "example",
            "total_frames": total,
            "video_fps": fps,
            "ele": ele,
            "expected": {"error": "ValueError"},
        }
    expected = {
        "error": None,
        "nframes": len(indices),
        "indices": indices,
        "timestamps": [i / fps for i in indices],
    }
    expected |= {"start_frame": indices[0], "end_frame": indices[-1]}
    return {
        "id": "example",
        "total_frames": total,
        "video_fps": fps,
        "ele": ele,
        "expected": expected,
    }


FOUR = frames(100, [0, 33, 66, 99], nframes=4)

OVERVIEWS = {
    "too many": Excuse(
        "a video with fewer frames than asked for is shown whole; the release raises, and another reader is tried",
        lambda r: "nframes" in r["ele"] and 2 * round(r["ele"]["nframes"] / 2) > r["total_frames"],
        evenly_spread,
        frames(3, None, nframes=8),
        FOUR,
        np.array([0, 2]),
    ),
    "odd": Excuse(
        "K frames are K frames; the release rounds to an even number (half to the nearest even half)",
        lambda r: r["ele"].get("nframes", 0) % 2 == 1,
        lambda r, got: evenly_spread(r, got) and asked_alike(r),
        frames(100, [0, 33, 66, 99], nframes=5),
        FOUR,
        np.array([0, 33, 66, 99]),
    ),
    "rate": Excuse(
        "K alone says how many frames there are; in the release an fps does, and the drawn K is lost (REFERENCE 4, 2)",
        lambda r: (
            "nframes" not in r["ele"]
            and r["expected"].get("nframes") != min(wanted(r), r["total_frames"])
        ),
        lambda r, got: evenly_spread(r, got) and asked_alike(r),
        frames(100, [0, 33, 66, 99], fps=25, max_frames=16),
        frames(100, [0, 33, 66, 99], max_frames=4),
        np.array([0, 33, 66, 99]),
    ),
}


def test_overviews(records, hold):
    table = [
        record for record in records("frame_sampling", "frame_sampling") if not is_window(record)
    ]
    hold(table, overview, same_frames, OVERVIEWS, least=0.3)


def test_excuses_of_overviews():
    check_examples(overview, OVERVIEWS)


# Frames of a crop ----------------------------------------------------------------------------------------------------------------


def bounds(record: dict) -> tuple[float, float]:
    """The window in seconds; where an end is missing it is the video's."""
    ele = record["ele"]
    return float(ele.get("video_start", 0.0)), float(
        ele.get("video_end", record["total_frames"] / record["video_fps"])
    )


def rate(record: dict) -> float:
    """Frames a second: what the record says, or the video's own where it names a number of frames."""
    return (
        record["video_fps"] if "nframes" in record["ele"] else float(record["ele"].get("fps", 2.0))
    )


def times(record: dict) -> np.ndarray:
    return np.arange(record["total_frames"]) / record["video_fps"]


def crop(record: dict) -> np.ndarray | None:
    """Our frames of a window; None where it is refused."""
    total, fps = record["total_frames"], record["video_fps"]
    info = VideoInfo("v.mp4", total, total / fps, times(record), 32, 32)
    try:
        return window_indices(info, *bounds(record), fps=rate(record), limit=wanted(record))
    except ValueError:
        return None


def spread_in_window(record: dict, got: np.ndarray | None) -> bool:
    """Frames of [start, end) only, none twice, each the nearest one to a wanted time and each time with its nearest one.

    The times are one every 1 / rate from the start, or the limit's uniform ones where that is fewer.
    """
    if got is None:
        return False
    at, (start, end), gap = times(record), bounds(record), 1 / record["video_fps"]
    inside = at[(at >= start - 1e-6) & (at < end - 1e-6)]
    start, end = max(start, 0.0), min(end, record["total_frames"] * gap)
    count = min(wanted(record), max(1, math.ceil((end - start) * rate(record) - 1e-6)))
    aims = start + max(1 / rate(record), (end - start) / wanted(record)) * np.arange(count)
    off = np.abs(at[got][:, None] - aims.clip(inside[0], inside[-1]))
    near = (off.min(axis=0) <= gap / 2 + 1e-6).all() and (off.min(axis=1) <= gap / 2 + 1e-6).all()
    return bool(
        near and (np.diff(got) > 0).all() and np.isin(at[got], inside).all() and len(got) <= count
    )


def within_theirs(record: dict, got: np.ndarray) -> bool:
    """Not outside the release's range of frames, if it has one; where a window begins at a frame, either side of it may be meant."""
    first = bounds(record)[0] * record["video_fps"]
    slack = int(abs(first - round(first)) < 1e-5)
    expected = record["expected"]
    return (
        expected["error"] is not None
        or expected["start_frame"] - slack <= got[0] <= got[-1] <= expected["end_frame"]
    )


def on_show(record: dict, got: np.ndarray | None) -> bool:
    """One frame: the last one that begins before the window does."""
    before = np.flatnonzero(times(record) <= bounds(record)[0] + 1e-6)
    return got is not None and got.tolist() == [before[-1] if before.size else 0]


def has_frames(record: dict) -> bool:
    at, (start, end) = times(record), bounds(record)
    return bool(((at >= start - 1e-6) & (at < end - 1e-6)).any())


TEN = frames(250, list(range(250, 500, 25)), fps=25, video_start=10, video_end=19, max_frames=16)

CROPS = {
    "impossible": Excuse(
        "a window that ends before it begins is refused, and the model is told; the release tries another reader",
        lambda r: bounds(r)[0] >= bounds(r)[1],
        lambda r, got: got is None and r["expected"]["error"] is not None,
        frames(100, None, video_start=5, video_end=4),
        frames(100, None, video_start=4, video_end=5),
        np.array([5]),
    ),
    "between frames": Excuse(
        "a window that holds no frame shows the one that is on show; the release wants two frames, or tries another reader",
        lambda r: not has_frames(r),
        on_show,
        frames(100, None, video_start=4.2, video_end=4.8),
        frames(100, None, video_start=4, video_end=5),
        np.array([5]),
    ),
    "windows": Excuse(
        "a window is [start, end), one frame every 1 / fps from its start; the release's holds its end, and an even number of at least 2",
        is_window,
        lambda r, got: spread_in_window(r, got) and within_theirs(r, got),
        frames(100, [10, 13], fps=1, video_start=10, video_end=13, max_frames=16),
        FOUR,
        np.array([10, 11, 12, 13]),
    ),
}


def test_crops(records, hold):
    """No crop is asked for alike, so none has to agree: what is shown is held against the window itself."""
    table = [record for record in records("frame_sampling", "frame_sampling") if is_window(record)]
    hold(table, crop, lambda r, got: False, CROPS, least=0)


def test_excuses_of_crops():
    check_examples(crop, CROPS)


# Sizes ---------------------------------------------------------------------------------------------------------------------------


def refusing(*arguments: Any, **named: Any) -> list[int] | None:
    """`smart_resize`; None where it refuses."""
    try:
        return list(smart_resize(*arguments, **named))
    except ValueError:
        return None


def resized(record: dict) -> list[int] | None:
    return refusing(
        *(record[name] for name in ("height", "width", "min_pixels", "max_pixels", "factor"))
    )


def test_smart_resize(records, hold):
    """Every size and every refusal is the same."""
    table = records("frame_sampling", "smart_resize")
    hold(
        table,
        resized,
        lambda r, got: got == r["resized"] and (got is None) == bool(r["error"]),
        {},
        least=1,
    )


def limits(record: dict, factor: int) -> tuple[int, int]:
    """Least and most pixels of a frame where a video's budget is shared, as qwen_vl_utils 0.0.14 does: 128 to 768 tokens a frame."""
    ele = record["ele"]
    least = ele.get("min_pixels", 128 * factor**2)
    shared = ele.get("total_pixels", 0.9 * 128_000 * factor**2) * 2 / record["nframes"]
    most = max(min(768 * factor**2, shared), int(1.05 * least))
    return least, min(ele.get("max_pixels", most), most)


def shown(record: dict, factor: int = FACTOR) -> list[int] | None:
    """The size that a frame of this record's video is shown at, on our grid."""
    ele = record["ele"]
    if "resized_height" in ele and "resized_width" in ele:
        return refusing(ele["resized_height"], ele["resized_width"], factor=factor)
    return refusing(record["height"], record["width"], *limits(record, factor), factor)


def on_our_grid(record: dict, got: list[int] | None) -> bool:
    """Multiples of 32 where theirs are of 28, by the same rule: ours at 28 gives theirs."""
    theirs = shown(record, factor=2 * record["image_patch_size"])
    return theirs == record["resized"] and (
        got is None or all(side > 0 and side % FACTOR == 0 for side in got)
    )


def picture(size: list[int], patch: int, **ele: int) -> dict:
    """A record of fetch_video_resize: a frame of 720 x 1280."""
    return {
        "id": "example",
        "height": 720,
        "width": 1280,
        "nframes": 4,
        "image_patch_size": patch,
        "ele": ele,
        "resized": size,
    }


SIZES = {
    "grid of 28": Excuse(
        "sizes are multiples of 32, the model's grid; the release leaves the library's patch size of 14 (REFERENCE 4, 11)",
        lambda r: 2 * r["image_patch_size"] != FACTOR and r["resized"] is not None,
        on_our_grid,
        picture([168, 280], 14, min_pixels=784, max_pixels=50_176),
        picture([160, 288], 16, min_pixels=784, max_pixels=50_176),
        [168, 280],
    )
}


def test_fetch_video_resize(records, hold):
    table = records("frame_sampling", "fetch_video_resize")
    hold(table, shown, lambda r, got: got == r["resized"], SIZES, least=0.3)


def test_excuses_of_sizes():
    check_examples(shown, SIZES)
