"""Alignment: teaches a fresh vision tower to see, from captions of single frames.

Published models are pretrained, so only the tiny recipes need this. Training draws each visual
vector towards the embeddings of the words that describe its frame. The tower and the word embedding
are trained; afterwards the tower is frozen.
"""

from __future__ import annotations

import dataclasses
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
from models.vision import patchify
from paravt_jax.checks import require_above, require_at_least
from paravt_jax.data import video
from paravt_jax.data.frames import PixelRules, VideoError
from paravt_jax.method.records import Caption
from paravt_jax.method.tokenizer import Vocabulary
from train.durable.saver import Saver
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

    def __post_init__(self):
        require_at_least("align", self, 1, "steps", "batch")
        require_above("align", self, 0, "learning_rate")


@dataclasses.dataclass(frozen=True)
class CaptionedFrames:
    """Frames of videos, each with words that describe it."""

    captions: Sequence[Caption]
    vocabulary: Vocabulary
    """Has each of these words as a single token."""
    root: Path
    """Directory of the videos."""
    rules: PixelRules
    """How frames are resized."""
    unreadable: dict[str, str] = dataclasses.field(default_factory=dict)
    """Videos that `load` could not decode, each with the reason. Their captions are left out."""

    def load(self) -> tuple[UInt8[np.ndarray, "m h w 3"], Int[np.ndarray, "m k"]]:
        """Decode the frames.

        Returns:
            The pixels, and the token ids of each frame's words, padded with -1 on the right.

        Raises:
            ValueError: A word is not a single token, or the videos differ in size.
        """
        by_video: dict[str, list[Caption]] = {}
        for caption in self.captions:
            by_video.setdefault(caption.video, []).append(caption)
        pixels = []
        words = []
        for name, group in by_video.items():
            path = self.root / name
            try:
                times = video.probe(path).times
                numbers = np.searchsorted(times, [caption.time for caption in group])
                pixels.append(video.read(path, numbers, self.rules))
            except VideoError as error:
                self.unreadable[name] = error.reason
                continue
            # Each word is a single token.
            words += [
                [int(self.vocabulary.encode(f" {word}").item()) for word in caption.words]
                for caption in group
            ]
        sizes = {frames.shape[1:3] for frames in pixels}
        if len(sizes) != 1:
            raise ValueError(f"captions: frames of sizes {sorted(sizes)}; alignment needs one size")
        width = max(map(len, words))
        padded = [ids + [-1] * (width - len(ids)) for ids in words]
        return np.concatenate(pixels), np.array(padded, np.int32)


def align(
    model: VisionLanguageModel,
    captioned: CaptionedFrames,
    settings: AlignSettings,
    seed: int,
    saver: Saver,
) -> None:
    """Train `model.vision` and the word embedding in place, from the newest checkpoint if any.

    No video is opened if no step is left.

    Args:
        model: Changed in place.
        captioned: What it learns from.
        settings: Settings of the phase.
        seed: Seed of the order of frames.
        saver: Restores and saves; gets the metrics `loss` and `accuracy` of each step.

    Raises:
        ValueError: See `CaptionedFrames.load`.
    """
    schedule = optax.cosine_decay_schedule(settings.learning_rate, settings.steps)
    optimizer = optax.adamw(schedule, weight_decay=0.0)
    first_state = init_state(nnx.state((model.vision, model.text.embedding)), optimizer).optimizer
    saved, rng_state = saver.restore(_as_saved(model, first_state))
    nnx.update(model.vision, saved["vision"])
    nnx.update(model.text, saved["text"])
    if not saver.left:
        return
    pixels, words = captioned.load()
    graph, weights = nnx.split((model.vision, model.text.embedding))
    vision = model.config.vision
    grid = (pixels.shape[1] // vision.patch_size, pixels.shape[2] // vision.patch_size)
    update = _make_update(graph, optimizer, np.tile(grid, (settings.batch, 1)))
    state = saved["optimizer"]
    # Checkpoints store the generator's state, so a resumed run draws the same frames as an
    # uninterrupted one.
    rng = np.random.default_rng(seed)
    if rng_state is not None:
        rng.bit_generator.state = rng_state
    for step in saver.steps():
        begin = time.perf_counter()
        with jax.profiler.TraceAnnotation("data"):
            chosen = rng.integers(len(pixels), size=settings.batch)
            patches = patchify(pixels[chosen], vision)
        with jax.profiler.TraceAnnotation("update"):
            weights, state, loss, accuracy = update(weights, state, patches, words[chosen])
            nnx.update((model.vision, model.text.embedding), weights)
            metrics = {"loss": float(loss), "accuracy": float(accuracy)}
        metrics["time/step"] = time.perf_counter() - begin
        saver.done(step, _as_saved(model, state), metrics, dict(rng.bit_generator.state))


def _as_saved(model: VisionLanguageModel, optimizer_state: Any) -> dict[str, Any]:
    """Return the state that a checkpoint of this phase stores."""
    return {
        "vision": nnx.state(model.vision),
        "text": nnx.state(model.text),
        "optimizer": optimizer_state,
    }


def _make_update(
    graph: nnx.GraphDef, optimizer: optax.GradientTransformation, grids: Int[np.ndarray, "m 2"]
) -> Callable[..., Any]:
    """Return the jitted `f(weights, state, patches, words) -> (weights, state, loss, accuracy)`."""

    def loss(
        weights: Any, patches: Float[Array, "m p i"], words: Int[Array, "m w"]
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        tower, embedding = nnx.merge(graph, weights)
        # [m, levels, d]: the mean over a frame's tokens. Each level has to name the frame alone.
        vectors = tower(patches, grids).mean(1)
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
