"""Rotary positions: which position each token has, and how a position turns a head.

Owns the three-axis positions of Qwen3-VL (time, height, width; interleaved MRoPE) and the two-axis ones of the vision tower.
Angles are float32: at bfloat16 neighbouring positions fall together. Facts follow transformers' Qwen3-VL.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import TypeVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from models.qwen3_vl.config import Qwen3VLConfig, TextConfig, VisionConfig

Cells = TypeVar("Cells", Array, np.ndarray)


def mrope_positions(
    ids: Int[np.ndarray, " t"],
    grids: Sequence[tuple[int, ...]],
    config: Qwen3VLConfig,
    start: int = 0,
) -> Int[np.ndarray, "3 t"]:
    """Positions (time, height, width) of a token sequence whose image and video placeholders stand for `grids`.

    `grids` holds, in patches and in order, (height, width) of an image or (time, height, width) of an image or a video. Text counts
    up on all three axes; a slice in time stands as an image does, text between: it starts at one time and spans its merged grid, and
    what follows it goes on after the largest position. Equal to transformers' `get_rope_index`. ValueError where placeholders and
    grids do not match.
    """
    ids, merge = np.asarray(ids), config.vision.spatial_merge_size
    slices = [grid[-2:] for grid in grids for _ in range(math.prod(grid[:-2]))]
    if any(side < merge or side % merge for grid in slices for side in grid):
        raise ValueError(
            f"grids = {list(grids)}: height and width are multiples of {merge} patches; resize to smart_resize's answer first"
        )
    tokens = [h * w // merge**2 for h, w in slices]
    placeholders = np.flatnonzero((ids == config.image_token_id) | (ids == config.video_token_id))
    if len(placeholders) != sum(tokens):
        counts = f"stand for {sum(tokens)} visual tokens, the sequence has {len(placeholders)}"
        raise ValueError(f"grids = {list(grids)}: {counts}; give one grid an image or video")
    positions = np.empty((3, len(ids)), np.int32)
    at, position, used = 0, start, 0
    for (h, w), n in zip(slices, tokens, strict=True):
        first = placeholders[used]
        if (ids[first : first + n] != ids[first]).any():
            raise ValueError(
                f"grids: the image at token {first} needs {n} placeholders in a row for grid {(h, w)}; write them together"
            )
        positions[:, at:first] = np.arange(position, position + first - at)
        position += first - at
        rows, columns = np.divmod(np.arange(n), w // merge)
        positions[:, first : first + n] = position + np.stack([np.zeros_like(rows), rows, columns])
        position += max(h, w) // merge
        at, used = first + n, used + n
    positions[:, at:] = np.arange(position, position + len(ids) - at)
    return positions


def visual_index(ids: Cells, *placeholders: int) -> Cells:
    """Which visual vector of its row ([t] or [b, t]) each token takes, counted over the placeholder ids in order; -1 for text."""
    visual = functools.reduce(operator.or_, [ids == placeholder for placeholder in placeholders])
    return visual.cumsum(-1) * visual - 1  # pyright: ignore[reportReturnType]  (NumPy's operators give Any)


def next_position(positions: Int[np.ndarray, "3 t"]) -> int:
    """The position of the text token that would follow: one more than the largest."""
    return int(positions.max()) + 1 if positions.size else 0


def mrope_angles(positions: Int[Array, "3 b t"], config: TextConfig) -> Float[Array, "b t j"]:
    """Rotation angles of text heads, j = head_dim / 2, in radians.

    Interleaved: frequencies go time, height, width, time, ... until a section is used up; the rest belongs to time.
    """
    half = config.head_dim // 2
    j = np.arange(half)
    axis = np.zeros(half, np.int32)
    for number in (1, 2):
        axis[(j % 3 == number) & (j < 3 * config.mrope_section[number])] = number
    frequency = (
        1.0
        / config.rope_theta
        ** (np.arange(0, config.head_dim, 2, dtype=np.float32) / config.head_dim)
    ).astype(np.float32)
    time, height, width = positions.astype(jnp.float32)[..., None]
    return jnp.where(axis == 0, time, jnp.where(axis == 1, height, width)) * frequency


def vision_angles(
    row: Int[Array, "b p"], column: Int[Array, "b p"], config: VisionConfig
) -> Float[Array, "b p j"]:
    """Rotation angles of vision heads for patches at (row, column) of their frame, j = head_dim / 2: rows first, then columns."""
    quarter = config.head_dim // 4
    frequency = (
        1.0 / config.rope_theta ** (np.arange(quarter, dtype=np.float32) / quarter)
    ).astype(np.float32)
    return jnp.concatenate([at[..., None] * frequency for at in (row, column)], axis=-1)


def merge_order(cells: Cells, merge: int) -> Cells:
    """Flattens [height, width, ...] so that the merge x merge patches of one visual token stand together."""
    h, w, *rest = cells.shape
    blocks = cells.reshape(h // merge, merge, w // merge, merge, *rest)
    return blocks.swapaxes(1, 2).reshape(h * w, *rest)


def rotate(x: Float[Array, "b t n h"], angles: Float[Array, "b t j"]) -> Float[Array, "b t n h"]:
    """Turns the halves of each head against each other by `angles` (j = h / 2); computed in float32, returned in x's type."""
    cos, sin = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    ).astype(x.dtype)
