"""The cold start: supervised steps on conversations packed into rows.

The loss is one mean over all trained tokens of a step, over all processes and micro-batches. A
conversation has the same log-probs in a packed row as in a row of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx, struct
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from models import remat
from models.features import FrameFeatures
from models.lora import NOTHING
from models.remat import Remat
from models.rope import visual_index
from models.sharding import Lowering, MeshProgram
from models.text import TextDecoder
from models.trained_vision import TrainedVision
from paravt_jax.data.frames import ReadsAhead, VideoError
from paravt_jax.data.loader import Pipeline
from paravt_jax.method.conversations import Conversation
from paravt_jax.method.grpo import masked_mean
from paravt_jax.method.protocol import Protocol
from paravt_jax.processes import hosts
from train.data import Data, pack_rows, row_stream
from train.learn.optimizer import OptimizerSettings, make_optimizer, require_counts, require_horizon
from train.learn.packed_batch import (
    PackedRows,
    PackedShape,
    Rendered,
    build_packed,
    fitted_rows,
    most_frames,
    most_visual,
    place_packed,
    render_rows,
    share_of_rows,
    split_microbatches,
)
from train.learn.placement import place
from train.learn.step import Loss, TrainState, init_state, make_update


@dataclasses.dataclass(frozen=True)
class SFTSettings:
    """Settings of the cold start."""

    steps: int
    """Number of updates."""
    rows: int
    """Packed rows per update."""
    optimizer: OptimizerSettings
    row_tokens: int = 8192
    """Length of a packed row in tokens. Longer conversations are left out."""
    save_every: int = 100
    """Steps between checkpoints."""
    microbatches: int = 1
    """Upper bound on gradient-accumulation steps, a row each; 0: chosen for the devices."""
    remat: Remat = "none"
    """Activation checkpointing: what is kept of each layer for the backward pass."""
    logprob_chunk: int | None = None
    """Tokens whose logits over the vocabulary exist at a time; None: all tokens at once."""

    def __post_init__(self):
        require_counts(
            "sft",
            steps=self.steps,
            rows=self.rows,
            row_tokens=self.row_tokens,
            save_every=self.save_every,
        )
        require_counts("sft", minimum=0, microbatches=self.microbatches)
        require_horizon("sft.optimizer", self.optimizer, self.steps)
        remat.check("sft.remat", self.remat)
        if self.logprob_chunk is not None and self.logprob_chunk < 1:
            raise ValueError(
                f"sft.logprob_chunk: {self.logprob_chunk}; give a whole number of at least 1, "
                "or None for all tokens at once"
            )

    @property
    def shape(self) -> PackedShape:
        """The shape of a step's batch, as long as no data is known: every token may be visual."""
        return PackedShape(self.rows, self.row_tokens, self.row_tokens)


EncodeVisual = Callable[[Any, Any], Any]
"""`f(weights of the tower, SFTBatch) -> SFTBatch` with visual vectors; see `visual_encoder`."""


# Annotations are not checked, for the same reason as in `Microbatch`.
@no_type_check
@struct.dataclass
class SFTBatch:
    """Input of an update: packed rows, and the number of trained tokens in the whole step."""

    packed: PackedRows
    tokens: Float[Array, ""]


def split_sft_batch(batch: SFTBatch, parts: int) -> SFTBatch:
    """Split a batch into micro-batches of whole rows: each array gets a first axis of `parts`."""
    tokens = jnp.broadcast_to(batch.tokens, (parts,))
    return SFTBatch(split_microbatches(batch.packed, parts), tokens)


def packed_logprobs(
    text: TextDecoder,
    batch: PackedRows,
    image_token_id: int,
    remat: Remat = "none",
    chunk: int | None = None,
) -> Float[Array, "b t"]:
    """Log-prob of each token given the tokens before it in its conversation.

    The value at a conversation's first token has no meaning. That token is never trained.

    Args:
        text: The decoder.
        batch: b rows of t tokens.
        image_token_id: Id of the placeholder tokens that visual vectors replace.
        remat: Activation checkpointing policy.
        chunk: Tokens whose logits exist at a time; None: all.
    """
    x = jax.tree.map(jnp.asarray, batch)
    index = visual_index(x.ids, image_token_id)
    hidden, _ = text(
        x.ids, x.positions, segment_ids=x.segments, visual=x.visual, visual_index=index, remat=remat
    )
    # The output at t - 1 predicts token t.
    logprobs = text.token_logprobs(hidden[:, :-1], x.ids[:, 1:], 1.0, chunk)
    return jnp.pad(logprobs, ((0, 0), (1, 0)))


def sft_loss(image_token_id: int, remat: Remat = "none", chunk: int | None = None) -> Loss:
    """The loss of an `SFTBatch`: mean negative log-likelihood of the step's trained tokens.

    For a micro-batch it is that micro-batch's share of the step's mean, so the losses of all of
    them add up. The metrics count trained tokens and conversations. The arguments are those of
    `packed_logprobs`.
    """

    def loss(
        text: TextDecoder, batch: SFTBatch
    ) -> tuple[Float[Array, ""], dict[str, Float[Array, ""] | Int[Array, ""]]]:
        sampled = jnp.asarray(batch.packed.sampled)
        # A row's conversations are numbered from 1, so the largest number counts them.
        conversations = jnp.asarray(batch.packed.segments).max(1).sum()
        logprobs = packed_logprobs(text, batch.packed, image_token_id, remat, chunk)
        metrics = {"tokens": sampled.sum(), "conversations": conversations}
        return -masked_mean(logprobs, sampled, batch.tokens), metrics

    return loss


def start_sft(
    graph: nnx.GraphDef,
    weights: Any,
    image_token_id: int,
    settings: SFTSettings,
    parts: int = 1,
    frozen: Any = NOTHING,
    seed: int = 0,
    encode: EncodeVisual | None = None,
) -> tuple[TrainState, MeshProgram]:
    """The state before the first step, and the jitted update; see `make_sft_update`."""
    optimizer = make_optimizer(settings.optimizer, settings.steps)
    state = init_state(weights, optimizer)
    return state, make_sft_update(
        graph, optimizer, image_token_id, settings, parts, state, frozen, seed, encode
    )


def make_sft_update(
    graph: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    image_token_id: int,
    settings: SFTSettings,
    parts: int,
    state: TrainState,
    frozen: Any = NOTHING,
    seed: int = 0,
    encode: EncodeVisual | None = None,
) -> MeshProgram:
    """Compile the update of the cold start: `f(state, SFTBatch) -> (state, metrics)`.

    Args:
        graph: The decoder without its weights.
        optimizer: The optimizer whose state `state` has.
        image_token_id: Id of the placeholder tokens that visual vectors replace.
        settings: Settings of activation checkpointing and of the logits' chunk size.
        parts: Number of micro-batches.
        state: A real or abstract state, with the shardings that updates keep.
        frozen: The decoder's weights that are not trained (`models.lora.split`).
        seed: With the number of the update, decides what adapters drop.
        encode: From `visual_encoder`, if a part of the vision tower is trained.
    """

    def split(batch: SFTBatch) -> SFTBatch:
        return split_sft_batch(batch, parts)

    loss = sft_loss(image_token_id, settings.remat, settings.logprob_chunk)
    split_batch = split if parts > 1 else None
    return make_update(graph, optimizer, loss, state, split_batch, frozen, seed, encode)


def visual_encoder(vision: TrainedVision | None, room: int) -> EncodeVisual | None:
    """Computes the visual vectors of a batch from what is cached of its frames.

    Args:
        vision: The trained part of the vision tower; None: the batch has the vectors.
        room: Visual tokens per row.
    """
    if vision is None:
        return None

    def encode(weights: Any, batch: SFTBatch) -> SFTBatch:
        packed: Any = batch.packed
        rows = len(packed.ids)
        visual = vision.encode(weights, packed.visual, packed.grids, rows, room)
        shown = dataclasses.replace(packed, visual=visual, grids=None)
        return dataclasses.replace(batch, packed=shown)

    return encode


def sft_step(
    update: Callable[[Any, SFTBatch], tuple[Any, Mapping[str, Any]]],
    state: Any,
    batches: SFTBatches,
    left: int,
) -> tuple[Any, tuple[PackedRows, ...], dict[str, float]]:
    """One update, during which the next batches are prepared.

    Args:
        update: The jitted update.
        state: The state before it, which is donated.
        batches: The batches.
        left: Number of steps after this one.

    Returns:
        The new state, the arrays whose tokens count towards speed, and the metrics.
    """
    with jax.profiler.TraceAnnotation("data"):
        # Does something in the first step only: later, the step before has prepared these.
        batches.prepare(left + 1)
        batch, arrays, counts = next(batches)
    with jax.profiler.TraceAnnotation("update"):
        # This only dispatches the update. `float` below waits for it.
        state, metrics = update(state, batch)
        with jax.profiler.TraceAnnotation("data"):
            batches.prepare(left)
        if not left:
            batches.close()
        figures = {name: float(value) for name, value in metrics.items()}
    return state, arrays, figures | counts


class _Prepared(NamedTuple):
    """This process's rows of a step, placed on the mesh."""

    packed: PackedRows
    tokens: int
    """Trained tokens."""
    missing: dict[str, VideoError]
    """Errors of the conversations that are left out, by id."""


class SFTBatches:
    """Iterates over the batches of a cold start without end; the position can be saved.

    After an update was dispatched, `prepare` makes the next batches while it runs. On an
    accelerator, the vision tower runs on the same devices as the updates: its work does not
    overlap with them, but waits in the same queue, and the host never waits for it alone (see
    `loader.Pipeline`). Reading frames, laying out arrays and transfers do overlap.

    A file that cannot be read leaves padding in its row and is added to `features.unreadable`.

    Args:
        settings: Settings of the cold start.
        data: Conversations, with their lengths in tokens.
        reader: Reads the frames of the next steps ahead of time; None: frames are read when used.
        seed: Decides the order of conversations, and what adapters drop.
        protocol: Renders conversations as tokens.
        features: Encodes frames.
        mesh: The mesh of training.

    Raises:
        ValueError: There is no conversation to train on.
    """

    def __init__(
        self,
        settings: SFTSettings,
        data: Data,
        reader: ReadsAhead | None,
        seed: int,
        protocol: Protocol,
        features: FrameFeatures,
        mesh: Mesh,
    ):
        self._settings = settings
        self._seed = seed
        self._data = data
        self._mesh = mesh
        self._protocol = protocol
        self._features = features
        packing = pack_rows(data, settings.row_tokens, seed)
        rows = row_stream(data, packing, reader, seed, settings.rows)
        self._pipeline = Pipeline(rows, self._begin, self._finish)
        # Conversations of published data are read from disk, row by row.
        chats = (data.row(numbers) for numbers in packing.rows)
        visual = max(1, most_visual(chats, features.settings, features.config.vision))
        frames = 1
        if features.trained is not None and features.trained.whole:
            frames = max(1, most_frames(data.row(numbers) for numbers in packing.rows))
        shape = dataclasses.replace(settings.shape, visual=visual, frames=frames)
        self._shape, self._parts = fitted_rows(shape, settings.microbatches, mesh)

    def start(
        self, graph: nnx.GraphDef, weights: Any, frozen: Any = NOTHING
    ) -> tuple[TrainState, MeshProgram]:
        """The state before the first step, and the jitted update; donates `weights`."""
        image_token_id = self._features.config.image_token_id
        encode = visual_encoder(self._features.trained, self._shape.visual)
        return start_sft(
            graph, weights, image_token_id, self._settings, self._parts, frozen, self._seed, encode
        )

    def __next__(self) -> tuple[SFTBatch, tuple[PackedRows, ...], dict[str, float]]:
        """The next batch.

        Returns:
            The batch for the update; the arrays whose tokens count towards speed; and the metric
            `missing`, the number of conversations left out because of an unreadable file.
        """
        packed, tokens, missing = next(self._pipeline)
        for error in missing.values():
            path = error.path.removeprefix(f"{self._features.root}/")
            self._features.unreadable[path] = error.reason
        # Processes talk here, at the step itself, and not in `prepare`, where one of them may fail.
        counts = hosts.gather((len(missing), tokens))
        total = sum(tokens for _, tokens in counts)
        if not total:
            raise ValueError(
                "sft: no conversation of this step has readable files; check the data root "
                f"{self._data.root}"
            )
        metrics = {"missing": float(sum(count for count, _ in counts))}
        return SFTBatch(packed, self._place_total(total)), (packed,), metrics

    def lowerings(self, update: MeshProgram, state: TrainState) -> Iterator[Lowering]:
        """The programs of a step, for `models.compile_ahead`: the update, and the tower's.

        Args:
            update: The jitted update.
            state: The current state.
        """
        packed, _ = self._place([])
        batch = SFTBatch(packed, self._place_total(0))
        yield functools.partial(update.lower, state, batch)
        yield from self._features.lowerings(self._data.sizes)

    def prepare(self, left: int) -> None:
        """Prepare the next batches while an update runs; `left` batches are still needed."""
        self._pipeline.prepare(left)

    def close(self) -> None:
        """Move frames that were encoded, but are not needed any more, from the devices."""
        self._features.start(())

    def _begin(self, rows: Sequence[Sequence[int]]) -> list[tuple[Conversation, ...]]:
        """Read and begin to encode the frames of this process's share of a step's rows."""
        own_rows = [self._data.row(numbers) for numbers in rows[hosts.share_of(len(rows))]]
        conversations = itertools.chain.from_iterable(own_rows)
        clips = itertools.chain.from_iterable(chat.clips for chat in conversations)
        self._features.start([frame for clip in clips for frame in clip.frames])
        return own_rows

    def _finish(self, own_rows: list[tuple[Conversation, ...]]) -> _Prepared:
        """Render this process's rows, and put them on the mesh."""
        rendered, missing = render_rows(own_rows, self._protocol, self._features)
        packed, tokens = self._place(rendered)
        return _Prepared(packed, tokens, missing)

    def _place(self, rendered: Sequence[Sequence[Rendered]]) -> tuple[PackedRows, int]:
        """Rows on the mesh, and the number of their trained tokens."""
        own, visual = build_packed(rendered, self._features, share_of_rows(self._shape))
        room = self._shape.room(self._features.trained)
        return place_packed(own, visual, room, self._mesh), int(own.sampled.sum())

    def _place_total(self, tokens: int) -> Any:
        """The number of trained tokens of all processes, on the mesh."""
        return place(np.float32(tokens), self._mesh)

    def get_state(self) -> dict[str, Any]:
        """The position in the data, for a checkpoint."""
        return self._pipeline.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a position that `get_state` returned."""
        self._pipeline.set_state(state)
