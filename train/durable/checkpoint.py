"""Checkpoints of a run: arrays by their path, a JSON `meta` beside them, both or neither on disk.

A thin layer over orbax. Owns the folder of numbered checkpoints and which of them stay. Refuses leaves that would not come back bit
for bit (Python numbers belong in `meta`), steps that do not grow, and what another run, or a state of other leaves, has saved.
Invariant: at any moment, killed or with a full disk, the folder's newest numbered checkpoint is complete; what a dead process
left unfinished is ignored and removed by the next one.
"""

from __future__ import annotations

import dataclasses
import logging
import pathlib
import shutil
from typing import Any, Literal, NoReturn, TypeVar, get_args

import jax
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import PyTree
from orbax.checkpoint import checkpoint_managers as policies

from paravt_jax.data.stored_settings import as_json, require_same
from train.durable import hosts

T = TypeVar("T")

_STATE, _META, _SCORE = "state", "meta", "score"

Best = Literal["accuracy", "format", "reward/total", "none"]


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message names it and says what to do."""


@dataclasses.dataclass(frozen=True)
class CheckpointSettings:
    """Which checkpoints of a phase stay on disk."""

    keep: int = 2
    """The newest checkpoints that stay."""
    best: Best = "accuracy"
    """Figure, averaged since the last checkpoint, by which the best RL checkpoint is kept; or `none`."""

    def __post_init__(self):
        if self.keep < 1:
            raise ValueError(
                f"checkpoints.keep: {self.keep}; the newest checkpoint has to stay, give 1 or more"
            )
        if self.best not in (choices := get_args(Best)):
            raise ValueError(
                f"checkpoints.best: {self.best!r} is unknown; give one of {', '.join(choices)}"
            )


class Checkpoints:
    """The numbered checkpoints in `folder`, of which the newest `keep` stay, and the one that was saved with the highest score.

    `identity` (what JSON can hold) says whose checkpoints they are: it is saved with each, and `restore` refuses another one's.
    `asynchronous` returns from `save` once the arrays are copied to the host and writes in the background: for large states,
    whose caller must `wait` before it exits. One process at a time may write (`RunDirectory` sees to that); in a run over
    several hosts all of them call, with the same step and score, and orbax writes each host's shards. `read_only` leaves the folder
    as it is, also what another process is just writing.
    """

    def __init__(
        self,
        folder: str | pathlib.Path,
        keep: int = 2,
        asynchronous: bool = False,
        identity: dict[str, Any] | None = None,
        read_only: bool = False,
    ) -> None:
        if keep < 1:
            raise CheckpointError(
                f"keep is {keep}: at least the newest checkpoint has to stay; give 1 or more."
            )
        self.folder = pathlib.Path(folder).absolute()
        self._identity = as_json(identity or {}, "identity")
        self._options = ocp.CheckpointManagerOptions(
            preservation_policy=policies.AnyPreservationPolicy(
                [
                    policies.LatestN(keep),
                    policies.BestN(
                        get_metric_fn=_score, n=1, keep_checkpoints_without_metrics=False
                    ),
                ]
            ),
            best_fn=_score,
            enable_async_checkpointing=asynchronous,
            read_only=read_only,
            create=not read_only,
            save_interval_steps=0 if read_only else 1,
        )
        self._manager = self._open()

    def save(
        self, step: int, state: PyTree, meta: dict[str, Any], score: float | None = None
    ) -> None:
        """Writes `state` (jax or NumPy arrays, typed keys included) and `meta` (what JSON can hold) as checkpoint `step`.

        `score` makes it a candidate for the best; of equal ones the newest is.
        Raises CheckpointError if the step is not beyond the latest, if a leaf cannot be kept exactly, or if the disk refuses; the
        checkpoints before it are then untouched, and saving may be tried again. TypeError if `meta` is not JSON.
        """
        latest = self.latest()
        if latest is not None and step <= latest:
            raise CheckpointError(
                f"checkpoint {step} does not follow {latest}, the latest in {self.folder}: steps have to grow."
            )
        leaves = _named_leaves(state)
        for name, leaf in leaves.items():
            _check_leaf(name, leaf)
        described = {name: _describe(leaf) for name, leaf in leaves.items()}
        record = {
            "leaves": described,
            "meta": as_json(meta, "meta"),
            "identity": self._identity,
        }
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(leaves), meta=ocp.args.JsonSave(record)
        )
        try:
            self._manager.save(step, args=items, metrics=None if score is None else {_SCORE: score})
        except Exception as error:
            self._recover(error)

    def latest(self) -> int | None:
        """The newest complete checkpoint's step, None where there is none."""
        self.wait()
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, ascending."""
        self.wait()
        return sorted(self._manager.all_steps())

    def best(self) -> int | None:
        """The step of the checkpoint with the highest score, None where none has one."""
        self.wait()
        return self._manager.best_step()

    def meta(self, step: int | None = None) -> dict[str, Any]:
        """The `meta` alone of a checkpoint, the latest without a `step`: for a caller that needs it to build a template."""
        return self._record(self._existing(step))["meta"]

    def restore(self, template: T, step: int | None = None) -> tuple[T, dict[str, Any], int]:
        """(state, meta, step) of the latest checkpoint, or of `step`.

        `template` has the state's structure; its leaves are arrays or `jax.ShapeDtypeStruct`s, whose shape and dtype are checked
        and whose sharding is used (without one: the first device), on whatever devices it was saved. A NumPy leaf comes back as NumPy.

        Raises CheckpointError if there is no such checkpoint, if it cannot be read, if it was saved under another identity, or if a leaf
        is missing, unknown or different.
        """
        step = self._existing(step)
        record, wanted = self._record(step), _named_leaves(template)
        folder = self.folder / str(step)
        self._require_same(f"{folder} is another run's", record["identity"], self._identity)
        described = {name: _describe(leaf) for name, leaf in wanted.items()}
        self._require_same(
            f"{folder} holds another state than this run's", record["leaves"], described
        )
        placed = {name: _placed(leaf) for name, leaf in wanted.items()}
        try:
            restored = self._manager.restore(
                step, args=ocp.args.Composite(state=ocp.args.StandardRestore(placed))
            )
        except Exception as error:
            raise self._unreadable(step, error) from error
        leaves = [restored[_STATE][name] for name in wanted]
        return jax.tree.unflatten(jax.tree.structure(template), leaves), record["meta"], step

    def restore_part(self, template: T, step: int) -> T:
        """The leaves of checkpoint `step` that `template` names, as `restore` places them; the others are not read. Raises as it does."""
        wanted = _named_leaves(template)
        saved = {
            name: text for name, text in self._record(step)["leaves"].items() if name in wanted
        }
        described = {name: _describe(leaf) for name, leaf in wanted.items()}
        self._require_same(f"{self.folder / str(step)} has no such part", saved, described)
        placed = {name: _placed(leaf) for name, leaf in wanted.items()}
        where = {
            name: ocp.ArrayRestoreArgs(sharding=leaf.sharding) for name, leaf in placed.items()
        }
        arguments = ocp.args.PyTreeRestore(item=placed, restore_args=where, partial_restore=True)
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
                restored = reader.restore(self.folder / str(step) / _STATE, args=arguments)
        except Exception as error:
            raise self._unreadable(step, error) from error
        return jax.tree.unflatten(jax.tree.structure(template), [restored[name] for name in wanted])

    def _require_same(self, what: str, stored: dict[str, Any], wanted: dict[str, Any]) -> None:
        remedy = "Use the code and settings that wrote it, or another run directory."
        require_same(what, stored, wanted, remedy, CheckpointError)

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
            if not self._options.read_only:
                self.folder.mkdir(parents=True, exist_ok=True)
                with hosts.one_after_another():
                    if hosts.is_first():
                        self._clear_unfinished()
            manager = ocp.CheckpointManager(
                self.folder, options=self._options, item_names=(_STATE, _META)
            )
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint folder {self.folder} cannot be used: {error}."
            ) from error
        except ValueError as error:
            raise CheckpointError(
                f"the score of a checkpoint in {self.folder} cannot be read (STEP/metrics/metrics: "
                f"{error}): delete the checkpoint whose file is damaged."
            ) from error
        return manager

    def _clear_unfinished(self) -> None:
        """Until a save is complete its folder has another name. Orbax would clear them in the background, after it said that it is open."""
        for unfinished in self.folder.glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(unfinished, ignore_errors=True)

    def _recover(self, error: Exception) -> NoReturn:
        """After a failed save: gives its room on the disk back, forgets it, and says so."""
        if jax.process_count() > 1:  # the others have to be asked for that, and they are elsewhere
            if isinstance(error, jax.errors.JaxRuntimeError):
                raise error
            raise CheckpointError(
                f"saving a checkpoint in {self.folder} failed ({_cause(error)}); start all processes again."
            ) from error
        self._manager = (
            self._open()
        )  # the old one lists the failed step as saved: what is on disk is asked anew
        latest = self._manager.latest_step()
        kept = f"checkpoint {latest} is intact" if latest is not None else "there is no earlier one"
        free = shutil.disk_usage(self.folder).free / 2**20
        raise CheckpointError(
            f"saving a checkpoint in {self.folder} failed ({_cause(error)}); {kept}. "
            f"{free:.0f} MiB are free there: make room if the disk is full, then start the same command again."
        ) from error

    def _existing(self, step: int | None) -> int:
        """`step`, or the latest one."""
        steps = self.steps()
        if not steps:
            raise CheckpointError(f"{self.folder} holds no complete checkpoint.")
        if step is not None and step not in steps:
            raise CheckpointError(
                f"{self.folder} holds no checkpoint {step}; there is {', '.join(map(str, steps))}."
            )
        return steps[-1] if step is None else step

    def _record(self, step: int) -> dict[str, Any]:
        try:
            return self._manager.restore(
                step, args=ocp.args.Composite(meta=ocp.args.JsonRestore())
            )[_META]
        except Exception as error:
            raise self._unreadable(step, error) from error

    def _unreadable(self, step: int, error: Exception) -> CheckpointError:
        folder = self.folder / str(step)
        older = [other for other in self._manager.all_steps() if other < step]
        remedy = (
            f"delete it to go on from checkpoint {max(older)}"
            if older
            else "delete it to start again"
        )
        return CheckpointError(f"{folder} cannot be read ({_cause(error)}): {remedy}.")


def _score(metrics: dict[str, float]) -> float:
    return metrics[_SCORE]


def _named_leaves(tree: PyTree) -> dict[str, Any]:
    """Leaves by path ("model.layers.0.kernel"): on disk nothing depends on the classes of the tree's nodes."""
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name in leaves:
            raise CheckpointError(
                f"two leaves of the state are called {name}: rename one, a checkpoint stores leaves by path."
            )
        leaves[name] = leaf
    return leaves


def _check_leaf(name: str, leaf: Any) -> None:
    if not isinstance(leaf, jax.Array | np.ndarray):
        raise CheckpointError(
            f"state leaf {name} is {leaf!r}, a {type(leaf).__name__}: arrays go into the state, other values into meta."
        )
    if leaf.size == 0:
        raise CheckpointError(
            f"state leaf {name} has shape {leaf.shape}, without elements, which orbax cannot store: leave it out."
        )


def _describe(leaf: Any) -> str:
    return (
        f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
        if hasattr(leaf, "dtype")
        else type(leaf).__name__
    )


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
    """False for a traceback that orbax logs in each of its threads, the same error is raised here, once; and for what its caller asked."""
    asked = str(record.msg).startswith(
        ("Given directory is read only", "Requested `tracked_metric`")
    )
    return not ("orbax" in record.pathname and (record.exc_info or asked))


logging.getLogger("absl").addFilter(_is_news)
