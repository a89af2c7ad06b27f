"""Writes a folder on a disk, or below an address such as gs://bucket/model or s3://bucket/model."""

from __future__ import annotations

import contextlib
import pathlib
import tempfile
import uuid
from collections.abc import Iterator

from paravt_jax.data.frames import is_address, without_scheme
from paravt_jax.data.media_files import open_bucket
from paravt_jax.data.remote_files import failure, one_line

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
        FileNotFoundError: fsspec does not know the scheme, or there is no such bucket.
        ModuleNotFoundError: The package for the address is missing.
        ConnectionError: The bucket does not answer, or a file has another size there.
    """
    if not is_address(path):
        target = pathlib.Path(without_scheme(path))
        if target.exists():
            raise FileExistsError(
                f"{field} {target}: exists; name a new folder, or remove this one first"
            )
        yield target
        return
    _require_new_folder(field, path)
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary) / "new"
        yield folder
        _upload(folder, path)


def _require_new_folder(field: str, address: str) -> None:
    """Refuse an address to which a new folder cannot be written, before work begins."""
    system, top = open_bucket(address)
    probe = f"{top.rstrip('/')}/.probe-{uuid.uuid4().hex}"
    # Broad because every file system raises errors of its own kinds.
    try:
        present = system.exists(top)
        if not present:
            system.pipe_file(probe, b"probe")
            system.rm_file(probe)
    except Exception as error:
        raise failure(error)(
            f"{field}: {address}: cannot be written to ({one_line(error)}); check the bucket and "
            "the credentials"
        ) from error
    if present:
        raise FileExistsError(
            f"{field} {address}: exists; name a new folder, or remove this one first"
        )


def _upload(folder: pathlib.Path, address: str) -> None:
    system, top = open_bucket(address)
    files = [file for file in folder.rglob("*") if file.is_file()]
    for file in sorted(files, key=lambda file: (file.name in _LAST, file)):
        name = file.relative_to(folder).as_posix()
        target = f"{top.rstrip('/')}/{name}"
        try:
            system.put_file(str(file), target)
            system.invalidate_cache()
            size = system.info(target)["size"]
        except Exception as error:
            raise ConnectionError(
                f"{address}: {name} cannot be uploaded ({one_line(error)}); check the network, "
                "remove what is there, and repeat the command"
            ) from error
        if size != file.stat().st_size:
            raise ConnectionError(f"{address}: {name} has {size} bytes there, which is wrong")
