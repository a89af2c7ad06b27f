"""The hash of a checkpoint. It depends on content alone, so a copied or moved one keeps it."""

from __future__ import annotations

import hashlib
import pathlib

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
