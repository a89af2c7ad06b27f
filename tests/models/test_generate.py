"""Generated tokens equal those of whole forward passes; stop ids, seeds, and compilations."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import models.generate
from models.attention import RowLayout
from models.generate import generate
from models.model import Inputs, VisionLanguageModel
from models.rope import mrope_positions, visual_index
from models.text import VisualBank
from models.vision import frame_layout
from train.durable.usage import Compilations

IMAGE, VIDEO = (1, 2, 4), (3, 4, 2)
LARGE = (1, 24, 24)
NEW = 12


@pytest.fixture(scope="module")
def model(small_model) -> VisionLanguageModel:
    """An untied model: with tied noise, the same word would come again and again."""
    untied = nnx.clone(small_model)
    noise = np.random.default_rng(1).normal(0, 0.2, small_model.text.embedding.shape)
    untied.text.head = nnx.data(nnx.Param(jnp.asarray(noise, jnp.float32)))
    return untied


def sample(model: VisionLanguageModel, *parts: int | tuple[int, int, int], seed: int = 2) -> Inputs:
    """A sample of parts: a number of words, or the grid of an image or video. Patches are noise."""
    rng = np.random.default_rng(seed)
    config = model.config
    ids = []
    for part in parts:
        if isinstance(part, int):
            ids += rng.integers(0, 60, part).tolist()
        else:
            token = config.image_token_id if part[0] == 1 else config.video_token_id
            # Every temporal slice comes after a word.
            for _ in range(part[0]):
                ids += [int(rng.integers(0, 60)), *[token] * (part[1] * part[2] // 4)]
    grids = [part for part in parts if not isinstance(part, int)]
    ids = np.array(ids, np.int32)
    patches = rng.normal(
        size=(sum(t * h * w for t, h, w in grids), config.vision.patch_dim)
    ).astype(np.float32)
    index = visual_index(ids, config.image_token_id, config.video_token_id).astype(np.int32)
    return Inputs(ids, mrope_positions(ids, grids, config), index, patches, grids)


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
    for t, h, w in inputs.grids:
        part = inputs.patches[start : start + t * h * w].reshape(t, h * w, -1)
        found = see(model.vision, part, frame_layout((h, w), model.config.vision))
        vectors.append(found.reshape(1, -1, *found.shape[2:]))
        start += t * h * w
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
@pytest.mark.parametrize(
    "parts",
    [(2, IMAGE, 1, VIDEO, 5), (1, LARGE, 2, LARGE, 3)],
    ids=["image and video", "large images"],
)
def test_tokens_equal_those_of_whole_forward_passes(model, monkeypatch, parts):
    inputs = sample(model, *parts)
    expected = greedy(model, inputs, NEW)
    assert len(set(expected)) > 3
    # The amount of padding changes nothing.
    for bucket in (16, 48):
        monkeypatch.setattr(models.generate, "BUCKET", bucket)
        found = generate(model, inputs, new_tokens=NEW, stop_ids=[])
        assert found.dtype == np.int32 and found.tolist() == expected
    if inputs.grids:
        other = inputs._replace(patches=-inputs.patches)
        assert generate(model, other, new_tokens=NEW, stop_ids=[]).tolist() != expected


def test_it_ends_with_the_first_stop_id(model, monkeypatch):
    monkeypatch.setattr(models.generate, "BUCKET", 16)
    inputs = sample(model, 4, IMAGE, 3)
    run = functools.partial(generate, model, inputs)
    whole = run(new_tokens=NEW, stop_ids=[]).tolist()
    stop = whole[5]
    first = whole.index(stop)
    assert run(new_tokens=NEW, stop_ids=[stop, 99_999]).tolist() == whole[: first + 1]
    assert run(new_tokens=NEW, stop_ids=[whole[0]]).tolist() == whole[:1]
    assert run(new_tokens=1, stop_ids=[]).tolist() == whole[:1]
    longer = run(new_tokens=16, stop_ids=[]).tolist()
    assert len(longer) == 16 and longer[:NEW] == whole


def test_samples_of_similar_size_share_their_programs(model, monkeypatch):
    monkeypatch.setattr(models.generate, "BUCKET", 64)
    run = functools.partial(generate, nnx.clone(model))
    compiled = Compilations()
    run(sample(model, 4, IMAGE, 3), new_tokens=3, stop_ids=[0])
    # One for the frames, one for the text.
    before = compiled.count
    similar = [(2, IMAGE, 1), (1, IMAGE, IMAGE, 2), (44, IMAGE)]
    for number, parts in enumerate(similar, 4):
        run(
            sample(model, *parts, seed=number),
            new_tokens=number,
            stop_ids=[number],
            temperature=0.1 * number,
            seed=number,
        )
    assert compiled.count == before


@pytest.mark.parametrize(
    ("options", "message"),
    [({"new_tokens": 0}, "new_tokens = 0"), ({"temperature": -1.0}, "temperature = -1.0")],
)
def test_impossible_requests_are_refused(model, options, message):
    with pytest.raises(ValueError, match=message):
        generate(model, sample(model, 3), **{"new_tokens": 2, "stop_ids": [], **options})
