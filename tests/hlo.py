"""Reads the text of an optimised HLO module: its computations, and how often its loops run.

A loop is written once but runs once per iteration. Its trip count comes from the compiler's own
note or, without one, from the loop counter's constants:

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
class Instruction:
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
    def called(self) -> list[str]:
        """Names of the computations that this instruction executes once."""
        # Calls are counted at -start; -update and -done repeat the name.
        if self.operation.endswith(("-done", "-update")):
            return []
        names = []
        for group in _CALLED.findall(self.rest):
            names += [name.strip(" %") for name in group.strip("{}").split(",")]
        return [name for name in names if name]


class Module:
    """The computations of an HLO module by name. Instruction names are unique in the module."""

    def __init__(self, hlo: str):
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        current: list[Instruction] = []
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
                current.append(Instruction(name, result, operation, rest, bool(root)))
        self.instructions = {
            line.name: line for computation in self.computations.values() for line in computation
        }

    def trip_count(self, loop: Instruction) -> int | None:
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

    def _initial_value(self, loop: Instruction, index: int) -> int | None:
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

    def _root(self, computation: str) -> Instruction | None:
        for line in self.computations.get(computation, ()):
            if line.root:
                return line
        return None

    def _tuple_index(self, line: Instruction) -> int | None:
        """Index of the element that an instruction reads from its computation's parameter, or None.

        A loop's state is such a parameter.
        """
        if line.operation != "get-tuple-element":
            return None
        if self.instructions[line.operands[0]].operation != "parameter":
            return None
        match = re.search(r"\bindex=(\d+)", line.rest)
        return int(match[1]) if match else None

    def _without_copies(self, line: Instruction) -> Instruction:
        """The instruction at the start of a chain of copies."""
        while line.operation == "copy":
            line = self.instructions[line.operands[0]]
        return line

    def _constant(self, line: Instruction) -> int | None:
        line = self._without_copies(line)
        match = re.match(r"(-?\d+)\)", line.rest) if line.operation == "constant" else None
        return int(match[1]) if match else None


def array_bytes(result: str) -> float:
    """Bytes of an array type, or of all arrays in a tuple type."""
    total = 0
    for element, shape in _ARRAY.findall(result):
        total += BYTES[element] * math.prod(int(size) for size in shape.split(",") if size)
    return float(total)
