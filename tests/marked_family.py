"""A family with marks of its own, whose calls are XML as newer models write them.

It shows what a package of `models` may change: tests add it to `models.family.FAMILIES`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from models.qwen3_vl import sizes
from models.qwen3_vl.config import Qwen3VLConfig
from models.qwen3_vl.dialect import DIALECT as CHATML
from models.qwen3_vl.family import FAMILY as PLAIN
from paravt_jax.method.parsing import CallSyntax

NAME = "marked_vl"
_FUNCTION = re.compile(r"\s*<function=([^<>\s]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^<>\s]+)>(.*?)</parameter>\s*", re.DOTALL)


def _write_xml(name: str, arguments: Mapping[str, Any]) -> str:
    parameters = (f"<parameter={key}>{value}</parameter>" for key, value in arguments.items())
    return f"<function={name}>{''.join(parameters)}</function>"


def _read_xml(text: str) -> tuple[str, Mapping[str, Any] | None]:
    call = _FUNCTION.fullmatch(text)
    if call is None:
        raise ValueError("The tool call is no function")
    parameters = {key: value.strip() for key, value in _PARAMETER.findall(call[2])}
    if _PARAMETER.sub("", call[2]).strip():
        raise ValueError("The tool call has text outside of its parameters")
    return call[1], parameters or None


XML_CALLS = CallSyntax(
    "Write each call as <tool_call><function=NAME><parameter=NAME>VALUE</parameter>"
    "</function></tool_call>.",
    _write_xml,
    _read_xml,
)
# Mark of ChatML -> mark of this family.
_MARKS = {
    "<|endoftext|>": "[pad]",
    "<|im_start|>": "[turn]",
    "<|im_end|>": "[end]",
    "<|vision_start|>": "[frame]",
    "<|vision_end|>": "[/frame]",
    "<|image_pad|>": "[image]",
    "<|video_pad|>": "[video]",
    "<|' + item.type + '_pad|>": "[' + item.type + ']",
}


def _translated(text: str) -> str:
    for theirs, ours in _MARKS.items():
        text = text.replace(theirs, ours)
    return text


DIALECT = dataclasses.replace(
    CHATML,
    **{
        field.name: _translated(getattr(CHATML, field.name))
        for field in dataclasses.fields(CHATML)
        if field.type == "str"
    },
    calls=XML_CALLS,
    special=tuple(_MARKS.values())[:7],
    added=("<think>", "</think>", "<tool_call>", "</tool_call>"),
)


@dataclasses.dataclass(frozen=True)
class MarkedConfig(Qwen3VLConfig):
    family = NAME


def _marked(config: Qwen3VLConfig) -> MarkedConfig:
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return MarkedConfig(**fields)


FAMILY = dataclasses.replace(
    PLAIN,
    title="A family with marks of its own",
    config=MarkedConfig,
    sizes={},
    tiny=lambda vocab_size: _marked(sizes.tiny(vocab_size)),
    dialect=DIALECT,
)
