"""A recipe's training programs with abstract arguments, for compiling without the devices.

A run calls the same programs with the same shapes, types and shardings. Nothing is allocated.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from models.config import ModelConfig
from models.model import VisionLanguageModel, abstract_model
from models.sharding import BATCH, MeshProgram, param_shardings, row_devices
from models.trained import Skeleton, TrainedVision, merge_vision, split, split_vision
from paravt_jax.method.grpo import GRPOBatch, Totals
from paravt_jax.method.structure import TAGS, Structure
from train.learn.batch import Microbatch
from train.learn.conversation_rows import RowsShape
from train.learn.optimizer import make_optimizer
from train.learn.packing import MicrobatchShape, StepShape
from train.learn.placement import (
    Bank,
    VisualRoom,
    bank_sharding,
    make_bank_share,
    row_pieces,
    shardings,
    sums_of,
)
from train.learn.rl import rl_loss
from train.learn.rl_batch import RLBatch
from train.learn.sft import SFTBatch, sft_loss
from train.learn.update import (
    TrainState,
    Update,
    VisionPrograms,
    make_logprobs,
    make_update,
    make_vision_programs,
    state_shardings,
)
from train.settings import Run

T = TypeVar("T")


class Abstract(NamedTuple):
    """A program and its abstract arguments: `program.lower(*arguments).compile()`."""

    program: MeshProgram
    arguments: tuple[Any, ...]
    """Those of the caller. The program adds the frozen weights."""

    @property
    def all_arguments(self) -> tuple[Any, ...]:
        """The arguments of the jitted function."""
        return *self.program.first, *self.arguments


class AbstractStep(NamedTuple):
    """What the programs of a step take. Sizes and programs are those that a run uses."""

    mesh: Mesh
    skeleton: Skeleton
    """The model without its trained weights."""
    state: TrainState
    bank: Bank
    """What is cached of frames."""
    visual: Any
    """The visual vectors."""
    vision_programs: VisionPrograms | None
    """The programs between both, if a part of the vision tower is trained."""
    microbatches: tuple[Microbatch, ...]
    """An empty micro-batch of every size, the largest first."""
    batch: Any
    """What else the loss reads: `RLBatch` or `SFTBatch`."""
    update: Update
    """The update's programs: adding gradients, and the step of the optimizer."""
    accumulates: bool = True
    """Whether there may be several micro-batches, whose gradients are added up."""

    def start(self) -> Abstract:
        """Return gradients of zero, to which those of micro-batches are added."""
        return Abstract(self.update.start, (self._differentiated,))

    def gradients(self, size: int = 0, later: bool = False) -> Abstract:
        """Return the gradients of a micro-batch, added to those of others.

        Args:
            size: number of the micro-batch's size; 0 is the largest.
            later: of an update of RL after the first one of a step, which reads the log-probs of
                that one.
        """
        text, _ = split_vision(self.state.weights)
        total = sums_of(self._differentiated, self.mesh) if self.accumulates else None
        batch = self.batch
        if later:
            batch = batch.later(batch.advantages)
        arguments = (text, total, self.visual, self.microbatches[size], batch)
        return Abstract(self.update.add, arguments)

    def bank_share(self) -> Abstract:
        """Return what sends the visual vectors of a step to all replicas."""
        by_row = jax.ShapeDtypeStruct(
            self.visual.shape, self.visual.dtype, sharding=NamedSharding(self.mesh, BATCH)
        )
        return Abstract(make_bank_share(self.mesh), (by_row,))

    def vision(self) -> Abstract:
        """Return the gradients of the trained part of the tower, which the run has."""
        assert self.vision_programs is not None, "no part of the tower is trained"
        _, vision = split_vision(self.state.weights)
        gradients = sums_of(self.visual, self.mesh)
        return Abstract(self.vision_programs.gradients, (vision, self.bank, gradients))

    def optimizer(self) -> Abstract:
        """Return the optimizer's step after the gradients."""
        text, vision = split_vision(self.state.weights)
        of_vision = jax.tree.map(lambda x: x.update(dtype=jnp.float32), vision)
        total = merge_vision(sums_of(text, self.mesh), of_vision)
        return Abstract(self.update.apply, (self.state, total))

    def reference(self, run: Run, size: int = 0) -> Abstract:
        """Return the reference log-probs of a micro-batch of RL; `size` as in `gradients`."""
        settings = _phase(run, "rl", run.rl)
        program = make_logprobs(self.skeleton, settings.temperature, self.mesh)
        # The reference is stored in the type of the activations, to save memory.
        dtype = jnp.dtype(run.model.dtype)
        text, _ = split_vision(self.state.weights)
        reference = jax.tree.map(lambda x: x.update(dtype=dtype), text)
        return Abstract(program, (reference, self.visual, self.microbatches[size]))

    @property
    def _differentiated(self) -> Any:
        """What the gradients of a micro-batch are of."""
        text, _ = split_vision(self.state.weights)
        return text if self.vision_programs is None else (text, self.visual)


def abstract_rl_step(run: Run, mesh: Mesh, config: ModelConfig | None = None) -> AbstractStep:
    """Return the arguments and programs of a recipe's PARA-GRPO step.

    Args:
        run: a recipe with RL.
        mesh: the mesh to shard over; its devices may be descriptions.
        config: model to use instead of the published one of the recipe's size.

    Raises:
        ValueError: the recipe has no RL.
    """
    settings = _phase(run, "rl", run.rl)
    config, skeleton, weights = _model(run, mesh, config)
    optimizer = make_optimizer(settings.optimizer)
    state = _state(weights, optimizer)
    devices = row_devices(mesh)
    pieces = row_pieces(config.text, mesh.shape["fsdp"], mesh.shape["tensor"])
    shape = run.rl_shape
    sizes = shape.microbatches(settings.microbatch_tokens, devices, pieces)
    hosts = _hosts(mesh)
    room = VisualRoom(shape.slots(hosts, devices), shape.frames(hosts, devices))
    rollouts = _rollouts(shape, settings.max_staleness > 0)
    batch = RLBatch(rollouts, _shape((shape.rows, shape.suffix), jnp.float32), _totals())
    size = (shape.rows, shape.suffix)
    return AbstractStep(
        mesh,
        skeleton,
        state,
        *_frames(run, mesh, config, skeleton.vision, room),
        tuple(_placed(_microbatch(each, size), mesh) for each in sizes),
        _placed(batch, mesh),
        make_update(skeleton, optimizer, rl_loss(settings), state),
    )


def abstract_sft_step(run: Run, mesh: Mesh, config: ModelConfig | None = None) -> AbstractStep:
    """Return the arguments and programs of a recipe's SFT step; see `abstract_rl_step`."""
    settings = _phase(run, "sft", run.sft)
    config, skeleton, weights = _model(run, mesh, config)
    optimizer = make_optimizer(settings.optimizer, settings.learning_rate)
    state = _state(weights, optimizer)
    devices = row_devices(mesh)
    shape = settings.shape
    if skeleton.vision is not None and skeleton.vision.whole:
        frames = math.ceil(shape.visual / run.smallest_frame)
        shape = dataclasses.replace(shape, frames=frames)
    shape = shape.fitted(settings.microbatches, devices)
    size = (shape.rows, shape.tokens)
    batch = SFTBatch(_shape(size, jnp.bool_), _shape((), jnp.float32))
    return AbstractStep(
        mesh,
        skeleton,
        state,
        *_frames(run, mesh, config, skeleton.vision, shape.room(devices)),
        (_placed(_conversations(shape), mesh),),
        _placed(batch, mesh),
        make_update(skeleton, optimizer, sft_loss(settings), state),
        shape.microbatches > 1,
    )


def _frames(
    run: Run, mesh: Mesh, config: ModelConfig, vision: TrainedVision | None, room: VisualRoom
) -> tuple[Bank, Any, VisionPrograms | None]:
    """Return a step's bank, its visual vectors, and the programs between them."""
    devices, dtype = row_devices(mesh), jnp.dtype(run.model.dtype)
    visual: Any = _place(_visual(devices, room.slots, config, dtype), bank_sharding(mesh))
    if vision is None:
        return Bank(visual), visual, None
    bank = Bank(*_placed(_cached(vision, devices, room, dtype), mesh).values())
    hosts = _hosts(mesh)
    return bank, visual, make_vision_programs(vision, mesh, hosts, room.slots * devices // hosts)


def _hosts(mesh: Mesh) -> int:
    return len({device.process_index for device in mesh.devices.flat})


def _phase(run: Run, name: str, settings: T | None) -> T:
    if settings is None:
        raise ValueError(f"{run.name}.{name}: None; give a recipe with this phase")
    return settings


def planned_model(run: Run, config: ModelConfig) -> VisionLanguageModel:
    """The abstract model of a run, with its adapters."""
    dtype = jnp.dtype(run.model.dtype)
    return abstract_model(config, dtype=dtype, param_dtype=run.param_dtype, lora=run.lora)


def _model(run: Run, mesh: Mesh, config: ModelConfig | None) -> tuple[ModelConfig, Skeleton, Any]:
    """Return the sizes, the model without its trained weights, and these, sharded over the mesh."""
    config = run.model.config() if config is None else config
    model = planned_model(run, config)
    graph, *states = split(model, run.train_vision)
    weights, frozen = jax.tree.map(_place, states, [param_shardings(x, mesh) for x in states])
    vision = TrainedVision.of(model.vision, run.train_vision, run.largest_frame)
    return config, Skeleton(graph, frozen, vision), weights


def _state(weights: Any, optimizer: Any) -> TrainState:
    state = TrainState(weights, jax.eval_shape(optimizer.init, weights), _shape((), jnp.int32))
    return jax.tree.map(_place, state, state_shardings(state))


def _shape(shape: tuple[int, ...], dtype: Any) -> Any:
    """An abstract array."""
    return jax.ShapeDtypeStruct(shape, dtype)


def _place(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _placed(batch: Any, mesh: Mesh) -> Any:
    return jax.tree.map(_place, batch, shardings(batch, mesh))


def _visual(rows: int, tokens: int, config: ModelConfig, dtype: Any) -> Any:
    """Features of visual tokens: the tower's output, and one vector per DeepStack level."""
    levels = 1 + config.vision.levels
    return _shape((rows, tokens, levels, config.text.hidden_size), dtype)


def _cached(vision: TrainedVision, rows: int, room: VisualRoom, dtype: Any) -> dict[str, Any]:
    """Return what is cached of frames, and their sizes if the whole tower is trained.

    Args:
        vision: the trained part of the tower.
        rows: rows of the bank.
        room: room for frames per row.
        dtype: type of the activations.
    """
    if not vision.whole:
        return {"visual": _shape((rows, room.slots, *vision.vector), dtype), "grids": None}
    patches = _shape((rows, room.frames * vision.frame_tokens, *vision.vector), dtype)
    return {"visual": patches, "grids": _shape((rows, room.frames, 2), jnp.int32)}


def _microbatch(size: MicrobatchShape, index: tuple[int, int]) -> Microbatch:
    rows = (size.rows * size.pieces, size.tokens // size.pieces)
    return Microbatch(
        ids=_shape(rows, jnp.int32),
        positions=_shape((3, *rows), jnp.int32),
        segments=_shape(rows, jnp.int32),
        starts=_shape(rows, jnp.int32),
        shared=_shape(rows[:1], jnp.int32),
        visual_index=_shape(rows, jnp.int32),
        index=_shape(index, jnp.int32),
        pieces=size.pieces,
    )


def _conversations(shape: RowsShape) -> Microbatch:
    rows = _microbatch(shape.microbatch, (shape.rows, shape.tokens))
    return dataclasses.replace(rows, starts=None, shared=None)


def _rollouts(shape: StepShape, stale: bool) -> GRPOBatch:
    per_token = (shape.rows, shape.suffix)
    per_rollout = (shape.groups, shape.rollouts)
    # A token may be structural in two ways: a call that breaks an open think is a violation too.
    per_structural_token = (shape.rows, 2 * shape.suffix)
    structure = Structure(
        _shape(per_structural_token, jnp.int32),
        _shape(per_structural_token, jnp.int8),
        _shape(per_structural_token, jnp.bool_),
    )
    return GRPOBatch(
        mask=_shape(per_token, jnp.bool_),
        behaviour=_shape(per_token, jnp.float32),
        reference=_shape(per_token, jnp.float32),
        rollout=_shape((shape.rows,), jnp.int32),
        structure=structure,
        rewards=_shape(per_rollout, jnp.float32),
        anchor_rewards=_shape(per_rollout, jnp.float32),
        valid=_shape(per_rollout, jnp.bool_),
        compliant=_shape(per_rollout, jnp.bool_),
        current=_shape(per_token, jnp.bool_) if stale else None,
    )


def _totals() -> Totals:
    return Totals(
        tokens=_shape((), jnp.float32),
        structural=_shape((), jnp.float32),
        tags=_shape((len(TAGS),), jnp.float32),
    )
