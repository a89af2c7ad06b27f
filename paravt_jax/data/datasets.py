"""Stores questions, conversations and captions with tensorflow-datasets, without TensorFlow.

A split holds records of one kind and returns them exactly as they were written, in the same order.
Videos are not stored: a record names its video by a path relative to a data root.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import pathlib
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import pydantic
import tensorflow_datasets as tfds

from paravt_jax.method.conversations import Conversation
from paravt_jax.method.records import Caption, Question

Record = Question | Caption | Conversation
_AnyRecord = TypeVar("_AnyRecord", Question, Caption, Conversation)
_RECORDS: dict[str, pydantic.TypeAdapter] = {
    kind.__name__.lower(): pydantic.TypeAdapter(kind) for kind in (Question, Caption, Conversation)
}


class Records(tfds.core.GeneratorBasedBuilder):
    """Stores each record as `{"kind", "record"}`, where "record" is JSON text."""

    VERSION = tfds.core.Version("1.0.0")

    def __init__(self, splits: Mapping[str, Iterable[Record]] | None = None, **kwargs):
        self._splits = splits or {}
        super().__init__(**kwargs)

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict(
            {"kind": tfds.features.Text(), "record": tfds.features.Text()}
        )
        return tfds.core.DatasetInfo(
            builder=self,
            description="Questions, conversations and captions about videos.",
            features=features,
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[int, dict[str, str]]]]:
        return {name: self._generate_examples(records) for name, records in self._splits.items()}

    def _generate_examples(self, records: Iterable[Record]) -> Iterator[tuple[int, dict[str, str]]]:
        for n, record in enumerate(records):
            kind, text = encode(record)
            yield n, {"kind": kind, "record": text}


def write_splits(folder: str | os.PathLike, splits: Mapping[str, Iterable[Record]]) -> None:
    """Write splits to a folder, in place of those that it holds.

    The records may be iterated several times. After an interruption the folder counts as
    unprepared.

    Raises:
        ValueError: A split is empty.
    """
    empty = [name for name, records in splits.items() if next(iter(records), None) is None]
    if empty:
        raise ValueError(
            f"datasets: no records in split {', '.join(empty)}; leave it out or give it some"
        )
    folder = pathlib.Path(folder)
    _mark(folder).unlink(missing_ok=True)
    shutil.rmtree(folder / Records.name, ignore_errors=True)
    tfds.disable_progress_bar()
    builder = Records(splits, data_dir=str(folder), file_format="array_record")
    # tensorflow-datasets prints that it downloads something, although nothing is downloaded.
    with contextlib.redirect_stdout(io.StringIO()):
        builder.download_and_prepare(
            download_config=tfds.download.DownloadConfig(try_download_gcs=False)
        )


def _builder_folder(folder: pathlib.Path) -> pathlib.Path:
    return folder / Records.name / str(Records.VERSION)


def _mark(folder: pathlib.Path) -> pathlib.Path:
    """The file with which tensorflow-datasets marks a complete folder: it renames it at the end."""
    return _builder_folder(folder) / "dataset_info.json"


class Split(Sequence[_AnyRecord]):
    """The records of a stored split, read on access. Usable as a grain data source."""

    def __init__(self, source: Any):
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return tuple(self[n] for n in range(*index.indices(len(self))))
        # The range converts a negative index, and raises IndexError for one out of bounds.
        stored = self._source[range(len(self))[index]]
        return decode(_text(stored["kind"]), _text(stored["record"]))


def is_prepared(folder: str | os.PathLike) -> bool:
    """Whether `write_splits` has finished in this folder."""
    return _mark(pathlib.Path(folder)).exists()


def open_split(folder: str | os.PathLike, name: str) -> Split:
    """Open one split of a prepared folder.

    Raises:
        ValueError: The folder is not prepared, or it has no such split.
    """
    folder = pathlib.Path(folder)
    if not is_prepared(folder):
        raise ValueError(f"datasets: {folder} holds no prepared data; prepare it first")
    builder = tfds.builder_from_directory(str(_builder_folder(folder)))
    if name not in builder.info.splits:
        names = ", ".join(sorted(builder.info.splits))
        raise ValueError(f"datasets: no split {name!r} in {folder}; there are {names}")
    # A decorator hides the signature from pyright.
    source = builder.as_data_source(split=name)  # pyright: ignore[reportCallIssue]
    return Split(source)


def encode(record: Record) -> tuple[str, str]:
    """Return the kind of a record and its JSON text."""
    return type(record).__name__.lower(), json.dumps(dataclasses.asdict(record))


def decode(kind: str, text: str) -> Record:
    """Return the record that `encode` was given."""
    return _RECORDS[kind].validate_json(text)


def video_of(record: Record) -> str:
    """Return the path of a record's video; for a conversation, the path of its first clip."""
    return record.clips[0].path if isinstance(record, Conversation) else record.video


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
