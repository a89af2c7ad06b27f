"""`python -m paravt_extras.plan --config=NAME --topology=v5p:4x4x4 [--only decode] [--field V]`

Compiles the programs of a training step for a TPU slice, on a machine without one, and prints
whether they fit in memory, and a floor of the time of a call: FLOPs and bytes as the compiler
counts them, at the peak rates. Kernels are not among them. Nothing is executed.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax

from configs import RECIPES
from paravt_extras.fit import GIB, Fitted, fit, mesh_sizes
from paravt_extras.plan.programs import ROLLOUTS, Plan, PlannedProgram, device_bytes, program_names
from paravt_extras.slices import Chip, Topology
from paravt_jax.command_name import command_name
from train.cli import EXIT_USAGE, parse
from train.settings import Run

_NEEDED = re.compile(r"Ran out of memory|exceeds available HBM", re.IGNORECASE)
# What is not on the devices while rollouts run, and while they do not.
_ASLEEP = {True: {"batch"}, False: {"engine's weights", "KV pool"}}


class Compiled(NamedTuple):
    """The compiler's report about one program. Bytes are per device."""

    name: str
    error: str
    """Empty if it compiled."""
    peak: float = 0.0
    """Bytes that the program needs, with its arguments."""
    held: float = 0.0
    """Bytes of other arrays that stay on the device meanwhile."""
    floor: float = 0.0
    """Seconds that a call takes at least."""
    seconds: float = 0.0
    """Time to compile."""


def compile_program(plan: Plan, name: str, chip: Chip) -> Compiled:
    """Compile a program. Running out of memory is a result, not an error."""
    program = plan.program(name)
    begin = time.monotonic()
    try:
        with jax.set_mesh(program.mesh):
            lowered = program.function.lower(*program.arguments, **program.options)
            compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if not _NEEDED.search(str(error)):
            raise
        return Compiled(name, str(error).partition("\n")[0][:200])
    memory = compiled.memory_analysis()
    assert memory is not None
    # Donated arguments share memory with outputs, so both sums include it: subtract it once.
    peak = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    peak += memory.output_size_in_bytes - memory.alias_size_in_bytes
    cost = compiled.cost_analysis() or {}
    rates = (cost.get("flops", 0.0) / chip.flops, cost.get("bytes accessed", 0.0) / chip.hbm_rate)
    floor = chip.devices * max(rates)
    return Compiled(name, "", peak, _held(plan, program), floor, time.monotonic() - begin)


def _held(plan: Plan, program: PlannedProgram) -> float:
    """Bytes of arrays that stay on a device while a program runs that does not take them."""
    absent = _ASLEEP[program.name.split()[0] in ROLLOUTS] | set(program.given)
    return float(sum(device_bytes(x) for k, x in plan.residents.items() if k not in absent))


def report(fitted: Fitted, topology: Topology, compiled: Sequence[Compiled], plan: Plan) -> str:
    """The plan as a table, one line per program."""
    limit = topology.chip.hbm
    lines = [
        f"{fitted.run.name} on {topology.name}: {fitted.describe()}",
        "stays on a device, GiB: "
        + ", ".join(f"{k} {device_bytes(x) / GIB:.2f}" for k, x in plan.residents.items()),
        f"{'program':<24} {'GiB':>7} {'others':>7} {'total':>7} {'floor s':>9} {'compiled s':>11}",
    ]
    for found in compiled:
        total = found.peak + found.held
        figures = f"{found.peak / GIB:7.2f} {found.held / GIB:7.2f} {total / GIB:7.2f}"
        line = f"{found.name:<24} {figures} {found.floor:9.4f} {found.seconds:11.0f}"
        too_large = "  does not fit" if total > limit else ""
        lines.append(f"{found.name:<24} {found.error}" if found.error else line + too_large)
    verdict = "fits" if fits(compiled, limit) else "does not fit"
    lines.append(f"{verdict}: {limit / GIB:.2f} GiB per device")
    return "\n".join(lines)


def fits(compiled: Sequence[Compiled], limit: float) -> bool:
    """Whether all programs compile and fit into `limit` bytes per device."""
    return all(not one.error and one.peak + one.held <= limit for one in compiled)


def chosen(run: Run, only: str) -> list[str]:
    """The programs of a run that are named, or whose names begin with a given word; all if none.

    Raises:
        ValueError: A name is unknown.
    """
    names = program_names(run)
    given = [one.strip() for one in only.split(",") if one.strip()]
    for one in given:
        if not any(name == one or name.startswith(f"{one} ") for name in names):
            raise ValueError(f"--only {one}: unknown; {run.name} has {', '.join(names)}")
    if not given:
        return list(names)
    return [name for name in names if any(name == x or name.startswith(f"{x} ") for x in given)]


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns 0 if the run fits, 1 if not, 2 for a mistake in the arguments."""
    parser = argparse.ArgumentParser(
        prog=command_name("python -m paravt_extras.plan"),
        description=__doc__,
        add_help=False,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--topology", default="", help="a slice, or several such as 2*v5e:4x4")
    parser.add_argument("--only", default="", help="comma-separated programs, or their first words")
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        # The options of the recipe follow: its parser prints them and exits.
        print(parser.format_help())
    options, rest = parser.parse_known_args(argv)
    run = parse(rest, RECIPES)
    try:
        topology = Topology(options.topology)
        fitted = fit(run, topology.available)
        mesh = mesh_sizes(fitted.run)
        if math.prod(mesh) != topology.devices:
            raise ValueError(
                f"mesh: {mesh} (data, fsdp, tensor): the product must equal the "
                f"{topology.devices} devices of {topology.name}; change --mesh"
            )
        names = chosen(fitted.run, options.only)
        # There is no TPU to open: libtpu must not ask the cloud's metadata server for one.
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        devices, host = topology.make_devices(), topology.host.make_devices()
    except (ValueError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    plan = Plan(fitted.run, devices, host, mesh)
    compiled = []
    for name in names:
        compiled.append(compile_program(plan, name, topology.chip))
        print(f"compiled {name}", file=sys.stderr)
    print(report(fitted, topology, compiled, plan))
    return 0 if fits(compiled, topology.chip.hbm) else 1


if __name__ == "__main__":
    sys.exit(main())
