"""Where a score comes from: the hash of the weights, the commit, library versions.

The hash depends on content alone, so a copied or moved checkpoint keeps it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import pathlib
import subprocess
from typing import Any

_CHUNK_BYTES = 1 << 22


def weights_hash(folder: pathlib.Path) -> str:
    """Hash the content of a checkpoint: its weights, their configuration and tokenizer.json."""
    total = hashlib.blake2b(digest_size=16)
    others = [folder / name for name in ("config.json", "tokenizer.json", "adapter_config.json")]
    for file in sorted([*folder.glob("*.safetensors"), *others]):
        if file.exists():
            total.update(file.name.encode() + b"\0" + _file_hash(file))
    return total.hexdigest()


def _file_hash(file: pathlib.Path) -> bytes:
    content = hashlib.blake2b(digest_size=16)
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            content.update(chunk)
    return content.digest()


def commit() -> str | None:
    """The commit of this code, followed by "+" if tracked files have changed since.

    None if the code is not in a git checkout.
    """
    here = pathlib.Path(__file__).parent

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(here), *args],
                capture_output=True,
                text=True,
                timeout=20,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    head = git("rev-parse", "HEAD")
    if not head:
        return None
    # Untracked files, such as the results of runs, are not part of the code.
    changed = git("status", "--porcelain", "--untracked-files=no")
    return head + "+" if changed else head


def versions() -> dict[str, Any]:
    """Versions of the libraries that affect answers."""
    return {name: importlib.metadata.version(name) for name in ("jax", "flax", "av", "tokenizers")}
