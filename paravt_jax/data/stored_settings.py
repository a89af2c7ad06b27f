"""Compares stored settings with requested ones, and locks files against other processes.

Runs, checkpoints, prepared sets, rendered worlds and evaluations can be resumed. Each stores its
settings as JSON. A process with other settings is refused, because it would mix two kinds of
results in one folder.
"""

from __future__ import annotations

import fcntl
import json
import os
import pathlib
from typing import Any, TextIO

_ABSENT = "(absent)"
# Upper bound on the differing fields that a message lists.
_MAX_NAMED_FIELDS = 20


def as_json(value: Any, name: str) -> Any:
    """Return `value` as JSON reads it back; tuples become lists.

    Args:
        value: The value to store.
        name: What to call it in an error message.

    Raises:
        TypeError: JSON cannot hold the value.
    """
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name} has to be a JSON value (number, text, None, list, dict): {error}."
        ) from error


def require_same(
    what: str,
    stored: dict[str, Any],
    wanted: dict[str, Any],
    remedy: str,
    error: type[Exception] = ValueError,
) -> None:
    """Raise `error`, with one line per differing field, unless both settings are equal.

    Args:
        what: Start of the message, such as "runs/x holds a run of other settings".
        stored: Settings read from disk.
        wanted: Requested settings, as JSON reads them back.
        remedy: Last line of the message.
        error: Type of the exception.
    """
    old, new = _flat(stored), _flat(wanted)
    lines = [
        f"  {name}: {old.get(name, _ABSENT)} -> {new.get(name, _ABSENT)}"
        for name in old | new
        if old.get(name) != new.get(name)
    ]
    if len(lines) > _MAX_NAMED_FIELDS:
        lines[_MAX_NAMED_FIELDS:] = [f"  and {len(lines) - _MAX_NAMED_FIELDS} more"]
    if lines:
        raise error("\n".join([f"{what} (stored -> wanted):", *lines, remedy]))


def _flat(value: Any, prefix: str = "") -> dict[str, str]:
    """Flatten nested dicts to dotted names and JSON texts: {"a": {"b": 1}} gives {"a.b": "1"}."""
    if not isinstance(value, dict) or (prefix and not value):
        # Compare texts, because NaN != NaN. Lists and empty dicts are compared as a whole.
        return {prefix: json.dumps(value)}
    flat: dict[str, str] = {}
    for key, item in value.items():
        flat |= _flat(item, f"{prefix}.{key}" if prefix else key)
    return flat


def lock(file: pathlib.Path, wait: bool = False) -> TextIO:
    """Lock `file` until the returned stream is closed. The file is created if it does not exist.

    Args:
        file: The lock file. It contains the id of the process that holds the lock.
        wait: Whether to wait while another process holds the lock.

    Returns:
        An open stream; also usable in a `with` block.

    Raises:
        BlockingIOError: Another process holds the lock, and `wait` is false.
    """
    # "a+" creates a missing file. Unlike "w", it keeps the holder's id until the lock is ours.
    stream = file.open("a+", encoding="utf-8")
    try:
        # The kernel releases the lock when the process ends, so a killed process leaves no stale
        # lock behind.
        fcntl.flock(stream, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError as error:
        stream.seek(0)
        holder = stream.read().strip() or "unknown"
        stream.close()
        raise BlockingIOError(f"in use by another process (id {holder})") from error
    # A forked worker inherits the open file, and would keep the lock after its parent has died.
    os.register_at_fork(after_in_child=stream.close)
    stream.truncate(0)
    stream.write(str(os.getpid()))
    stream.flush()
    return stream


def holder_of(file: pathlib.Path) -> str:
    """Return the id of the process that has locked `file`, or ""; "unknown" if it left no id."""
    if not file.exists():
        return ""
    # A shared lock is refused as well while `lock` holds the file, and needs no right to write.
    with file.open(encoding="utf-8") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return stream.read().strip() or "unknown"
    return ""
