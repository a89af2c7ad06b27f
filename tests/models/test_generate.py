"""Generated tokens equal those of whole forward passes; stop ids."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.attention import RowLayout
from models.generate import generate
from models.model import Inputs, VisionLanguageModel
from models.rope import mrope_positions, visual_index
from models.text import VisualBank
from models.vision import frame_layout

IMAGE, LARGE = (2, 4), (24, 24)
NEW = 12


@pytest.fixture(scope="module")
def model(small_model) -> VisionLanguageModel:
    """An untied model: with tied noise, the same word would come again and again."""
    untied = nnx.clone(small_model)
    noise = np.random.default_rng(1).normal(0, 0.2, small_model.text.embedding.shape)
    untied.text.head = nnx.data(nnx.Param(jnp.asarray(noise, jnp.float32)))
    return untied


def sample(model: VisionLanguageModel, *parts: int | tuple[int, int], seed: int = 2) -> Inputs:
    """A sample of parts: a number of words, or the grid of an image. Patches are noise."""
    rng = np.random.default_rng(seed)
    config = model.config
    words = [
        rng.integers(0, 60, part).tolist()
        if isinstance(part, int)
        else [config.image_token_id] * (math.prod(part) // 4)
        for part in parts
    ]
    ids = np.concatenate(words).astype(np.int32)
    grids = [part for part in parts if not isinstance(part, int)]
    patches = rng.normal(size=(sum(map(math.prod, grids)), config.vision.patch_dim))
    index = visual_index(ids, config.image_token_id).astype(np.int32)
    positions = mrope_positions(ids, grids, config)
    return Inputs(ids, positions, index, patches.astype(np.float32), grids)


@nnx.jit
def last_logits(text, ids, positions, segments, visual, index, length) -> jax.Array:
    bank = None if visual is None else VisualBank(visual, index)
    hidden, _ = text(ids, positions, layout=RowLayout(segments), visual=bank)
    return text.logits(hidden[:, length - 1])


def greedy(model: VisionLanguageModel, inputs: Inputs, count: int) -> list[int]:
    """Runs every frame through the tower alone, and the whole text again for every token."""
    vectors = []
    start = 0
    see = nnx.jit(lambda tower, patches, layout: tower(patches, layout))
    for h, w in inputs.grids:
        part = inputs.patches[None, start : start + h * w]
        vectors.append(see(model.vision, part, frame_layout((h, w), model.config.vision)))
        start += h * w
    visual = jnp.concatenate(vectors, 1) if vectors else None
    ids = inputs.ids.tolist()
    width = len(ids) + count
    index = np.pad(inputs.visual_index, (0, count), constant_values=-1)[None]
    for _ in range(count):
        length = len(ids)
        padding = (0, width - length)
        whole = np.pad(np.array(ids), padding)[None]
        positions = mrope_positions(np.array(ids), inputs.grids, model.config)
        positions = np.pad(positions, ((0, 0), padding))[:, None]
        segments = (np.arange(width) < length).astype(np.int32)[None]
        batch = (whole, positions, segments, visual, index)
        logits = last_logits(model.text, *batch, np.int32(length))
        ids.append(int(logits.argmax()))
    return ids[len(inputs.ids) :]


@pytest.mark.slow
def test_tokens_equal_those_of_whole_forward_passes(model):
    inputs = sample(model, 2, IMAGE, 1, LARGE, 5)
    expected = greedy(model, inputs, NEW)
    assert len(set(expected)) > 3
    found = generate(model, inputs, new_tokens=NEW, stop_ids=[])
    assert found.dtype == np.int32 and found.tolist() == expected
    other = inputs._replace(patches=-inputs.patches)
    assert generate(model, other, new_tokens=NEW, stop_ids=[]).tolist() != expected


def test_it_ends_with_the_first_stop_id(model):
    run = functools.partial(generate, model, sample(model, 4, IMAGE, 3), new_tokens=NEW)
    whole = run(stop_ids=[]).tolist()
    assert len(whole) == NEW
    stop = whole[5]
    assert run(stop_ids=[stop, 99_999]).tolist() == whole[: whole.index(stop) + 1]
    assert run(stop_ids=[whole[0], 99_999]).tolist() == whole[:1]


def test_no_new_tokens_are_refused(model):
    with pytest.raises(ValueError, match="new_tokens = 0"):
        generate(model, sample(model, 3), new_tokens=0, stop_ids=[])
