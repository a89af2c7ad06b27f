"""`python -m paravt_extras.plan --config=NAME --topology=v5p:4x4x4 [--only decode] [--field V]`

Compiles the programs of a run for a TPU slice, on a machine without one, and prints whether they
fit in memory, and a floor of the time of a call: FLOPs and bytes as the compiler counts them, at
the peak rates. Kernels are not among them. Nothing is executed.

Before that, it prints what decoding the longest rollouts reads and how long that takes: arithmetic.

The programs are those that a run itself compiles ahead (`lowerings`), given the shapes of arrays
instead of arrays.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from configs import RECIPES
from models.compilation import program_name
from models.config import ModelConfig
from models.features.encoder import tower_mesh, tower_program
from models.lora import cast
from models.model import VisionLanguageModel, abstract_model
from models.sharding import BATCH, Lowering, MeshProgram, make_mesh, param_shardings, row_devices
from models.trained import Skeleton, TrainedVision, cached_shape, split, split_vision
from models.vision import encoding_weights
from paravt_extras.fit import GIB, device_bytes, fit, mesh_error
from paravt_extras.slices import Chip, Topology
from paravt_jax.method.grpo.loss import batch_totals
from paravt_jax.world.vocabulary import world_vocabulary
from rollout.engine.runner import ModelRunner
from train.cli import parse
from train.learn.batch import Microbatch, build
from train.learn.in_flight import deal
from train.learn.optimizer import make_optimizer
from train.learn.packing import PackedMicrobatch, VisualRoom
from train.learn.placement import Bank, bank_sharding, row_pieces, shardings
from train.learn.rl import rl_loss
from train.learn.rl_batch import RLBatch, empty_step
from train.learn.sft import sft_loss
from train.learn.update import TrainState, Updater, like, make_logprobs, state_shardings
from train.learn.weight_sync import host_mesh, make_sync, sampler_devices, stay
from train.model import model_config
from train.settings import Run

_USAGE = 2  # the exit code of argparse and tyro for a wrong command line
_OUT_OF_MEMORY = re.compile(r"Ran out of memory|exceeds available HBM", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class PlannedModel:
    """A run's model on the mesh of training, with shapes instead of arrays."""

    run: Run
    mesh: Mesh
    config: ModelConfig
    model: VisionLanguageModel
    skeleton: Skeleton
    weights: Any
    """The trained weights."""

    @staticmethod
    def of(run: Run, mesh: Mesh, config: ModelConfig | None = None) -> PlannedModel:
        """Return the model of a run; `config` replaces the sizes of the recipe."""
        if config is None:
            config = run.model.config()
            if run.model.size == "tiny":
                # Its vocabulary is made from the world's texts, here as in a run.
                config = model_config(run, world_vocabulary(run.protocol, run.model.dialect))
        dtype = jnp.dtype(run.model.dtype)
        model = abstract_model(config, dtype=dtype, param_dtype=run.param_dtype, lora=run.lora)
        graph, *states = split(model, run.train_vision)
        weights, frozen = (like(x, param_shardings(x, mesh)) for x in states)
        vision = TrainedVision.of(model.vision, run.train_vision, run.largest_frame)
        return PlannedModel(run, mesh, config, model, Skeleton(graph, frozen, vision), weights)

    @property
    def dtype(self) -> Any:
        """Type of the activations."""
        return jnp.dtype(self.run.model.dtype)

    def state(self, optimizer: optax.GradientTransformation) -> TrainState:
        """Return the state of training before the first update."""
        moments = jax.eval_shape(optimizer.init, self.weights)
        step: Any = _shape((), jnp.int32)
        state = TrainState(self.weights, moments, step)
        placed = like(state, state_shardings(state))
        # `Program.held` compares by identity, so keep these very objects.
        return dataclasses.replace(placed, weights=self.weights)

    def bank(self, room: VisualRoom) -> Bank:
        """Return what is cached of a step's frames."""
        vision, rows = self.skeleton.vision, row_devices(self.mesh)
        vector, slots, grids = cached_shape(self.config.vision, "none"), room.slots, None
        sharding = bank_sharding(self.mesh)
        if vision is not None:
            vector, sharding = vision.vector, NamedSharding(self.mesh, BATCH)
            if vision.whole:
                slots = room.frames * vision.frame_tokens
                grids = like(_shape((rows, room.frames, 2), jnp.int32), sharding)
        return Bank(like(_shape((rows, slots, *vector), self.dtype), sharding), grids)


@dataclasses.dataclass(frozen=True)
class PlannedStep:
    """What the updates of a phase take."""

    updater: Updater
    bank: Bank
    microbatches: Sequence[Microbatch]
    """An empty micro-batch of every size, the largest first."""
    batches: Sequence[Any]
    """Inputs of the loss besides the micro-batch, one per kind of update."""

    @property
    def lowerings(self) -> Iterator[Lowering]:
        """The programs of an update."""
        inputs = list(itertools.product(self.microbatches, self.batches))
        return self.updater.lowerings(self.updater.initial, self.bank, inputs)


def sft_step(planned: PlannedModel) -> PlannedStep:
    """Return a step of the cold start. No data are known, so its rows are full of visual tokens."""
    run, devices = planned.run, row_devices(planned.mesh)
    assert run.sft is not None, f"{run.name} has no cold start"
    frames = math.ceil(run.sft.row_tokens / min(run.frame_tokens(), run.frame_tokens(crop=True)))
    shape = dataclasses.replace(run.sft.shape, frames=frames)
    shape = shape.fitted(run.sft.microbatches, devices)
    optimizer = make_optimizer(run.sft.optimizer, schedule=run.sft.learning_rate)
    state, room = planned.state(optimizer), shape.room(devices)
    several = shape.microbatches > 1
    updater = Updater(planned.skeleton, state, optimizer, sft_loss(run.sft), room.slots, several)
    packed = PackedMicrobatch(shape.microbatch, ())
    microbatch = build(packed, [], planned.config, shape.rows, shape.tokens)
    # Conversations share no prompts.
    microbatch = dataclasses.replace(microbatch, starts=None, shared=None)
    mask: Any = np.zeros((shape.rows, shape.tokens), bool)
    microbatch, mask = like((microbatch, mask), shardings((microbatch, mask), planned.mesh))
    return PlannedStep(updater, planned.bank(room), [microbatch], [mask])


def rl_step(planned: PlannedModel) -> PlannedStep:
    """Return a step of PARA-GRPO."""
    run, mesh = planned.run, planned.mesh
    assert run.rl is not None, f"{run.name} has no RL"
    shape, devices = run.rl_shape, row_devices(mesh)
    processes = len({device.process_index for device in mesh.devices.flat})
    room = shape.room(processes, devices)
    optimizer = make_optimizer(run.rl.optimizer, run.model.dtype)
    state = planned.state(optimizer)
    updater = Updater(planned.skeleton, state, optimizer, rl_loss(run.rl), room.slots)
    pieces = row_pieces(planned.config.text, mesh.shape["fsdp"], mesh.shape["tensor"])
    sizes = shape.microbatches(run.rl.microbatch_tokens, devices, pieces)
    microbatches, played = empty_step(shape, sizes, planned.config, run.rl.max_staleness > 0)
    batch = RLBatch(played, played.behaviour, jax.eval_shape(batch_totals, played))
    batches = [batch, batch.later(batch.advantages)][: run.rl.updates_per_batch]
    microbatches, batches = like((microbatches, batches), shardings((microbatches, batches), mesh))
    return PlannedStep(updater, planned.bank(room), microbatches, batches)


def reference_lowerings(planned: PlannedModel, step: PlannedStep) -> Iterator[Lowering]:
    """Yield the programs of the reference's log-probs, the largest micro-batch first."""
    assert planned.run.rl is not None
    program = make_logprobs(planned.skeleton, planned.run.rl.temperature, planned.mesh)
    text, vision = split_vision(planned.weights)
    visual = step.updater.abstract_visual(vision, step.bank)
    for microbatch in step.microbatches:
        yield functools.partial(program.lower, _cast(text, planned.dtype), visual, microbatch)


class PlannedEngine:
    """The engine of a host, asleep.

    Args:
        planned: The model of the run.
        host: The host's devices.
    """

    def __init__(self, planned: PlannedModel, host: Sequence[Any]):
        dtype, frozen = planned.dtype, planned.skeleton.frozen
        self.text, _ = split_vision(planned.weights)
        count = sampler_devices((self.text, frozen), len(host))
        mesh = make_mesh(tensor=count, devices=host)
        hosts = host_mesh(planned.mesh, count)
        self.weights, self.base = (
            like(_cast(x, dtype), param_shardings(x, mesh)) for x in (self.text, frozen)
        )
        # Whether training and the engine share the base.
        self.shares = stay(frozen, hosts, dtype)
        model = abstract_model(planned.config, dtype=dtype)
        model.text = nnx.merge(planned.skeleton.graph, self.weights, self.base)
        runner = ModelRunner(model, planned.run.engine_sizes)
        self.lowerings: Any = list(runner.lowerings((self.weights, self.base)))
        # Every program has the same pool.
        self.pool = self.lowerings[0].args[1]
        sync = MeshProgram(make_sync(self.text, hosts, dtype), planned.mesh)
        self.sync = functools.partial(sync.lower, self.text)


def tower_lowering(planned: PlannedModel, host: Sequence[Any]) -> Any:
    """Return the vision tower on a batch of the largest frames. Its first argument is weights."""
    run, vision, mesh = planned.run, planned.config.vision, tower_mesh(host)
    graph, weights = nnx.split(planned.model.vision)
    weights = like(encoding_weights(weights, planned.dtype), NamedSharding(mesh, PartitionSpec()))
    count = run.frames.batch_of(run.largest_frame, mesh.size)
    length = run.largest_frame * vision.spatial_merge_size**2
    frames = (_shape((count, length, vision.patch_dim), jnp.float32), _shape((count, 2), jnp.int32))
    patches, grids = like(frames, NamedSharding(mesh, PartitionSpec("data")))
    program = MeshProgram(tower_program(graph, mesh), mesh)
    return functools.partial(program.lower, weights, patches, grids)


# --- what is on a device, and when ---


class Program(NamedTuple):
    """A program of a run, before it is compiled."""

    name: str
    lower: Any
    """`functools.partial` of `MeshProgram.lower`."""
    residents: Mapping[str, Any]
    """Arrays that are on the devices meanwhile. Some of them may be arguments."""

    @property
    def held(self) -> float:
        """Bytes per device of the residents that are not arguments."""
        arguments = (self.lower.func.__self__.first, self.lower.args)
        given = {id(x) for x in jax.tree.leaves(arguments)}
        residents = jax.tree.leaves(dict(self.residents))
        return device_bytes([x for x in residents if id(x) not in given])


def programs(run: Run, devices: Sequence[Any], host: Sequence[Any]) -> list[Program]:
    """Return the programs of a run that take long to compile, the cold start's first.

    The engine's weights and pages are on the devices during rollouts only. At other times, the
    batch is there instead.

    Args:
        run: The settings.
        devices: Devices of the slice, ordered by host.
        host: Devices of one host, which plays its rollouts by itself.
    """
    planned = PlannedModel.of(run, make_mesh(*run.mesh.sizes, devices=devices))
    vision = tower_lowering(planned, host)
    always = {"weights": planned.weights, "vision tower": vision.args[0]}
    training = always | {"base": planned.skeleton.frozen}
    engine = None
    if run.plays_episodes:
        engine = PlannedEngine(planned, host)
        training |= {} if engine.shares else {"engine's base": engine.base}
    every, moments = [], {}
    for name, phase, make in (("SFT", run.sft, sft_step), ("RL", run.rl, rl_step)):
        if phase is None:
            continue
        step = make(planned)
        moments = {"moments": step.updater.initial.optimizer}
        residents = training | moments | {"batch": (step.bank, step.microbatches, step.batches)}
        lowerings = list(step.lowerings)
        if phase is run.rl:
            lowerings += reference_lowerings(planned, step)
            if engine is not None:
                lowerings.append(engine.sync)
        every += [Program(f"{name} {program_name(x)}", x, residents) for x in lowerings]
    residents = training | moments
    if engine is not None:
        residents |= {"engine's weights": engine.weights, "engine's base": engine.base}
        residents |= {"KV pool": engine.pool}
        if engine.shares:
            del residents["base"]
        every += [Program(program_name(x), x, residents) for x in engine.lowerings]
    return [*every, Program("vision", vision, residents)]


def _shape(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _cast(weights: Any, dtype: Any) -> Any:
    """Return the weights in another type, with their shardings."""
    moved = jax.eval_shape(lambda x: cast(x, dtype), weights)
    return like(moved, jax.tree.map(lambda x: x.sharding, weights))


def bytes_read(run: Run, residents: Mapping[str, Any], hosts: int) -> float:
    """Return the bytes that a device reads to decode one more token of all rollouts of a step.

    It is the mean over rollouts that go to their limit, on the host that reads most. Read are all
    weights, once per group the keys and values of its prompt, and those of each rollout's own
    tokens: on average, half of its limit.

    Args:
        run: The settings.
        residents: The arrays on the devices during rollouts.
        hosts: Number of hosts.
    """
    shape = run.rl_shape
    # By rollout; those of a group are neighbours.
    players = deal([0] * shape.all_rollouts, [None] * shape.all_rollouts, hosts)
    cached = []
    for host in range(hosts):
        groups = [n // shape.rollouts for n, player in enumerate(players) if player == host]
        own = len(groups) * shape.limits.response / 2
        cached.append(len(set(groups)) * shape.limits.prompt + own)
    pool = residents["KV pool"]
    _, pages, _, _, page, _ = pool.shape
    # Of the embeddings, only the rows of the last tokens are read, unless they are the head, too.
    is_head = run.model.config().text.tie_word_embeddings
    weights = residents["engine's weights"], residents["engine's base"]
    read = [
        weight
        for path, weight in jax.tree.leaves_with_path(weights)
        if is_head or "embedding" not in jax.tree_util.keystr(path)
    ]
    return device_bytes(read) + max(cached) * device_bytes(pool) / (pages * page)


# --- the command ---


class Compiled(NamedTuple):
    """The compiler's report about one program."""

    error: str
    """Empty if it compiled."""
    peak: float = math.inf
    """Bytes per device that the program needs, with its arguments."""
    floor: float = math.inf
    """Seconds that a call takes at least."""


def compile_program(program: Program, chip: Chip) -> Compiled:
    """Compile a program. Running out of memory is a result, not an error."""
    try:
        compiled = program.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if not _OUT_OF_MEMORY.search(str(error)):
            raise
        return Compiled(str(error).partition("\n")[0][:200])
    memory = compiled.memory_analysis()
    assert memory is not None
    # Donated arguments share memory with outputs, so both sums include it: subtract it once.
    peak = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    peak += memory.output_size_in_bytes - memory.alias_size_in_bytes
    cost = compiled.cost_analysis() or {}
    rates = (cost.get("flops", 0.0) / chip.flops, cost.get("bytes accessed", 0.0) / chip.hbm_rate)
    return Compiled("", peak, chip.devices * max(rates))


def print_plan(chosen: Sequence[Program], chip: Chip) -> bool:
    """Compile programs and print a line about each; return whether all fit."""
    print(f"{'GiB':>7} {'others':>7} {'total':>7} {'floor s':>9}  program", flush=True)
    fits = True
    for program in chosen:
        held, (error, peak, floor) = program.held, compile_program(program, chip)
        total = peak + held
        figures = f"{peak / GIB:7.2f} {held / GIB:7.2f} {total / GIB:7.2f} {floor:9.4f}"
        line = f"{program.name}: {error}" if error else f"{figures}  {program.name}"
        too_large = total > chip.hbm
        # A program takes minutes.
        print(line + (": does not fit" if too_large else ""), flush=True)
        fits = fits and not too_large
    print(f"{'fits' if fits else 'does not fit'}: {chip.hbm / GIB:.2f} GiB per device")
    return fits


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns 0 if the run fits, 1 if not, 2 for a mistake in the arguments."""
    program = "python -m paravt_extras.plan"
    parser = argparse.ArgumentParser(program, add_help=False, allow_abbrev=False)
    parser.add_argument("--topology", default="", help="a slice, or several such as 2*v5e:4x4")
    parser.add_argument("--only", default="", help="comma-separated beginnings of programs' names")
    options, rest = parser.parse_known_args(argv)
    run = parse(rest, RECIPES, program, __doc__, [parser])
    # There is no TPU to open: libtpu must not ask the cloud's metadata server for one.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    try:
        topology = Topology(options.topology)
        fitted = fit(run, topology.available)
        if math.prod(fitted.run.mesh.sizes) != topology.devices:
            reason = f"leaves some of the {topology.devices} devices of {topology.name} idle"
            raise mesh_error(fitted.run.mesh.sizes, reason)
        every = programs(fitted.run, topology.make_devices(), topology.host.make_devices())
        only = tuple(options.only.split(","))
        chosen = [program for program in every if program.name.startswith(only)]
        if not chosen:
            names = ", ".join(program.name for program in every)
            raise ValueError(
                f"--only {options.only}: unknown; give first words of some of: {names}"
            )
    except (ValueError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return _USAGE
    print(f"{run.name} on {topology.name}: {fitted.describe()}")
    chip = topology.chip
    if run.rl is not None:
        # The last program runs during rollouts.
        read = bytes_read(fitted.run, every[-1].residents, topology.available.hosts)
        seconds = fitted.run.rl_shape.limits.response * read * chip.devices / chip.hbm_rate
        print(
            f"decoding of the longest rollouts reads {read / 1e9:.2f} GB per token and device: "
            f"{seconds:.1f} s per step at the HBM rate, without drafts"
        )
    return 0 if print_plan(chosen, chip) else 1


if __name__ == "__main__":
    sys.exit(main())
