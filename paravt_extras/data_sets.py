"""Lists and downloads files of data sets on the Hugging Face hub."""

from __future__ import annotations

import dataclasses
import glob
import pathlib
from collections.abc import Iterable

import httpx2
import huggingface_hub
from huggingface_hub import errors

from paravt_jax.data import hub

_PATIENCE = 10.0  # seconds to wait for an answer


@dataclasses.dataclass(frozen=True)
class Listing:
    """The files of a data set."""

    revision: str
    sizes: dict[str, int]
    """Bytes by path."""


def data_set_files(id: str) -> Listing:
    """The files of a data set, as the hub lists them.

    Raises:
        FileNotFoundError: There is no such data set.
        ConnectionError: The hub does not tell. The message says why.
    """
    try:
        info = huggingface_hub.HfApi().dataset_info(id, files_metadata=True, timeout=_PATIENCE)
    except (errors.HfHubHTTPError, errors.OfflineModeIsEnabled, httpx2.HTTPError) as error:
        why = hub.reason(error, id, "dataset")
        missing = isinstance(error, errors.RepositoryNotFoundError)
        exception = FileNotFoundError if missing else type(why)
        raise exception(f"{id}: the hub does not list it: {why}") from error
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    return Listing(info.sha or "main", sizes)


def download(id: str, revision: str, names: Iterable[str], folder: pathlib.Path) -> None:
    """Download files of a data set into a folder, under their own paths.

    A repeated call fetches only what is missing, and continues files that were broken off.

    Args:
        id: The data set, such as `lmms-lab/Video-MME`.
        revision: Its revision, from `data_set_files`.
        names: Paths of the files in the data set.
        folder: Where to put them.

    Raises:
        ConnectionError: They cannot be downloaded. The message names the remedy.
    """
    patterns = [glob.escape(name) for name in names]
    if not patterns:
        return
    try:
        huggingface_hub.snapshot_download(
            id,
            repo_type="dataset",
            revision=revision,
            allow_patterns=patterns,
            local_dir=folder,
        )
    except hub.FAILURES as error:
        why = hub.reason(error, id, "dataset")
        raise type(why)(f"{id}: the download failed: {why}") from error
