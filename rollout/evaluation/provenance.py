"""Where a score comes from: hashes of the weights and questions, the commit, library versions.

Hashes depend on content alone, so a copied or moved checkpoint keeps its hash.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import pathlib
import subprocess
from collections.abc import Iterable
from typing import Any

from rollout.evaluation.benchmarks import Item

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


def questions_hash(items: Iterable[Item]) -> str:
    """Hash the questions with their options, answers, subtitles and the names of their videos."""
    total = hashlib.blake2b(digest_size=16)
    for item in items:
        q = item.question
        fields = [q.id, q.video, q.text, str(q.kind), q.answer, q.options, item.subtitles]
        if q.subtitles:
            fields.append([dataclasses.astuple(entry) for entry in q.subtitles])
        total.update(json.dumps(fields).encode())
    return total.hexdigest()


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
