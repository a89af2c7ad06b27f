"""Stores questions, conversations and captions with tensorflow-datasets, without TensorFlow.

A split holds records of one kind and returns them exactly as they were written, in the same order.
Videos are not stored: a record names its video by a path relative to a data root.
"""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pydantic
import tensorflow_datasets as tfds

from paravt_jax.data.stored import DamagedFileError
from paravt_jax.method.conversations import Conversation
from paravt_jax.method.records import Caption, Question

Record = Question | Caption | Conversation
_Examples = Iterator[tuple[int, dict[str, bytes]]]
_RECORD: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(Record)


class Records(tfds.core.GeneratorBasedBuilder):
    """Stores each record as JSON text."""

    VERSION = tfds.core.Version("1.0.0")

    def __init__(self, splits: Mapping[str, Iterable[Record]] | None = None, **kwargs):
        self._splits = splits or {}
        super().__init__(**kwargs)

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict({"record": tfds.features.Text()})
        return tfds.core.DatasetInfo(
            builder=self,
            description="Questions, conversations and captions about videos.",
            features=features,
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, _Examples]:
        return {name: self._generate_examples(records) for name, records in self._splits.items()}

    def _generate_examples(self, records: Iterable[Record]) -> _Examples:
        for n, record in enumerate(records):
            yield n, {"record": _RECORD.dump_json(record)}


def write_splits(folder: str | os.PathLike, splits: Mapping[str, Iterable[Record]]) -> None:
    """Write splits to a folder, in place of those that it holds.

    No split is empty. After an interruption the folder counts as unprepared.
    """
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


def _mark(folder: pathlib.Path) -> pathlib.Path:
    """Return the file with which tensorflow-datasets marks a complete folder: it renames it at the
    end."""
    return folder / Records.name / str(Records.VERSION) / "dataset_info.json"


class Split(Sequence[Any]):
    """The records of a stored split, read on access. Usable as a grain data source."""

    def __init__(self, source: Any, folder: pathlib.Path):
        self._source = source
        self._folder = folder

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index):
        # The range converts a negative index, and raises IndexError for one out of bounds.
        number = range(len(self))[index]
        try:
            record = self._source[number]["record"]
        # array_record verifies a hash of each chunk.
        except RuntimeError as error:
            raise DamagedFileError(
                f"{self._folder}: a record is damaged; delete it and prepare again ({error})"
            ) from error
        return _RECORD.validate_json(record)


def is_prepared(folder: str | os.PathLike) -> bool:
    """Return whether `write_splits` has finished in this folder."""
    return _mark(pathlib.Path(folder)).exists()


def open_splits(folder: str | os.PathLike) -> dict[str, Split]:
    """Open the splits of a folder that `is_prepared`, by name."""
    folder = pathlib.Path(folder)
    builder = tfds.builder_from_directory(str(_mark(folder).parent))
    # A decorator hides the signature from pyright.
    return {
        name: Split(builder.as_data_source(split=name), folder)  # pyright: ignore[reportCallIssue]
        for name in builder.info.splits
    }
