"""The cold start: supervised steps on conversations packed into rows.

The loss is one mean over all tokens with loss of a step, wherever its rows lie. A conversation has
the log-probs in a row that it has alone.
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
from paravt_jax.data.frame_reader import FrameReader
from paravt_jax.method.grpo import masked_mean
from paravt_jax.method.protocol import Protocol
from train.data import Data, pack_rows, row_stream
from train.durable import hosts
from train.learn.optimizer import OptimizerSettings, make_optimizer, require_counts
from train.learn.packed_batch import (
    PackedRows,
    PackedShape,
    build_packed,
    fitted_rows,
    own_rows,
    render_rows,
)
from train.learn.placement import cut, place
from train.learn.step import Loss, MeshProgram, TrainState, init_state, make_update


@dataclasses.dataclass(frozen=True)
class SFTSettings:
    """Updates on packed rows of conversations, and how often to save."""

    steps: int
    """Updates."""
    rows: int
    """Packed rows per step."""
    optimizer: OptimizerSettings
    row_tokens: int = 8192
    """Length of a packed row; a longer conversation is left out."""
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
            row_tokens=self.row_tokens,
            save_every=self.save_every,
            microbatches=self.microbatches,
        )
        remat.check("sft.remat", self.remat)
        if self.logprob_chunk is not None and self.logprob_chunk < 1:
            raise ValueError(
                f"sft.logprob_chunk: {self.logprob_chunk}; give a whole number of at least 1, or None for all at once"
            )

    @property
    def shape(self) -> PackedShape:
        """The shape of a step's batch; all tokens of a row may be visual."""
        return PackedShape(self.rows, self.row_tokens, self.row_tokens)


@struct.dataclass
class SFTBatch:
    """What an update reads: packed rows, and how many tokens the whole step trains on."""

    packed: PackedRows
    tokens: Float[Array, ""]

    @classmethod
    def of(cls, packed: PackedRows) -> SFTBatch:
        return cls(packed, jnp.asarray(packed.sampled.sum(), jnp.float32))


def split_sft_batch(batch: SFTBatch, parts: int) -> SFTBatch:
    """The batch in `parts` micro-batches of whole rows: every array gets them as its first axis."""
    return SFTBatch(cut(batch.packed, parts), jnp.broadcast_to(batch.tokens, (parts,)))


def packed_logprobs(
    text: TextDecoder,
    batch: PackedRows,
    image_token_id: int,
    remat: Remat = "none",
    chunk: int | None = None,
) -> Float[Array, "b t"]:
    """Log-prob of each token given those of its conversation before it; of no meaning for a
    conversation's first, which nobody sampled."""
    x = jax.tree.map(jnp.asarray, batch)
    index = visual_index(x.ids, image_token_id)
    hidden, _ = text(
        x.ids, x.positions, segment_ids=x.segments, visual=x.visual, visual_index=index, remat=remat
    )
    return jnp.pad(text.token_logprobs(hidden[:, :-1], x.ids[:, 1:], 1.0, chunk), ((0, 0), (1, 0)))


def sft_loss(image_token_id: int, remat: Remat = "none", chunk: int | None = None) -> Loss:
    """Mean negative log-likelihood of the whole step's tokens with loss, of an `SFTBatch` or of its
    micro-batches; also the number of these tokens and of conversations."""

    def loss(
        text: TextDecoder, batch: SFTBatch
    ) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        sampled = jnp.asarray(batch.packed.sampled)
        logprobs = packed_logprobs(text, batch.packed, image_token_id, remat, chunk)
        figures = {
            "tokens": sampled.sum(),
            "conversations": jnp.asarray(batch.packed.segments).max(1).sum(),
        }
        return -masked_mean(logprobs, sampled, batch.tokens), figures

    return loss


def start_sft(
    graph: nnx.GraphDef, weights: Any, image_token_id: int, settings: SFTSettings, parts: int = 1
) -> tuple[TrainState, MeshProgram]:
    """The state before the first step, and the jitted update, as `make_sft_update` returns it."""
    optimizer = make_optimizer(settings.optimizer, settings.steps)
    state = init_state(weights, optimizer)
    return state, make_sft_update(graph, optimizer, image_token_id, settings, parts, state)


def make_sft_update(
    graph: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    image_token_id: int,
    settings: SFTSettings,
    parts: int,
    state: TrainState,
) -> MeshProgram:
    """The update of the cold start in `parts` micro-batches, `f(state, SFTBatch) -> (state, metrics)`."""
    cut = (lambda batch: split_sft_batch(batch, parts)) if parts > 1 else None
    loss = sft_loss(image_token_id, settings.remat, settings.logprob_chunk)
    return make_update(graph, optimizer, loss, state, cut)


class SFTBatches:
    """The steps of a cold start: endless batches of packed rows, in an order that goes on exactly.

    `reader`, where given, reads the frames of the next steps meanwhile. Files that cannot be read
    leave padding and are added to `features.unreadable`. Raises ValueError where there is no
    conversation to train on.
    """

    def __init__(
        self,
        settings: SFTSettings,
        data: Data,
        reader: FrameReader | None,
        seed: int,
        protocol: Protocol,
        features: FrameFeatures,
        mesh: Mesh,
    ):
        self._settings, self._data, self._mesh = settings, data, mesh
        self._protocol, self._features = protocol, features
        packing = pack_rows(data, settings.row_tokens, seed)
        self._rows = row_stream(data, packing, reader, seed, settings.rows)
        self._shape, self._parts = fitted_rows(settings.shape, settings.microbatches, mesh)

    def start(self, graph: nnx.GraphDef, weights: Any) -> tuple[TrainState, MeshProgram]:
        """As `start_sft`."""
        image = self._features.config.image_token_id
        return start_sft(graph, weights, image, self._settings, self._parts)

    def __next__(self) -> tuple[SFTBatch, tuple[PackedRows, ...], dict[str, float]]:
        """What the update takes, the arrays whose tokens count, and how many conversations are
        missing for a file that could not be read. A process renders and lays out its share of a
        step's rows."""
        rows = next(self._rows)
        mine = [self._data.row(numbers) for numbers in rows[hosts.share_of(len(rows))]]
        rendered, missing = render_rows(mine, self._protocol, self._features)
        for error in missing.values():
            path = error.path.removeprefix(f"{self._features.root}/")
            self._features.unreadable[path] = error.reason
        own = build_packed(rendered, self._features, own_rows(self._shape))
        counts = hosts.gather((len(missing), int(own.sampled.sum())))
        if not any(tokens for _, tokens in counts):
            raise ValueError(
                "sft: a step has no conversation whose files can be read; check the data root "
                f"{self._data.root}"
            )
        packed: PackedRows = place(own, self._mesh)
        figures = {"missing": float(sum(count for count, _ in counts))}
        return SFTBatch.of(packed), (packed,), figures

    def get_state(self) -> dict[str, Any]:
        return self._rows.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        self._rows.set_state(state)
