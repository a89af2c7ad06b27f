"""Counts the collectives of a compiled program, and the bytes that each device sends, from its HLO.

A collective inside a loop is written once but runs once per iteration (`tests.hlo`).

A program for several TPU slices is compiled for the devices of one. What leaves a slice goes over
the data centre's network (DCN): the compiler writes it as a transfer to the host, `send`, and the
runtime of libtpu does the rest.
"""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np

from tests.hlo import Instruction, Module, array_bytes

KINDS = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
)
DCN = "DCN"
"""The kind of a transfer to other slices in a program for several TPU slices."""
_SLICES_RUNTIME = '_xla_host_transfer_handler_name="xla_megascale_runtime"'


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program."""

    kind: str
    """One of `KINDS`, or `DCN`."""
    sent: float
    """Bytes that each device sends per execution."""
    times: float
    """Number of executions."""
    between: bool = False
    """Whether it connects devices of different slices."""


def find_collectives(
    hlo: str, devices: int, trip_count: float | None = None, slices: int = 1
) -> list[Collective]:
    """Finds the collectives of a compiled program.

    Args:
        hlo: text of the optimised HLO module.
        devices: number of devices it was compiled for.
        trip_count: iterations of loops whose number the program does not state.
        slices: number of slices, of consecutive devices, in a program for all of them.

    Raises:
        ValueError: such a loop contains collectives, and `trip_count` is None.
    """
    module = Module(hlo)
    found: list[Collective] = []

    def walk(computation: str, times: float) -> None:
        for line in module.computations.get(computation, ()):
            kind = _kind(line)
            if kind:
                between = kind == DCN or (
                    slices > 1 and _leaves_a_slice(line.rest, devices, devices // slices)
                )
                found.append(Collective(kind, _sent(module, line, devices), times, between))
            for called in line.called:
                walk(called, times)
            if line.operation == "while":
                body = re.search(r"body=%?([\w.\-]+)", line.rest)
                assert body is not None, line.rest
                trips = module.trip_count(line)
                if trips is None:
                    trips = trip_count
                if trips is None:
                    if _communicates(module, body[1]):
                        raise ValueError(
                            f"find_collectives: the loop {body[1]} has collectives and an unknown "
                            "number of iterations; give `trip_count`"
                        )
                    trips = 1
                walk(body[1], times * trips)

    walk(module.entry, 1.0)
    return found


def bytes_sent(collectives: list[Collective]) -> dict[str, float]:
    """Bytes that each device sends, by kind of collective."""
    sent: dict[str, float] = {}
    for collective in collectives:
        total = sent.get(collective.kind, 0)
        sent[collective.kind] = total + collective.sent * collective.times
    return sent


def _kind(line: Instruction) -> str | None:
    """The kind of collective that an instruction is or starts, or None."""
    # A collective fused with matrix products is written again in each of them. The copies have
    # flags for the part they execute; only the one without flags is counted.
    if '"async_collective_fusion_config":{"flag' in line.rest:
        return None
    if line.operation == "send" and _SLICES_RUNTIME in line.rest:
        return DCN
    # An asynchronous collective is a pair, -start and -done; it counts at its start.
    for kind in KINDS:
        if line.operation in (kind, f"{kind}-start"):
            return kind
    return None


def _sent(module: Module, line: Instruction, devices: int) -> float:
    """Bytes that each device sends in one execution of a collective, by the ring algorithm.

    With n devices and an operand of B bytes per device:

        all-gather                   (n - 1) B         passes n - 1 shards on
        reduce-scatter, all-to-all   (n - 1) / n B     keeps one of n parts
        all-reduce                   2 (n - 1) / n B   reduce-scatter, then all-gather
        collective-permute           B
        DCN                          B                 hands its part to the host
    """
    kind = _kind(line)
    if kind == DCN:
        # The other operand is a token.
        return array_bytes(module.instructions[line.operands[0]].result)
    n = _group_size(line.rest, devices)
    operands = [module.instructions[name] for name in line.operands if name in module.instructions]
    given = sum(array_bytes(operand.result) for operand in operands)
    if kind == "all-gather":
        return given * (n - 1)
    if kind == "collective-permute":
        return given
    share = (n - 1) / n
    return given * share * (2 if kind == "all-reduce" else 1)


def _communicates(module: Module, computation: str) -> bool:
    """Whether a computation, or one that it calls, contains a collective."""
    for line in module.computations.get(computation, ()):
        inner = [*line.called, *re.findall(r"\bbody=%?([\w.\-]+)", line.rest)]
        if _kind(line) or any(_communicates(module, called) for called in inner):
            return True
    return False


def _leaves_a_slice(text: str, devices: int, per_slice: int) -> bool:
    """Whether a collective connects devices of different slices."""
    return any(
        len({device // per_slice for device in group}) > 1 for group in _groups(text, devices)
    )


def _group_size(text: str, devices: int) -> int:
    """Number of devices in each group of a collective."""
    return len(_groups(text, devices)[0])


def _groups(text: str, devices: int) -> list[list[int]]:
    """The devices of each group of a collective. HLO writes them in four ways."""
    # replica_groups={{0,1},{2,3}}, and source_target_pairs of a collective-permute
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]+\})\}", text)
    if listed:
        return [
            [int(n) for n in group.split(",")] for group in re.findall(r"{([\d,]+)}", listed[1])
        ]
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
