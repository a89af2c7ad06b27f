"""Teaching a fresh vision tower to see: each visual vector is drawn to the embeddings of the words for what its frame shows.

Stands for the pretraining that a published model has behind it, and only the tiny recipe needs it. Trains the tower and the
embedding of words; afterwards the tower is frozen. Invariant: nothing but captions is looked at.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from models.patches import patchify
from models.qwen3_vl.model import Qwen3VL
from models.qwen3_vl.vision import PatchLayout, frame_layout
from paravt_jax.data import video
from paravt_jax.data.frames import VideoError
from paravt_jax.method.records import Caption
from paravt_jax.method.tokenizer import Vocabulary
from train.durable.phase import Phase
from train.learn.optimizer import require_counts
from train.learn.step import init_state


@dataclasses.dataclass(frozen=True)
class AlignSettings:
    """Trains a fresh vision tower to name what single frames show."""

    steps: int = 250
    """Updates."""
    batch: int = 512
    """Frames per update."""
    learning_rate: float = 3e-3
    """Peak learning rate of AdamW; cosine decay to zero."""
    save_every: int = 100
    """Steps between checkpoints."""

    def __post_init__(self):
        require_counts("align", steps=self.steps, batch=self.batch, save_every=self.save_every)
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(
                f"align.learning_rate: {self.learning_rate}; give a finite number above 0"
            )


def align(
    model: Qwen3VL,
    captions: Sequence[Caption],
    vocabulary: Vocabulary,
    root: Path,
    settings: AlignSettings,
    seed: int,
    phase: Phase,
    unreadable: dict[str, str],
) -> None:
    """Train `model.vision` and the word embedding in place, from the step that `phase` was left at; it is told of every update.

    Adds to `unreadable` the videos that could not be decoded, and why: their captions are left out. Where nothing is left to do, none
    is looked at. Raises ValueError for a caption whose words are not single tokens, or videos of more than one size.
    """
    optimizer = optax.adamw(
        optax.cosine_decay_schedule(settings.learning_rate, settings.steps), weight_decay=0.0
    )
    start = init_state(nnx.state((model.vision, model.text.embedding)), optimizer).optimizer
    saved, drawn = phase.resume(
        {"vision": nnx.state(model.vision), "text": nnx.state(model.text), "optimizer": start}
    )
    nnx.update(model.vision, saved["vision"])
    nnx.update(model.text, saved["text"])
    if not phase.left:
        return
    pixels, words, bad = _load(captions, vocabulary, root)
    unreadable |= bad
    graph, weights = nnx.split((model.vision, model.text.embedding))
    patch = model.config.vision.patch_size
    layout = frame_layout((pixels.shape[1] // patch, pixels.shape[2] // patch), model.config.vision)
    update = _make_update(graph, optimizer, layout)
    state, rng = saved["optimizer"], np.random.default_rng(seed)
    if drawn is not None:
        rng.bit_generator.state = drawn
    for step in phase.left:
        chosen = rng.integers(len(pixels), size=settings.batch)
        patches = patchify(pixels[chosen], patch, model.config.vision.spatial_merge_size)
        weights, state, value, right = update(weights, state, patches, words[chosen])
        nnx.update((model.vision, model.text.embedding), weights)
        figures = {"loss": float(value), "accuracy": float(right)}
        kept = {
            "vision": nnx.state(model.vision),
            "text": nnx.state(model.text),
            "optimizer": state,
        }
        phase.done(step, figures, kept, dict(rng.bit_generator.state), ("loss", "accuracy"))


def _make_update(
    graph: nnx.GraphDef, optimizer: optax.GradientTransformation, layout: PatchLayout
) -> Callable[..., Any]:
    """The jitted update `f(weights, optimizer state, patches, words) -> (weights, optimizer state, loss, accuracy)`."""

    def loss(
        weights: Any, patches: Float[Array, "m p i"], words: Int[Array, "m w"]
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        tower, embedding = nnx.merge(graph, weights)
        vectors = tower(patches, layout).mean(
            1
        )  # the frame's tokens: every level alone has to name what is on it
        size = jnp.sqrt((vectors**2).mean(-1, keepdims=True) + 1e-12)
        logits = jnp.einsum(
            "mcd,vd->mcv", vectors / size, embedding[...]
        )  # normed, as the decoder's head reads its states
        # Vectors as large as words: among words of another size, neither would hear the other in the decoder.
        unequal = ((size - jnp.sqrt((embedding[...] ** 2).mean())) ** 2).mean()
        wanted = (words[..., None] == jnp.arange(logits.shape[-1])).any(1)
        share = wanted / wanted.sum(-1, keepdims=True)
        named = (jax.lax.top_k(logits[:, 0], 2)[1][:, :, None] == words[:, None]).any(1)
        right = (named | (words < 0)).all(-1)
        return -(share[:, None] * jax.nn.log_softmax(logits)).sum(-1).mean() + unequal, right.mean()

    @jax.jit
    def update(
        weights: Any, state: Any, patches: Array, words: Array
    ) -> tuple[Any, Any, Array, Array]:
        (value, right), grads = jax.value_and_grad(loss, has_aux=True)(weights, patches, words)
        changes, state = optimizer.update(grads, state, weights)
        return optax.apply_updates(weights, changes), state, value, right

    return update


def _load(
    captions: Sequence[Caption], vocabulary: Vocabulary, root: Path
) -> tuple[np.ndarray, np.ndarray, dict[str, str]]:
    """The captions' frames, uint8 [m, h, w, 3], the token ids of their words, int32 [m, w], -1 where there are fewer, and bad videos."""
    unreadable: dict[str, str] = {}
    by_video: dict[str, list[Caption]] = {}
    for caption in captions:
        by_video.setdefault(caption.video, []).append(caption)
    pixels, words = [], []
    for name, group in by_video.items():
        try:
            info = video.probe(root / name)
            pixels.append(
                video.read(root / name, np.searchsorted(info.times, [c.time for c in group]))
            )
        except VideoError as error:
            unreadable[name] = error.reason  # damage inside a file that opened
            continue
        words += [_word_ids(c, vocabulary) for c in group]
    if len({p.shape[1:] for p in pixels}) != 1:
        raise ValueError(
            f"captions: frames of the sizes {sorted({p.shape[1:3] for p in pixels})}; alignment needs one size"
        )
    width = max(map(len, words))
    return (
        np.concatenate(pixels),
        np.array([w + [-1] * (width - len(w)) for w in words], np.int32),
        unreadable,
    )


def _word_ids(caption: Caption, vocabulary: Vocabulary) -> list[int]:
    ids = [vocabulary.encode(f" {word}") for word in caption.words]
    if any(len(i) != 1 for i in ids):
        raise ValueError(
            f"captions: the words {caption.words} of {caption.video} are not single tokens; add them to the vocabulary's pieces"
        )
    return [int(i[0]) for i in ids]
