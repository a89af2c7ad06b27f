"""The folder of one run: its configuration, and the right to write into it.

Owns `config.json` and the lock. Refuses a folder of another configuration (naming the fields that differ), a folder that is
not a run's, and a second process. Invariant: whoever holds a RunDirectory is alone in it, and `config.json` is complete.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any

from paravt_jax.data.atomic import write_atomically
from paravt_jax.data.stored_settings import as_json, lock, require_same

_LOCK, _CONFIG, _UNFINISHED = ".lock", "config.json", "config.json.tmp"

FORMAT = 3
"""Version of what a run keeps on disk. Raise it when this code could not go on with older runs."""
READABLE = (1, 2, 3)
"""Formats whose checkpoints can be exported. Runs from before the number existed have format 1."""


class RunDirectoryError(RuntimeError):
    """The folder cannot be this run's; the message says why and what to do."""


class RunDirectory:
    """`path`, made if need be, locked for this process until `close`, and known to belong to `config`.

    `config` is what JSON can hold: dicts with text keys, lists, numbers, text, None; its MAY_CHANGE may have become others, and are then
    written anew, as is all of it where nothing has been made yet. The lock dies with the process, however it dies. In a run over several
    hosts one process takes it.

    Raises RunDirectoryError if another process holds the folder, if it holds another configuration (differing fields are
    listed), if it holds files of something else, or if it cannot be written; TypeError if `config` is not JSON.
    """

    def __init__(self, path: str | pathlib.Path, config: dict[str, Any]) -> None:
        self.path = pathlib.Path(path).absolute()
        wanted = as_json(config, "the run's configuration")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = lock(self.path / _LOCK)
            try:
                self._claim(wanted)
            except BaseException:
                self.close()
                raise
        except BlockingIOError as error:
            raise RunDirectoryError(
                f"--run-dir {self.path} is {error}: wait for it, stop it, or name another --run-dir."
            ) from error
        except OSError as error:
            raise RunDirectoryError(
                f"--run-dir {self.path} cannot be used: {error}. Name a folder that can be written."
            ) from error

    def close(self) -> None:
        """Gives the folder free for another process."""
        self._lock.close()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _claim(self, wanted: dict[str, Any]) -> None:
        """Compares with the configuration that is there, or writes it."""
        file = self.path / _CONFIG
        if not file.exists():
            strangers = sorted(
                entry.name
                for entry in self.path.iterdir()
                if entry.name not in (_LOCK, _UNFINISHED)
            )
            if strangers:
                raise RunDirectoryError(
                    f"--run-dir {self.path} is not a run's folder: it has no {_CONFIG} and holds {', '.join(strangers[:5])}. "
                    "Name a new or an empty folder."
                )
            _write(file, wanted)
            return
        refused = all(entry.name in (_CONFIG, _LOCK, _UNFINISHED) for entry in self.path.iterdir())
        found = read_config(self.path, "--run-dir", READABLE if refused else (FORMAT,))
        if refused:  # a start that was refused is no run
            _write(file, wanted)
            return
        require_same(
            f"--run-dir {self.path} holds a run of another configuration",
            identity(found),
            identity(wanted),
            "Name another --run-dir, delete this one, or ask for what it holds.",
            RunDirectoryError,
        )
        if found != wanted:
            _write(file, wanted)


def _write(file: pathlib.Path, config: dict[str, Any]) -> None:
    write_atomically(file, json.dumps({"format": FORMAT, **config}, indent=1) + "\n")


def read_config(folder: pathlib.Path, flag: str, formats: Sequence[int]) -> dict[str, Any]:
    """The configuration of the run in `folder`, which the user named with `flag`.

    Raises RunDirectoryError, in one line, where it is damaged or where the run's format is not one of
    `formats`.
    """
    file = folder / _CONFIG
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunDirectoryError(
            f"{file} is damaged ({error}): put it back, or name another {flag}."
        ) from error
    number = config.pop("format", 1) if isinstance(config, dict) else None
    if not isinstance(number, int):
        raise RunDirectoryError(
            f"{file} is damaged (it holds no settings): put it back, or name another {flag}."
        )
    if number not in formats:
        remedy = f"name another {flag}, or export its model with python -m train.export --run-dir {folder} --to FOLDER"
        if number not in READABLE:
            remedy = "use the version of this program that made it"
        raise RunDirectoryError(
            f"{flag} {folder} has format {number}; this version reads format {max(formats)}: {remedy}."
        )
    return config


# Settings that may be others when a run goes on: whether it does, on which devices, and what stays on disk; not what is computed.
MAY_CHANGE = ("unreadable_share", "mesh", "checkpoints")


def identity(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a configuration that makes a run the one it is."""
    return {name: value for name, value in config.items() if name not in MAY_CHANGE}


# What a cold start leaves behind, and the settings that decide it.
_COLD_START = ("videos", "records", "tokenizer", "checkpoints/align", "checkpoints/sft")
_DECIDE = ("world", "text", "model", "frames", "align", "sft", "protocol")
# Fields of the protocol that bound or open rollouts; demonstrations are the same whatever they are.
_OF_ROLLOUTS = (
    "pin_think",
    "max_calls",
    "turn_tokens",
    "trajectory_tokens",
    "text_tokens",
    "label_tokens",
)


def take_over(source: str | pathlib.Path, target: pathlib.Path, config: dict[str, Any]) -> None:
    """Copies the data and the cold start of the run in `source` to the run in `target`; what is there already stays.

    Raises RunDirectoryError where `source` has no finished cold start, or one of other settings than `config` asks for.
    """
    source = pathlib.Path(source).absolute()
    missing = [
        name for name in (_CONFIG, "result.json", *_COLD_START) if not (source / name).exists()
    ]
    if missing:
        raise RunDirectoryError(
            f"--start {source} is no finished run with a cold start: it has no {', '.join(missing)}."
        )
    found = read_config(source, "--start", (FORMAT,))
    wanted = as_json(config, "the run's configuration")
    require_same(
        f"--start {source} holds a cold start of other settings",
        cold_start_identity(found),
        cold_start_identity(wanted),
        "Name another --start, or ask for what it holds.",
        RunDirectoryError,
    )
    for name in _COLD_START:
        if not (target / name).exists():
            unfinished = target / f"{name}.tmp"
            shutil.rmtree(unfinished, ignore_errors=True)
            shutil.copytree(source / name, unfinished)
            os.replace(unfinished, target / name)


def cold_start_identity(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a configuration that decides a cold start, which other runs may take over."""
    protocol = {
        name: value for name, value in config["protocol"].items() if name not in _OF_ROLLOUTS
    }
    return {name: config[name] for name in _DECIDE} | {"protocol": protocol}
