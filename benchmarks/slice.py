"""Times and memory of a recipe's programs on the devices here, measured beside planned, as JSON.

    python -m benchmarks.slice --config=paravt_8b > slice.json

Start it on all hosts of a slice at the same time, like a run. It needs no data and no weights: the
programs of `paravt_extras.plan`, at the sizes that are chosen for the slice, get random weights and
full rows. They compile side by side until `--minutes` are over, the largest of every family first;
what has not been compiled by then is left out. Then each is called a few times.

Of each program:

    seconds   measured: the fastest call. expected, least: as in paravt_extras.plan, at the rates
              that it expects and at the peak rates; null for devices whose rates are not known
    bytes     planned: what the compiled program needs on a device. measured: the most that was in
              use on a device; null where devices do not count, or if an earlier program used more

Only the first process prints.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import re
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from configs import RECIPES
from models import gpu
from models.compile_ahead import compile_threads
from models.device_memory import used_memory
from paravt_extras.fit import Fitted, fit
from paravt_extras.plan.compile import Measured, flops_of, statistics
from paravt_extras.plan.programs import Plan, PlannedProgram, program_names
from paravt_extras.plan.rates import cost_of, expected, peak
from paravt_extras.slices import Topology, found_devices, generation_of, known_slices
from paravt_jax.processes import cluster, hosts
from train.cli import parse
from train.settings import Run

ROUNDS = 3
"""Calls of a program, of which the fastest counts, after one that is not timed."""

Row = dict[str, Any]


class Compiled(NamedTuple):
    """A program that can be called, and what the plan says about it."""

    planned: PlannedProgram
    program: Any
    measured: Measured


def measure(run: Run, minutes: float) -> Row:
    """Compile and call the programs of a run, whose open sizes are chosen for the devices here.

    Args:
        run: the recipe.
        minutes: after these, no further program begins to compile.

    Raises:
        ValueError: the recipe does not fit the devices.
    """
    fitted: Fitted = fit(run, found_devices())
    run = fitted.run
    mesh = (run.mesh.data, run.mesh.fsdp, run.mesh.tensor)
    if math.prod(mesh) != jax.device_count():
        raise ValueError(
            f"mesh: {mesh} (data, fsdp, tensor): the product must equal the {jax.device_count()} "
            "devices here; change --mesh, or let it be chosen with --mesh.fsdp 0 --mesh.tensor 0"
        )
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    plan = Plan(run, devices, jax.local_devices(), mesh)
    names = by_family(program_names(run))
    found, errors = compile_all(plan, names, minutes)
    topology = here()
    rows: dict[str, Row] = {}
    # From small to large: a device only counts the most that was ever in use.
    for name in sorted(found, key=lambda name: found[name].measured.peak):
        say(f"{name}: calls")
        rows[name] = _row(found[name], plan, topology)
    for name, error in errors.items():
        rows[name] = {"error": error}
    return {
        "name": run.name,
        "devices": found_devices().name,
        "hosts": jax.process_count(),
        "slice": None if topology is None else topology.name,
        "mesh": mesh,
        "chosen": fitted.chosen,
        "programs": {name: rows[name] for name in program_names(run) if name in rows},
        "left_out": [name for name in program_names(run) if name not in rows],
    }


def by_family(names: Sequence[str]) -> list[str]:
    """The largest program of every family, then the second largest ones, and so on."""
    families: dict[str, list[str]] = {}
    for name in names:
        families.setdefault(re.sub(r" \d.*", "", name), []).append(name)
    ranks = {}
    for members in families.values():
        # By the tokens in the name: those that are computed, and cached ones that are read.
        order = sorted(members, key=lambda name: -sum(map(int, re.findall(r"\d+", name))))
        ranks |= {name: rank for rank, name in enumerate(order)}
    return sorted(names, key=lambda name: ranks[name])


def compile_all(
    plan: Plan, names: Sequence[str], minutes: float
) -> tuple[dict[str, Compiled], dict[str, str]]:
    """Compile programs, as many at a time as the host has cores and memory for.

    Returns:
        Those that every process has compiled, and the errors of others, by name.
    """
    end = time.monotonic() + 60 * minutes
    pool = ThreadPoolExecutor(compile_threads())
    futures: dict[str, Future[Compiled]] = {}
    for name in names:
        if time.monotonic() < end:
            # Tracing is Python code, so threads would not make it faster.
            planned = plan.program(name)
            with jax.set_mesh(planned.mesh):
                traced = planned.function.trace(*planned.arguments, **planned.options)
                lowered = traced.lower()
            futures[name] = pool.submit(_compile, planned, traced.jaxpr, lowered)
    wait(futures.values(), timeout=max(0.0, end - time.monotonic()))
    # Those that have begun are waited for.
    pool.shutdown(cancel_futures=True)
    done = {name: future for name, future in futures.items() if not future.cancelled()}
    errors = {
        name: str(future.exception()).splitlines()[0][:300]
        for name, future in done.items()
        if future.exception() is not None
    }
    everywhere = hosts.gather((sorted(done.keys() - errors.keys()), errors))
    common = set.intersection(*(set(compiled) for compiled, _ in everywhere))
    for _, others in everywhere:
        errors |= others
    return {name: done[name].result() for name in names if name in common}, errors


def _compile(planned: PlannedProgram, jaxpr: Any, lowered: jax.stages.Lowered) -> Compiled:
    start = time.monotonic()
    program = lowered.compile()
    seconds = time.monotonic() - start
    say(f"{planned.name}: compiled in {seconds:.0f} s")
    text = program.as_text()
    assert text is not None, "the compiler gives no text, from which traffic is counted"
    found = flops_of(jaxpr, planned) | statistics(program, text, planned)
    devices, read = planned.mesh.size, planned.read
    measured = Measured(planned.name, seconds=seconds, devices=devices, read=read, **found)
    return Compiled(planned, program, measured)


def _row(compiled: Compiled, plan: Plan, topology: Topology | None) -> Row:
    """What is printed of a program."""
    measured = compiled.measured
    row: Row = {
        "compiled_in": measured.seconds,
        "seconds": {"measured": None, "expected": None, "least": None},
        "bytes": {"measured": None, "planned": measured.peak},
    }
    if topology is not None:
        cost = with_work(measured, plan)
        row["seconds"]["expected"] = cost_of(cost, expected(topology)).seconds
        row["seconds"]["least"] = cost_of(cost, peak(topology)).seconds
    before = _peaks()
    try:
        row["seconds"]["measured"] = fastest(compiled, plan)
    except jax.errors.JaxRuntimeError as error:
        row["error"] = str(error).splitlines()[0][:300]
    after = _peaks()
    if after and max(after) > max(before):
        row["bytes"]["measured"] = max(after)
    return row


def _peaks() -> list[int]:
    """The most bytes in use so far on each device of all hosts; none where they do not count."""
    everywhere = hosts.gather([most for _, most in used_memory(jax.local_devices())])
    return [most for part in everywhere for most in part]


def with_work(measured: Measured, plan: Plan) -> Measured:
    """Adds the work that depends on lengths: here, every row is full and one segment."""
    tokens = [int(word) for word in measured.program.split() if word.isdigit()]
    if measured.pair_flops:
        pairs = tokens[0] * (tokens[0] + 1) / 2
        return dataclasses.replace(measured, flops=measured.flops + measured.pair_flops * pairs)
    if measured.program.startswith("decode"):
        engine = plan.run.engine_sizes
        # Every step reads the pages of every row.
        pages = engine.steps * engine.slots * tokens[0] * plan.token_bytes()
        return dataclasses.replace(measured, read=measured.read + pages)
    return measured


def here() -> Topology | None:
    """A slice with the chips that are here; None for devices whose rates are not known."""
    generation = generation_of(jax.devices()[0])
    if generation is None:
        return None
    slices = (found for found in known_slices() if found.name.startswith(f"{generation}:"))
    return next((found for found in slices if found.devices == jax.device_count()), None)


# --- calls ---


def fastest(compiled: Compiled, plan: Plan) -> float:
    """Seconds of the fastest call of a program."""
    values = Values(compiled.planned, plan)
    arguments = jax.tree.map_with_path(values.of, compiled.planned.arguments)
    spans = []
    for _ in range(1 + ROUNDS):
        jax.block_until_ready(arguments)
        start = time.perf_counter()
        jax.block_until_ready(compiled.program(*arguments))
        spans.append(time.perf_counter() - start)
        arguments = jax.tree.map_with_path(
            lambda path, x, old: values.of(path, x) if _donated(old) else old,
            compiled.planned.arguments,
            arguments,
        )
    return min(spans[1:])


def _donated(x: Any) -> bool:
    return isinstance(x, jax.Array) and x.is_deleted()


class Values:
    """Arrays for the abstract arguments of a program, so that it does as much as it ever does."""

    def __init__(self, planned: PlannedProgram, plan: Plan):
        self._plan = plan
        engine = plan.run.engine_sizes
        words = planned.name.split()
        tokens, before = [*(int(word) for word in words if word.isdigit()), 0, 0][:2]
        # By the name of the field. Integers that are not named are 0, truth values true.
        self._numbers = {
            "segments": 1,
            "visual_index": -1,
            "lengths": tokens,
            "before": before,
            "own_tokens": tokens,
            "left": engine.steps,
            "stops": -1,
        }
        most = {
            "ids": plan.config.image_token_id,
            "tokens": plan.config.image_token_id,
            "index": 64,
            "tables": engine.pages,
            "seeds": 2**31,
        }
        self._most = {name: max(1, count) for name, count in most.items()}

    def of(self, path: tuple, x: Any) -> Any:
        """The array for an argument, or for a part of one."""
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        name = jax.tree_util.keystr(path[-1:], simple=True) if path else ""
        if jnp.issubdtype(x.dtype, jnp.floating):
            if name in ("temperatures", "top_p"):
                return np.ones(x.shape, x.dtype)
            return _pattern(x.shape, x.dtype, x.sharding)()
        return _on_devices(self._whole(name, x), x.sharding)

    def _whole(self, name: str, x: jax.ShapeDtypeStruct) -> np.ndarray:
        """The value of an array of integers or truth values."""
        if name == "positions":
            return np.broadcast_to(np.arange(x.shape[-1], dtype=x.dtype), x.shape)
        if name == "grids":
            return np.broadcast_to(np.array(self._plan.grid(), x.dtype), x.shape)
        if name in self._most:
            return (
                (np.arange(math.prod(x.shape)) % self._most[name]).astype(x.dtype).reshape(x.shape)
            )
        default = x.dtype == bool
        return np.full(x.shape, self._numbers.get(name, default), x.dtype)


def _on_devices(value: np.ndarray, sharding: Any) -> Any:
    if sharding is None:
        return value
    return jax.make_array_from_callback(value.shape, sharding, lambda part: value[part])


@functools.cache
def _pattern(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Callable[[], jax.Array]:
    """Makes small numbers that look random, without memory besides the result."""

    def pattern() -> jax.Array:
        number = jnp.zeros(shape, jnp.uint32)
        for axis in range(len(shape)):
            place = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
            number = (number + place) * np.uint32(2654435761) ^ (number >> 15)
        return ((number >> 16).astype(jnp.float32) / 2**20 - 1 / 32).astype(dtype)

    return jax.jit(pattern, out_shardings=sharding)


def say(line: str) -> None:
    """Tell on stderr how far the first process is."""
    if hosts.is_first():
        print(line, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.slice",
        description=__doc__,
        usage="python -m benchmarks.slice --config=NAME [--minutes N] [--field value ...]",
        add_help=False,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=8.0,
        help="no program begins to compile after these; default: %(default)s",
    )
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        # The options of the recipe follow: its parser prints them and exits.
        print(parser.format_help())
    options, rest = parser.parse_known_args(argv)
    run = parse(rest, RECIPES, "python -m benchmarks.slice")
    gpu.reserve_memory()
    try:
        cluster.connect(run.hosts)
        found = measure(run, options.minutes)
    except (ValueError, hosts.HostsError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if hosts.is_first():
        print(json.dumps(found, indent=1))
    return int(any("error" in row for row in found["programs"].values()))


if __name__ == "__main__":
    raise SystemExit(main())
