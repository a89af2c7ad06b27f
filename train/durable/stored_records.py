"""Records of rollouts as JSON, with arrays in base64: bit for bit, and reading executes no code."""

from __future__ import annotations

import base64
import dataclasses
import enum
import json
from typing import Any

import numpy as np

from paravt_jax.method import records, rewards
from paravt_jax.method.records import Trajectory
from rollout.engine import pacing, requests
from train.learn import in_flight, rollout_pool, rollouts

_MODULES = (records, rewards, pacing, requests, rollouts, in_flight, rollout_pool)
_KINDS = {name: kind for module in _MODULES for name, kind in vars(module).items()}
# What can be stored, by the name of its type, which is the value of the key "is".
_RECORDS: dict[str, Any] = {
    name: kind for name, kind in _KINDS.items() if dataclasses.is_dataclass(kind)
}
_ENUMS = {
    name: kind
    for name, kind in _KINDS.items()
    if isinstance(kind, type) and issubclass(kind, enum.Enum)
}


def pack(value: Any) -> Any:
    """Encode a value as JSON: tuples as lists; records, enums, arrays and dicts tagged by "is".

    Raises:
        TypeError: `unpack` could not restore the value.
    """
    kind = type(value).__name__
    if isinstance(value, enum.Enum):
        return {"is": kind, "value": value.value}
    if isinstance(value, np.ndarray):
        return {
            "is": "array",
            "type": value.dtype.str,
            "shape": value.shape,
            "bytes": base64.b64encode(value.tobytes()).decode(),
        }
    if isinstance(value, Trajectory):
        return {"is": kind, "segments": pack(value.segments)}
    if kind in _RECORDS:
        fields = [field.name for field in dataclasses.fields(value)]
        return {"is": kind} | {name: pack(getattr(value, name)) for name in fields}
    if isinstance(value, tuple):
        return [pack(item) for item in value]
    if isinstance(value, dict):
        # A tool call's arguments. `unpack` turns lists into tuples, so keep these as JSON text.
        return {"is": kind, "text": json.dumps(value)}
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(
        f"{value!r} is a {kind}, which cannot be stored; add the type to "
        "train.durable.stored_records"
    )


def unpack(value: Any) -> Any:
    """Decode what `pack` returned."""
    if isinstance(value, list):
        return tuple(unpack(item) for item in value)
    if not isinstance(value, dict):
        return value
    kind = value["is"]
    if kind in _ENUMS:
        return _ENUMS[kind](value["value"])
    if kind == "dict":
        return json.loads(value["text"])
    if kind == "array":
        data = base64.b64decode(value["bytes"])
        array = np.frombuffer(data, np.dtype(value["type"])).reshape(value["shape"])
        # frombuffer gives a read-only view of the bytes.
        return array.copy()
    fields = {name: unpack(item) for name, item in value.items() if name != "is"}
    if kind == Trajectory.__name__:
        return Trajectory(fields["segments"])
    return _RECORDS[kind](**fields)
