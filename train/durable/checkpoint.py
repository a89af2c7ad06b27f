"""Checkpoints of a run, built on Orbax: arrays stored by path, and a JSON `meta` beside them.

Orbax writes a checkpoint into a temporary folder and renames it when it is complete:

    checkpoints/rl/40                           complete; the one a restart resumes from
    checkpoints/rl/60.orbax-checkpoint-tmp-...  left by a killed save; the next process removes it

So after a kill, or on a full disk, the newest numbered folder is always a complete checkpoint. In a
bucket, a checkpoint is complete when it has commit_success.txt, which Orbax writes last.

Orbax restores a flipped bit of an array without an error. So each checkpoint holds a checksum of
every array, computed on the devices before it is written, which is compared when the array is read.
It does not depend on the mesh, and disks and buckets need no code of their own.
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from typing import Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import PyTree
from orbax.checkpoint import checkpoint_managers as policies

from models.fingerprint import array_fingerprints, host_fingerprint
from paravt_jax.data.any_path import AnyPath, any_path
from paravt_jax.data.stored import as_json, require_same
from paravt_jax.processes import cluster, hosts
from paravt_jax.processes.exit_codes import TEMPORARY, UserError, one_line
from train.durable.bucket import named_errors
from train.durable.metrics import PHASES

T = TypeVar("T")

KEEP = 2
"""Number of newest checkpoints that each phase keeps; the best one of RL stays as well."""

# Orbax stores each item in a folder of its own: STEP/state, STEP/meta, STEP/metrics (the score).
_STATE = "state"
_META = "meta"
_SCORE = "score"


class CheckpointError(UserError):
    """A checkpoint could not be written or read."""


class SaveError(CheckpointError):
    """A checkpoint could not be written. Often a disk is full or a store does not answer."""

    exit_code = TEMPORARY


class Checkpoints:
    """The numbered checkpoints of one phase.

    Only one process at a time may write (`RunFolder` locks the run). In a multi-host run all
    processes call the same methods with the same step and score; Orbax writes each host's shards.

    Args:
        folder: Holds one folder per checkpoint, named by its step; a local path, or one below
            gs://.
        identity: Settings that the checkpoints belong to; any JSON value. They are stored with each
            checkpoint, and `restore` compares them.
        read_only: Change nothing in `folder`, not even what another process is writing there.

    Attributes:
        folder: Its folder.

    Raises:
        OSError: The folder cannot be used.
        BucketError: The store cannot be used.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        identity: dict[str, Any] | None = None,
        read_only: bool = False,
    ) -> None:
        self.folder = any_path(folder)
        self._identity = as_json(identity or {})
        # By default, BestN would keep every checkpoint that has no score.
        best_one = policies.BestN(get_metric_fn=_score, n=1, keep_checkpoints_without_metrics=False)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(KEEP), best_one]),
            best_fn=_score,
            async_options=ocp.AsyncOptions(barrier_sync_fn=_wait_for_others),
            cleanup_tmp_directories=True,
            read_only=read_only,
            create=not read_only,
        )
        with named_errors(str(self.folder)):
            self._manager = ocp.CheckpointManager(
                self.folder, options=options, item_names=(_STATE, _META)
            )

    def save(self, step: int, state: PyTree, cursor: Any, score: float | None = None) -> None:
        """Write checkpoint `step`. If it fails, earlier checkpoints stay.

        It returns once the arrays are copied to the host, and they are written in the background.
        Call `wait` or `close` before the process exits.

        Args:
            step: Number of the checkpoint; it does not exist yet.
            state: Tree of jax or NumPy arrays, typed random keys included.
            cursor: What is stored beside the state: anything JSON can hold.
            score: Makes the checkpoint a candidate for the best; of equal scores the newest wins.

        Raises:
            SaveError: Writing failed, perhaps that of an earlier checkpoint.
            TypeError: `cursor` is not JSON.
        """
        leaves = _named_leaves(state)
        record = {
            "leaves": {name: _describe(leaf) for name, leaf in leaves.items()},
            "sums": _sums(leaves),
            "cursor": as_json(cursor),
            "identity": self._identity,
        }
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(leaves),
            meta=ocp.args.JsonSave({"checksum": _sum_of_json(record), **record}),
        )
        metrics = None if score is None else {_SCORE: score}
        try:
            # Otherwise a step below the latest one would be left out without an error.
            self._manager.save(step, args=items, metrics=metrics, force=True)
        except Exception as error:
            self._fail(error)

    def latest(self) -> int | None:
        """Return the step of the newest complete checkpoint, or None."""
        return max(self.steps(), default=None)

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints, ascending."""
        self.wait()
        return sorted(self._manager.all_steps())

    def best(self) -> int | None:
        """Return the step of the checkpoint with the highest score; None if none has a score."""
        self.wait()
        return self._manager.best_step()

    def identity(self, step: int) -> dict[str, Any]:
        """Read only what checkpoint `step` belongs to."""
        self.wait()
        return read_record(self.folder / str(step))["identity"]

    def restore(self, template: T, step: int, part: bool = False) -> tuple[T, Any]:
        """Read a checkpoint onto this run's devices, whatever devices it was saved from.

        Args:
            template: Tree with the structure of the saved state. Its leaves are arrays or
                `jax.ShapeDtypeStruct`s: shape and dtype must match, and the array is placed by the
                leaf's sharding (without one: on the first device). NumPy leaves stay NumPy.
            step: The checkpoint to read.
            part: Whether the template may lack leaves, and the checkpoint may have another
                identity, which is not compared; only the leaves of the template are read.

        Returns:
            (state, cursor).

        Raises:
            CheckpointError: It cannot be read or is not what was saved, it has another identity, or
                its leaves differ from the template's.
        """
        self.wait()
        folder = self.folder / str(step)
        record = read_record(folder)
        wanted = _named_leaves(template)
        stored = record["leaves"]
        if part:
            stored = {name: leaf for name, leaf in stored.items() if name in wanted}
        else:
            self._require_same(f"{folder} is another run's", record["identity"], self._identity)
        described = {name: _describe(leaf) for name, leaf in wanted.items()}
        self._require_same(f"{folder} holds a state with other leaves", stored, described)
        targets = {name: _target(leaf) for name, leaf in wanted.items()}
        arguments = ocp.args.PyTreeRestore(
            item=targets,
            restore_args=ocp.checkpoint_utils.construct_restore_args(targets),
            partial_restore=part,
        )
        arrays = self._read(step, _STATE, arguments)
        damaged = [name for name, own in _sums(arrays).items() if own != record["sums"][name]]
        if damaged:
            raise unreadable(folder, f"{damaged[0]}: its checksum is wrong")
        leaves = [arrays[name] for name in wanted]
        return jax.tree.unflatten(jax.tree.structure(template), leaves), record["cursor"]

    def wait(self) -> None:
        """Wait for saving in the background. Raises SaveError if it failed."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            self._fail(error)

    def close(self) -> None:
        """Wait, and end Orbax's threads."""
        self.wait()
        self._manager.close()

    def _require_same(self, what: str, stored: dict[str, Any], wanted: dict[str, Any]) -> None:
        remedy = "Use the code and settings that wrote it, or another run directory."
        require_same(what, stored, wanted, remedy, CheckpointError)

    def _fail(self, error: Exception) -> NoReturn:
        """Raise the error of a failed save."""
        # ValueErrors of XLA's form are TensorStore's: what it cannot write to.
        if cluster.is_lost(error) and not isinstance(error, ValueError):
            raise error
        raise SaveError(
            f"saving a checkpoint in {self.folder} failed ({one_line(error)}); earlier ones are "
            "intact: make room if the disk is full, and start the same command again."
        ) from error

    def _read(self, step: int, item: str, arguments: Any) -> Any:
        """Read an item of a checkpoint.

        Orbax lets all processes wait for each other, so if one raises an error, it has to end.
        """
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**{item: arguments}))[item]
        except Exception as error:
            raise unreadable(self.folder / str(step), one_line(error)) from error


def kept_checkpoints(folder: AnyPath) -> list[AnyPath]:
    """Return the complete checkpoints below the folder `checkpoints` of a run, in their order."""
    return [path for phase in PHASES for path in _kept(folder / phase)]


def _kept(phase: AnyPath) -> list[AnyPath]:
    steps = [path for path in phase.glob("*") if path.name.isdigit()]
    return sorted(steps, key=lambda path: int(path.name))


def unreadable(checkpoint: AnyPath, cause: str) -> CheckpointError:
    """Return the error of a checkpoint that cannot be read."""
    with named_errors(str(checkpoint)):
        older = any(int(other.name) < int(checkpoint.name) for other in _kept(checkpoint.parent))
    again = "to resume from the one before it" if older else "to start again"
    return CheckpointError(
        f"{checkpoint} cannot be read ({cause}): if it is damaged, restore it from a backup, or "
        f"delete it {again}"
    )


def read_record(checkpoint: AnyPath) -> dict[str, Any]:
    """Read the JSON that `save` stored: leaves, sums, cursor, identity.

    It needs no other process, unlike what Orbax reads.

    Raises:
        CheckpointError: It cannot be read, or is damaged.
    """
    try:
        record = json.loads((checkpoint / _META / "metadata").read_bytes())
    except (OSError, ValueError) as error:
        raise unreadable(checkpoint, one_line(error)) from error
    if not isinstance(record, dict) or record.pop("checksum", None) != _sum_of_json(record):
        raise unreadable(checkpoint, f"{_META}: its checksum is wrong")
    return record


def hand_over(checkpoint: AnyPath, settings: dict[str, Any]) -> None:
    """Let a copy of a checkpoint belong to a run of other settings."""
    record = read_record(checkpoint)
    record["identity"]["settings"] = settings
    record = {"checksum": _sum_of_json(record), **record}
    (checkpoint / _META / "metadata").write_text(json.dumps(record))


def not_finite(state: PyTree) -> str:
    """Return the path of an array that has a number that is not finite; "" if there is none.

    All processes call it, and get the same. Sharded arrays stay where they are.
    """
    leaves = _named_leaves(state)
    numbers = {name: x for name, x in leaves.items() if jnp.issubdtype(x.dtype, jnp.inexact)}
    mine = next((name for name, finite in _finite(numbers).items() if not finite), "")
    return next((name for name in hosts.gather(mine) if name), "")


@jax.jit
def _finite(arrays: dict[str, Any]) -> dict[str, Any]:
    """Return whether all numbers of each array are finite, in one program."""
    return {name: jnp.isfinite(array).all() for name, array in arrays.items()}


def _score(metrics: dict[str, float]) -> float:
    return metrics[_SCORE]


def _sums(leaves: dict[str, Any]) -> dict[str, int]:
    """Return the checksum of each array."""
    # NumPy arrays would travel to a device first.
    on_host = {name: x for name, x in leaves.items() if isinstance(x, np.ndarray)}
    on_devices = {name: x for name, x in leaves.items() if name not in on_host}
    sums = {name: host_fingerprint(x) for name, x in on_host.items()}
    return sums | {name: int(x) for name, x in array_fingerprints(on_devices).items()}


def _sum_of_json(record: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


def _named_leaves(tree: PyTree) -> dict[str, Any]:
    """Return the leaves by path, such as "model.layers.0.kernel".

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
    """Return type and shape as text: "float32[2,3]"."""
    if not hasattr(leaf, "dtype"):
        return type(leaf).__name__
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def _target(leaf: Any) -> Any:
    """Return a leaf as Orbax expects it: NumPy unchanged, others abstract with a sharding."""
    if isinstance(leaf, np.ndarray):
        return leaf
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _wait_for_others(*, key: str, timeout_ms: int) -> None:
    """Wait at a barrier of Orbax, unless the save of this process has failed.

    Orbax calls it in a `finally` block, too. A process whose save failed would wait there for 20
    minutes, because the others wait for it at an earlier barrier.
    """
    if sys.exc_info()[0] is None:
        ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)
