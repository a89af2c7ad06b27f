"""How frames become what the model sees, and how many are encoded and kept."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from models.config import VisionConfig
from paravt_jax.data.sizes import PixelRules

# qwen_vl_utils resizes to multiples of this many pixels, two patches of Qwen2-VL.
_CLIENT_FACTOR = 28

_SMALL_FRAME = 49  # visual tokens of the largest frame by default


@dataclasses.dataclass(frozen=True)
class FrameSettings:
    """How frames are resized (by the rules of Qwen's clients and servers), encoded and cached."""

    min_pixels: int = 784
    """Smaller frames are enlarged to this area, in pixels."""
    max_pixels: int = 50_176
    """Larger frames are shrunk to this area, in pixels."""
    crop_min_pixels: int = 0
    """Replaces min_pixels for the frames of crops; 0: the same."""
    crop_max_pixels: int = 0
    """Replaces max_pixels for the frames of crops; 0: the same."""
    snap: int = 0
    """28: resize to multiples of 28 first, as clients of Qwen's servers do; 0: not at all."""
    jpeg: int = 0
    """Quality of the JPEG through which resized frames go, from 1 to 100; 0: none."""
    processor_min_pixels: int = 0
    """Resized frames below this area are enlarged, as the model's processor does; 0: no."""
    batch: int = 16
    """Frames of up to 49 visual tokens per call of the vision tower; fewer if larger."""
    whole_frames: int = 0
    """Videos of at most this many frames are encoded whole on first use."""
    cache_mib: int = 4096
    """Size limit of the feature cache, in MiB. Frames of running episodes may exceed it."""
    admission: Literal["arrival", "counted"] = "arrival"
    """When frames join an episode: on arrival, or, to repeat bit for bit, after counted steps."""

    def __post_init__(self):
        for name, value in vars(self).items():
            least = 1 if name in ("min_pixels", "batch") else 0
            if name != "admission" and value < least:
                raise ValueError(f"frames.{name}: {value}; give a whole number of at least {least}")
        for prefix in ("", "crop_"):
            least, most = self._pixel_limits(crop=bool(prefix))
            if most < least:
                raise ValueError(
                    f"frames.{prefix}max_pixels: {most}; frames would have at least {least} and at "
                    f"most {most} pixels; raise it, or lower frames.{prefix}min_pixels"
                )
        if self.admission not in ("arrival", "counted"):
            raise ValueError(f"frames.admission: {self.admission!r}; give arrival or counted")
        if self.snap not in (0, _CLIENT_FACTOR):
            raise ValueError(f"frames.snap: {self.snap}; give {_CLIENT_FACTOR}, or 0 to skip it")
        if not 0 <= self.jpeg <= 100:
            raise ValueError(f"frames.jpeg: {self.jpeg}; give a quality from 1 to 100, or 0")

    def batch_of(self, tokens: int, devices: int = 1) -> int:
        """Return the frames per call of the vision tower if each has this many visual tokens.

        A call has about as many tokens with large frames as with small ones, and every device gets
        equally many frames. A partly filled call costs the same as a full one.
        """
        frames = max(1, self.batch * _SMALL_FRAME // max(_SMALL_FRAME, tokens))
        return math.ceil(frames / devices) * devices

    def rules(self, vision: VisionConfig, crop: bool = False) -> PixelRules:
        """Return how a frame of an overview, or of a crop, becomes what the tower reads."""
        min_pixels, max_pixels = self._pixel_limits(crop)
        return PixelRules(
            min_pixels=min_pixels,
            max_pixels=max_pixels,
            factor=vision.patch_size * vision.spatial_merge_size,
            snap=self.snap,
            jpeg=self.jpeg,
            processor_min_pixels=self.processor_min_pixels,
        )

    def _pixel_limits(self, crop: bool) -> tuple[int, int]:
        """Return the smallest and the largest area of a frame, in pixels."""
        if not crop:
            return self.min_pixels, self.max_pixels
        return self.crop_min_pixels or self.min_pixels, self.crop_max_pixels or self.max_pixels


def frame_tokens(settings: FrameSettings, vision: VisionConfig, crop: bool = False) -> int:
    """Return the upper bound on a frame's visual tokens. Very wide frames above it are refused."""
    return settings.rules(vision, crop).most_tokens
