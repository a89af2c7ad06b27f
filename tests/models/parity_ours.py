"""This model's results on the cases of `parity`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file

from models.attention import PagedCache, RowLayout
from models.config import ModelConfig
from models.model import VisionLanguageModel
from models.rope import (
    mrope_positions,
    next_position,
    visual_index,
)
from models.text import KV, VisualBank
from models.weights import hf
from tests.models.padded_frames import padded_frames
from tests.models.parity import IMAGE, NEW_TOKENS, VIDEO, Results, Sample

Outputs = tuple[jax.Array, KV, jax.Array | None]
PAGE = 16


def _frames(grids: Iterable[Iterable[int]]) -> list[tuple[int, int]]:
    """Height and width of every frame of images and videos."""
    return [(int(h), int(w)) for t, h, w in grids for _ in range(int(t))]


def batch_of(sample: Sample, config: ModelConfig) -> dict[str, Any]:
    """Inputs of our model. Frames are padded to the largest; all rows share one visual bank."""
    positions = np.zeros((3, *sample.ids.shape), np.int32)
    after = []
    for row, valid in enumerate(sample.valid):
        grids = _frames(grid for number, _, *grid in sample.items if number == row)
        positions[:, row, valid] = mrope_positions(sample.ids[row, valid], grids, config)
        after.append(next_position(positions[:, row, valid]))
    batch = {
        "ids": sample.ids,
        "positions": positions,
        "next": np.array(after),
        "segment_ids": sample.valid.astype(np.int32),
    }
    if not len(sample.items):
        return batch
    grids = _frames(sample.grids(IMAGE) + sample.grids(VIDEO))
    # The bank has the images of all rows first, then the videos.
    images = visual_index(sample.ids.ravel(), IMAGE)
    videos = visual_index(sample.ids.ravel(), VIDEO)
    index = np.where(videos < 0, images, videos + images.max() + 1).reshape(sample.ids.shape)
    patches, real = padded_frames(sample.patches, grids)
    merged = config.vision.spatial_merge_size**2
    return batch | {
        "visual_index": index,
        "patches": patches,
        "grids": np.array(grids),
        # Visual tokens that are not padding.
        "tokens": real[::merged] // merged,
    }


def features_of(model: VisionLanguageModel, batch: dict[str, Any]) -> jax.Array | None:
    """The features of all patches as one bank [1, m, c, d]; None without frames."""
    if "patches" not in batch:
        return None
    features = model.vision(batch["patches"], batch["grids"])
    return features.reshape(1, -1, *features.shape[2:])[:, batch["tokens"]]


def forward(model: VisionLanguageModel, batch: dict[str, Any]) -> Outputs:
    """Hidden states, keys and values, and the features of all patches."""
    features = features_of(model, batch)
    visual = None
    if features is not None:
        bank = jnp.broadcast_to(features, (len(batch["ids"]), *features.shape[1:]))
        visual = VisualBank(bank, batch["visual_index"])
    rows = RowLayout(batch["segment_ids"])
    hidden, kv = model.text(batch["ids"], batch["positions"], layout=rows, visual=visual)
    return hidden, kv, features


def loss(
    model: VisionLanguageModel, batch: dict[str, Any]
) -> tuple[jax.Array, tuple[jax.Array, Outputs]]:
    """Mean cross-entropy of tokens that follow a token; the logits; the results of `forward`."""
    outputs = forward(model, batch)
    hidden = outputs[0]
    both = (batch["segment_ids"][:, 1:] * batch["segment_ids"][:, :-1]).astype(jnp.float32)
    logprobs = model.text.token_logprobs(hidden[:, :-1], batch["ids"][:, 1:], 1.0)
    return -(logprobs * both).sum() / both.sum(), (model.text.logits(hidden), outputs)


@nnx.jit
def loss_and_gradients(
    model: VisionLanguageModel, batch: dict[str, Any]
) -> tuple[tuple[jax.Array, tuple[jax.Array, Outputs]], VisionLanguageModel]:
    return nnx.value_and_grad(loss, has_aux=True)(model, batch)


@nnx.jit
def greedy(model: VisionLanguageModel, batch: dict[str, Any]) -> jax.Array:
    """NEW_TOKENS greedy tokens, decoded one by one with a cache. Rows are padded on the left."""
    valid, c = batch["segment_ids"], model.config.text
    b, t = valid.shape
    columns = -(-(t + NEW_TOKENS) // PAGE)
    shape = (c.num_hidden_layers, b * columns, 2, c.num_key_value_heads, PAGE, c.head_dim)
    pages = jnp.full(shape, jnp.nan)
    tables = jnp.arange(b * columns).reshape(b, columns)
    features = features_of(model, batch)
    visual = None
    if features is not None:
        visual = VisualBank(features, batch["visual_index"].reshape(1, -1))
    offsets = jnp.where(valid, jnp.cumsum(valid, axis=1) - 1, -1)
    prompt = PagedCache(pages, tables, offsets)
    ids, positions = batch["ids"].reshape(-1), batch["positions"].reshape(3, -1)
    hidden, prompt = model.text.extend(ids, positions, prompt, visual)

    def step(carry, i):
        token, cache = carry
        positions = jnp.broadcast_to(batch["next"] + i, (3, b))
        cache = cache._replace(offsets=offsets[:, -1:] + 1 + i)
        hidden, cache = model.text.extend(token, positions, cache)
        return (jnp.argmax(model.text.logits(hidden), -1), cache), token

    first = jnp.argmax(model.text.logits(hidden.reshape(b, t, -1)[:, -1]), -1)
    start = first, prompt._replace(offsets=offsets[:, -1:])
    return jax.lax.scan(step, start, jnp.arange(NEW_TOKENS))[1].T


def results(folder: Path, sample: Sample, prompts: Sample) -> Results:
    """Results of the model in `folder` on `sample`.

    Tokens are generated after `prompts`, the same rows padded on the left.
    """
    model = hf.load(folder)
    batch = batch_of(sample, model.config)
    (_, (logits, _)), gradients = loss_and_gradients(model, batch)
    with tempfile.TemporaryDirectory() as temporary:
        graph, _ = nnx.split(model)
        hf.save(nnx.merge(graph, gradients), Path(temporary) / "gradients")
        named = {
            name: x
            for file in Path(temporary).rglob("*.safetensors")
            for name, x in load_file(file).items()
        }
    tokens = greedy(model, batch_of(prompts, model.config))
    return Results(batch["positions"], np.asarray(logits), np.asarray(tokens), named)
