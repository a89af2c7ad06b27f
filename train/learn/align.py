"""Alignment: teaches a fresh vision tower to see, from captions of single frames.

Published models are pretrained, so only the tiny recipes need this. Training draws each visual
vector towards the embeddings of the words that describe its frame. The tower and the word embedding
are trained; afterwards the tower is frozen.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int, UInt8

from models.model import VisionLanguageModel
from models.vision import PatchLayout, frame_layout, patchify
from paravt_jax.data import video
from paravt_jax.data.frames import VideoError, shown
from paravt_jax.data.sizes import FrameRules
from paravt_jax.method.records import Caption
from paravt_jax.method.tokenizer import Vocabulary
from train.durable.phase import Phase
from train.learn.optimizer import require_counts
from train.learn.update import init_state


@dataclasses.dataclass(frozen=True)
class AlignSettings:
    """Trains a fresh vision tower to name what single frames show."""

    steps: int = 250
    """Number of updates."""
    batch: int = 512
    """Frames per update."""
    learning_rate: float = 3e-3
    """Peak learning rate of AdamW, with cosine decay to zero."""
    save_every: int = 100
    """Steps between checkpoints."""

    def __post_init__(self):
        require_counts("align", steps=self.steps, batch=self.batch, save_every=self.save_every)
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(
                f"align.learning_rate: {self.learning_rate}; give a finite number above 0"
            )


def align(
    model: VisionLanguageModel,
    captions: Sequence[Caption],
    vocabulary: Vocabulary,
    root: Path,
    rules: FrameRules,
    settings: AlignSettings,
    seed: int,
    phase: Phase,
    unreadable: dict[str, str],
) -> None:
    """Train `model.vision` and the word embedding in place, from the step where `phase` stopped.

    No video is opened if no step is left.

    Args:
        model: Changed in place.
        captions: Frames, each with words that describe it.
        vocabulary: Has each of these words as a single token.
        root: Directory of the videos.
        rules: How their frames are resized.
        settings: Settings of the phase.
        seed: Seed of the order of frames.
        phase: Restores and saves; gets the metrics `loss` and `accuracy` of each step.
        unreadable: Videos that cannot be decoded are added, each with the reason. Their captions
            are left out.

    Raises:
        ValueError: A word is not a single token, or the videos differ in size.
    """
    schedule = optax.cosine_decay_schedule(settings.learning_rate, settings.steps)
    optimizer = optax.adamw(schedule, weight_decay=0.0)
    first_state = init_state(nnx.state((model.vision, model.text.embedding)), optimizer).optimizer
    saved, rng_state = phase.resume(_as_saved(model, first_state))
    nnx.update(model.vision, saved["vision"])
    nnx.update(model.text, saved["text"])
    if not phase.left:
        return
    pixels, words, errors = _load(captions, vocabulary, root, rules)
    unreadable |= errors
    graph, weights = nnx.split((model.vision, model.text.embedding))
    vision = model.config.vision
    grid = (pixels.shape[1] // vision.patch_size, pixels.shape[2] // vision.patch_size)
    update = _make_update(graph, optimizer, frame_layout(grid, vision))
    state = saved["optimizer"]
    # Checkpoints store the generator's state, so a resumed run draws the same frames as an
    # uninterrupted one.
    rng = np.random.default_rng(seed)
    if rng_state is not None:
        rng.bit_generator.state = rng_state
    for step in phase.each():
        start = time.perf_counter()
        with jax.profiler.TraceAnnotation("data"):
            chosen = rng.integers(len(pixels), size=settings.batch)
            patches = patchify(pixels[chosen], vision)
        with jax.profiler.TraceAnnotation("update"):
            weights, state, loss, accuracy = update(weights, state, patches, words[chosen])
            nnx.update((model.vision, model.text.embedding), weights)
            metrics = {"loss": float(loss), "accuracy": float(accuracy)}
        metrics["time/step"] = time.perf_counter() - start
        cursor = dict(rng.bit_generator.state)
        phase.done(step, metrics, _as_saved(model, state), cursor)


def _as_saved(model: VisionLanguageModel, optimizer_state: Any) -> dict[str, Any]:
    """The state that a checkpoint of this phase stores."""
    return {
        "vision": nnx.state(model.vision),
        "text": nnx.state(model.text),
        "optimizer": optimizer_state,
    }


def _make_update(
    graph: nnx.GraphDef, optimizer: optax.GradientTransformation, layout: PatchLayout
) -> Callable[..., Any]:
    """The jitted `f(weights, state, patches, words) -> (weights, state, loss, accuracy)`."""

    def loss(
        weights: Any, patches: Float[Array, "m p i"], words: Int[Array, "m w"]
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        tower, embedding = nnx.merge(graph, weights)
        # [m, levels, d]: the mean over a frame's tokens. Each level has to name the frame alone.
        vectors = tower(patches, layout).mean(1)
        # Normalised like the decoder's states before its head.
        size = jnp.sqrt((vectors**2).mean(-1, keepdims=True) + 1e-12)
        logits = jnp.einsum("mcd,vd->mcv", vectors / size, embedding[...])
        # Visual vectors should be as large as word embeddings: in the decoder, much smaller vectors
        # would be lost beside larger ones.
        word_size = jnp.sqrt((embedding[...] ** 2).mean())
        size_loss = ((size - word_size) ** 2).mean()
        # Frames with fewer words are padded with -1, which equals no token id.
        wanted = (words[..., None] == jnp.arange(logits.shape[-1])[None, None, :]).any(1)
        target = wanted / wanted.sum(-1, keepdims=True)
        cross_entropy = -(target[:, None] * jax.nn.log_softmax(logits)).sum(-1).mean()
        # A frame is right if its words, at most two, are the two likeliest of level 0.
        likeliest = jax.lax.top_k(logits[:, 0], 2)[1]
        named = (likeliest[:, :, None] == words[:, None]).any(1)
        right = (named | (words < 0)).all(-1)
        return cross_entropy + size_loss, right.mean()

    @jax.jit
    def align_update(
        weights: Any, state: Any, patches: Array, words: Array
    ) -> tuple[Any, Any, Array, Array]:
        (value, accuracy), grads = jax.value_and_grad(loss, has_aux=True)(weights, patches, words)
        changes, state = optimizer.update(grads, state, weights)
        return optax.apply_updates(weights, changes), state, value, accuracy

    return align_update


def _load(
    captions: Sequence[Caption], vocabulary: Vocabulary, root: Path, rules: FrameRules
) -> tuple[UInt8[np.ndarray, "m h w 3"], Int[np.ndarray, "m k"], dict[str, str]]:
    """The captions' frames, the token ids of their words, and the videos that cannot be decoded.

    Ids are padded with -1 on the right.
    """
    unreadable: dict[str, str] = {}
    by_video: dict[str, list[Caption]] = {}
    for caption in captions:
        by_video.setdefault(caption.video, []).append(caption)
    pixels = []
    words = []
    for name, group in by_video.items():
        path = root / name
        try:
            times = video.probe(path).times
            numbers = np.searchsorted(times, [caption.time for caption in group])
            frames = [shown(frame, rules) for frame in video.read(path, numbers)]
            pixels.append(np.stack(frames))
        except VideoError as error:
            unreadable[name] = error.reason
            continue
        words += [_word_ids(caption, vocabulary) for caption in group]
    sizes = {frames.shape[1:3] for frames in pixels}
    if len(sizes) != 1:
        raise ValueError(f"captions: frames of sizes {sorted(sizes)}; alignment needs one size")
    width = max(map(len, words))
    padded = [ids + [-1] * (width - len(ids)) for ids in words]
    return np.concatenate(pixels), np.array(padded, np.int32), unreadable


def _word_ids(caption: Caption, vocabulary: Vocabulary) -> list[int]:
    ids = [vocabulary.encode(f" {word}") for word in caption.words]
    if any(len(tokens) != 1 for tokens in ids):
        raise ValueError(
            f"captions: {caption.video} has words that are not single tokens: {caption.words}; "
            "add them to the vocabulary's pieces"
        )
    return [int(tokens[0]) for tokens in ids]
