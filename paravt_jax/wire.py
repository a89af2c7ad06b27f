"""Values as bytes, for messages between processes.

Unlike pickle, reading a message runs no code that the sender chose: it can only build plain values,
NumPy arrays, and this project's own dataclasses, enumerations and exceptions.

    value -> msgpack (ext types for whatever msgpack does not know) -> value
"""

from __future__ import annotations

import builtins
import dataclasses
import enum
import importlib
import pathlib
from typing import Any, cast

import msgpack
import numpy as np

_OWN_PACKAGES = ("paravt_jax", "models", "rollout", "train", "configs", "benchmarks")

# Codes of ext types. The two sides of a message always run the same version.
_TUPLE, _SET, _FROZENSET, _INT, _PATH, _ARRAY, _SCALAR, _OBJECT, _ENUM, _ERROR, _SLICE = range(11)
_CODES = {tuple: _TUPLE, set: _SET, frozenset: _FROZENSET}
_COLLECTIONS = {code: kind for kind, code in _CODES.items()}


class WireError(ValueError):
    """A value cannot be sent, or bytes are no message."""


def dumps(value: Any) -> bytes:
    """Write a value.

    Args:
        value: None, bool, int, float, str, bytes, list, tuple, set, dict, slice, path, NumPy array
            or scalar, an instance of one of this project's dataclasses, named tuples or
            enumerations, an exception, or any nesting of these.

    Raises:
        WireError: It contains something else.
    """
    try:
        packer = msgpack.Packer(default=_encode, strict_types=True, unicode_errors="surrogatepass")
        return cast(bytes, packer.pack(value))
    except WireError:
        raise
    except (ValueError, RecursionError) as error:
        raise WireError(f"cannot be sent: {error or 'it is nested too deeply'}") from error


def loads(message: bytes) -> Any:
    """Read what `dumps` has written. Arrays are new and writable.

    Raises:
        WireError: `message` is not one, or names a class that does not belong to this project.
    """
    try:
        return msgpack.unpackb(
            message, ext_hook=_decode, strict_map_key=False, unicode_errors="surrogatepass"
        )
    # Broad because a damaged message may fail in any constructor.
    except Exception as error:
        raise WireError(f"not a message ({type(error).__name__}: {error})") from error


def _encode(value: Any) -> msgpack.ExtType:
    """A value that msgpack does not know."""
    kind = type(value)
    if kind in _CODES:
        return _ext(_CODES[kind], list(value))
    # One of more than 64 bits, or a foreign enumeration's, such as a signal's number.
    if kind is int or (isinstance(value, int) and not _is_own(kind.__module__)):
        return _ext(_INT, str(int(value)))
    if isinstance(value, pathlib.PurePath):
        return _ext(_PATH, str(value))
    if isinstance(value, slice):
        return _ext(_SLICE, [value.start, value.stop, value.step])
    if isinstance(value, np.ndarray | np.generic):
        return _encode_array(value)
    if isinstance(value, BaseException):
        return _encode_error(value)
    if isinstance(value, enum.Enum):
        return _ext(_ENUM, [*_place(kind), value.value])
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return _ext(_OBJECT, [*_place(kind), fields])
    as_dict = getattr(value, "_asdict", None)  # of a named tuple
    if as_dict is not None:
        return _ext(_OBJECT, [*_place(kind), as_dict()])
    raise WireError(f"cannot be sent: a value of type {kind.__module__}.{kind.__qualname__}")


def _decode(code: int, data: bytes) -> Any:
    """The inverse of `_encode`."""
    content = loads(data)
    if code in _COLLECTIONS:
        return _COLLECTIONS[code](content)
    if code == _INT:
        return int(content)
    if code == _PATH:
        return pathlib.Path(content)
    if code == _SLICE:
        return slice(*content)
    if code in (_ARRAY, _SCALAR):
        dtype, shape, raw = content
        array = np.frombuffer(raw, np.dtype(dtype)).reshape(shape)
        return array.copy() if code == _ARRAY else array[()]
    module, name, content = content
    found = _class(module, name, code)
    if code == _ENUM:
        return found(content)
    if code == _ERROR:
        return found(*content)
    return _build(found, content)


def _ext(code: int, content: Any) -> msgpack.ExtType:
    return msgpack.ExtType(code, dumps(content))


def _encode_array(value: np.ndarray | np.generic) -> msgpack.ExtType:
    if value.dtype.hasobject:
        raise WireError(f"cannot be sent: an array of {value.dtype}")
    code = _ARRAY if isinstance(value, np.ndarray) else _SCALAR
    # A view as bytes, because bfloat16 has no buffer interface.
    raw = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
    # Only its name tells bfloat16 from other types of two bytes.
    dtype = value.dtype.name if value.dtype.kind == "V" else value.dtype.str
    return _ext(code, [dtype, list(value.shape), raw])


def _encode_error(error: BaseException) -> msgpack.ExtType:
    """An exception with its arguments. One of another package becomes a RuntimeError."""
    kind = type(error)
    if kind.__module__ == "builtins" or _is_own(kind.__module__):
        reduced = error.__reduce__()
        if isinstance(reduced, tuple) and reduced[0] is kind:
            return _ext(_ERROR, [*_place(kind), list(reduced[1])])
    return _ext(_ERROR, ["builtins", "RuntimeError", [f"{kind.__name__}: {error}"]])


def _place(kind: type) -> tuple[str, str]:
    """Where to find a class: its module and its name there."""
    if kind.__module__ != "builtins" and not _is_own(kind.__module__):
        raise WireError(f"cannot be sent: a value of type {kind.__module__}.{kind.__qualname__}")
    return kind.__module__, kind.__qualname__


def _is_own(module: str) -> bool:
    return module.partition(".")[0] in _OWN_PACKAGES


def _class(module: str, name: str, code: int) -> type[Any]:
    """A class that a message names, if a message may build it."""
    found: Any = None
    if _is_own(module):
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    elif module == "builtins" and code == _ERROR:
        found = getattr(builtins, name)
    if isinstance(found, type):
        allowed = {
            _ENUM: issubclass(found, enum.Enum),
            _ERROR: issubclass(found, BaseException),
            _OBJECT: dataclasses.is_dataclass(found) or hasattr(found, "_asdict"),
        }
        if allowed[code]:
            return found
    raise WireError(f"names {module}.{name}, which no message may build")


def _build(kind: type[Any], fields: dict[str, Any]) -> Any:
    """An instance with these fields. Its own checks run as usual."""
    if not dataclasses.is_dataclass(kind):
        return kind(**fields)
    given = {field.name for field in dataclasses.fields(kind) if field.init}
    built = kind(**{name: value for name, value in fields.items() if name in given})
    for name in fields.keys() - given:
        object.__setattr__(built, name, fields[name])
    return built
