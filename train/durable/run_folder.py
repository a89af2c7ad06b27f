"""The folder of one run, in which one process at a time works on one configuration.

A run lives in a folder, or in a bucket with a local folder for its small files:

    run_dir      small files, the exported model               checkpoints
    a folder     in it                                         in it
    gs://...     ~/.cache/paravt-jax/runs/DIGEST-PROCESS/NAME  gs://.../checkpoints

The rest of a run works on `RunFolder.folder`, and calls `push` where files have to be durable. On a
disk they are durable when they are written.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pathlib
import shlex
import shutil
from collections.abc import Iterator
from typing import Any

from paravt_jax.data.any_path import AnyPath, any_path, is_bucket, require_local, user_folder
from paravt_jax.data.stored import (
    appearing,
    as_json,
    differences,
    lock,
    naming_full_disk,
    parse_checked_json,
    require_same,
    write_checked_json,
)
from paravt_jax.processes import cluster, hosts
from paravt_jax.processes.exit_codes import Stopped, UserError
from train.durable.bucket import BucketFiles, named_errors
from train.durable.checkpoint import hand_over, kept_checkpoints, read_record
from train.durable.lease import Lease
from train.durable.metrics import PHASES, MetricsWriter, is_up_to, read_metrics, say
from train.result import forget_after

FORMAT = 14
"""Version of a run's files. Raise it when this code cannot read older runs."""

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
"""Settings that may change when a run resumes. They decide whether it continues, and on which
devices. Results stay the same, up to the rounding that another mesh brings."""

RESUMED = "resumed"
"""Field of config.json in a run that began with a checkpoint of another one, which may have done
that, too: each with `from`, `phase`, `step`, and the settings that `changed` (old and new)."""

# Settings on which a checkpoint of their phase depends. Others of it may change from then on.
_FIXED = ("sft.rows", "row_tokens", "rl.updates_per_batch", "max_staleness", "optimizer.name")
# With `rl.max_staleness`, a checkpoint of RL holds episodes, which depend on these.
_IN_FLIGHT = ("rl.prompts", "rl.grpo.group_size", "rl.frame_budgets", "rl.temperature")
# What a run takes from another one, beside checkpoints and metrics.
_TAKEN = ("videos", "records", "tokenizer", "questions", "tensorboard", "evaluation")

_LOCK = ".lock"
_CONFIG = "config.json"
# What a start writes before it makes anything: also into a bucket, or cut off by a kill.
_FIRST = (_LOCK, _CONFIG, "config.json.tmp", "files.json", "in-use.txt")
# An exported model is large, and only the first process looks whether it is there.
_EXPORTS = ("model/", "adapter/")


class RunFolderError(UserError):
    """The folder cannot be used for this run."""


class RunFolder:
    """A run in a folder, or in a bucket.

    Args:
        run_dir: A folder, or gs://BUCKET/FOLDER.

    Attributes:
        address: The folder, or that of the bucket, as a path that all processes see.
        shown: The same, as the user knows it.
        folder: Holds the small files.
        checkpoints: Holds one folder per phase.

    Raises:
        ModuleNotFoundError: The package for an address is missing.
    """

    def __init__(self, run_dir: str | pathlib.Path):
        self.address: AnyPath = any_path(run_dir)
        self.shown = str(self.address).rstrip("/")
        self.checkpoints: AnyPath = self.address / "checkpoints"
        self.folder = pathlib.Path(self.shown)
        self._in_bucket = is_bucket(run_dir)
        if self._in_bucket:
            digest = hashlib.sha256(self.shown.encode()).hexdigest()[:16]
            # Processes on one machine do not share files here, as they do not on several machines.
            cache = user_folder() / "runs" / f"{digest}-{hosts.process_index()}"
            self.folder = cache / self.shown.rpartition("/")[2]
        self._lease: Lease | None = None

    @functools.cached_property
    def _files(self) -> BucketFiles:
        """The small files in the bucket, which needs credentials."""
        return BucketFiles(self.shown, self.folder)

    def require_usable(self, config: dict[str, Any]) -> bool:
        """Raise RunFolderError if the folder cannot be used for this run. Change nothing.

        Args:
            config: The run's settings, as JSON can hold them.

        Returns:
            Whether it holds a run to continue.
        """
        if not self._in_bucket:
            existing = next(x for x in (self.folder, *self.folder.parents) if x.exists())
            if not existing.is_dir() or not os.access(existing, os.W_OK):
                raise RunFolderError(
                    f"{existing} is no folder to write to; give --run-dir in a writable folder"
                )
        with named_errors(self.shown):
            return self.address.exists() and _history(self.address, config) is not None

    def claim(self, config: dict[str, Any], stack: contextlib.ExitStack) -> None:
        """Lock the run until `stack` closes. Only the first process calls it.

        Args:
            config: The run's settings.
            stack: Gets what has to be closed.

        Raises:
            RunFolderError: The run is one of other settings.
            OSError: Its folder cannot be written.
            BlockingIOError: The run is in use on this machine.
            LeaseError: The run is in use on another machine.
        """
        if self._in_bucket:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            # A frozen process that has lost its lease still works on these files.
            stack.enter_context(lock(pathlib.Path(f"{self.folder}{_LOCK}")))
            self._lease = stack.enter_context(contextlib.closing(Lease(self.shown)))
            self._files.pull()
        stack.enter_context(claim_folder(self.folder, config, self.address))
        self.push()
        stack.push(self._push_at_end)

    def require_shared(self) -> None:
        """Raise ValueError on every process if another one has a run elsewhere."""
        if self._in_bucket:
            hosts.require_same("run_dir", self.shown)
        else:
            cluster.require_shared(self.folder)

    def push(self) -> None:
        """Return when the files of the first process are durable."""
        if self._lease is not None:
            self._lease.require()
            self._files.push()

    def pull(self) -> None:
        """Fetch the files of the first process on the other processes."""
        if self._in_bucket and not hosts.is_first():
            self._files.pull(is_shared)

    def in_words(self, text: str) -> str:
        """Return a message with the paths that the user knows."""
        return text.replace(str(self.folder), self.shown)

    def _push_at_end(self, kind: type[BaseException] | None, *_: object) -> None:
        """Push what was written since the last save, unless the run failed."""
        if kind is None or issubclass(kind, Stopped):
            self.push()


@contextlib.contextmanager
def claim_folder(
    run_dir: str | pathlib.Path, config: dict[str, Any], address: AnyPath | None = None
) -> Iterator[None]:
    """Create or reopen a run's folder, and lock it in the block.

    A new folder gets config.json; an existing one must hold the same configuration. Settings in
    `MAY_CHANGE` may differ and are written again. The lock is a kernel lock and ends with the
    process, however it dies.

    Args:
        run_dir: Created if needed.
        config: The run's settings, as JSON can hold them.
        address: The run, if it is in a bucket: its checkpoints are there.

    Raises:
        OSError: The folder cannot be written.
        BlockingIOError: Another process has the lock.
        RunFolderError: The configuration differs (the message lists the fields), or the folder
            holds other files.
        TypeError: `config` is not JSON.
    """
    folder = pathlib.Path(run_dir).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    held = address or folder
    with lock(folder / _LOCK):
        with named_errors(str(held)):
            history = _history(held, config)
            lost = history is not None and not (held / _CONFIG).exists()
        if lost:
            say(f"{held / _CONFIG}: lost; the newest checkpoint has the settings of this command")
        _write_config(folder, config, history)
        yield


def _write_config(folder: pathlib.Path, config: dict[str, Any], history: Any) -> None:
    resumed = {RESUMED: history} if history else {}
    write_checked_json(folder / _CONFIG, {"format": FORMAT, **config, **resumed}, indent=1)


def begin_with(checkpoint: str, config: dict[str, Any], run_dir: str) -> None:
    """Make the folder of a run that goes on from a checkpoint of another run, unless it is there.

    Args:
        checkpoint: RUN/checkpoints/PHASE/STEP.
        config: The settings of the new run.
        run_dir: Its folder.

    Raises:
        RunFolderError: There is no such checkpoint, it depends on a setting that differs, or the
            folder holds something else.
    """
    flag, folder = f"--resume-from {checkpoint}", pathlib.Path(run_dir)
    # A run in a bucket has to be copied first.
    require_local("--resume-from", checkpoint)
    require_local("--run-dir", run_dir)
    source = pathlib.Path(checkpoint).absolute()
    if folder.exists() and any(folder.iterdir()):
        begun = (folder / _CONFIG).exists() and read_config(folder, "--run-dir").get(RESUMED)
        if not begun or begun[-1]["from"] != str(source):
            raise RunFolderError(
                f"--run-dir {run_dir} did not begin with {flag}: give another one, or leave out "
                "--resume-from"
            )
        return
    old_run = source.parent.parent.parent
    kept = kept_checkpoints(old_run / "checkpoints")
    if source not in kept:
        shown = shlex.join(map(str, kept)) or "a run's folder RUN as RUN/checkpoints/PHASE/STEP"
        raise RunFolderError(f"{flag}: no such checkpoint; give one of {shown}")
    phase, step = source.parent.name, int(source.name)
    metrics = old_run / "metrics.jsonl"
    settings = read_record(source)["identity"]["settings"]
    if (old_run / _CONFIG).exists():
        read_config(old_run, "--resume-from")  # raises if it is of another version
    history = [start for start in settings.pop(RESUMED, []) if is_up_to(start, phase, step)]
    changed = differences(settings, identity(as_json(config)))
    fixed = [f"{x} = {old}" for x, (old, _) in changed.items() if _is_fixed(x, phase, settings)]
    if fixed:
        raise RunFolderError(f"{flag} keeps {', '.join(fixed)}: give the same again")
    if not any((x["phase"], x["step"]) == (phase, step) for x in read_metrics(metrics)):
        raise RunFolderError(f"{metrics}: the line of {phase} {step} is lost; restore it")
    history.append({"from": str(source), "phase": phase, "step": step, "changed": changed})
    newest = {each.parent.name: each.relative_to(old_run) for each in kept}
    earlier = [newest[name] for name in PHASES[: PHASES.index(phase)] if name in newest]
    # The phase may end elsewhere, so what was played at its end is played again; so is all that
    # other rewards score in another way.
    again = ["after-*"] if phase == "rl" else ["before-*", "after-*"]
    if any(name.startswith(("rl.rewards", "rl.grpo.anchor")) for name in changed):
        again = ["before-*", "curve-*", "after-*"]
    ignore = shutil.ignore_patterns(_LOCK, *again)
    with naming_full_disk(folder), appearing(folder) as new:
        for name in (*_TAKEN, *earlier, f"checkpoints/{phase}/{step}"):
            if (old_run / name).exists():
                shutil.copytree(old_run / name, new / name, ignore=ignore)
        _write_config(new, config, history)
        for copied in kept_checkpoints(new / "checkpoints"):
            hand_over(copied, identity(read_config(new, "--run-dir")))
        shutil.copy(metrics, new)
        MetricsWriter(new).truncate(phase, step, {"changed_after": changed})
        forget_after(new, phase, step)


def _is_fixed(name: str, phase: str, settings: dict[str, Any]) -> bool:
    """Return whether a checkpoint of a phase depends on a setting."""
    section = name.partition(".")[0]
    if section != phase:
        return section not in ("name", *PHASES[PHASES.index(phase) + 1 :])
    in_flight = _IN_FLIGHT if phase == "rl" and settings["rl"]["max_staleness"] else ()
    return name.endswith((*_FIXED, *in_flight)) or "." not in name


def _history(folder: AnyPath, config: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return `RESUMED` of this run; None if nothing was made in the folder yet.

    Raises:
        RunFolderError: The folder holds another run or other files.
    """
    others = sorted(entry.name for entry in folder.iterdir() if entry.name not in _FIRST)
    if not others:
        return None
    stored = _stored_settings(folder, others)
    history = stored.pop(RESUMED, [])
    require_same(
        f"--run-dir {folder} holds a run of another configuration",
        stored,
        identity(as_json(config)),
        "Name another --run-dir, or use its settings.",
        RunFolderError,
    )
    return history


def _stored_settings(folder: AnyPath, others: list[str]) -> dict[str, Any]:
    """Return the settings of the run in `folder`, from a checkpoint if config.json is lost."""
    if (folder / _CONFIG).exists():
        return identity(read_config(folder, "--run-dir"))
    kept = kept_checkpoints(folder / "checkpoints")
    if not kept:
        raise RunFolderError(
            f"--run-dir {folder} is not a run's folder: it has no {_CONFIG} and holds "
            f"{', '.join(others[:5])}. Give a new or empty folder."
        )
    return read_record(kept[-1])["identity"]["settings"]


def read_config(folder: AnyPath, flag: str) -> dict[str, Any]:
    """Read the configuration of the run in `folder`.

    Args:
        folder: A run's directory.
        flag: The command-line flag that named it, for error messages.

    Raises:
        DamagedFileError: The file is damaged.
        RunFolderError: The run has another format. The message is one line.
    """
    file = folder / _CONFIG
    remedy = (
        "delete it and start the run's command, which restores it from a checkpoint; without one, "
        f"give another {flag}"
    )
    config = parse_checked_json(file.read_bytes(), str(file), dict[str, Any], remedy)
    number = config.pop("format", 1)
    if number != FORMAT:
        raise RunFolderError(
            f"{flag} {folder} has format {number}; this version reads format {FORMAT}: use the "
            f"version of this program that made it, or give another {flag}."
        )
    return config


def identity(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that must stay the same when a run resumes."""
    kept = {name: value for name, value in config.items() if name not in MAY_CHANGE}
    for path in MAY_CHANGE:
        section, _, field = path.partition(".")
        if field and isinstance(kept.get(section), dict):
            kept[section] = {name: x for name, x in kept[section].items() if name != field}
    return kept


def is_shared(name: str) -> bool:
    """Return whether all readers of a run need a file: all but those of an exported model."""
    return not name.startswith(_EXPORTS)
