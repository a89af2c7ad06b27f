"""The cold start: supervised steps on demonstrations in packed rows.

It is the update of `train.learn.update` with another loss: every trained token has the advantage 1,
and no row has a group. The loss is one mean over all trained tokens of a step, over all processes
and micro-batches.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float

from models.features import VideoFiles
from models.layers import Remat
from models.sharding import Lowering, require_mesh, row_devices
from models.text import TextDecoder
from models.trained import Skeleton
from paravt_jax.checks import require_at_least, require_choices
from paravt_jax.data.frames import VideoError
from paravt_jax.data.loader import Pipeline
from paravt_jax.method.conversations import Conversation
from paravt_jax.method.grpo.batch import masked_mean
from paravt_jax.processes import hosts
from rollout.agent.episode import Environment
from train.data import Data, pack_rows, row_stream
from train.learn.batch import Microbatch
from train.learn.conversation_rows import (
    Rendered,
    RowsShape,
    lay_out_rows,
    most_frames,
    most_visual,
    render_rows,
)
from train.learn.optimizer import OptimizerSettings, make_optimizer
from train.learn.packing import GroupLengths
from train.learn.placement import Bank, BankPlacer, put
from train.learn.update import (
    Loss,
    TrainState,
    Updater,
    init_state,
    score_rollouts,
    to_floats,
)


@dataclasses.dataclass(frozen=True)
class SFTSettings:
    """Settings of the cold start."""

    steps: int
    """Number of updates. 0: no cold start, because the weights at `model.path` had it."""
    rows: int
    """Packed rows per update."""
    optimizer: OptimizerSettings
    warmup: float = 0.0
    """Share of the steps over which the learning rate rises linearly from zero."""
    horizon: int = 0
    """Updates in which a cosine brings the learning rate to zero, at least `steps`; 0: as many."""
    row_tokens: int = 8192
    """Length of a packed row in tokens. Longer conversations are left out."""
    microbatches: int = 1
    """Upper bound on gradient-accumulation steps, a row each; 0: chosen for the devices."""
    remat: Remat = "none"
    """Activation checkpointing: what is kept of each layer for the backward pass."""

    def __post_init__(self):
        require_at_least("sft", self, 1, "rows", "row_tokens")
        require_at_least("sft", self, 0, "steps", "microbatches")
        require_choices("sft", self)
        if not 0 <= self.warmup < 1:
            raise ValueError(f"sft.warmup: {self.warmup}; give a number from 0 to below 1")
        if self.horizon < 0 or 0 < self.horizon < self.steps:
            raise ValueError(
                f"sft.horizon: {self.horizon}, which ends before the {self.steps} updates of the "
                "run; give at least as many, or 0"
            )

    def learning_rate(self, peak: float) -> optax.Schedule | float:
        """Return the learning rate by update, given its peak."""
        updates = self.horizon or self.steps
        if updates == 1:
            return peak
        # At least one of each. So without a warm-up, the first update has learning rate 0.
        warmup = min(max(1, round(self.warmup * updates)), updates - 1)
        return optax.warmup_cosine_decay_schedule(0.0, peak, warmup, updates)

    @property
    def shape(self) -> RowsShape:
        """The shape of a step, as long as no data is known: every token may be visual."""
        return RowsShape(self.rows, self.row_tokens, self.row_tokens)


class SFTStep(NamedTuple):
    """The input of an update, on the mesh.

    As it is prepared, mask and lengths are those of this process's rows, and there are no metrics.
    """

    bank: Bank
    microbatches: tuple[Microbatch, ...]
    mask: Bool[Array | np.ndarray, "r t"]
    """The tokens with a loss, of the rows of the whole step."""
    lengths: tuple[GroupLengths, ...]
    """Lengths of the conversations of each row, on all processes."""
    metrics: dict[str, float]
    """`tokens` with a loss; `conversations`; and `missing`, the number of conversations that are
    left out because of an unreadable file."""


def sft_loss(settings: SFTSettings) -> Loss:
    """Return the loss: the mean negative log-likelihood of the step's trained tokens."""

    def loss(
        text: TextDecoder,
        visual: Float[Array, "*m c d"],
        microbatch: Microbatch,
        mask: Bool[Array, "r t"],
    ) -> tuple[Float[Array, ""], dict[str, Array]]:
        logprobs = score_rollouts(text, visual, microbatch, 1.0, settings.remat)
        return -masked_mean(logprobs, mask & (microbatch.index >= 0), mask.sum()), {}

    return loss


def make_sft_updater(
    skeleton: Skeleton, weights: Any, settings: SFTSettings, shape: RowsShape
) -> Updater:
    """Compile the update of the cold start.

    Args:
        skeleton: The model without its trained weights.
        weights: The trained weights to start from. The first update donates them.
        settings: Optimizer and activation checkpointing.
        shape: Sizes of a step, from `SFTBatches.shape`.
    """
    optimizer = make_optimizer(settings.optimizer, schedule=settings.learning_rate)
    slots = shape.room(row_devices(require_mesh(weights))).slots
    several = shape.microbatches > 1
    initial = init_state(weights, optimizer)
    return Updater(skeleton, initial, optimizer, sft_loss(settings), slots, accumulates=several)


def sft_step(
    updater: Updater, state: TrainState, batches: SFTBatches, left: int
) -> tuple[TrainState, tuple[GroupLengths, ...], dict[str, float]]:
    """Update once, and prepare the next batches while the devices compute.

    Args:
        updater: From `make_sft_updater`.
        state: The state before the update, which is donated.
        batches: The batches.
        left: Number of steps after this one.

    Returns:
        The new state, the lengths of the conversations that count towards speed, and the metrics.
    """
    with jax.profiler.TraceAnnotation("data"):
        # Does something in the first step only: later, the step before has prepared these.
        batches.prepare(left + 1)
        step = next(batches)
    with jax.profiler.TraceAnnotation("update"):
        gradients, metrics = updater.gradients(
            state.weights, step.bank, step.microbatches, step.mask
        )
        state, norm = updater.apply(state, gradients)
        # The programs are only dispatched so far. `to_floats` waits for them.
        with jax.profiler.TraceAnnotation("data"):
            batches.prepare(left)
        figures = to_floats(metrics | {"grad_norm": [norm]})
    return state, step.lengths, figures | step.metrics


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
        files: Reads the frames of the next steps ahead of time; None: frames are read when used.
        seed: Decides the order of conversations.
        environment: Renders conversations as tokens, and encodes frames.
        mesh: The mesh of training.

    Attributes:
        settings: Settings of the cold start.
        seed: Decides the order of conversations.
        shape: Sizes of a step.

    Raises:
        ValueError: There is no conversation to train on.
    """

    def __init__(
        self,
        settings: SFTSettings,
        data: Data,
        files: VideoFiles | None,
        seed: int,
        environment: Environment,
        mesh: Mesh,
    ):
        self.settings = settings
        self._data = data
        self._mesh = mesh
        self._protocol = environment.protocol
        self._features = environment.features
        packed = pack_rows(data, settings.row_tokens, seed)
        rows = row_stream(data, packed, files, seed, settings.rows)
        self._pipeline = Pipeline(rows, self._begin, self._finish)
        # Conversations of published data are read from disk, row by row.
        chats = (data.row(numbers) for numbers in packed)
        features, vision = self._features, self._features.trained
        visual = max(1, most_visual(chats, features.settings, features.config.vision))
        frames = 0
        if vision is not None and vision.whole:
            frames = max(1, most_frames(data.row(numbers) for numbers in packed))
        shape = dataclasses.replace(settings.shape, visual=visual, frames=frames)
        self._devices = row_devices(mesh)
        self.shape = shape.fitted(settings.microbatches, self._devices)
        self._put_bank = BankPlacer(mesh, self.shape.room(self._devices), vision)

    def __next__(self) -> SFTStep:
        """Return the next batch."""
        step, missing = next(self._pipeline)
        for error in missing.values():
            path = error.path.removeprefix(f"{self._features.root}/")
            self._features.unreadable[path] = error.reason
        # Processes talk here, at the step itself, and not in `prepare`, where one of them may fail.
        everyone = hosts.gather((len(missing), step.mask, step.lengths))
        mask = np.concatenate([own for _, own, _ in everyone])
        lengths = tuple(row for _, _, rows in everyone for row in rows)
        if not mask.any():
            raise ValueError(
                "sft: no conversation of this step has readable files; check the data root "
                f"{self._data.root}"
            )
        metrics = {
            "tokens": float(mask.sum()),
            "conversations": float(sum(len(row.suffixes) for row in lengths)),
            "missing": float(sum(count for count, _, _ in everyone)),
        }
        return step._replace(mask=put(mask, self._mesh), lengths=lengths, metrics=metrics)

    def lowerings(self, updater: Updater, state: TrainState) -> Iterator[Lowering]:
        """Return the programs of a step, for `models.compilation`: the update's, and the tower's.

        Args:
            updater: From `make_sft_updater`.
            state: The current state.
        """
        empty = self._lay_out([])
        mask = np.zeros((self.shape.rows, self.shape.tokens), bool)
        inputs = [(empty.microbatches[0], put(mask, self._mesh))]
        yield from updater.lowerings(state, empty.bank, inputs)
        yield from self._features.lowerings()

    def prepare(self, left: int) -> None:
        """Prepare the next batches while an update runs; `left` batches are still needed."""
        self._pipeline.prepare(left)
        if not left:
            # Frames that were encoded, but are not needed any more, leave the devices.
            self._features.start(())

    def _begin(self, rows: Sequence[Sequence[int]]) -> list[tuple[Conversation, ...]]:
        """Read and begin to encode the frames of this process's share of a step's rows."""
        own_rows = [self._data.row(numbers) for numbers in rows[hosts.share_of(len(rows))]]
        conversations = itertools.chain.from_iterable(own_rows)
        clips = itertools.chain.from_iterable(chat.clips for chat in conversations)
        self._features.start([frame for clip in clips for frame in clip.frames])
        return own_rows

    def _finish(
        self, own_rows: list[tuple[Conversation, ...]]
    ) -> tuple[SFTStep, dict[str, VideoError]]:
        """Render this process's rows, and put them on the mesh; errors are by conversation."""
        rendered, missing = render_rows(own_rows, self._protocol, self._features)
        return self._lay_out(rendered), missing

    def _lay_out(self, rendered: Sequence[Sequence[Rendered]]) -> SFTStep:
        own = lay_out_rows(rendered, self._features, self.shape, self._devices)
        lengths = (tuple(len(each.trajectory.ids) for each in row) for row in rendered)
        return SFTStep(
            self._put_bank(own.visual, own.grids),
            tuple(put(each, self._mesh) for each in own.microbatches),
            own.mask,
            tuple(GroupLengths(0, row) for row in lengths if row),
            {},
        )

    def get_state(self) -> dict[str, Any]:
        """Return the position in the data, for a checkpoint."""
        return self._pipeline.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a position that `get_state` returned."""
        self._pipeline.set_state(state)
