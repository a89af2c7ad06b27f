"""frame_sampling.json against ours: the frames of overviews and crops, and their sizes."""

from __future__ import annotations

import math

import numpy as np

from paravt_jax.data.frames import PixelRules, VideoInfo, overview_indices, window_indices
from tests.golden.conftest import Excuse

# --- frames of an overview ---


def wanted(record: dict) -> int:
    """The number of frames asked for: K, or the limit under an fps (768 is the library's)."""
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
    """Whether the frames asked for, or all there are, are evenly spread over the video."""
    total = record["total_frames"]
    count = min(wanted(record), total)
    if len(got) != count or got[0] != 0:
        return False
    if count > 1 and got[-1] != total - 1:
        return False
    even = np.allclose(got, np.linspace(0, total - 1, count), atol=0.51)
    return bool(even and (np.diff(got) > 0).all())


def asked_alike(record: dict) -> bool:
    """Whether our frames are the release's if its number of frames is asked for."""
    expected = record["expected"]
    return expected["error"] is not None or same_frames(
        record, overview_indices(record["total_frames"], expected["nframes"])
    )


OVERVIEWS = {
    # A video with fewer frames than asked for is shown whole. The release raises, and another
    # reader is tried.
    "too many": Excuse(
        applies=lambda r: (
            "nframes" in r["ele"] and 2 * round(r["ele"]["nframes"] / 2) > r["total_frames"]
        ),
        holds=evenly_spread,
    ),
    # K is the number of frames. The release rounds it to an even number (half to the nearest even
    # half).
    "odd": Excuse(
        applies=lambda r: r["ele"].get("nframes", 0) % 2 == 1,
        holds=lambda r, got: evenly_spread(r, got) and asked_alike(r),
    ),
    # K alone decides the number of frames. In the release an fps does, and the drawn K is lost
    # (REFERENCE 4, 2).
    "rate": Excuse(
        applies=lambda r: (
            "nframes" not in r["ele"]
            and r["expected"].get("nframes") != min(wanted(r), r["total_frames"])
        ),
        holds=lambda r, got: evenly_spread(r, got) and asked_alike(r),
    ),
}


def test_overviews(records, hold):
    table = [
        record for record in records("frame_sampling", "frame_sampling") if not is_window(record)
    ]
    hold(table, overview, same_frames, OVERVIEWS, least=0.3)


# --- frames of a crop ---


def bounds(record: dict) -> tuple[float, float]:
    """The window in seconds; a missing end is the video's."""
    ele = record["ele"]
    duration = record["total_frames"] / record["video_fps"]
    return float(ele.get("video_start", 0.0)), float(ele.get("video_end", duration))


def rate(record: dict) -> float:
    """Frames per second: the record's, or the video's if the record has a number of frames."""
    if "nframes" in record["ele"]:
        return record["video_fps"]
    return float(record["ele"].get("fps", 2.0))


def times(record: dict) -> np.ndarray:
    return np.arange(record["total_frames"]) / record["video_fps"]


def crop(record: dict) -> np.ndarray | None:
    """Our frames of a window; None where it is refused."""
    total, fps = record["total_frames"], record["video_fps"]
    info = VideoInfo(total, total / fps, times(record), 32, 32)
    try:
        return window_indices(info, *bounds(record), fps=rate(record), limit=wanted(record))
    except ValueError:
        return None


def spread_in_window(record: dict, got: np.ndarray | None) -> bool:
    """Whether the frames lie in [start, end), differ, and are those nearest to the wanted times.

    The wanted times are 1 / rate apart from the start on, or, if that exceeds the limit of frames,
    uniform over the window.
    """
    if got is None:
        return False
    frame_times = times(record)
    start, end = bounds(record)
    gap = 1 / record["video_fps"]
    inside = frame_times[(frame_times >= start - 1e-6) & (frame_times < end - 1e-6)]
    start = max(start, 0.0)
    end = min(end, record["total_frames"] * gap)
    count = min(wanted(record), max(1, math.ceil((end - start) * rate(record) - 1e-6)))
    step = max(1 / rate(record), (end - start) / wanted(record))
    aims = (start + step * np.arange(count)).clip(inside[0], inside[-1])
    shown = frame_times[got]
    if len(got) > count or not (np.diff(got) > 0).all() or not np.isin(shown, inside).all():
        return False
    # Every wanted time has a frame near it, and every frame is near a wanted time.
    distances = np.abs(shown[:, None] - aims[None, :])
    near = gap / 2 + 1e-6
    return bool((distances.min(axis=0) <= near).all() and (distances.min(axis=1) <= near).all())


def within_theirs(record: dict, got: np.ndarray) -> bool:
    """Whether the frames lie in the release's range of frames, if it has one.

    If a window begins at a frame, rounding decides whether the release's range includes it.
    """
    first = bounds(record)[0] * record["video_fps"]
    slack = int(abs(first - round(first)) < 1e-5)
    expected = record["expected"]
    return (
        expected["error"] is not None
        or expected["start_frame"] - slack <= got[0] <= got[-1] <= expected["end_frame"]
    )


def on_show(record: dict, got: np.ndarray | None) -> bool:
    """Whether the only frame is the last one that begins before the window."""
    before = np.flatnonzero(times(record) <= bounds(record)[0] + 1e-6)
    return got is not None and got.tolist() == [before[-1] if before.size else 0]


def has_frames(record: dict) -> bool:
    frame_times = times(record)
    start, end = bounds(record)
    return bool(((frame_times >= start - 1e-6) & (frame_times < end - 1e-6)).any())


CROPS = {
    # A window that ends before it begins is refused, and the model is told. The release tries
    # another reader.
    "impossible": Excuse(
        applies=lambda r: bounds(r)[0] >= bounds(r)[1],
        holds=lambda r, got: got is None and r["expected"]["error"] is not None,
    ),
    # A window without a frame shows the frame on screen at its start. The release wants two
    # frames, or tries another reader.
    "between frames": Excuse(
        applies=lambda r: not has_frames(r),
        holds=on_show,
    ),
    # A window is [start, end) with a frame every 1 / fps from its start. The release includes the
    # end and takes an even number of at least 2.
    "windows": Excuse(
        applies=is_window,
        holds=lambda r, got: spread_in_window(r, got) and within_theirs(r, got),
    ),
}


def test_crops(records, hold):
    """No crop is sampled as in the release, so all are excused and compared with their window."""
    table = [record for record in records("frame_sampling", "frame_sampling") if is_window(record)]
    hold(table, crop, lambda r, got: False, CROPS, least=0)


# --- sizes ---


def resized(record: dict) -> list[int] | None:
    """The size of a frame; None where it is refused. By default it has 4 to 16,384 tokens."""
    factor = record["factor"]
    least, most = record["min_pixels"] or 4 * factor**2, record["max_pixels"] or 16_384 * factor**2
    try:
        return list(PixelRules(least, most, factor).size(record["height"], record["width"]))
    except ValueError:
        return None


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
