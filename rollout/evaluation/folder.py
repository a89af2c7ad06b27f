"""The folder of an evaluation: its settings, one line per finished question, and the summary.

A killed process may leave half a line, which the next start cuts off. If a question has several
lines, the last one with an answer counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
from collections.abc import Iterable, Iterator
from typing import Any

from paravt_jax.data.stored import lock, require_same, write_atomically
from paravt_jax.processes.exit_codes import UserError

Line = dict[str, Any]

_LONG_FIELDS = frozenset(("turns", "overview"))
"""Fields with the transcript: most of a line's bytes, and not needed for any figure."""


class FolderError(UserError):
    """The folder cannot be used for this evaluation; the message says why and what to do."""


class EvaluationFolder(contextlib.AbstractContextManager):
    """The folder of an evaluation, open for one process of it."""

    def __init__(
        self,
        path: str | os.PathLike,
        identity: Line,
        details: Line,
        commit: str | None,
        process: int = 0,
    ):
        """Open the folder, and create it if needed.

        Args:
            path: the folder.
            identity: the settings and hashes that decide an answer.
            details: other settings, which may change from one start to the next.
            commit: the commit of the code. config.json lists the commits of all starts.
            process: index of this process. Each has its own file of lines, and the first one makes
                the folder before the others open it.

        Raises:
            FolderError: the folder holds an evaluation with another identity, another evaluation
                writes into it, or it cannot be written.
        """
        self.path = pathlib.Path(path)
        name = f"questions-{process}.jsonl" if process else "questions.jsonl"
        with contextlib.ExitStack() as files:
            try:
                if not process:
                    _require_evaluation(self.path)
                self.path.mkdir(parents=True, exist_ok=True)
                # One lock per file of lines: two processes must not append to the same one.
                files.enter_context(lock(self.path / f".{name}.lock"))
                self._lines = files.enter_context((self.path / name).open("a+b"))
            except OSError as error:
                raise FolderError(
                    f"--out {self.path} cannot be used: {error}; else name another, writable folder"
                ) from error
            if not process:
                self._claim(identity, details, commit)
            self._cut_off_partial_line()
            self._files = files.pop_all()

    def __exit__(self, *exception: object) -> None:
        self._files.close()

    def append(self, line: Line) -> None:
        """Append a line. It is on disk when this returns."""
        self._lines.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
        self._lines.flush()
        os.fsync(self._lines.fileno())

    def write(self, name: str, content: Line) -> None:
        """Write a JSON file of the folder."""
        text = json.dumps(content, indent=1, ensure_ascii=False)
        write_atomically(self.path / name, f"{text}\n")

    def _claim(self, identity: Line, details: Line, commit: str | None) -> None:
        """Write config.json, or check that the one in the folder has the same identity."""
        if not (self.path / "config.json").exists():
            self.write("config.json", {"identity": identity, **details, "commits": [commit]})
            return
        stored = read_json(self.path / "config.json")
        require_same(
            f"--out {self.path} holds another evaluation",
            stored.get("identity", {}),
            identity,
            "Give another --out, or the settings of that evaluation.",
            FolderError,
        )
        commits = list(dict.fromkeys([*stored["commits"], commit]))
        self.write("config.json", stored | details | {"commits": commits})

    def _cut_off_partial_line(self) -> None:
        """Truncate the file after its last whole line, in case a process was killed mid-write."""
        self._lines.seek(0)
        self._lines.truncate(sum(len(line) for line in self._lines if line.endswith(b"\n")))


def _require_evaluation(folder: pathlib.Path) -> None:
    """Raise FolderError if a folder holds files, but no evaluation."""
    config = folder / "config.json"
    if config.exists() and "identity" in read_json(config):
        return
    # A start that was killed leaves hidden files, an empty file of lines and a temporary file.
    others = sorted(file.name for file in folder.glob("[!.]*") if os.path.getsize(file))
    if others and others != ["config.json.tmp"]:
        raise FolderError(
            f"--out {folder}: is no folder of an evaluation and holds {', '.join(others[:3])}; "
            "give a new or empty folder"
        )


def read_lines(folder: pathlib.Path) -> Iterator[Line]:
    """Read the lines of all processes, without transcripts. Those of each process stay in order.

    Raises:
        FolderError: a whole line is damaged. The message names the file and the line.
    """
    for file in sorted(folder.glob("questions*.jsonl")):
        for _, line, _ in read_heads(file, "content"):
            yield line


def read_heads(file: pathlib.Path, field: str) -> Iterator[tuple[int, Line, bytes]]:
    """Read a file of lines, which may be many and long, without transcripts.

    Yields:
        The offset of each line in bytes, the line without its transcript, and the turns of that,
        which are not parsed.

    Raises:
        FolderError: a whole line is damaged or has no `field`. The message names the file and the
            line.
    """
    offset = 0
    with file.open("rb") as stream:
        for number, text in enumerate(stream, 1):
            if not text.endswith(b"\n"):  # another process is still writing it
                continue
            # No text in a line holds these bytes: there, a quote stands behind a backslash.
            start, end = text.find(b'"turns": ['), text.rfind(b'], "answer": ')
            cut = 0 <= start < end
            try:
                line = json.loads(text[:start] + text[end + 3 :] if cut else text)
                _ = line[field]
            except (ValueError, LookupError, TypeError) as error:
                raise FolderError(
                    f"{file}, line {number}: is damaged, or of an older version; delete the "
                    "line to ask that question again, or give another folder"
                ) from error
            kept = {name: value for name, value in line.items() if name not in _LONG_FIELDS}
            yield offset, kept, text[start:end] if cut else b""
            offset += len(text)


def latest(lines: Iterable[Line]) -> dict[str, Line]:
    """Return the line of each question that counts, by the hash of what was asked.

    It is the last one. But a question that one process left out may have been played by another one
    since, whose file comes first, so an answer counts in any case.
    """
    counting: dict[str, Line] = {}
    for line in lines:
        known = counting.get(line["content"])
        if known is None or "left_out" not in line or "left_out" in known:
            counting[line["content"]] = line
    return counting


def read_json(file: pathlib.Path) -> Line:
    """Read a JSON file of the folder. Raises FolderError if it is missing or damaged."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FolderError(
            f"{file}: no such file; give a finished evaluation, such as evaluations/NAME/BENCHMARK"
        ) from error
    except ValueError as error:
        raise FolderError(
            f"{file}: is damaged ({error}); evaluate again in another folder"
        ) from error


def commit() -> str | None:
    """Return the commit of this code, followed by "+" if tracked files have changed since.

    None if the code is not in a git checkout.
    """
    # Without names of tags. Untracked files, such as the results of runs, are not part of the code.
    git = "git describe --always --abbrev=40 --exclude=* --dirty=+".split()
    here = pathlib.Path(__file__).parent
    try:
        done = subprocess.run(git, cwd=here, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
