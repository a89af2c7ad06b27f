"""Rotary positions: which position each token has, and how a position turns a head.

Owns the three-axis positions of Qwen3-VL (time, height, width; interleaved MRoPE) and the two-axis ones of the vision tower.
Angles are float32: at bfloat16 neighbouring positions fall together. Facts follow transformers' Qwen3-VL.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from models.qwen3_vl.config import Qwen3VLConfig, TextConfig, VisionConfig

Cells = TypeVar("Cells", Array, np.ndarray)


def mrope_positions(
    ids: Int[np.ndarray, " t"], grids: Sequence[tuple[int, int]], config: Qwen3VLConfig, start: int = 0
) -> Int[np.ndarray, "3 t"]:
    """Positions (time, height, width) of a token sequence whose image placeholders stand for `grids`.

    `grids` holds each image's (height, width) in patches, in order. Text counts up on all three axes; an image starts at one
    time and spans its merged grid; what follows it goes on after the largest position. Equal to transformers' `get_rope_index`
    for images. ValueError where placeholders and grids do not match.
    """
    merge = config.vision.spatial_merge_size
    image = np.asarray(ids) == config.image_token_id
    tokens = [(h // merge) * (w // merge) for h, w in grids]
    if image.sum() != sum(tokens):
        counts = f"stand for {sum(tokens)} image tokens, the sequence has {image.sum()}"
        raise ValueError(f"grids = {list(grids)}: {counts}; give one grid an image")
    if not grids:
        return np.broadcast_to(np.arange(start, start + len(ids), dtype=np.int32), (3, len(ids))).copy()
    positions = np.empty((3, len(ids)), np.int32)
    at, position = 0, start
    placeholders = np.flatnonzero(image)
    used = 0
    for (h, w), n in zip(grids, tokens, strict=True):
        first = placeholders[used]
        if not image[first : first + n].all():
            raise ValueError(f"grids: the image at token {first} needs {n} placeholders in a row for grid {(h, w)}; write them together")
        positions[:, at:first] = np.arange(position, position + first - at)
        position += first - at
        rows, columns = np.divmod(np.arange(n), w // merge)
        positions[:, first : first + n] = position + np.stack([np.zeros_like(rows), rows, columns])
        position += max(h, w) // merge
        at, used = first + n, used + n
    positions[:, at:] = np.arange(position, position + len(ids) - at)
    return positions


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
    frequency = (1.0 / config.rope_theta ** (np.arange(0, config.head_dim, 2, dtype=np.float32) / config.head_dim)).astype(np.float32)
    time, height, width = positions.astype(jnp.float32)[..., None]
    return jnp.where(axis == 0, time, jnp.where(axis == 1, height, width)) * frequency


def vision_angles(grid: tuple[int, int], config: VisionConfig) -> Float[np.ndarray, "p j"]:
    """Rotation angles of vision heads for a grid of (height, width) patches in merge order, j = head_dim / 2: rows first, then columns."""
    quarter = config.head_dim // 4
    frequency = 1.0 / config.rope_theta ** (np.arange(quarter, dtype=np.float32) / quarter)
    rows, columns = (merge_order(a, config.spatial_merge_size) for a in np.indices(grid))
    return np.concatenate([rows[:, None] * frequency, columns[:, None] * frequency], axis=-1).astype(np.float32)


def merge_order(cells: Cells, merge: int) -> Cells:
    """Flattens [height, width, ...] so that the merge x merge patches of one visual token stand together."""
    h, w, *rest = cells.shape
    blocks = cells.reshape(h // merge, merge, w // merge, merge, *rest)
    return blocks.swapaxes(1, 2).reshape(h * w, *rest)


def rotate(x: Float[Array, "b t n h"], angles: Float[Array, "b t j"]) -> Float[Array, "b t n h"]:
    """Turns the halves of each head against each other by `angles` (j = h / 2); computed in float32, returned in x's type."""
    cos, sin = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
