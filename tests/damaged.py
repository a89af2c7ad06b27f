"""Damaged versions of a file's content."""

from __future__ import annotations

from collections.abc import Iterator


def flipped(content: bytes, position: int, bit: int) -> bytes:
    """The content with one bit flipped."""
    changed = bytearray(content)
    changed[position] ^= 1 << bit
    return bytes(changed)


def damaged_versions(content: bytes) -> Iterator[bytes]:
    """The content with each of its bits flipped, and cut off after each of its bytes."""
    for position in range(len(content)):
        for bit in range(8):
            yield flipped(content, position, bit)
        yield content[:position]
