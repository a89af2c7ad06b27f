"""`python -m paravt_extras.plan --config=NAME --topology=v5p:4x4x4 [--lengths FILE] [--field V]`

Compiles the programs of a training step for a TPU slice, on a machine without one, and reports
whether they fit, their memory, FLOPs and traffic, and the time of a step: a lower limit and an
expected time. Nothing is executed.
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
from paravt_extras.fit import Fitted, fit
from paravt_extras.meshes import mesh_sizes
from paravt_extras.plan import step
from paravt_extras.plan.cache import cached
from paravt_extras.plan.compile import SIZES, Case, Measured, compile_case, libtpu_version, on_host
from paravt_extras.plan.programs import microbatch_sizes, planned_config, program_names
from paravt_extras.plan.rates import EXPECTED_HBM, EXPECTED_HFU
from paravt_extras.plan.table import report, scale
from paravt_extras.plan.tiles import flash_attention
from paravt_extras.plan.workload import Workload, at_limits, lengths_of, read
from paravt_extras.slices import INSTALL, SCALE, SOURCE, Topology
from paravt_jax.command_name import command_name
from paravt_jax.data.local_path import require_local
from train.cli import EXIT_USAGE, parse
from train.learn.packing import pack
from train.learn.work import VISIBLE, Attention, done, passes, worth
from train.settings import Run

Compile = Callable[[Case, float], Measured]


def plan(
    fitted: Fitted,
    topology: Topology,
    measured: dict[str, Measured],
    workload: Workload | None = None,
) -> dict[str, Any]:
    """Combines the measurements of all programs into the plan for one slice.

    Args:
        fitted: the recipe, with the sizes chosen for the slice.
        topology: the slice.
        measured: by program name, with `SIZES` among them.
        workload: lengths of the sequences of a step; None: every sequence has its limit.

    Returns:
        Every figure of the report, as JSON can hold it.
    """
    run = fitted.run
    mesh = mesh_sizes(run)
    measured = dict(measured)
    sizes = measured.pop(SIZES).sizes
    if workload is None and run.rl is not None:
        workload = at_limits(run)
    measured = step.with_attention(run, measured, workload)
    residents = {name: size for name, size in sizes.items() if not name.startswith("all ")}
    together = [step.held_together(m, residents) for m in measured.values() if m.peak]
    too_large = [held for held in together if held.total > topology.chip.hbm]
    no_errors = all(not m.error for m in measured.values())
    compiled = {name: m for name, m in measured.items() if not m.error}
    phases = step.phases_of(run, topology, compiled, sizes, workload)
    # The tail is a part of decoding.
    summed = [phase for phase in phases if phase.phase != "tail"]
    host_memory = step.host_memory(run, topology, _all_arrays(topology, sizes, measured), mesh[0])
    return {
        "name": run.name,
        "compiler": f"libtpu {libtpu_version()}",
        "topology": topology.name,
        "mesh": mesh,
        "chosen": fitted.chosen,
        "estimate": fitted.needs,
        "chips": topology.chips,
        "devices": topology.devices,
        "hosts": topology.hosts,
        "hbm": topology.chip.hbm,
        "fits": not too_large and no_errors,
        "complete": no_errors and set(program_names(run)) <= set(measured),
        "programs": {name: dataclasses.asdict(m) for name, m in measured.items()},
        "residents": residents,
        "together": [dataclasses.asdict(held) | {"total": held.total} for held in together],
        "host_memory": host_memory,
        "lengths": workload.describe() if workload else "",
        "phases": [dataclasses.asdict(phase) for phase in phases],
        "step_seconds": sum(phase.seconds for phase in summed),
        "expected_seconds": sum(phase.expected for phase in summed),
        "expected_rates": {"HFU": EXPECTED_HFU, "HBM": EXPECTED_HBM},
        "between_slices": step.sent_between_slices(run, compiled, workload),
        "tokens": workload.tokens if workload else step.tokens_of(run),
        "remat": run.rl.remat if run.rl is not None else "",
        # Of each weight and token, in FLOPs.
        "products": 2 * passes(run.rl.remat).weights if run.rl is not None else 0,
        "work": _work(run, measured, workload),
        "source": SOURCE,
        "advice": _advice(run, topology, measured, together, residents),
    }


def _all_arrays(
    topology: Topology, sizes: dict[str, float], measured: dict[str, Measured]
) -> dict[str, float]:
    """Bytes over all devices of the arrays that hosts keep in memory; see `step.host_memory`."""
    names = ("batch", "state", "reference", "pieces", "tower")
    arrays = {name: sizes[f"all {name}"] for name in names}
    arrays["offloaded"] = max(m.offloaded for m in measured.values()) * topology.devices
    return arrays


def _advice(
    run: Run,
    topology: Topology,
    measured: dict[str, Measured],
    together: list[step.Together],
    residents: dict[str, float],
) -> list[str]:
    """Lists failures, programs that do not fit, and settings that would help."""
    hbm = topology.chip.hbm
    pool = residents.get("KV pool", 0.0)
    too_large = [held for held in together if held.total > hbm]
    advice = [f"{m.program}: {m.error}" for m in measured.values() if m.error and not m.peak]
    for held in too_large:
        advice += step.held(held, measured[held.program], hbm)
    if too_large:
        programs = {held.program for held in too_large}
        advice += step.remedies(programs, run, pool, topology)
    # If no rollout program was measured, assume that nothing is free.
    used = max((held.total for held in together if on_host(held.program)), default=hbm)
    page = pool / (run.engine_sizes.pages + 1)
    return advice + step.pages_advice(run, topology, hbm - used, page)


def _work(run: Run, measured: dict[str, Measured], workload: Workload | None) -> dict[str, float]:
    """FLOPs of update and reference in a step, as means over the steps of a workload.

    Returns:
        "worth" and "done" by the packed layout, both with the rematerialisation of the run
        (`train.learn.work`), by visible pairs; "done, tiles" by those of the TPU's kernel; and
        "compiled": of the programs, if all of them were compiled.
    """
    if run.rl is None or workload is None:
        return {}
    config = planned_config(run)
    sizes = microbatch_sizes(run)
    devices = math.prod(mesh_sizes(run))
    steps = [lengths_of(one) for one in workload.steps]
    remat = run.rl.remat

    def packed(attention: Attention) -> list[float]:
        return [
            done(pack(groups, sizes), groups, config, remat, devices, attention) for groups in steps
        ]

    found = {
        "worth": [worth(groups, config, remat) for groups in steps],
        "done": packed(VISIBLE),
        "done, tiles": packed(flash_attention(config)),
    }
    work = {name: sum(flops) / len(steps) for name, flops in found.items()}
    calls = step.learner_calls(run, workload)
    programs = [name for name in calls if name.startswith(("reference", "RL update"))]
    # The other figures are those of one update.
    one_update = run.rl.updates_per_batch == 1
    if one_update and all(name in measured and measured[name].flops for name in programs):
        work["compiled"] = sum(calls[name] * measured[name].flops for name in programs)
    return work


def measure_all(
    runs: Sequence[Run],
    topologies: Sequence[Topology],
    only: Sequence[str],
    timeout: float,
    jobs: int,
    compiled: Compile,
) -> list[dict[str, Measured]]:
    """Compiles the programs of a run for every slice.

    Args:
        runs: the recipe, with the sizes chosen for each slice.
        topologies: the slices.
        only: names of the programs to compile, or of families of them; all if empty.
        timeout: seconds per program.
        jobs: number of programs compiled at a time.
        compiled: compiles a case within a number of seconds.

    Returns:
        One dict per slice, by program name, `SIZES` included.
    """
    # Slices differ in the sizes of micro-batches, and so in names.
    cases = [
        [Case(run, topology, mesh_sizes(run), name) for name in (SIZES, *chosen(run, only))]
        for run, topology in zip(runs, topologies, strict=True)
    ]
    pool = ThreadPoolExecutor(jobs)
    started = {}
    try:
        for cases_of_slice in cases:
            for case in cases_of_slice:
                # Slices of a generation with equal engines share the programs of a host.
                key = (case.program, case.place)
                if key not in started:
                    started[key] = pool.submit(compiled, case, timeout)
        return [
            {case.program: started[case.program, case.place].result() for case in cases_of_slice}
            for cases_of_slice in cases
        ]
    finally:
        # After an interrupt, drop what has not started and do not wait for what runs.
        pool.shutdown(wait=False, cancel_futures=True)


def _compile_and_print(keep: pathlib.Path | None, case: Case, timeout: float) -> Measured:
    def compiled(case: Case) -> Measured:
        return compile_case(case, timeout)

    if keep is None:
        measured = compiled(case)
        was_cached = False
    else:
        measured, was_cached = cached(keep, case, compiled)
    result = measured.error or f"{measured.seconds:.0f} s"
    note = ", compiled before" if was_cached else ""
    print(f"{case.topology.name}, {case.program}: {result}{note}", file=sys.stderr)
    return measured


def _fit(run: Run, topology: Topology) -> Fitted:
    """Chooses the open sizes. The compiler requires a program to use all devices of a slice."""
    mesh = mesh_sizes(run)
    if all(mesh) and math.prod(mesh) != topology.devices:
        raise ValueError(
            f"mesh: {mesh} (data, fsdp, tensor): the product must equal the {topology.devices} "
            f"devices of {topology.name}; change --mesh, or let it be chosen with --mesh.fsdp 0 "
            "--mesh.tensor 0"
        )
    return fit(run, topology.available)


def _parse_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The plan's own options, and the rest of `argv`, which belongs to the recipe."""
    parser = argparse.ArgumentParser(
        prog=command_name("python -m paravt_extras.plan"),
        description=__doc__,
        add_help=False,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--topology",
        default="",
        help="slices such as v5e:4x4,v5p:4x4x4, several at once such as 2*v5e:4x4, or all: "
        f"{', '.join(SCALE)}",
    )
    parser.add_argument("--json", type=pathlib.Path, help="write every figure to this file")
    parser.add_argument(
        "--lengths",
        type=pathlib.Path,
        help="lengths of rollouts: benchmarks/lengths_8b.json, or a run's metrics.jsonl",
    )
    parser.add_argument(
        "--keep",
        type=pathlib.Path,
        help="store compiled results in this folder, so that the same command can resume",
    )
    parser.add_argument(
        "--only",
        default="",
        help="comma-separated programs to compile, by name or first word; default: all",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=1800.0,
        help="seconds allowed for each program; default: %(default)s",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="programs to compile at a time, each with up to 3 GB of memory; default: 1",
    )
    if {"-h", "--help"} & set(argv):
        # The options of the recipe follow: its parser prints them and exits.
        print(parser.format_help())
    return parser.parse_known_args(argv)


def _topologies(names: str) -> list[Topology]:
    if not names:
        raise ValueError(
            f"--topology is missing: give a slice such as v5p:4x4x4, or all for {', '.join(SCALE)}"
        )
    return [Topology(slice_name) for slice_name in (SCALE if names == "all" else names.split(","))]


def _only(names: str, runs: Sequence[Run]) -> list[str]:
    """The names given to --only."""
    only = [name.strip() for name in names.split(",") if name.strip()]
    for run in runs:
        unknown = [name for name in only if not chosen(run, [name])]
        if unknown:
            raise ValueError(
                f"--only: {', '.join(unknown)}: unknown; {run.name} has the programs "
                f"{', '.join(program_names(run))}"
            )
    return only


def chosen(run: Run, only: Sequence[str]) -> list[str]:
    """The programs of a run that are named, or whose names begin with a given word; all if none."""
    return [
        name
        for name in program_names(run)
        if not only or any(name == given or name.startswith(f"{given} ") for given in only)
    ]


def _check_arguments(arguments: argparse.Namespace) -> None:
    """Raises ValueError for options that cannot work, and makes the folder for --keep."""
    if arguments.jobs < 1 or not arguments.timeout > 0:
        raise ValueError(
            f"--jobs {arguments.jobs}, --timeout {arguments.timeout:g}: give one or more jobs, "
            "and more than 0 seconds"
        )
    require_local("--keep", arguments.keep)
    require_local("--json", arguments.json)
    if arguments.keep:
        try:
            arguments.keep.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=arguments.keep).close()
        except OSError as error:
            raise ValueError(
                f"--keep {arguments.keep}: {error.strerror}; name a writable folder"
            ) from error
    if arguments.json:
        folder = arguments.json.absolute().parent
        if arguments.json.is_dir() or not os.access(folder, os.W_OK):
            raise ValueError(f"--json {arguments.json}: not writable; name another file")
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(f"libtpu, the TPU's compiler, is not installed: {INSTALL}")


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit code.

    0: all planned programs fit. 1: a program does not fit, or failed to compile. 2: an invalid
    option. 130: interrupted.
    """
    arguments, rest = _parse_arguments(sys.argv[1:] if argv is None else argv)
    run = parse(rest, RECIPES, prog="python -m paravt_extras.plan")
    try:
        run.require_no_rehearsal()
        run = run.beginning()
        topologies = _topologies(arguments.topology)
        fitted = [_fit(run, topology) for topology in topologies]
        only = _only(arguments.only, [one.run for one in fitted])
        workload = read(arguments.lengths, run) if arguments.lengths else None
        _check_arguments(arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    compiled = functools.partial(_compile_and_print, arguments.keep)
    try:
        measured = measure_all(
            [one.run for one in fitted],
            topologies,
            only,
            arguments.timeout,
            arguments.jobs,
            compiled,
        )
    except KeyboardInterrupt:
        remedy = "run the same command to resume" if arguments.keep else "with --keep it can resume"
        print(f"stopped; {remedy}", file=sys.stderr)
        return 128 + signal.SIGINT
    for of_slice in measured:
        # Without sizes nothing can be added up; the settings are usually the cause.
        if of_slice[SIZES].error:
            print(f"error: {of_slice[SIZES].error}", file=sys.stderr)
            return EXIT_USAGE
    plans = [
        plan(one, topology, of_slice, workload)
        for one, topology, of_slice in zip(fitted, topologies, measured, strict=True)
    ]
    pages = [report(of_slice) for of_slice in plans]
    if len(plans) > 1:
        pages.append(scale(plans))
    print("\n\n".join(pages))
    if arguments.json:
        arguments.json.write_text(json.dumps(plans, indent=1))
    return 0 if all(of_slice["fits"] for of_slice in plans) else 1
