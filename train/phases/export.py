"""The trained model as a Hugging Face folder, and its adapters as a PEFT folder."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from models.lora import merge_adapters
from models.peft_folder import save_adapters
from models.trained import apart
from paravt_jax.processes import hosts
from train.export import write_model
from train.phases.context import Context
from train.phases.model import Parts


def export(context: Context, parts: Parts, weights: Any) -> None:
    """Write the folder `model`, and `adapter` if the base is on disk, unless `model` exists.

    Transformers and `models.weights.hf.load` can read the model, and PEFT the adapters.
    """
    folder = context.folder / "model"
    if hosts.from_first(folder.exists):
        return
    # All processes take part, because the weights are sharded over all of them.
    whole = NamedSharding(context.mesh, PartitionSpec())
    text, vision = apart(weights)
    nnx.update(parts.model.text, text, parts.frozen)
    if vision is not None:
        nnx.update(parts.model.vision, vision)
    _export_adapters(context, parts)
    merge_adapters(parts.model.text)
    nnx.update(parts.model.vision, jax.device_put(parts.tower_with(vision), whole))
    write_model(parts.model, context.folder / "tokenizer", context.run.frames, folder)


def _export_adapters(context: Context, parts: Parts) -> None:
    """Write the folder `adapter`. Adapters of random weights would have no base to name."""
    lora, digest = context.run.lora, context.origin.get("base_fingerprint")
    folder = context.folder / "adapter"
    if lora is None or digest is None or hosts.from_first(folder.exists):
        return
    base = context.run.model.path
    part = context.run.train_vision
    save_adapters(parts.model, lora, folder, base=base, base_digest=digest, train_vision=part)
