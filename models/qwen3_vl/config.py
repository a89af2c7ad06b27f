"""Sizes of Qwen3-VL: the published ones, the laptop one, and what a `config.json` says.

Owns the shape of the model and refuses shapes that cannot be built, naming field, value, rule and remedy. Invariant: a
configuration that exists can be built; two equal configurations build the same parameters.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from typing import Any, TypeVar


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def _require_positive(name: str, config: VisionConfig | TextConfig) -> None:
    for field, value in vars(config).items():
        _require(
            type(value) is not int or value > 0,
            f"{name}.{field} = {value}: sizes and counts are positive; use 1 or more",
        )


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """The vision tower. Sizes in units of channels; `num_position_embeddings` counts the cells of a square position table."""

    hidden_size: int
    depth: int
    num_heads: int
    intermediate_size: int
    out_hidden_size: int
    num_position_embeddings: int
    deepstack_visual_indexes: tuple[int, ...]
    patch_size: int = 16
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    in_channels: int = 3
    rope_theta: float = 10_000.0

    def __post_init__(self):
        _require_positive("vision", self)
        cells, side, taps = (
            self.num_position_embeddings,
            math.isqrt(self.num_position_embeddings),
            self.deepstack_visual_indexes,
        )
        _require(
            side * side == cells,
            f"vision.num_position_embeddings = {cells}: the position table is square; use {side**2} or {(side + 1) ** 2}",
        )
        _require(
            self.hidden_size % (4 * self.num_heads) == 0,
            f"vision.hidden_size = {self.hidden_size}: heads are multiples of 4 (2-D rotary); use a multiple of {4 * self.num_heads}",
        )
        _require(
            all(0 <= i < self.depth for i in taps) and list(taps) == sorted(set(taps)),
            f"vision.deepstack_visual_indexes = {taps}: rising layers of the tower (depth {self.depth}); name each tap once",
        )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_dim(self) -> int:
        """Numbers in one flattened patch: channels x frames x height x width."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def levels(self) -> int:
        """DeepStack levels: feature maps handed to the first text layers beside the merged features."""
        return len(self.deepstack_visual_indexes)


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """The decoder. `mrope_section` splits the `head_dim / 2` rotary frequencies between time, height and width.

    `max_position_embeddings` is what the weights were trained for, in tokens; nothing is computed from it, but servers ask for it.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    mrope_section: tuple[int, int, int]
    rope_theta: float
    tie_word_embeddings: bool
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 262_144

    def __post_init__(self):
        _require_positive("text", self)
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        _require(
            heads % kv_heads == 0,
            f"text.num_attention_heads = {heads}: every kv head serves equally many; use a multiple of num_key_value_heads = {kv_heads}",
        )
        _require(
            len(self.mrope_section) == 3 and 2 * sum(self.mrope_section) == self.head_dim,
            f"text.mrope_section = {self.mrope_section}: three counts; make them add up to head_dim / 2 = {self.head_dim / 2:g}",
        )


@dataclasses.dataclass(frozen=True)
class Qwen3VLConfig:
    """Both towers and the ids of the special tokens that the model itself must know."""

    vision: VisionConfig
    text: TextConfig
    image_token_id: int = 151_655
    video_token_id: int = 151_656
    vision_start_token_id: int = 151_652
    vision_end_token_id: int = 151_653

    def __post_init__(self):
        vision, text = self.vision, self.text
        _require(
            vision.out_hidden_size == text.hidden_size,
            f"vision.out_hidden_size = {vision.out_hidden_size}: visual vectors stand among embeddings; use {text.hidden_size}",
        )
        _require(
            vision.levels <= text.num_hidden_layers,
            f"vision.deepstack_visual_indexes: {vision.levels} levels need a text layer each; tap at most {text.num_hidden_layers}",
        )


_PUBLISHED = {  # hidden, layers, heads, MLP, tied, large vision tower
    "2b": (2048, 28, 16, 6144, True, False),
    "4b": (2560, 36, 32, 9728, True, False),
    "8b": (4096, 36, 32, 12288, False, True),
    "32b": (5120, 64, 64, 25600, False, True),
}


def qwen3_vl(size: str) -> Qwen3VLConfig:
    """The published dense model of `size`: "2b", "4b", "8b" or "32b". ValueError for another."""
    if size not in _PUBLISHED:
        raise ValueError(
            f"size = {size!r}: one of {', '.join(_PUBLISHED)}; choose one of them or build a Qwen3VLConfig"
        )
    hidden, layers, heads, mlp, tied, large = _PUBLISHED[size]
    vision = VisionConfig(
        hidden_size=1152 if large else 1024,
        depth=27 if large else 24,
        num_heads=16,
        intermediate_size=4304 if large else 4096,
        out_hidden_size=hidden,
        num_position_embeddings=48 * 48,
        deepstack_visual_indexes=(8, 16, 24) if large else (5, 11, 17),
    )
    text = TextConfig(
        vocab_size=151_936,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        mrope_section=(24, 20, 20),
        rope_theta=5_000_000.0,
        tie_word_embeddings=tied,
    )
    return Qwen3VLConfig(vision, text)


def tiny(vocab_size: int) -> Qwen3VLConfig:
    """The laptop model, some 0.8 M parameters and embeddings: every part of the large one, one DeepStack level, 2x2 patches a frame."""
    vision = VisionConfig(
        hidden_size=64,
        depth=2,
        num_heads=4,
        intermediate_size=128,
        out_hidden_size=128,
        num_position_embeddings=4,
        deepstack_visual_indexes=(0,),
    )
    text = TextConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        mrope_section=(12, 10, 10),
        rope_theta=10_000.0,
        tie_word_embeddings=True,
    )
    return Qwen3VLConfig(vision, text)


# What this model computes, where a config.json might ask for something else.
_COMPUTED = {
    "text_config": {"hidden_act": "silu", "attention_bias": False},
    "vision_config": {"hidden_act": "gelu_pytorch_tanh"},
}
_IDS = tuple(
    field.name for field in dataclasses.fields(Qwen3VLConfig) if field.name.endswith("_token_id")
)

Tower = TypeVar("Tower", VisionConfig, TextConfig)


def from_hf(source: Mapping[str, Any] | str | os.PathLike) -> Qwen3VLConfig:
    """Reads a Hugging Face `config.json` (its content, or the path of the file), as written by transformers 4.57 or 5.x.

    ValueError for another model type, for what this model does not compute, and for fields that are missing.
    """
    content: Mapping[str, Any]
    if isinstance(source, Mapping):
        content = source
    else:
        content = _read_json(source)
    kind = content.get("model_type")
    _require(
        kind == "qwen3_vl",
        f"model_type = {kind!r}: only qwen3_vl (dense) is built; give the config.json of such a model",
    )
    text, vision = content.get("text_config", {}), content.get("vision_config", {})
    for name, computed in _COMPUTED.items():
        for field, value in computed.items():
            given = content.get(name, {}).get(field, value)
            _require(
                given == value,
                f"{name}.{field} = {given!r}: only {value!r} is computed; give a Qwen3-VL config.json",
            )
    rope = text.get("rope_parameters") or {
        **(text.get("rope_scaling") or {}),
        "rope_theta": text.get("rope_theta", 5_000_000.0),
    }
    scaling = rope.get("rope_type", "default")
    _require(
        scaling == "default",
        f"text_config.rope_type = {scaling!r}: only default is computed; remove the scaling",
    )
    tied = content.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    text = {"mrope_section": (24, 20, 20), **text, **rope, "tie_word_embeddings": tied}
    vision = {**vision, **(vision.get("rope_parameters") or {})}
    ids = {name: content[name] for name in _IDS if name in content}
    return Qwen3VLConfig(
        _read(VisionConfig, "vision_config", vision), _read(TextConfig, "text_config", text), **ids
    )


def _read(kind: type[Tower], name: str, content: Mapping[str, Any]) -> Tower:
    """A tower's configuration, from the entries of `content` that are its fields."""
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
        if field.name in content:
            value = content[field.name]
            if (
                field.type == "float"
            ):  # published files have whole numbers there, and a configuration is compared with others
                value = float(value)
            values[field.name] = tuple(value) if isinstance(value, list) else value
    return kind(**values)


def _read_json(path: str | os.PathLike) -> Mapping[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{path}: does not exist; give the folder of a Qwen3-VL checkpoint, with its config.json"
        ) from error
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}); fetch it again") from error
    _require(
        isinstance(content, dict),
        f"{path}: holds a {type(content).__name__}, a configuration is an object; fetch it again",
    )
    return content


def to_hf(config: Qwen3VLConfig) -> dict[str, Any]:
    """The `config.json` content that `from_hf` and transformers (4.57 and 5.x) read back as the same model."""
    text, vision = dataclasses.asdict(config.text), dataclasses.asdict(config.vision)
    tied, theta, vision_theta = (
        text.pop("tie_word_embeddings"),
        text["rope_theta"],
        vision.pop("rope_theta"),
    )
    rope = {
        "rope_type": "default",
        "mrope_section": list(text.pop("mrope_section")),
        "mrope_interleaved": True,
    }
    text |= {
        "model_type": "qwen3_vl_text",
        "rope_scaling": rope,
        "rope_parameters": {**rope, "rope_theta": theta},
    }
    vision |= {
        "model_type": "qwen3_vl",
        "deepstack_visual_indexes": list(config.vision.deepstack_visual_indexes),
    }
    vision["rope_parameters"] = {"rope_type": "axial", "rope_theta": vision_theta}
    ids = {name: getattr(config, name) for name in _IDS}
    top = {
        "model_type": "qwen3_vl",
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "tie_word_embeddings": tied,
    }
    return {
        **top,
        **ids,
        "text_config": text | _COMPUTED["text_config"],
        "vision_config": vision | _COMPUTED["vision_config"],
    }


def flops_per_token(config: Qwen3VLConfig, context: float) -> float:
    """Forward FLOPs of the decoder and its head for one token that attends to `context` positions; the backward pass takes twice that."""
    c = config.text
    heads = (2 * c.num_attention_heads + 2 * c.num_key_value_heads) * c.head_dim
    layer = c.hidden_size * (heads + 3 * c.intermediate_size)
    return 2.0 * (
        c.num_hidden_layers * (layer + 2 * c.num_attention_heads * c.head_dim * context)
        + c.vocab_size * c.hidden_size
    )


def vision_flops(config: VisionConfig, patches: int) -> float:
    """Forward FLOPs of the tower for one frame of `patches`."""
    c, merge = config, config.spatial_merge_size**2
    block = (
        4 * c.hidden_size**2 + 2 * c.hidden_size * c.intermediate_size + 2 * patches * c.hidden_size
    )
    merger = c.hidden_size * (merge * c.hidden_size + c.out_hidden_size)  # a patch's share of one
    return 2.0 * patches * (c.patch_dim * c.hidden_size + c.depth * block + (1 + c.levels) * merger)
