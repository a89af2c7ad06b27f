"""Rows of published tables: parquet, JSON and JSON lines, from a file, a folder laid out like the hub's repository, or the hub.

Owns where a table's files are found. Refuses files that cannot be read, by name. Invariant: only the fields asked for are read, so a table
that carries pictures or videos in other columns costs nothing.
"""

from __future__ import annotations

import fnmatch
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from paravt_jax.data.sources import from_hub

Row = dict[str, Any]


def read_rows(source: str, patterns: Sequence[str], fields: Sequence[str]) -> list[Row]:
    """The rows of the first of `patterns` that files of `source` match (relative paths; `*` goes over folders), files by name.

    `source`: one file, a folder, or a hub id. Fields that a table lacks are left out. FileNotFoundError where nothing is found,
    ValueError for a file that is damaged.
    """
    return [row for file in table_files(source, patterns) for row in _read(file, fields)]


def table_files(source: str, patterns: Sequence[str]) -> list[pathlib.Path]:
    """The files that `read_rows` reads."""
    path = pathlib.Path(source)
    if path.is_file():
        return [path]
    folder = path if path.is_dir() else _fetch(source, patterns)
    names = sorted(
        file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()
    )
    for pattern in patterns:
        if found := [name for name in names if fnmatch.fnmatchcase(name, pattern)]:
            return [folder / name for name in found]
    raise FileNotFoundError(
        f"--data {source}: holds none of {', '.join(patterns)}; give the folder of the published files, or the file"
    )


def _fetch(source: str, patterns: Sequence[str]) -> pathlib.Path:
    try:
        return from_hub(source, patterns)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"--data {error}") from error


def _read(file: pathlib.Path, fields: Sequence[str]) -> list[Row]:
    try:
        if file.suffix == ".parquet":
            with pq.ParquetFile(file) as table:
                return table.read(
                    [name for name in fields if name in table.schema_arrow.names]
                ).to_pylist()
        text = file.read_text(encoding="utf-8")
        rows = (
            [json.loads(line) for line in text.splitlines() if line.strip()]
            if file.suffix == ".jsonl"
            else json.loads(text)
        )
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ValueError(
            f"{file}: cannot be read ({type(error).__name__}: {str(error)[:200]}); fetch it again"
        ) from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{file}: is no list of rows; give a table of the benchmark's own form")
    return [{name: row[name] for name in fields if name in row} for row in rows]
