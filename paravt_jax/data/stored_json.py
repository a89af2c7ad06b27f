"""Reads the JSON files that a run wrote, and checks their content against a type.

A file that is whole JSON but holds something else, such as `[]` or `3`, ends in one line that names
the file, the field and the remedy.

Files that other files are judged by hold a checksum of themselves. Without it, a flipped bit in the
name of a field could switch off what the field is for. It stands in the first line:

    {"checksum": 2769471837,
     "steps": {"sft": ...
"""

from __future__ import annotations

import functools
import json
import pathlib
import zlib
from collections.abc import Mapping
from typing import Any

import pydantic

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
    """Return whether a file has, or had before it was damaged, a checksum of itself."""
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


def mismatch(value: Any, kind: Any) -> str:
    """Return the first place where a JSON value is not of a type, in words; "" if there is none.

    Args:
        value: What JSON was read to.
        kind: Anything that pydantic knows, such as a `TypedDict`, which may have other keys, too.
    """
    try:
        _adapter(kind).validate_python(value, strict=True)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        return f"{where}: {first['msg']}"
    return ""


_adapter = functools.cache(pydantic.TypeAdapter)
