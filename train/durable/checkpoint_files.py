"""The checksums of a checkpoint's files, and what happens to damaged checkpoints.

On a disk, sums.json holds sums that were read back. In a bucket, it holds those that the store
computed when it received the objects, so saving reads nothing back.
"""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Callable

from paravt_jax.data.any_path import AnyPath, is_bucket
from paravt_jax.data.file_sums import SUMS, find_damage, read_sums, write_sums
from paravt_jax.data.stored_json import parse_json
from train.durable.bucket import Bucket

COMMITTED = "commit_success.txt"
"""The last object that Orbax writes into a checkpoint in a bucket, which is then complete."""


def write_checkpoint_sums(folder: AnyPath, step: int) -> None:
    """Write the sums of a checkpoint that is written, but not complete."""
    if is_bucket(folder):
        bucket = Bucket(folder / str(step))
        bucket.write(SUMS, json.dumps(_stored_sums(bucket)))
        return
    (unfinished,) = pathlib.Path(folder).glob(f"{step}.orbax-checkpoint-tmp*")
    write_sums(unfinished, [file for file in unfinished.glob("*/**/*") if file.is_file()])


def checkpoint_damage(
    folder: AnyPath, step: int, wanted: Callable[[list[str]], list[str]]
) -> list[str]:
    """Return what is wrong with files of a checkpoint.

    Args:
        folder: Holds checkpoints.
        step: The number of one of them.
        wanted: Chooses the files to read from their sorted names.

    Raises:
        DamagedFileError: A file is damaged.
        OSError: A file is missing, or cannot be read.
    """
    checkpoint = folder / str(step)
    if not is_bucket(folder):
        sums = read_sums(pathlib.Path(checkpoint))
        if sums is None:
            return [f"{SUMS}: missing"]
        return find_damage(pathlib.Path(checkpoint), sums, wanted(sorted(sums)))
    bucket = Bucket(checkpoint)
    remedy = "the files beside it cannot be verified"
    stored = parse_json(bucket.read(SUMS), f"{checkpoint}/{SUMS}", dict[str, str], remedy)
    found = _stored_sums(bucket)
    names = wanted(sorted(stored))
    damage = [
        f"{name}: {found.get(name, 'missing')} instead of {stored[name]}"
        for name in names
        if found.get(name) != stored[name]
    ]
    if not damage:
        bucket.verify(names)
    return damage


def _stored_sums(bucket: Bucket) -> dict[str, str]:
    """Return length and checksum of each object of a checkpoint, as the store lists them."""
    # Orbax still writes into the checkpoint's own folder, and needs nothing of it to restore.
    return {
        name: f"{blob.size} bytes with checksum {blob.crc32c}"
        for name, blob in bucket.list().items()
        if "/" in name
    }


def set_aside(folder: AnyPath, step: int) -> None:
    """Rename a damaged checkpoint, or make it unfinished in a bucket, which has no rename."""
    if is_bucket(folder):
        Bucket(folder / str(step)).delete([COMMITTED])
        return
    aside = pathlib.Path(folder) / f"{step}.damaged"
    shutil.rmtree(aside, ignore_errors=True)
    (pathlib.Path(folder) / str(step)).rename(aside)
