"""Questions, conversations and captions on disk, as a tensorflow-datasets builder without TensorFlow.

Owns the stored form of the records and the check of their videos. A split holds records of one kind; videos are stored as
paths under a data root and nested things as JSON text. Refuses to open a video for anything but the check.
Invariant: what is read equals what was prepared, record by record and in the same order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import tensorflow_datasets as tfds

from paravt_jax.data import video
from paravt_jax.data.atomic import write_atomically
from paravt_jax.data.frames import VideoError
from paravt_jax.method.conversations import ChatTurn, Clip, Conversation
from paravt_jax.method.records import Caption, Question, QuestionKind
from paravt_jax.method.subtitles import Subtitle

Record = Question | Caption | Conversation
_AnyRecord = TypeVar("_AnyRecord", Question, Caption, Conversation)

_FINGERPRINT = "fingerprint.json"


class Records(tfds.core.GeneratorBasedBuilder):
    """Any splits of records: `{"kind", "record"}`, the record as JSON text."""

    VERSION = tfds.core.Version("1.0.0")

    def __init__(self, splits: Mapping[str, Sequence[Record]] | None = None, **kwargs):
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

    def _generate_examples(self, records: Sequence[Record]) -> Iterator[tuple[int, dict[str, str]]]:
        for n, record in enumerate(records):
            kind, text = encode(record)
            yield n, {"kind": kind, "record": text}


def write_splits(folder: str | os.PathLike, splits: Mapping[str, Sequence[Record]]) -> None:
    """Writes the splits under the folder, or leaves them where the very same ones are there already.

    An interrupted call leaves nothing that is taken for whole. Raises ValueError for an empty split.
    """
    empty = [name for name, records in splits.items() if not records]
    if empty:
        raise ValueError(
            f"datasets: no records in split {', '.join(empty)}; leave it out or give it some"
        )
    folder = pathlib.Path(folder)
    mark, fingerprint = (
        folder / _FINGERPRINT,
        {name: _digest(records) for name, records in splits.items()},
    )
    if mark.exists() and json.loads(mark.read_text()) == fingerprint:
        return
    mark.unlink(missing_ok=True)
    shutil.rmtree(folder / Records.name, ignore_errors=True)
    tfds.disable_progress_bar()
    builder = Records(splits, data_dir=str(folder), file_format="array_record")
    with contextlib.redirect_stdout(io.StringIO()):  # it announces a download, and there is none
        builder.download_and_prepare(
            download_config=tfds.download.DownloadConfig(try_download_gcs=False)
        )
    write_atomically(mark, json.dumps(fingerprint))


class Split(Sequence[_AnyRecord]):
    """A stored split, read at random: a sequence of its records, and so a source for grain."""

    def __init__(self, source: Any):
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index):  # grain asks for one record at a time
        if isinstance(index, slice):
            return tuple(self[n] for n in range(*index.indices(len(self))))
        stored = self._source[range(len(self))[index]]
        return decode(_text(stored["kind"]), _text(stored["record"]))


def is_prepared(folder: str | os.PathLike) -> bool:
    """Whether `write_splits` has finished here: a folder alone says nothing, it is there from the first byte on."""
    return (pathlib.Path(folder) / _FINGERPRINT).exists()


def open_split(folder: str | os.PathLike, name: str) -> Split:
    """The records of one prepared split. Raises ValueError naming the splits there are."""
    folder = pathlib.Path(folder)
    if not is_prepared(folder):
        raise ValueError(f"datasets: {folder} holds no prepared data; call prepare first")
    builder = tfds.builder_from_directory(str(folder / Records.name / str(Records.VERSION)))
    if name not in builder.info.splits:
        raise ValueError(
            f"datasets: no split {name!r} in {folder}; there are {', '.join(sorted(builder.info.splits))}"
        )
    return Split(builder.as_data_source(split=name))  # pyright: ignore[reportCallIssue]  # a decorator hides the signature


def encode(record: Record) -> tuple[str, str]:
    """The kind of a record and its JSON text."""
    return type(record).__name__.lower(), json.dumps(_as_dict(record))


def _as_dict(record: Record) -> dict[str, Any]:
    """The fields of a record, without `subtitles` where a question has none: few have."""
    return dataclasses.asdict(
        record, dict_factory=lambda fields: {k: v for k, v in fields if k != "subtitles" or v}
    )


def decode(kind: str, text: str) -> Record:
    """The record that `encode` was given."""
    return _DECODERS[kind](json.loads(text))


def check_videos(
    paths: Sequence[str],
    root: str | os.PathLike,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, str]:
    """Which of the videos cannot be read, and why, by path; how many are too many is the caller's to say.

    Each is listed, not decoded. `progress` is told videos done and in all.
    """
    bad: dict[str, str] = {}
    for n, path in enumerate(paths):
        try:
            video.probe(pathlib.Path(root) / path)
        except VideoError as error:
            bad[path] = error.reason
        if progress is not None:
            progress(n + 1, len(paths))
    return bad


def video_of(record: Record) -> str:
    """The path of the video that a record is about; of a conversation, the first it shows."""
    return record.clips[0].path if isinstance(record, Conversation) else record.video


def _question(stored: dict) -> Question:
    subtitles = tuple(Subtitle(**entry) for entry in stored.get("subtitles", ()))
    fields = {"kind": QuestionKind(stored["kind"]), "options": tuple(stored["options"])}
    return Question(**{**stored, **fields, "subtitles": subtitles})


def _conversation(stored: dict) -> Conversation:
    turns = [ChatTurn(turn["role"], tuple(map(_part, turn["content"]))) for turn in stored["turns"]]
    return Conversation(**{**stored, "turns": tuple(turns)})


def _part(stored: str | dict) -> str | Clip:
    if isinstance(stored, str):
        return stored
    return Clip(**{**stored, "indices": tuple(stored["indices"]), "times": tuple(stored["times"])})


_DECODERS: dict[str, Callable[[Any], Record]] = {
    "question": _question,
    "conversation": _conversation,
    "caption": lambda stored: Caption(stored["video"], stored["time"], tuple(stored["words"])),
}


def _digest(records: Sequence[Record]) -> str:
    digest = hashlib.sha256()
    for record in records:
        digest.update("\0".join(encode(record)).encode() + b"\n")
    return digest.hexdigest()


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
