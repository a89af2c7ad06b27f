"""Counts the collectives of a compiled program, and the bytes that each device sends, from its HLO.

It reads the text of optimised HLO, where a collective inside a loop is written once but runs once
per iteration. The trip count of a loop comes from the compiler's own note or, without one, from the
loop counter's constants:

    %condition   counter < limit                  limit: a constant
    %body        counter + step                   step: the sum of the constants it adds
    %while       the counter's initial value      a constant, else taken as 0

The step may be 2: XLA writes two steps of a ring collective into one iteration.
"""

from __future__ import annotations

import dataclasses
import math
import re

# Bytes per element of each HLO type.
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

# "ENTRY %main (a: f32[4]) -> f32[4] {"
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{\s*$")
# "  ROOT %sum = f32[4]{0} add(%a, %b), metadata={...}"
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)$")
# "f32[2,3]", also inside a tuple type
_ARRAY = re.compile(r"\b(" + "|".join(BYTES) + r")\[([\d,]*)\]")
# "to_apply=%add", "branch_computations={%one, %two}"
_CALLED = re.compile(
    r"\b(?:to_apply|calls|true_computation|false_computation|branch_computations)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
# Everything up to the parenthesis that closes the operands.
_OPERANDS = re.compile(r"^(.*?)\)(?:,|$)")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program."""

    kind: str
    """One of `KINDS`."""
    sent: float
    """Bytes that each device sends per execution."""
    times: float
    """Number of executions."""


@dataclasses.dataclass(frozen=True)
class _Instruction:
    """One line of HLO: `name = result operation(rest`."""

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
        """The kind of collective that this instruction is or starts, or None."""
        # A collective fused with matrix products is written again in each of them. The copies have
        # flags for the part they execute; only the one without flags is counted.
        if '"async_collective_fusion_config":{"flag' in self.rest:
            return None
        # An asynchronous collective is a pair, -start and -done; it counts at its start.
        for kind in KINDS:
            if self.operation in (kind, f"{kind}-start"):
                return kind
        return None

    @property
    def called(self) -> list[str]:
        """Names of the computations that this instruction executes once."""
        # Calls are counted at -start; -update and -done repeat the name.
        if self.operation.endswith(("-done", "-update")):
            return []
        names = []
        for group in _CALLED.findall(self.rest):
            names += [name.strip(" %") for name in group.strip("{}").split(",")]
        return [name for name in names if name]


def find_collectives(hlo: str, devices: int, trip_count: float | None = None) -> list[Collective]:
    """Finds the collectives of a compiled program.

    Args:
        hlo: text of the optimised HLO module.
        devices: number of devices it was compiled for.
        trip_count: iterations of loops whose number the program does not state.

    Raises:
        ValueError: such a loop contains collectives, and `trip_count` is None.
    """
    module = _Module(hlo)
    found: list[Collective] = []

    def walk(computation: str, times: float) -> None:
        for line in module.computations.get(computation, ()):
            if line.kind:
                found.append(Collective(line.kind, module.bytes_sent(line, devices), times))
            for called in line.called:
                walk(called, times)
            if line.operation == "while":
                body = re.search(r"body=%?([\w.\-]+)", line.rest)
                assert body is not None, line.rest
                trips = module.trip_count(line)
                if trips is None:
                    trips = trip_count
                if trips is None:
                    if module.communicates(body[1]):
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


class _Module:
    """The computations of an HLO module by name. Instruction names are unique in the module."""

    def __init__(self, hlo: str):
        self.computations: dict[str, list[_Instruction]] = {}
        self.entry = ""
        current: list[_Instruction] = []
        for text in hlo.splitlines():
            header = _COMPUTATION.match(text)
            if header:
                current = []
                self.computations[header[2]] = current
                if header[1]:
                    self.entry = header[2]
                continue
            instruction = _INSTRUCTION.match(text)
            if instruction:
                root, name, result, operation, rest = instruction.groups()
                current.append(_Instruction(name, result, operation, rest, bool(root)))
        self.instructions = {
            line.name: line for computation in self.computations.values() for line in computation
        }

    def bytes_sent(self, line: _Instruction, devices: int) -> float:
        """Bytes that each device sends in one execution of a collective, by the ring algorithm.

        With n devices and an operand of B bytes per device:

            all-gather                   (n - 1) B         passes n - 1 shards on
            reduce-scatter, all-to-all   (n - 1) / n B     keeps one of n parts
            all-reduce                   2 (n - 1) / n B   reduce-scatter, then all-gather
            collective-permute           B
        """
        n = _group_size(line.rest, devices)
        operands = [self.instructions[name] for name in line.operands if name in self.instructions]
        given = sum(_bytes(operand.result) for operand in operands)
        if line.kind == "all-gather":
            return given * (n - 1)
        if line.kind == "collective-permute":
            return given
        share = (n - 1) / n
        return given * share * (2 if line.kind == "all-reduce" else 1)

    def trip_count(self, loop: _Instruction) -> int | None:
        """Number of iterations of a loop, or None if the program does not state it."""
        known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.rest)
        if known:
            return int(known[1])
        condition = re.search(r"condition=%?([\w.\-]+)", loop.rest)
        body = re.search(r"body=%?([\w.\-]+)", loop.rest)
        root = self._root(condition[1]) if condition else None
        if body is None or root is None:
            return None
        if root.operation != "compare" or "direction=LT" not in root.rest:
            return None
        counter, limit = (self.instructions[name] for name in root.operands)
        # The loop's state is a tuple; `index` is the position of the counter in it.
        index = self._tuple_index(counter)
        if index is None:
            return None
        end = self._constant(limit)
        step = self._step(body[1], index)
        if end is None or step is None or step < 1:
            return None
        # Count an unknown start as 0: too many iterations are a safer error than too few.
        start = self._initial_value(loop, index) or 0
        return max(0, math.ceil((end - start) / step))

    def _initial_value(self, loop: _Instruction, index: int) -> int | None:
        """Element `index` of the loop's initial state, if it is a constant."""
        state = self.instructions.get(loop.operands[0])
        if state is None or state.operation != "tuple":
            return None
        return self._constant(self.instructions[state.operands[index]])

    def _step(self, body: str, index: int) -> int | None:
        """The constant that one iteration adds to element `index` of the state, or None."""
        state = self._root(body)
        if state is None or state.operation != "tuple":
            return None
        # Follow the additions back from the new value to the old one.
        total = 0
        line = self._without_copies(self.instructions[state.operands[index]])
        while line.operation == "add":
            one, other = (self._without_copies(self.instructions[name]) for name in line.operands)
            if self._constant(one) is not None:
                one, other = other, one
            constant = self._constant(other)
            if constant is None:
                return None
            line = one
            total += constant
        return total if self._tuple_index(line) == index else None

    def _root(self, computation: str) -> _Instruction | None:
        for line in self.computations.get(computation, ()):
            if line.root:
                return line
        return None

    def communicates(self, computation: str) -> bool:
        """Whether a computation, or one that it calls, contains a collective."""
        for line in self.computations.get(computation, ()):
            inner = [*line.called, *re.findall(r"\bbody=%?([\w.\-]+)", line.rest)]
            if line.kind or any(self.communicates(called) for called in inner):
                return True
        return False

    def _tuple_index(self, line: _Instruction) -> int | None:
        """Index of the element that an instruction reads from its computation's parameter, or None.

        A loop's state is such a parameter.
        """
        if line.operation != "get-tuple-element":
            return None
        if self.instructions[line.operands[0]].operation != "parameter":
            return None
        match = re.search(r"\bindex=(\d+)", line.rest)
        return int(match[1]) if match else None

    def _without_copies(self, line: _Instruction) -> _Instruction:
        """The instruction at the start of a chain of copies."""
        while line.operation == "copy":
            line = self.instructions[line.operands[0]]
        return line

    def _constant(self, line: _Instruction) -> int | None:
        line = self._without_copies(line)
        match = re.match(r"(-?\d+)\)", line.rest) if line.operation == "constant" else None
        return int(match[1]) if match else None


def _group_size(text: str, devices: int) -> int:
    """Number of devices in each group of a collective. HLO writes the groups in three ways."""
    # replica_groups={{0,1},{2,3}}
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", text)
    if listed:
        return len(listed[1].split(","))
    # replica_groups=[groups,size]<=[devices]
    counted = re.search(r"replica_groups=\[\d+,(\d+)\]", text)
    if counted:
        return int(counted[1])
    # replica_groups=mesh['x'=2,'y'=4] {'y':(1)2}: the named axes, or (before)size for part of one
    by_axes = re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", text)
    if by_axes:
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", by_axes[1])}
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", by_axes[2])
        return math.prod(int(part) if part else sizes[name] for name, part in axes)
    return devices


def _bytes(result: str) -> float:
    """Bytes of an array type, or of all arrays in a tuple type."""
    total = 0
    for element, shape in _ARRAY.findall(result):
        total += BYTES[element] * math.prod(int(size) for size in shape.split(",") if size)
    return float(total)
