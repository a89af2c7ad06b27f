"""Finds all episodes of a run or of evaluations on disk, and reads one at a time.

Transcripts are long. The index keeps where each one is, and a small row of what the page filters
and sorts by.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from paravt_jax.data.stored import read_checked_json
from rollout.evaluation.folder import FolderError, latest, read_heads, read_json

Record = dict[str, Any]

_SHOWN = 160
"""Characters of a question and of an answer in a row. A question's end is shown, because it may
begin with the subtitles of its video."""
_REMEDY = "the run plays it again, or does without it"


class Row(NamedTuple):
    """What the page knows of an episode that is not open."""

    key: str
    """FOLDER/FILE:PLACE."""
    folder: str
    split: str
    """The benchmark, or the phase of a run."""
    step: int
    """Step of RL; 0 before it, and in evaluations of a finished model."""
    k: int
    dispatch: str
    temperature: float
    kind: str
    stop: str
    calls: int
    """Calls that were carried out."""
    turns: int
    reward: float | None
    accuracy: float | None
    answer: str | None
    question: str
    id: str
    """The question's id."""
    video: str
    same: str
    """Equal for episodes of one question about one video, with the same options and answer."""


class Folder:
    """The episodes of a run, of an evaluation, or of several evaluations in one folder.

    Args:
        path: The folder. Several evaluations have a folder each in it, as in those that
            `python -m rollout.evaluate` writes to evaluations/MODEL.
        name: Its name on the page, with which its keys begin.

    Raises:
        FolderError: It holds no episodes, or one of its lines is damaged.
        DamagedFileError: An evaluation of a run is damaged.
    """

    def __init__(self, path: str | os.PathLike[str], name: str):
        self.root = pathlib.Path(path).resolve()
        self.name = name
        self.identities: dict[str, Record] = {}
        """The settings of evaluations that decide answers, by benchmark."""
        self._places: dict[str, tuple[pathlib.Path, int]] = {}
        self._state: list[tuple[pathlib.Path, int]] = []
        self._rows: list[Row] = []
        if not self.rows():
            raise FolderError(
                f"{path}: holds no episodes; give the folder of a run, of an evaluation, or of "
                "several evaluations"
            )

    def rows(self) -> list[Row]:
        """Return the row of each episode that there is now. Files are read once they change."""
        files = self._files()
        state = [(file, file.stat().st_mtime_ns) for file in files]
        if state != self._state:
            names = {file: file.relative_to(self.root).with_suffix("") for file in files}
            places: dict[str, tuple[pathlib.Path, int]] = {}
            rows = []
            for file, place, head in self._heads(files):
                key = f"{self.name}/{names[file]}:{place}"
                places[key] = (file, place)
                rows.append(_row(key, self.name, head))
            self._places, self._rows, self._state = places, rows, state
        return self._rows

    def record(self, key: str) -> Record:
        """Read an episode. Raises KeyError if none has this key."""
        file, place = self._places[key]
        if file.suffix == ".json":
            return read_checked_json(file, Record, _REMEDY)["episodes"][place]
        with file.open("rb") as stream:
            stream.seek(place)
            return json.loads(stream.readline())

    def _files(self) -> list[pathlib.Path]:
        """Return the files with episodes. A run has all of them in one when it is finished."""
        patterns = ("episodes.jsonl", "evaluation/*.json", "questions*.jsonl", "*/questions*.jsonl")
        matches = (sorted(self.root.glob(pattern)) for pattern in patterns)
        return next(filter(None, matches), [])

    def _heads(self, files: list[pathlib.Path]) -> Iterator[tuple[pathlib.Path, int, Record]]:
        """Yield the file of each episode, its place there, and its record without turns."""
        evaluations: dict[pathlib.Path, list[Record]] = {}
        for file in files:
            if file.suffix == ".json":
                for place, record in enumerate(
                    read_checked_json(file, Record, _REMEDY)["episodes"]
                ):
                    turns = json.dumps(record.pop("turns")).encode()
                    yield file, place, _counts(turns) | record
            elif file.name == "episodes.jsonl":
                for place, head, turns in read_heads(file, "question"):
                    yield file, place, _counts(turns) | head
            else:
                lines = evaluations.setdefault(file.parent, [])
                for place, head, _ in read_heads(file, "content"):
                    lines.append(head | {"at": (file, place)})
        for folder, lines in evaluations.items():
            identity = read_json(folder / "config.json")["identity"]
            benchmark = identity.get("benchmark", folder.name)
            self.identities[benchmark] = identity
            for head in latest(lines).values():
                if "left_out" not in head:
                    yield *head["at"], head | {"phase": benchmark}


def _counts(turns: bytes) -> Record:
    """Count turns and executed calls in JSON that is not parsed."""
    executed = (b'"status": "executed", "times"', b'"status": "clamped", "times"')
    return {"calls": sum(map(turns.count, executed)), "turn_count": turns.count(b'"tokens": [')}


def _row(key: str, folder: str, head: Record) -> Row:
    question, rewards = head["question"], head.get("rewards", {})
    answer = head["answer"]
    # Two runs have the same video in folders of their own.
    asked = [question, os.path.basename(head["video"])]
    return Row(
        key,
        folder,
        head["phase"],
        head.get("step", 0),
        head["k"],
        head["dispatch"],
        head["temperature"],
        question["kind"],
        head["stop"].replace("_", " "),
        head["calls"],
        head["turn_count"],
        rewards.get("total"),
        rewards.get("accuracy"),
        answer and answer[:_SHOWN],
        question["text"][-_SHOWN:].strip(),
        question["id"],
        head["video"],
        hashlib.blake2b(json.dumps(asked).encode(), digest_size=8).hexdigest(),
    )
