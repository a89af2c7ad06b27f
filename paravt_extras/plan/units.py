"""Figures with units that stay readable from a tiny model to a large one."""

from __future__ import annotations

MIB = 2.0**20
GIB = 2.0**30

_PREFIXES = (
    ("P", 1e15),
    ("T", 1e12),
    ("G", 1e9),
    ("M", 1e6),
    ("k", 1e3),
    ("", 1.0),
    ("m", 1e-3),
    ("µ", 1e-6),
)


def si(value: float, unit: str) -> str:
    """A figure with the largest prefix that leaves at least 1 before the point: "4.03 PFLOP"."""
    for prefix, size in _PREFIXES:
        if value >= size:
            return f"{value / size:.2f} {prefix}{unit}"
    return f"0 {unit}"


def duration(seconds: float) -> str:
    """Seconds: "12.34 s", "3.21 ms"."""
    return f"{seconds:.2f} s" if seconds >= 1 else si(seconds, "s")


def memory(size: float) -> str:
    """Bytes: "13.99 GiB", "12.3 MiB"."""
    return f"{size / GIB:.2f} GiB" if size >= 0.1 * GIB else f"{size / MIB:.1f} MiB"


def counted(number: int, noun: str) -> str:
    """A number with its noun: "1 chip", "16 chips"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
