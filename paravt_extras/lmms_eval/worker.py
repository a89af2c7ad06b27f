"""Answers questions about lmms-eval's tasks, in the Python environment where it is installed.

`client` runs this file as a script with that environment's interpreter. It imports the standard
library and lmms_eval only. Each line of stdin is a JSON object with a `do`; each is answered by one
line of JSON on stdout:

    {"do": "find", "folder": ..., "task": ...}    version, files' digest, the model's system turn
    {"do": "open", "model": ...}                  the settings of its yaml
    {"do": "prompts", "rows": [...], "files": [{name: path}]}     one prompt per row
    {"do": "scores", "rows": [...], "answers": [...], "seeds": [...]}    one result per row
    {"do": "aggregate", "results": [...]}         one value per metric

Everything is the task's own: its texts, its reading of answers, its figures. Nothing reaches the
network: connections are refused, and a task that tries one is reported.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import pathlib
import random
import re
import sys
from typing import Any, BinaryIO

Row = dict[str, Any]
Reply = dict[str, Any]

# Connections that lmms-eval tried, since the last question about a row.
_attempts: list[str] = []


class WorkerError(Exception):
    """A question that cannot be answered; the message is for people."""


class Worker:
    """One task of lmms-eval."""

    def __init__(self) -> None:
        self._file = pathlib.Path()
        self._config: dict[str, Any] = {}
        self._specific: dict[str, Any] | None = None
        self._metrics: dict[str, Any] = {}

    def find(self, folder: str, task: str) -> Reply:
        """Find a task without importing lmms_eval, which takes seconds."""
        spec = importlib.util.find_spec("lmms_eval")
        if spec is None or not spec.submodule_search_locations:
            raise WorkerError("lmms_eval is not installed there")
        try:
            version = importlib.metadata.version("lmms_eval")
        except importlib.metadata.PackageNotFoundError:
            raise WorkerError("lmms_eval is there, but not installed with pip") from None
        root = pathlib.Path(spec.submodule_search_locations[0])
        named = re.compile(rf"^task:\s*['\"]?{re.escape(task)}['\"]?\s*$", re.MULTILINE)
        here = root / "tasks" / folder
        files = [file for file in sorted(here.glob("*.yaml")) if named.search(_text(file))]
        if not files:
            raise WorkerError(f"lmms_eval {version} has no task {task} in tasks/{folder}")
        self._file = files[0]
        return {
            "version": version,
            "digest": _digest(version, here, root / "tasks" / "_task_utils"),
            "system": _system_turn(root / "models" / "simple" / "qwen3_vl.py"),
        }

    def open(self, model: str) -> Reply:
        """Load the task with the prompts that it has for a model, if it has any."""
        utils = importlib.import_module("lmms_eval.utils")
        self._config = utils.load_yaml_config(yaml_path=str(self._file), mode="full")
        specific = self._config.get("lmms_eval_specific_kwargs")
        if specific is not None:
            own = specific.get(model)
            specific = own if own is not None else {**specific, **specific.get("default", {})}
        self._specific = specific
        self._metrics = {
            entry["metric"]: entry.get("aggregation", "mean")
            for entry in self._config["metric_list"]
        }
        return {
            "generation": self._config.get("generation_kwargs") or {},
            "metrics": list(self._metrics),
            "source": self._config.get("dataset_path", ""),
        }

    def prompts(self, rows: list[Row], files: list[dict[str, str]]) -> Reply:
        """The prompts of rows. `files` names the files that each row's prompt may read."""
        return {"prompts": [self._prompt(*both) for both in zip(rows, files, strict=True)]}

    def scores(self, rows: list[Row], answers: list[str], seeds: list[str]) -> Reply:
        """What the task makes of answers. `seeds` decide what it draws for unreadable ones."""
        together = zip(rows, answers, seeds, strict=True)
        return {"results": [self._score(*each) for each in together]}

    def aggregate(self, results: list[dict[str, Any]]) -> Reply:
        """The figures of the results of several rows."""
        metrics: dict[str, Any] = {}
        for name, aggregation in self._metrics.items():
            values = [result[name] for result in results]
            if isinstance(aggregation, str):
                aggregation = _named_aggregation(aggregation)
            takes_args = "args" in inspect.signature(aggregation).parameters
            metrics[name] = aggregation(values, args=None) if takes_args else aggregation(values)
        return {"metrics": metrics}

    def _prompt(self, row: Row, files: dict[str, str]) -> Reply:
        self._link(files)
        arguments = (row,) if self._specific is None else (row, dict(self._specific))
        return _guarded(lambda: {"text": str(self._config["doc_to_text"](*arguments))})

    def _score(self, row: Row, answer: str, seed: str) -> Reply:
        random.seed(seed)
        # The harness strips answers, too, before it hands them to the task.
        return _guarded(lambda: {"result": self._config["process_results"](row, [answer.strip()])})

    def _link(self, files: dict[str, str]) -> None:
        """Show files at the places where the task looks for them."""
        cache = (self._config.get("dataset_kwargs") or {}).get("cache_dir", "")
        for name, path in files.items():
            place = pathlib.Path(os.environ["HF_HOME"], cache, name)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.unlink(missing_ok=True)
            place.symlink_to(path)


def _text(file: pathlib.Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")


def _digest(version: str, *folders: pathlib.Path) -> str:
    """A hash of the version and of the folders' own yaml and Python files."""
    total = hashlib.sha256(version.encode())
    for folder in folders:
        for file in sorted(folder.glob("*")):
            if file.is_file() and (file.suffix == ".py" or "yaml" in file.name):
                total.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return total.hexdigest()[:32]


def _system_turn(file: pathlib.Path) -> str:
    """The default of the argument `system_prompt` in lmms-eval's own Qwen3-VL; "" without one."""
    if not file.exists():
        return ""
    for node in ast.walk(ast.parse(_text(file))):
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            arguments = node.args.args[len(node.args.args) - len(node.args.defaults) :]
            for argument, default in zip(arguments, node.args.defaults, strict=True):
                if argument.arg == "system_prompt" and isinstance(default, ast.Constant):
                    return str(default.value or "")
    return ""


def _named_aggregation(name: str) -> Any:
    importlib.import_module("lmms_eval.api.metrics")  # registers the names
    function = importlib.import_module("lmms_eval.api.registry").get_aggregation(name)
    if function is None:
        raise WorkerError(f"lmms_eval knows no aggregation {name}")
    return function


def _guarded(work: Any) -> Reply:
    """The outcome of one row. A failure is the row's own, so it is returned."""
    _attempts.clear()
    try:
        found = work()
    except (Exception, SystemExit) as error:  # tasks call sys.exit when a file is missing
        found = {"error": _words(error)}
    # A task may catch the refused connection and go on with a made-up score.
    return {"judge": _attempts[0]} if _attempts else found


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _forbid_network() -> None:
    def check(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
            _attempts.append(str(arguments[1] if event == "socket.connect" else arguments[0]))
            raise ConnectionRefusedError("no connection may be made here")

    sys.addaudithook(check)


def own_stdout() -> BinaryIO:
    """A stream to the real stdout. Whatever else is printed goes to stderr."""
    real = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return real


def _plain(value: Any) -> Any:
    """NumPy's numbers as Python's."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be sent")


def _answer(worker: Worker, request: dict[str, Any]) -> Reply:
    name = request.pop("do")
    doors = {
        "find": worker.find,
        "open": worker.open,
        "prompts": worker.prompts,
        "scores": worker.scores,
        "aggregate": worker.aggregate,
    }
    try:
        return doors[name](**request)
    except WorkerError as error:
        return {"error": str(error)}
    except ImportError as error:
        return {"error": f"lmms_eval cannot be imported there ({error})"}
    except (Exception, SystemExit) as error:
        return {"error": _words(error)}


def main() -> None:
    """Answer until stdin ends."""
    here = os.path.dirname(os.path.abspath(__file__))
    # Python puts a script's folder first; this one's modules must not stand in for others.
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != here]
    out = own_stdout()
    _forbid_network()
    worker = Worker()
    for line in sys.stdin.buffer:
        reply = _answer(worker, json.loads(line))
        out.write(json.dumps(reply, default=_plain).encode() + b"\n")
        out.flush()


if __name__ == "__main__":
    main()
