"""From single programs to a training step: memory of devices and hosts, and times of its phases.

All functions are pure: they combine what was measured per program with the run's settings and the
lengths of its sequences. A lower limit on a phase is the slowest of arithmetic, HBM and
interconnect at their peak rates. Its expected time has the rates of `rates.expected`.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence

from models.attention.paged import BLOCK
from models.config import ModelConfig
from models.flops import flops_per_token
from paravt_extras.plan import rates
from paravt_extras.plan.collectives import DCN
from paravt_extras.plan.compile import Measured, on_host
from paravt_extras.plan.programs import microbatch_sizes, planned_config, shares_bank, update_name
from paravt_extras.plan.rates import Cost, Rates
from paravt_extras.plan.rollouts import EngineCosts, Played, Row, play, shares
from paravt_extras.plan.tiles import flash_attention
from paravt_extras.plan.workload import Workload, lengths_of
from paravt_extras.slices import Topology
from train.learn.packing import pack
from train.settings import Run, change

GIB = 2.0**30


@dataclasses.dataclass(frozen=True)
class Together:
    """Bytes on a device while a program runs."""

    program: str
    peak: float
    """Memory of the program itself, including its arguments."""
    others: dict[str, float]
    """Residents that are on the device but not among the program's arguments."""

    @property
    def total(self) -> float:
        return self.peak + sum(self.others.values())


@dataclasses.dataclass(frozen=True)
class Phase:
    """Times of one phase of a step, in seconds."""

    phase: str
    calls: float
    """Calls of its program; a mean over several steps."""
    compute: float
    """At the peak rate, as in the next two."""
    memory: float
    interconnect: float
    seconds: float
    """Lower limit: at the peak rates."""
    expected: float
    """At the rates of `paravt_extras.plan.rates.expected`."""


def _ceil_divide(a: int, b: int) -> int:
    return -(-a // b)


def held_together(measured: Measured, residents: dict[str, float]) -> Together:
    """Adds up the memory of a device while a program runs.

    Args:
        measured: the program.
        residents: bytes on a device of everything that stays there between programs, by name.
    """
    # The engine sleeps from the last rollout until it receives new weights: its weights and pages
    # are freed. The batch exists only during that time.
    if on_host(measured.program):
        absent = {"batch"}
    else:
        absent = {"engine's weights", "KV pool"}
    others = {
        name: size
        for name, size in residents.items()
        if name not in absent and name not in measured.given
    }
    return Together(measured.program, measured.peak, others)


def rollouts_at_once(run: Run, topology: Topology) -> tuple[int, int, int]:
    """Rollouts on the host with the most prompts, if all of them have the maximum length.

    Returns:
        (rollouts of a step, rollouts that run at once, pages that would let rollouts fill all
        slots).
    """
    engine = run.engine_sizes
    if run.rl is None:
        return engine.slots, engine.slots, engine.pages
    shape = run.rl_shape
    prompts = _ceil_divide(shape.groups, topology.hosts)
    rollouts = prompts * shape.rollouts
    # A group shares the pages of its prompt, except for a partly filled last page: every rollout
    # has its own copy of that page, in addition to the pages of its own tokens.
    shared_pages = prompts * _ceil_divide(shape.limits.prompt, engine.page)
    own_pages = _ceil_divide(shape.limits.response, engine.page) + 1
    in_slots = min(rollouts, engine.slots)
    at_once = max(1, min(in_slots, (engine.pages - shared_pages) // own_pages))
    return rollouts, at_once, shared_pages + in_slots * own_pages


def pages_advice(run: Run, topology: Topology, free: float, page: float) -> list[str]:
    """Suggests more pages if more rollouts could then run at once and the memory is free.

    Args:
        free: bytes of a device that no program of the rollouts needs.
        page: bytes of one page on a device.
    """
    engine = run.engine_sizes
    rollouts, at_once, pages = rollouts_at_once(run, topology)
    if pages <= engine.pages or (pages - engine.pages) * page > free:
        return []
    return [
        f"decode: engine.cache_tokens = {engine.pages * engine.page}: of a host's {rollouts} "
        f"rollouts of the maximum length, {at_once} run at once. {pages * engine.page} would hold "
        f"{min(rollouts, engine.slots)}, and {free / GIB:.2f} GiB are free"
    ]


def phases_of(
    run: Run,
    topology: Topology,
    measured: dict[str, Measured],
    sizes: dict[str, float],
    workload: Workload | None,
) -> list[Phase]:
    """The phases of a step, in their order.

    Args:
        measured: the programs that compiled, by name.
        sizes: bytes on a device of "engine's weights" and "KV pool".
        workload: lengths of the step's sequences; None if the run has no RL.
    """
    found = []
    families = {name.split()[0] for name in measured}
    if workload is not None and families >= {"vision", "prefill", "decode"}:
        found += rollout_phases(run, topology, measured, sizes, workload)
    for name, calls in learner_calls(run, workload).items():
        if name in measured:
            found.append(phase_of(measured[name], calls, topology))
    return found


def sent_between_slices(
    run: Run, measured: dict[str, Measured], workload: Workload | None
) -> dict[str, float]:
    """Bytes per device that the programs of a step send to other slices, by program."""
    calls = learner_calls(run, workload)
    sent = {
        name: count * measured[name].sent.get(DCN, 0.0)
        for name, count in calls.items()
        if name in measured
    }
    return {name: size for name, size in sent.items() if size}


def learner_calls(run: Run, workload: Workload | None) -> dict[str, float]:
    """Calls of each program of training in a step: means over the steps of a workload.

    "RL start" is left out: it only fills memory with zeros.

    Micro-batches are chosen as a run chooses them (`train.learn.packing.pack`).
    """
    if workload is None or run.rl is None:
        return {"SFT update": 1.0}
    updates = run.rl.updates_per_batch
    sizes = microbatch_sizes(run)
    packed = [pack(lengths_of(step), sizes) for step in workload.steps]
    used = collections.Counter(part.shape.tokens for parts in packed for part in parts)
    calls = {tokens: used[tokens] / len(packed) for tokens in sorted(used, reverse=True)}
    names = {f"reference {tokens}": count for tokens, count in calls.items()}
    names |= {update_name(tokens, later=False): count for tokens, count in calls.items()}
    if updates > 1:
        names |= {update_name(tokens, later=True): (updates - 1) * n for tokens, n in calls.items()}
    if run.train_vision != "none":
        names["RL vision"] = float(updates)
    if shares_bank(run):
        names["RL bank"] = 1.0
    return names | {"RL optimizer": float(updates), "weight sync": 1.0}


def with_attention(
    run: Run, measured: dict[str, Measured], workload: Workload | None
) -> dict[str, Measured]:
    """Adds the FLOPs of attention in packed rows to those of the programs.

    A call has the pairs of a row that the programs of its size compute on average over the steps of
    a workload: those in the tiles that the TPU's kernel visits, on the device with most of them. A
    size that is not used gets none.
    """
    if workload is None or run.rl is None:
        return measured
    pairs = packed_pairs(run, workload)

    def added(m: Measured) -> Measured:
        if not m.pair_flops:
            return m
        tokens = next(word for word in m.program.split() if word.isdigit())
        more = m.pair_flops * pairs.get(tokens, 0.0)
        return dataclasses.replace(m, flops=m.flops + more)

    return {name: added(m) for name, m in measured.items()}


def packed_pairs(run: Run, workload: Workload) -> dict[str, float]:
    """Pairs per call by the tokens of a row, as means over the micro-batches of a workload."""
    config = planned_config(run)
    count = flash_attention(config).pairs
    found: dict[str, list[float]] = {}
    for step in workload.steps:
        groups = lengths_of(step)
        for microbatch in pack(groups, microbatch_sizes(run)):
            pairs = count(microbatch, groups)
            found.setdefault(str(microbatch.shape.tokens), []).append(pairs)
    return {tokens: sum(pairs) / len(pairs) for tokens, pairs in found.items()}


def phase_of(measured: Measured, calls: float, topology: Topology) -> Phase:
    """The times of `calls` calls of a program."""
    least, likely = (
        rates.cost_of(measured, speeds).times(calls)
        for speeds in (rates.peak(topology), rates.expected(topology))
    )
    return _phase(measured.program, calls, least, least.seconds, likely.seconds)


def _phase(name: str, calls: float, least: Cost, seconds: float, expected: float) -> Phase:
    interconnect = least.links + least.synchronous
    return Phase(name, calls, least.compute, least.memory, interconnect, seconds, expected)


def rollout_phases(
    run: Run,
    topology: Topology,
    measured: dict[str, Measured],
    sizes: dict[str, float],
    workload: Workload,
) -> list[Phase]:
    """Phases of the rollouts on the slowest host, as means over the steps of a workload.

    The other hosts wait for it. The phase "tail" is a part of "decode".
    """
    played = [
        slowest_host(run, topology.hosts, engine_costs(run, measured, sizes, speeds), workload)
        for speeds in (rates.peak(topology), rates.expected(topology))
    ]
    found = []
    for name in ("vision", "prefill", "decode", "tail", "tools"):
        count = len(workload.steps)
        least = Cost()
        for of_step in played[0]:
            least = least.plus(of_step.phases.get(name, Cost()))
        calls = sum(of_step.calls.get(name, 0) for of_step in played[0]) / count
        seconds, expected = (
            sum(of_step.seconds.get(name, 0.0) for of_step in at_rates) / count
            for at_rates in played
        )
        if calls:
            found.append(_phase(name, calls, least.times(1 / count), seconds, expected))
    return found


def slowest_host(run: Run, hosts: int, costs: EngineCosts, workload: Workload) -> list[Played]:
    """Per step of a workload, the rollouts of the host that takes longest."""
    sizes = run.engine_sizes
    turn = run.protocol.turn_tokens
    return [
        max(
            (play(groups, workload, sizes, turn, costs) for groups in shares(step, hosts)),
            key=lambda played: played.total,
        )
        for step in workload.steps
    ]


def engine_costs(
    run: Run, measured: dict[str, Measured], sizes: dict[str, float], speeds: Rates
) -> EngineCosts:
    """Costs of the engine's programs on a host, for arrays of any length.

    FLOPs and bytes follow from the lengths. What the devices send to each other per token is taken
    from the largest of the compiled programs.
    """
    engine = run.engine_sizes
    config = planned_config(run)
    # The pool has one page more than the engine hands out (`Programs.make_pool`).
    token_bytes = sizes["KV pool"] / ((engine.pages + 1) * engine.page)
    # Every token reads them: the trained ones, and the base in the place where the engine has it.
    base = sizes.get("engine's base", sizes.get("base", 0.0))
    weights = sizes["engine's weights"] + base
    decode = _largest(measured, "decode")
    prefill = _largest(measured, "prefill")
    head = flops_per_token(config, 0.0) - _flops_without_head(config, 0.0)

    def token(rows: Sequence[Row]) -> Cost:
        contexts = [row.context for row in rows]
        # The kernel fetches whole blocks of tokens, and one for every row without a sequence.
        blocks = [math.ceil((context + 1) / BLOCK) for context in contexts]
        read = (sum(blocks) + engine.slots - len(contexts)) * BLOCK
        context = sum(contexts) / engine.slots
        flops = engine.slots * (_flops_without_head(config, context) + head)
        return Cost(
            flops / decode.devices / speeds.flops,
            (weights + read * token_bytes) / speeds.hbm,
            synchronous=sum(decode.sent.values()) / engine.steps / speeds.host_links,
        )

    def prefilled(rows: int, length: int, before: int) -> Cost:
        tokens = rows * length
        flops = tokens * _flops_without_head(config, before + (length + 1) / 2)
        read = weights + rows * before * token_bytes
        sent = sum(prefill.sent.values()) * tokens / engine.prefill_tokens
        return Cost(
            flops / decode.devices / speeds.flops,
            read / speeds.hbm,
            synchronous=sent / speeds.host_links,
        )

    def frames(count: int) -> Cost:
        vision = measured["vision"]
        batch = run.frames.batch_of(run.frame_tokens, vision.devices)
        return rates.cost_of(vision, speeds).times(math.ceil(count / batch))

    return EngineCosts(token, prefilled, frames)


def _largest(measured: dict[str, Measured], family: str) -> Measured:
    """The program of a family that sends most."""
    members = [m for name, m in measured.items() if name.split()[0] == family]
    return max(members, key=lambda m: sum(m.sent.values()))


def _flops_without_head(config: ModelConfig, context: float) -> float:
    head = 2.0 * config.text.vocab_size * config.text.hidden_size
    return flops_per_token(config, context) - head


def tokens_of(run: Run) -> int:
    """Tokens of an update if every sequence is as long as it may be, each prompt once."""
    if run.rl is not None:
        return run.rl_shape.tokens
    return 0 if run.sft is None else run.sft.rows * run.sft.row_tokens


def host_memory(
    run: Run, topology: Topology, arrays: dict[str, float], replicas: int = 1
) -> dict[str, float]:
    """Bytes that the process of one host needs, besides its programs and libraries.

    Args:
        arrays: bytes over all devices, by name: `batch`, `state` (copied by a checkpoint),
            `reference`, `tower` (as it is saved), `pieces` (of one call of prefill) and `offloaded`
            (kept on hosts during an update, see rl.remat and sft.remat).
        replicas: copies of the reference on the mesh (mesh.data). A checkpoint needs no copies:
            each replica saves a part of the state.
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


def held(together: Together, measured: Measured, available: float) -> list[str]:
    """Explains the memory of a program that does not fit into `available` bytes."""
    largest_first = sorted(together.others.items(), key=lambda item: -item[1])
    others = "".join(f", {name} {size / GIB:.2f}" for name, size in largest_first)
    lines = [
        f"{together.program}: {(together.total - available) / GIB:.2f} GiB too much. Held: the "
        f"program {together.peak / GIB:.2f}{others}."
    ]
    if together.peak > available / 2 and measured.largest:
        lines.append(
            f"{together.program}: its largest temporaries are {'; '.join(measured.largest)}"
        )
    return lines


def remedies(programs: set[str], run: Run, pool: float, topology: Topology) -> list[str]:
    """Suggests settings that free memory.

    Args:
        programs: the programs that do not fit.
        pool: bytes of the KV pool on a device.
    """
    engine = run.engine_sizes
    found: list[str] = []
    if any(on_host(program) for program in programs):
        tokens = engine.pages * engine.page
        found.append(
            f"engine.cache_tokens = {tokens}: {tokens // 2} would free {pool / 2 / GIB:.2f} GiB, "
            "and hold half as many rollouts at once"
        )
    if any(program.startswith("prefill") for program in programs):
        found.append(
            f"engine.read_tokens = {engine.read_tokens}: with fewer, a call of prefill has fewer "
            "rows that attend to cached tokens"
        )
    if any(name.startswith("RL update") for name in programs):
        found += _update_remedies(run)
    if "RL optimizer" in programs:
        found += _optimizer_remedies(run, topology)
    if run.rl is not None and run.rl.optimizer.moment_dtype == "float32":
        found.append(
            "rl.optimizer.moment_dtype = 'float32': 'bfloat16' halves the first moment, which "
            "stays on the device during every program"
        )
    found.append("--topology: a slice of more chips; weights and moments are sharded over all")
    return found


def _optimizer_remedies(run: Run, topology: Topology) -> list[str]:
    """The optimizer's step holds weights, moments and gradients, whatever the batch."""
    rl = run.rl
    assert rl is not None
    found = []
    least = topology.slices
    if run.mesh.data > least:
        found.append(
            f"mesh.data = {run.mesh.data}: with {least} and a larger mesh.fsdp, weights, moments "
            f"and gradients take {least}/{run.mesh.data} of the memory on each device"
        )
    if rl.optimizer.name == "adamw":
        found.append(
            "rl.optimizer.name = 'adamw': 'muon', another method, keeps one moment of the layers' "
            "matrices instead of two"
        )
    return found


def _update_remedies(run: Run) -> list[str]:
    rl = run.rl
    assert rl is not None
    found = []
    sizes = microbatch_sizes(run)
    smallest = microbatch_sizes(change(run, run.name, {"rl.microbatch_tokens": 1}))[0]
    if sizes[0].tokens > smallest.tokens:
        found.append(
            f"rl.microbatch_tokens = {rl.microbatch_tokens}: more micro-batches have fewer tokens "
            f"each, down to {smallest.places}"
        )
    if rl.logprob_chunk is None or rl.logprob_chunk > 128:
        found.append(
            f"rl.logprob_chunk = {rl.logprob_chunk}: 128 holds the logits of fewer tokens at once"
        )
    if rl.remat != "offload":
        found.append(
            f"rl.remat = {rl.remat!r}: 'full' keeps only the inputs of layers, 'offload' keeps "
            "them on the host"
        )
    return found
