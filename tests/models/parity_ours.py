"""This model's results on the cases of `parity`.

The whole model runs on a batch. Layers run inside a scan, where no hook reaches them, so each layer
is also called alone, on the input that it has in transformers.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file

from models.attention import DenseCache, RowLayout, attend
from models.config import ModelConfig
from models.model import VisionLanguageModel
from models.qwen3_vl.vision import Qwen3VLVisionTower, VisionBlock
from models.rope import (
    mrope_angles,
    mrope_positions,
    next_position,
    vision_angles,
    visual_index,
)
from models.text import KV, DecoderLayer, VisualBank
from models.weights import hf
from tests.models.packed_frames import packed_layout
from tests.models.parity import IMAGE, NEW_TOKENS, VIDEO, Results, Sample, is_text

Outputs = tuple[jax.Array, KV, jax.Array | None]


def batch_of(sample: Sample, config: ModelConfig) -> dict[str, Any]:
    """Inputs of our model. All patches are in one padded row; all rows share one visual bank."""
    positions = np.zeros((3, *sample.ids.shape), np.int32)
    after = []
    for row, valid in enumerate(sample.valid):
        grids = [tuple(map(int, grid)) for number, _, *grid in sample.items if number == row]
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
    merged = config.vision.spatial_merge_size**2
    size = (len(sample.patches) // (4 * merged) + 1) * 4 * merged
    grids = sample.grids(IMAGE) + sample.grids(VIDEO)
    # The bank has the images of all rows first, then the videos.
    images = visual_index(sample.ids.ravel(), IMAGE)
    videos = visual_index(sample.ids.ravel(), VIDEO)
    index = np.where(videos < 0, images, videos + images.max() + 1).reshape(sample.ids.shape)
    patches = np.pad(sample.patches, ((0, size - len(sample.patches)), (0, 0)))[None]
    return batch | {
        "visual_index": index,
        "patches": patches,
        "layout": packed_layout(grids, size, config.vision),
    }


def forward(model: VisionLanguageModel, batch: dict[str, Any]) -> Outputs:
    """Hidden states, keys and values, and the features of all patches."""
    features = None
    visual = None
    if "patches" in batch:
        features = model.vision(batch["patches"], batch["layout"])
        visual = jnp.broadcast_to(features, (len(batch["ids"]), *features.shape[1:]))
    if visual is not None:
        visual = VisualBank(visual, batch["visual_index"])
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
def module_outputs(
    model: VisionLanguageModel, batch: dict[str, Any], outputs: Outputs, theirs: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """Outputs of modules, with the names of `parity_theirs`.

    Parts of layers are computed from the layers' inputs in transformers (`theirs`, in our layout).
    Keys, values, levels and the last norm come from `outputs`, a pass through our whole model.
    """
    segments = batch["segment_ids"]
    angles = mrope_angles(batch["positions"], model.config.text)
    hidden, kv, features = outputs

    def run(layer: DecoderLayer, x: jax.Array) -> jax.Array:
        return layer.finish(x, attend(*layer.project(x, angles), RowLayout(segments)))[0]

    def heads(layer: DecoderLayer, x: jax.Array) -> dict[str, jax.Array]:
        if layer.q_norm is None:
            return {}
        queries, keys, _ = layer.project(x, jnp.zeros_like(angles))
        return {"q_norm": queries, "k_norm": keys}

    mlp = "down" if model.config.text.experts is None else "experts"
    found = {
        "norm": hidden,
        "text turns": turns(angles),
        **layer_parts("layer", model.text.layers, run, heads, ("o", mlp), theirs),
    }
    for number, (k, v) in enumerate(zip(*kv, strict=True)):
        found |= {f"layer {number} keys": k, f"layer {number} values": v}
    if features is None:
        return found
    layout = batch["layout"]
    found |= {f"level {level}": features[:, :, level] for level in range(features.shape[2])}
    if not isinstance(model.vision, Qwen3VLVisionTower):
        return found | {"patches": model.vision.embed(batch["patches"], layout)}
    turned = vision_angles(layout.row, layout.column, model.config.vision)
    found |= {
        "patches": model.vision.patch(batch["patches"]),
        "positions": model.vision.position_embeddings(layout),
        "vision turns": turns(turned),
    }

    def see(block: VisionBlock, x: jax.Array) -> jax.Array:
        return block(x, turned, layout.frame)

    def qkv(block: VisionBlock, x: jax.Array) -> dict[str, jax.Array]:
        return {"qkv": block.qkv(block.norm1(x))}

    return found | layer_parts("block", model.vision.blocks, see, qkv, ("out", "down"), theirs)


def layer_parts(
    name: str,
    stack: nnx.Module,
    run: Callable[[Any, jax.Array], jax.Array],
    heads: Callable[[Any, jax.Array], dict[str, jax.Array]],
    last: tuple[str, str],
    theirs: Mapping[str, jax.Array],
) -> dict[str, jax.Array]:
    """For each layer: its heads, its output, and what attention and MLP add to the hidden state.

    Each half is measured on its own: the `last` weights of the other half are set to 0.
    """
    graph, state = nnx.split(stack)
    numbers = range(len(jax.tree.leaves(state)[0]))
    inputs = jnp.stack([theirs[f"{name} {number}"] for number in numbers])
    attended = jnp.stack([theirs[f"{name} {number} attention"] for number in numbers])

    def parts(state: nnx.State, x: jax.Array, middle: jax.Array) -> dict[str, jax.Array]:
        def without(weights: str) -> Any:
            # A copy of the tree.
            rest = jax.tree.map(lambda leaf: leaf, state)
            rest[weights] = jax.tree.map(jnp.zeros_like, state[weights])
            return nnx.merge(graph, rest)

        layer = nnx.merge(graph, state)
        attention, mlp = last
        halves = {
            "attention": run(without(mlp), x) - x,
            "mlp": run(without(attention), middle) - middle,
        }
        return {**heads(layer, x), "output": run(layer, x), **halves}

    # Not vmap, which products of unequal groups do not support.
    found = jax.lax.map(lambda layer: parts(*layer), (state, inputs, inputs + attended))
    return {f"{name} {number} {part}": x[number] for part, x in found.items() for number in numbers}


def turns(angles: jax.Array) -> jax.Array:
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1)


def layer_inputs(modules: Mapping[str, np.ndarray], batch: dict[str, Any]) -> dict[str, np.ndarray]:
    """Inputs of layers and blocks, and outputs of their attention, as [b, t, d] and [1, p, d].

    Padding is 0.
    """
    placed = {}
    for name in modules:
        if re.fullmatch(r"(layer|block) \d+( attention)?", name):
            real = (batch["segment_ids"] if is_text(name) else batch["layout"].frame) > 0
            placed[name] = np.zeros((*real.shape, modules[name].shape[-1]), np.float32)
            placed[name][real] = modules[name]
    return placed


@nnx.jit
def greedy(model: VisionLanguageModel, batch: dict[str, Any]) -> jax.Array:
    """NEW_TOKENS greedy tokens, decoded one by one with a cache. Rows are padded on the left."""
    hidden, kv, _ = forward(model, batch)
    prompt = DenseCache.prefilled(kv, batch["segment_ids"] == 1, NEW_TOKENS)

    def step(carry, i):
        token, cache = carry
        positions = jnp.broadcast_to(batch["next"] + i, (3, *token.shape))
        hidden, cache, _ = model.text.decode(token, positions, cache)
        cache = cache.advance(jnp.ones(token.shape, bool))
        return (jnp.argmax(model.text.logits(hidden), -1), cache), token

    first = jnp.argmax(model.text.logits(hidden[:, -1]), -1)
    return jax.lax.scan(step, (first, prompt), jnp.arange(NEW_TOKENS))[1].T


def results(
    folder: Path, sample: Sample, prompts: Sample, theirs: Mapping[str, np.ndarray]
) -> Results:
    """Results of the model in `folder`.

    The model runs on `sample`, its layers on the inputs in `theirs`. Tokens are generated after
    `prompts`, the same rows padded on the left.
    """
    model = hf.load(folder)
    batch = batch_of(sample, model.config)
    (_, (logits, outputs)), gradients = loss_and_gradients(model, batch)
    with tempfile.TemporaryDirectory() as temporary:
        graph, _ = nnx.split(model)
        hf.save(nnx.merge(graph, gradients), Path(temporary) / "gradients")
        named = {
            name: x
            for file in Path(temporary).rglob("*.safetensors")
            for name, x in load_file(file).items()
        }
    modules = {}
    for name, x in module_outputs(model, batch, outputs, layer_inputs(theirs, batch)).items():
        if is_text(name):
            rows = np.asarray(x)[sample.valid]
        else:
            # One row of patches or visual tokens, without the padding at its end.
            real = x.shape[1] * len(sample.patches) // batch["patches"].shape[1]
            rows = x[0, :real]
        modules[name] = np.asarray(rows.reshape(len(rows), -1))
    tokens = greedy(model, batch_of(prompts, model.config))
    return Results(batch["positions"], np.asarray(logits), np.asarray(tokens), modules, named)
