"""Rotary position embeddings: the position of every token, and how a position rotates a head.

The text decoder uses three-axis positions (time, height, width; M-RoPE), the vision tower two-axis
ones (height, width). Angles are float32: in bfloat16, neighbouring positions would be equal. The
positions follow transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from models.config import ModelConfig, TextConfig, VisionConfig

Cells = TypeVar("Cells", Array, np.ndarray)


def mrope_positions(
    ids: Int[np.ndarray, " t"],
    grids: Sequence[tuple[int, int]],
    config: ModelConfig,
) -> Int[np.ndarray, "3 t"]:
    """Return the positions (time, height, width) of a sequence's tokens, equal to `get_rope_index`.

    Example: text a b, an image of 2 x 3 merged cells, then text c:

        token    a  b  v  v  v  v  v  v  c
        time     0  1  2  2  2  2  2  2  5
        height   0  1  2  2  2  3  3  3  5
        width    0  1  2  3  4  2  3  4  5

    Text counts up on all three axes. An image keeps one time and spans its grid. The token after
    it takes the largest position plus one. The frames of a video are images of their own.

    Args:
        ids: token ids, with image and video placeholders.
        grids: height and width of the images that the placeholders stand for, in patches and in
            order.
        config: token ids of the placeholders, and the merge size.

    Raises:
        ValueError: placeholders and grids do not match.
    """
    ids = np.asarray(ids)
    merge = config.vision.spatial_merge_size
    tokens = [height * width // merge**2 for height, width in grids]
    placeholders = np.flatnonzero((ids == config.image_token_id) | (ids == config.video_token_id))
    if len(placeholders) != sum(tokens):
        raise ValueError(
            f"grids = {list(grids)}: stand for {sum(tokens)} visual tokens, the sequence has "
            f"{len(placeholders)}; give one grid per image"
        )
    positions = np.empty((3, len(ids)), np.int32)
    done = 0  # tokens that have their positions
    used = 0  # placeholders among them
    position = 0
    for (h, w), count in zip(grids, tokens, strict=True):
        first = placeholders[used]
        end = first + count
        if (ids[first:end] != ids[first]).any():
            raise ValueError(
                f"grids: the image at token {first} needs {count} consecutive placeholders for "
                f"grid {(h, w)}; write them together"
            )
        # The text before the image.
        positions[:, done:first] = np.arange(position, position + first - done)
        position += first - done
        y, x = np.divmod(np.arange(count), w // merge)
        positions[:, first:end] = position + np.stack([np.zeros_like(y), y, x])
        # The next token follows the largest y or x.
        position += max(h, w) // merge
        done = end
        used += count
    positions[:, done:] = np.arange(position, position + len(ids) - done)
    return positions


def visual_index(ids: Cells, placeholder: int) -> Cells:
    """Return the visual vector of each token, numbered along the row; -1 where the token is text.

    Args:
        ids: token ids, [t] or [b, t].
        placeholder: id of the image placeholder.
    """
    visual = ids == placeholder
    # NumPy's operators are typed as Any.
    return visual.cumsum(-1) * visual - 1  # pyright: ignore[reportReturnType]


def next_position(positions: Int[np.ndarray, "3 t"]) -> int:
    """Return the position of the text token that would follow: the largest plus one."""
    return int(positions.max()) + 1 if positions.size else 0


def mrope_angles(
    positions: Int[Array | np.ndarray, "3 b t"], config: TextConfig
) -> Float[Array, "b t j"]:
    """Return the rotation angles of text heads in radians, one per frequency, j = head_dim / 2."""
    half = config.head_dim // 2
    j = np.arange(half)
    if config.mrope_interleaved:
        # Frequencies go to time, height, width, time, ... (0, 1, 2, 0, ...) until the section of
        # height or width is used up. All others go to time.
        axis = np.zeros(half, np.int32)
        for number in (1, 2):
            axis[(j % 3 == number) & (j < 3 * config.mrope_section[number])] = number
    else:
        axis = np.repeat(np.arange(3), config.mrope_section)
    axis = axis[None, None, :]
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / config.head_dim
    frequency = (1.0 / config.rope_theta**exponents).astype(np.float32)
    time, height, width = positions.astype(jnp.float32)[..., None]
    position = jnp.where(axis == 0, time, jnp.where(axis == 1, height, width))
    return position * frequency[None, None, :]


def vision_angles(
    y: Int[Array | np.ndarray, "b p"],
    x: Int[Array | np.ndarray, "b p"],
    config: VisionConfig,
) -> Float[Array, "b p j"]:
    """Return the rotation angles of vision heads for patches at (y, x) of their frame.

    j = head_dim / 2: first the angles of y, then those of x.
    """
    quarter = config.head_dim // 4
    exponents = np.arange(quarter, dtype=np.float32) / quarter
    frequency = (1.0 / config.rope_theta**exponents).astype(np.float32)[None, None, :]
    return jnp.concatenate([index[..., None] * frequency for index in (y, x)], axis=-1)


def rotate(x: Float[Array, "b t n h"], angles: Float[Array, "#b t j"]) -> Float[Array, "b t n h"]:
    """Rotate the two halves of each head against each other by `angles`, j = h / 2.

    Computed in float32, returned in x's type.
    """
    # [b, t, j] -> [b, t, 1, j]: all heads of a token rotate alike.
    cos = jnp.cos(angles)[..., None, :]
    sin = jnp.sin(angles)[..., None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
