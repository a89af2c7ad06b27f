"""The cold start on published demonstrations: supervised steps on packed rows.

Owns the settings, the batches and the loss of SFT where conversations are packed;
`train.learn.sft` is that of the small world. Invariants: the
loss is one mean over all tokens with loss of a step, wherever its rows lie; a conversation has the log-probs in a row that it has alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx, struct
from jax.sharding import Mesh
from jaxtyping import Array, Float

from models.features import FrameFeatures
from models.qwen3_vl import remat
from models.qwen3_vl.remat import Remat
from models.qwen3_vl.rope import visual_index
from models.qwen3_vl.text import TextDecoder
from paravt_jax.data.frames import FrameReader
from paravt_jax.method.grpo import masked_mean
from paravt_jax.method.protocol import Protocol
from train.durable import hosts
from train.learn.optimizer import OptimizerSettings, make_optimizer, require_counts
from train.learn.packed_batch import Packed, PackedShape, build_packed, render_rows
from train.learn.placement import cut, fitted_rows, own_rows, place
from train.learn.step import Loss, Program, TrainState, init_state, make_update
from train.published_data import PublishedData, row_stream


@dataclasses.dataclass(frozen=True)
class PackedSFTSettings:
    """Updates on packed rows of published conversations, and how often to save."""

    steps: int
    """Updates."""
    rows: int
    """Packed rows per step, each of `data.row_tokens` tokens."""
    optimizer: OptimizerSettings
    save_every: int = 100
    """Steps between checkpoints."""
    microbatches: int = 1
    """Upper bound on gradient-accumulation steps; fewer where a device would get less than a row."""
    remat: Remat = "none"
    """Activation checkpointing: what of each layer is kept for the backward pass (models.qwen3_vl.remat)."""
    logprob_chunk: int | None = None
    """Tokens whose logits over the vocabulary exist at a time; None: all of them."""

    def __post_init__(self):
        require_counts(
            "sft",
            steps=self.steps,
            rows=self.rows,
            save_every=self.save_every,
            microbatches=self.microbatches,
        )
        remat.check("sft.remat", self.remat)

    def shape(self, row_tokens: int) -> PackedShape:
        """The shape of a step's batch; all tokens of a row may be visual."""
        return PackedShape(self.rows, row_tokens, row_tokens)


@struct.dataclass
class PackedBatch:
    """What an update reads: packed rows, and how many tokens the whole step trains on."""

    packed: Packed
    tokens: Float[Array, ""]

    @classmethod
    def of(cls, packed: Packed) -> PackedBatch:
        return cls(packed, jnp.asarray(packed.sampled.sum(), jnp.float32))


def split(batch: PackedBatch, parts: int) -> PackedBatch:
    """The batch in `parts` micro-batches of whole rows: every array gets them as its first axis."""
    return PackedBatch(cut(batch.packed, parts), jnp.broadcast_to(batch.tokens, (parts,)))


def packed_logprobs(
    text: TextDecoder,
    batch: Packed,
    image_token_id: int,
    remat: Remat = "none",
    chunk: int | None = None,
) -> Float[Array, "b t"]:
    """Log-prob of each token given those of its conversation before it; of no meaning for a conversation's first, which nobody sampled."""
    x = jax.tree.map(jnp.asarray, batch)
    index = visual_index(x.ids, image_token_id)
    hidden, _ = text(
        x.ids, x.positions, segment_ids=x.segments, visual=x.visual, visual_index=index, remat=remat
    )
    return jnp.pad(text.token_logprobs(hidden[:, :-1], x.ids[:, 1:], 1.0, chunk), ((0, 0), (1, 0)))


def packed_loss(image_token_id: int, remat: Remat = "none", chunk: int | None = None) -> Loss:
    """Mean negative log-likelihood of the whole step's tokens with loss, of a `PackedBatch` or of its micro-batches; also the number of
    these tokens and of conversations."""

    def loss(
        text: TextDecoder, batch: PackedBatch
    ) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        sampled = jnp.asarray(batch.packed.sampled)
        logprobs = packed_logprobs(text, batch.packed, image_token_id, remat, chunk)
        figures = {
            "tokens": sampled.sum(),
            "conversations": jnp.asarray(batch.packed.segments).max(1).sum(),
        }
        return -masked_mean(logprobs, sampled, batch.tokens), figures

    return loss


def make_packed_update(
    graph: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    image_token_id: int,
    settings: PackedSFTSettings,
    parts: int,
    state: TrainState,
) -> Program:
    """The update of the packed cold start in `parts` micro-batches,
    `f(state, PackedBatch) -> (state, metrics)`."""
    cut = (lambda batch: split(batch, parts)) if parts > 1 else None
    return make_update(
        graph,
        optimizer,
        packed_loss(image_token_id, settings.remat, settings.logprob_chunk),
        state,
        cut,
    )


class PackedCourse:
    """The steps of a cold start: endless batches of packed rows, as an update takes them, in an order that goes on exactly; frames of the
    next ones are read meanwhile.

    Files that could not be read are added to `features.unreadable`. Raises ValueError where no conversation was prepared.
    """

    def __init__(
        self,
        settings: PackedSFTSettings,
        shape: PackedShape,
        data: PublishedData,
        reader: FrameReader,
        seed: int,
        protocol: Protocol,
        features: FrameFeatures,
        mesh: Mesh,
    ):
        if not data.packing.rows:
            raise ValueError(
                "data.annotations: the prepared set has no conversation to train on; prepare sft rows"
            )
        self._settings, self._data, self._protocol, self._features, self._mesh = (
            settings,
            data,
            protocol,
            features,
            mesh,
        )
        self._rows = row_stream(data, reader, seed, settings.rows)
        self._shape, self._parts = fitted_rows(shape, settings.microbatches, mesh)

    def start(self, graph: nnx.GraphDef, weights: Any) -> tuple[TrainState, Program]:
        """The state before the first step, and the jitted update `f(state, PackedBatch) -> (state, metrics)`."""
        optimizer = make_optimizer(self._settings.optimizer, self._settings.steps)
        state = init_state(weights, optimizer)
        return state, make_packed_update(
            graph,
            optimizer,
            self._features.config.image_token_id,
            self._settings,
            self._parts,
            state,
        )

    def __next__(self) -> tuple[PackedBatch, tuple[Packed, ...], dict[str, float]]:
        """What the update takes, the arrays whose tokens count, and how many conversations are missing for a file that could not be
        read. A process renders and lays out its share of a step's rows."""
        rows = next(self._rows)
        mine = [self._data.row(numbers) for numbers in rows[hosts.share_of(len(rows))]]
        rendered, missing = render_rows(mine, self._protocol, self._features)
        for error in missing.values():
            self._features.unreadable[error.path.removeprefix(f"{self._features.root}/")] = (
                error.reason
            )
        own = build_packed(rendered, self._features, own_rows(self._shape))
        counts = hosts.gather((len(missing), int(own.sampled.sum())))
        if not any(tokens for _, tokens in counts):
            raise ValueError(
                f"sft: a step has no conversation whose files can be read; check the data root {self._data.root}"
            )
        packed: Packed = place(own, self._mesh)
        return (
            PackedBatch.of(packed),
            (packed,),
            {"missing": float(sum(count for count, _ in counts))},
        )

    def get_state(self) -> dict[str, Any]:
        return self._rows.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        self._rows.set_state(state)
