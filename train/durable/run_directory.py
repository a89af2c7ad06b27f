"""The directory of one run: its stored configuration, and the lock on writing to it."""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any, NotRequired

from typing_extensions import TypedDict

from paravt_jax.data.stored_json import (
    DamagedFileError,
    read_checked_json,
    write_checked_json,
)
from paravt_jax.data.stored_settings import as_json, holder_of, lock, require_same
from paravt_jax.processes.exit_codes import UserError

_LOCK = ".lock"
_CONFIG = "config.json"
# Left by a process that was killed while it wrote config.json.
_UNFINISHED = "config.json.tmp"

FORMAT = 10
"""Version of a run's files. Raise it when this code cannot resume older runs."""
READABLE = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
"""Formats whose checkpoints can be exported. The first runs stored no number; they are format 1."""


class RunDirectoryError(UserError):
    """The folder cannot be used for this run."""


class RunDirectory:
    """Creates or reopens a run's directory and locks it until `close`.

    A new directory gets config.json; an existing one must hold the same configuration. Settings in
    `MAY_CHANGE` may differ and are written again. The lock is a kernel lock and ends with the
    process, however it dies. In a multi-host run only the first process takes it.

    Args:
        path: the directory; it is created if needed.
        config: the run's settings, as JSON can hold them.

    Raises:
        RunDirectoryError: another process has the lock, the configuration differs (the message
            lists the fields), the folder holds other files, or it cannot be written.
        TypeError: `config` is not JSON.
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
                f"--run-dir {self.path} is {error}: wait for it, stop it, or give "
                "another --run-dir."
            ) from error
        except OSError as error:
            raise RunDirectoryError(
                f"--run-dir {self.path} cannot be used: {error}. Give a writable folder."
            ) from error

    def close(self) -> None:
        """Releases the lock."""
        self._lock.close()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _claim(self, wanted: dict[str, Any]) -> None:
        """Compares `wanted` with the stored configuration, and stores it."""
        _stored(self.path, wanted)
        write_checked_json(self.path / _CONFIG, {"format": FORMAT, **wanted}, indent=1)


def require_usable(path: str | pathlib.Path, config: dict[str, Any]) -> bool:
    """Raises RunDirectoryError if `RunDirectory(path, config)` would. Changes nothing.

    Returns:
        Whether the folder holds a run to continue.
    """
    path = pathlib.Path(path).absolute()
    place = path
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise RunDirectoryError(
            f"--run-dir {path} cannot be used: {place} is not a writable folder. Give a writable "
            "folder."
        )
    if place != path:
        return False
    holder = holder_of(path / _LOCK)
    if holder:
        raise RunDirectoryError(
            f"--run-dir {path} is in use by another process (id {holder}): wait for it, stop it, "
            "or give another --run-dir."
        )
    return _stored(path, as_json(config, "the run's configuration")) is not None


def _stored(path: pathlib.Path, wanted: dict[str, Any]) -> dict[str, Any] | None:
    """The configuration of the run in a folder; None if there is none, or nothing was made yet.

    Raises:
        RunDirectoryError: the folder holds another run or other files.
    """
    file = path / _CONFIG
    others = sorted(
        entry.name for entry in path.iterdir() if entry.name not in (_LOCK, _CONFIG, _UNFINISHED)
    )
    if not file.exists():
        if others:
            raise RunDirectoryError(
                f"--run-dir {path} is not a run's folder: it has no {_CONFIG} and holds "
                f"{', '.join(others[:5])}. Give a new or empty folder."
            )
        return None
    # If there are no other files, an earlier start wrote config.json and failed before it did any
    # work. Its configuration may then be replaced, also if it has an older format.
    nothing_made = not others
    found = read_config(path, "--run-dir", READABLE if nothing_made else (FORMAT,))
    if nothing_made:
        return None
    require_same(
        f"--run-dir {path} holds a run of another configuration",
        identity(found),
        identity(wanted),
        _remedy(path, wanted),
        RunDirectoryError,
    )
    return found


def _remedy(path: pathlib.Path, wanted: dict[str, Any]) -> str:
    """What to do if the run in a folder has other settings."""
    try:
        require_cold_start(path, wanted)
        kept = f" (--start {path} keeps its cold start)"
    except RunDirectoryError:
        kept = ""
    return f"Name another --run-dir{kept}, or use its settings."


class _Stored(TypedDict):
    """A configuration, as far as every version has it."""

    format: NotRequired[int]


def read_config(folder: pathlib.Path, flag: str, formats: Sequence[int]) -> dict[str, Any]:
    """Reads the configuration of the run in `folder`.

    Args:
        folder: a run's directory.
        flag: the command-line flag that named it, for error messages.
        formats: accepted values of its format number.

    Raises:
        RunDirectoryError: the file is damaged or has another format. The message is one line.
    """
    file = folder / _CONFIG
    try:
        config = read_checked_json(file, _Stored, f"restore it, or give another {flag}")
    except DamagedFileError as error:
        raise RunDirectoryError(f"{error}.") from error
    number = config.pop("format", 1)
    if number not in formats:
        if number in READABLE:
            remedy = (
                f"give another {flag}, or export its model with python -m train.export "
                f"--run-dir {folder} --to FOLDER"
            )
        else:
            remedy = "use the version of this program that made it"
        raise RunDirectoryError(
            f"{flag} {folder} has format {number}; this version reads format {max(formats)}: "
            f"{remedy}."
        )
    return config


# Settings that may change when a run resumes. They decide whether it continues, on which devices,
# and what stays on disk. Results stay the same, up to the rounding that another mesh brings; only
# dropout of adapters is drawn anew with another number of replicas.
MAY_CHANGE = (
    "max_left_out",
    "checkpoints",
    "mesh",
    "engine",
    "fitted",
    "sft.microbatches",
    "sft.remat",
    "rl.microbatch_tokens",
    "rl.remat",
)


def identity(config: dict[str, Any]) -> dict[str, Any]:
    """The settings that must stay the same when a run resumes."""
    kept = {name: value for name, value in config.items() if name not in MAY_CHANGE}
    for path in MAY_CHANGE:
        section, _, field = path.partition(".")
        if field and isinstance(kept.get(section), dict):
            kept[section] = {name: x for name, x in kept[section].items() if name != field}
    return kept


# Files of a cold start, and the settings that determine them.
_WORLD_FILES = ("videos", "records", "tokenizer", "checkpoints/align", "checkpoints/sft")
_PUBLISHED_FILES = ("tokenizer", "checkpoints/sft")
_COLD_START_SETTINGS = (
    "world",
    "text",
    "model",
    "lora",
    "train_vision",
    "frames",
    "align",
    "sft",
    "protocol",
)
# Fields of `data` that determine the demonstrations.
_DATA_FIELDS = ("annotations", "media", "frames")
# Fields of `protocol` that affect rollouts only; demonstrations do not depend on them.
_ROLLOUT_FIELDS = (
    "pin_think",
    "max_calls",
    "turn_tokens",
    "trajectory_tokens",
    "text_tokens",
    "label_tokens",
)


def take_over(source: str | pathlib.Path, target: pathlib.Path, config: dict[str, Any]) -> None:
    """Shares the data and the cold start of another run, so that this one begins with RL.

    Checkpoints, which never change, are linked if both runs are on one disk. The rest is copied.

    Args:
        source: directory of the other run; its cold start must be finished.
        target: this run's directory; files that are already there stay.
        config: this run's settings.

    Raises:
        RunDirectoryError: `source` has no finished cold start, or one with other settings.
    """
    require_cold_start(source, config)
    for name in cold_start_files(config):
        if not (target / name).exists():
            # Copy beside the target and rename: a name that exists is a complete copy, even if this
            # process is killed halfway through.
            unfinished = target / f"{name}.tmp"
            shutil.rmtree(unfinished, ignore_errors=True)
            is_checkpoint = name.startswith("checkpoints/")
            copy = _link_or_copy if is_checkpoint else shutil.copy2
            shutil.copytree(pathlib.Path(source) / name, unfinished, copy_function=copy)
            os.replace(unfinished, target / name)


def require_cold_start(source: str | pathlib.Path, config: dict[str, Any]) -> None:
    """Raises RunDirectoryError if `take_over(source, ..., config)` would. Changes nothing."""
    source = pathlib.Path(source).absolute()
    files = cold_start_files(config)
    missing = [name for name in (_CONFIG, *files) if not (source / name).exists()]
    if missing:
        raise RunDirectoryError(
            f"--start {source} is not a run with a cold start: {', '.join(missing)} missing."
        )
    found = read_config(source, "--start", (FORMAT,))
    wanted = as_json(config, "the run's configuration")
    require_same(
        f"--start {source} holds a cold start of other settings",
        cold_start_identity(found),
        cold_start_identity(wanted),
        "Name another --start, or use its settings.",
        RunDirectoryError,
    )
    steps = found["sft"]["steps"]
    # A checkpoint gets its final name, a number, when it is complete.
    if not (source / "checkpoints/sft" / str(steps)).exists():
        raise RunDirectoryError(
            f"--start {source}: its cold start has not reached its last step, {steps}; resume that "
            "run first."
        )


def cold_start_files(config: dict[str, Any]) -> tuple[str, ...]:
    """Names of the folders that a cold start has made."""
    return _PUBLISHED_FILES if config.get("data") else _WORLD_FILES


def _link_or_copy(source: str, target: str) -> None:
    """Makes a second name for a file, which takes no space, or a copy on another disk."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def cold_start_identity(config: dict[str, Any]) -> dict[str, Any]:
    """The settings that determine a cold start; runs that agree on them can share one."""
    config = identity(config)
    protocol = {
        name: value for name, value in config["protocol"].items() if name not in _ROLLOUT_FIELDS
    }
    found = {name: config[name] for name in _COLD_START_SETTINGS} | {"protocol": protocol}
    if config.get("data"):
        found["data"] = {name: config["data"][name] for name in _DATA_FIELDS}
    return found
