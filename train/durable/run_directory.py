"""The directory of one run: its stored configuration, and the lock on writing to it."""

from __future__ import annotations

import os
import pathlib
from typing import Any, NotRequired, TextIO

from typing_extensions import TypedDict

from paravt_jax.data.any_path import AnyPath, any_path
from paravt_jax.data.stored_json import DamagedFileError, parse_checked_json, write_checked_json
from paravt_jax.data.stored_settings import as_json, holder_of, lock, require_same
from paravt_jax.processes.exit_codes import UserError
from train.durable.bucket import is_complete, named_errors

_LOCK = ".lock"
_CONFIG = "config.json"
# What a start writes before it makes anything: also into a bucket, or cut off by a kill.
_FIRST = (_LOCK, _CONFIG, "config.json.tmp", "files.json", "in-use.txt")

FORMAT = 11
"""Version of a run's files. Raise it when this code cannot read older runs."""


class RunDirectoryError(UserError):
    """The folder cannot be used for this run."""


class RunDirectory:
    """Create or reopen a run's directory, and lock it until `close`.

    A new directory gets config.json; an existing one must hold the same configuration. Settings in
    `MAY_CHANGE` may differ and are written again. The lock is a kernel lock and ends with the
    process, however it dies. In a multi-host run only the first process takes it.

    Args:
        path: The directory; it is created if needed.
        config: The run's settings, as JSON can hold them.

    Raises:
        RunDirectoryError: Another process has the lock, the configuration differs (the message
            lists the fields), the folder holds other files, or it cannot be written.
        TypeError: `config` is not JSON.
    """

    def __init__(self, path: str | pathlib.Path, config: dict[str, Any]) -> None:
        self.path = pathlib.Path(path).absolute()
        wanted = as_json(config, "the run's configuration")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = lock_run(self.path / _LOCK, str(self.path))
            try:
                _is_continued(self.path, wanted)
                write_checked_json(self.path / _CONFIG, {"format": FORMAT, **wanted}, indent=1)
            except BaseException:
                self.close()
                raise
        except OSError as error:
            raise RunDirectoryError(
                f"--run-dir {self.path} cannot be used: {error}. Give a writable folder."
            ) from error

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def lock_run(file: pathlib.Path, run_dir: str) -> TextIO:
    """Lock a file (`paravt_jax.data.stored_settings.lock`) for a run, which errors name."""
    try:
        return lock(file)
    except BlockingIOError as error:
        raise RunDirectoryError(
            f"--run-dir {run_dir} is {error}: wait for it, stop it, or give another --run-dir."
        ) from error


def require_usable(path: AnyPath, config: dict[str, Any]) -> bool:
    """Raise RunDirectoryError if `RunDirectory(path, config)` would. Change nothing.

    Args:
        path: The directory, or the address of one in a bucket.
        config: The run's settings, as JSON can hold them.

    Returns:
        Whether it holds a run to continue.
    """
    if isinstance(path, pathlib.Path):
        _require_writable(path)
    with named_errors(str(path)):
        return path.exists() and _is_continued(path, as_json(config, "the run's configuration"))


def _require_writable(path: pathlib.Path) -> None:
    existing = path
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise RunDirectoryError(
            f"--run-dir {path} cannot be used: {existing} is not a writable folder. Give a "
            "writable folder."
        )
    holder = holder_of(path / _LOCK)
    if holder:
        raise RunDirectoryError(
            f"--run-dir {path} is in use by another process (id {holder}): wait for it, stop it, "
            "or give another --run-dir."
        )


def _is_continued(path: AnyPath, wanted: dict[str, Any]) -> bool:
    """Return whether a folder holds this run; False if nothing was made there yet.

    Raises:
        RunDirectoryError: The folder holds another run or other files.
    """
    others = sorted(entry.name for entry in path.iterdir() if entry.name not in _FIRST)
    if not others:
        return False
    if not (path / _CONFIG).exists():
        raise RunDirectoryError(
            f"--run-dir {path} is not a run's folder: it has no {_CONFIG} and holds "
            f"{', '.join(others[:5])}. Give a new or empty folder."
        )
    require_same(
        f"--run-dir {path} holds a run of another configuration",
        identity(read_config(path, "--run-dir")),
        identity(wanted),
        f"Name another --run-dir (--start {path} keeps its cold start if that has the same "
        "settings), or use its settings.",
        RunDirectoryError,
    )
    return True


class _Stored(TypedDict):
    """A configuration, as far as every version has it."""

    format: NotRequired[int]


def read_config(folder: AnyPath, flag: str) -> dict[str, Any]:
    """Read the configuration of the run in `folder`.

    Args:
        folder: A run's directory.
        flag: The command-line flag that named it, for error messages.

    Raises:
        RunDirectoryError: The file is damaged or has another format. The message is one line.
    """
    remedy = f"restore it, or give another {flag}"
    try:
        file = folder / _CONFIG
        config = parse_checked_json(file.read_bytes(), str(file), _Stored, remedy)
    except DamagedFileError as error:
        raise RunDirectoryError(f"{error}.") from error
    number = config.pop("format", 1)
    if number != FORMAT:
        raise RunDirectoryError(
            f"{flag} {folder} has format {number}; this version reads format {FORMAT}: use the "
            f"version of this program that made it, or give another {flag}."
        )
    return config


# Settings that may change when a run resumes. They decide whether it continues, on which devices,
# and what stays on disk. Results stay the same, up to the rounding that another mesh brings; only
# dropout of adapters is drawn anew with another number of replicas.
MAY_CHANGE = (
    "max_left_out",
    "mesh",
    "engine",
    "fitted",
    "sft.microbatches",
    "sft.remat",
    "rl.microbatch_tokens",
    "rl.remat",
)


def identity(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that must stay the same when a run resumes."""
    kept = {name: value for name, value in config.items() if name not in MAY_CHANGE}
    for path in MAY_CHANGE:
        section, _, field = path.partition(".")
        if field and isinstance(kept.get(section), dict):
            kept[section] = {name: x for name, x in kept[section].items() if name != field}
    return kept


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
)


def require_cold_start(start: str, config: dict[str, Any]) -> None:
    """Raise RunDirectoryError unless a run has a finished cold start of the same settings.

    Args:
        start: Directory of the other run, or its address in a bucket.
        config: This run's settings.
    """
    source = any_path(start)
    folders = ("checkpoints/sft", *cold_start_folders(config))
    with named_errors(start):
        missing = [name for name in (_CONFIG, *folders) if not (source / name).exists()]
        if missing:
            raise RunDirectoryError(
                f"--start {start} is not a run with a cold start: {', '.join(missing)} missing."
            )
        require_same(
            f"--start {start} holds a cold start of other settings",
            cold_start_identity(read_config(source, "--start")),
            cold_start_identity(as_json(config, "the run's configuration")),
            "Name another --start, or use its settings.",
            RunDirectoryError,
        )
        for name in cold_start_checkpoints(config):
            if not is_complete(source / name):
                raise RunDirectoryError(
                    f"--start {start}: {name}, the last step of its cold start, is missing; resume "
                    "that run first."
                )


def cold_start_folders(config: dict[str, Any]) -> tuple[str, ...]:
    """Return the names of the folders that a cold start has made, without checkpoints."""
    return ("tokenizer",) if config.get("data") else ("videos", "records", "tokenizer")


def cold_start_checkpoints(config: dict[str, Any]) -> list[str]:
    """Return the names of the last checkpoints of a cold start."""
    phases = [phase for phase in ("align", "sft") if config[phase]]
    return [f"checkpoints/{phase}/{config[phase]['steps']}" for phase in phases]


def cold_start_identity(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that determine a cold start; runs that agree on them can share one."""
    config = identity(config)
    protocol = {
        name: value for name, value in config["protocol"].items() if name not in _ROLLOUT_FIELDS
    }
    found = {name: config[name] for name in _COLD_START_SETTINGS} | {"protocol": protocol}
    if config.get("data"):
        found["data"] = {name: config["data"][name] for name in _DATA_FIELDS}
    return found
