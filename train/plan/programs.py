"""The programs of a step of training, with shapes in the place of arrays, for devices that need not be there.

Owns which programs stand for a step and which of a device's residents each of them is given. They are the run's own: the jitted functions
that `train` and `rollout` call. Refuses nothing: settings were checked when the run was made. Invariant: nothing is allocated.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models.qwen3_vl.config import Qwen3VLConfig, qwen3_vl
from models.qwen3_vl.model import abstract_model
from models.qwen3_vl.rope import visual_index
from models.qwen3_vl.vision import frame_layout, frozen
from models.sharding import make_mesh, param_shardings
from paravt_jax.data.sizes import smart_resize
from rollout.engine.programs import MOST_STOP_IDS, Pieces, Programs, Rows, pages_of
from rollout.engine.sampling import Choices
from train.learn.batch import Sequences
from train.learn.weight_sync import host_mesh, make_sync, sampler_devices
from train.phases.model import model_config
from train.plan.abstract import (
    Abstract,
    abstract_reference,
    abstract_rl_update,
    abstract_sft_update,
)
from train.plan.flops import Pairs, causal, count_flops, every, pairs_of_rows
from train.settings import Run
from train.world_data import world_vocabulary


@dataclasses.dataclass(frozen=True)
class PlannedProgram:
    """A jitted function and abstract arguments, laid over `mesh`.

    `given`: the residents among its arguments. `read`: bytes of HBM that a device has to read for a call. `turns`: trips of its
    while-loops that end on a condition of their own, None where it has none; `pairs`: what
    attention's kernels compute in it. `unshared` gives the FLOPs that it would do more if every
    row computed its prompt.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    mesh: Mesh
    read: float
    given: tuple[str, ...] = ()
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    turns: float | None = None
    pairs: Pairs | None = None
    unshared: Callable[[], float] | None = None


class Plan:
    """What a run would have on `devices`, host-major, and on those of one `host`. `mesh`: sizes of data, fsdp, tensor."""

    def __init__(self, run: Run, devices: list[Any], host: list[Any], mesh: tuple[int, int, int]):
        self.run, self.config = run, planned_config(run)
        self.mesh = make_mesh(*mesh, devices=devices)
        self.model = abstract_model(self.config, dtype=jnp.dtype(run.model.dtype))
        self.graph, weights = nnx.split(self.model.text)
        self.weights = laid_out(weights, param_shardings(weights, self.mesh))
        each = sampler_devices(self.weights, len(host))
        self.host, self.hosts, self.one = (
            make_mesh(tensor=each, devices=host),
            host_mesh(self.mesh, each),
            make_mesh(devices=host),
        )
        state, batch = self._training_arguments()
        self.residents = {"weights": self.weights, "moments": state.optimizer, "batch": batch}
        self.residents |= {"vision tower": self._tower()[1]}
        if run.plays_episodes:
            self.residents |= {
                "engine's weights": self._engine_weights(self.host),
                "KV pool": self._pool(),
            }

    def program(self, name: str) -> PlannedProgram:
        """One of `program_names`."""
        builders: dict[str, Callable[[], PlannedProgram]] = {
            "vision": self._vision,
            "prefill": functools.partial(self._prefill, "prefill"),
            "prefill after": functools.partial(self._prefill, "prefill after"),
            "decode": self._decode,
            "SFT update": self._sft,
            "reference": self._reference,
            "RL update": self._update,
            "weight sync": self._sync,
        }
        return builders[name]()

    def sizes(self) -> dict[str, float]:
        """Bytes of every resident on a device, of one call's pieces of prefill, and over all devices of the batch and the state. What a run
        that plays nothing does not have is 0."""
        state, batch = self._training_arguments()
        pieces = self._prefill("prefill").arguments[2] if self.run.plays_episodes else ()
        found = {name: float(device_bytes(tree)) for name, tree in self.residents.items()}
        reference = (
            ()
            if self.run.rl is None
            else abstract_reference(self.run, self.mesh, self.config).arguments[0]
        )
        trees = {"state": state, "batch": batch, "pieces": pieces, "reference": reference}
        found |= {f"all {name}": total_bytes(tree) for name, tree in trees.items()}
        found["all tower"] = total_bytes(nnx.state(self.model.vision))
        return found | {
            "prefill rows": float(
                self.prefill_shape("prefill")[0] if self.run.plays_episodes else 0
            )
        }

    # --- training ---

    def _training_arguments(self) -> tuple[Any, ...]:
        if self.run.rl is not None:
            return abstract_rl_update(self.run, self.mesh, self.config).arguments
        return abstract_sft_update(self.run, self.mesh, self.config).arguments

    def _sft(self) -> PlannedProgram:
        assert self.run.sft is not None
        pairs = pairs_of_rows(self.run.sft.row_tokens)
        return self._training(
            "SFT update",
            abstract_sft_update(self.run, self.mesh, self.config),
            pairs,
            ("weights", "moments", "batch"),
        )

    def _update(self) -> PlannedProgram:
        update = abstract_rl_update(self.run, self.mesh, self.config)
        program = self._training(
            "RL update", update, self._pairs(), ("weights", "moments", "batch")
        )
        return dataclasses.replace(program, unshared=self._unshared)

    def _reference(self) -> PlannedProgram:
        return self._training(
            "reference",
            abstract_reference(self.run, self.mesh, self.config),
            self._pairs(),
            ("batch",),
        )

    def _unshared(self) -> float:
        """FLOPs, forward and backward, of the prompts that an update would compute more if every row computed its own.

        A prompt reaches its rows by keys and values alone, so those stand for all that is made of it.
        """
        assert self.run.rl is not None
        rl = self.run.rl
        weights, batch = abstract_reference(self.run, self.one, self.config).arguments

        def loss(weights: Any, x: Sequences) -> Any:
            index = visual_index(jnp.asarray(x.prompt_ids), self.config.image_token_id)
            given = {
                "segment_ids": x.prompt_segments,
                "visual": x.visual,
                "visual_index": index,
                "remat": rl.remat,
            }
            _, kv = nnx.merge(self.graph, weights)(
                jnp.asarray(x.prompt_ids), jnp.asarray(x.prompt_positions), **given
            )
            return kv.k.astype(jnp.float32).sum() + kv.v.astype(jnp.float32).sum()

        with jax.set_mesh(self.one):
            prompts = count_flops(
                jax.make_jaxpr(jax.value_and_grad(loss))(weights, batch), pairs=self._pairs()
            )
        return prompts * (rl.grpo.group_size - 1)

    def _pairs(self) -> Pairs:
        assert self.run.rl is not None
        return pairs_of_rows(self.run.rl_shapes[0].suffix)

    def _training(
        self, name: str, abstract: Abstract, pairs: Pairs, given: tuple[str, ...]
    ) -> PlannedProgram:
        return PlannedProgram(
            name,
            abstract.program.jitted,
            abstract.arguments,
            self.mesh,
            device_bytes(abstract.arguments),
            given,
            pairs=pairs,
        )

    # --- rollouts ---

    def _engine_weights(self, mesh: Mesh) -> Any:
        cast = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, self.model.text.dtype), self.weights
        )
        return laid_out(cast, param_shardings(self.weights, mesh))

    def _engine(self) -> Programs:
        """The engine's programs for the weights that it is sent."""
        text = nnx.merge(self.graph, self._engine_weights(self.host))
        model = abstract_model(self.config, dtype=self.model.text.dtype)
        model.text = text
        return Programs(model, self.run.engine_sizes.page, paged=True)

    def _pool(self) -> jax.ShapeDtypeStruct:
        text, engine = self.config.text, self.run.engine_sizes
        shape = (
            text.num_hidden_layers,
            engine.pages + 1,
            engine.page,
            2 * text.num_key_value_heads,
            text.head_dim,
        )
        place = NamedSharding(self.host, PartitionSpec(None, None, None, "tensor"))
        return jax.ShapeDtypeStruct(shape, self.model.text.dtype, sharding=place)

    def _decode(self) -> PlannedProgram:
        engine = self.run.engine_sizes
        b, width = engine.slots, engine.row_lengths[-1]
        tables = shape(jnp.int32, b, width // engine.page + pages_of(engine.steps, engine.page))
        integers = {
            name: shape(jnp.int32, b)
            for name in ("tokens", "positions", "prefix_tokens", "own_tokens", "drawn", "left")
        }
        choices = Choices(
            shape(jnp.uint32, b), shape(jnp.float32, b), shape(jnp.int32, b), shape(jnp.float32, b)
        )
        rows = Rows(
            **integers, tables=tables, stops=shape(jnp.int32, b, MOST_STOP_IDS), choices=choices
        )
        return PlannedProgram(
            "decode",
            self._engine().decode.__wrapped__,
            (self.residents["engine's weights"], self.residents["KV pool"], None, rows),
            self.host,
            engine.steps
            * device_bytes(
                self.residents["engine's weights"]
            ),  # what rows read depends on the slice: `step.decode_read`
            given=("engine's weights", "KV pool"),
            options={"steps": engine.steps, "width": width},
            turns=engine.steps,
            pairs=lambda rows, _: rows * mean_context(self.run),
        )

    def _token_bytes(self) -> float:
        """What one device holds of a token in the pool."""
        return device_bytes(self.residents["KV pool"]) / (
            (self.run.engine_sizes.pages + 1) * self.run.engine_sizes.page
        )

    def prefill_shape(self, name: str) -> tuple[int, int, int]:
        """(rows, length, before) of a program of prefill: the longest pieces of new prompts, or those after most that is there already."""
        engine = self.run.engine_sizes
        if name == "prefill":
            length, before = engine.prefill_lengths[-1], 0
        else:
            both = [
                (length, before)
                for length in engine.prefill_lengths
                for before in engine.row_lengths
            ]
            length, before = max(both, key=lambda pair: engine.prefill_rows(*pair) * pair[1])
        return engine.prefill_rows(length, before), length, before

    def _prefill(self, name: str) -> PlannedProgram:
        (rows, length, before), size = self.prefill_shape(name), self.run.engine_sizes.page
        visual = shape(
            jnp.float32, rows, length, 1 + self.config.vision.levels, self.config.text.hidden_size
        )
        ids, positions, index = (
            shape(jnp.int32, rows, length),
            shape(jnp.int32, 3, rows, length),
            shape(jnp.int32, rows, length),
        )
        counts, tables = (
            shape(jnp.int32, rows),
            shape(jnp.int32, rows, before // size + pages_of(length, size)),
        )
        pieces = Pieces(ids, positions, visual, index, counts, counts, tables)
        return PlannedProgram(
            name,
            self._engine().prefill.__wrapped__,
            (self.residents["engine's weights"], self.residents["KV pool"], pieces),
            self.host,
            device_bytes(self.residents["engine's weights"])
            + device_bytes(pieces)
            + rows * before * self._token_bytes(),
            given=("engine's weights", "KV pool"),
            pairs=pairs_of_rows(length) if before else causal,
        )

    def _sync(self) -> PlannedProgram:
        sync = make_sync(self.weights, self.hosts, self.model.text.dtype)
        return PlannedProgram(
            "weight sync",
            sync,
            (self.weights,),
            self.mesh,
            device_bytes(self.weights),
            ("weights",),
        )

    # --- vision ---

    def _tower(self) -> tuple[Any, Any]:
        """The tower on one device of a host, as `models.features` runs it."""
        graph, weights = nnx.split(self.model.vision)
        weights = frozen(weights, self.model.vision.dtype)
        one = NamedSharding(self.one, PartitionSpec())
        return graph, jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), weights
        )

    def grid(self) -> tuple[int, int]:
        """The largest square frame, in patches."""
        vision, frames = self.config.vision, self.run.frames
        side = math.isqrt(frames.max_pixels)
        height, width = smart_resize(
            side,
            side,
            frames.min_pixels,
            frames.max_pixels,
            vision.patch_size * vision.spatial_merge_size,
        )
        return height // vision.patch_size, width // vision.patch_size

    def _vision(self) -> PlannedProgram:
        graph, weights = self._tower()
        grid = self.grid()
        encode = jax.jit(
            lambda weights, patches, layout: nnx.merge(graph, weights)(patches, layout)
        )
        patches = shape(
            jnp.float32, self.run.frames.batch, grid[0] * grid[1], self.config.vision.patch_dim
        )
        layout = frame_layout(grid, self.config.vision)
        return PlannedProgram(
            "vision",
            encode,
            (weights, patches, layout),
            self.one,
            device_bytes((weights, patches)),
            ("vision tower",),
            pairs=every,
        )


def program_names(run: Run) -> tuple[str, ...]:
    """The run's programs, in the order of its phases and of a step."""
    training = ("SFT update",) * (run.sft is not None) + ("reference", "RL update") * (
        run.rl is not None
    )
    if not run.plays_episodes:
        return ("vision", *training)
    return ("vision", "prefill", "prefill after", "decode", *training, "weight sync")


def planned_config(run: Run) -> Qwen3VLConfig:
    """The model's sizes; the laptop model's vocabulary is made here, as the run would make it."""
    if run.model.size != "tiny":
        return qwen3_vl(run.model.size)
    return model_config(run, world_vocabulary(run.protocol))


def laid_out(tree: Any, shardings: Any) -> Any:
    """Shapes with a place for each of them."""
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree, shardings
    )


def shape(dtype: Any, *sizes: int) -> Any:
    return jax.ShapeDtypeStruct(sizes, dtype)


def mean_context(run: Run) -> float:
    """Tokens that a new one sees on average, if rollouts are as long as they may be."""
    return run.engine_sizes.row_lengths[-1] - run.protocol.trajectory_tokens / 2


def total_bytes(tree: Any) -> float:
    """What arrays, real or abstract, take without a mesh."""
    return float(sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree)))


def device_bytes(tree: Any) -> int:
    """What one device holds of arrays, real or abstract; what has no place is whole."""

    def one(x: Any) -> int:
        place = getattr(x, "sharding", None)
        return (
            math.prod(x.shape if place is None else place.shard_shape(x.shape)) * x.dtype.itemsize
        )

    return sum(one(x) for x in jax.tree.leaves(tree))
