"""The vision tower: patches in, merged visual vectors and their DeepStack levels out.

Owns where patches stand (`PatchLayout`), patch embedding, the interpolated position table, the blocks and the mergers. Attention
stays within a frame. Refuses grids that do not match the merge, the room or the patches. Invariant: a frame's features depend on that
frame alone, so they may be cached, and frames of any sizes may share a row.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from models.attention import attend
from models.qwen3_vl.config import VisionConfig
from models.qwen3_vl.layers import LayerNorm, Linear, normal
from models.qwen3_vl.rope import merge_order, rotate, vision_angles


class PatchLayout(NamedTuple):
    """Where the patches of each row stand: row and column in their frame, the frame's height and width, all in patches.

    `frame` numbers the frames of a row from 1, 0 is padding; None: the row is one frame. A batch axis of 1 serves all rows. Only
    the shape is static: any mix of frames that fills as many patches runs the same program.
    """

    row: Int[Array, "b p"]
    column: Int[Array, "b p"]
    height: Int[Array, "b p"]
    width: Int[Array, "b p"]
    frame: Int[Array, "b p"] | None


def frame_layout(grid: tuple[int, int], config: VisionConfig) -> PatchLayout:
    """Every row is one frame of `grid` = (height, width) patches. ValueError where a side is no multiple of the merge."""
    return packed_layout([(1, *grid)], grid[0] * grid[1], config)._replace(frame=None)


def packed_layout(
    grids: Sequence[tuple[int, int, int]], size: int, config: VisionConfig
) -> PatchLayout:
    """One row of `size` patches: frames of images and videos one after another, then padding.

    `grids` holds (frames, height, width) of each, in units of patches; an image has one frame. The row's output holds their visual
    tokens in the same order. ValueError where a side is no multiple of the merge, or where `size` is too small or no multiple of merge^2.
    """
    merge, filled = config.spatial_merge_size, sum(t * h * w for t, h, w in grids)
    for t, h, w in grids:
        if min(t, h, w) < 1 or h % merge or w % merge:
            raise ValueError(
                f"grid = {(t, h, w)}: sides are multiples of {merge} patches; resize with paravt_jax.data.sizes.smart_resize first"
            )
    if filled > size or size % merge**2:
        raise ValueError(
            f"size = {size}: holds all {filled} patches and is a multiple of {merge**2}; choose a larger bucket"
        )
    layout, at = np.zeros((5, size), np.int32), 0
    layout[2:4] = 1  # padding is a frame of one patch
    frames = [(h, w) for t, h, w in grids for _ in range(t)]
    for number, (h, w) in enumerate(frames, 1):
        rows, columns = (merge_order(a, merge) for a in np.indices((h, w)))
        layout[:, at : at + h * w] = np.stack(
            [rows, columns, *(np.full(h * w, value) for value in (h, w, number))]
        )
        at += h * w
    return PatchLayout(*layout[:, None])


class PackedPatches(NamedTuple):
    """Patches dealt into rows, their layout, and where each visual token then stands among the rows' tokens, [b, q] made flat."""

    patches: Float[np.ndarray, "b p c"]
    layout: PatchLayout
    tokens: Int[np.ndarray, " n"]


def deal_rows(grids: Sequence[tuple[int, int, int]], size: int) -> list[list[tuple[int, int, int]]]:
    """The frames of images and videos, each whole, in order, in as few rows of `size` patches as that takes; one row at least."""
    rows, room = [[]], size
    for frame in [(1, h, w) for t, h, w in grids for _ in range(t)]:
        area = math.prod(frame)
        if area > room and rows[-1]:
            rows.append([])
            room = size
        rows[-1].append(frame)
        room -= area
    return rows


def pack_patches(
    patches: Float[np.ndarray, "n c"],
    grids: Sequence[tuple[int, int, int]],
    size: int,
    config: VisionConfig,
    rows: int | None = None,
) -> PackedPatches:
    """Deals the frames of images and videos into rows of `size` patches, in order, each frame whole.

    `patches` and `grids` as `Inputs` has them; `rows`: how many rows there are in the end (None: as many as the frames need).
    Attention costs each patch `size`: where frames are many, take about the largest. ValueError where a frame is larger than `size`,
    where the frames need more than `rows`, or where patches and grids disagree.
    """
    if sum(map(math.prod, grids)) != len(patches):
        raise ValueError(
            f"grids = {list(grids)}: {len(patches)} patches do not fill them; give both of the same sample"
        )
    dealt = deal_rows(grids, size)
    if rows is not None and len(dealt) > rows:
        raise ValueError(
            f"rows = {rows}: the frames need {len(dealt)} rows of {size} patches; give as many, or larger ones"
        )
    dealt += [[]] * ((rows or 0) - len(dealt))
    layout = jax.tree.map(
        lambda *parts: np.concatenate(parts), *(packed_layout(row, size, config) for row in dealt)
    )
    slot = np.flatnonzero(layout.frame)
    filled = np.zeros((len(dealt) * size, patches.shape[1]), patches.dtype)
    filled[slot] = patches
    merged = config.spatial_merge_size**2
    return PackedPatches(filled.reshape(len(dealt), size, -1), layout, slot[::merged] // merged)


class VisionBlock(nnx.Module):
    """Pre-norm attention and MLP; made with a leading layer axis, called with one layer's slice."""

    def __init__(self, config: VisionConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike):
        d, f, stack = config.hidden_size, config.intermediate_size, (config.depth,)
        self.heads = config.num_heads
        self.norm1 = LayerNorm(d, stack=stack, param_dtype=param_dtype)
        self.norm2 = LayerNorm(d, stack=stack, param_dtype=param_dtype)
        self.qkv = Linear(
            (d, 3 * d), ("embed", "heads"), stack=stack, rngs=rngs, param_dtype=param_dtype
        )
        self.out = Linear(
            (d, d), ("heads", "embed"), stack=stack, rngs=rngs, param_dtype=param_dtype
        )
        self.up = Linear((d, f), ("embed", "mlp"), stack=stack, rngs=rngs, param_dtype=param_dtype)
        self.down = Linear(
            (f, d), ("mlp", "embed"), stack=stack, rngs=rngs, param_dtype=param_dtype
        )

    def __call__(
        self,
        x: Float[Array, "b p d"],
        angles: Float[Array, "b p j"],
        frame: Int[Array, "b p"] | None,
    ) -> Float[Array, "b p d"]:
        b, p, d = x.shape
        q, k, v = jnp.moveaxis(
            self.qkv(self.norm1(x)).reshape(b, p, 3, self.heads, d // self.heads), 2, 0
        )
        x = x + self.out(
            attend(
                rotate(q, angles), rotate(k, angles), v, causal=False, segment_ids=frame
            ).reshape(b, p, d)
        )
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x)), approximate=True))


class PatchMerger(nnx.Module):
    """Joins merge x merge patches into one vector of the text width. DeepStack mergers (`stack` of them) norm after joining."""

    def __init__(
        self,
        config: VisionConfig,
        *,
        stack: tuple[int, ...],
        norm_after: bool,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike,
    ):
        self.joined = config.hidden_size * config.spatial_merge_size**2
        self.norm_after = norm_after
        self.norm = LayerNorm(
            self.joined if norm_after else config.hidden_size, stack=stack, param_dtype=param_dtype
        )
        self.fc1 = Linear(
            (self.joined, self.joined),
            ("embed", "mlp"),
            stack=stack,
            rngs=rngs,
            param_dtype=param_dtype,
        )
        self.fc2 = Linear(
            (self.joined, config.out_hidden_size),
            ("mlp", "embed"),
            stack=stack,
            rngs=rngs,
            param_dtype=param_dtype,
        )

    def __call__(self, x: Float[Array, "b p d"]) -> Float[Array, "b q o"]:
        joined = (x.shape[0], -1, self.joined)
        x = self.norm(x.reshape(joined)) if self.norm_after else self.norm(x).reshape(joined)
        return self.fc2(jax.nn.gelu(self.fc1(x), approximate=False))


class VisionTower(nnx.Module):
    """The whole tower (REFERENCE: frozen in the published recipe)."""

    def __init__(
        self,
        config: VisionConfig,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
    ):
        self.config = config
        self.dtype = dtype
        self.patch = Linear(
            (config.patch_dim, config.hidden_size),
            ("patch", "embed"),
            stack=(),
            rngs=rngs,
            param_dtype=param_dtype,
        )
        self.positions = normal(
            rngs,
            (config.num_position_embeddings, config.hidden_size),
            ("position", "embed"),
            0.02,
            param_dtype,
        )
        self.blocks = VisionBlock(config, rngs=rngs, param_dtype=param_dtype)
        self.merger = PatchMerger(
            config, stack=(), norm_after=False, rngs=rngs, param_dtype=param_dtype
        )
        mergers = PatchMerger(
            config, stack=(config.levels,), norm_after=True, rngs=rngs, param_dtype=param_dtype
        )
        self.deepstack = mergers if config.levels else None

    def __call__(
        self, patches: Float[Array, "b p c"], layout: PatchLayout
    ) -> Float[Array, "b q levels d"]:
        """Features of patches that stand as `layout` says, q = p / merge^2 visual tokens a row.

        Index 0 of the third axis holds the merged features, 1 + i the DeepStack level i (levels = 1 + number of taps). Patches as
        `models.patches.patchify` makes them. ValueError where layout and patches disagree.
        """
        if layout.row.shape[1] != patches.shape[1] or layout.row.shape[0] not in (
            1,
            patches.shape[0],
        ):
            raise ValueError(
                f"patches = {patches.shape}: the layout is one of {layout.row.shape} patches; make it of the same grids"
            )
        x = self.patch(patches.astype(self.dtype)) + self._positions(layout).astype(self.dtype)
        x, taps = self._run_blocks(x, layout)
        features = [self.merger(x)[None]]
        if self.deepstack is not None:
            graph, state = nnx.split(self.deepstack)
            features.append(jax.vmap(lambda s, tap: nnx.merge(graph, s)(tap))(state, taps))
        return jnp.moveaxis(jnp.concatenate(features), 0, 2)

    def _run_blocks(
        self, x: Float[Array, "b p d"], layout: PatchLayout
    ) -> tuple[Float[Array, "b p d"], Float[Array, "levels b p d"]]:
        """The hidden states after the last block, and after each tapped one."""
        c = self.config
        angles = vision_angles(layout.row, layout.column, c)
        frame = None if layout.frame is None else jnp.broadcast_to(layout.frame, x.shape[:2])
        # Untapped layers write to one spare slot: the scan then keeps levels + 1 hidden states, not one a layer.
        slots = np.full(c.depth, c.levels)
        slots[list(c.deepstack_visual_indexes)] = np.arange(c.levels)
        graph, state = nnx.split(self.blocks)

        def body(carry, layer):
            x, taps = carry
            params, slot = layer
            x = nnx.merge(graph, params)(x, angles, frame)
            return (x, jax.lax.dynamic_update_index_in_dim(taps, x, slot, 0)), None

        taps = jnp.zeros((c.levels + 1, *x.shape), x.dtype)
        (x, taps), _ = jax.lax.scan(body, (x, taps), (state, jnp.asarray(slots)))
        return x, taps[: c.levels]

    def _positions(self, layout: PatchLayout) -> Float[Array, "b p d"]:
        """The square position table, stretched over each frame (bilinear, corners aligned)."""
        side = math.isqrt(self.config.num_position_embeddings)
        table = self.positions[...].astype(jnp.float32)
        rows, columns = (
            _between_cells(*line, side)
            for line in ((layout.row, layout.height), (layout.column, layout.width))
        )
        corners = [
            (y * x)[..., None] * jnp.take(table, i * side + j, axis=0)
            for i, y in rows
            for j, x in columns
        ]
        return functools.reduce(operator.add, corners)


def frozen(weights: nnx.State, dtype: DTypeLike) -> nnx.State:
    """A tower's weights for one that computes in `dtype` and learns nothing: what it multiplies with in that type, which it would
    round to anyway. Norms and positions stay as they are. Weights may be abstract."""

    def one(path: tuple, variable: nnx.Variable) -> Any:
        if path[-1] != "kernel":
            return variable
        value = variable.get_value()
        return variable.replace(
            value.update(dtype=dtype)
            if isinstance(value, jax.ShapeDtypeStruct)
            else value.astype(dtype)
        )

    return nnx.map_state(one, weights)


def _between_cells(
    at: Int[Array, "b p"], length: Int[Array, "b p"], side: int
) -> list[tuple[Int[Array, "b p"], Float[Array, "b p"]]]:
    """The two cells of a line of `side` cells between which point `at` of `length` points falls, and how much each of them weighs."""
    source = at * jnp.float32(side - 1) / jnp.maximum(length - 1, 1)
    low = jnp.floor(source).astype(jnp.int32)
    return [(low, 1.0 - (source - low)), (jnp.minimum(low + 1, side - 1), source - low)]
