"""Downloads repositories from the Hugging Face hub, and says what to do where that fails."""

from __future__ import annotations

import contextlib
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import httpx2
import huggingface_hub
from huggingface_hub import constants, errors

from paravt_jax.processes.exit_codes import FAILED

_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_LOG_IN = "log in (hf auth login, or set HF_TOKEN)"
_UNAUTHORIZED = 401
# What the client raises where a download fails.
_FAILURES = (
    errors.HfHubHTTPError,
    errors.LocalEntryNotFoundError,
    errors.OfflineModeIsEnabled,
    httpx2.HTTPError,
)


class HubRefusal(ConnectionError):
    """The hub does not give the files until the id, the token or HF_HUB_OFFLINE changes."""

    exit_code = FAILED


def is_hub_id(source: str) -> bool:
    """Return whether a text has the form owner/name."""
    return _ID.fullmatch(source) is not None


def snapshot(
    id: str,
    patterns: Sequence[str],
    repo_type: str = "model",
    folder: pathlib.Path | None = None,
) -> pathlib.Path:
    """Download the matching files of a repository, and return their folder.

    A repeated call fetches only what is missing.

    Args:
        id: The repository, such as `Qwen/Qwen3-VL-8B-Instruct`.
        patterns: Patterns of file names, such as "*.json".
        repo_type: `model` or `dataset`.
        folder: Where to put the files; None: the hub's cache.

    Raises:
        FileNotFoundError: The repository cannot be downloaded. The message names the remedy.
    """
    with _named_failures(id, repo_type):
        return pathlib.Path(
            huggingface_hub.snapshot_download(
                id, repo_type=repo_type, allow_patterns=list(patterns), local_dir=folder
            )
        )


def list_files(id: str, repo_type: str = "model") -> list[str]:
    """Return the names of the files of a repository; raises like `snapshot`."""
    with _named_failures(id, repo_type):
        info: Any = huggingface_hub.HfApi().repo_info(id, repo_type=repo_type)
    return [file.rfilename for file in info.siblings or ()]


@contextlib.contextmanager
def _named_failures(id: str, repo_type: str) -> Iterator[None]:
    """Turn what the client raises into an error that names the repository and the remedy."""
    try:
        yield
    except _FAILURES as error:
        page = f"{constants.ENDPOINT}/{'datasets/' if repo_type == 'dataset' else ''}{id}"
        # A gated repository counts as not found, too, so it goes first.
        if isinstance(error, errors.GatedRepoError):
            why = HubRefusal(f"it is gated; accept its terms on {page} and {_LOG_IN}")
        elif isinstance(error, errors.RepositoryNotFoundError):
            why = HubRefusal(
                f"there is no {page}, or it is private; check the id, and {_LOG_IN} if it is so"
            )
        elif isinstance(error, errors.HfHubHTTPError) and (
            error.response.status_code == _UNAUTHORIZED
        ):
            why = HubRefusal(f"the hub does not accept your token; {_LOG_IN} again")
        elif constants.HF_HUB_OFFLINE:
            why = HubRefusal("it is not in the cache, and HF_HUB_OFFLINE is set; unset it")
        else:
            # The messages of the hub's client have several lines.
            text = " ".join(f"{type(error).__name__}: {error}".split())
            why = ConnectionError(f"{text}; check the network and repeat the command")
        raise FileNotFoundError(
            f"{id}: no such folder, and the download from the hub failed: {why}, or download it "
            "elsewhere and give its folder"
        ) from why
