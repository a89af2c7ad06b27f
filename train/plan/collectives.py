"""What a compiled program sends between devices: its collectives, with how often each of them runs.

Owns the reading of optimised HLO as text. A loop's trips come from the compiler's own note, else
from the constants that its counter starts at, grows by and is compared with: XLA writes two turns
of a ring into one trip, and counts by two. Refuses a loop that has collectives and neither, unless
the caller says how often it runs. Invariant: an asynchronous collective counts once, at its start.
"""

from __future__ import annotations

import dataclasses
import math
import re

BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "s16": 2,
    "u16": 2,
    "bf16": 2,
    "f16": 2,
    "s32": 4,
    "u32": 4,
    "f32": 4,
    "s64": 8,
    "u64": 8,
    "f64": 8,
}
KINDS = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
)

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{\s*$")
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)$")
_ARRAY = re.compile(r"\b(" + "|".join(BYTES) + r")\[([\d,]*)\]")
_CALLED = re.compile(
    r"\b(?:to_apply|calls|true_computation|false_computation|branch_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
_OPERANDS = re.compile(r"^(.*?)\)(?:,|$)")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program: so many bytes are `sent` by each device every time, `times` in all."""

    kind: str
    sent: float
    times: float


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    result: str
    operation: str
    rest: str
    root: bool

    @property
    def operands(self) -> list[str]:
        match = _OPERANDS.match(self.rest)
        return re.findall(r"%([\w.\-]+)", match[1] if match else "")

    @property
    def kind(self) -> str | None:
        """The collective that this is, or starts. One that is fused with products is written again in each of them, but for its start with
        the flags that say which part is done there."""
        if '"async_collective_fusion_config":{"flag' in self.rest:
            return None
        return next((kind for kind in KINDS if self.operation in (kind, f"{kind}-start")), None)

    @property
    def called(self) -> list[str]:
        """Computations that run once when this does."""
        if self.operation.endswith(("-done", "-update")):
            return []
        return [
            name.strip(" %")
            for group in _CALLED.findall(self.rest)
            for name in group.strip("{}").split(",")
            if name.strip()
        ]


def find_collectives(hlo: str, devices: int, turns: float | None = None) -> list[Collective]:
    """The collectives of an optimised HLO module for so many devices.

    `turns`: trips of the loops whose number the program does not say. ValueError where there are such with collectives, and it is None.
    """
    program = _Program(hlo)
    found: list[Collective] = []

    def walk(name: str, times: float) -> None:
        for line in program.computations.get(name, ()):
            if line.kind:
                found.append(Collective(line.kind, program.sent(line, devices), times))
            for called in line.called:
                walk(called, times)
            if line.operation == "while":
                body = re.search(r"body=%?([\w.\-]+)", line.rest)
                assert body is not None, line.rest
                trips = program.trips(line)
                trips = turns if trips is None else trips
                if trips is None and program.communicates(body[1]):
                    raise ValueError(
                        f"find_collectives: how often the loop {body[1]}, which has collectives, runs is not known; give `turns`"
                    )
                walk(body[1], times * (1 if trips is None else trips))

    walk(program.entry, 1.0)
    return found


def bytes_sent(collectives: list[Collective]) -> dict[str, float]:
    """Bytes that each device sends, by kind."""
    kinds = dict.fromkeys(c.kind for c in collectives)
    return {kind: sum(c.sent * c.times for c in collectives if c.kind == kind) for kind in kinds}


class _Program:
    """The computations of a module, by name, and its instructions, whose names are the module's own."""

    def __init__(self, hlo: str):
        self.computations: dict[str, list[_Instruction]] = {}
        self.entry, lines = "", []
        for text in hlo.splitlines():
            if header := _COMPUTATION.match(text):
                lines = self.computations[header[2]] = []
                self.entry = header[2] if header[1] else self.entry
            elif match := _INSTRUCTION.match(text):
                lines.append(_Instruction(match[2], match[3], match[4], match[5], bool(match[1])))
        self.lines = {line.name: line for part in self.computations.values() for line in part}

    def sent(self, line: _Instruction, devices: int) -> float:
        """Bytes that leave each device where no byte is sent that a ring could spare."""
        size = _group_size(line.rest, devices)
        share, given = (
            (size - 1) / size,
            sum(_size(self.lines[name].result) for name in line.operands if name in self.lines),
        )
        if line.kind == "all-gather":
            return given * (size - 1)
        if line.kind == "collective-permute":
            return given
        return given * share * (2 if line.kind == "all-reduce" else 1)

    def trips(self, loop: _Instruction) -> int | None:
        """How often a loop's body runs, or None where the program does not say.

        The counter is element `index` of the loop's state. It starts at `first` (0 where that is no
        constant: too many trips rather than too few), grows by `step`, and the loop goes on while
        it is below `end`.
        """
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.rest):
            return int(known[1])
        condition = re.search(r"condition=%?([\w.\-]+)", loop.rest)
        body = re.search(r"body=%?([\w.\-]+)", loop.rest)
        root = self._root(condition[1]) if condition else None
        if body is None or root is None:
            return None
        if root.operation != "compare" or "direction=LT" not in root.rest:
            return None
        counter, limit = (self.lines[name] for name in root.operands)
        index = self._element(counter)
        if index is None:
            return None
        end, step = self._constant(limit), self._step(body[1], index)
        if end is None or step is None or step < 1:
            return None
        state, first = self.lines.get(loop.operands[0]), None
        if state is not None and state.operation == "tuple":
            first = self._constant(self.lines[state.operands[index]])
        return max(0, math.ceil((end - (first or 0)) / step))

    def _step(self, body: str, index: int) -> int | None:
        """By how much a trip raises element `index` of the state: the constants that it adds."""
        state = self._root(body)
        if state is None or state.operation != "tuple":
            return None
        total = 0
        line = self._source(self.lines[state.operands[index]])
        while line.operation == "add":
            one, other = (self._source(self.lines[name]) for name in line.operands)
            if self._constant(one) is not None:
                one, other = other, one
            constant = self._constant(other)
            if constant is None:
                return None
            line, total = one, total + constant
        return total if self._element(line) == index else None

    def _root(self, name: str) -> _Instruction | None:
        return next((line for line in self.computations.get(name, ()) if line.root), None)

    def communicates(self, name: str) -> bool:
        """Whether a computation, or one that it calls, has a collective."""
        for line in self.computations.get(name, ()):
            inner = [*line.called, *re.findall(r"\bbody=%?([\w.\-]+)", line.rest)]
            if line.kind or any(self.communicates(called) for called in inner):
                return True
        return False

    def _element(self, line: _Instruction) -> int | None:
        """Which element of the state a line takes out of its computation's parameter."""
        if line.operation != "get-tuple-element":
            return None
        if self.lines[line.operands[0]].operation != "parameter":
            return None
        match = re.search(r"\bindex=(\d+)", line.rest)
        return int(match[1]) if match else None

    def _source(self, line: _Instruction) -> _Instruction:
        """What a line is a copy of."""
        while line.operation == "copy":
            line = self.lines[line.operands[0]]
        return line

    def _constant(self, line: _Instruction) -> int | None:
        line = self._source(line)
        match = re.match(r"(-?\d+)\)", line.rest) if line.operation == "constant" else None
        return int(match[1]) if match else None


def _group_size(text: str, devices: int) -> int:
    """Devices that take part together. Groups are written as lists, as [groups, size]<=..., or as axes of a mesh."""
    if match := re.search(r"replica_groups=\{\{([\d,]+)\}", text):
        return len(match[1].split(","))
    if match := re.search(r"replica_groups=\[\d+,(\d+)\]", text):
        return int(match[1])
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", text):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", match[1])}
        axes = re.findall(
            r"'(\w+)'(?::\(\d+\)(\d+))?", match[2]
        )  # 'axis', or 'axis':(before)size for a part of one
        return math.prod(int(part) if part else sizes[name] for name, part in axes)
    return devices


def _size(text: str) -> float:
    return float(
        sum(
            BYTES[kind] * math.prod(int(n) for n in shape.split(",") if n)
            for kind, shape in _ARRAY.findall(text)
        )
    )
