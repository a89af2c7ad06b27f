"""A recipe's training programs with abstract arguments, for compiling without the devices.

A run calls the same programs with the same shapes, types and shardings. Nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from models.qwen3_vl.config import Qwen3VLConfig
from models.qwen3_vl.model import abstract_model
from models.qwen3_vl.sizes import qwen3_vl
from models.sharding import param_shardings
from paravt_jax.method.grpo import GRPOBatch, Totals
from paravt_jax.method.structure import TAGS, Structure
from train.learn.batch import BatchShape, Sequences
from train.learn.optimizer import make_optimizer
from train.learn.packed_batch import PackedRows, PackedShape, fitted_rows
from train.learn.placement import fitted, shardings
from train.learn.rl import make_rl_update
from train.learn.rl_batch import RLBatch
from train.learn.sft import SFTBatch, make_sft_update
from train.learn.step import MeshProgram, TrainState, make_logprobs, state_shardings
from train.settings import Run

T = TypeVar("T")


class Abstract(NamedTuple):
    """A program and its abstract arguments: `program.lower(*arguments).compile()`."""

    program: MeshProgram
    arguments: tuple[Any, ...]


def abstract_rl_update(run: Run, mesh: Mesh, config: Qwen3VLConfig | None = None) -> Abstract:
    """The PARA-GRPO update of a recipe.

    Args:
        run: a recipe with RL.
        mesh: the mesh to shard over; its devices may be descriptions.
        config: model to use instead of the published one of the recipe's size.

    Returns:
        The program; its arguments are the state (donated) and an `RLBatch`.

    Raises:
        ValueError: the recipe has no RL.
    """
    settings = _phase(run, "rl", run.rl)
    config, graph, weights = _model(run, mesh, config)
    optimizer = make_optimizer(settings.optimizer, settings.steps)
    state = _state(weights, optimizer)
    shapes, parts = fitted(run.rl_shapes, settings.microbatches, mesh)
    batch = _placed(_rl_batch(shapes, config), mesh)
    program = make_rl_update(graph, optimizer, config.image_token_id, settings, parts, state)
    return Abstract(program, (state, batch))


def abstract_sft_update(run: Run, mesh: Mesh, config: Qwen3VLConfig | None = None) -> Abstract:
    """The SFT update of a recipe; see `abstract_rl_update`. The batch is an `SFTBatch`."""
    settings = _phase(run, "sft", run.sft)
    config, graph, weights = _model(run, mesh, config)
    optimizer = make_optimizer(settings.optimizer, settings.steps)
    state = _state(weights, optimizer)
    shape, parts = fitted_rows(settings.shape, settings.microbatches, mesh)
    batch = _placed(SFTBatch(_packed(shape, config), _shape((), jnp.float32)), mesh)
    program = make_sft_update(graph, optimizer, config.image_token_id, settings, parts, state)
    return Abstract(program, (state, batch))


def abstract_reference(run: Run, mesh: Mesh, config: Qwen3VLConfig | None = None) -> Abstract:
    """The reference log-probs of the main agents' batch; see `abstract_rl_update`.

    The arguments are the reference's weights and `Sequences`.
    """
    settings = _phase(run, "rl", run.rl)
    config, graph, weights = _model(run, mesh, config)
    shapes, parts = fitted(run.rl_shapes, settings.microbatches, mesh)
    program = make_logprobs(
        graph, config.image_token_id, settings.temperature, settings.logprob_chunk, mesh, parts
    )
    # The reference is stored in the type of the activations, to save memory.
    reference = jax.tree.map(lambda x: x.update(dtype=jnp.dtype(run.model.dtype)), weights)
    return Abstract(program, (reference, _placed(_sequences(shapes[0], config), mesh)))


def _phase(run: Run, name: str, settings: T | None) -> T:
    if settings is None:
        raise ValueError(f"{run.name}.{name}: None; give a recipe with this phase")
    return settings


def _model(
    run: Run, mesh: Mesh, config: Qwen3VLConfig | None
) -> tuple[Qwen3VLConfig, nnx.GraphDef, Any]:
    """(config, graph, weights) of the text model, sharded over the mesh."""
    config = qwen3_vl(run.model.size) if config is None else config
    graph, weights = nnx.split(abstract_model(config, dtype=jnp.dtype(run.model.dtype)).text)
    return config, graph, jax.tree.map(_place, weights, param_shardings(weights, mesh))


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


def _visual(rows: int, tokens: int, config: Qwen3VLConfig) -> Any:
    """Features of visual tokens: the tower's output, and one vector per DeepStack level."""
    levels = 1 + config.vision.levels
    return _shape((rows, tokens, levels, config.text.hidden_size), jnp.float32)


def _sequences(shape: BatchShape, config: Qwen3VLConfig) -> Sequences:
    prompts = (shape.groups, shape.prompt)
    rows = (shape.groups * shape.rows, shape.suffix)
    return Sequences(
        prompt_ids=_shape(prompts, jnp.int32),
        prompt_positions=_shape((3, *prompts), jnp.int32),
        prompt_segments=_shape(prompts, jnp.int32),
        visual=_visual(shape.groups, shape.visual, config),
        ids=_shape(rows, jnp.int32),
        positions=_shape((3, *rows), jnp.int32),
        segments=_shape(rows, jnp.int32),
        sampled=_shape(rows, jnp.bool_),
        logprobs=_shape(rows, jnp.float32),
    )


def _packed(shape: PackedShape, config: Qwen3VLConfig) -> PackedRows:
    rows = (shape.rows, shape.tokens)
    return PackedRows(
        ids=_shape(rows, jnp.int32),
        positions=_shape((3, *rows), jnp.int32),
        segments=_shape(rows, jnp.int32),
        sampled=_shape(rows, jnp.bool_),
        visual=_visual(shape.rows, shape.visual, config),
    )


def _rl_batch(shapes: Sequence[BatchShape], config: Qwen3VLConfig) -> RLBatch:
    # Rows of main agents and of sub-agents follow each other in one batch, padded to the longer of
    # their lengths. Rewards exist per group of main agents.
    total_rows = sum(shape.groups * shape.rows for shape in shapes)
    length = max(shape.suffix for shape in shapes)
    per_token = (total_rows, length)
    per_rollout = (shapes[0].groups, shapes[0].rows)
    # A token may be structural in two ways: a call that breaks an open think is a violation too.
    per_structural_token = (total_rows, 2 * length)
    structure = Structure(
        _shape(per_structural_token, jnp.int32),
        _shape(per_structural_token, jnp.int8),
        _shape(per_structural_token, jnp.bool_),
    )
    rollouts = GRPOBatch(
        mask=_shape(per_token, jnp.bool_),
        behaviour=_shape(per_token, jnp.float32),
        reference=_shape(per_token, jnp.float32),
        rollout=_shape((total_rows,), jnp.int32),
        structure=structure,
        rewards=_shape(per_rollout, jnp.float32),
        anchor_rewards=_shape(per_rollout, jnp.float32),
        valid=_shape(per_rollout, jnp.bool_),
        compliant=_shape(per_rollout, jnp.bool_),
    )
    sequences = tuple(_sequences(shape, config) for shape in shapes)
    totals = Totals(
        tokens=_shape((), jnp.float32),
        structural=_shape((), jnp.float32),
        tags=_shape((len(TAGS),), jnp.float32),
    )
    return RLBatch(sequences, rollouts, _shape(per_token, jnp.float32), totals)
