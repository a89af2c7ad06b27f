"""Frames of several sizes, one per row of the vision tower."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int


def padded_frames(
    patches: Float[np.ndarray, "n c"], grids: Sequence[tuple[int, int]]
) -> tuple[Float[np.ndarray, "f p c"], Int[np.ndarray, " n"]]:
    """Return the frames of (height, width) patches with padding, and the rows' own patches."""
    sizes = np.prod(grids, axis=1)
    real = np.arange(sizes.max()) < sizes[:, None]
    rows = np.zeros((*real.shape, patches.shape[1]), np.float32)
    rows[real] = patches
    return rows, np.flatnonzero(real)
