"""`ModelConfig` as a Hugging Face `config.json`, and back.

Every family reads and writes its own (`models.family`), with the helpers here.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

from models.config import LAYER_KINDS, ModelConfig, TextConfig, require
from models.family import FAMILIES, family, family_of
from paravt_jax.data import foreign

_IDS = tuple(
    field.name for field in dataclasses.fields(ModelConfig) if field.name.endswith("_token_id")
)

# Where rotary embeddings are described, by transformers 5 and by 4.57.
_ROPE_FIELDS = ("rope_parameters", "rope_scaling")
# Part -> its supported types. Older versions call the decoder's `mrope`, version 5 calls the
# tower's `axial`.
_ROPE_TYPES = {"text_config": ("default", "mrope"), "vision_config": ("default", "axial")}

Fields = TypeVar("Fields")

# An int may be too large for a float. NaN is not below it either.
_MOST_FLOAT = 1e30
# Fields with a number of layers. Even the shapes of a billion of them would fill the memory.
_LAYERS = ("num_hidden_layers", "depth")
_MOST_LAYERS = 1000


def from_hf(source: Mapping[str, Any] | str | os.PathLike) -> ModelConfig:
    """Read a Hugging Face `config.json` as written by transformers 4.57 or 5.x.

    Args:
        source: the content of the file, or its path.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is for another model, lacks a field, or sets one to a value that this
            model does not support.
    """
    if isinstance(source, Mapping):
        return _config(source)
    content = _read_json(source)
    try:
        return _config(content)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def _config(content: Mapping[str, Any]) -> ModelConfig:
    kind = content.get("model_type")
    require(
        kind in list(FAMILIES),  # the file may say a list, which is no key
        f"model_type = {_shown(kind)}: supported are {', '.join(FAMILIES)}; "
        "give the config.json of such a model",
    )
    for part, types in _ROPE_TYPES.items():
        _require_object(part, content.get(part))
        _require_unscaled(f"{part}.", content.get(part) or {}, types)
    # The decoder's fields may be at the top level. If they are not, a scaling that someone wrote
    # there would have no effect.
    _require_unscaled("", content, _ROPE_TYPES["text_config"])
    for part in (content, content.get("text_config") or {}):
        _checked("tie_word_embeddings", part.get("tie_word_embeddings", False), "bool")
    return family(kind).from_hf(content)


def _is_size(value: Any) -> bool:
    # Not isinstance: a bool is an int. The largest number of a real file is its vocabulary's.
    return type(value) is int and abs(value) < 2**31


def _shown(value: Any) -> str:
    """Return a value of a file in an error. It may be of any length."""
    return foreign.shortened(repr(value), 40)


def _require_object(place: str, value: Any) -> None:
    require(
        value is None or isinstance(value, Mapping),
        f"{place} = {_shown(value)}: not a JSON object; fetch config.json again",
    )


def _require_unscaled(place: str, content: Mapping[str, Any], types: Sequence[str]) -> None:
    """Raise ValueError if a part of config.json scales its rotary embeddings.

    Args:
        place: what the names of its fields begin with, for errors.
        content: the part.
        types: the types of rotary embeddings that it may have.
    """
    for field in _ROPE_FIELDS:
        rope = content.get(field)
        _require_object(f"{place}{field}", rope)
        for name in ("rope_type", "type"):
            given = (rope or {}).get(name, types[0])
            require(
                given in types,
                f"{place}{field}.{name} = {_shown(given)}: only {types[0]} is supported; remove "
                "the scaling",
            )


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """Return the content of a `config.json` that describes `config`.

    `from_hf` and transformers (4.57 and 5.x) read it back as the same model.
    """
    return family_of(config).to_hf(config)


def require_supported(
    content: Mapping[str, Any], supported: Mapping[str, Mapping[str, Any]], title: str
) -> None:
    """Raise ValueError if a part of config.json sets a field to another than its only value.

    Args:
        content: the content of the file.
        supported: part -> field -> the value that is supported. A field may be absent.
        title: name of the family.
    """
    for part, fields in supported.items():
        for field, value in fields.items():
            given = content.get(part, {}).get(field, value)
            require(
                given == value,
                f"{part}.{field} = {_shown(given)}: only {value!r} is supported; "
                f"give a {title} config.json",
            )


def read_text(
    text: Mapping[str, Any],
    title: str,
    *,
    tied: bool,
    defaults: Mapping[str, Any],
    fixed: Mapping[str, Any],
) -> TextConfig:
    """Return the decoder's configuration.

    Args:
        text: its part of config.json.
        title: name of the family.
        tied: whether input and output embeddings are one.
        defaults: what the file may lack.
        fixed: what the family fixes, whatever the file says.
    """
    if text.get("rope_parameters"):
        # They are complete.
        defaults = {name: value for name, value in defaults.items() if name != "rope_theta"}
    rope = _rope(text)
    interleaved = rope.get("mrope_interleaved", fixed["mrope_interleaved"])
    require(
        interleaved == fixed["mrope_interleaved"],
        f"text_config.mrope_interleaved = {_shown(interleaved)}: only "
        f"{fixed['mrope_interleaved']} is supported; give a {title} config.json",
    )
    # The file has an entry per layer, or none.
    kinds = text.get("layer_types") or list(LAYER_KINDS)
    if isinstance(kinds, list) and kinds == kinds[:1] * len(kinds):
        kinds = kinds[:1]
    more = {"tie_word_embeddings": tied, "layer_types": kinds}
    content = {**defaults, **text, **rope, **fixed, **more}
    return read_fields(TextConfig, "text_config", content, title)


def _rope(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the decoder's rotary embeddings.

    transformers 5 writes `rope_parameters`, 4.57 writes `rope_theta` and `rope_scaling`. Raises
    ValueError if a file has both, and they contradict each other.
    """
    rope: dict[str, Any] = {}
    for part in (text, *(text.get(field) or {} for field in _ROPE_FIELDS)):
        for name in ("rope_theta", "mrope_section", "mrope_interleaved"):
            if part.get(name) is None:
                continue
            require(
                rope.get(name, part[name]) == part[name],
                f"text_config: {name} is {_shown(rope.get(name))} in one place and "
                f"{_shown(part[name])} in another; keep one of them",
            )
            rope[name] = part[name]
    return rope


def read_fields(kind: type[Fields], name: str, content: Mapping[str, Any], title: str) -> Fields:
    """Return a part's configuration from `content`. Entries that are no fields are ignored.

    Args:
        kind: its dataclass.
        name: name of the part, for errors.
        content: its part of config.json.
        title: name of the family.
    """
    fields = dataclasses.fields(kind)  # pyright: ignore[reportArgumentType]
    missing = [
        field.name
        for field in fields
        if field.default is dataclasses.MISSING and field.name not in content
    ]
    require(
        not missing,
        f"{name}: has no {', '.join(missing)}; give the config.json of a whole {title}",
    )
    values: dict[str, Any] = {}
    for field in fields:
        if field.name not in content:
            continue
        value = content[field.name]
        values[field.name] = _checked(f"{name}.{field.name}", value, str(field.type))
    return kind(**values)


def _checked(place: str, value: Any, kind: str) -> Any:
    """Return a value of config.json in the type of its field, which is an annotation's text."""
    expected = {
        "int": _is_size(value),
        "float": type(value) in (int, float) and abs(value) < _MOST_FLOAT,
        "bool": type(value) is bool,
        "str": isinstance(value, str),
    }
    if kind.startswith("tuple["):
        listed = isinstance(value, list | tuple) and all(
            _is_size(entry) if "int" in kind else isinstance(entry, str) for entry in value
        )
        # "tuple[int, int, int]" names its length, and "tuple[int, ...]" has any.
        expected[kind] = listed and ("..." in kind or len(value) == kind.count("int"))
    require(
        expected.get(kind, True),
        f"{place} = {_shown(value)}: its type is {kind}; fetch config.json again",
    )
    layers = place.rpartition(".")[2] in _LAYERS
    require(
        not layers or cast(int, value) <= _MOST_LAYERS,
        f"{place} = {_shown(value)}: at most {_MOST_LAYERS}; fetch config.json again",
    )
    # Published files have whole numbers in float fields. Convert them: configurations are written
    # to files and compared.
    if kind == "float":
        return float(cast(float, value))
    return tuple(value) if isinstance(value, list) else value


def _read_json(path: str | os.PathLike) -> Mapping[str, Any]:
    try:
        return foreign.read_object(path)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{path}: does not exist; give the folder of a checkpoint with its config.json"
        ) from error


def whole_to_hf(
    config: ModelConfig, architecture: str, text: Mapping[str, Any], vision: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the content of a config.json.

    Args:
        config: the model's configuration.
        architecture: name of its class in transformers.
        text: the decoder's part.
        vision: the tower's part.
    """
    return {
        "model_type": config.family,
        "architectures": [architecture],
        "tie_word_embeddings": config.text.tie_word_embeddings,
        **{name: getattr(config, name) for name in _IDS},
        "text_config": {**text},
        "vision_config": {**vision},
    }


def ids_of(content: Mapping[str, Any]) -> dict[str, int]:
    """Return the ids of special tokens that a config.json gives."""
    return {name: _checked(name, content[name], "int") for name in _IDS if name in content}


def text_to_hf(config: TextConfig, rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the decoder's part of config.json, without `model_type`.

    Args:
        config: its configuration.
        rope: settings of the rotary embeddings beside `rope_theta` and `mrope_section`.
    """
    text = dataclasses.asdict(config)
    for name in (
        "tie_word_embeddings",
        "qk_norm",
        "attention_bias",
        "mrope_interleaved",
        "experts",
        "layer_types",
    ):
        del text[name]
    section = {"mrope_section": list(text.pop("mrope_section"))}
    # `rope_theta` and `rope_scaling` are read by transformers 4.57, `rope_parameters` by 5.
    return text | {
        "rope_scaling": {"rope_type": "default", **section, **rope},
        "rope_parameters": {
            "rope_type": "default",
            **section,
            **rope,
            "rope_theta": text["rope_theta"],
        },
    }
