"""The command: `python -m train.plan --config=NAME --topology=v5p:4x4x4 [--field value ...]`.

Owns the order of a plan: what a run would execute on a TPU slice is compiled for it, on a machine that has none, and added up: fits or
not, memory, FLOPs, traffic, lower limits on time. Nothing runs. A mistake in the settings, or no compiler, ends it in one line.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import json
import math
import os
import pathlib
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from configs import RECIPES
from paravt_jax.data.local_path import require_local
from train.cli import EXIT_USAGE, parse
from train.plan import step
from train.plan.cache import cached
from train.plan.compile import ROLLOUTS, SIZES, Case, Measured, compile_case, libtpu_version
from train.plan.programs import planned_config, program_names
from train.plan.table import report, scale
from train.plan.topology import INSTALL, SCALE, SOURCE, Topology, choose_mesh
from train.settings import Run

Compile = Callable[[Case, float], Measured]


def plan(
    run: Run, topology: Topology, mesh: tuple[int, int, int], measured: dict[str, Measured]
) -> dict[str, Any]:
    """Everything that is said about a run on a slice, from what its programs need; `measured` has them by name, and `SIZES`."""
    measured = dict(measured)
    sizes = measured.pop(SIZES).sizes
    if "decode" in measured:
        measured["decode"] = dataclasses.replace(
            measured["decode"], read=step.decode_read(run, topology, sizes)
        )
    residents = {
        name: size
        for name, size in sizes.items()
        if not name.startswith("all ") and name != "prefill rows"
    }
    beside = [step.held_together(m, residents) for m in measured.values() if m.peak]
    hbm, complete = topology.chip.hbm, all(not m.error for m in measured.values())
    calls = step.calls_of(run, topology, int(sizes["prefill rows"]))
    phases = [
        step.limit(measured[name], count, topology)
        for name, count in calls.items()
        if name in measured and not measured[name].error
    ]
    complete = complete and set(calls) <= set(measured)
    arrays = {
        name: sizes[f"all {name}"] for name in ("batch", "state", "reference", "pieces", "tower")
    }
    arrays["offloaded"] = max(m.offloaded for m in measured.values()) * topology.devices
    pool = residents.get("KV pool", 0.0)
    lacking = [together for together in beside if together.total > hbm]
    return {
        "name": run.name,
        "compiler": f"libtpu {libtpu_version()}",
        "topology": topology.name,
        "mesh": mesh,
        "chips": topology.chips,
        "devices": topology.devices,
        "hosts": topology.hosts,
        "hbm": hbm,
        "fits": not lacking and all(not m.error for m in measured.values()),
        "complete": complete,
        "programs": {name: dataclasses.asdict(m) for name, m in measured.items()},
        "residents": residents,
        "together": [
            dataclasses.asdict(together) | {"total": together.total} for together in beside
        ],
        "host_memory": step.host_memory(run, topology, arrays, mesh[0]),
        "phases": [dataclasses.asdict(phase) | {"seconds": phase.seconds} for phase in phases],
        "step_seconds": sum(phase.seconds for phase in phases),
        "tokens": step.tokens_of(run),
        "work": _work(run, measured),
        "source": SOURCE,
        "advice": [
            *step.padding_advice(run, topology, mesh),
            *(f"{m.program}: {m.error}" for m in measured.values() if m.error and not m.peak),
            *(
                line
                for together in lacking
                for line in step.held(together, measured[together.program], hbm)
            ),
            *(
                step.remedies(
                    {together.program for together in lacking},
                    run,
                    pool,
                    topology,
                    mesh[0] * mesh[1],
                )
                if lacking
                else []
            ),
            *step.pages_advice(
                run, topology, _free(beside, hbm), pool / (run.engine_sizes.pages + 1)
            ),
        ],
    }


def _free(beside: list[step.Together], hbm: float) -> float:
    """Bytes of a device that are free in every program of the rollouts; none where these were not measured."""
    return hbm - max(
        (together.total for together in beside if together.program in ROLLOUTS), default=hbm
    )


def _work(run: Run, measured: dict[str, Measured]) -> dict[str, float]:
    """What an update is worth, what its program does, and what sharing prompts saves; nothing where it was not counted."""
    update = measured.get("RL update")
    if run.rl is None or update is None or not update.flops:
        return {}
    config = planned_config(run)
    model = sum(step.model_flops(shape, config) for shape in step.shapes_of(run))
    again = model * 4 / 3  # the forward pass twice, the backward pass, which is twice as much, once
    return {
        "model": model,
        "full remat": again,
        "done": update.flops,
        "apart": update.unshared,
        "saved": update.unshared - update.flops,
    }


def measure_all(
    run: Run,
    topologies: Sequence[Topology],
    meshes: Sequence[tuple[int, int, int]],
    only: Sequence[str],
    timeout: float,
    jobs: int,
    compiled: Compile,
) -> list[dict[str, Measured]]:
    """Every program of the run on every slice, `jobs` at a time. What runs on one host is compiled once for a generation."""
    names = [SIZES, *(only or program_names(run))]
    cases = [
        [Case(run, topology, mesh, name) for name in names]
        for topology, mesh in zip(topologies, meshes, strict=True)
    ]
    pool = ThreadPoolExecutor(jobs)
    try:
        started = {
            key: pool.submit(compiled, case, timeout)
            for key, case in {
                (case.program, case.place): case for line in cases for case in line
            }.items()
        }
        return [
            {case.program: started[case.program, case.place].result() for case in line}
            for line in cases
        ]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _compile_aloud(keep: pathlib.Path | None, case: Case, timeout: float) -> Measured:
    def compiled(case: Case) -> Measured:
        return compile_case(case, timeout)

    measured, before = (compiled(case), False) if keep is None else cached(keep, case, compiled)
    said = measured.error or f"{measured.seconds:.0f} s"
    print(
        f"{case.topology.name}, {case.program}: {said}{', compiled before' if before else ''}",
        file=sys.stderr,
    )
    return measured


def rows_in(run: Run) -> int:
    """Rows of an update's largest batch."""
    return max((shape.groups * shape.rows for shape in step.shapes_of(run)), default=1)


def _mesh(run: Run, topology: Topology, given: bool) -> tuple[int, int, int]:
    recipe = run.mesh.data, run.mesh.fsdp, run.mesh.tensor
    if given and math.prod(recipe) != topology.devices:
        raise ValueError(
            f"mesh: {recipe} (data, fsdp, tensor); their product has to be the {topology.devices} devices of {topology.name}"
        )
    return choose_mesh(recipe, topology.devices, rows_in(run))


def _arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m train.plan",
        description=__doc__,
        add_help=False,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--topology", default="", help=f"a slice such as v5p:4x4x4, or all: {', '.join(SCALE)}"
    )
    parser.add_argument("--json", type=pathlib.Path, help="a file for every figure")
    parser.add_argument(
        "--keep",
        type=pathlib.Path,
        help="a folder that keeps what was compiled: the same command goes on from there",
    )
    parser.add_argument(
        "--only",
        default="",
        help="programs by the names of the table, with commas between; the default is all of the run's",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=1800.0,
        help="seconds for one program; the default is %(default)s",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="programs compiled at a time, each with up to 3 GB of memory; the default is 1",
    )
    if {"-h", "--help"} & set(argv):
        print(parser.format_help())
    return parser.parse_known_args(argv)


def _make_folder(folder: pathlib.Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(
            f"--keep {folder}: {error.strerror}; name a folder that can be written"
        ) from error


def main(argv: list[str] | None = None) -> int:
    """The command's exit code: 0 where all that was asked for fits, 1 where something does not or is not known, 2 for a mistake."""
    arguments, rest = _arguments(sys.argv[1:] if argv is None else argv)
    run = parse(rest, RECIPES, prog="python -m train.plan")
    try:
        if not arguments.topology:
            raise ValueError(
                f"--topology is missing: give a slice such as v5p:4x4x4, or all for {', '.join(SCALE)}"
            )
        topologies = [
            Topology(name)
            for name in (SCALE if arguments.topology == "all" else (arguments.topology,))
        ]
        meshes = [
            _mesh(run, topology, any(word.startswith("--mesh.") for word in rest))
            for topology in topologies
        ]
        only = [name.strip() for name in arguments.only.split(",") if name.strip()]
        if unknown := set(only) - set(program_names(run)):
            raise ValueError(
                f"--only: {', '.join(sorted(unknown))}; {run.name} has the programs {', '.join(program_names(run))}"
            )
        if arguments.jobs < 1 or not arguments.timeout > 0:
            raise ValueError(
                f"--jobs {arguments.jobs}, --timeout {arguments.timeout:g}; give one or more, and seconds above 0"
            )
        require_local("--keep", arguments.keep)
        require_local("--json", arguments.json)
        if arguments.keep:
            _make_folder(arguments.keep)
        if arguments.json and (
            arguments.json.is_dir() or not os.access(arguments.json.absolute().parent, os.W_OK)
        ):
            raise ValueError(
                f"--json {arguments.json}: no file can be written there; name another one"
            )
        if importlib.util.find_spec("libtpu") is None:
            raise ValueError(f"libtpu, the TPU's compiler, is not installed: {INSTALL}")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    compiled = functools.partial(_compile_aloud, arguments.keep)
    try:
        measured = measure_all(
            run, topologies, meshes, only, arguments.timeout, arguments.jobs, compiled
        )
    except KeyboardInterrupt:
        print(
            f"stopped{', the same command goes on' if arguments.keep else '; with --keep it could go on'}",
            file=sys.stderr,
        )
        return 128 + signal.SIGINT
    if broken := next((found[SIZES].error for found in measured if found[SIZES].error), ""):
        print(f"error: {broken}", file=sys.stderr)
        return EXIT_USAGE
    plans = [plan(run, *line) for line in zip(topologies, meshes, measured, strict=True)]
    print(
        "\n\n".join([report(found) for found in plans] + ([scale(plans)] if len(plans) > 1 else []))
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(plans, indent=1))
    return 0 if all(found["fits"] for found in plans) else 1
