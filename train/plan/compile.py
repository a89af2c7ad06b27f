"""One program through the TPU's compiler, in a process of its own: memory, FLOPs, traffic; or what did not fit.

Owns the process and the reading of the compiler's answers. Running out of memory is an answer, not an error: it says how much is
missing and what holds the memory. Refuses to go on without libtpu. Invariant: a compiler that aborts, or takes too long, ends one case
and not the plan.

As a program: `python -m train.plan.compile CASE RESULT`, two files; the plan starts it.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import pathlib
import pickle
import re
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

from train.plan.topology import Topology
from train.settings import Run

OUT_OF_MEMORY = re.compile(
    r"required (for HLO temporaries )?\(([\d.]+)([KMG])\) exceeds available HBM \(([\d.]+)([KMG])\)"
)
ROLLOUTS = (
    "vision",
    "prefill",
    "prefill after",
    "decode",
)  # programs that run while the engine is awake, each on one host
SIZES = "sizes"  # in the place of a program: what lies on a device and on a host
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


@dataclasses.dataclass(frozen=True)
class Case:
    """One program of a run on a slice, under a mesh (data, fsdp, tensor)."""

    run: Run
    topology: Topology
    mesh: tuple[int, int, int]
    program: str

    @property
    def place(self) -> tuple[str, ...]:
        """What of slice and mesh the program depends on: one that runs on a host is the same for every slice of a generation."""
        return (
            (self.topology.host.name,)
            if self.program in ROLLOUTS
            else (self.topology.name, str(self.mesh))
        )


@dataclasses.dataclass(frozen=True)
class Measured:
    """What the compiler says of a call. Bytes are of one device, FLOPs of all together, `sent` by each device and kind of collective.

    Without `error` the program compiled. Where it ran out of memory, `peak` is what it needs. `read`: bytes of HBM that have to be read;
    `largest`: what takes most of the temporary memory. `offloaded`: bytes that a device has in its host's memory meanwhile. `unshared`:
    FLOPs if every row computed its prompt.
    """

    program: str
    error: str = ""
    seconds: float = 0.0
    devices: int = 0
    arguments: float = 0.0
    temporary: float = 0.0
    output: float = 0.0
    alias: float = 0.0
    peak: float = 0.0
    offloaded: float = 0.0
    flops: float = 0.0
    unshared: float = 0.0
    read: float = 0.0
    sent: dict[str, float] = dataclasses.field(default_factory=dict)
    given: tuple[str, ...] = ()
    largest: tuple[str, ...] = ()
    sizes: dict[str, float] = dataclasses.field(default_factory=dict)


def libtpu_version() -> str:
    """Of the compiler that is installed; another one may need other memory."""
    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def compile_case(case: Case, timeout: float) -> Measured:
    """Compiles one case in a process of its own, `timeout` seconds at most. What goes wrong stands in `error`."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "XLA_FLAGS": "",
    }
    with tempfile.TemporaryDirectory() as folder:
        question, answer = pathlib.Path(folder, "case"), pathlib.Path(folder, "answer")
        question.write_bytes(pickle.dumps(case))
        command = [sys.executable, "-m", "train.plan.compile", str(question), str(answer)]
        alive, here = os.pipe()  # the process ends with this one, however this one ends
        try:
            done = subprocess.run(
                command,
                env=environment,
                stdin=alive,
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Measured(
                case.program, error=f"not compiled within {timeout:.0f} s; give a longer --timeout"
            )
        finally:
            os.close(alive)
            os.close(here)
        if done.returncode or not answer.exists():
            last = next(
                (line for line in reversed(done.stderr.splitlines()) if line.strip()),
                "it said nothing",
            )
            return Measured(
                case.program, error=f"the compiler ended with {done.returncode}: {last[:300]}"
            )
        return Measured(**pickle.loads(answer.read_bytes()))


def measure(case: Case) -> Measured:
    """Compiles a case here. Raises what the compiler raises, but for a lack of memory."""
    import jax

    from train.plan.flops import count_flops

    plan, start = make_plan(case), time.monotonic()
    if case.program == SIZES:
        return Measured(SIZES, sizes=plan.sizes())
    program = plan.program(case.program)
    with jax.set_mesh(program.mesh), tempfile.TemporaryDirectory() as name:
        traced, folder = (
            program.function.trace(*program.arguments, **program.options),
            pathlib.Path(name),
        )
        flops = count_flops(traced.jaxpr, turns=program.turns or 1.0, pairs=program.pairs)
        base = Measured(
            case.program,
            devices=program.mesh.size,
            flops=flops,
            read=program.read,
            given=program.given,
        )
        if program.unshared is not None:
            base = dataclasses.replace(base, unshared=flops + program.unshared())
        try:
            # The compiler's own text is too large for `as_text` on some chips, and is there even where memory lacks.
            compiled = traced.lower().compile(
                compiler_options={"xla_dump_to": name, "xla_dump_hlo_as_text": True}
            )
        except jax.errors.JaxRuntimeError as error:
            answers = _lack(str(error), program)
        else:
            answers = _answers(compiled, folder, program)
        return dataclasses.replace(
            base, **answers, largest=_largest(folder), seconds=time.monotonic() - start
        )


def make_plan(case: Case) -> Any:
    """The case's programs. ImportError without libtpu."""
    from train.plan.programs import Plan

    return Plan(
        case.run, case.topology.make_devices(), case.topology.host.make_devices(), case.mesh
    )


def _answers(compiled: Any, folder: pathlib.Path, program: Any) -> dict[str, Any]:
    from train.plan.collectives import bytes_sent, find_collectives

    memory = compiled.memory_analysis()
    modules = [file for file in folder.glob("*.after_optimizations.txt")]
    hlo = max(modules, key=lambda file: file.stat().st_size).read_text()
    arguments, temporary = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    output, alias = memory.output_size_in_bytes, memory.alias_size_in_bytes
    return {
        "arguments": arguments,
        "temporary": temporary,
        "output": output,
        "alias": alias,
        "peak": arguments + temporary + output - alias,
        "offloaded": memory.host_temp_size_in_bytes,
        "sent": bytes_sent(find_collectives(hlo, program.mesh.size, program.turns)),
    }


def _lack(message: str, program: Any) -> dict[str, Any]:
    """What a lack of memory says; any other error is raised again."""
    from train.plan.programs import device_bytes

    found = OUT_OF_MEMORY.search(message)
    if found is None:
        raise RuntimeError(message)
    needed, there = (float(found[n]) * UNITS[found[n + 1]] for n in (2, 4))
    if found[1]:  # temporaries alone are too much: arguments come on top
        needed += device_bytes(program.arguments)
    return {
        "error": f"out of memory: needs {needed / 2**30:.2f} GiB of {there / 2**30:.2f}",
        "peak": needed,
    }


def _largest(folder: pathlib.Path) -> tuple[str, ...]:
    """The first lines of the compiler's report of temporaries: size and shape."""
    reports = sorted(folder.glob("*memory-usage-report.txt"), key=lambda file: file.stat().st_size)
    lines = reports[-1].read_text().splitlines() if reports else []
    found = (
        re.match(r"^\s*[\d.]+\w+\(\s*\d+%\);\s*([\d.]+[GM]iB);\s*\d+;\s*\d+;\s*(.*)$", line)
        for line in lines
    )
    return tuple(f"{match[1]} {match[2][:100]}" for match in found if match)[:4]


def main(question: str, answer: str) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    case = pickle.loads(pathlib.Path(question).read_bytes())
    pathlib.Path(answer).write_bytes(pickle.dumps(dataclasses.asdict(measure(case))))


def _end_with_parent() -> None:
    sys.stdin.read()  # until the plan closes its end of the pipe
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
