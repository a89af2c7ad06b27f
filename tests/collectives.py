"""Counts the collectives of a compiled program, and the bytes that each device sends, from its HLO.

A collective inside a loop is written once but runs once per iteration. The compiler notes the
number of iterations beside the loop.
"""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np

KINDS = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
)
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s32": 4, "u32": 4, "bf16": 2, "f32": 4, "s64": 8, "u64": 8}
# "ENTRY %main (a: f32[4]) -> f32[4] {"
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{\s*$")
# "  ROOT %sum = f32[4]{0} add(%a, %b), metadata={...}"
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)$")
# "f32[2,3]", also inside a tuple type
_ARRAY = re.compile(r"\b(" + "|".join(_BYTES) + r")\[([\d,]*)\]")
# "to_apply=%add", "branch_computations={%one, %two}"
_CALLED = re.compile(
    r"\b(?:to_apply|calls|body|true_computation|false_computation|branch_computations)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program."""

    kind: str
    """One of `KINDS`."""
    sent: float
    """Bytes that each device sends per execution."""
    times: int
    """Number of executions."""
    between: bool = False
    """Whether it connects devices of different slices."""


def find_collectives(hlo: str, devices: int, slices: int = 1) -> list[Collective]:
    """Find the collectives of a compiled program.

    Args:
        hlo: text of the optimised HLO module.
        devices: number of devices it was compiled for.
        slices: number of slices, of consecutive devices.
    """
    computations: dict[str, list[re.Match[str]]] = {}
    current: list[re.Match[str]] = []
    entry, results = "", {}
    for text in hlo.splitlines():
        if header := _COMPUTATION.match(text):
            current = computations[header[2]] = []
            entry = header[2] if header[1] else entry
        elif line := _INSTRUCTION.match(text):
            current.append(line)
            results[line[1]] = line[2]
    found: list[Collective] = []

    def walk(computation: str, times: int) -> None:
        for line in computations.get(computation, ()):
            _, _, operation, rest = line.groups()
            kind = operation.removesuffix("-start")
            if kind in KINDS:
                groups = _groups(rest, devices)
                operands = re.findall(r"%([\w.\-]+)", rest.partition(")")[0])
                given = sum(_array_bytes(results[name]) for name in operands)
                between = any(len({n * slices // devices for n in group}) > 1 for group in groups)
                found.append(Collective(kind, _sent(kind, given, len(groups[0])), times, between))
            if operation.endswith(("-done", "-update")):  # these repeat the names of -start
                continue
            inner = re.findall(r"[\w.\-]+", " ".join(_CALLED.findall(rest)))
            before, iterations = len(found), 1
            if operation == "while":
                known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', rest)
                iterations = int(known[1]) if known else 0
            for called in inner:
                walk(called, times * iterations)
            assert iterations or len(found) == before, f"how often runs {line[1]}?"

    walk(entry, 1)
    return found


def bytes_sent(collectives: list[Collective]) -> float:
    """Return the bytes that each device sends."""
    return sum(collective.sent * collective.times for collective in collectives)


def _array_bytes(result: str) -> int:
    """Return the bytes of an array type, or of all arrays in a tuple type."""
    return sum(
        _BYTES[element] * math.prod(int(size) for size in shape.split(",") if size)
        for element, shape in _ARRAY.findall(result)
    )


def _sent(kind: str, given: float, n: int) -> float:
    """Return the bytes that each of n devices sends, with operands of `given` bytes per device.

    By the ring algorithm:

        all-gather                   (n - 1) B         passes n - 1 shards on
        reduce-scatter, all-to-all   (n - 1) / n B     keeps one of n parts
        all-reduce                   2 (n - 1) / n B   reduce-scatter, then all-gather
        collective-permute           B
    """
    if kind == "all-gather":
        return given * (n - 1)
    if kind == "collective-permute":
        return given
    return given * (n - 1) / n * (2 if kind == "all-reduce" else 1)


def _groups(text: str, devices: int) -> list[list[int]]:
    """Return the devices of each group of a collective. HLO writes them in four ways."""
    # replica_groups={{0,1},{2,3}}, and source_target_pairs of a collective-permute
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]+\})\}", text)
    if listed:
        return [_ints(group) for group in re.findall(r"{([\d,]+)}", listed[1])]
    # replica_groups=[groups,size]<=[devices], or <=[2,4]T(1,0): transposed
    counted = re.search(r"replica_groups=\[\d+,(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if counted:
        numbers = np.arange(math.prod(_ints(counted[2]))).reshape(_ints(counted[2]))
        if counted[3]:
            numbers = numbers.transpose(_ints(counted[3]))
        return numbers.reshape(-1, int(counted[1])).tolist()
    # replica_groups=mesh['x'=2,'y'=4] {'y':(1)2}: the named axes, or (before)size for part of one
    by_axes = re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", text)
    if by_axes:
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", by_axes[1])}
        named = {}
        for name, before, size in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", by_axes[2]):
            named[name] = (int(before), int(size)) if size else (1, sizes[name])
        # Each axis as (before, part, after); the parts of named axes form a group.
        shape: list[int] = []
        inner = []
        for name, size in sizes.items():
            before, part = named.get(name, (1, 1))
            inner.append(len(shape) + 1)
            shape += [before, part, size // (before * part)]
        outer = [axis for axis in range(len(shape)) if axis not in inner]
        numbers = np.arange(math.prod(shape)).reshape(shape).transpose(*outer, *inner)
        members = math.prod(shape[axis] for axis in inner)
        return numbers.reshape(-1, members).tolist()
    return [list(range(devices))]


def _ints(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]
