"""The programs of training with shapes in the place of arrays: what a plan compiles for machines that are not at hand.

Owns how a recipe becomes the arguments of its jitted programs, each with its place on the mesh; nothing is allocated. Refuses a recipe
without the phase that is asked for. Invariant: shapes, types and places are those that a run would give the same programs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from models.qwen3_vl.config import Qwen3VLConfig, qwen3_vl
from models.qwen3_vl.model import abstract_model
from models.sharding import param_shardings
from paravt_jax.method.grpo import GRPOBatch, Totals
from paravt_jax.method.structure import Structure
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
    """A program and the abstract arguments of one call: `program.lower(*arguments).compile()`."""

    program: MeshProgram
    arguments: tuple[Any, ...]


def abstract_rl_update(run: Run, mesh: Mesh, config: Qwen3VLConfig | None = None) -> Abstract:
    """PARA-GRPO's update of a recipe: arguments are the state (donated) and an `RLBatch`. `config`: another model than the published one
    of the recipe's size."""
    settings = _phase(run, "rl", run.rl)
    config, graph, weights = _model(run, mesh, config)
    optimizer = make_optimizer(settings.optimizer, settings.steps)
    state = _state(weights, optimizer)
    shapes, parts = fitted(run.rl_shapes, settings.microbatches, mesh)
    batch = _placed(_rl_batch(shapes, config), mesh)
    return Abstract(
        make_rl_update(graph, optimizer, config.image_token_id, settings, parts, state),
        (state, batch),
    )


def abstract_sft_update(run: Run, mesh: Mesh, config: Qwen3VLConfig | None = None) -> Abstract:
    """The cold start's update of a recipe: arguments are the state (donated) and an `SFTBatch`."""
    settings = _phase(run, "sft", run.sft)
    config, graph, weights = _model(run, mesh, config)
    optimizer = make_optimizer(settings.optimizer, settings.steps)
    state = _state(weights, optimizer)
    shape, parts = fitted_rows(settings.shape, settings.microbatches, mesh)
    batch = _placed(SFTBatch(_packed(shape, config), _shape((), jnp.float32)), mesh)
    return Abstract(
        make_sft_update(graph, optimizer, config.image_token_id, settings, parts, state),
        (state, batch),
    )


def abstract_reference(run: Run, mesh: Mesh, config: Qwen3VLConfig | None = None) -> Abstract:
    """The reference log-probs of the main agents' batch of an RL recipe: arguments are the reference's weights and `Sequences`."""
    settings = _phase(run, "rl", run.rl)
    config, graph, weights = _model(run, mesh, config)
    shapes, parts = fitted(run.rl_shapes, settings.microbatches, mesh)
    program = make_logprobs(
        graph, config.image_token_id, settings.temperature, settings.logprob_chunk, mesh, parts
    )
    reference = jax.tree.map(lambda x: x.update(dtype=jnp.dtype(run.model.dtype)), weights)
    return Abstract(program, (reference, _placed(_sequences(shapes[0], config), mesh)))


def _phase(run: Run, name: str, settings: T | None) -> T:
    if settings is None:
        raise ValueError(f"{run.name}.{name}: None; give a recipe with this phase")
    return settings


def _model(
    run: Run, mesh: Mesh, config: Qwen3VLConfig | None
) -> tuple[Qwen3VLConfig, nnx.GraphDef, Any]:
    config = qwen3_vl(run.model.size) if config is None else config
    graph, weights = nnx.split(abstract_model(config, dtype=jnp.dtype(run.model.dtype)).text)
    return config, graph, jax.tree.map(_place, weights, param_shardings(weights, mesh))


def _state(weights: Any, optimizer: Any) -> TrainState:
    state = TrainState(weights, jax.eval_shape(optimizer.init, weights), _shape((), jnp.int32))
    return jax.tree.map(_place, state, state_shardings(state))


def _shape(shape: tuple[int, ...], dtype: Any) -> Any:
    """A shape in the place of an array."""
    return jax.ShapeDtypeStruct(shape, dtype)


def _place(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _placed(batch: Any, mesh: Mesh) -> Any:
    return jax.tree.map(_place, batch, shardings(batch, mesh))


def _sequences(shape: BatchShape, config: Qwen3VLConfig) -> Sequences:
    p, b, s, t = shape.groups, shape.groups * shape.rows, shape.prompt, shape.suffix
    fields = {
        "prompt_ids": _shape((p, s), jnp.int32),
        "prompt_positions": _shape((3, p, s), jnp.int32),
        "prompt_segments": _shape((p, s), jnp.int32),
        "visual": _shape(
            (p, shape.visual, 1 + config.vision.levels, config.text.hidden_size), jnp.float32
        ),
        "ids": _shape((b, t), jnp.int32),
        "positions": _shape((3, b, t), jnp.int32),
        "segments": _shape((b, t), jnp.int32),
        "sampled": _shape((b, t), jnp.bool_),
        "logprobs": _shape((b, t), jnp.float32),
    }
    return Sequences(**fields)


def _packed(shape: PackedShape, config: Qwen3VLConfig) -> PackedRows:
    row = functools.partial(_shape, (shape.rows, shape.tokens))
    visual = _shape(
        (shape.rows, shape.visual, 1 + config.vision.levels, config.text.hidden_size), jnp.float32
    )
    fields = {name: row(jnp.int32) for name in ("ids", "segments")} | {
        "sampled": row(jnp.bool_),
        "visual": visual,
    }
    return PackedRows(positions=_shape((3, shape.rows, shape.tokens), jnp.int32), **fields)


def _rl_batch(shapes: Sequence[BatchShape], config: Qwen3VLConfig) -> RLBatch:
    p, g, t = shapes[0].groups, shapes[0].rows, max(shape.suffix for shape in shapes)
    n = 2 * t
    b = sum(s.groups * s.rows for s in shapes)
    row, group, yes = (
        functools.partial(_shape, (b, t)),
        functools.partial(_shape, (p, g)),
        jnp.bool_,
    )
    rollouts: dict[str, Any] = {
        "mask": row(yes),
        "behaviour": row(jnp.float32),
        "reference": row(jnp.float32),
        "rollout": _shape((b,), jnp.int32),
        "structure": Structure(
            _shape((b, n), jnp.int32), _shape((b, n), jnp.int8), _shape((b, n), yes)
        ),
        "rewards": group(jnp.float32),
        "anchor_rewards": group(jnp.float32),
        "valid": group(yes),
        "compliant": group(yes),
    }
    totals: Any = Totals(_shape((), jnp.float32), _shape((), jnp.float32))
    advantages: Any = row(jnp.float32)
    return RLBatch(
        tuple(_sequences(s, config) for s in shapes), GRPOBatch(**rollouts), advantages, totals
    )
