"""`ModelConfig` as a Hugging Face `config.json`, and back. Families differ in data (`Family`)."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

from models.config import ExpertsConfig, ModelConfig, TextConfig, require
from models.family import FAMILIES, Family, family, family_of
from models.text import layer_kind
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


# --- reading ---


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
    if not os.path.exists(source):
        raise FileNotFoundError(
            f"{source}: does not exist; give the folder of a checkpoint with its config.json"
        )
    content = foreign.read_object(source)
    try:
        return _config(content)
    except ValueError as error:
        model = pathlib.Path(source).parent / "model"
        perhaps = f"; perhaps you meant {model}" if model.is_dir() else ""
        raise ValueError(f"{source}: {error}{perhaps}") from error


def _config(content: Mapping[str, Any]) -> ModelConfig:
    name = content.get("model_type")
    require(
        name in list(FAMILIES),  # the file may say a list, which is no key
        f"model_type = {_shown(name)}: supported are {', '.join(FAMILIES)}; "
        "give the config.json of such a model",
    )
    for section, types in _ROPE_TYPES.items():
        _require_object(section, content.get(section))
        _require_unscaled(f"{section}.", content.get(section) or {}, types)
    # The decoder's fields may be at the top level. If they are not, a scaling that someone wrote
    # there would have no effect.
    _require_unscaled("", content, _ROPE_TYPES["text_config"])
    chosen = family(name)
    vision = content.get("vision_config") or {}
    vision = {**vision, **(vision.get("rope_parameters") or {})}
    _require_supported("vision_config", vision, chosen.supported["vision_config"], chosen.title)
    # Qwen2.5-VL is published with the decoder's fields at the top level.
    text = content.get("text_config") or content
    # Files of different tools say it at either level.
    tied = [
        _checked("tie_word_embeddings", level.get("tie_word_embeddings", False), "bool")
        for level in (content, text)
    ]
    return chosen.config(
        _read_fields(chosen.vision, "vision_config", vision, chosen.title),
        _read_text(text, any(tied), chosen),
        **{field: _checked(field, content[field], "int") for field in _IDS if field in content},
    )


def _is_size(value: Any) -> bool:
    # Not isinstance: a bool is an int. The largest number of a real file is its vocabulary's.
    return type(value) is int and abs(value) < 2**31


def _shown(value: Any) -> str:
    """Return a value of a file in an error. It may be of any length."""
    return foreign.shortened(repr(value), 40)


def _require_object(name: str, value: Any) -> None:
    require(
        value is None or isinstance(value, Mapping),
        f"{name} = {_shown(value)}: not a JSON object; fetch config.json again",
    )


def _require_unscaled(prefix: str, content: Mapping[str, Any], types: Sequence[str]) -> None:
    """Raise ValueError if a section of config.json scales its rotary embeddings.

    Args:
        prefix: what the names of its fields begin with, for errors.
        content: the section.
        types: the types of rotary embeddings that it may have.
    """
    for field in _ROPE_FIELDS:
        rope = content.get(field)
        _require_object(f"{prefix}{field}", rope)
        for name in ("rope_type", "type"):
            given = (rope or {}).get(name, types[0])
            require(
                given in types,
                f"{prefix}{field}.{name} = {_shown(given)}: only {types[0]} is supported; remove "
                "the scaling",
            )


def _require_supported(
    name: str, content: Mapping[str, Any], supported: Mapping[str, Any], title: str
) -> None:
    """Raise ValueError if a field has another than its only value; it may be absent."""
    for field, value in supported.items():
        given = content.get(field, value)
        require(
            given == value,
            f"{name}.{field} = {_shown(given)}: only {value!r} is supported; "
            f"give a {title} config.json",
        )


def _read_text(text: Mapping[str, Any], tied: bool, chosen: Family) -> TextConfig:
    """Return the configuration of the decoder, whose section of config.json is `text`."""
    rope = _rope(text)
    supported = {**chosen.supported["text_config"], **chosen.decoder}
    _require_supported("text_config", {**text, **rope}, supported, chosen.title)
    defaults = {**chosen.defaults}
    if text.get("rope_parameters"):
        # They are complete.
        defaults.pop("rope_theta")
    width, heads = text.get("hidden_size"), text.get("num_attention_heads")
    if _is_size(width) and _is_size(heads) and heads:
        defaults = {"head_dim": cast(int, width) // cast(int, heads), **defaults}
    # The file has an entry per layer, or none.
    kinds = text.get("layer_types") or ["full_attention"]
    if isinstance(kinds, list) and kinds == kinds[:1] * len(kinds):
        kinds = kinds[:1]
    experts = None
    if chosen.experts:
        # transformers calls it so in its own objects.
        if "num_local_experts" in text:
            text = {"num_experts": text["num_local_experts"], **text}
        experts = _read_fields(ExpertsConfig, "text_config", text, chosen.title)
        # Versions of transformers save experts transposed to each other.
        require(
            width not in (experts.moe_intermediate_size, 2 * experts.moe_intermediate_size),
            f"text_config.hidden_size = {width}: makes a matrix of the experts square, so that its "
            "shape does not tell its layout; give a model of another size",
        )
    more = {"tie_word_embeddings": tied, "layer_types": kinds, "experts": experts}
    content = {**defaults, **text, **rope, **chosen.decoder, **more}
    config = _read_fields(TextConfig, "text_config", content, chosen.title)
    layer_kind(config)
    return config


def _rope(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the decoder's rotary embeddings.

    transformers 5 writes `rope_parameters`, 4.57 writes `rope_theta` and `rope_scaling`. If a file
    has both objects, only `rope_scaling` counts, as in transformers 5.
    """
    rope: dict[str, Any] = {}
    for section in (text, text.get("rope_scaling") or text.get("rope_parameters") or {}):
        for name in ("rope_theta", "mrope_section", "mrope_interleaved"):
            if section.get(name) is not None:
                rope[name] = section[name]
    return rope


def _read_fields(kind: type[Fields], name: str, content: Mapping[str, Any], title: str) -> Fields:
    """Return a section's configuration from `content`. Entries that are no fields are ignored.

    Args:
        kind: its dataclass.
        name: name of the section, for errors.
        content: its section of config.json.
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
    return kind(
        **{
            field.name: _checked(f"{name}.{field.name}", content[field.name], str(field.type))
            for field in fields
            if field.name in content
        }
    )


def _checked(name: str, value: Any, kind: str) -> Any:
    """Return a value of config.json in the type of its field, which is an annotation's text."""
    expected = {
        "int": _is_size(value),
        "float": type(value) in (int, float) and abs(value) < _MOST_FLOAT,
        "bool": type(value) is bool,
    }
    if kind.startswith("tuple["):
        listed = isinstance(value, list | tuple) and all(
            _is_size(entry) if "int" in kind else isinstance(entry, str) for entry in value
        )
        # "tuple[int, int, int]" names its length, and "tuple[int, ...]" has any.
        expected[kind] = listed and ("..." in kind or len(value) == kind.count("int"))
    require(
        expected.get(kind, True),
        f"{name} = {_shown(value)}: its type is {kind}; fetch config.json again",
    )
    layers = name.rpartition(".")[2] in _LAYERS
    require(
        not layers or cast(int, value) <= _MOST_LAYERS,
        f"{name} = {_shown(value)}: at most {_MOST_LAYERS}; fetch config.json again",
    )
    # Published files have whole numbers in float fields. Convert them: configurations are written
    # to files and compared.
    if kind == "float":
        return float(cast(float, value))
    return tuple(value) if isinstance(value, list) else value


# --- writing ---


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """Return the content of a `config.json` that describes `config`.

    `from_hf` and transformers (4.57 and 5.x) read it back as the same model.
    """
    chosen = family_of(config)
    vision, text = _lists(config.vision), _lists(config.text)
    vision["rope_parameters"] = {"rope_type": "axial", "rope_theta": vision.pop("rope_theta")}
    experts = text.pop("experts") or {}
    for name in ("tie_word_embeddings", "layer_types", *chosen.decoder):
        del text[name]
    rope = {"rope_type": "default", "mrope_section": text.pop("mrope_section")}
    if config.text.mrope_interleaved:
        rope["mrope_interleaved"] = True
    # `rope_theta` and `rope_scaling` are read by transformers 4.57, `rope_parameters` by 5.
    text["rope_scaling"] = rope
    text["rope_parameters"] = {**rope, "rope_theta": text["rope_theta"]}
    kinds = {"text_config": f"{config.family}_text", "vision_config": config.family}
    return {
        "model_type": config.family,
        "architectures": [chosen.architecture],
        "tie_word_embeddings": config.text.tie_word_embeddings,
        **{name: getattr(config, name) for name in _IDS},
        **{
            section: {**fields, "model_type": kinds[section], **chosen.supported[section]}
            for section, fields in {"text_config": text | experts, "vision_config": vision}.items()
        },
    }


def _lists(config: Any) -> dict[str, Any]:
    """Return the fields of a configuration, with lists in place of tuples."""
    fields = dataclasses.asdict(config)
    return {name: [*x] if isinstance(x, tuple) else x for name, x in fields.items()}
