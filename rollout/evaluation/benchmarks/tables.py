"""Reads published tables in parquet, JSON or JSON lines, from disk or from the hub.

Only the requested columns are read, so images or videos in other columns cost nothing.
"""

from __future__ import annotations

import fnmatch
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from paravt_jax.data import foreign
from paravt_jax.data.sources import from_hub

Row = dict[str, Any]

_MOST_BYTES = 1 << 30


def read_rows(source: str, patterns: Sequence[str], fields: Sequence[str]) -> list[Row]:
    """Read the rows of a table, file by file in the order of their names.

    Args:
        source: one file, a folder laid out like the hub's repository, or a hub id.
        patterns: patterns of relative paths, in order of preference. Only the files of the first
            pattern that matches are read; `*` also matches "/".
        fields: the columns to read. Rows lack those that their table does not have.

    Raises:
        FileNotFoundError: no file matches.
        ValueError: a file is damaged or holds no rows.
    """
    rows: list[Row] = []
    for file in table_files(source, patterns):
        rows += _read(file, fields)
    return rows


def table_files(source: str, patterns: Sequence[str]) -> list[pathlib.Path]:
    """The files that `read_rows` reads, fetched from the hub if needed."""
    path = pathlib.Path(source)
    if path.is_file():
        return [path]
    folder = path if path.is_dir() else _fetch(source, patterns)
    files = (file for file in folder.rglob("*") if file.is_file())
    names = sorted(file.relative_to(folder).as_posix() for file in files)
    for pattern in patterns:
        found = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if found:
            return [folder / name for name in found]
    raise FileNotFoundError(
        f"--data {source}: holds none of {', '.join(patterns)}; "
        "give the folder of the published files, or the file"
    )


def _fetch(source: str, patterns: Sequence[str]) -> pathlib.Path:
    try:
        return from_hub(source, patterns)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"--data {error}") from error


def _read(file: pathlib.Path, fields: Sequence[str]) -> list[Row]:
    try:
        if file.suffix == ".parquet":
            return _read_parquet(file, fields)
        text = foreign.read_bytes(file, _MOST_BYTES).decode()
        if file.suffix == ".jsonl":
            # splitlines() would also split at characters that JSON allows inside a text (U+2028).
            rows = [json.loads(line) for line in text.split("\n") if line.strip()]
        else:
            rows = json.loads(text)
    # RecursionError: nested too deeply.
    except (OSError, ValueError, RecursionError, pa.ArrowException) as error:
        reason = f"{type(error).__name__}: {foreign.shortened(error, 200)}"
        raise ValueError(f"{file}: cannot be read ({reason}); fetch it again") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{file}: not a list of rows; give a table as the benchmark publishes it")
    return [{name: row[name] for name in fields if name in row} for row in rows]


def _read_parquet(file: pathlib.Path, fields: Sequence[str]) -> list[Row]:
    with pq.ParquetFile(file) as table:
        columns = [name for name in fields if name in table.schema_arrow.names]
        return table.read(columns).to_pylist()
