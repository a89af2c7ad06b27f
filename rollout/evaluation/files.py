"""Reads the published tables of benchmarks, and finds their videos."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from paravt_jax.data import foreign
from paravt_jax.data.sources import from_hub

Record = dict[str, Any]

_MOST_BYTES = 1 << 30

_NUMBERED = re.compile(r"\d{1,4}\.\w+")
"""Names such as "7.mp4". Every folder of MMVU has them, so a file with such a name may be the wrong
one even if no other on disk has it."""

_SUFFIXES = (".mp4", ".MP4", ".mkv", ".webm", ".avi", ".mov")
"""Suffixes of videos. Copies of a benchmark may have another container than its record says."""


def read_records(source: str, patterns: Sequence[str]) -> list[Record]:
    """Read the records of tables (parquet, JSON or JSON lines), in the order of the files' names.

    Columns of parquet files that hold pictures or videos are not read.

    Args:
        source: one file, a folder laid out like the hub's repository, or a hub id.
        patterns: patterns of relative paths, in order of preference. Only the files of the first
            pattern that matches are read, in any folder.

    Raises:
        FileNotFoundError: no file matches.
        ValueError: a file is damaged or holds no records.
    """
    return [record for file in _tables(source, patterns) for record in _read(file)]


def _tables(source: str, patterns: Sequence[str]) -> list[pathlib.Path]:
    """Return the files that `read_records` reads, fetched from the hub if needed."""
    path = pathlib.Path(source)
    if path.is_file():
        return [path]
    try:
        folder = path if path.is_dir() else from_hub(source, patterns)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"--data {error}") from error
    for pattern in patterns:
        if files := sorted(folder.rglob(pattern)):
            return files
    raise FileNotFoundError(
        f"--data {source}: holds none of {', '.join(patterns)}; "
        "give the folder of the published files, or the file"
    )


def _read(file: pathlib.Path) -> list[Record]:
    try:
        if file.suffix == ".parquet":
            with pq.ParquetFile(file) as table:
                fields = table.schema_arrow
                columns = [field.name for field in fields if "binary" not in str(field.type)]
                return table.read(columns).to_pylist()
        text = foreign.read_bytes(file, _MOST_BYTES).decode()
        if file.suffix == ".jsonl":
            # splitlines() would also split at characters that JSON allows inside a text (U+2028).
            records = [json.loads(line) for line in text.split("\n") if line.strip()]
        else:
            records = json.loads(text)
    # RecursionError: nested too deeply.
    except (OSError, ValueError, RecursionError, pa.ArrowException) as error:
        reason = f"{type(error).__name__}: {foreign.shortened(error, 200)}"
        raise ValueError(f"{file}: cannot be read ({reason}); fetch it again") from error
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise ValueError(
            f"{file}: not a list of records; give a table as the benchmark publishes it"
        )
    return records


class VideoFolder:
    """A folder of unpacked archives, which may add or drop a folder around the videos."""

    def __init__(self, root: str | os.PathLike):
        self.root = pathlib.Path(root)
        if not self.root.is_dir():
            raise FileNotFoundError(
                f"--videos {root}: no such folder; "
                "give the one that the benchmark's archives were unpacked into"
            )

    def find(self, path: str) -> str | None:
        """Find a file that a benchmark names.

        Look first at `path` below the root, then at `path` without its leading folders, then for a
        file of the same name anywhere below the root. A video that is not found may have the suffix
        of another container, such as .mkv or .MP4 for .mp4.

        Returns:
            The file's path relative to the root; None if there is no such file, or if several files
            have the name.
        """
        stem, suffix = os.path.splitext(path)
        suffixes = (suffix, *_SUFFIXES) if suffix in _SUFFIXES else (suffix,)
        return next(filter(None, map(self._find, (stem + other for other in suffixes))), None)

    def _find(self, path: str) -> str | None:
        names = path.split("/")
        for first in range(len(names)):
            tail = "/".join(names[first:])
            if (self.root / tail).is_file():
                return tail
        paths = self._by_name.get(names[-1], [])
        return paths[0] if len(paths) == 1 and not _NUMBERED.fullmatch(names[-1]) else None

    @functools.cached_property
    def _by_name(self) -> dict[str, list[str]]:
        """All files below the root, as relative paths by file name."""
        paths: dict[str, list[str]] = {}
        for folder, _, names in os.walk(self.root):
            for name in names:
                path = pathlib.Path(folder, name).relative_to(self.root)
                paths.setdefault(name, []).append(path.as_posix())
        return paths
