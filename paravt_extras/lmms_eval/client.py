"""Asks the lmms-eval that is installed in another Python environment for prompts and scores.

Its environment cannot be this one: it needs other versions of the same libraries. So its functions
run in a subprocess (`worker`). Prompts and scores are cached; the process starts with the first
question that the cache cannot answer, and loads lmms-eval with the first one that needs it.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paravt_extras.lmms_eval.cache import Cache, key_of
from paravt_extras.lmms_eval.pipe import Message, Pipe, PipeError
from paravt_extras.lmms_eval.tasks import TASKS
from rollout.evaluation.benchmarks.tables import Row
from rollout.evaluation.packs import PackError

VERSIONS = "0.7."
"""Versions of lmms-eval whose files are laid out as expected begin like this."""

MODEL = "qwen3_vl"
"""The model whose prompts are taken where a task has prompts for several."""

# Rows per message; a prompt with subtitles may have 100 kB.
_ROWS = 32
# Loading lmms-eval takes seconds, a cold disk makes it minutes.
_SECONDS = 900.0

_SET_UP = (
    "give the interpreter of an environment with lmms-eval 0.7 (docs/evaluation.md, lmms-eval)"
)
# Names of variables that lead to servers, or belong to this project's own environment.
_REMOVED = ("API", "KEY", "TOKEN", "OPENAI", "AZURE", "PYTHONPATH", "PYTHONHOME", "HF_", "PROXY")


class LmmsEvalError(PackError):
    """lmms-eval cannot be asked, or cannot answer; the message is one line for people."""


class UnaskableRow(LmmsEvalError):
    """The task cannot make a prompt of a row."""


@dataclasses.dataclass(frozen=True)
class Scored:
    """What lmms-eval makes of one answer."""

    score: float | None
    """In [0, 1]; None if it has none, and `reason` says why."""
    result: Mapping[str, Any] | None = None
    """The result of the task's own function, for `LmmsEval.aggregate`."""
    reason: str = ""


def _one_at_a_time(method: Callable[..., Any]) -> Any:
    """Lets one thread at a time into a method of `LmmsEval`."""

    @functools.wraps(method)
    def locked(self: LmmsEval, *args: Any, **fields: Any) -> Any:
        with self._lock:
            return method(self, *args, **fields)

    return locked


class LmmsEval:
    """lmms-eval's task for one split. A context manager: leaving it ends the process."""

    def __init__(self, python: str, split: str, cache: Cache):
        """Find the task.

        Args:
            python: path of the interpreter of lmms-eval's environment.
            split: the benchmark.
            cache: answers of earlier starts.

        Raises:
            LmmsEvalError: the interpreter, lmms-eval or the task is missing.
        """
        if split not in TASKS:
            raise LmmsEvalError(
                f"--protocol lmms-eval: lmms-eval has no task for {split or 'own questions'}; "
                f"give one of the splits {', '.join(TASKS)}, or another protocol"
            )
        self.split = split
        self.task = TASKS[split]
        self._python = python
        self._cache = cache
        self._opened = False
        # Replicas of the model play in threads of their own, and there is one process to ask.
        self._lock = threading.RLock()
        self._home = tempfile.mkdtemp(prefix="lmms-eval-")
        try:
            self._pipe = self._start()
            found = self._find()
        except BaseException:
            shutil.rmtree(self._home, ignore_errors=True)
            raise
        self.version: str = found["version"]
        self.digest: str = found["digest"]
        self.system: str = found["system"]
        """The system turn that lmms-eval's own Qwen3-VL has by default."""

    def close(self) -> None:
        self._pipe.close()
        shutil.rmtree(self._home, ignore_errors=True)

    def __enter__(self) -> LmmsEval:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @_one_at_a_time
    def settings(self) -> Message:
        """`generation`: the task's limits on answers; `metrics`: its metrics; `source`: its data
        set on the hub."""
        key = self._key("settings")
        if key not in self._cache:
            self._cache[key] = self._open()
        return self._cache[key]

    @_one_at_a_time
    def prompts(
        self, rows: Sequence[Row], files: Sequence[Mapping[str, pathlib.Path]] | None = None
    ) -> list[str]:
        """The task's prompts.

        Args:
            rows: rows of the published table, with all of its columns.
            files: for tasks with subtitles, the files of each row: "data/ID.mp4" and
                "subtitle/ID.srt" with their absolute paths.

        Raises:
            UnaskableRow: the task cannot make a prompt of a row.
            LmmsEvalError: lmms-eval cannot be loaded.
        """
        files = files if files is not None else [{}] * len(rows)
        rows = [self.task.row(row) for row in rows]
        keys = [
            self._key("prompt", row, {name: _stamp(path) for name, path in own.items()})
            for row, own in zip(rows, files, strict=True)
        ]
        missing = [number for number, key in enumerate(keys) if key not in self._cache]
        for start in range(0, len(missing), _ROWS):
            asked = missing[start : start + _ROWS]
            reply = self._ask_opened(
                do="prompts",
                rows=[rows[number] for number in asked],
                files=[
                    {name: str(path) for name, path in files[number].items()} for number in asked
                ],
            )
            for number, prompt in zip(asked, reply["prompts"], strict=True):
                if "text" not in prompt:
                    reason = prompt.get("error") or f"it asks the server {prompt['judge']}"
                    raise UnaskableRow(self._bad_row(rows[number], reason))
                self._cache[keys[number]] = prompt["text"]
        return [self._cache[key] for key in keys]

    @_one_at_a_time
    def misfit(self, row: Row) -> str:
        """Why no answer to a row could be right, as one line; "" if one can."""
        row = self.task.row(row)
        if self.task.can_be_right(row):
            return ""
        source = self.settings()["source"]
        return (
            f"lmms-eval's {self.task.name} needs the table of {source}, with letters as answers; "
            f"{self.task.letter} is {str(row.get(self.task.letter, ''))[:40]!r}"
            + (", and the question has to repeat its options" * self.task.options_in_question)
        )

    @_one_at_a_time
    def score(self, row: Row, answer: str) -> Scored:
        """What the task makes of an answer. Answers that only a judge can score get no score."""
        row = self.task.row(row)
        if self.task.judged(row):
            return Scored(None, reason="lmms-eval scores it with a judge")
        key = self._key("score", row, answer)
        if key not in self._cache:
            seeds = [seed_of(self.task.name, answer, row)]
            reply = self._ask_opened(do="scores", rows=[row], answers=[answer], seeds=seeds)
            self._cache[key] = self._result(reply["results"][0])
        found = self._cache[key]
        if "result" not in found:
            return Scored(None, reason=found["error"])
        return Scored(found["score"], found["result"])

    def _result(self, found: Message) -> Message:
        if "judge" in found:
            # The question has been played; an error would end the run, and each new start of it.
            words = f"needs a judge (it asks the server {found['judge']}), and none may be asked"
            return {"error": f"lmms-eval's {self.task.name} {words}"}
        if "result" not in found:
            return found
        result = {metric: found["result"].get(metric) for metric in self.settings()["metrics"]}
        entry = result[self.task.metric]
        if self.task.score is not None:
            score = self.task.score(entry)
        else:
            score = self.aggregate([result])[self.task.metric] / self.task.whole
        return {"score": score, "result": result}

    @_one_at_a_time
    def aggregate(self, results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """The task's own figures of results, by metric.

        Raises:
            LmmsEvalError: its functions fail.
        """
        key = self._key("aggregate", results)
        if key not in self._cache:
            asked = [dict(result) for result in results]
            self._cache[key] = self._ask_opened(do="aggregate", results=asked)["metrics"]
        return self._cache[key]

    def _key(self, *parts: Any) -> str:
        return key_of(self.digest, self.task.name, MODEL, *parts)

    def _bad_row(self, row: Row, reason: str) -> str:
        id = next((row[name] for name in ("question_id", "id", "uid", "qid") if name in row), "")
        return (
            f"--data: lmms-eval's {self.task.name} cannot ask row {id} ({reason}); "
            f"give the table that it reads, {self.settings()['source']}"
        )

    # --- the process ---

    def _start(self) -> Pipe:
        worker = pathlib.Path(__file__).with_name("worker.py")
        try:
            return Pipe([self._python, str(worker)], _environment(self._home), self._home)
        except PipeError as error:
            raise LmmsEvalError(f"--lmms-eval-python {self._python}: {error}; {_SET_UP}") from error

    def _find(self) -> Message:
        try:
            found = self._ask(do="find", folder=self.task.folder, task=self.task.name)
            if not found["version"].startswith(VERSIONS):
                raise LmmsEvalError(
                    f"--lmms-eval-python {self._python}: it has lmms-eval {found['version']}; "
                    "install a version 0.7 there"
                )
        except BaseException:
            self._pipe.close()
            raise
        return found

    def _open(self) -> Message:
        settings = self._ask(do="open", model=MODEL)
        self._opened = True
        return settings

    def _ask_opened(self, **request: Any) -> Message:
        if not self._opened:
            self._open()
        return self._ask(**request)

    def _ask(self, **request: Any) -> Message:
        try:
            self._pipe.send(request)
            reply = self._pipe.receive(_SECONDS)
        except PipeError as error:
            raise LmmsEvalError(f"--lmms-eval-python {self._python}: {error}; {_SET_UP}") from error
        if "error" in reply:
            remedy = "check the rows" if request["do"] == "aggregate" else _SET_UP
            raise LmmsEvalError(f"--lmms-eval-python {self._python}: {reply['error']}; {remedy}")
        return reply


def seed_of(task: str, answer: str, row: Row) -> str:
    """Fixes what a task draws at random, so that it is the same each time.

    LongVideoBench's task gives an answer that it cannot read a random letter.
    """
    return key_of(task, answer, row)


def _environment(home: str) -> dict[str, str]:
    """The variables of the process: none that leads to a server, and no network for libraries."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not any(part in name.upper() for part in _REMOVED)
    }
    return kept | {
        "HF_HOME": home,
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONHASHSEED": "0",
        "PYTHONUTF8": "1",
    }


def _stamp(path: pathlib.Path) -> list[int]:
    """Size and time of a file: it is read again if either changes."""
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]
