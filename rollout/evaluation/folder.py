"""The folder of an evaluation: what was asked for, one line a question as it is done, and the summary.

Owns the files and the lock on each shard's lines. Refuses a folder of another evaluation (naming what differs) and a second process for the
same shard. Invariant: a line is whole or was never written, whenever the process died; of several lines on one question the last counts.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from paravt_jax.data.atomic import write_atomically
from paravt_jax.data.stored_settings import lock, require_same

Line = dict[str, Any]


class FolderError(RuntimeError):
    """The folder cannot be this evaluation's; the message says why and what to do."""


class EvaluationFolder:
    """`path`, made if need be, for one shard's process until `close`. `identity` decides whether it is the same evaluation."""

    def __init__(
        self,
        path: str | os.PathLike,
        identity: Line,
        details: Line,
        commit: str | None,
        shard: tuple[int, int] = (0, 1),
    ):
        self.path = pathlib.Path(path)
        name = "questions.jsonl" if shard[1] == 1 else f"questions-{shard[0]}-of-{shard[1]}.jsonl"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = lock(self.path / f".{name}.lock")
            self._lines = (self.path / name).open("a+b")
        except BlockingIOError as error:
            raise FolderError(
                f"--out {self.path}: {name} is {error}; wait for it, or name another folder"
            ) from error
        except OSError as error:
            raise FolderError(
                f"--out {self.path} cannot be used: {error}; name a folder that can be written"
            ) from error
        try:
            self._claim(identity, details, commit)
            self._mend()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._lines.close()
        self._lock.close()

    def __enter__(self) -> EvaluationFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def append(self, line: Line) -> None:
        """Writes a line, on disk when this returns."""
        self._lines.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
        self._lines.flush()
        os.fsync(self._lines.fileno())

    def summarise(self, make: Callable[[Line, Iterator[Line]], Line]) -> Line:
        """Writes summary.json from the lines of all shards, alone with them: who is last has all."""
        with lock(self.path / ".lock", wait=True):
            summary = make(read_json(self.path / "config.json"), read_lines(self.path))
            write_atomically(self.path / "summary.json", _as_text(summary))
        return summary

    def _claim(self, identity: Line, details: Line, commit: str | None) -> None:
        file = self.path / "config.json"
        with lock(self.path / ".lock", wait=True):
            if not file.exists():
                write_atomically(
                    file, _as_text({"identity": identity, **details, "commits": [commit]})
                )
                return
            there = read_json(file)
            require_same(
                f"--out {self.path} holds another evaluation",
                there.get("identity", {}),
                identity,
                "Name another --name or --out, or ask for what it holds.",
                FolderError,
            )
            commits = there["commits"] + [commit] * (commit not in there["commits"])
            write_atomically(file, _as_text(there | details | {"commits": commits}))

    def _mend(self) -> None:
        """Cuts off what a killed process left of a line."""
        self._lines.seek(0)
        end = 0
        for line in self._lines:
            if not line.endswith(b"\n"):
                self._lines.truncate(end)
                break
            end += len(line)
        self._lines.seek(0, os.SEEK_END)


def read_lines(folder: pathlib.Path) -> Iterator[Line]:
    """The lines of all shards, in the order in which they were written.

    Without question, times of the overview and turns, which are most of a line.
    """
    for file in sorted(folder.glob("questions*.jsonl")):
        with file.open("rb") as stream:
            for text in stream:
                if text.endswith(b"\n"):
                    line = json.loads(text)
                    for key in ("turns", "overview", "question"):
                        line.pop(key, None)
                    yield line


def latest(lines: Iterator[Line]) -> dict[str, Line]:
    """Question -> its last line."""
    return {line["id"]: line for line in lines}


def read_json(file: pathlib.Path) -> Line:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FolderError(f"{file}: is not there; give the folder of an evaluation") from error
    except ValueError as error:
        raise FolderError(
            f"{file}: is damaged ({error}); delete its folder and evaluate again"
        ) from error


def _as_text(content: Line) -> str:
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"
