"""Reads the JSON files that a run wrote, and checks their content against a type.

A file that is whole JSON but holds something else, such as `[]` or `3`, ends in one line that names
the file, the field and the remedy.

Files that other files are judged by hold a checksum of themselves. Without it, a flipped bit in the
name of a field could switch off what the field is for. It stands in the first line:

    {"checksum": 2769471837,
     "steps": {"sft": ...
"""

from __future__ import annotations

import json
import pathlib
import types
import typing
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, NotRequired, Union

from paravt_jax.data.atomic import write_atomically

_MARK = b'{"checksum": '


class DamagedFileError(ValueError):
    """A file of a run does not hold what the run wrote; the message is one line."""


def read_json(file: pathlib.Path, kind: Any, remedy: str) -> Any:
    """Read a JSON file of a run.

    Args:
        file: The file.
        kind: The type of its content; see `mismatch`.
        remedy: What to do about a damaged file.

    Raises:
        OSError: The file cannot be read.
        DamagedFileError: It holds something else.
    """
    return parse_json(file.read_bytes(), str(file), kind, remedy)


def write_checked_json(
    file: pathlib.Path, content: Mapping[str, Any], indent: int | None = None
) -> None:
    """Write a JSON object with a checksum of itself, atomically."""
    rest = json.dumps(content, indent=indent).removeprefix("{").lstrip("\n") + "\n"
    write_atomically(file, f"{_first_line(rest.encode()).decode()}\n{rest}")


def read_checked_json(file: pathlib.Path, kind: Any, remedy: str) -> Any:
    """Read what `write_checked_json` wrote; see `read_json`.

    Files of earlier versions, which have no checksum, are read as they are.
    """
    return parse_checked_json(file.read_bytes(), str(file), kind, remedy)


def parse_checked_json(content: bytes, name: str, kind: Any, remedy: str) -> Any:
    """Parse what `write_checked_json` wrote; `name` is that of its file. See `read_json`."""
    if has_checksum(content):
        first, _, rest = content.partition(b"\n")
        if first != _first_line(rest):
            raise DamagedFileError(f"{name}: damaged: its checksum is wrong; {remedy}")
        content = b"{" + rest
    return parse_json(content, name, kind, remedy)


def has_checksum(content: bytes) -> bool:
    """Whether a file has, or had before it was damaged, a checksum of itself."""
    first = content.partition(b"\n")[0]
    # Earlier versions wrote "{" into the first line, or all of the content.
    return first.startswith(_MARK) or first.endswith(b",")


def _first_line(rest: bytes) -> bytes:
    return _MARK + b"%d," % zlib.crc32(rest)


def parse_json(content: bytes, name: str, kind: Any, remedy: str) -> Any:
    """Parse JSON that a run wrote; `name` is that of its file. See `read_json`."""
    try:
        value = json.loads(content)
    # ValueError: not JSON or not UTF-8. RecursionError: nested too deeply.
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"{name}: damaged: not JSON ({error}); {remedy}") from error
    wrong = mismatch(value, kind)
    if wrong:
        raise DamagedFileError(f"{name}: damaged: {wrong}; {remedy}")
    return value


def mismatch(value: Any, kind: Any, where: str = "") -> str:
    """The first place where a JSON value is not of a type, in words; "" if it is of the type.

    Args:
        value: What JSON was read to.
        kind: `Any`, `None`, `bool`, `int`, `float` (holds integers, too), `str`, a `TypedDict`
            (may have other keys, too), a `list` or a `dict` with text keys of such types, or a
            union of them.
        where: The path of the value, such as "rows[3].accuracy"; "" for the whole file.
    """
    origin = typing.get_origin(kind)
    if kind is Any or kind is type(None) and value is None:
        return ""
    if origin in (Union, types.UnionType):
        wrong = [mismatch(value, option, where) for option in typing.get_args(kind)]
        return "" if "" in wrong else wrong[0]
    if typing.is_typeddict(kind) and isinstance(value, dict):
        return _first(_field_mismatch(value, *field, where) for field in _fields(kind))
    if origin is list and isinstance(value, list):
        (item_kind,) = typing.get_args(kind)
        return _first(mismatch(x, item_kind, f"{where}[{n}]") for n, x in enumerate(value))
    if origin is dict and isinstance(value, dict):
        _, item_kind = typing.get_args(kind)
        return _first(mismatch(x, item_kind, _inside(where, name)) for name, x in value.items())
    # In Python, True is an int.
    if isinstance(value, _ALLOWED.get(kind, ())) and (kind is bool or not isinstance(value, bool)):
        return ""
    wanted = _NAMES.get(origin or kind, "an object")
    return f"{where or 'the file'}: {_NAMES[type(value)]} instead of {wanted}"


_ALLOWED = {bool: bool, int: int, float: (int, float), str: str}
_NAMES = {
    type(None): "null",
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "an object",
}


def _fields(kind: Any) -> list[tuple[str, Any, bool]]:
    """Name, type and whether it must exist, of each field of a `TypedDict`."""
    fields = []
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        optional = typing.get_origin(hint) is NotRequired
        required = kind.__total__ and not optional
        fields.append((name, typing.get_args(hint)[0] if optional else hint, required))
    return fields


def _field_mismatch(value: dict[str, Any], name: str, kind: Any, required: bool, where: str) -> str:
    if name in value:
        return mismatch(value[name], kind, _inside(where, name))
    return f"{_inside(where, name)}: missing" if required else ""


def _inside(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _first(texts: Iterable[str]) -> str:
    """The first text that is not empty."""
    return next((text for text in texts if text), "")
