"""Values as bytes, for messages between processes.

Unlike pickle, reading a message runs no code that the sender chose: it can only build plain values,
NumPy arrays, exceptions, and instances of this project's own classes.

    | length | sizes of body and arrays | body in msgpack | array | array | ...

The body has ext types for whatever msgpack does not know. The bytes of arrays follow it, so that
they are copied only once.
"""

from __future__ import annotations

import builtins
import dataclasses
import enum
import functools
import importlib
import pathlib
from typing import Any, cast

import msgpack
import numpy as np

_OWN_PACKAGES = (
    "paravt_jax",
    "paravt_extras",
    "models",
    "rollout",
    "train",
    "configs",
    "benchmarks",
)

# Codes of ext types. The two sides of a message always run the same version.
_TUPLE, _SET, _FROZENSET, _INT, _PATH, _ARRAY, _SCALAR, _OBJECT, _ENUM, _CALL, _SLICE = range(11)
_CODES = {tuple: _TUPLE, set: _SET, frozenset: _FROZENSET}
_COLLECTIONS = {code: kind for kind, code in _CODES.items()}
_LENGTH_BYTES = 4


class WireError(ValueError):
    """A value cannot be sent, or bytes are no message."""


def dumps(value: Any) -> bytes:
    """Write a value.

    Args:
        value: None, bool, int, float, str, bytes, list, tuple, set, dict, slice, path, NumPy array
            or scalar, an instance of one of this project's dataclasses, named tuples or
            enumerations or of its classes with a `__reduce__`, an exception, or any nesting of
            these.

    Raises:
        WireError: It contains something else.
    """
    writer = _Writer()
    try:
        body = writer.pack(value)
    except WireError:
        raise
    except (ValueError, RecursionError) as error:
        raise WireError(f"cannot be sent: {error or 'it is nested too deeply'}") from error
    sizes = writer.pack([len(body), *(array.nbytes for array in writer.arrays)])
    length = len(sizes).to_bytes(_LENGTH_BYTES, "little")
    return b"".join([length, sizes, body, *writer.arrays])


def loads(message: bytes) -> Any:
    """Read what `dumps` has written. Arrays are new and writable.

    Raises:
        WireError: `message` is not one, or names a class that does not belong to this project.
    """
    # Broad because a damaged message may fail in any constructor.
    try:
        view = memoryview(message)
        place = _LENGTH_BYTES + int.from_bytes(view[:_LENGTH_BYTES], "little")
        parts = []
        for size in msgpack.unpackb(view[_LENGTH_BYTES:place]):
            parts.append(view[place : place + size])
            place += size
        if place != len(view):
            raise WireError(f"it has {len(view)} bytes instead of {place}")
        return _Reader(parts[1:]).unpack(parts[0])
    except Exception as error:
        raise WireError(f"not a message ({type(error).__name__}: {error})") from error


class _Writer:
    """Writes the body of a message, and collects its arrays."""

    def __init__(self):
        self.arrays: list[memoryview] = []

    def pack(self, value: Any) -> bytes:
        packer = msgpack.Packer(
            default=self._encode, strict_types=True, unicode_errors="surrogatepass"
        )
        return cast(bytes, packer.pack(value))

    def _encode(self, value: Any) -> msgpack.ExtType:
        """A value that msgpack does not know."""
        kind = type(value)
        if kind in _CODES:
            return self._ext(_CODES[kind], list(value))
        if kind is np.ndarray or isinstance(value, np.generic):
            return self._array(value)
        # One of more than 64 bits, or a foreign enumeration's, such as a signal's number.
        if kind is int or (isinstance(value, int) and not _is_own(kind.__module__)):
            return self._ext(_INT, str(int(value)))
        if isinstance(value, pathlib.PurePath):
            return self._ext(_PATH, str(value))
        if isinstance(value, slice):
            return self._ext(_SLICE, [value.start, value.stop, value.step])
        if isinstance(value, BaseException):
            return self._error(value)
        if _is_own(kind.__module__) and "__reduce__" in vars(kind):
            found, arguments = cast(tuple[type, tuple], value.__reduce__())
            return self._ext(_CALL, [*_place(found), list(arguments)])
        if isinstance(value, enum.Enum):
            return self._ext(_ENUM, [*_place(kind), value.value])
        if dataclasses.is_dataclass(value):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            return self._ext(_OBJECT, [*_place(kind), fields])
        as_dict = getattr(value, "_asdict", None)  # of a named tuple
        if as_dict is not None:
            return self._ext(_OBJECT, [*_place(kind), as_dict()])
        raise WireError(f"cannot be sent: a value of type {kind.__module__}.{kind.__qualname__}")

    def _ext(self, code: int, content: Any) -> msgpack.ExtType:
        return msgpack.ExtType(code, self.pack(content))

    def _array(self, value: np.ndarray | np.generic) -> msgpack.ExtType:
        if value.dtype.hasobject or value.dtype.fields:
            raise WireError(f"cannot be sent: an array of {value.dtype}")
        code = _SCALAR if isinstance(value, np.generic) else _ARRAY
        # Only its name tells bfloat16 from other types of two bytes.
        dtype = value.dtype.name if value.dtype.kind == "V" else value.dtype.str
        content = [dtype, list(value.shape), len(self.arrays)]
        # A view as bytes, because bfloat16 has no buffer interface.
        self.arrays.append(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        return self._ext(code, content)

    def _error(self, error: BaseException) -> msgpack.ExtType:
        """An exception with its arguments. One that cannot be sent becomes a RuntimeError."""
        kind = type(error)
        reduced = error.__reduce__()
        if isinstance(reduced, tuple) and reduced[0] is kind:
            try:
                return self._ext(_CALL, [*_place(kind), list(reduced[1])])
            except WireError:
                pass
        text = f"{kind.__name__}: {error}"
        return self._ext(_CALL, ["builtins", "RuntimeError", [text]])


class _Reader:
    """Reads the body of a message, whose arrays are given."""

    def __init__(self, arrays: list[memoryview]):
        self._arrays = arrays

    def unpack(self, data: bytes | memoryview) -> Any:
        return msgpack.unpackb(
            data, ext_hook=self._decode, strict_map_key=False, unicode_errors="surrogatepass"
        )

    def _decode(self, code: int, data: bytes) -> Any:
        """The inverse of `_Writer._encode`."""
        content = self.unpack(data)
        if code in _COLLECTIONS:
            return _COLLECTIONS[code](content)
        if code == _INT:
            return int(content)
        if code == _PATH:
            return pathlib.Path(content)
        if code == _SLICE:
            return slice(*content)
        if code in (_ARRAY, _SCALAR):
            dtype, shape, number = content
            array = np.frombuffer(self._arrays[number], np.dtype(dtype)).reshape(shape)
            return array.copy() if code == _ARRAY else array[()]
        module, name, content = content
        kind = _class(module, name, code)
        if code == _OBJECT:
            return _build(kind, content)
        return kind(content) if code == _ENUM else kind(*content)


def _place(kind: type) -> tuple[str, str]:
    """Where to find a class: its module and its name there."""
    if kind.__module__ != "builtins" and not _is_own(kind.__module__):
        raise WireError(f"cannot be sent: a value of type {kind.__module__}.{kind.__qualname__}")
    return kind.__module__, kind.__qualname__


def _is_called(kind: type) -> bool:
    """Whether instances are sent as the arguments that build them, as their class says."""
    return issubclass(kind, BaseException) or "__reduce__" in vars(kind)


def _is_own(module: str) -> bool:
    return module.partition(".")[0] in _OWN_PACKAGES


@functools.cache
def _class(module: str, name: str, code: int) -> type[Any]:
    """A class that a message names, if a message may build it."""
    found: Any = None
    if _is_own(module):
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    elif module == "builtins" and code == _CALL:
        found = getattr(builtins, name)
    # A module has names of other modules, too, such as `workers.subprocess`.
    if isinstance(found, type) and (found.__module__, found.__qualname__) == (module, name):
        allowed = {
            _ENUM: issubclass(found, enum.Enum),
            _CALL: issubclass(found, Exception) or (_is_own(module) and _is_called(found)),
            _OBJECT: dataclasses.is_dataclass(found) or hasattr(found, "_asdict"),
        }
        if allowed[code]:
            return found
    raise WireError(f"names {module}.{name}, which no message may build")


def _build(kind: type[Any], fields: dict[str, Any]) -> Any:
    """An instance with these fields. Its own checks run as usual."""
    if not dataclasses.is_dataclass(kind):
        return kind(**fields)
    known = {field.name: field.init for field in dataclasses.fields(kind)}
    built = kind(**{name: value for name, value in fields.items() if known[name]})
    for name, is_argument in known.items():
        if not is_argument:
            object.__setattr__(built, name, fields[name])
    return built
