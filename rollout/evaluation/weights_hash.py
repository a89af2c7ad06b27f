"""The hash of a checkpoint. It depends on content alone, so a copied or moved one keeps it."""

from __future__ import annotations

import hashlib
import pathlib


def weights_hash(folder: pathlib.Path) -> str:
    """Hash the content of a checkpoint: its weights, their configuration and tokenizer.json."""
    total = hashlib.blake2b(digest_size=16)
    others = [folder / name for name in ("config.json", "tokenizer.json", "adapter_config.json")]
    for file in sorted([*folder.glob("*.safetensors"), *others]):
        if file.exists():
            with file.open("rb") as stream:
                content = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16))
            total.update(file.name.encode() + b"\0" + content.digest())
    return total.hexdigest()
