"""Weights in and out in the Hugging Face layout: safetensors files and a `config.json`, as transformers 4.57 and 5.x write and read them.

Owns the correspondence of names and layouts. Refuses a folder whose tensors are not exactly the model's, naming all that are
missing, unknown or misshaped at once. Invariant: what `save` wrote, `load` reads back bit for bit; a folder appears whole or not at all.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from safetensors import safe_open
from safetensors.numpy import save_file

from models.qwen3_vl.config import Qwen3VLConfig, from_hf, to_hf
from models.qwen3_vl.model import Qwen3VL, abstract_model

_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SHOWN = 20  # names of a kind that an error lists


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """One of our parameters in their layout.

    `name` has `{}` where the number in a stack goes. `inputs` counts our axes that a matrix takes in (theirs is [out, in]), 0
    where the tensor is the same in both. `shape` is theirs where it is neither ours nor [out, in].
    """

    name: str
    inputs: int = 0
    shape: tuple[int, ...] | None = None

    def theirs(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        if self.shape or not self.inputs:
            return self.shape or ours
        return math.prod(ours[self.inputs :]), math.prod(ours[: self.inputs])

    def to_ours(self, value: np.ndarray, ours: tuple[int, ...]) -> np.ndarray:
        return value.reshape(-1, math.prod(ours[: self.inputs])).T.reshape(ours) if self.inputs else value

    def to_theirs(self, value: np.ndarray) -> np.ndarray:
        shape = self.theirs(value.shape)
        if not self.inputs:
            return value
        return np.ascontiguousarray(value.reshape(math.prod(value.shape[: self.inputs]), -1).T).reshape(shape)


def _tensors(config: Qwen3VLConfig) -> dict[str, _Tensor]:
    """Our parameter path -> its tensor in their layout."""
    layer, block = "model.language_model.layers.{}", "model.visual.blocks.{}"
    v = config.vision
    table = {
        "text/embedding": _Tensor("model.language_model.embed_tokens.weight"),
        "text/norm": _Tensor("model.language_model.norm.weight"),
        "text/layers/input_norm": _Tensor(f"{layer}.input_layernorm.weight"),
        "text/layers/post_norm": _Tensor(f"{layer}.post_attention_layernorm.weight"),
        "text/layers/q_norm": _Tensor(f"{layer}.self_attn.q_norm.weight"),
        "text/layers/k_norm": _Tensor(f"{layer}.self_attn.k_norm.weight"),
        "text/layers/o": _Tensor(f"{layer}.self_attn.o_proj.weight", inputs=2),
        "vision/positions": _Tensor("model.visual.pos_embed.weight"),
        "vision/patch/kernel": _Tensor(
            "model.visual.patch_embed.proj.weight", 1, (v.hidden_size, v.in_channels, v.temporal_patch_size, v.patch_size, v.patch_size)
        ),
        "vision/patch/bias": _Tensor("model.visual.patch_embed.proj.bias"),
    }
    table |= {f"text/layers/{ours}": _Tensor(f"{layer}.self_attn.{ours}_proj.weight", inputs=1) for ours in ("q", "k", "v")}
    table |= {f"text/layers/{ours}": _Tensor(f"{layer}.mlp.{ours}_proj.weight", inputs=1) for ours in ("gate", "up", "down")}
    if not config.text.tie_word_embeddings:
        table["text/head"] = _Tensor("lm_head.weight")
    in_block = {"qkv": "attn.qkv", "out": "attn.proj", "up": "mlp.linear_fc1", "down": "mlp.linear_fc2"}
    linears = {f"vision/blocks/{ours}": f"{block}.{theirs}" for ours, theirs in in_block.items()}
    norms = {f"vision/blocks/{name}": f"{block}.{name}" for name in ("norm1", "norm2")}
    mergers = {"vision/merger": "model.visual.merger"}
    if v.levels:
        mergers["vision/deepstack"] = "model.visual.deepstack_merger_list.{}"
    for ours, theirs in mergers.items():
        linears |= {f"{ours}/{fc}": f"{theirs}.linear_{fc}" for fc in ("fc1", "fc2")}
        norms[f"{ours}/norm"] = f"{theirs}.norm"
    for ours, theirs in linears.items():
        table |= {f"{ours}/kernel": _Tensor(f"{theirs}.weight", inputs=1), f"{ours}/bias": _Tensor(f"{theirs}.bias")}
    for ours, theirs in norms.items():
        table |= {f"{ours}/scale": _Tensor(f"{theirs}.weight"), f"{ours}/bias": _Tensor(f"{theirs}.bias")}
    return table


def _parameters(model: Qwen3VL) -> dict[str, nnx.Variable]:
    return {"/".join(map(str, path)): variable for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def _layout(config: Qwen3VLConfig, parameters: Mapping[str, nnx.Variable]) -> dict[str, tuple[str, int | None, tuple[int, ...]]]:
    """Their name -> (our path, number in the stack or None, their shape)."""
    layout = {}
    for path, tensor in _tensors(config).items():
        shape = parameters[path].shape
        if "{}" not in tensor.name:
            layout[tensor.name] = (path, None, tensor.theirs(shape))
            continue
        for number in range(shape[0]):
            layout[tensor.name.format(number)] = (path, number, tensor.theirs(shape[1:]))
    return layout


def load(
    folder: str | os.PathLike, config: Qwen3VLConfig | None = None, *, dtype: DTypeLike = jnp.float32, param_dtype: DTypeLike = jnp.float32
) -> Qwen3VL:
    """The model in `folder` (`model.safetensors`, or several files and their index), weights as `param_dtype`.

    `config` defaults to the folder's `config.json`. FileNotFoundError without weights; ValueError listing every tensor that is
    missing, unknown or of another shape.
    """
    folder = Path(folder)
    config = from_hf(folder / "config.json") if config is None else config
    model = abstract_model(config, dtype=dtype, param_dtype=param_dtype)
    parameters, tensors = _parameters(model), _tensors(config)
    layout = _layout(config, parameters)
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(file, framework="numpy")) for file in _files(folder)]
        found = {name: file for file in files for name in file.keys()}  # noqa: SIM118  not a mapping
        if config.text.tie_word_embeddings:
            found.pop("lm_head.weight", None)  # some files repeat the tied embedding
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name, file in found.items()}
        _check(folder, shapes, {name: shape for name, (_, _, shape) in layout.items()})
        values: dict[str, np.ndarray] = {}
        for name, (path, number, _) in layout.items():
            shape = parameters[path].shape
            part = tensors[path].to_ours(found[name].get_tensor(name), shape if number is None else shape[1:])
            if number is None:
                values[path] = part
            else:
                values.setdefault(path, np.empty(shape, part.dtype))[number] = part
        for path, variable in parameters.items():
            variable.set_value(jnp.asarray(values.pop(path), param_dtype))
    graph, state = nnx.split(model)
    return nnx.merge(graph, nnx.map_state(lambda path, _: parameters["/".join(map(str, path))], state))


def _files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.exists():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        return [folder / name for name in names]
    if not (folder / _FILE).exists():
        raise FileNotFoundError(f"{folder}: holds neither {_FILE} nor {_INDEX}; give the folder of a Qwen3-VL checkpoint")
    return [folder / _FILE]


def _check(folder: Path, found: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]]) -> None:
    problems = {
        "missing": sorted(wanted.keys() - found.keys()),
        "unknown": sorted(found.keys() - wanted.keys()),
        "misshaped": [f"{n} {found[n]}, not {wanted[n]}" for n in sorted(wanted.keys() & found.keys()) if found[n] != wanted[n]],
    }
    lines = []
    for kind, names in problems.items():
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            lines.append(f"{len(names)} {kind}: {', '.join(names[:_SHOWN])}{more}")
    if lines:
        raise ValueError(f"{folder}: tensors differ from the configuration's; {'; '.join(lines)}; check config.json and the model's size")


def save(model: Qwen3VL, folder: str | os.PathLike) -> None:
    """Writes `model` to a new `folder` that transformers and `load` read; FileExistsError where it exists. Failure leaves nothing."""
    folder = Path(folder)
    if folder.exists():
        raise FileExistsError(f"{folder}: exists; choose a new folder, or remove this one first")
    parameters, tensors = _parameters(model), _tensors(model.config)
    values = {}
    for name, (path, number, _) in _layout(model.config, parameters).items():
        whole = np.asarray(parameters[path][...])
        values[name] = tensors[path].to_theirs(whole if number is None else whole[number])
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        save_file(values, temporary / _FILE, metadata={"format": "pt"})
        (temporary / "config.json").write_text(json.dumps(to_hf(model.config), indent=2) + "\n", encoding="utf-8")
        temporary.chmod(0o755)
        os.replace(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
