"""Checkpoints of a run: arrays by their path, a JSON `meta` beside them, both or neither on disk.

A thin layer over orbax. Owns the folder of numbered checkpoints. Refuses leaves that would not come back bit for bit (Python
numbers belong in `meta`), steps that do not grow, and a template whose leaves differ from what was saved.
Invariant: at any moment, killed or with a full disk, the folder's newest numbered checkpoint is complete; what a dead process
left unfinished is ignored and removed by the next one.
"""

from __future__ import annotations

import logging
import pathlib
import shutil
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import PyTree

from train.run_directory import as_json

T = TypeVar("T")

_STATE, _META = "state", "meta"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message names it and says what to do."""


class Checkpoints:
    """The numbered checkpoints in `folder`, of which the newest `keep` stay.

    `asynchronous` returns from `save` once the arrays are copied to the host and writes in the background: for large states,
    whose caller must `wait` before it exits. One process at a time may write (`RunDirectory` sees to that); in a run over
    several hosts all of them call, with the same step, and orbax writes each host's shards.
    """

    def __init__(self, folder: str | pathlib.Path, keep: int = 2, asynchronous: bool = False) -> None:
        if keep < 1:
            raise CheckpointError(f"keep is {keep}: at least the newest checkpoint has to stay; give 1 or more.")
        self.folder = pathlib.Path(folder).absolute()
        self._options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            enable_async_checkpointing=asynchronous,
        )
        self._manager = self._open()

    def save(self, step: int, state: PyTree, meta: dict[str, Any]) -> None:
        """Writes `state` (jax or NumPy arrays, typed keys included) and `meta` (what JSON can hold) as checkpoint `step`.

        Raises CheckpointError if the step is not beyond the latest, if a leaf cannot be kept exactly, or if the disk refuses; the
        checkpoints before it are then untouched, and saving may be tried again. TypeError if `meta` is not JSON.
        """
        latest = self.latest()
        if latest is not None and step <= latest:
            raise CheckpointError(f"checkpoint {step} does not follow {latest}, the latest in {self.folder}: steps have to grow.")
        leaves = _named_leaves(state)
        for name, leaf in leaves.items():
            _check_leaf(name, leaf)
        record = {"leaves": {name: _describe(leaf) for name, leaf in leaves.items()}, "meta": as_json(meta, "meta")}
        items = ocp.args.Composite(state=ocp.args.StandardSave(leaves), meta=ocp.args.JsonSave(record))
        try:
            self._manager.save(step, args=items)
        except Exception as error:
            self._recover(error)

    def latest(self) -> int | None:
        """The newest complete checkpoint's step, None where there is none."""
        self.wait()
        return self._manager.latest_step()

    def meta(self) -> dict[str, Any]:
        """The latest checkpoint's `meta` alone, for a caller that has to know the phase before it can build a template."""
        return self._record(self._latest())["meta"]

    def restore(self, template: T) -> tuple[T, dict[str, Any], int]:
        """(state, meta, step) of the latest checkpoint.

        `template` has the state's structure; its leaves are arrays or `jax.ShapeDtypeStruct`s, whose shape and dtype are checked
        and whose sharding is used (without one: the first device). A NumPy leaf comes back as NumPy.

        Raises CheckpointError if there is no checkpoint, if it cannot be read, or if a leaf is missing, unknown or different.
        """
        step = self._latest()
        record = self._record(step)
        wanted = _named_leaves(template)
        differences = _differences(record["leaves"], {name: _describe(leaf) for name, leaf in wanted.items()})
        if differences:
            raise CheckpointError(
                f"{self.folder / str(step)} holds another state than this run's (saved -> wanted): {'; '.join(differences)}. "
                "Use the code and settings that wrote it, or another run directory."
            )
        placed = {name: _placed(leaf) for name, leaf in wanted.items()}
        try:
            restored = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(placed)))
        except Exception as error:
            raise self._unreadable(step, error) from error
        leaves = [restored[_STATE][name] for name in wanted]
        return jax.tree.unflatten(jax.tree.structure(template), leaves), record["meta"], step

    def wait(self) -> None:
        """Returns when nothing is being written. Raises CheckpointError if the writing in the background failed."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            self._recover(error)

    def close(self) -> None:
        """Waits, and lets go of orbax's threads."""
        self.wait()
        self._manager.close()

    def _open(self) -> ocp.CheckpointManager:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._clear_unfinished()
            return ocp.CheckpointManager(self.folder, options=self._options, item_names=(_STATE, _META))
        except OSError as error:
            raise CheckpointError(f"the checkpoint folder {self.folder} cannot be used: {error}.") from error

    def _clear_unfinished(self) -> None:
        """Until a save is complete its folder has another name. Orbax would clear them in the background, after it said that it is open."""
        for unfinished in self.folder.glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(unfinished, ignore_errors=True)

    def _recover(self, error: Exception) -> NoReturn:
        """After a failed save: gives its room on the disk back, forgets it, and says so."""
        self._manager = self._open()  # the old one lists the failed step as saved: what is on disk is asked anew
        latest = self._manager.latest_step()
        kept = f"checkpoint {latest} is intact" if latest is not None else "there is no earlier one"
        free = shutil.disk_usage(self.folder).free / 2**20
        raise CheckpointError(
            f"saving a checkpoint in {self.folder} failed ({_cause(error)}); {kept}. "
            f"{free:.0f} MiB are free there: make room if the disk is full, then start the same command again."
        ) from error

    def _latest(self) -> int:
        step = self.latest()
        if step is None:
            raise CheckpointError(f"{self.folder} holds no complete checkpoint.")
        return step

    def _record(self, step: int) -> dict[str, Any]:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))[_META]
        except Exception as error:
            raise self._unreadable(step, error) from error

    def _unreadable(self, step: int, error: Exception) -> CheckpointError:
        folder = self.folder / str(step)
        older = [other for other in self._manager.all_steps() if other < step]
        remedy = f"delete it to go on from checkpoint {max(older)}" if older else "delete it to start again"
        return CheckpointError(f"{folder} cannot be read ({_cause(error)}): {remedy}.")


def _named_leaves(tree: PyTree) -> dict[str, Any]:
    """Leaves by path ("model.layers.0.kernel"): on disk nothing depends on the classes of the tree's nodes."""
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name in leaves:
            raise CheckpointError(f"two leaves of the state are called {name}: rename one, a checkpoint stores leaves by path.")
        leaves[name] = leaf
    return leaves


def _check_leaf(name: str, leaf: Any) -> None:
    if not isinstance(leaf, jax.Array | np.ndarray):
        raise CheckpointError(f"state leaf {name} is {leaf!r}, a {type(leaf).__name__}: arrays go into the state, other values into meta.")
    if leaf.size == 0:
        raise CheckpointError(f"state leaf {name} has shape {leaf.shape}, without elements, which orbax cannot store: leave it out.")


def _describe(leaf: Any) -> str:
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]" if hasattr(leaf, "dtype") else type(leaf).__name__


def _differences(saved: dict[str, str], wanted: dict[str, str], most: int = 5) -> list[str]:
    names = [name for name in (saved | wanted) if saved.get(name) != wanted.get(name)]
    lines = [f"{name}: {saved.get(name, 'absent')} -> {wanted.get(name, 'absent')}" for name in names[:most]]
    return lines + [f"and {len(names) - most} more"] * (len(names) > most)


def _placed(leaf: Any) -> Any:
    """The leaf as orbax wants it: NumPy as it is, everything else abstract and with a sharding."""
    if isinstance(leaf, np.ndarray):
        return leaf
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _cause(error: Exception) -> str:
    """The error in one line; tensorstore repeats paths at length and says what happened at the end."""
    line = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return line if len(line) <= 300 else f"{line[:100]} ... {line[-190:]}"


def _is_news(record: logging.LogRecord) -> bool:
    """False for a traceback that orbax logs in each of its threads: the same error is raised here, once."""
    return not (record.exc_info and "orbax" in record.pathname)


logging.getLogger("absl").addFilter(_is_news)
