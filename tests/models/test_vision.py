"""Frames of all sizes in one program, and the weights of a tower that only encodes."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.qwen2_5_vl.sizes import tiny as windowed
from models.qwen3_vl.sizes import tiny
from models.vision import encoding_weights
from tests.noisy_model import noisy_model


@pytest.mark.parametrize("make", [tiny, windowed])
def test_all_mixes_of_grids_run_one_program_and_padding_changes_nothing(make):
    """Frames of a call have the features that each has alone, whatever stands behind them."""
    config = make(464)
    if make is windowed:
        side = 2 * config.vision.spatial_merge_size * config.vision.patch_size
        config = dataclasses.replace(
            config, vision=dataclasses.replace(config.vision, window_size=side)
        )
    tower = noisy_model(config).vision
    rng, traces = np.random.default_rng(1), []

    @nnx.jit
    def see(tower, patches, grids):
        traces.append(patches.shape)
        return tower(patches, grids)

    def check(patches, grids):
        together = see(tower, patches, grids)
        assert np.isfinite(together).all()
        for row, (h, w), found in zip(patches, grids, together, strict=True):
            if h:
                # Values reach 25; processors sum in different orders.
                alone = see(tower, row[None, : h * w], np.array([[h, w]]))
                np.testing.assert_allclose(found[: h * w // 4], alone[0], atol=1e-4, rtol=0)

    for _ in range(3):
        tokens = rng.choice([1, 6, 12], 4)
        wide = [rng.choice(np.flatnonzero(n % np.arange(1, n + 1) == 0)) + 1 for n in tokens]
        grids = 2 * np.stack([tokens // wide, wide], 1)
        grids[rng.integers(4)] *= rng.integers(2)
        check(rng.normal(size=(4, 48, config.vision.patch_dim)).astype(np.float32), grids)
    assert len([shape for shape in traces if shape[0] == 4]) == 1


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
    grids = np.full((2, 2), 4)
    run = jax.jit(lambda w: nnx.merge(graph, w)(jnp.asarray(patches, jnp.float32), grids))
    # Without this option XLA on CPU may leave out the rounding.
    exactly: dict[str, str | bool] = {"xla_allow_excess_precision": False}
    one, other = (run.lower(w).compile(compiler_options=exactly)(w) for w in (weights, small))
    np.testing.assert_array_equal(one, other)
    abstract = encoding_weights(jax.eval_shape(lambda: weights), jnp.bfloat16)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(abstract)] == [
        (x.shape, x.dtype) for x in jax.tree.leaves(small)
    ]
