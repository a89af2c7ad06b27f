"""Chooses the sizes that a recipe leaves open, so that its run fits the devices.

    python -m paravt_extras.fit --config=NAME [--field value ...]

shows the sizes for the devices here, or what the recipe needs. Nothing is downloaded.

A field that is 0 or "auto" is open. `choose` says what it becomes. The choice follows from the
devices alone, so every start on the same devices chooses the same. A value that is set by hand
stays.

Memory is estimated by arithmetic (`_Memory`). Per device, a training step needs

    weights, moments, two copies of gradients, frozen weights, visual vectors
    + tokens of a micro-batch * (layers * numbers kept per token + those of one layer)

and the engine needs weights, moments, a copy of the weights, the KV cache and its largest call. The
coefficients were fitted to programs that libtpu compiled; those of GPUs were not. `python -m
paravt_extras.plan` compiles the chosen programs for a TPU slice and so checks the estimate.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AbstractMesh

from configs import RECIPES
from models.attention import TILE
from models.config import TextConfig
from models.devices import require_type, reserve_memory
from models.family import REHEARSAL
from models.layers import Remat
from models.lora import LoRASettings
from models.model import abstract_model
from models.sharding import MESH_AXES, param_shardings
from models.trained import TrainVision, cached_shape, split, split_vision
from paravt_extras.slices import CHIPS, Devices, Topology, found_devices
from paravt_jax.processes.cluster import run_command
from rollout.engine.settings import EngineSettings, EngineSizes, round_up
from train.cli import parse
from train.learn.in_flight import capacity
from train.learn.optimizer import make_optimizer
from train.learn.packing import ALIGNMENT
from train.learn.placement import row_pieces
from train.learn.rl_settings import RLSettings
from train.learn.sft import SFTSettings
from train.learn.update import like
from train.learn.weight_sync import sampler_devices
from train.settings import MeshSettings, ModelSettings, Run

GIB = 2.0**30
# Part of a device's memory to plan with. The rest covers errors of the estimate.
USABLE = 0.97
# Each policy computes more again, and keeps less, than the one before. `offload`, whose copies to
# the host take time, is only set by hand.
POLICIES: tuple[Remat, ...] = ("dots", "attention", "full")
# Sequences decoded side by side. More would hardly be faster.
MOST_SLOTS = 64
# The fields of `Run` that a recipe can leave open.
OPEN_FIELDS = (
    "mesh.fsdp",
    "mesh.tensor",
    "sft.remat",
    "sft.microbatches",
    "rl.remat",
    "rl.microbatch_tokens",
    "engine.slots",
    "engine.cache_tokens",
)
# Tokens of a tiny model, whose vocabulary is made from its data and not known yet. Any few devices
# divide them.
_TINY_VOCABULARY = 720

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Fitted:
    """A run with every size chosen."""

    run: Run
    chosen: dict[str, Any]
    """The values of the open fields, by dotted name."""
    needs: dict[str, float]
    """Estimated bytes per device in each phase of a run. Empty if nothing was open."""

    def describe(self) -> str:
        """Return the mesh and the chosen values, on one line."""
        mesh = " x ".join(map(str, self.run.mesh.sizes))
        others = [f"{k} {v}" for k, v in self.chosen.items() if not k.startswith("mesh.")]
        return ", ".join([f"mesh {mesh} (data, fsdp, tensor)", *others])


class _TooLargeError(Exception):
    """A phase of the run needs more memory than a device has."""


def fit(run: Run, devices: Devices) -> Fitted:
    """Choose the open fields of a run.

    Args:
        run: The recipe, with overrides.
        devices: The devices to use. A mesh that is set by hand may leave some of them idle.

    Raises:
        ValueError: The device is a CPU, and the model larger than a tiny one; the device does not
            compute in the model's type; the mesh does not divide the devices or the model; the
            memory of the devices is not known; or the run does not fit. The first and the last
            message name the smallest slices on which it would.
    """
    if devices.platform == "cpu" and run.model.size not in ("tiny", REHEARSAL):
        raise ValueError(
            f"devices = {devices.name}: {run.name} needs a GPU or a TPU, such as one of "
            f"{smallest_slices(run)}"
        )
    if devices.platform == jax.local_devices()[0].platform:
        require_type("model.dtype", run.model.dtype)
    open_fields = [name for name in OPEN_FIELDS if _value(run, name) in (0, "auto")]
    if not open_fields:
        require_dividing(run, devices)
        return Fitted(run, {}, {})
    if devices.memory is None:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in open_fields)
        raise ValueError(
            f"devices = {devices.name}: JAX reports no memory, by which sizes are chosen; "
            f"set {flags}"
        )
    try:
        return choose(run, devices)
    except _TooLargeError as lack:
        raise ValueError(
            f"devices = {devices.name}: too small for {lack}; "
            f"{USABLE * devices.memory / GIB:.1f} of {devices.memory / GIB:.1f} GiB are usable; "
            f"the smallest slices for {run.name} with these settings: {smallest_slices(run)}"
        ) from lack


def choose(given: Run, devices: Devices) -> Fitted:
    """Choose the mesh, and for each phase the first sizes that fit the memory of a device.

    Training prefers to recompute little, then few micro-batches: each of them gathers the weights.
    The micro-batches of RL hold whole groups at their longest, so that no prompt is computed twice;
    only if that never fits, they shrink until a row has room for just the longest trajectory.
    The engine prefers many slots.
    """
    most_tensor = given.model.config().text.most_tensor
    run = dataclasses.replace(given, mesh=choose_mesh(given, devices, most_tensor))
    require_dividing(run, devices)
    memory = _Memory(run, devices)
    needs: dict[str, float] = {}

    def first(phase: str, need: Callable[[T], float], candidates: Iterable[T]) -> T:
        """Return the first settings for which a device has the memory."""
        for candidate in candidates:
            needs[phase] = min(need(candidate), needs.get(phase, math.inf))
            if needs[phase] <= memory.usable:
                return candidate
        least = needs[phase] / GIB
        raise _TooLargeError(f"{phase}, which needs an estimated {least:.1f} GiB per device")

    if run.sft is not None:
        counts = range(1, math.ceil(run.sft.rows / memory.row_devices) + 1)
        sft = [
            dataclasses.replace(run.sft, remat=policy, microbatches=count)
            for policy in _if_open(run.sft.remat, POLICIES)
            for count in _if_open(run.sft.microbatches, counts)
        ]
        run = dataclasses.replace(run, sft=first("cold start", memory.cold_start, sft))
    if run.rl is not None:
        shape = run.rl_shape
        group = shape.limits.prompt + shape.rollouts * shape.limits.response
        # Rows are multiples of this: rounded down, whole groups would have no room.
        unit = memory.row_devices * ALIGNMENT
        whole = [round_up(groups * group, unit) for groups in range(shape.groups, 0, -1)]
        parts = [whole[-1] // 2**n for n in range(1, shape.rollouts)]
        rl = [
            dataclasses.replace(run.rl, remat=policy, microbatch_tokens=tokens)
            for bounds in (whole, parts)
            for policy in _if_open(run.rl.remat, POLICIES)
            for tokens in _if_open(run.rl.microbatch_tokens, bounds)
        ]
        run = dataclasses.replace(run, rl=first("PARA-GRPO", memory.update, rl))
    if run.plays_episodes:
        engine = first("rollouts", memory.rollouts, _engines(memory))
        run = dataclasses.replace(run, engine=engine)
    values = {name: _value(run, name) for name in ("mesh.data", *OPEN_FIELDS)}
    chosen = {name: value for name, value in values.items() if value != _value(given, name)}
    return Fitted(run, chosen, needs)


def _engines(memory: _Memory) -> Iterator[EngineSettings]:
    """Yield settings of the engine, those with the largest cache first.

    There are slots for all rollouts that a host plays at once, and for as many sub-agents. The
    cache holds these rollouts at their longest, or else as many of their tokens as fit.
    """
    run = memory.run
    groups, rollouts, most = 0, 0, MOST_SLOTS
    if run.rl is not None:
        groups = math.ceil(capacity(run.rl.prompts, run.rl.max_staleness) / memory.devices.hosts)
        rollouts = groups * run.rl.grpo.group_size
        most = min(MOST_SLOTS, 2 * rollouts)
    engine = dataclasses.replace(run.engine, slots=run.engine.slots or most)
    sizes = memory.engine_sizes(engine)
    page, longest = sizes.page, sizes.longest
    tokens = engine.slots * longest
    if run.rl is not None:
        # A group shares the pages of its prompt, but for a partly filled last one.
        limits = run.rl_shape.limits
        tokens = groups * round_up(limits.prompt, page)
        tokens += min(rollouts, sizes.slots) * (round_up(limits.response, page) + page)
    cache = run.engine.cache_tokens or max(tokens, longest)
    yield dataclasses.replace(engine, cache_tokens=cache)
    if not run.engine.cache_tokens:
        room = (memory.usable - memory.rollouts(engine)) / memory.token
        cache = max(int(room) // page * page, longest)
        yield dataclasses.replace(engine, cache_tokens=cache)


def smallest_slices(run: Run) -> str:
    """Return the names of the smallest slices that the run fits, one per generation of TPUs."""
    names = []
    for generation, chip in CHIPS.items():
        for shape in chip.slices:
            topology = Topology(f"{generation}:{shape}")
            try:
                choose(run, topology.available)
            except (_TooLargeError, ValueError):  # ValueError: the mesh does not divide the devices
                continue
            names.append(topology.name)
            break
    return ", ".join(names) or "none that is known"


def _value(run: Run, name: str) -> Any:
    """Return the value of an open field; None if the run does not have its phase."""
    section, _, field = name.partition(".")
    return getattr(getattr(run, section), field, None)


def _if_open(value: T, choices: Iterable[T]) -> Iterable[T]:
    """Return the choices if a field is open, else only its value."""
    return choices if value in (0, "auto") else (value,)


# --- the mesh ---


def choose_mesh(run: Run, devices: Devices, most_tensor: int) -> MeshSettings:
    """Choose the open axes of a mesh.

    `fsdp` grows until every device has a row of the batch, and then until every host has as many
    rows as the others. The rest of the devices goes to `tensor`, where several devices share a row.

    Args:
        run: The run.
        devices: All devices.
        most_tensor: The largest size of `tensor` that divides what it shards.

    Raises:
        ValueError: The given axes do not divide the devices.
    """
    data, fsdp, tensor = run.mesh.sizes
    if fsdp and tensor:
        return run.mesh
    if data == 1:
        data = devices.slices
    left, rest = divmod(devices.count, data * max(fsdp, 1) * max(tensor, 1))
    if rest:
        raise mesh_error((data, fsdp, tensor), f"does not divide {devices.count} devices")
    if fsdp or tensor:
        return MeshSettings(data, fsdp or left, tensor or left)
    rows = 1
    if run.lora is not None and devices.hosts == 1 and most_tensor % devices.count == 0:
        # Sharded by heads only, the base serves updates and the engine alike, without a copy.
        pass
    elif run.rl is not None:
        rows = run.rl_shape.all_rollouts
    elif run.sft is not None:
        rows = run.sft.rows
    of_replica = 2 ** math.ceil(math.log2(rows)) // data
    fsdp = next(
        size
        for size in range(max(1, min(left, of_replica)), left + 1)
        if left % size == 0
        and data * size % devices.hosts == 0
        and most_tensor % (left // size) == 0
    )
    return MeshSettings(data, fsdp, left // fsdp)


def require_dividing(run: Run, devices: Devices) -> None:
    """Check a run's mesh, whose sizes are all known, against its model and devices.

    Raises:
        ValueError: There are too few devices, or something does not divide.
    """
    data, fsdp, tensor = run.mesh.sizes
    count, hosts, slices = devices.count, devices.hosts, devices.slices
    trained, base, _ = abstract_weights(run.model, run.lora, run.train_vision)
    taken, idle_allowed = data * fsdp * tensor, hosts == slices == 1
    reason = ""
    if taken > count or (taken < count and not idle_allowed):
        reason = f"takes {taken} of {count} devices; several hosts have to use all"
    elif data % slices or data * fsdp % hosts:
        reason = (
            f"{slices} slices need whole replicas (data), and {hosts} hosts share the batch "
            "(data * fsdp) equally"
        )
    else:
        try:
            _on_mesh(trained, run.mesh)
            _on_mesh(base, run.mesh)
        except ValueError as error:
            reason = str(error).partition(";")[0]
    if reason:
        raise mesh_error(run.mesh.sizes, reason)


def mesh_error(sizes: tuple[int, int, int], reason: str) -> ValueError:
    """Return the error of a mesh that cannot be used."""
    shown = " x ".join(map(str, sizes))
    return ValueError(
        f"mesh: {shown} (data, fsdp, tensor): {reason}; let it be chosen: "
        "--mesh.data 1 --mesh.fsdp 0 --mesh.tensor 0"
    )


# --- memory ---


@functools.cache
def abstract_weights(
    settings: ModelSettings, lora: LoRASettings | None, train_vision: TrainVision
) -> tuple[Any, Any, Any]:
    """Return the shapes of the trained weights, of the decoder's frozen ones and of the vision
    tower."""
    param_dtype = jnp.float32 if lora is None else settings.dtype
    config = settings.config(_TINY_VOCABULARY)
    model = abstract_model(config, dtype=settings.dtype, param_dtype=param_dtype, lora=lora)
    _, trained, base = split(model, train_vision)
    return trained, base, nnx.state(model.vision)


def total_bytes(tree: Any) -> float:
    """Return the bytes of all arrays in a tree, each counted once."""
    return float(sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree)))


def _numbers(tree: Any) -> int:
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


def _dispatched(text: TextConfig) -> int:
    """Return the numbers per token that go to its experts and back, on every device of `tensor`."""
    return 0 if text.experts is None else 2 * text.experts.num_experts_per_tok * text.hidden_size


def _mlp_weights(text: TextConfig) -> int:
    """Return the number of weights of a layer's MLP, or of its router and all experts."""
    if text.experts is None:
        return 3 * text.hidden_size * text.intermediate_size
    each = 3 * text.hidden_size * text.experts.moe_intermediate_size
    return text.experts.num_experts * (text.hidden_size + each)


def device_bytes(tree: Any) -> float:
    """Return the bytes of sharded arrays on one device."""
    shards = [(x.sharding.shard_shape(x.shape), x.dtype.itemsize) for x in jax.tree.leaves(tree)]
    return float(sum(math.prod(shape) * itemsize for shape, itemsize in shards))


def _on_mesh(state: Any, mesh: MeshSettings) -> Any:
    """Return weights with their shardings. Raises ValueError if a dimension does not divide."""
    return like(state, param_shardings(state, AbstractMesh(mesh.sizes, MESH_AXES)))


class _Memory:
    """Estimates the memory of a device in each phase of a run, in bytes."""

    def __init__(self, run: Run, devices: Devices) -> None:
        assert devices.memory is not None
        self.run = run
        self.devices = devices
        self.config = run.model.config(_TINY_VOCABULARY)
        self.itemsize = jnp.dtype(run.model.dtype).itemsize
        self.usable = USABLE * devices.memory
        self.row_devices = run.mesh.data * run.mesh.fsdp
        self.trained, base, tower = abstract_weights(run.model, run.lora, run.train_vision)
        self.text, _ = split_vision(self.trained)
        text, vision = self.config.text, self.config.vision
        # The engine of a host, with keys and values of a token, sharded by head.
        own = sampler_devices((self.text, base), devices.count // devices.hosts)
        numbers = 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim
        self.token = numbers * self.itemsize / own
        self.engine_devices = own
        self.engine_weights = _numbers(self.text) * self.itemsize / own
        self.engine_copy = _numbers((self.text, base)) * self.itemsize / own
        self.weights = device_bytes(_on_mesh(self.trained, run.mesh))
        self.frozen = device_bytes(_on_mesh(base, run.mesh)) + _numbers(tower) * self.itemsize
        if run.plays_episodes and run.mesh.sizes != (1, 1, own):
            # Sharded differently, the engine has a base of its own.
            self.frozen += total_bytes(base) / own
        # Bytes per visual token: in the engine, and in an update.
        self.vector = self.visual = self.itemsize * math.prod(cached_shape(vision, "none"))
        if run.train_vision != "none":
            # What the trained part reads; its vectors, their gradient and its sum in float32.
            self.visual *= 2 + 4 / self.itemsize
            self.visual += self.itemsize * math.prod(cached_shape(vision, run.train_vision))
        self.sft_state = self.rl_state = self.weights + self.frozen
        if run.sft is not None:
            self.sft_state += self._moments(make_optimizer(run.sft.optimizer))
        if run.rl is not None:
            self.rl_state += self._moments(make_optimizer(run.rl.optimizer, run.model.dtype))

    def _moments(self, optimizer: optax.GradientTransformation) -> float:
        """Return the bytes of an optimizer's state, which is sharded like the weights."""
        moments = total_bytes(jax.eval_shape(optimizer.init, self.trained))
        return moments * self.weights / total_bytes(self.trained)

    def cold_start(self, sft: SFTSettings) -> float:
        """Return what an update of the cold start needs."""
        shape = sft.shape.fitted(sft.microbatches, self.row_devices)
        rows = shape.rows / self.row_devices
        gradients = self.weights * (2 if shape.microbatches > 1 else 1)
        # Every replica has the visual vectors of the batch, and of the next one. What the tower
        # computes for the one after it is spread over all devices.
        vectors = (2 * self.run.mesh.data + 1) * rows * shape.visual * self.visual
        activations = self._activations(sft.remat, rows * shape.tokens / shape.microbatches)
        return self.sft_state + gradients + vectors + activations

    def update(self, rl: RLSettings) -> float:
        """Return what an update of RL needs."""
        shape, mesh = self.run.rl_shape, self.run.mesh
        # Every replica has the visual vectors of the whole step.
        slots = shape.room(self.devices.hosts, self.row_devices).slots
        vectors = mesh.data * slots * self.visual
        pieces = row_pieces(self.config.text, mesh.fsdp, mesh.tensor)
        largest = shape.microbatches(rl.microbatch_tokens, self.row_devices, pieces)[0]
        activations = self._activations(rl.remat, largest.size / self.row_devices)
        # The sum over micro-batches, and the gradient of one of them.
        return self.rl_state + 2 * self.weights + vectors + activations

    def _activations(self, policy: Remat, tokens: float) -> float:
        """Return what layers keep for the backward pass, and the temporaries of a layer and the
        head."""
        text, tensor = self.config.text, self.run.mesh.tensor
        inputs, attention = text.hidden_size, text.num_attention_heads * text.head_dim
        keys_and_values = 2 * text.num_key_value_heads * text.head_dim
        # The backward pass does not need the last product of a layer, which is added to its input.
        products = attention + keys_and_values + text.hidden_size + 2 * text.mlp_width
        kept = {
            # The copy to the host is buffered; the compiler keeps more than half of it.
            "offload": inputs * 5 // 8,
            "full": inputs,
            "attention": inputs + attention,
            "dots": inputs + attention + products,
            # All intermediate results.
            "none": inputs + attention + 2 * products,
        }[policy]
        computed = 6 * text.mlp_width + 2 * _dispatched(text) + 5 * max(inputs, attention)
        numbers = text.num_hidden_layers * kept + computed
        if not self.devices.tpu:
            # Scores of a tile of queries and their gradients, in float32.
            numbers += 16 * TILE * text.num_attention_heads / tensor / self.itemsize
        # The weights of a layer are gathered for forward and backward pass, with their gradients.
        layer = text.hidden_size * (2 * attention + keys_and_values) + _mlp_weights(text)
        # Every device has all weights of the trained vision tower, and their gradient.
        vision = 2 * 4 * (_numbers(self.trained) - _numbers(self.text))
        return max(self.itemsize * (tokens * numbers + 3 * layer / tensor), vision)

    def engine_sizes(self, engine: EngineSettings) -> EngineSizes:
        """Return all sizes of the run's engine."""
        return dataclasses.replace(self.run, engine=engine).engine_sizes

    def rollouts(self, engine: EngineSettings) -> float:
        """Return what the engine needs, and the state of RL beside it."""
        call = self._largest_call(self.engine_sizes(engine))
        return self.rl_state + self.engine_weights + call + engine.cache_tokens * self.token

    def _largest_call(self, sizes: EngineSizes) -> float:
        """Return what prefill takes beside the pages: its visual vectors, and what it computes of a
        layer; or what decoding takes, if that is more."""
        text, tokens, own = self.config.text, sizes.prefill_tokens, self.engine_devices
        queries = text.num_attention_heads * text.head_dim
        numbers = 2 * text.hidden_size + _dispatched(text) + (text.mlp_width + queries) / own
        # Visual vectors are copied to another layout, and there are zeros for calls without any.
        prefill = 3 * tokens * self.vector + tokens * numbers * self.itemsize
        logits = 16 * sizes.slots * text.vocab_size / own
        if self.devices.tpu:
            # So are, in decoding, the weights of queries, keys and values.
            heads = queries + 2 * text.num_key_value_heads * text.head_dim
            weights = text.num_hidden_layers * text.hidden_size * heads
            return max(prefill, logits + weights * self.itemsize / own)
        # XLA has more of a layer at a time, and decoding copies all weights.
        prefill += tokens * (3 * text.mlp_width + 6 * text.hidden_size) * self.itemsize
        return max(prefill, logits + self.engine_copy)


# --- the command ---


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns 0 if the recipe fits the devices here, else 1."""
    run = parse(sys.argv[1:] if argv is None else argv, RECIPES, "python -m paravt_extras.fit")
    reserve_memory()

    def work() -> None:
        devices = found_devices()
        print(f"{run.name} fits {devices.name}: {fit(run, devices).describe()}")

    return run_command(work)


if __name__ == "__main__":
    sys.exit(main())
