"""Frames packed into rows: each sees only itself, and its tokens are found again."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.packing import pack_patches
from models.qwen3_vl.sizes import tiny
from models.vision import encoding_weights, frame_layout
from tests.noisy_model import noisy_model

CONFIG = tiny(97)
# 8, 3 x 8, 16 and 4 patches.
GRIDS = [(1, 2, 4), (3, 4, 2), (1, 4, 4), (1, 2, 2)]


@pytest.fixture(scope="module")
def patches() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(52, 1536)).astype(np.float32)


@pytest.fixture(scope="module")
def tower():
    return noisy_model(CONFIG).vision


@pytest.mark.parametrize(("size", "rows"), [(16, 4), (20, 3), (64, 1)])
def test_a_packed_frame_sees_only_itself(tower, patches, size, rows):
    see = nnx.jit(lambda tower, patches, layout: tower(patches, layout))
    packed = pack_patches(patches, GRIDS, size, CONFIG.vision)
    assert packed.patches.shape == (rows, size, 1536)
    found = np.asarray(see(tower, packed.patches, packed.layout)).reshape(-1, 2, 128)[packed.tokens]
    start = 0
    for t, h, w in GRIDS:
        end = start + t * h * w
        frames = patches[start:end].reshape(t, h * w, -1)
        alone = see(tower, frames, frame_layout((h, w), CONFIG.vision))
        alone = np.asarray(alone).reshape(-1, 2, 128)
        np.testing.assert_allclose(found[start // 4 : end // 4], alone, atol=2e-5)
        start = end
    assert start == 52 and len(found) == 13


def test_frames_that_do_not_fit_are_refused(patches):
    with pytest.raises(ValueError, match="size = 12: .*16 patches"):
        pack_patches(patches, GRIDS, 12, CONFIG.vision)
    with pytest.raises(ValueError, match="rows = 2: .*3 rows of 20 patches"):
        pack_patches(patches, GRIDS, 20, CONFIG.vision, rows=2)
    with pytest.raises(ValueError, match="51 patches"):
        pack_patches(patches[:-1], GRIDS, 64, CONFIG.vision)


def test_no_frames_are_one_row_of_padding():
    packed = pack_patches(np.zeros((0, 1536), np.float32), [], 8, CONFIG.vision)
    assert packed.patches.shape == (1, 8, 1536) and packed.tokens.size == 0
    assert (packed.layout.frame == 0).all()


def test_more_rows_than_needed_are_padding():
    patches = np.ones((52, 1536), np.float32)
    needed = pack_patches(patches, GRIDS, 20, CONFIG.vision)
    more = pack_patches(patches, GRIDS, 20, CONFIG.vision, rows=4)
    np.testing.assert_array_equal(more.tokens, needed.tokens)
    first_three = jax.tree.map(lambda x: x[:3], more[:2])
    jax.tree.map(np.testing.assert_array_equal, needed[:2], first_three)
    assert more.layout.frame is not None and not np.any(more.layout.frame[3])
    assert (more.patches[3] == 0).all()


def test_a_frozen_tower_takes_half_the_memory_and_gives_the_same():
    """The tower rounds kernels to bfloat16 anyway; all other weights stay float32."""
    config = tiny(464)
    tower = noisy_model(config, jnp.bfloat16).vision
    graph, weights = nnx.split(tower)
    small = encoding_weights(weights, jnp.bfloat16)

    def size(state):
        return sum(x.nbytes for x in jax.tree.leaves(state))

    assert size(small) < 0.6 * size(weights)
    patches = np.random.default_rng(0).normal(size=(2, 16, config.vision.patch_dim))
    layout = frame_layout((4, 4), config.vision)
    run = jax.jit(lambda w: nnx.merge(graph, w)(jnp.asarray(patches, jnp.float32), layout))
    # Without this option XLA on CPU may leave out the rounding.
    exactly: dict[str, str | bool] = {"xla_allow_excess_precision": False}
    one, other = (run.lower(w).compile(compiler_options=exactly)(w) for w in (weights, small))
    np.testing.assert_array_equal(one, other)
    abstract = encoding_weights(jax.eval_shape(lambda: weights), jnp.bfloat16)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(abstract)] == [
        (x.shape, x.dtype) for x in jax.tree.leaves(small)
    ]
