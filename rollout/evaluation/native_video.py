"""Overviews as native videos: two frames per temporal slice, as Qwen3-VL reads videos.

The release asks about Charades-STA in this way, without a number of frames, so the server's default
applies. Here that is the default of Qwen3-VL's video processor: 2 frames per second, at least 4, in
sizes that keep all frames together below a limit. `--frames` bounds their number.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from models.features import FrameFeatures, ShownFrames
from models.processor import slice_times, video_frame_indices
from paravt_jax.data.sizes import video_size
from paravt_jax.method.protocol import Protocol
from paravt_jax.method.records import Frame

# Limits of the published video processor on the pixels of all frames together.
_PIXELS = (4096, 25_165_824)


@dataclasses.dataclass(frozen=True)
class VideoRules:
    """How frames of a native video are resized: as by Qwen3-VL's video processor."""

    frames: int
    """Number of frames of the video."""
    factor: int = 32
    """Pixels along the side of a merged patch: patch size times merge size."""
    # The processor gets the frames themselves.
    jpeg: ClassVar[int] = 0

    def sizes(self, height: int, width: int) -> tuple[tuple[int, int], ...]:
        """The (height, width) at which the model sees the frames, as the only step.

        Raises:
            ValueError: As in `video_size`.
        """
        return (video_size(self.frames, height, width, _PIXELS, self.factor),)

    @property
    def most_tokens(self) -> int:
        """Upper bound on the visual tokens of a slice."""
        # `video_size` compares the limit with this number of frames.
        compared = max(2, round(self.frames / 2) * 2)
        return _PIXELS[1] // compared // self.factor**2


def most_video_tokens(frames: int, factor: int = 32) -> int:
    """Upper bound on the visual tokens of a native video of up to `frames` frames."""
    counts = range(2, max(frames, 2) + 1)
    return max(-(-count // 2) * VideoRules(count, factor).most_tokens for count in counts)


async def read_video_overview(features: FrameFeatures, name: str, most: int) -> ShownFrames:
    """Read the frames of `video_overview`, which depend on the length of the video."""
    await features.request_info(name)
    return await features.request(video_overview(features, name, most))


def video_overview(features: FrameFeatures, name: str, most: int) -> tuple[Frame, ...]:
    """The whole video as pairs of frames, each with the pair's mean time.

    An odd last frame is paired with itself. A video of a single frame is shown as an image.

    Args:
        features: knows the video's frames.
        name: the video.
        most: upper bound on the frames.
    """
    info = features.info(name)
    if info.frames < 2:
        return features.overview(name, 1)
    rate = info.frames / info.duration
    indices = video_frame_indices(info.frames, rate, max_frames=most).tolist()
    vision = features.config.vision
    rules = VideoRules(len(indices), vision.patch_size * vision.spatial_merge_size)
    indices += indices[-1:] * (len(indices) % 2)
    times = slice_times(info.times[indices])
    return tuple(
        Frame(name, first, time, second=second, rules=rules)
        for first, second, time in zip(indices[::2], indices[1::2], times, strict=True)
    )


def video_tokens(
    protocol: Protocol, frames: int, factor: int, last: float, tools: bool = True
) -> int:
    """Tokens of a main agent's prompt before the question, if the overview is a native video.

    Args:
        protocol: renders the system turn and the times of slices.
        frames: upper bound on the frames of the video.
        factor: pixels along the side of a visual token.
        last: seconds of the last frame.
        tools: whether the system turn describes tools.
    """
    slices = [Frame("", 0, last, second=0)] * -(-frames // 2)
    return len(protocol.overview(slices, 0, tools).ids) + most_video_tokens(frames, factor)
