"""Records of frame_sampling.json, as examples of the tests and for `write_records`."""

from __future__ import annotations


def frames(total: int, indices: list[int] | None, fps: float = 1.0, **ele: float) -> dict:
    """A record of a video of `total` frames; without indices, the release raises."""
    expected: dict = {"error": "ValueError"}
    if indices is not None:
        expected = {
            "error": None,
            "nframes": len(indices),
            "indices": indices,
            "timestamps": [i / fps for i in indices],
            "start_frame": indices[0],
            "end_frame": indices[-1],
        }
    return {
        "id": "example",
        "total_frames": total,
        "video_fps": fps,
        "ele": ele,
        "expected": expected,
    }
