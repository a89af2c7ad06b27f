"""The programs of a training step with abstract arguments, for devices that need not exist.

They are the jitted functions that a run itself calls, so a plan compiles what a run would execute.
Nothing is allocated.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models.config import ModelConfig
from models.features.encoder import tower_mesh, tower_program
from models.lora import cast
from models.model import abstract_model
from models.sharding import make_mesh, param_shardings
from models.trained import split, split_vision
from models.vision import encoding_weights, frame_layout
from paravt_extras.plan.abstract import (
    Abstract,
    AbstractStep,
    abstract_rl_step,
    abstract_sft_step,
    planned_model,
)
from paravt_jax.world.vocabulary import world_vocabulary
from rollout.engine.programs import MOST_STOP_IDS, Pieces, Programs, Rows, pages_of
from rollout.engine.sampling import Choices
from train.learn.packing import MicrobatchShape
from train.learn.placement import row_pieces
from train.learn.weight_sync import host_mesh, make_sync, sampler_devices, stay
from train.model import model_config
from train.settings import Run

# The first words of programs that run while the engine is awake, each on the devices of one host.
ROLLOUTS = ("vision", "bank", "prefill", "page", "decode")
# Last word in the names of programs of the updates after a step's first one.
LATER = "later"


@dataclasses.dataclass(frozen=True)
class PlannedProgram:
    """A jitted function and its abstract arguments."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    mesh: Mesh
    given: tuple[str, ...] = ()
    """Residents of the device that are among the arguments."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Static arguments."""


class Plan:
    """All programs of a run on a slice, and what stays on its devices between them.

    Args:
        run: the recipe.
        devices: devices of the slice, ordered by host.
        host: devices of one host.
        mesh: sizes of (data, fsdp, tensor).
    """

    def __init__(self, run: Run, devices: list[Any], host: list[Any], mesh: tuple[int, int, int]):
        self.run = run
        self.config = planned_config(run)
        self.mesh = make_mesh(*mesh, devices=devices)
        self.model = planned_model(run, self.config)
        self.graph, weights, base = split(self.model, run.train_vision)
        self.weights = laid_out(weights, param_shardings(weights, self.mesh))
        self.text, self.vision = split_vision(self.weights)
        self.base = laid_out(base, param_shardings(base, self.mesh))
        # Rollouts run on the devices of one host, `sampler_size` devices per copy of the weights.
        sampler_size = sampler_devices((self.text, base), len(host))
        self.host = make_mesh(tensor=sampler_size, devices=host)
        self.hosts = host_mesh(self.mesh, sampler_size)
        self.one = make_mesh(devices=host)
        # The devices that share a batch of frames.
        self.tower_mesh = tower_mesh(host)
        phases = {"SFT": (run.sft, abstract_sft_step), "RL": (run.rl, abstract_rl_step)}
        self.steps: dict[str, AbstractStep] = {
            name: make(run, self.mesh, self.config)
            for name, (phase, make) in phases.items()
            if phase
        }
        # Of the last phase, which has everything.
        step = [*self.steps.values()][-1]
        _, tower_weights = self._tower()
        self.residents = {
            "weights": self.weights,
            "moments": step.state.optimizer,
            "batch": (step.bank, step.microbatches[0], step.batch),
            "vision tower": tower_weights,
        }
        if run.lora is not None:
            self.residents["base"] = self.base
        # Where the engine has the base: in a copy of its own, unless training has the same shards.
        self.engine_base = "base"
        if run.plays_episodes:
            if not stay(self.base, self.hosts, self.model.text.dtype):
                self.engine_base = "engine's base"
                self.residents["engine's base"] = self._for_engine(self.base)
            self.residents["engine's weights"] = self._for_engine(self.text)
            self.residents["KV pool"] = self._pool()

    def program(self, name: str) -> PlannedProgram:
        """The program of this name, one of `program_names`."""
        builders: dict[str, Callable[[], PlannedProgram]] = {
            "vision": self._vision,
            "bank fill": self._fill,
            "page copy": self._copy,
            "weight sync": self._sync,
        }
        family, *words = name.split()
        lengths = [int(word) for word in words if word.isdigit()]
        if family in self.steps:
            return self._training(name, self.steps[family], words)
        if family == "prefill":
            return self._prefill(*lengths)
        if family == "reference":
            reference = self.steps["RL"].reference(self.run, self._size(*lengths))
            return self._planned(name, reference, ("base", "batch"))
        if family == "decode":
            return self._decode(*lengths)
        return builders[name]()

    # --- training ---

    def _training(self, name: str, step: AbstractStep, words: list[str]) -> PlannedProgram:
        """Return a program of SFT or RL: all words of its name but the first."""
        kind, *rest = words
        if kind == "update":
            # Of SFT there is one size.
            size = self._size(int(rest[0])) if rest else 0
            update = step.gradients(size, later=rest[-1:] == [LATER])
            return self._planned(name, update, ("weights", "base", "batch"))
        made = {
            "bank": (step.bank_share, ("batch",)),
            "start": (step.start, ()),
            "vision": (step.vision, ("weights", "batch")),
            "optimizer": (step.optimizer, ("weights", "moments")),
        }
        make, given = made[kind]
        return self._planned(name, make(), given)

    def _size(self, tokens: int) -> int:
        """The number of the micro-batch's size whose rows have this many tokens."""
        return [size.tokens for size in microbatch_sizes(self.run)].index(tokens)

    def _planned(self, name: str, abstract: Abstract, given: tuple[str, ...]) -> PlannedProgram:
        function = abstract.program.jitted
        return PlannedProgram(name, function, abstract.all_arguments, self.mesh, given)

    # --- rollouts ---

    def _for_engine(self, weights: Any) -> Any:
        """Weights as the engine receives them: in the type of the activations, on a host."""
        moved = jax.eval_shape(lambda x: cast(x, self.model.text.dtype), weights)
        return laid_out(moved, param_shardings(weights, self.host))

    def _engine_weights(self) -> tuple[Any, Any]:
        """The trained and the frozen weights, as the engine's programs take them."""
        return self.residents["engine's weights"], self._for_engine(self.base)

    def _engine(self) -> Programs:
        """The engine's own programs."""
        text = nnx.merge(self.graph, *self._engine_weights())
        model = abstract_model(self.config, dtype=self.model.text.dtype)
        model.text = text
        return Programs(model, self.run.engine_sizes.page, paged=True)

    def _pool(self) -> jax.ShapeDtypeStruct:
        """The pages of keys and values, sharded by head like the attention that reads them."""
        text = self.config.text
        engine = self.run.engine_sizes
        # [layer, page, token, key and value heads, head_dim], as in `Programs.make_pool`.
        shape = (
            text.num_hidden_layers,
            engine.pages + 1,
            engine.page,
            2 * text.num_key_value_heads,
            text.head_dim,
        )
        by_head = NamedSharding(self.host, PartitionSpec(None, None, None, "tensor"))
        return jax.ShapeDtypeStruct(shape, self.model.text.dtype, sharding=by_head)

    def _decode(self, width: int) -> PlannedProgram:
        """Decoding of rows that read up to `width` tokens."""
        engine = self.run.engine_sizes
        b = engine.slots
        # A row's table has the pages that it reads and those for the tokens of this call.
        pages = width // engine.page + pages_of(engine.steps, engine.page)
        per_row = ("tokens", "positions", "prefix_tokens", "own_tokens", "drawn", "left")
        choices = Choices(
            seeds=shape(jnp.uint32, b),
            temperatures=shape(jnp.float32, b),
            top_k=shape(jnp.int32, b),
            top_p=shape(jnp.float32, b),
        )
        rows = Rows(
            **{name: shape(jnp.int32, b) for name in per_row},
            tables=shape(jnp.int32, b, pages),
            stops=shape(jnp.int32, b, MOST_STOP_IDS),
            choices=choices,
        )
        weights = self._engine_weights()
        return PlannedProgram(
            f"decode {width}",
            # The plan sets the mesh itself.
            self._engine().decode.jitted,
            (weights, self.residents["KV pool"], None, rows),
            self.host,
            given=("engine's weights", self.engine_base, "KV pool"),
            options={"steps": engine.steps, "width": width},
        )

    def _prefill(self, length: int, before: int = 0) -> PlannedProgram:
        """Prefill of `length` tokens per row behind up to `before` cached ones."""
        rows = self.run.engine_sizes.prefill_rows(length, before)
        page = self.run.engine_sizes.page
        pages = before // page + pages_of(length, page)
        ids = shape(jnp.int32, rows, length)
        counts = shape(jnp.int32, rows)
        programs = self._engine()
        bank = self._bank(programs, length)
        pieces = Pieces(
            ids=ids,
            positions=shape(jnp.int32, 3, rows, length),
            index=None if bank is None else ids,
            lengths=counts,
            before=counts,
            tables=shape(jnp.int32, rows, pages),
        )
        weights = self._engine_weights()
        return PlannedProgram(
            prefill_name(length, before),
            programs.prefill.jitted,
            (weights, self.residents["KV pool"], bank, pieces),
            self.host,
            given=("engine's weights", self.engine_base, "KV pool"),
        )

    def _fill(self) -> PlannedProgram:
        """Writing visual vectors to the bank of a call of prefill."""
        programs = self._engine()
        bank = self._whole_bank(programs)
        chunk = shape(programs.dtype, *programs.bank_shape(1))
        arguments = (bank, chunk, shape(jnp.int32))
        return PlannedProgram("bank fill", programs.fill.jitted, arguments, self.host)

    def _copy(self) -> PlannedProgram:
        """Copying partly filled pages, one per slot."""
        engine = self.run.engine_sizes
        numbers = shape(jnp.int32, engine.slots)
        return PlannedProgram(
            "page copy",
            self._engine().copy.jitted,
            (self.residents["KV pool"], numbers, numbers),
            self.host,
            given=("KV pool",),
        )

    def _bank(self, programs: Programs, length: int) -> jax.ShapeDtypeStruct | None:
        """Visual vectors of a call of prefill; None for a program that takes text only."""
        if self.run.engine_sizes.only_text(length):
            return None
        return self._whole_bank(programs)

    def _whole_bank(self, programs: Programs) -> jax.ShapeDtypeStruct:
        whole = NamedSharding(self.host, PartitionSpec())
        bank_shape = programs.bank_shape(self.run.engine_sizes.bank_tokens)
        return jax.ShapeDtypeStruct(bank_shape, programs.dtype, sharding=whole)

    def _sync(self) -> PlannedProgram:
        sync = make_sync(self.text, self.hosts, self.model.text.dtype)
        return PlannedProgram("weight sync", sync, (self.text,), self.mesh, ("weights",))

    # --- vision ---

    def _tower(self) -> tuple[nnx.GraphDef, Any]:
        """The vision tower, with all its weights on each device."""
        graph, weights = nnx.split(self.model.vision)
        weights = encoding_weights(weights, self.model.vision.dtype)
        whole = NamedSharding(self.tower_mesh, PartitionSpec())
        return graph, laid_out(weights, jax.tree.map(lambda _: whole, weights))

    def grid(self) -> tuple[int, int]:
        """Height and width of the largest square frame, in patches."""
        vision = self.config.vision
        frames = self.run.frames
        sides = []
        for rules in (frames.rules(vision), frames.rules(vision, crop=True)):
            side = math.isqrt(rules.max_pixels)
            sides.append(rules.size(side, side))
        height, width = max(sides)
        return height // vision.patch_size, width // vision.patch_size

    def _vision(self) -> PlannedProgram:
        graph, weights = self._tower()
        grid = self.grid()
        vision = self.config.vision
        tokens = grid[0] * grid[1] // vision.spatial_merge_size**2
        frames = self.run.frames.batch_of(tokens, self.tower_mesh.size)
        patches = jax.ShapeDtypeStruct(
            (frames, grid[0] * grid[1], vision.patch_dim),
            jnp.float32,
            sharding=NamedSharding(self.tower_mesh, PartitionSpec("data")),
        )
        layout = frame_layout(grid, self.config.vision)
        return PlannedProgram(
            "vision",
            tower_program(graph, self.tower_mesh),
            (weights, patches, layout),
            self.tower_mesh,
            ("vision tower",),
        )


def program_names(run: Run) -> tuple[str, ...]:
    """Names of all programs of a run, in the order of its phases and of a step.

    Prefill and decoding have a program per length, as in `rollout.engine.runner`. The first word of
    a name is that of its family.
    """
    names = ["vision"]
    if run.plays_episodes:
        engine = run.engine_sizes
        names.append("bank fill")
        lengths = itertools.product(engine.prefill_lengths, (0, *engine.row_lengths))
        names += [prefill_name(length, before) for length, before in lengths]
        names.append("page copy")
        names += [f"decode {width}" for width in engine.row_lengths]
    if run.sft is not None:
        names += ["SFT bank"] if shares_bank(run) else []
        names += ["SFT start"] if accumulates(run) else []
        names.append("SFT update")
        names += ["SFT vision"] if run.train_vision != "none" else []
        names.append("SFT optimizer")
    if run.rl is not None:
        sizes = microbatch_sizes(run)
        if shares_bank(run):
            names.append("RL bank")
        names += [f"reference {size.tokens}" for size in sizes]
        names.append("RL start")
        for later in (False, True) if run.rl.updates_per_batch > 1 else (False,):
            names += [update_name(size.tokens, later) for size in sizes]
        if run.train_vision != "none":
            names.append("RL vision")
        names.append("RL optimizer")
    if run.plays_episodes:
        names.append("weight sync")
    return tuple(names)


def accumulates(run: Run) -> bool:
    """Whether a step of the cold start has several micro-batches on the run's mesh."""
    assert run.sft is not None
    devices = run.mesh.data * run.mesh.fsdp
    return run.sft.shape.fitted(run.sft.microbatches, devices).microbatches > 1


def shares_bank(run: Run) -> bool:
    """Whether the visual vectors of a step are sent to other replicas by a program of its own.

    If the tower is trained, its program does that, too.
    """
    return run.mesh.data > 1 and run.train_vision == "none"


def microbatch_sizes(run: Run) -> tuple[MicrobatchShape, ...]:
    """Sizes of a run's micro-batches of RL, the largest first, as `train.learn.rl.Learner` has."""
    assert run.rl is not None
    devices = run.mesh.data * run.mesh.fsdp
    pieces = row_pieces(planned_config(run).text, run.mesh.fsdp, run.mesh.tensor)
    return run.rl_shape.microbatches(run.rl.microbatch_tokens, devices, pieces)


def prefill_name(length: int, before: int) -> str:
    """The name of a program that prefills `length` tokens behind up to `before` cached ones."""
    return f"prefill {length} after {before}" if before else f"prefill {length}"


def update_name(tokens: int, later: bool) -> str:
    """The name of the gradients of a micro-batch, in the first update of a step or a later one."""
    return f"RL update {tokens} {LATER}" if later else f"RL update {tokens}"


def planned_config(run: Run) -> ModelConfig:
    """The sizes of the run's model."""
    if run.model.size != "tiny":
        return run.model.config()
    # The tiny model's vocabulary is built from the world's texts, here as in a run.
    return model_config(run, world_vocabulary(run.protocol, run.model.dialect))


def laid_out(tree: Any, shardings: Any) -> Any:
    """`tree` as abstract arrays with the given shardings."""
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree, shardings
    )


def shape(dtype: Any, *sizes: int) -> Any:
    """An abstract array."""
    return jax.ShapeDtypeStruct(sizes, dtype)


def device_bytes(tree: Any) -> int:
    """Bytes of a tree on one device. An array without a sharding counts in full."""

    def one(x: Any) -> int:
        sharding = getattr(x, "sharding", None)
        local_shape = x.shape if sharding is None else sharding.shard_shape(x.shape)
        return math.prod(local_shape) * x.dtype.itemsize

    return sum(one(x) for x in jax.tree.leaves(tree))
