"""The vision tower: patches in; merged visual vectors and their DeepStack levels out.

Attention stays within a frame, so the features of a frame depend on that frame alone, and can be
cached. Frames of any size share a program: it has a number of patches, to which they are padded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt8

from models.attention import RowLayout, attend
from models.config import VisionConfig
from models.layers import LayerNorm, Linear, RMSNorm
from models.rope import rotate, vision_angles


class PatchLayout(NamedTuple):
    """Position of every patch in its frame, from its top left corner, and the size of that frame.

    Both are in patches.
    """

    y: Int[Array, "b p"]
    x: Int[Array, "b p"]
    height: Int[Array, "b 1"]
    width: Int[Array, "b 1"]
    real: Int[Array, "b p"]
    """1 for a patch of the frame, 0 for padding behind it."""


def frame_layout(
    grids: Int[Array | np.ndarray, "b 2"], patches: int, config: VisionConfig
) -> PatchLayout:
    """Return the layout of rows that are one frame each, padded to a number of patches.

    The patches of a visual token are neighbours. Only the number of patches is static, so frames
    of all sizes run the same program.

    Args:
        grids: Height and width of the frames, in patches; 0 for a frame that does not exist.
        patches: Patches of a row.
        config: For the merge size.
    """
    merge = config.spatial_merge_size
    # A frame that does not exist counts as one token, so that nothing divides by 0.
    height, width = jnp.maximum(grids, merge)[:, :, None].transpose(1, 0, 2)
    token, inner = np.divmod(np.arange(patches)[None], merge**2)
    real = token < grids.prod(-1, keepdims=True) // merge**2
    y = token // (width // merge) * merge + inner // merge
    x = token % (width // merge) * merge + inner % merge
    y, x = jnp.where(real, y, 0), jnp.where(real, x, 0)
    return PatchLayout(y, x, height, width, jnp.asarray(real, jnp.int32))


def patchify(
    frames: UInt8[np.ndarray, "t h w 3"], config: VisionConfig, together: int = 1
) -> Float[np.ndarray, "m p c"]:
    """Cut frames into flattened patches, with the values that a vision tower reads.

    Args:
        frames: RGB pixels.
        config: sizes of the tower's patches, and mean and deviation of its pixels.
        together: frames in a row that share a temporal patch, as in native videos.

    Returns:
        Patches [m = t / together, p patches, c], where c runs over (channel, time, y, x): a frame
        is repeated to fill a temporal patch. The patches of a visual token are neighbours.

    Raises:
        ValueError: a side is no multiple of the side of a visual token.
    """
    patch = config.patch_size
    merge = config.spatial_merge_size
    temporal = config.temporal_patch_size
    t, h, w, channels = frames.shape
    if h % (patch * merge) or w % (patch * merge):
        raise ValueError(
            f"frame size = {h} x {w}: both sides are multiples of {patch * merge}; resize frames "
            "to the size that smart_resize gives"
        )
    mean = np.asarray(config.pixel_mean, np.float32)
    std = np.asarray(config.pixel_std, np.float32)
    values = frames.astype(np.float32) / (255 * std) - mean / std
    # Height splits into (block, patch in the block, pixel), and width likewise.
    grid = (h // patch // merge, merge, patch, w // patch // merge, merge, patch)
    blocks = values.reshape(t, *grid, channels)
    # -> frame, block y, block x, patch y, patch x, channel, pixel y, pixel x
    blocks = blocks.transpose(0, 1, 4, 2, 5, 7, 3, 6)
    blocks = np.moveaxis(blocks.reshape(-1, together, *blocks.shape[1:]), 1, 6)
    blocks = np.repeat(blocks, temporal // together, axis=6)
    return blocks.reshape(t // together, -1, config.patch_dim)


class VisionBlock(nnx.Module):
    """Pre-norm attention and MLP. A family's subclass says what is between the MLP's products.

    The parameters hold all layers, stacked along a leading axis. A call takes one layer: the module
    merged with one slice of those parameters.
    """

    def __init__(
        self,
        config: VisionConfig,
        *,
        norm: type[LayerNorm] | type[RMSNorm],
        rngs: nnx.Rngs,
        param_dtype: DTypeLike,
    ):
        d = config.hidden_size
        f = config.intermediate_size
        stack = (config.depth,)
        linear = functools.partial(Linear, stack=stack, rngs=rngs, param_dtype=param_dtype)
        self.heads = config.num_heads
        self.norm1 = norm(d, stack=stack, param_dtype=param_dtype)
        self.norm2 = norm(d, stack=stack, param_dtype=param_dtype)
        self.qkv = linear((d, 3 * d), ("tower_embed", "tower_heads"))
        self.out = linear((d, d), ("tower_heads", "tower_embed"))
        self.up = linear((d, f), ("tower_embed", "tower_mlp"))
        self.down = linear((f, d), ("tower_mlp", "tower_embed"))

    def __call__(
        self,
        x: Float[Array, "b p d"],
        angles: Float[Array, "b p j"],
        segments: Int[Array, "b p"],
    ) -> Float[Array, "b p d"]:
        b, p, d = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(b, p, 3, self.heads, d // self.heads)
        q, k, v = jnp.moveaxis(qkv, 2, 0)
        q = rotate(q, angles)
        k = rotate(k, angles)
        attended = attend(q, k, v, RowLayout(segments=segments, causal=False))
        x = x + self.out(attended.reshape(b, p, d))
        return x + self.mlp(self.norm2(x))

    def mlp(self, x: Float[Array, "b p d"]) -> Float[Array, "b p d"]:
        """Return the MLP, from `up` to `down`."""
        raise NotImplementedError


class PatchMerger(nnx.Module):
    """Joins merge x merge patches into one vector of the decoder's width.

    Args:
        config: sizes of the tower.
        stack: (mergers,) for a stack of mergers, () for a single one.
        norm: makes the norm of the given size.
        norm_after: whether the norm is over the joined vector (DeepStack) or over each patch.
        rngs: source of the initial weights.
        param_dtype: type of stored weights.
    """

    def __init__(
        self,
        config: VisionConfig,
        *,
        stack: tuple[int, ...],
        norm: type[LayerNorm] | type[RMSNorm],
        norm_after: bool,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike,
    ):
        self.patches = config.spatial_merge_size**2
        self.joined = config.hidden_size * self.patches
        self.norm_after = norm_after
        normed = self.joined if norm_after else config.hidden_size
        linear = functools.partial(Linear, stack=stack, rngs=rngs, param_dtype=param_dtype)
        self.norm = norm(normed, stack=stack, param_dtype=param_dtype)
        self.fc1 = linear((self.joined, self.joined), ("tower_embed", "tower_mlp"))
        self.fc2 = linear((self.joined, config.out_hidden_size), ("tower_mlp", "tower_embed"))

    def __call__(self, x: Float[Array, "b p d"]) -> Float[Array, "b q o"]:
        # A token's patches are neighbours: [b, p, d] -> [b, p / merge^2, merge^2 * d].
        joined = (x.shape[0], -1, self.joined)
        x = self.norm(x.reshape(joined)) if self.norm_after else self.norm(x).reshape(joined)
        return self.fc2(jax.nn.gelu(self.fc1(x), approximate=False))


class Mergers(nnx.Module):
    """The end of the vision tower: mergers of its last hidden states, and of those of DeepStack.

    Args:
        merger: of the last hidden states.
        deepstack: of each level, stacked; None without DeepStack.
    """

    def __init__(self, merger: PatchMerger, deepstack: PatchMerger | None):
        self.merger = merger
        self.deepstack = deepstack

    def __call__(
        self, x: Float[Array, "b p d"], taps: Float[Array, "levels b p d"]
    ) -> Float[Array, "b q c o"]:
        features = [self.merger(x)[None]]
        if self.deepstack is not None:
            # One merger per tap: both are stacked along the first axis.
            graph, state = nnx.split(self.deepstack)
            features.append(jax.vmap(lambda s, tap: nnx.merge(graph, s)(tap))(state, taps))
        return jnp.moveaxis(jnp.concatenate(features), 0, 2)

    def of_tokens(self, states: Float[Array, "b q c w"]) -> Float[Array, "b q c o"]:
        """Do the same for what `VisionTower.before_mergers` returns."""
        b, q, c, w = states.shape
        patches = self.merger.patches
        x = jnp.moveaxis(states, 2, 0).reshape(c, b, q * patches, w // patches)
        return self(x[0], x[1:])


class VisionTower(nnx.Module):
    """A vision tower. Every family has a subclass, which makes the parts and says how to embed.

    Attributes:
        config: sizes.
        dtype: type of activations.
        blocks: all layers, stacked: `blocks(x, angles, segment_ids)` runs one slice of them.
        merger: of the last hidden states.
        deepstack: of the levels, stacked; None without DeepStack.
    """

    config: VisionConfig
    dtype: DTypeLike
    blocks: Any
    merger: PatchMerger
    deepstack: PatchMerger | None

    def embed(self, patches: Float[Array, "b p c"], layout: PatchLayout) -> Float[Array, "b p d"]:
        """Return the input of the first block."""
        raise NotImplementedError

    def segments(self, layout: PatchLayout) -> Callable[[Int[Array, ""]], Int[Array, "b p"]]:
        """Map a layer's number to its segments: a patch sees the patches of its own segment.

        Frames by default. 0 is padding.
        """
        return lambda _: layout.real

    @property
    def mergers(self) -> Mergers:
        """The part behind the blocks, which has the same weights."""
        return Mergers(self.merger, self.deepstack)

    def __call__(
        self,
        patches: Float[Array | np.ndarray, "b p c"],
        grids: Int[Array | np.ndarray, "b 2"],
        remat: bool = False,
    ) -> Float[Array, "b q levels d"]:
        """Compute visual features, q = p / merge^2 visual tokens per row. Those of padding are
        finite but meaningless.

        Args:
            patches: patches of one frame per row as `patchify` makes them, padded on the right.
            grids: height and width of the frames, in patches; 0 for a frame that does not exist.
            remat: whether a backward pass computes the blocks again, and keeps only their inputs.

        Returns:
            Features whose third axis has 1 + DeepStack levels: at 0 the merged features, at 1 + i
            those of level i.
        """
        return self.mergers(*self._states(patches, grids, remat))

    def before_mergers(
        self,
        patches: Float[Array | np.ndarray, "b p c"],
        grids: Int[Array | np.ndarray, "b 2"],
    ) -> Float[Array, "b q levels w"]:
        """Return what the mergers read, per visual token: the states of its merge^2 patches as one
        vector.

        Arguments are those of a call. At 0 on the third axis are the last hidden states.
        """
        x, taps = self._states(patches, grids)
        c = self.config
        states = jnp.concatenate([x[None], taps])
        width = c.spatial_merge_size**2 * c.hidden_size
        return jnp.moveaxis(states.reshape(1 + c.levels, len(x), -1, width), 0, 2)

    def _states(
        self,
        patches: Float[Array | np.ndarray, "b p c"],
        grids: Int[Array | np.ndarray, "b 2"],
        remat: bool = False,
    ) -> tuple[Float[Array, "b p d"], Float[Array, "levels b p d"]]:
        """Return the hidden states after the last block, and after each block that DeepStack
        taps."""
        c = self.config
        layout = frame_layout(grids, patches.shape[1], c)
        x = self.embed(jnp.asarray(patches, self.dtype), layout)
        angles = vision_angles(layout.y, layout.x, c)
        segments = self.segments(layout)
        # Each tapped layer writes to its slot, and all others to one spare slot at the end. The
        # scan then keeps levels + 1 hidden states instead of one per layer.
        slots = np.full(c.depth, c.levels)
        slots[list(c.taps)] = np.arange(c.levels)
        graph, state = nnx.split(self.blocks)

        def run(params, x, number):
            return nnx.merge(graph, params)(x, angles, segments(number))

        if remat:
            # Without the taps, which are linear in what is kept.
            run = jax.checkpoint(run, prevent_cse=False)

        def body(carry, layer):
            x, taps = carry
            params, slot, number = layer
            x = run(params, x, number)
            return (x, jax.lax.dynamic_update_index_in_dim(taps, x, slot, 0)), None

        taps = jnp.zeros((c.levels + 1, *x.shape), x.dtype)
        (x, taps), _ = jax.lax.scan(
            body, (x, taps), (state, jnp.asarray(slots), jnp.arange(c.depth))
        )
        return x, taps[: c.levels]


def encoding_weights(weights: nnx.State, dtype: DTypeLike) -> nnx.State:
    """Return the weights of a tower, or of a part of it, that encodes frames in `dtype` without
    gradients.

    Kernels are stored in `dtype`, to which the tower would round them anyway. All other weights
    keep their type: norms and positions are used in float32. Weights may be abstract.
    """

    def one(path: tuple, variable: nnx.Variable) -> nnx.Variable:
        return cast_variable(variable, dtype) if path[-1] == "kernel" else variable

    return nnx.map_state(one, weights)


def cast_variable(variable: nnx.Variable, dtype: DTypeLike) -> nnx.Variable:
    """Return a variable in another type. Its value may be abstract."""
    value = variable.get_value()
    abstract = isinstance(value, jax.ShapeDtypeStruct)
    return variable.replace(value.update(dtype=dtype) if abstract else value.astype(dtype))
