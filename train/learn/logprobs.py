"""Log-probs of the tokens of packed rows, with gradients or without."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, UInt8

from models.remat import Remat
from models.sharding import ROWS, MeshProgram, constrain
from models.text import TextDecoder
from models.trained import Skeleton
from train.learn.batch import Microbatch
from train.learn.placement import in_replicas


class Scores(NamedTuple):
    """What the trainer computes for the r rollouts of a step, of u tokens each."""

    logprobs: Float[Array, "r u"]
    """Log-prob of each token, given all tokens before it; 0 for a rollout's first token, which is
    the last one of its prompt, and for tokens that are not in this micro-batch."""
    routes: UInt8[Array, "r u l"] | None
    """Marks of the experts that computed each log-prob, by layer (`models.experts`), and anything
    where there is no log-prob; None without experts."""


def score_rollouts(
    text: TextDecoder,
    visual: Float[Array, "*m c d"],
    batch: Microbatch,
    temperature: float,
    remat: Remat = "none",
    chunk: int | None = None,
) -> Scores:
    """Score each token of the rollouts in a micro-batch.

    Args:
        text: The decoder.
        visual: The step's bank of visual vectors; its leading axes count slots.
        batch: Packed rows, and the places of the rollouts' tokens in them.
        temperature: The temperature at which the rollouts were sampled.
        remat: Activation checkpointing policy.
        chunk: Tokens per piece of a row whose logits exist at a time; None: all.
    """
    # Vectors come split by slot, but any token may need any slot. Split by their width instead:
    # every device then looks up its part of all vectors.
    bank = constrain(visual.reshape(1, -1, *visual.shape[-2:]), None, None, None, ROWS)
    hidden, _, marks = text.forward(
        batch.ids,
        batch.positions,
        segment_ids=batch.segments,
        starts=batch.starts,
        shared=batch.shared,
        visual=bank,
        visual_index=batch.visual_index,
        pieces=batch.pieces,
        remat=remat,
    )
    # The output at place i predicts the token at place i + 1, which may be in the next piece.
    # What follows a segment's last token is another segment's first: its log-prob is not used.
    following = jnp.roll(batch.ids.reshape(-1), -1).reshape(batch.ids.shape)
    predicted = text.token_logprobs(hidden, following, temperature, chunk).reshape(-1)
    places = jnp.maximum(batch.index - 1, 0)
    first = jnp.arange(batch.index.shape[1])[None] == 0
    logprobs = jnp.where((batch.index < 0) | first, 0.0, predicted[places])
    routes = None
    if marks is not None:
        # [l, b, t] -> [r, u, l]
        routes = jnp.moveaxis(marks.reshape(len(marks), -1)[:, places], 0, -1)
    return Scores(logprobs, routes)


def rollout_logprobs(
    text: TextDecoder,
    visual: Float[Array, "*m c d"],
    batch: Microbatch,
    temperature: float,
    remat: Remat = "none",
    chunk: int | None = None,
) -> Float[Array, "r u"]:
    """Return the log-probs of `score_rollouts`, which has the same arguments."""
    return score_rollouts(text, visual, batch, temperature, remat, chunk).logprobs


def make_logprobs(
    skeleton: Skeleton, temperature: float, mesh: Mesh, chunk: int | None = None
) -> MeshProgram:
    """Compile the log-probs of a micro-batch under given weights, without gradients.

    Args:
        skeleton: The model without its trained weights.
        temperature: See `score_rollouts`.
        mesh: The mesh of weights and batch.
        chunk: See `score_rollouts`.

    Returns:
        `f(weights, visual, Microbatch) -> float32[r, u]`.
    """

    def score(arrays: Any, _: None, batch: Any, number: Any) -> tuple[None, dict[str, jax.Array]]:
        frozen, weights, visual = arrays
        (rows,) = batch
        text = skeleton.decoder(weights, frozen)
        return None, {"all": rollout_logprobs(text, visual, rows, temperature, chunk=chunk)}

    def logprobs(frozen: Any, weights: Any, visual: jax.Array, batch: Microbatch) -> jax.Array:
        # Added over replicas: a token is in one of them, and 0 in all others.
        return in_replicas(score, mesh)((frozen, weights, visual), None, (batch,))[1]["all"]

    jitted = jax.jit(logprobs, out_shardings=NamedSharding(mesh, PartitionSpec()))
    return MeshProgram(jitted, mesh, (skeleton.frozen,))
