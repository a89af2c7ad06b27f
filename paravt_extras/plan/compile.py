"""Compiles one program with the TPU's compiler, in a separate process, and reads its memory use.

The compiler may abort or never finish. In its own process that costs one program, not the whole
plan. Running out of memory is a result, not an error: the compiler says how much is missing and
which arrays are the largest.

`python -m paravt_extras.plan.compile CASE RESULT` is the command of that process; both are pickled.
"""

from __future__ import annotations

import dataclasses
import functools
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

from paravt_extras.slices import Topology
from train.settings import Run

OUT_OF_MEMORY = re.compile(
    r"required (for HLO temporaries )?\(([\d.]+)([KMG])\) "
    r"exceeds available HBM \(([\d.]+)([KMG])\)"
)
# A line of the memory report: cumulative size and share; size; two counts; shape and origin.
_REPORT_LINE = re.compile(r"^\s*[\d.]+\w+\(\s*\d+%\);\s*([\d.]+[GM]iB);\s*\d+;\s*\d+;\s*(.*)$")
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
# The first words of programs that run while the engine is awake, each on the devices of one host.
ROLLOUTS = ("vision", "bank", "prefill", "page", "decode")
# Used like a program's name, for the sizes of everything that stays on devices and hosts.
SIZES = "sizes"


@dataclasses.dataclass(frozen=True)
class Case:
    """One program of a run, to be compiled for a slice and a mesh (data, fsdp, tensor)."""

    run: Run
    topology: Topology
    mesh: tuple[int, int, int]
    program: str

    @property
    def place(self) -> tuple[str, ...]:
        """The part of slice and mesh that the program depends on."""
        # A program of one host depends on the slice through the sizes of the engine only.
        if on_host(self.program):
            return (self.topology.host.name, str(self.run.engine))
        return (self.topology.name, str(self.mesh))


@dataclasses.dataclass(frozen=True)
class Measured:
    """The compiler's report about one call of a program. Bytes are per device."""

    program: str
    error: str = ""
    """Empty if the program compiled."""
    seconds: float = 0.0
    """Time to compile."""
    devices: int = 0
    arguments: float = 0.0
    temporary: float = 0.0
    output: float = 0.0
    alias: float = 0.0
    """Bytes of the output that reuse memory of the arguments."""
    peak: float = 0.0
    """Bytes needed in HBM, also if they exceed what is available."""
    offloaded: float = 0.0
    """Bytes kept in the host's memory while the program runs."""
    flops: float = 0.0
    """FLOPs of all devices together."""
    pair_flops: float = 0.0
    """Further FLOPs for each query-key pair of a packed row, of all devices together."""
    read: float = 0.0
    """Bytes of HBM that must be read."""
    sent: dict[str, float] = dataclasses.field(default_factory=dict)
    """Bytes sent to other devices, by kind of collective; as "DCN" to other slices."""
    given: tuple[str, ...] = ()
    """Residents of the device that are among the program's arguments."""
    largest: tuple[str, ...] = ()
    """The largest temporaries, as the compiler describes them."""
    sizes: dict[str, float] = dataclasses.field(default_factory=dict)
    """For `SIZES` alone: bytes by name (`paravt_extras.plan.programs.Plan.sizes`)."""


def on_host(program: str) -> bool:
    """Whether a program of this name runs on the devices of one host, while the engine is awake."""
    return program.split()[0] in ROLLOUTS


def libtpu_version() -> str:
    """Version of the installed TPU compiler. Memory needs differ between versions."""
    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def compile_case(case: Case, timeout: float) -> Measured:
    """Compiles a case in a separate process.

    Args:
        case: the program.
        timeout: seconds after which the process is killed.

    Returns:
        The result; its `error` tells of a timeout or a crash.
    """
    # There is no TPU to open: libtpu must not ask the cloud's metadata server for one, and several
    # processes may load it at a time. The caller's XLA_FLAGS must not change the programs.
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "XLA_FLAGS": "",
    }
    with tempfile.TemporaryDirectory() as folder:
        case_file = pathlib.Path(folder, "case")
        result_file = pathlib.Path(folder, "result")
        case_file.write_bytes(pickle.dumps(case))
        command = [
            sys.executable,
            "-m",
            "paravt_extras.plan.compile",
            str(case_file),
            str(result_file),
        ]
        # The child exits when this pipe closes. The kernel closes it when this process ends, even
        # by SIGKILL, so no compiler is left behind.
        read_end, write_end = os.pipe()
        try:
            done = subprocess.run(
                command,
                env=environment,
                stdin=read_end,
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
            os.close(read_end)
            os.close(write_end)
        if done.returncode or not result_file.exists():
            output = [line for line in done.stderr.splitlines() if line.strip()]
            last = output[-1][:300] if output else "it printed nothing"
            return Measured(
                case.program, error=f"the compiler ended with {done.returncode}: {last}"
            )
        return Measured(**pickle.loads(result_file.read_bytes()))


def measure(case: Case) -> Measured:
    """Compiles a case in this process. Compiler errors are raised, except for lack of memory."""
    import jax

    plan = make_plan(case)
    start = time.monotonic()
    if case.program == SIZES:
        return Measured(SIZES, sizes=plan.sizes())
    program = plan.program(case.program)
    with jax.set_mesh(program.mesh), tempfile.TemporaryDirectory() as dump_folder:
        traced = program.function.trace(*program.arguments, **program.options)
        base = Measured(
            case.program,
            devices=program.mesh.size,
            read=program.read,
            given=program.given,
            **flops_of(traced.jaxpr, program),
        )
        # Reports are dumped to files: on some chips the HLO is too large for `as_text`, and if
        # memory runs out there is no compiled program to ask.
        options = {"xla_dump_to": dump_folder, "xla_dump_hlo_as_text": True}
        try:
            compiled = traced.lower().compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            found = memory_shortage(str(error), program.arguments)
        else:
            # The dump has a file per module; small ones are helpers of the compiler.
            modules = pathlib.Path(dump_folder).glob("*.after_optimizations.txt")
            hlo = max(modules, key=lambda file: file.stat().st_size).read_text()
            slices = 1 if on_host(case.program) else case.topology.slices
            found = statistics(compiled, hlo, program, slices)
        largest = _largest(pathlib.Path(dump_folder))
        return dataclasses.replace(base, **found, largest=largest, seconds=time.monotonic() - start)


def make_plan(case: Case) -> Any:
    """The programs of the case's run on its slice. Raises ImportError without libtpu."""
    from paravt_extras.plan.programs import Plan

    devices = case.topology.make_devices()
    host_devices = case.topology.host.make_devices()
    return Plan(case.run, devices, host_devices, case.mesh)


def flops_of(jaxpr: Any, program: Any) -> dict[str, Any]:
    """FLOPs of a traced program, as fields of `Measured`."""
    from paravt_extras.plan.flops import count_flops

    count = functools.partial(count_flops, jaxpr, trip_count=program.trip_count or 1.0)
    if not program.packed:
        return {"flops": count(pairs=program.pairs)}
    without = count(pairs=lambda queries, keys: 0.0)
    return {"flops": without, "pair_flops": count(pairs=lambda queries, keys: 1.0) - without}


def statistics(compiled: Any, hlo: str, program: Any, slices: int = 1) -> dict[str, Any]:
    """Memory and traffic of a compiled program, as fields of `Measured`.

    Args:
        compiled: the program.
        hlo: its text after all optimizations, which is that of one slice.
        program: the `PlannedProgram`.
        slices: number of slices that it is compiled for.
    """
    from paravt_extras.plan.collectives import DCN, bytes_sent, find_collectives

    memory = compiled.memory_analysis()
    arguments = memory.argument_size_in_bytes
    temporary = memory.temp_size_in_bytes
    output = memory.output_size_in_bytes
    alias = memory.alias_size_in_bytes
    collectives = find_collectives(hlo, program.mesh.size // slices, program.trip_count)
    sent = bytes_sent(collectives)
    if DCN in sent:
        # Of what a device hands over. Nearly all of it is reduced, as in `collectives`.
        sent[DCN] *= 2 * (slices - 1) / slices
    return {
        "arguments": arguments,
        "temporary": temporary,
        "output": output,
        "alias": alias,
        # Donated arguments share memory with outputs, so both sums include it: subtract it once.
        "peak": arguments + temporary + output - alias,
        "offloaded": memory.host_temp_size_in_bytes,
        "sent": sent,
    }


def memory_shortage(message: str, arguments: Any) -> dict[str, Any]:
    """Parses the compiler's out-of-memory message.

    Args:
        message: text of the compiler's error.
        arguments: the program's arguments.

    Returns:
        The fields `error` and `peak` of `Measured`.

    Raises:
        RuntimeError: the message is about something else.
    """
    from paravt_extras.plan.programs import device_bytes

    found = OUT_OF_MEMORY.search(message)
    if found is None:
        raise RuntimeError(message)
    only_temporaries, needed, needed_unit, available, available_unit = found.groups()
    peak = float(needed) * UNITS[needed_unit]
    available_bytes = float(available) * UNITS[available_unit]
    # This variant of the message counts only temporaries, but arguments take memory as well.
    if only_temporaries:
        peak += device_bytes(arguments)
    return {
        "error": f"out of memory: needs {peak / 2**30:.2f} GiB of {available_bytes / 2**30:.2f}",
        "peak": peak,
    }


def _largest(dump_folder: pathlib.Path) -> tuple[str, ...]:
    """The largest temporaries, with size and shape, from the compiler's memory report."""
    reports = list(dump_folder.glob("*memory-usage-report.txt"))
    if not reports:
        return ()
    report = max(sorted(reports), key=lambda file: file.stat().st_size)
    found = []
    for line in report.read_text().splitlines():
        match = _REPORT_LINE.match(line)
        if match:
            found.append(f"{match[1]} {match[2][:100]}")
    return tuple(found[:4])


def main(case_file: str, result_file: str) -> None:
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    case = pickle.loads(pathlib.Path(case_file).read_bytes())
    pathlib.Path(result_file).write_bytes(pickle.dumps(dataclasses.asdict(measure(case))))


def _exit_with_parent() -> None:
    # Returns when the parent's end of the pipe closes. A blocked compiler does not notice a flag,
    # so the whole process exits.
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
