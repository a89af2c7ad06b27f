"""Reads the published tables of benchmarks, and finds their videos."""

from __future__ import annotations

import functools
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from paravt_jax.data import foreign
from paravt_jax.data.frames import on_disk

Record = dict[str, Any]

_MOST_BYTES = 1 << 30


def read_records(source: str, patterns: Sequence[str]) -> list[Record]:
    """Read the records of tables (parquet, JSON or JSON lines), in the order of the files' names.

    Columns of parquet files that hold pictures or videos are not read.

    Args:
        source: one file, or a folder laid out like the hub's repository.
        patterns: patterns of relative paths, in order of preference. Only the files of the first
            pattern that matches are read, in any folder.

    Raises:
        FileNotFoundError: no file matches.
        ValueError: a file is damaged or holds no records.
    """
    return [record for file in _tables(source, patterns) for record in _read(file)]


def _tables(source: str, patterns: Sequence[str]) -> list[pathlib.Path]:
    """Return the files that `read_records` reads."""
    path = pathlib.Path(source)
    if path.is_file():
        return [path]
    for pattern in patterns:
        if files := sorted(path.rglob(pattern)):
            return files
    raise FileNotFoundError(
        f"--data {source!r}: holds none of {', '.join(patterns)}; "
        "give the folder of the data set (docs/evaluation.md, 1), or the file"
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
    """A folder of videos and subtitles.

    Args:
        root: the folder, or a file in it.
        exact: whether a file is found only at the path that is asked for.
    """

    def __init__(self, root: str | os.PathLike, exact: bool = False):
        self._exact = exact
        path = pathlib.Path(root)
        self.root = path.parent if path.is_file() else path
        if not self.root.is_dir():
            raise FileNotFoundError(
                f"--data {root}: no such file or folder; give a split's folder or your questions"
            )

    def find(self, path: str) -> str | None:
        """Find a file that a question names.

        Look at `path` below the root. Unless `exact`, look then at `path` without its leading
        folders, then for a single file anywhere below the root whose path ends in `path`.

        Returns:
            The file's path relative to the root; None if no file matches, or if several do.
        """
        names = path.split("/")
        for first in range(1 if self._exact else len(names)):
            file = on_disk(self.root, "/".join(names[first:]))
            if file.is_file():
                return os.path.relpath(file, self.root)
        known = () if self._exact else self._by_name.get(names[-1], ())
        ending = [file for file in known if file.endswith(f"/{path}")]
        return ending[0] if len(ending) == 1 else None

    @functools.cached_property
    def _by_name(self) -> dict[str, list[str]]:
        """All files below the root, as relative paths by file name."""
        paths: dict[str, list[str]] = {}
        for folder, _, names in os.walk(self.root):
            for name in names:
                path = pathlib.Path(folder, name).relative_to(self.root)
                paths.setdefault(name, []).append(path.as_posix())
        return paths
