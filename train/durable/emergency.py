"""Emergency saves: copies of a phase's state on the hosts themselves.

    FOLDER/PROCESS/12/arrays, record.json, sums.json

They serve a restart after a process died and its host survived: a file in memory (/dev/shm) or on a
local disk is written much faster than a checkpoint. Each process writes the shards on its own
devices, so a copy can be restored by the same number of processes on the same mesh only. Orbax's
emergency checkpoints need two replicas of the state, which a single slice does not have.

A copy is used if it is newer than the last checkpoint, sound, of the same history as metrics.jsonl,
and if every process has it.
"""

from __future__ import annotations

import json
import pathlib
import shutil
import time
from collections.abc import Iterator, Mapping
from typing import Any, TypedDict, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from paravt_jax.data.atomic import appearing
from paravt_jax.data.file_sums import find_damage, read_sums, write_sums
from paravt_jax.data.stored_json import DamagedFileError, read_json
from paravt_jax.data.stored_settings import as_json
from paravt_jax.processes import hosts
from train.durable.step_lines import say

T = TypeVar("T")

SHARE = 0.05
"""Largest share of the time that emergency saves take."""

_ARRAYS = "arrays"
_RECORD = "record.json"
_REMEDY = "delete it; the run goes on from its last checkpoint"
# A process may die before it has written the step that the others have.
_KEEP = 2

# Start and stop along each axis.
_Place = tuple[tuple[int, int], ...]


class _Shard(TypedDict):
    leaf: str
    place: list[list[int]]


class _Record(TypedDict):
    identity: dict[str, Any]
    wall: float
    meta: dict[str, Any]
    shards: list[_Shard]


class EmergencySaves:
    """The emergency saves of one phase. All processes call the same methods in the same order.

    Args:
        folder: On a disk, or in memory, of this host.
        identity: Settings, data and mesh that a copy belongs to; any JSON value.
    """

    def __init__(self, folder: pathlib.Path, identity: dict[str, Any]):
        self._folder = folder / str(hosts.process_index())
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"checkpoints.emergency: {folder} cannot be used ({error.strerror}); give a folder "
                "that every host can write, such as /dev/shm, or leave it empty"
            ) from error
        self._identity = as_json(identity | {"processes": hosts.process_count()}, "identity")
        # When the next save keeps within `SHARE`, in seconds of time.monotonic.
        self._next = 0.0

    def due(self) -> bool:
        """Whether all processes have worked long enough since the last save to pay for another."""
        return all(hosts.gather(time.monotonic() >= self._next))

    def save(self, step: int, state: Any, meta: dict[str, Any], wall: float) -> None:
        """Write a copy; the oldest ones are removed. If it fails, a line says so, once.

        Args:
            step: The step after which `state` was.
            state: Tree of jax and NumPy arrays.
            meta: Anything JSON can hold.
            wall: The time of the step in metrics.jsonl.
        """
        start = time.monotonic()
        try:
            for old in sorted(self._steps())[: 1 - _KEEP]:
                shutil.rmtree(self._folder / str(old))
            with appearing(self._folder / str(step)) as unfinished:
                self._write(unfinished, state, meta, wall)
        except OSError as error:
            say(
                f"warning: no emergency saves in {self._folder} ({error}): make room; checkpoints "
                "are saved as usual"
            )
            self._next = float("inf")
            return
        end = time.monotonic()
        self._next = end + (end - start) * (1 / SHARE - 1)

    def newest(self, walls: Mapping[int, float]) -> int:
        """The newest step of which all processes have a sound copy; 0 if there is none.

        Copies that cannot be used are removed.

        Args:
            walls: The times of the steps after the last checkpoint, from metrics.jsonl. Copies of
                other steps, or of steps at other times, belong to another history of the run.
        """
        mine = []
        for step in self._steps():
            if self._usable(step, walls.get(step)):
                mine.append(step)
            else:
                shutil.rmtree(self._folder / str(step))
        common = set.intersection(*map(set, hosts.gather(mine)))
        newest = max(common, default=0)
        # This process may have saved a step that another one, which died, has not. The run repeats
        # that step, and saves it again.
        for step in mine:
            if step > newest:
                shutil.rmtree(self._folder / str(step))
        return newest

    def restore(self, template: T, step: int) -> tuple[T, dict[str, Any]]:
        """Read a copy that `newest` named.

        Args:
            template: Tree of arrays or `jax.ShapeDtypeStruct`s with the shapes, types and
                shardings of the saved state.
            step: Its number.

        Returns:
            (state, meta).
        """
        folder = self._folder / str(step)
        record = read_json(folder / _RECORD, _Record, _REMEDY)
        found: dict[tuple[str, _Place], np.ndarray] = {}
        leaves = {name: leaf for name, leaf in _leaves(template)}
        with (folder / _ARRAYS).open("rb") as file:
            for shard in record["shards"]:
                place = tuple((start, stop) for start, stop in shard["place"])
                dtype = jnp.dtype(leaves[shard["leaf"]].dtype)
                shape = tuple(stop - start for start, stop in place)
                data = file.read(dtype.itemsize * int(np.prod(shape)))
                found[shard["leaf"], place] = np.frombuffer(data, dtype).reshape(shape)
        restored = [_placed(name, leaf, found) for name, leaf in leaves.items()]
        return jax.tree.unflatten(jax.tree.structure(template), restored), record["meta"]

    def remove(self) -> None:
        """Remove all copies, because a checkpoint holds the end of the phase."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self, folder: pathlib.Path, state: Any, meta: dict[str, Any], wall: float) -> None:
        shards: list[_Shard] = []
        with (folder / _ARRAYS).open("wb") as file:
            for name, leaf in _leaves(state):
                for place, data in _distinct_shards(leaf):
                    # One shard after another, so that the host needs no second copy of all.
                    flat = np.ascontiguousarray(data).reshape(-1)
                    file.write(flat.view(np.uint8).data)
                    shards.append({"leaf": name, "place": [list(axis) for axis in place]})
        record: _Record = {
            "identity": self._identity,
            "wall": wall,
            "meta": meta,
            "shards": shards,
        }
        (folder / _RECORD).write_text(json.dumps(record), encoding="utf-8")
        write_sums(folder, [folder / _ARRAYS, folder / _RECORD])

    def _steps(self) -> list[int]:
        return [int(path.name) for path in self._folder.glob("*") if path.name.isdigit()]

    def _usable(self, step: int, wall: float | None) -> bool:
        """Whether a copy is sound and belongs to this run; a damaged one is named."""
        if wall is None:
            return False
        folder = self._folder / str(step)
        try:
            sums = read_sums(folder)
            damage = find_damage(folder, sums) if sums else ["its sums are missing"]
            if damage:
                raise DamagedFileError(f"{folder}: {damage[0]}")
            record = read_json(folder / _RECORD, _Record, _REMEDY)
        except (DamagedFileError, OSError) as error:
            say(f"warning: an emergency save is not used: {error}")
            return False
        return record["identity"] == self._identity and record["wall"] == wall


def _leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of a tree with their paths."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        yield jax.tree_util.keystr(path, simple=True, separator="."), leaf


def _place(index: tuple[slice, ...], shape: tuple[int, ...]) -> _Place:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _distinct_shards(leaf: jax.Array | np.ndarray) -> Iterator[tuple[_Place, np.ndarray]]:
    """The shards on this process's devices, each once. A NumPy array is one shard."""
    if isinstance(leaf, np.ndarray):
        yield _whole(leaf.shape), leaf
        return
    shards = {_place(shard.index, leaf.shape): shard for shard in leaf.addressable_shards}
    for place, shard in shards.items():
        yield place, np.asarray(shard.data)


def _whole(shape: tuple[int, ...]) -> _Place:
    return tuple((0, size) for size in shape)


def _placed(
    name: str, leaf: Any, found: Mapping[tuple[str, _Place], np.ndarray]
) -> jax.Array | np.ndarray:
    """An array like `leaf`, from the shards on this process's devices."""
    if isinstance(leaf, np.ndarray):
        return found[name, _whole(leaf.shape)]
    indices = leaf.sharding.addressable_devices_indices_map(leaf.shape)
    parts = [
        jax.device_put(found[name, _place(index, leaf.shape)], device)
        for device, index in indices.items()
    ]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)
