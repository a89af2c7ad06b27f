"""Downloads repositories from the Hugging Face hub, and says what to do where that fails."""

from __future__ import annotations

import dataclasses
import glob
import pathlib
import re
from collections.abc import Iterable, Sequence

import httpx2
import huggingface_hub
from huggingface_hub import constants, errors

from paravt_jax.processes.exit_codes import FAILED

_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_LOG_IN = "log in (hf auth login, or set HF_TOKEN)"
_UNAUTHORIZED = 401
_PATIENCE = 10.0  # seconds to wait for an answer
_FAILURES = (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, httpx2.HTTPError)


class HubRefusal(ConnectionError):
    """The hub does not give the files until the id, the token or HF_HUB_OFFLINE changes."""

    exit_code = FAILED


def is_hub_id(source: str) -> bool:
    """Whether a text has the form owner/name."""
    return _ID.fullmatch(source) is not None


def snapshot(id: str, patterns: Sequence[str], repo_type: str = "model") -> pathlib.Path:
    """Download the matching files of a repository, and return its folder in the hub's cache.

    A repeated call fetches only what is missing.

    Args:
        id: The repository, such as `Qwen/Qwen3-VL-8B-Instruct`.
        patterns: Patterns of file names, such as "*.json".
        repo_type: `model` or `dataset`.

    Raises:
        FileNotFoundError: The repository cannot be downloaded. The message names the remedy.
    """
    try:
        folder = huggingface_hub.snapshot_download(
            id, repo_type=repo_type, allow_patterns=list(patterns)
        )
    except _FAILURES as error:
        page = f"{constants.ENDPOINT}/{'datasets/' if repo_type == 'dataset' else ''}{id}"
        why = _why(error, page)
        raise FileNotFoundError(
            f"{id}: no such folder, and the download from the hub failed: {why}, or download it "
            "elsewhere and give its folder"
        ) from why
    return pathlib.Path(folder)


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
    except _FAILURES as error:
        page = f"{constants.ENDPOINT}/datasets/{id}"
        why = _why(error, page)
        raise type(why)(f"{id}: the download failed: {why}") from error


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
        page = f"{constants.ENDPOINT}/datasets/{id}"
        why = _why(error, page)
        missing = isinstance(error, errors.RepositoryNotFoundError)
        exception = FileNotFoundError if missing else type(why)
        raise exception(f"{id}: the hub does not list it: {why}") from error
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    return Listing(info.sha or "main", sizes)


def data_set_size(id: str) -> int:
    """Bytes of all files of a data set. Raises the errors of `data_set_files`."""
    return sum(data_set_files(id).sizes.values())


def _why(error: Exception, page: str) -> ConnectionError:
    """Why a download failed, and what to do. A `HubRefusal` if the same call would fail again."""
    # A gated repository counts as not found, too, so it goes first.
    if isinstance(error, errors.GatedRepoError):
        return HubRefusal(f"it is gated; accept its terms on {page} and {_LOG_IN}")
    if isinstance(error, errors.RepositoryNotFoundError):
        return HubRefusal(
            f"there is no {page}, or it is private; check the id, and {_LOG_IN} if it is private"
        )
    if isinstance(error, errors.HfHubHTTPError) and error.response.status_code == _UNAUTHORIZED:
        return HubRefusal(f"the hub does not accept your token; {_LOG_IN} again")
    if constants.HF_HUB_OFFLINE:
        return HubRefusal(
            "not all of it is in the cache, and HF_HUB_OFFLINE is set; check the id or unset it"
        )
    # The messages of the hub's client have several lines.
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    text = f"{reason}; check the network and repeat the command, which keeps complete files"
    return ConnectionError(text)
