"""Chooses the sizes that a recipe leaves open, so that its run fits the devices.

    python -m paravt_extras.fit --config=NAME [--field value ...]

shows the sizes for the devices here, or what the recipe needs. Nothing is downloaded.

A field that is 0 or "auto" is open. The choice follows from the devices alone, so every start on
the same devices chooses the same. A value that is set by hand stays. `fit` reads from top to
bottom: the mesh, then the cold start, PARA-GRPO, and the engine.

Memory is estimated by arithmetic. Per device, a training step needs

    weights, moments, two copies of gradients, frozen weights, visual vectors
    + tokens of a micro-batch * (layers * numbers kept per token + those of one layer)

and the engine needs weights, moments, a copy of the weights, the KV cache and its largest call. The
coefficients were fitted to programs that libtpu compiled; those of GPUs were not. `python -m
paravt_extras.plan` compiles the chosen programs for a TPU slice and so checks the estimate.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh

from configs import RECIPES
from models.attention import QUERY_CHUNK
from models.config import ModelConfig, TextConfig
from models.devices import require_type, reserve_memory
from models.layers import Remat
from models.lora import LoRASettings
from models.model import abstract_model
from models.sharding import MESH_AXES, param_shardings
from models.trained import TrainVision, cached_shape, split, split_vision
from paravt_extras.slices import Devices, found_devices, known_slices
from rollout.engine.pages import page_count
from rollout.engine.programs import CHUNK
from rollout.engine.settings import EngineSizes
from train.cli import parse
from train.learn.in_flight import capacity
from train.learn.optimizer import make_optimizer
from train.learn.packing import ALIGNMENT
from train.learn.placement import row_pieces
from train.learn.weight_sync import sampler_devices
from train.settings import ModelSettings, Run, change

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
    "engine.slots",
    "engine.cache_tokens",
    "sft.microbatches",
    "sft.remat",
    "rl.microbatch_tokens",
    "rl.remat",
)
# Tokens of a tiny model, whose vocabulary is made from its data and not known yet.
_TINY_VOCABULARY = 512

Mesh = tuple[int, int, int]
"""Sizes of (data, fsdp, tensor)."""


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
        mesh = " x ".join(map(str, mesh_sizes(self.run)))
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
        ValueError: The mesh does not divide the devices or the model; the memory of the devices is
            not known; or the run does not fit. The last message names the smallest slices on which
            it would.
    """
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
        return _fit(run, devices)
    except _TooLargeError as lack:
        slices = ", ".join(smallest_slices(run)) or "none that is known"
        raise ValueError(
            f"devices = {devices.name}: too small for {lack}; "
            f"{USABLE * devices.memory / GIB:.1f} of {devices.memory / GIB:.1f} GiB are usable; "
            f"the smallest slices for {run.name} with these settings: {slices}"
        ) from lack


def _fit(run: Run, devices: Devices) -> Fitted:
    shapes = _shapes(run.model, run.lora, run.train_vision)
    mesh = choose_mesh(run, devices, shapes.config.text.most_tensor)
    fields: dict[str, Any] = dict(zip(("mesh.data", "mesh.fsdp", "mesh.tensor"), mesh, strict=True))
    fitted = change(run, run.name, fields)
    require_dividing(fitted, devices)
    memory = _Memory(fitted, devices, shapes)
    needs: dict[str, float] = {}
    if run.sft is not None:
        choices = _cold_starts(memory)
        choice = _first_fitting("cold start", memory, memory.cold_start, choices, needs)
        fields |= dict(zip(("sft.remat", "sft.microbatches"), choice, strict=True))
    if run.rl is not None:
        choice = _first_fitting("PARA-GRPO", memory, memory.rl, _updates(memory), needs)
        fields |= dict(zip(("rl.remat", "rl.microbatch_tokens"), choice, strict=True))
    if run.plays_episodes:
        choice = _first_fitting("rollouts", memory, memory.rollouts, _engines(memory), needs)
        fields |= dict(zip(("engine.slots", "engine.cache_tokens"), choice, strict=True))
    chosen = {name: value for name, value in fields.items() if value != _value(run, name)}
    return Fitted(change(run, run.name, fields), chosen, needs)


def smallest_slices(run: Run) -> Iterator[str]:
    """Yield, per generation of TPUs, the smallest slice that the run fits."""
    for _, slices in itertools.groupby(known_slices(), lambda topology: topology.chip):
        for topology in slices:
            try:
                _fit(run, topology.available)
            except (_TooLargeError, ValueError):  # ValueError: the mesh does not divide the devices
                continue
            yield topology.name
            break


def _value(run: Run, name: str) -> Any:
    """Return the value of an open field; None if the run does not have its phase."""
    section, _, field = name.partition(".")
    return getattr(getattr(run, section), field, None)


# --- the mesh ---


def mesh_sizes(run: Run) -> Mesh:
    """Return the sizes of the run's mesh; 0 where one is left open."""
    return run.mesh.data, run.mesh.fsdp, run.mesh.tensor


def choose_mesh(run: Run, devices: Devices, most_tensor: int) -> Mesh:
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
    data, fsdp, tensor = mesh_sizes(run)
    if fsdp and tensor:
        return data, fsdp, tensor
    if data == 1:
        data = devices.slices
    left, rest = divmod(devices.count, data * max(fsdp, 1) * max(tensor, 1))
    if rest:
        raise ValueError(
            f"mesh: {data} x {fsdp} x {tensor} (data, fsdp, tensor; 0 is chosen) does not divide "
            f"{devices.count} devices; give divisors"
        )
    if fsdp or tensor:
        return data, fsdp or left, tensor or left
    rows = 1
    if run.lora is not None and devices.hosts == 1 and most_tensor % devices.count == 0:
        # Sharded by heads only, the base serves updates and the engine alike, without a copy.
        pass
    elif run.rl is not None:
        rows = run.rl_shape.rows
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
    return data, fsdp, left // fsdp


def require_dividing(run: Run, devices: Devices) -> None:
    """Check a run's mesh, whose sizes are all known, against its model and devices.

    Raises:
        ValueError: There are too few devices, or something does not divide.
    """
    data, fsdp, tensor = mesh = mesh_sizes(run)
    count, hosts, slices = devices.count, devices.hosts, devices.slices
    idle_allowed = hosts == slices == 1
    # The vocabulary of a tiny model is made from its data, and not known yet.
    config = run.model.config(vocab_size=tensor)
    heads, kv_heads = config.text.num_attention_heads, config.text.num_key_value_heads
    reason = ""
    if math.prod(mesh) > count or (math.prod(mesh) < count and not idle_allowed):
        reason = f"takes {math.prod(mesh)} of {count} devices; several hosts have to use all"
    elif data % slices or data * fsdp % hosts:
        reason = (
            f"{slices} slices need whole replicas (data), and {hosts} hosts share the batch "
            "(data * fsdp) equally"
        )
    elif heads % math.lcm(kv_heads, tensor):
        reason = f"{heads} heads and {kv_heads} kv heads do not divide over {tensor} devices"
    elif fsdp * tensor > 1:
        # All dimensions of the tower may be whole.
        try:
            param_shardings(_decoder(config, run.lora), AbstractMesh(mesh, MESH_AXES))
        except ValueError as error:
            reason = str(error).partition(";")[0]
    if reason:
        raise ValueError(
            f"mesh: {' x '.join(map(str, mesh))} (data, fsdp, tensor): {reason}; let it be chosen: "
            "--mesh.data 1 --mesh.fsdp 0 --mesh.tensor 0"
        )


@functools.cache
def _decoder(config: ModelConfig, lora: LoRASettings | None) -> nnx.State:
    """Return the abstract arrays of the text decoder."""
    return nnx.state(abstract_model(config, lora=lora).text)


# --- what is chosen: the first that fits ---


def _first_fitting(
    phase: str,
    memory: _Memory,
    needed: Callable[..., float],
    choices: Iterable[tuple[Any, Any]],
    needs: dict[str, float],
) -> tuple[Any, Any]:
    """Return the first choice whose needed bytes a device has, and note these bytes in `needs`."""
    least = math.inf
    for choice in choices:
        needs[phase] = needed(*choice)
        if needs[phase] <= memory.usable:
            return choice
        least = min(least, needs[phase])
    raise _TooLargeError(f"{phase}, which needs an estimated {least / GIB:.1f} GiB per device")


def _cold_starts(memory: _Memory) -> Iterator[tuple[Remat, int]]:
    """Yield policies and numbers of micro-batches: fewer of them gather the weights less often."""
    sft = memory.run.sft
    assert sft is not None
    most = sft.shape.fitted(sft.rows, memory.row_devices).microbatches
    numbers = [sft.microbatches] if sft.microbatches else range(1, most + 1)
    policies = POLICIES if sft.remat == "auto" else (sft.remat,)
    return itertools.product(policies, numbers)


def _updates(memory: _Memory) -> list[tuple[Remat, int]]:
    """Return policies and bounds on the tokens of a micro-batch of RL.

    First come those that hold whole groups at their longest, so that no prompt is repeated. Then
    they get smaller, until every row has room for just the longest trajectory.
    """
    rl, shape = memory.run.rl, memory.run.rl_shape
    assert rl is not None
    rows = memory.row_devices // memory.pieces
    # Rows are multiples of this: rounded down, whole groups would have no room.
    unit = rows * memory.pieces * ALIGNMENT
    group = shape.limits.prompt + shape.rollouts * shape.limits.response
    whole = [-(-groups * group // unit) * unit for groups in range(shape.groups, 0, -1)]
    smaller = [whole[-1]]
    while smaller[-1] > rows * shape.trajectory:
        smaller.append(smaller[-1] // 2)
    del smaller[0]
    if rl.microbatch_tokens:
        whole, smaller = [rl.microbatch_tokens], []
    policies = POLICIES if rl.remat == "auto" else (rl.remat,)
    return [choice for bounds in (whole, smaller) for choice in itertools.product(policies, bounds)]


def _engines(memory: _Memory) -> Iterator[tuple[int, int]]:
    """Yield slots and tokens of the cache.

    The cache holds all rollouts that a host plays at once, at their longest, and there are slots
    for them and as many sub-agents. Then slots get fewer. If it never fits, the cache holds what
    fits beside the fewest.
    """
    run, longest = memory.run, memory.engine(1).row_lengths[-1]
    page, groups, most, least = memory.engine(1).page, 0, MOST_SLOTS, MOST_SLOTS
    if run.rl is not None:
        groups = math.ceil(capacity(run.rl.prompts, run.rl.max_staleness) / memory.devices.hosts)
        least = run.rl.grpo.group_size
        most = min(MOST_SLOTS, 2 * groups * least)
    if memory.devices.tpu:
        # Decoding on pages, fewer slots would save hardly any memory.
        least = most
    slots = run.engine.slots or most
    while True:
        tokens = slots * longest
        if run.rl is not None:
            limits = run.rl_shape.limits
            rollouts = min(groups * run.rl.grpo.group_size, memory.engine(slots).slots)
            # A group shares the pages of its prompt, but for a partly filled last one.
            pages = groups * page_count(limits.prompt, page)
            pages += rollouts * (page_count(limits.response, page) + 1)
            tokens = max(pages * page, longest)
        yield slots, run.engine.cache_tokens or tokens
        if run.engine.slots or slots // 2 < least:
            break
        slots //= 2
    room = int((memory.usable - memory.rollouts(slots, 0)) / memory.token) // page * page
    yield slots, run.engine.cache_tokens or max(room, longest)


# --- memory ---


class _Shapes(NamedTuple):
    """Abstract arrays of a model."""

    config: ModelConfig
    trained: Any
    """State of all trained weights."""
    text: Any
    """State of those of the text decoder."""
    base: Any
    """State of the decoder's frozen weights."""
    tower: float
    """Bytes of the vision tower in the type of the activations, by which frames are encoded."""
    itemsize: int
    """Bytes of an activation."""


@functools.cache
def _shapes(
    settings: ModelSettings, lora: LoRASettings | None, train_vision: TrainVision
) -> _Shapes:
    param_dtype = jnp.float32 if lora is None else settings.dtype
    sized = settings.config(_TINY_VOCABULARY)
    model = abstract_model(sized, dtype=settings.dtype, param_dtype=param_dtype, lora=lora)
    itemsize = jnp.dtype(settings.dtype).itemsize
    _, trained, base = split(model, train_vision)
    tower = float(_numbers(nnx.state(model.vision)) * itemsize)
    return _Shapes(settings.config(), trained, split_vision(trained)[0], base, tower, itemsize)


def total_bytes(tree: Any) -> float:
    """Return the bytes of all arrays in a tree, each counted once."""
    return float(sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree)))


def _numbers(tree: Any) -> int:
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


def _sharded_bytes(state: Any, mesh: Mesh) -> float:
    """Return the bytes of weights on each device of a mesh."""
    shardings = jax.tree.leaves(param_shardings(state, AbstractMesh(mesh, MESH_AXES)))
    leaves = zip(jax.tree.leaves(state), shardings, strict=True)
    return float(sum(math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize for x, s in leaves))


class _Memory:
    """Estimates the memory of a device in each phase of a run, in bytes."""

    def __init__(self, run: Run, devices: Devices, shapes: _Shapes) -> None:
        assert devices.memory is not None
        mesh = mesh_sizes(run)
        text = shapes.config.text
        self.run = run
        self.devices = devices
        self.shapes = shapes
        self.usable = USABLE * devices.memory
        self.row_devices = mesh[0] * mesh[1]
        self.pieces = row_pieces(text, mesh[1], mesh[2])
        self.weights = _sharded_bytes(shapes.trained, mesh)
        self.frozen = _sharded_bytes(shapes.base, mesh) + shapes.tower
        of_host = (shapes.text, shapes.base), devices.count // devices.hosts
        self.engine_devices = sampler_devices(*of_host)
        if run.plays_episodes and mesh != (1, 1, self.engine_devices):
            # Sharded differently, the engine has a base of its own.
            self.frozen += total_bytes(shapes.base) / self.engine_devices
        # Keys and values of a token, sharded by head.
        numbers = 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim
        self.token = numbers * shapes.itemsize / self.engine_devices
        self.engine_weights = _numbers(shapes.text) * shapes.itemsize / self.engine_devices
        self.sft_state = self._state(run.sft)
        self.rl_state = self._state(run.rl)

    def _state(self, phase: Any) -> float:
        """Trained weights, their moments, and frozen weights. Moments are sharded like weights."""
        if phase is None:
            return self.weights + self.frozen
        dtype = self.run.model.dtype if phase is self.run.rl else "float32"
        optimizer = make_optimizer(phase.optimizer, dtype)
        moments = total_bytes(jax.eval_shape(optimizer.init, self.shapes.trained))
        share = self.weights / total_bytes(self.shapes.trained)
        return self.weights + moments * share + self.frozen

    def cold_start(self, policy: Remat, microbatches: int) -> float:
        """Return what an update of the cold start needs in `microbatches` micro-batches."""
        assert self.run.sft is not None
        shape = self.run.sft.shape.fitted(microbatches, self.row_devices)
        rows = shape.rows / self.row_devices
        gradients = self.weights * (2 if microbatches > 1 else 1)
        # Every replica has the visual vectors of the batch, and of the next one. What the tower
        # computes for the one after it is spread over all devices.
        vectors = (2 * self.run.mesh.data + 1) * self._cached(rows * shape.visual)
        activations = self._activations(policy, rows * shape.tokens / microbatches)
        return self.sft_state + gradients + vectors + activations

    def rl(self, policy: Remat, bound: int) -> float:
        """Return what an update of RL needs with at most `bound` tokens in a micro-batch."""
        shape = self.run.rl_shape
        # Every replica has the visual vectors of the whole step.
        slots = shape.slots(self.devices.hosts, self.row_devices)
        vectors = self.run.mesh.data * self._cached(slots)
        largest = shape.microbatches(bound, self.row_devices, self.pieces)[0]
        activations = self._activations(policy, largest.size / self.row_devices)
        # The sum over micro-batches, and the gradient of one of them.
        return self.rl_state + 2 * self.weights + vectors + activations

    def _cached(self, visual: float) -> float:
        """Return the bytes of what is cached of visual tokens for an update."""
        trained, vision = self.run.train_vision, self.shapes.config.vision
        if trained == "none":
            return self._vectors(visual)
        # Beside what the trained part reads: its vectors, their gradient and its sum in float32.
        cached = visual * math.prod(cached_shape(vision, trained)) * self.shapes.itemsize
        return cached + self._vectors(visual) * (2 + 4 / self.shapes.itemsize)

    def _vectors(self, visual: float) -> float:
        """Visual vectors, one of each level per visual token, in the type of the activations."""
        levels = 1 + self.shapes.config.vision.levels
        return visual * levels * self.shapes.config.text.hidden_size * self.shapes.itemsize

    def _activations(self, policy: Remat, tokens: float) -> float:
        """Return what layers keep for the backward pass, and the temporaries of a layer and the
        head."""
        text, tensor = self.shapes.config.text, self.run.mesh.tensor
        kept = text.num_hidden_layers * _kept(text, policy)
        attention = text.num_attention_heads * text.head_dim
        computed = 6 * text.mlp_width + 2 * text.dispatched + 5 * max(text.hidden_size, attention)
        heads = 2 * (text.num_attention_heads + text.num_key_value_heads) * text.head_dim
        layer = text.hidden_size * heads + text.mlp_weights
        # The weights of a layer are gathered for forward and backward pass, with their gradients.
        gathered = 3 * layer / tensor
        scores = 0.0
        if not self.devices.tpu:
            # Scores of a chunk of queries and their gradients, in float32.
            scores = 4 * QUERY_CHUNK * text.num_attention_heads / tensor * tokens * 4
        decoder = self.shapes.itemsize * (tokens * (kept + computed) + gathered) + scores
        # Every device has all weights of the trained vision tower, and their gradient.
        vision = _numbers(self.shapes.trained) - _numbers(self.shapes.text)
        return max(decoder, 2 * 4 * vision)

    def engine(self, slots: int) -> EngineSizes:
        """Return the sizes of an engine with as many slots."""
        return change(self.run, self.run.name, {"engine.slots": slots}).engine_sizes

    def rollouts(self, slots: int, cache_tokens: int) -> float:
        """Return what the engine needs besides the state of RL."""
        engine = self.engine(slots)
        lengths = itertools.product(engine.prefill_lengths, (0, *engine.row_lengths))
        largest = max(self._prefill(engine, *each) for each in lengths)
        if not self.devices.tpu:
            # Without the kernels for pages, decoding gathers them and splits keys from values. The
            # largest call has logits, too, and copies of shared prompts and of the weights.
            reads = max(engine.rows(width) * (width + engine.steps) for width in engine.row_lengths)
            shared = engine.slots // engine.rows_per_prefix * sum(engine.prefix_lengths)
            logits = 4 * engine.slots * self.shapes.config.text.vocab_size * 4
            largest = max(largest, logits + 3 * reads * self.token) + shared * self.token
            numbers = _numbers(self.shapes.text) + _numbers(self.shapes.base)
            largest += numbers * self.shapes.itemsize / self.engine_devices
        return self.rl_state + self.engine_weights + largest + cache_tokens * self.token

    def _prefill(self, engine: EngineSizes, length: int, before: int) -> float:
        """Return a call of prefill: the visual vectors, and what the program computes."""
        text, itemsize, token = self.shapes.config.text, self.shapes.itemsize, self.token
        rows = engine.prefill_rows(length, before)
        tokens = rows * length
        numbers = 2 * text.hidden_size + text.dispatched + text.mlp_width / self.engine_devices
        # Of one layer: the gathered pages, and their keys and values. Those of all layers are
        # joined at the end, when nothing is read any more.
        read = 2 * rows * before * token / text.num_hidden_layers
        if not self.devices.tpu:
            # XLA has more of a layer at a time, and the scores of a chunk of queries.
            numbers += 3 * text.mlp_width + 6 * text.hidden_size
            chunk = min(QUERY_CHUNK, length) * text.num_attention_heads
            read += 2 * rows * chunk * (length + before) * 4
        bank = self._vectors(math.ceil(engine.bank_tokens / CHUNK) * CHUNK)
        return bank + tokens * (numbers * itemsize + token) + max(tokens * token, read)


def _kept(text: TextConfig, policy: Remat) -> int:
    """Return the numbers per token that a policy keeps of a layer on the device."""
    attention = text.num_attention_heads * text.head_dim
    keys_and_values = 2 * text.num_key_value_heads * text.head_dim
    # The last product of a layer is only added to its input: the backward pass does not need it.
    products = attention + keys_and_values + text.hidden_size + 2 * text.mlp_width
    kept = {
        # The copy to the host is buffered; the compiler keeps more than half of it.
        "offload": text.hidden_size * 5 // 8,
        "full": text.hidden_size,
        "attention": text.hidden_size + attention,
        "dots": text.hidden_size + attention + products,
    }
    # "none" keeps all intermediate results, about twice the products.
    return kept.get(policy, text.hidden_size + attention + 2 * products)


# --- the command ---


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns 0 if the recipe fits the devices here, else 1."""
    run = parse(sys.argv[1:] if argv is None else argv, RECIPES, "python -m paravt_extras.fit")
    reserve_memory()
    devices = found_devices()
    try:
        if devices.platform == "cpu" and run.model.size != "tiny":
            slices = ", ".join(smallest_slices(run)) or "none that is known"
            raise ValueError(f"{run.name} needs a GPU or a TPU, such as one of {slices}")
        require_type("model.dtype", run.model.dtype)
        print(f"{run.name} fits {devices.name}: {fit(run, devices).describe()}")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
