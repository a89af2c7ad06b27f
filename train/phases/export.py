"""The trained model as a Hugging Face folder, with its adapters merged."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from models.lora import merge_adapters
from paravt_jax.processes import hosts
from train.export import write_model
from train.phases.context import Context
from train.phases.model import Parts


def export(context: Context, parts: Parts, weights: Any) -> None:
    """Write the folder `model` unless it exists.

    Transformers and `models.qwen3_vl.hf.load` can read it.
    """
    folder = context.folder / "model"
    if hosts.from_first(folder.exists):
        return
    # All processes take part, because the weights are sharded over all of them.
    whole = NamedSharding(context.mesh, PartitionSpec())
    nnx.update(parts.model.text, weights, parts.frozen)
    merge_adapters(parts.model.text)
    nnx.update(parts.model.vision, jax.device_put(parts.tower, whole))
    write_model(parts.model, context.folder / "tokenizer", context.run.frames, folder)
