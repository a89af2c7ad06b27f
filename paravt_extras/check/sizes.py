"""Sizes of a run's files and arrays, by arithmetic from the shapes of its model."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from models.config import ModelConfig
from models.lora import LoRASettings
from models.model import abstract_model
from models.trained import apart, split, together
from models.trained_vision import TrainVision, cached_shape
from paravt_extras.fit import total_bytes
from train.learn.optimizer import OptimizerSettings, make_optimizer
from train.settings import Run

# Bytes of a checkpoint of the tiny model, rounded up. Its shapes are not computed, so that the
# check of a small run costs nothing.
_TINY_STATE = 16e6


class _Shapes(NamedTuple):
    """Abstract weights of a model."""

    text: Any
    """Weights of the decoder that are trained: all of them, or its adapters."""
    vision: Any
    """Weights of the tower that are trained; None: none."""
    frozen: Any
    """The decoder's other weights."""
    tower: Any


@functools.cache
def _shapes(
    config: ModelConfig, dtype: str, lora: LoRASettings | None, train_vision: TrainVision
) -> _Shapes:
    model = abstract_model(config, param_dtype=dtype, lora=lora)
    _, trained, frozen = split(model, train_vision)
    return _Shapes(*apart(trained), frozen, nnx.state(model.vision))


def _shapes_of(run: Run) -> _Shapes:
    return _shapes(run.model.config(), run.param_dtype, run.lora, run.train_vision)


def trained_bytes(run: Run, dtype: str) -> float:
    """Bytes of the trained weights in a type."""
    if run.model.size == "tiny":
        return _TINY_STATE / 3
    shapes = _shapes_of(run)
    weights = sum(math.prod(x.shape) for x in jax.tree.leaves((shapes.text, shapes.vision)))
    return float(weights * jnp.dtype(dtype).itemsize)


def frozen_bytes(run: Run) -> float:
    """Bytes of the decoder's weights that are not trained."""
    return 0.0 if run.model.size == "tiny" else total_bytes(_shapes_of(run).frozen)


def tower_bytes(run: Run) -> float:
    """Bytes of the vision tower in the type in which it is loaded."""
    return 0.0 if run.model.size == "tiny" else total_bytes(_shapes_of(run).tower)


def model_bytes(run: Run) -> float:
    """Bytes of the exported model. Adapters are merged into the frozen weights."""
    if run.model.size == "tiny":
        return _TINY_STATE / 3
    shapes = _shapes_of(run)
    return total_bytes(shapes.text if run.lora is None else shapes.frozen) + tower_bytes(run)


def published_bytes(run: Run) -> float:
    """Bytes of published weights of the model's size, which are in bfloat16."""
    return model_bytes(run) * 2 / jnp.dtype(run.param_dtype).itemsize


def state_bytes(run: Run, optimizer: OptimizerSettings) -> float:
    """Bytes of the trained weights and their optimizer's moments."""
    if run.model.size == "tiny":
        return _TINY_STATE
    shapes = _shapes_of(run)
    trained = together(shapes.text, shapes.vision)
    moments = jax.eval_shape(make_optimizer(optimizer, steps=2).init, trained)
    return total_bytes(trained) + total_bytes(moments)


@dataclasses.dataclass(frozen=True)
class SavedPhase:
    """The checkpoints of a phase."""

    steps: int
    """The last step, which is always saved."""
    save_every: int
    keep: int
    """Number of checkpoints that stay. A new one is complete before the oldest is removed."""
    bytes: float
    """Size of one checkpoint."""

    def saves_after(self, step: int) -> int:
        """Number of regular checkpoints of later steps."""
        return math.ceil(self.steps / self.save_every) - step // self.save_every


def checkpoints(run: Run) -> dict[str, SavedPhase]:
    """The checkpoints of each phase, by its name."""
    phases: dict[str, tuple[OptimizerSettings, int, int]] = {}
    if run.sft is not None:
        phases["sft"] = (run.sft.optimizer, run.sft.steps, run.sft.save_every)
    if run.rl is not None:
        phases["rl"] = (run.rl.optimizer, run.rl.steps, run.rl.save_every)
        if run.rl.control and run.sft is not None:
            phases["control"] = (run.sft.optimizer, run.rl.steps, run.sft.save_every)
    found = {}
    for name, (optimizer, steps, save_every) in phases.items():
        best = name == "rl" and run.checkpoints.best != "none"
        size = state_bytes(run, optimizer)
        if run.lora is None and run.model.size != "tiny":
            # What is trained of the tower is a part of the state.
            size += tower_bytes(run) - total_bytes(_shapes_of(run).vision)
        found[name] = SavedPhase(steps, save_every, run.checkpoints.keep + best, size)
    return found


def host_memory(run: Run, hosts: int, on_cpu: bool) -> dict[str, float]:
    """Bytes of the arrays that one host's process keeps in memory, by name.

    The plan of a slice (`paravt_extras.plan`) also has what only compiled programs tell.

    Args:
        run: The settings.
        hosts: Number of hosts, which share the batch, the checkpoint and the reference.
        on_cpu: Whether the devices are CPUs, whose memory is the host's.
    """
    phases = [phase for phase in (run.sft, run.rl) if phase is not None]
    state = max((state_bytes(run, phase.optimizer) for phase in phases), default=0.0)
    parts = {
        # The small world has too few frames to fill the store.
        "frames.cache_mib": 0.0 if run.model.size == "tiny" else run.frames.cache_mib * 2.0**20,
        "a checkpoint in flight": state / hosts,
        "the vision tower": tower_bytes(run),
    }
    if run.rl is not None:
        reference = trained_bytes(run, run.model.dtype) * run.mesh.data
        parts["the reference"] = reference / hosts
        parts["the batch"] = _visual_bytes(run) / hosts
    if on_cpu:
        parts["weights and optimizer"] = state + frozen_bytes(run)
    return parts


def _visual_bytes(run: Run) -> float:
    """Bytes of what is cached of the frames of an RL batch, which is most of it."""
    tokens = run.rl_shape.slots(1, 1)
    if run.train_vision == "tower":
        tokens = run.rl_shape.frames(1, 1) * run.largest_frame
    numbers = tokens * math.prod(cached_shape(run.vision, run.train_vision))
    return float(numbers * jnp.dtype(run.model.dtype).itemsize)
