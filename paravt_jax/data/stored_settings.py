"""Settings stored beside what they decide: whether they are those asked for, and who may write.

Whatever is made once and resumed later - a run, a checkpoint, a prepared set, a rendered world, an
evaluation - stores its settings as JSON, and is refused to a process that asks for others.
"""

from __future__ import annotations

import fcntl
import json
import os
import pathlib
from typing import Any, TextIO

_ABSENT = "(absent)"
_MOST = 20  # differing fields that a message names


def as_json(value: Any, name: str) -> Any:
    """`value` as JSON brings it back (tuples are lists). Raises TypeError naming `name` for what
    would come back different."""
    _check_keys(value, name)
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name} has to be what JSON can hold (numbers, text, None, lists, dicts): {error}."
        ) from error


def _check_keys(value: Any, name: str) -> None:
    """json.dumps writes a number as a key without a word, and text comes back."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(
                    f"{name} has the key {key!r}: keys have to be text, JSON would bring this one "
                    f"back as '{key}'."
                )
            _check_keys(item, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_keys(item, f"{name}[{index}]")


def require_same(
    what: str,
    stored: dict[str, Any],
    wanted: dict[str, Any],
    remedy: str,
    error: type[Exception] = ValueError,
) -> None:
    """Raises `error`, with a line for each field that differs, where `stored` is not `wanted`.

    what: the message's beginning, such as "runs/x holds a run of other settings".
    remedy: its last line.
    """
    old, new = _flat(stored), _flat(wanted)
    lines = [
        f"  {name}: {old.get(name, _ABSENT)} -> {new.get(name, _ABSENT)}"
        for name in old | new
        if old.get(name) != new.get(name)
    ]
    if len(lines) > _MOST:
        lines[_MOST:] = [f"  and {len(lines) - _MOST} more"]
    if lines:
        raise error("\n".join([f"{what} (stored -> wanted):", *lines, remedy]))


def _flat(value: Any, prefix: str = "") -> dict[str, str]:
    """Dotted names -> leaves as JSON text, which also makes a NaN equal to itself; a list is one
    leaf, and so is an empty dict."""
    if not isinstance(value, dict) or (prefix and not value):
        return {prefix: json.dumps(value)}
    return {
        name: text
        for key, item in value.items()
        for name, text in _flat(item, f"{prefix}.{key}" if prefix else key).items()
    }


def lock(file: pathlib.Path, wait: bool = False) -> TextIO:
    """Locks `file`, made if need be, until what is returned is closed (also as a context manager).

    It is a kernel lock on an open file, which no killed process leaves behind. Where another
    process holds it, this one waits, or raises BlockingIOError with that process's id.
    """
    stream = file.open("a+", encoding="utf-8")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError as error:
        stream.seek(0)
        holder = stream.read().strip() or "unknown"
        stream.close()
        raise BlockingIOError(f"in use by another process (id {holder})") from error
    # A forked worker inherits the open file and would hold the lock beyond its parent's death.
    os.register_at_fork(after_in_child=stream.close)
    stream.truncate(0)
    stream.write(str(os.getpid()))
    stream.flush()
    return stream
