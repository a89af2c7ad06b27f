"""From single programs to a step of training: what lies on a device together, what a host holds, and how fast a step could be.

Owns three sums and the counts of calls in a step. Times are lower limits: the largest of what arithmetic, memory and interconnect take at
their peaks, with every rollout as long as it may be. Refuses nothing. Invariant: pure functions of what was measured and of the settings.
"""

from __future__ import annotations

import dataclasses

from models.qwen3_vl.config import Qwen3VLConfig
from models.qwen3_vl.flops import flops_per_token
from train.learn.batch import BatchShape
from train.learn.placement import fit, parts_of
from train.plan.compile import ROLLOUTS, Measured
from train.plan.programs import mean_context
from train.plan.topology import Topology
from train.settings import Run

GIB = 2.0**30


@dataclasses.dataclass(frozen=True)
class Together:
    """What a device holds while a program runs, in bytes: the program's own peak, and what else lies there."""

    program: str
    peak: float
    others: dict[str, float]

    @property
    def total(self) -> float:
        return self.peak + sum(self.others.values())


@dataclasses.dataclass(frozen=True)
class Limit:
    """Least seconds of a phase of a step: of arithmetic, of memory, of the interconnect."""

    phase: str
    calls: int
    compute: float
    memory: float
    interconnect: float

    @property
    def seconds(self) -> float:
        return max(self.compute, self.memory, self.interconnect)


def held_together(measured: Measured, residents: dict[str, float]) -> Together:
    """Residents of the program's phase that it is not given lie beside it. The engine sleeps from the last rollout until the new weights
    are there, and there is a batch meanwhile."""
    away = {"batch"} if measured.program in ROLLOUTS else {"engine's weights", "KV pool"}
    there = {name: size for name, size in residents.items() if name not in away}
    return Together(
        measured.program,
        measured.peak,
        {name: size for name, size in there.items() if name not in measured.given},
    )


def rollouts_at_once(run: Run, topology: Topology) -> tuple[int, int, int]:
    """Of the host that has most prompts: its rollouts of a step, how many of them have slots and pages at a time where all are as long as
    they may be, and the pages that as many as have slots would take. A group's prompt is on its pages once."""
    engine = run.engine_sizes
    if run.rl is None:
        return engine.slots, engine.slots, engine.pages
    shape = run.rl_shapes[0]
    prompts = -(-shape.groups // topology.hosts)
    rows, own = prompts * shape.rows, -(-shape.suffix // engine.page) + 1
    shared = prompts * -(-shape.prompt // engine.page)
    most = min(rows, engine.slots)
    return rows, max(1, min(most, (engine.pages - shared) // own)), shared + most * own


def pages_advice(run: Run, topology: Topology, free: float, page: float) -> list[str]:
    """Where more pages would let more rollouts run at once, and `free` bytes of a device have room for these; `page`: bytes of one."""
    engine = run.engine_sizes
    rows, at_once, pages = rollouts_at_once(run, topology)
    if pages <= engine.pages or (pages - engine.pages) * page > free:
        return []
    return [
        f"decode: engine.cache_tokens = {engine.pages * engine.page}; of a host's {rows} rollouts, all as long as they may be, {at_once} "
        f"run at once. {pages * engine.page} would hold {min(rows, engine.slots)}, and {free / GIB:.2f} GiB are free"
    ]


def calls_of(run: Run, topology: Topology, prefill_rows: int) -> dict[str, int]:
    """How often each program runs in a step of RL, on the host that has most of it: prompts are shared out over hosts."""
    if run.rl is None:
        return {"SFT update": 1}
    engine, prompts = run.engine_sizes, -(-run.rl.prompts // topology.hosts)
    rows, at_once, _ = rollouts_at_once(run, topology)
    return {
        "vision": -(-prompts * max(run.rl.frame_budgets) // run.frames.batch),
        "prefill": -(-prompts // prefill_rows),
        "decode": -(-rows // at_once) * -(-run.protocol.trajectory_tokens // engine.steps),
        "reference": 1,
        "RL update": 1,
        "weight sync": 1,
    }


def decode_read(run: Run, topology: Topology, sizes: dict[str, float]) -> float:
    """Bytes of HBM that a device reads in a call of decoding: for every token all weights, and what its host's rollouts have on pages."""
    engine, rows = run.engine_sizes, rollouts_at_once(run, topology)[1]
    token = sizes["KV pool"] / ((engine.pages + 1) * engine.page)
    return engine.steps * (sizes["engine's weights"] + rows * mean_context(run) * token)


def limit(measured: Measured, calls: int, topology: Topology) -> Limit:
    """Least seconds that `calls` of a program take."""
    chip = topology.chip
    part = 1 / chip.devices  # of a chip's peaks that one device has
    return Limit(
        measured.program,
        calls,
        calls * measured.flops / measured.devices / (chip.flops * part),
        calls * measured.read / (chip.hbm_rate * part),
        calls * sum(measured.sent.values()) / (chip.ici_rate * part),
    )


def model_flops(shape: BatchShape, config: Qwen3VLConfig) -> float:
    """6 N D and attention of an update, prompts once: what a step is worth, without padding and without what is computed again.

    N are the weights that multiply: the head for rows alone.
    """
    head = 2.0 * config.text.vocab_size * config.text.hidden_size
    prompts = shape.groups * shape.prompt * (flops_per_token(config, (shape.prompt + 1) / 2) - head)
    rows = (
        shape.groups
        * shape.rows
        * shape.suffix
        * flops_per_token(config, shape.prompt + (shape.suffix + 1) / 2)
    )
    return 3.0 * (prompts + rows)


def shapes_of(run: Run) -> list[BatchShape]:
    """What an update reads: main agents, and sub-agents where these are trained; of SFT where there is no RL. A packed row stands as a
    prompt of one token and the rest."""
    if run.rl is not None:
        return [*run.rl_shapes]
    if run.sft is None:
        return []
    shape = run.sft.shape
    return [BatchShape(shape.rows, 1, 1, shape.visual, shape.tokens - 1)]


def tokens_of(run: Run) -> int:
    """Tokens of a step's batch: every prompt once, and its rows."""
    return sum(
        shape.groups * (shape.prompt + shape.rows * shape.suffix) for shape in shapes_of(run)
    )


def padding_advice(run: Run, topology: Topology, mesh: tuple[int, int, int]) -> list[str]:
    """Where an update's rows are padded: how many micro-batches pad less, if that is more than an eighth; and what could be learnt from
    instead of padding, if what is left is more than a sixth."""
    if run.rl is None:
        return []
    shape, devices = run.rl_shapes[0], mesh[0] * mesh[1]
    parts = parts_of(shapes_of(run), devices, run.rl.microbatches, topology.hosts)
    rows = {n: fit(shape, devices, n).groups * shape.rows for n in range(1, parts + 1)}
    rows = {n: count for n, count in rows.items() if count // shape.rows % topology.hosts == 0}
    best = max((n for n in rows if rows[n] == min(rows.values())), default=parts)
    found, groups = [], rows[best] // shape.rows
    if best != parts and rows[parts] * 8 > shape.groups * shape.rows * 9:
        found.append(
            f"RL update: rl.microbatches = {run.rl.microbatches}, so {parts} parts; over mesh.data x mesh.fsdp = {mesh[0]} x {mesh[1]} "
            f"devices {shape.groups * shape.rows} rows are padded to {rows[parts]}, with {best} to {rows[best]}"
        )
    if groups * 6 > shape.groups * 7:
        cause = (
            f"as many whole groups on each of {topology.hosts} hosts"
            if topology.hosts > 1
            else f"evenly over {devices} devices"
        )
        found.append(
            f"RL update: {shape.groups} groups of rollouts are laid out as {groups}, {cause}; an update of rl.prompts = {groups} "
            "costs the same"
        )
    return found


def host_memory(
    run: Run, topology: Topology, arrays: dict[str, float], replicas: int = 1
) -> dict[str, float]:
    """Bytes that one host's process needs beside its programs and libraries. The reference lies on the mesh `replicas` times
    (`mesh.data`); of a checkpoint each replica copies its part.

    `arrays`: bytes over all devices of `batch`, of the `state` that a checkpoint copies before it is written, of the `reference`, of the
    `tower` as it is saved, and of one call's `pieces` of prefill; and what updates leave on hosts, `offloaded` (`rl.remat`, `sft.remat`).
    """
    return {
        "store of frames' features (frames.cache_mib)": run.frames.cache_mib * 2.0**20,
        "its share of the batch": arrays["batch"] / topology.hosts,
        "its share of a checkpoint in flight": arrays["state"] / topology.hosts,
        "its share of the reference": arrays["reference"] * replicas / topology.hosts,
        "the frozen tower": arrays["tower"],
        "one call's pieces of prefill": arrays["pieces"],
        "layers' inputs (remat offload)": arrays["offloaded"] / topology.hosts,
    }


def held(together: Together, measured: Measured, limit: float) -> list[str]:
    """What holds the memory where it does not fit."""
    beside = "".join(
        f", {name} {size / GIB:.2f}"
        for name, size in sorted(together.others.items(), key=lambda x: -x[1])
    )
    lines = [
        f"{together.program}: {(together.total - limit) / GIB:.2f} GiB too much. Held: the program {together.peak / GIB:.2f}{beside}."
    ]
    if together.peak > limit / 2 and measured.largest:
        lines.append(
            f"{together.program}: its largest temporaries are {'; '.join(measured.largest)}"
        )
    return lines


def remedies(
    programs: set[str], run: Run, pool: float, topology: Topology, devices: int
) -> list[str]:
    """Fields that would free some memory of these programs, which do not fit; `pool`: bytes of the pool on a device. Rows of an update
    lie over so many `devices`."""
    engine, found = run.engine_sizes, list[str]()
    if programs & {*ROLLOUTS}:
        tokens = engine.pages * engine.page
        found.append(
            f"engine.cache_tokens = {tokens}: {tokens // 2} would free {pool / 2 / GIB:.2f} GiB, and hold half as many rollouts at once"
        )
    if any(program.startswith("prefill") for program in programs):
        found.append(
            f"engine.read_tokens = {engine.read_tokens}: with fewer, fewer rows of a prefill read what is there already"
        )
    if "RL update" in programs and run.rl is not None:
        rl = run.rl
        parts, most = (
            parts_of(shapes_of(run), devices, n, topology.hosts)
            for n in (rl.microbatches, rl.prompts)
        )
        if parts < most:
            found.append(
                f"rl.microbatches = {rl.microbatches}: more parts have fewer rows at a time, down to one a device"
            )
        if rl.logprob_chunk is None or rl.logprob_chunk > 128:
            found.append(
                f"rl.logprob_chunk = {rl.logprob_chunk}: 128 holds fewer scores of the vocabulary"
            )
        if rl.remat != "offload":
            found.append(
                f"rl.remat = {rl.remat!r}: 'full' keeps nothing but layers' inputs, 'offload' keeps those on the host"
            )
    if run.rl is not None and run.rl.optimizer.moment_dtype == "float32":
        found.append(
            "rl.optimizer.moment_dtype = 'float32': 'bfloat16' halves the first moment, which lies beside every program"
        )
    return [
        *found,
        "--topology: a slice of more chips; weights and moments are cut over all of them",
    ]
