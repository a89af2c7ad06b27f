"""Adapters as a folder in the format of PEFT: `adapter_model.safetensors`, `adapter_config.json`.

PEFT opens what `save_adapters` writes, and `load` opens what PEFT saved. Layouts follow from the
table of the model's own weights (`hf_layout.tensor_layouts`). Names are those of modules in
transformers 5, which for some families differ from the names of tensors in published folders:

    text/layers/q             [l, d, n, h]  model. ... .{}.self_attn.q_proj.weight
    text/layers/adapters/q/a  [l, d, r]     base_model.model. ... .q_proj.lora_A.weight  [r, d]
    text/layers/adapters/q/b  [l, r, n, h]  base_model.model. ... .q_proj.lora_B.weight  [n * h, r]
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from models.config import ModelConfig
from models.fingerprint import fingerprint
from models.lora import Adapter, LoRASettings, add_adapters, cast, matrices
from models.model import VisionLanguageModel, abstract_model
from models.text import TextDecoder
from models.trained import TrainVision, part_of
from models.weights import folder as hf_folder
from models.weights import hf
from models.weights.hf_config import from_hf
from models.weights.hf_layout import (
    TensorLayout,
    flat_parameters,
    tensor_layouts,
    tensor_places,
    tensor_types,
)
from models.weights.tensor_file import Tensor, read_header
from paravt_jax.data import foreign

ADAPTER_CONFIG = "adapter_config.json"
"""PEFT's settings of the adapters; a folder with this file holds adapters."""
_WEIGHTS = "adapter_model.safetensors"
# The fingerprint of the base. PEFT neither writes nor reads this file.
_BASE = "base.json"
_STACK = "text/layers"
_PREFIX = "base_model.model."
# Fields of adapter_config.json that `_settings` reads.
_READ = {
    "peft_type",
    "base_model_name_or_path",
    "r",
    "lora_alpha",
    "use_rslora",
    "modules_to_save",
}
# Fields that change no output of trained adapters, or that the names of the tensors repeat.
_IRRELEVANT = {
    "auto_mapping",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
}
# Values that leave the base and the product as they are.
_PLAIN = {"bias": ("none",), "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva")}


def base_fingerprint(model: VisionLanguageModel) -> str:
    """Return the fingerprint of a model without adapters, with its weights rounded to bfloat16.

    So it does not depend on the type that the weights are loaded in.
    """
    return f"{fingerprint(nnx.state(model, nnx.Param), dtype=jnp.bfloat16):08x}"


def save_adapters(
    model: VisionLanguageModel,
    settings: LoRASettings,
    folder: str | os.PathLike,
    *,
    base: str,
    base_digest: str,
    train_vision: TrainVision = "none",
) -> None:
    """Write a model's adapters to a new folder. See `hf.save`, also for several processes.

    Args:
        model: a model with adapters. Its other weights are not read.
        settings: the adapters' settings.
        folder: the new folder.
        base: folder or hub id of the model that the adapters belong to.
        base_digest: its `base_fingerprint`.
        train_vision: the part of the vision tower that is written too, as `modules_to_save`.

    Raises:
        FileExistsError: `folder` exists.
    """
    folder = Path(folder)
    hf.require_new(folder)
    layouts = _layouts(model, train_vision)
    parameters = flat_parameters(_state(model, train_vision))
    if Path(base).is_dir():
        base = str(Path(base).absolute())
    companions = {
        ADAPTER_CONFIG: hf_folder.to_json(_config(model, settings, base, train_vision)),
        _BASE: hf_folder.to_json({"fingerprint": base_digest}),
    }
    tensors = tensor_types(layouts, parameters)
    hf.write_folder(folder, {_WEIGHTS: tensors}, companions, layouts, parameters)


def base_folder(folder: Path, *, weights: bool = True) -> Path:
    """Return the folder with the config, tokenizer and weights of a model that is saved in
    `folder`.

    That is the base if `folder` holds adapters, and otherwise `folder` itself.

    Args:
        folder: a folder that exists.
        weights: see `hf_folder.local_folder`.

    Raises:
        FileNotFoundError: the base is not there.
        ValueError: adapter_config.json is damaged, names no base, or names a revision of it on the
            hub; or `folder` holds adapters and a whole model.
    """
    file = folder / ADAPTER_CONFIG
    whole, adapters = hf_folder.has_weights(folder), any(folder.glob("adapter_model.*"))
    # Tools that merge adapters may leave their settings behind.
    if not file.exists() or (whole and not adapters):
        return folder
    if whole:
        raise ValueError(
            f"{folder}: holds the weights of a whole model, and adapters of a base; "
            "move one of the two elsewhere"
        )
    content = _read_json(file)
    base = content.get("base_model_name_or_path")
    if not base:
        raise ValueError(f"{file}: base_model_name_or_path is empty; name the folder of the base")
    revision = content.get("revision") or "main"
    if revision != "main" and not Path(base).is_dir():
        raise ValueError(
            f"{file}: revision is {json.dumps(revision)}, but the base is read from its main "
            "branch; download that revision, and write its folder into base_model_name_or_path"
        )
    try:
        return hf_folder.local_folder(base, weights=weights)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{file}: base_model_name_or_path: {error}, and write it into this file"
        ) from error


def load(
    source: str | os.PathLike,
    config: ModelConfig | None = None,
    *,
    mesh: Mesh | None = None,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
) -> VisionLanguageModel:
    """Load a model from a folder of weights, or a base with its adapters from a PEFT folder.

    Arguments and errors are those of `hf.load`. In addition:

    Raises:
        ValueError: the adapters have another form than `models.lora` computes, or belong to another
            base than the one that their folder names.
    """
    folder = hf_folder.local_folder(source)
    base = base_folder(folder)
    if base == folder:
        return hf.load(folder, config, mesh=mesh, dtype=dtype, param_dtype=param_dtype)
    config = from_hf(base / hf_folder.CONFIG) if config is None else config
    if not (folder / _WEIGHTS).exists():
        remedy = "open these adapters with PEFT and save them again"
        raise FileNotFoundError(f"{folder}: has no {_WEIGHTS}, and {hf_folder.NO_BIN}; {remedy}")
    tensors = read_header(folder / _WEIGHTS).values()
    names = {hf_folder.plain_name(tensor.name) for tensor in tensors}
    # The files are compared before the base is read, which takes minutes.
    settings = _settings(folder, names, config)
    trained = _trained_vision(names, config)
    stored = _matched(folder, base, tensors, abstract_model(config, lora=settings), trained)
    model = hf.load(base, config, mesh=mesh, dtype=dtype, param_dtype=param_dtype)
    _require_base(folder, base, model)
    add_adapters(model.text, settings, seed=0)
    state = cast(_state(model, trained), param_dtype)
    hf.require_sound(folder, [_WEIGHTS])
    hf.read_parameters(stored, _layouts(model, trained), state, mesh)
    nnx.update(model, state)
    return model


def _state(model: VisionLanguageModel, train_vision: TrainVision) -> nnx.State:
    """Return the adapters of a model, and the part of its tower that belongs to them."""
    adapters = nnx.state(model, nnx.LoRAParam)
    if train_vision == "none":
        return adapters
    return nnx.merge_state(adapters, {"vision": nnx.state(part_of(model.vision, train_vision))})


def _layouts(model: VisionLanguageModel, train_vision: TrainVision) -> dict[str, TensorLayout]:
    """Map the path of each parameter in `_state` to its tensor."""
    stems = _stems(model)
    adapters = {
        f"{_STACK}/adapters/{name}/{matrix}": TensorLayout(
            f"{_PREFIX}{stems[name]}.lora_{matrix.upper()}.weight",
            getattr(adapter, matrix).get_metadata("inputs"),
        )
        for name, adapter in model.text.layers.adapters.items()
        for matrix in ("a", "b")
    }
    saved = flat_parameters(_state(model, train_vision))
    modules = {
        path: dataclasses.replace(layout, name=_PREFIX + _module_name(layout.name))
        for path, layout in tensor_layouts(model.config).items()
        if path in saved
    }
    return adapters | modules


def _module_name(tensor: str) -> str:
    """Return what transformers 5 calls a tensor: all families have the same containers there."""
    name = hf_folder.plain_name(tensor)
    return f"model.{name}" if name.startswith("visual.") else f"model.language_model.{name}"


def _trained_vision(names: Collection[str], config: ModelConfig) -> TrainVision:
    """Return the part of the tower whose tensors, given by plain names, are in a file."""
    layouts = tensor_layouts(config)
    # A tensor of each part; `_matched` compares all of them. The tower has the mergers too.
    if hf_folder.plain_name(layouts["vision/patch/kernel"].name) in names:
        return "tower"
    merger = hf_folder.plain_name(layouts["vision/merger/fc1/kernel"].name)
    return "merger" if merger in names else "none"


def _stems(model: VisionLanguageModel) -> dict[str, str]:
    """Name of each matrix of the layers -> its module's name, with `{}` for the layer's number."""
    layouts = tensor_layouts(model.config)
    tensors = {name: layouts[f"{_STACK}/{name}"].name for name in matrices(model.text)}
    return {name: _module_name(tensor.removesuffix(".weight")) for name, tensor in tensors.items()}


def _config(
    model: VisionLanguageModel, settings: LoRASettings, base: str, train_vision: TrainVision
) -> dict[str, Any]:
    """Return the content of adapter_config.json."""
    stems = _stems(model)
    # A pattern of whole names. A list of their last words could match modules of the tower as well.
    patterns = [
        re.escape(stems[name]).replace(r"\{\}", r"\d+") for name in model.text.layers.adapters
    ]
    return {
        "base_model_name_or_path": base,
        "inference_mode": True,
        "lora_alpha": settings.alpha,
        "modules_to_save": _saved_modules(model.config, train_vision),
        "peft_type": "LORA",
        "r": settings.rank,
        "target_modules": "|".join(patterns),
        "use_rslora": False,
    }


def _saved_modules(config: ModelConfig, train_vision: TrainVision) -> list[str] | None:
    """Return the modules in transformers of the trained part of the tower."""
    # PEFT does not save a list of modules as a whole.
    mergers = ["merger", *(f"deepstack_merger_list.{n}" for n in range(config.vision.levels))]
    modules = {"tower": ["model.visual"], "merger": [f"model.visual.{name}" for name in mergers]}
    return modules.get(train_vision)


def _settings(folder: Path, names: Collection[str], config: ModelConfig) -> LoRASettings:
    """Return the settings of saved adapters. Which matrices they adapt follows from the tensors'
    plain names."""
    file = folder / ADAPTER_CONFIG
    content = _read_json(file)
    if content.get("peft_type") != "LORA":
        raise ValueError(f"{file}: peft_type is {content.get('peft_type')!r}; only LORA is known")
    for name, value in content.items():
        plain = not value or value in _PLAIN.get(name, ())
        if name not in _READ | _IRRELEVANT and not plain:
            raise ValueError(
                f"{file}: {name} is {json.dumps(value)}; only plain LoRA is known: "
                f"{hf_folder.MERGE}"
            )
    # Of any layer: the error for adapters of some layers names those that are missing.
    adapted = {re.sub(r"^layers\.\d+", "layers.{}", name) for name in names}
    targets = [
        name
        for name, stem in _stems(abstract_model(config)).items()
        if f"{hf_folder.plain_name(stem)}.lora_A.weight" in adapted
    ]
    if not targets:
        raise ValueError(
            f"{folder / _WEIGHTS}: adapts no matrix of the decoder, but {min(names, default='')}; "
            f"if {config.family} is their architecture, {hf_folder.MERGE}"
        )
    try:
        rank, alpha = content["r"], float(content["lora_alpha"])
        if content.get("use_rslora"):
            # The scale is alpha / sqrt(rank).
            alpha *= math.sqrt(rank)
        return LoRASettings(rank, alpha, tuple(targets))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file}: damaged ({error!r}); save the adapters again") from error


def _matched(
    folder: Path,
    base: Path,
    tensors: Collection[Tensor],
    model: VisionLanguageModel,
    train_vision: TrainVision,
) -> dict[str, Tensor]:
    """Return the tensors of the adapters of an abstract model, by name.

    Raises:
        ValueError: some are missing, of another shape, or there twice; or there are others.
    """
    parameters = flat_parameters(_state(model, train_vision))
    places = tensor_places(_layouts(model, train_vision), parameters)
    shapes = {name: place.shape for name, place in places.items()}
    found, differences = hf_folder.match_tensors(tensors, shapes, {})
    if any(found[name].shape[:1] != shapes[name][:1] for name in found if ".lora_A." in name):
        remedy = f"r in {ADAPTER_CONFIG} is not their rank: save the adapters again"
    elif differences["misshaped"]:
        remedy = f"name the base of these adapters in {ADAPTER_CONFIG}, which is not {base}"
    elif all(".lora_" in name for name in differences["missing"] + differences["unknown"]):
        remedy = f"only adapters of all layers are known: {hf_folder.MERGE}"
    else:
        remedy = f"of whole modules, only all mergers or the tower are known: {hf_folder.MERGE}"
    hf_folder.require_none(folder, differences, remedy)
    return found


def _require_base(folder: Path, base: Path, model: VisionLanguageModel) -> None:
    """Raise ValueError if the fingerprint of the loaded base is not the recorded one, if any."""
    file = folder / _BASE
    if not file.exists():
        return
    recorded, loaded = _read_json(file).get("fingerprint"), base_fingerprint(model)
    if loaded != recorded:
        raise ValueError(
            f"{folder}: belongs to a base with the fingerprint {recorded}, but that of {base} is "
            f"{loaded}; name the right base in {ADAPTER_CONFIG}"
        )


def _read_json(file: Path) -> dict[str, Any]:
    return foreign.read_object(file, "save the adapters again")


def merge_adapters(decoder: TextDecoder) -> None:
    """Add the adapters to their matrices, and remove them.

    Sums are rounded to the type of the matrices: merge bfloat16 weights only for export.
    """

    @jax.jit
    def merged(value: jax.Array, adapter: Adapter) -> jax.Array:
        return (value.astype(jnp.float32) + _update(adapter)).astype(value.dtype)

    weights = matrices(decoder)
    for name, adapter in decoder.layers.adapters.items():
        value = weights[name].get_value()
        weights[name].set_value(jax.device_put(merged(value, adapter), value.sharding))
    decoder.layers.adapters = nnx.Dict()


def _update(adapter: Adapter) -> Float[Array, "l i ..."]:
    """Return scale * A B of every layer, in float32 and in the shape of the matrices."""
    a, b = adapter.a[...], adapter.b[...]
    layers, *inputs, rank = a.shape
    down = a.reshape(layers, -1, rank).astype(jnp.float32)
    up = b.reshape(layers, rank, -1).astype(jnp.float32)
    product = jnp.matmul(down * adapter.scale, up, precision="highest")
    return product.reshape(layers, *inputs, *b.shape[2:])
