"""Checkpoints of a run, built on orbax: arrays stored by path, and a JSON `meta` beside them.

Orbax writes a checkpoint into a temporary folder and renames it when it is complete:

    checkpoints/rl/40                           complete; the one a restart resumes from
    checkpoints/rl/60.orbax-checkpoint-tmp-...  left by a killed save; the next process removes it
    checkpoints/rl/80.damaged                   set aside, because a file changed after the save

So after a kill, or on a full disk, the newest numbered folder is always a complete checkpoint. In a
bucket, a checkpoint is complete when it has commit_success.txt, which Orbax writes last.

Each holds the checksums of its files, sums.json, written before the rename. The arrays' own format
cannot do this: orbax 0.12 writes zarr3 with a CRC of the index alone, so a flipped bit of an array
is read without an error. The sums cover files as they are stored, so they hold on every mesh.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, Literal, NoReturn, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jaxtyping import PyTree
from orbax.checkpoint import checkpoint_managers as policies

from paravt_jax.checks import require_at_least, require_choices
from paravt_jax.data.any_path import any_path, is_bucket
from paravt_jax.data.stored_json import DamagedFileError
from paravt_jax.data.stored_settings import as_json, require_same
from paravt_jax.processes import cluster, hosts
from paravt_jax.processes.exit_codes import TEMPORARY, UserError
from train.durable.bucket import Bucket, BucketError
from train.durable.checkpoint_files import (
    checkpoint_damage,
    set_aside,
    write_checkpoint_sums,
)
from train.durable.step_lines import say

T = TypeVar("T")

# Orbax stores each item in a folder of its own: STEP/state, STEP/meta, STEP/metrics (the score).
# Its last files in STEP itself, written after the sums, are not needed to restore anything.
_STATE = "state"
_META = "meta"
_SCORE = "score"

Best = Literal["accuracy", "compliance", "reward/total", "none"]


class CheckpointError(UserError):
    """A checkpoint could not be written or read."""


class SaveError(CheckpointError):
    """A checkpoint could not be written. Often a disk is full or a store does not answer."""

    exit_code = TEMPORARY


@dataclasses.dataclass(frozen=True)
class CheckpointSettings:
    """Which checkpoints of a phase are kept."""

    keep: int = 2
    """Number of newest checkpoints to keep."""
    best: Best = "accuracy"
    """Metric, averaged between checkpoints, that picks the best RL checkpoint to keep; or none."""
    every: int = 0
    """Steps between extra saves for restarts only. 0: every step with adapters, else none."""

    def __post_init__(self):
        require_at_least("checkpoints", self, 1, "keep")
        require_at_least("checkpoints", self, 0, "every")
        require_choices("checkpoints", self)


class Checkpoints:
    """The numbered checkpoints of one phase.

    Only one process at a time may write (`RunDirectory` locks the run). In a multi-host run all
    processes call the same methods with the same step and score; orbax writes each host's shards.

    Opening the folder to write verifies the newest checkpoint. A damaged one is set aside, with a
    printed line, and the one before it becomes the newest. Other checkpoints are verified when they
    are read.

    Args:
        folder: holds one folder per checkpoint, named by its step; a local path, or one below gs://.
        keep: number of newest checkpoints to keep; the one with the highest score stays as well.
        asynchronous: `save` returns once the arrays are copied to the host and writes them in the
            background. Call `wait` or `close` before the process exits.
        identity: settings that the checkpoints belong to; any JSON value. They are stored with each
            checkpoint, and `restore` compares them.
        read_only: changes nothing in `folder`, not even what another process is writing there.

    Attributes:
        folder: Its folder.

    Raises:
        CheckpointError: The folder cannot be used, or no checkpoint is sound.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        keep: int = 2,
        asynchronous: bool = False,
        identity: dict[str, Any] | None = None,
        read_only: bool = False,
    ) -> None:
        _quiet_orbax()
        self.folder = any_path(folder)
        self._identity = as_json(identity or {}, "identity")
        # By default, BestN would keep every checkpoint that has no score.
        best_one = policies.BestN(get_metric_fn=_score, n=1, keep_checkpoints_without_metrics=False)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(keep), best_one]),
            best_fn=_score,
            # Also where `save` waits for the writing: only asynchronous saves have a callback.
            async_options=ocp.AsyncOptions(
                barrier_sync_fn=_wait_for_others, post_finalization_callback=self._write_sums
            ),
            cleanup_tmp_directories=True,
            # Scores are read when damaged checkpoints are out of the way.
            lightweight_initialize=True,
            read_only=read_only,
            create=not read_only,
        )
        self._asynchronous = asynchronous
        # The step that is being saved.
        self._saving = 0
        self._verified: set[int] = set()
        with self._named_errors():
            self._manager = ocp.CheckpointManager(
                self.folder, options=options, item_names=(_STATE, _META)
            )
        if not read_only:
            self._set_damaged_aside()
        with self._named_errors():
            self._manager.reload()

    def save(
        self, step: int, state: PyTree, meta: dict[str, Any], score: float | None = None
    ) -> None:
        """Writes checkpoint `step`. If it fails, earlier checkpoints stay and a retry is possible.

        Args:
            step: number of the checkpoint; it does not exist yet.
            state: tree of jax or NumPy arrays, typed random keys included.
            meta: anything JSON can hold.
            score: makes the checkpoint a candidate for the best; of equal scores the newest wins.

        Raises:
            SaveError: writing failed.
            TypeError: `meta` is not JSON.
        """
        leaves = _named_leaves(state)
        record = {
            "leaves": {name: _describe(leaf) for name, leaf in leaves.items()},
            "meta": as_json(meta, "meta"),
            "identity": self._identity,
        }
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(leaves), meta=ocp.args.JsonSave(record)
        )
        metrics = None if score is None else {_SCORE: score}
        # The background still writes the sums of the step before.
        self.wait()
        self._saving = step
        try:
            # Otherwise a step below the latest one would be left out without an error.
            self._manager.save(step, args=items, metrics=metrics, force=True)
        except Exception as error:
            self._recover(error)
        if not self._asynchronous:
            self.wait()

    def latest(self) -> int | None:
        """Step of the newest complete checkpoint, or None."""
        self.wait()
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """Steps of all complete checkpoints, ascending."""
        self.wait()
        return sorted(self._manager.all_steps())

    def newest_now(self) -> int | None:
        """Like `latest`, but neither waits for a running save nor asks the disk or the store."""
        running = self._manager.is_saving_in_progress()
        complete = {*self._manager.all_steps()} - ({self._saving} if running else set())
        return max(complete, default=None)

    def best(self) -> int | None:
        """Step of the checkpoint with the highest score, or None if none has a score."""
        self.wait()
        return self._manager.best_step()

    def meta(self, step: int | None = None) -> dict[str, Any]:
        """Reads only the `meta` of checkpoint `step`, by default the latest."""
        return self._record(self._existing(step))["meta"]

    def restore(
        self, template: T, step: int | None = None, part: bool = False
    ) -> tuple[T, dict[str, Any], int]:
        """Reads a checkpoint onto this run's devices, whatever devices it was saved from.

        Args:
            template: tree with the structure of the saved state. Its leaves are arrays or
                `jax.ShapeDtypeStruct`s: shape and dtype must match, and the array is placed by the
                leaf's sharding (without one: on the first device). NumPy leaves stay NumPy.
            step: the checkpoint to read, by default the latest.
            part: whether the template may lack leaves, and the checkpoint may have another
                identity; only the leaves of the template are read.

        Returns:
            (state, meta, step).

        Raises:
            CheckpointError: there is no such checkpoint, it cannot be read, it has another identity
                or its leaves differ from the template's.
        """
        step = self._existing(step)
        record = self._record(step)
        wanted = _named_leaves(template)
        folder = self.folder / str(step)
        stored = record["leaves"]
        if part:
            stored = {name: leaf for name, leaf in stored.items() if name in wanted}
        else:
            self._require_same(f"{folder} is another run's", record["identity"], self._identity)
        described = {name: _describe(leaf) for name, leaf in wanted.items()}
        self._require_same(f"{folder} holds a state with other leaves", stored, described)
        placed = {name: _placed(leaf) for name, leaf in wanted.items()}
        arguments = ocp.args.PyTreeRestore(
            item=placed,
            restore_args=ocp.checkpoint_utils.construct_restore_args(placed),
            partial_restore=part,
        )
        try:
            items = self._manager.restore(step, args=ocp.args.Composite(state=arguments))
        except Exception as error:
            raise self._unreadable(step, error) from error
        leaves = [items[_STATE][name] for name in wanted]
        return jax.tree.unflatten(jax.tree.structure(template), leaves), record["meta"], step

    def _require_same(self, what: str, stored: dict[str, Any], wanted: dict[str, Any]) -> None:
        remedy = "Use the code and settings that wrote it, or another run directory."
        require_same(what, stored, wanted, remedy, CheckpointError)

    def wait(self) -> None:
        """Waits for saving in the background. Raises CheckpointError if it failed."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            self._recover(error)

    def close(self) -> None:
        """Waits, and ends orbax's threads."""
        self.wait()
        self._manager.close()

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Name the folder in errors of Orbax, which lists it."""
        if is_bucket(self.folder):
            with Bucket(self.folder).in_one_line():
                yield
            return
        try:
            yield
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint folder {self.folder} cannot be used: {_cause(error)}."
            ) from error

    def _recover(self, error: Exception) -> NoReturn:
        """Raises the error of a failed save, after which another can be tried."""
        if jax.process_count() > 1:
            # A JaxRuntimeError may mean that one of them is gone: `cluster` reports that.
            if isinstance(error, jax.errors.JaxRuntimeError):
                raise error
            # The others did not come to a barrier of the save.
            if isinstance(error, TimeoutError) and "barrier" in str(error):
                cluster.end_without_others(error)
            raise SaveError(
                f"saving a checkpoint in {self.folder} failed ({_cause(error)}); start all "
                "processes again."
            ) from error
        with self._named_errors():
            # A full disk gets its room back at once.
            for unfinished in epath.Path(self.folder).glob("*.orbax-checkpoint-tmp*"):
                unfinished.rmtree(missing_ok=True)
            # The manager counts the failed step as saved until it lists the folder again.
            self._manager.reload()
        latest = self._manager.latest_step()
        kept = f"checkpoint {latest} is intact" if latest is not None else "there is no earlier one"
        raise SaveError(
            f"saving a checkpoint in {self.folder} failed ({_cause(error)}); {kept}; make room "
            "if the disk is full, and start the same command again."
        ) from error

    def _existing(self, step: int | None) -> int:
        """`step`, by default the latest; an error if there is no such checkpoint."""
        steps = self.steps()
        if step is None and steps:
            return steps[-1]
        if step not in steps:
            raise CheckpointError(
                f"{self.folder} holds no complete checkpoint {step or ''}; it holds "
                f"{', '.join(map(str, steps)) or 'none'}."
            )
        return step

    def _record(self, step: int) -> dict[str, Any]:
        """Verifies a checkpoint, and reads the JSON that `save` stored: leaves, meta, identity."""
        self._require_sound(step)
        arguments = ocp.args.Composite(meta=ocp.args.JsonRestore())
        try:
            return self._manager.restore(step, args=arguments)[_META]
        except Exception as error:
            raise self._unreadable(step, error) from error

    def _write_sums(self) -> None:
        """Orbax calls this on the first process when all files are written, before it commits."""
        write_checkpoint_sums(self.folder, self._saving)

    def _set_damaged_aside(self) -> None:
        """Sets damaged checkpoints aside that are newer than the last sound one.

        Of older ones, only what opening the folder reads is verified: their score.
        """
        damaged: dict[int, str] = {}
        sound = None
        # On a shared disk, other processes may see a new checkpoint later.
        for step in hosts.from_first(lambda: sorted(self._manager.all_steps(), reverse=True)):
            damage = self._damage(step, whole=sound is None)
            if damage:
                damaged[step] = damage
            elif sound is None:
                sound = step
                self._verified.add(step)
        if not damaged:
            return
        named = ", ".join(f"{step} ({damage})" for step, damage in damaged.items())
        if sound is None:
            raise CheckpointError(
                f"{self.folder}: no checkpoint is sound: {named}. Restore one from a backup, or "
                "start anew with another --run-dir."
            )
        with hosts.one_after_another():
            if hosts.is_first():
                for step in damaged:
                    set_aside(self.folder, step)
                say(
                    f"warning: damaged checkpoints in {self.folder}: {named}; they are set aside, "
                    f"and {sound} is used"
                )

    def _damage(self, step: int, whole: bool = True) -> str:
        """The first thing that is wrong with a checkpoint; "" if it is sound.

        Every process reads a part of the files, and all return the same.

        Args:
            step: Its number.
            whole: Whether to read all files, or only the score.
        """

        def mine(names: list[str]) -> list[str]:
            read = [name for name in names if whole or name.startswith("metrics/")]
            return read[hosts.process_index() :: hosts.process_count()]

        try:
            damage = checkpoint_damage(self.folder, step, mine)
        except BucketError:
            # A store that cannot be reached says nothing about the checkpoint.
            raise
        except (DamagedFileError, OSError) as error:
            damage = [str(error)]
        return next((text for part in hosts.gather(damage) for text in part), "")

    def _require_sound(self, step: int) -> None:
        if step in self._verified:
            return
        damage = self._damage(step)
        if damage:
            raise self._unreadable(step, ValueError(damage))
        self._verified.add(step)

    def _unreadable(self, step: int, error: Exception) -> CheckpointError:
        folder = self.folder / str(step)
        older = [other for other in self._manager.all_steps() if other < step]
        if older:
            remedy = f"delete it to resume from checkpoint {max(older)}"
        else:
            remedy = "delete it to start again"
        return CheckpointError(f"{folder} cannot be read ({_cause(error)}): {remedy}.")


def _score(metrics: dict[str, float]) -> float:
    return metrics[_SCORE]


def _named_leaves(tree: PyTree) -> dict[str, Any]:
    """Leaves by path, such as "model.layers.0.kernel".

    Paths do not depend on the Python classes of the tree's nodes, so a checkpoint survives a change
    of those classes.
    """
    leaves = [
        (jax.tree_util.keystr(path, simple=True, separator="."), leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    ]
    assert len(dict(leaves)) == len(leaves), "two leaves of the state have the same path"
    return dict(leaves)


def _describe(leaf: Any) -> str:
    """Type and shape as text: "float32[2,3]"."""
    if not hasattr(leaf, "dtype"):
        return type(leaf).__name__
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def _placed(leaf: Any) -> Any:
    """The leaf as orbax expects it: NumPy unchanged, everything else abstract with a sharding."""
    if isinstance(leaf, np.ndarray):
        return leaf
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _wait_for_others(*, key: str, timeout_ms: int) -> None:
    """Waits at a barrier of Orbax, unless the save of this process has failed.

    Orbax calls it in a `finally` block, too. A process whose save failed would wait there for 20
    minutes, because the others wait for it at an earlier barrier.
    """
    if sys.exc_info()[0] is None:
        ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)


def _cause(error: Exception) -> str:
    """The error on one line. Its end matters: tensorstore puts the cause after long paths."""
    line = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return line if len(line) <= 300 else f"{line[:100]} ... {line[-190:]}"


@functools.cache
def _quiet_orbax() -> None:
    """Drop what Orbax says about failed saves, which are raised here, and about options set here.

    For the rest of the process: asynchronous writes may fail long after `save` has returned.
    """

    def keep(record: logging.LogRecord) -> bool:
        return "orbax" not in record.pathname or record.levelno > logging.ERROR

    def report(unraisable: Any, before: Callable[[Any], object] = sys.unraisablehook) -> None:
        # At the first failure Orbax closes its event loop, and later ones cannot be told to it.
        if str(unraisable.exc_value) != "Event loop is closed":
            before(unraisable)

    logging.getLogger("absl").addFilter(keep)
    # The same error is raised here.
    logging.getLogger("gcsfs").addFilter(lambda record: not record.exc_info)
    sys.unraisablehook = report
