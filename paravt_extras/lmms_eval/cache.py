"""Prompts and scores that lmms-eval has given, on disk, so that they are asked for once."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from typing import Any


class Cache:
    """A file of JSON lines, `{"key": ..., "value": ...}`.

    Other processes may write files beside it, which are read, too. A line that a killed process
    left unfinished is ignored.
    """

    def __init__(self, folder: str | os.PathLike, process: int = 0):
        """Read what is there.

        Args:
            folder: the folder of the files; it is created with the first value.
            process: index of this process. Each has its own file and reads those of all.
        """
        self._file = pathlib.Path(folder) / f"lmms_eval-{process}.jsonl"
        self._values: dict[str, Any] = {}
        for file in sorted(self._file.parent.glob("lmms_eval-*.jsonl")):
            with file.open("rb") as lines:
                for line in lines:
                    self._read(line)

    def _read(self, line: bytes) -> None:
        try:
            entry = json.loads(line)
            self._values[entry["key"]] = entry["value"]
        except (ValueError, TypeError, KeyError):
            pass  # cut off; it is asked for again

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._values[key] = value
        self._file.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"key": key, "value": value}).encode()
        with self._file.open("ab") as lines:
            # The first byte ends a line that was cut off.
            lines.write((b"" if not lines.tell() else b"\n") + line)


def key_of(*parts: Any) -> str:
    """A short text that stands for values: equal values have equal keys."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
