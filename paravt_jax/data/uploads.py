"""Writes a folder on a disk, or below an address such as gs://bucket/model or s3://bucket/model."""

from __future__ import annotations

import contextlib
import pathlib
import tempfile
from collections.abc import Iterator

from paravt_jax.data.frames import is_address, without_scheme
from paravt_jax.data.media_files import open_bucket

# Files that readers open first. They are written last, so a folder that has one is complete.
_LAST = ("config.json", "adapter_config.json")


@contextlib.contextmanager
def appearing_at(field: str, path: str) -> Iterator[pathlib.Path]:
    """The path of a local folder to create, which is at `path` when the block has ended.

    Below an address, files are copied from a temporary folder. Reads and writes that fail for a
    moment are repeated by the package for the address.

    Args:
        field: The setting that names it, for messages.
        path: A local folder, or an address.

    Raises:
        FileExistsError: There is something already.
        ModuleNotFoundError: The package for the address is missing.
    """
    if not is_address(path):
        target = pathlib.Path(without_scheme(path))
        if target.exists():
            raise FileExistsError(
                f"{field} {target}: exists; name a new folder, or remove this one first"
            )
        yield target
        return
    system, place = open_bucket(path)
    place = place.rstrip("/")
    if system.exists(place):
        raise FileExistsError(
            f"{field} {path}: exists; name a new folder, or remove this one first"
        )
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary) / "new"
        yield folder
        files = [file for file in folder.rglob("*") if file.is_file()]
        for file in sorted(files, key=lambda file: file.name in _LAST):
            system.put_file(str(file), f"{place}/{file.relative_to(folder).as_posix()}")
