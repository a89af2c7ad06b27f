"""Where a number comes from: the weights, the questions, the code.

Owns fingerprints. Invariant: equal bytes have equal fingerprints, wherever they lie.
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

_PIECE = 1 << 22  # bytes read at once


def weights_hash(folder: pathlib.Path) -> str:
    """A fingerprint of a checkpoint's weights, configuration and tokenizer, by content."""
    total = hashlib.blake2b(digest_size=16)
    for file in sorted(
        [*folder.glob("*.safetensors"), folder / "config.json", folder / "tokenizer.json"]
    ):
        if file.exists():
            total.update(file.name.encode() + b"\0" + _file_hash(file))
    return total.hexdigest()


def _file_hash(file: pathlib.Path) -> bytes:
    one = hashlib.blake2b(digest_size=16)
    with file.open("rb") as stream:
        while piece := stream.read(_PIECE):
            one.update(piece)
    return one.digest()


def questions_hash(items: Iterable[Item]) -> str:
    """A fingerprint of questions, options, answers and the names of their videos."""
    total = hashlib.blake2b(digest_size=16)
    for item in items:
        q = item.question
        fields = [q.id, q.video, q.text, str(q.kind), q.answer, q.options, item.subtitles]
        if q.subtitles:
            fields.append([dataclasses.astuple(entry) for entry in q.subtitles])
        total.update(json.dumps(fields).encode())
    return total.hexdigest()


def commit() -> str | None:
    """The commit of this code, with "+" where files were changed since; None where it is no git checkout."""
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
    return head and head + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def versions() -> dict[str, Any]:
    return {name: importlib.metadata.version(name) for name in ("jax", "flax", "av", "tokenizers")}
