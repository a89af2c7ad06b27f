"""`Qwen3VLConfig` as a Hugging Face `config.json`, and back."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any, TypeVar

from models.qwen3_vl.config import Qwen3VLConfig, TextConfig, VisionConfig

# Fields of config.json for which this model supports only one value.
_SUPPORTED = {
    "text_config": {"hidden_act": "silu", "attention_bias": False},
    "vision_config": {"hidden_act": "gelu_pytorch_tanh"},
}
_IDS = tuple(
    field.name for field in dataclasses.fields(Qwen3VLConfig) if field.name.endswith("_token_id")
)

Tower = TypeVar("Tower", VisionConfig, TextConfig)


def from_hf(source: Mapping[str, Any] | str | os.PathLike) -> Qwen3VLConfig:
    """Reads a Hugging Face `config.json` as written by transformers 4.57 or 5.x.

    Args:
        source: the content of the file, or its path.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is for another model, lacks a field, or sets one to a value that this
            model does not support.
    """
    content: Mapping[str, Any]
    if isinstance(source, Mapping):
        content = source
    else:
        content = _read_json(source)
    kind = content.get("model_type")
    _require(
        kind == "qwen3_vl",
        f"model_type = {kind!r}: only qwen3_vl (dense) is supported; "
        "give the config.json of such a model",
    )
    for name, supported in _SUPPORTED.items():
        for field, value in supported.items():
            given = content.get(name, {}).get(field, value)
            _require(
                given == value,
                f"{name}.{field} = {given!r}: only {value!r} is supported; "
                "give a Qwen3-VL config.json",
            )
    text = content.get("text_config", {})
    vision = content.get("vision_config", {})
    # transformers 5 writes `rope_parameters`, 4.57 writes `rope_theta` and `rope_scaling`.
    rope = text.get("rope_parameters") or {
        **(text.get("rope_scaling") or {}),
        "rope_theta": text.get("rope_theta", 5_000_000.0),
    }
    scaling = rope.get("rope_type", "default")
    _require(
        scaling == "default",
        f"text_config.rope_type = {scaling!r}: only default is supported; remove the scaling",
    )
    tied = content.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    text = {"mrope_section": (24, 20, 20), **text, **rope, "tie_word_embeddings": tied}
    vision = {**vision, **(vision.get("rope_parameters") or {})}
    ids = {name: content[name] for name in _IDS if name in content}
    return Qwen3VLConfig(
        _read(VisionConfig, "vision_config", vision), _read(TextConfig, "text_config", text), **ids
    )


def _read(kind: type[Tower], name: str, content: Mapping[str, Any]) -> Tower:
    """A tower's configuration from `content`. Entries that are no fields are ignored."""
    fields = dataclasses.fields(kind)
    missing = [
        field.name
        for field in fields
        if field.default is dataclasses.MISSING and field.name not in content
    ]
    _require(
        not missing,
        f"{name}: has no {', '.join(missing)}; give the config.json of a whole Qwen3-VL",
    )
    values: dict[str, Any] = {}
    for field in fields:
        if field.name not in content:
            continue
        value = content[field.name]
        # Published files have whole numbers in float fields. Convert them: configurations are
        # written to files and compared.
        if field.type == "float":
            value = float(value)
        values[field.name] = tuple(value) if isinstance(value, list) else value
    return kind(**values)


def _read_json(path: str | os.PathLike) -> Mapping[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{path}: does not exist; give the folder of a Qwen3-VL checkpoint with its config.json"
        ) from error
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}); fetch it again") from error
    _require(
        isinstance(content, dict),
        f"{path}: contains a {type(content).__name__}, not a JSON object; fetch it again",
    )
    return content


def to_hf(config: Qwen3VLConfig) -> dict[str, Any]:
    """The content of a `config.json` that describes `config`.

    `from_hf` and transformers (4.57 and 5.x) read it back as the same model.
    """
    text = dataclasses.asdict(config.text)
    vision = dataclasses.asdict(config.vision)
    tied = text.pop("tie_word_embeddings")
    rope = {
        "rope_type": "default",
        "mrope_section": list(text.pop("mrope_section")),
        "mrope_interleaved": True,
    }
    # `rope_theta` and `rope_scaling` are read by transformers 4.57, `rope_parameters` by 5.
    text |= {
        "model_type": "qwen3_vl_text",
        "rope_scaling": rope,
        "rope_parameters": {**rope, "rope_theta": text["rope_theta"]},
    }
    vision |= {
        "model_type": "qwen3_vl",
        "deepstack_visual_indexes": list(config.vision.deepstack_visual_indexes),
        "rope_parameters": {"rope_type": "axial", "rope_theta": vision.pop("rope_theta")},
    }
    return {
        "model_type": "qwen3_vl",
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "tie_word_embeddings": tied,
        **{name: getattr(config, name) for name in _IDS},
        "text_config": text | _SUPPORTED["text_config"],
        "vision_config": vision | _SUPPORTED["vision_config"],
    }


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)
