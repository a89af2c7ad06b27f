"""Chooses the sizes that a recipe leaves open, so that its run fits the devices.

A field that is 0 or "auto" is open. The choice follows from the devices alone, so every start on
the same devices chooses the same. A value that is set by hand stays.

Memory is estimated by arithmetic. Per device, a training step needs

    weights, moments, two copies of gradients, frozen weights, visual vectors
    + tokens of a micro-batch * (layers * numbers kept per token + those of one layer)

and the engine needs weights, moments, a copy of the weights, the KV cache and its largest call. The
coefficients were fitted to programs that libtpu compiled. `python -m paravt_extras.plan` compiles
the chosen programs and so checks the estimate.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh

from models.attention import QUERY_CHUNK
from models.config import ModelConfig, TextConfig
from models.lora import LoRASettings
from models.model import abstract_model
from models.remat import Remat
from models.sharding import MESH_AXES, param_shardings
from models.trained import CHUNK_TOKENS, TrainVision, cached_shape, split, split_vision
from paravt_extras.slices import Devices, known_slices
from rollout.engine.memory import decode_bytes, prefill_bytes
from rollout.engine.pages import page_count
from rollout.engine.programs import CHUNK
from rollout.engine.settings import EngineSizes
from train.learn.in_flight import capacity
from train.learn.optimizer import make_optimizer
from train.learn.packing import ALIGNMENT
from train.learn.placement import row_pieces
from train.learn.weight_sync import sampler_devices
from train.settings import ModelSettings, Run, change

GIB = 2.0**30
# Part of a device's memory to plan with. The rest covers errors of the estimate.
USABLE = 0.97
# The order in which policies are tried: each computes more again, and keeps less, than the last.
POLICIES: tuple[Remat, ...] = ("dots", "attention", "full", "offload")
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
    devices: Devices
    chosen: dict[str, Any]
    """The values of the open fields, by dotted name."""
    needs: dict[str, float]
    """Estimated bytes per device in each part of a run. Empty if nothing was open."""

    def describe(self) -> str:
        """The mesh and the chosen values, on one line."""
        mesh = " x ".join(map(str, mesh_sizes(self.run)))
        others = [f"{k} {v}" for k, v in self.chosen.items() if not k.startswith("mesh.")]
        return ", ".join([f"mesh {mesh} (data, fsdp, tensor)", *others])


class _TooLarge(Exception):
    """A part of the run needs more memory than a device has."""

    def __init__(self, part: str, needed: float):
        super().__init__(part)
        self.part = part
        self.needed = needed


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
    open_fields = [name for name in OPEN_FIELDS if _is_open(run, name)]
    if not open_fields:
        require_dividing(run, devices)
        return Fitted(run, devices, {}, {})
    if devices.memory is None:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in open_fields)
        raise ValueError(
            f"devices = {devices.name}: JAX reports no memory, by which sizes are chosen; "
            f"set {flags}"
        )
    try:
        return _fit(run, devices)
    except _TooLarge as lack:
        slices = ", ".join(smallest_slices(run)) or "none that is known"
        raise ValueError(
            f"devices = {devices.name}: too small for {lack.part}, which needs an estimated "
            f"{lack.needed / GIB:.1f} GiB per device; {USABLE * devices.memory / GIB:.1f} of "
            f"{devices.memory / GIB:.1f} GiB are usable; the smallest slices for {run.name} with "
            f"these settings: {slices}"
        ) from lack


def smallest_slices(run: Run) -> Iterator[str]:
    """Per generation of TPUs, the smallest slice that the run fits."""
    for _, slices in itertools.groupby(known_slices(), lambda topology: topology.chip):
        for topology in slices:
            try:
                _fit(run, topology.available)
            except (_TooLarge, ValueError):  # ValueError: the mesh does not divide the devices
                continue
            yield topology.name
            break


def rows_of(run: Run) -> int:
    """Rows in the largest batch of an update."""
    if run.rl is not None:
        return run.rl_shape.rows
    return 1 if run.sft is None else run.sft.rows


def mesh_sizes(run: Run) -> Mesh:
    """Sizes of the run's mesh; 0 where one is left open."""
    return run.mesh.data, run.mesh.fsdp, run.mesh.tensor


def total_bytes(tree: Any) -> float:
    """Bytes of all arrays in a tree, each counted once."""
    return float(sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree)))


def _is_open(run: Run, name: str) -> bool:
    section, _, field = name.partition(".")
    settings = getattr(run, section)
    # A phase that the run does not have leaves nothing open.
    return settings is not None and getattr(settings, field) in (0, "auto")


def _fit(run: Run, devices: Devices) -> Fitted:
    sizes = _sizes(run.model, run.lora, run.train_vision)
    mesh = choose_mesh(run, devices, sizes.config.text.most_tensor)
    fields: dict[str, Any] = dict(zip(("mesh.data", "mesh.fsdp", "mesh.tensor"), mesh, strict=True))
    require_dividing(change(run, run.name, fields), devices)
    estimate = _Estimate(run, devices, mesh, sizes)
    needs = {}
    if run.sft is not None:
        policy, parts, needs["cold start"] = estimate.choose_cold_start()
        fields |= {"sft.microbatches": parts, "sft.remat": policy}
    if run.rl is not None:
        policy, tokens, needs["PARA-GRPO"] = estimate.choose_rl()
        fields |= {"rl.microbatch_tokens": tokens, "rl.remat": policy}
    if run.plays_episodes:
        slots, tokens, needs["rollouts"] = estimate.choose_engine()
        fields |= {"engine.slots": slots, "engine.cache_tokens": tokens}
        needs["weight sync"] = estimate.weight_sync()
    fields = {
        name: value
        for name, value in fields.items()
        if _is_open(run, name) or (name == "mesh.data" and value != run.mesh.data)
    }
    return Fitted(change(run, run.name, fields), devices, fields, needs)


# --- the mesh ---


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
    if fsdp:
        return data, fsdp, left
    if tensor:
        return data, left, tensor
    rows = rows_of(run)
    if run.lora is not None and devices.hosts == 1 and most_tensor % devices.count == 0:
        # Sharded by heads only, the base serves updates and the engine alike, without a copy.
        rows = 1
    padded_rows = 1 << (rows - 1).bit_length()
    rows_of_replica = max(1, padded_rows // data)
    # As the limit is a power of two, the gcd is the largest such number that divides the devices.
    least = math.gcd(left, 1 << (rows_of_replica.bit_length() - 1))
    fsdp = next(
        size
        for size in range(least, left + 1)
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
    mesh = mesh_sizes(run)
    reason = _misfit(run, mesh, devices)
    if reason:
        raise ValueError(
            f"mesh: {' x '.join(map(str, mesh))} (data, fsdp, tensor): {reason}; let it be chosen: "
            "--mesh.data 1 --mesh.fsdp 0 --mesh.tensor 0"
        )


def _misfit(run: Run, mesh: Mesh, devices: Devices) -> str:
    """Why a mesh does not work; empty if it does."""
    data, fsdp, tensor = mesh
    count = math.prod(mesh)
    if count > devices.count:
        return f"takes {count} devices, but there are {devices.count}"
    if data % devices.slices:
        return f"data is not a multiple of the {devices.slices} slices, which need whole replicas"
    if count < devices.count and not devices.hosts == devices.slices == 1:
        return f"takes {count} of {devices.count} devices, but several hosts have to use all"
    if data * fsdp % devices.hosts:
        return f"data * fsdp does not divide over {devices.hosts} hosts, which share the batch"
    if fsdp == tensor == 1:
        return ""
    # The vocabulary of a tiny model is made from its data, and not known yet.
    config = run.model.config(vocab_size=tensor)
    heads, kv_heads = config.text.num_attention_heads, config.text.num_key_value_heads
    if heads % math.lcm(kv_heads, tensor):
        return f"{heads} heads and {kv_heads} kv heads do not divide over {tensor} devices"
    try:
        param_shardings(_decoder(config, run.lora), AbstractMesh(mesh, MESH_AXES))
    except ValueError as error:
        return str(error).partition(";")[0]
    return ""


@functools.cache
def _decoder(config: ModelConfig, lora: LoRASettings | None) -> Any:
    """The abstract weights of the decoder. All dimensions of the tower may be whole."""
    return nnx.state(abstract_model(config, lora=lora).text)


def _sharded_bytes(state: Any, mesh: Mesh) -> float:
    """Bytes of weights on each device of a mesh."""
    shardings = jax.tree.leaves(param_shardings(state, AbstractMesh(mesh, MESH_AXES)))
    leaves = zip(jax.tree.leaves(state), shardings, strict=True)
    return float(sum(math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize for x, s in leaves))


# --- memory ---


class _Sizes(NamedTuple):
    """Abstract parts of a model."""

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
def _sizes(settings: ModelSettings, lora: LoRASettings | None, train_vision: TrainVision) -> _Sizes:
    dtype = settings.dtype
    param_dtype = jnp.float32 if lora is None else dtype
    sized = settings.config(_TINY_VOCABULARY)
    model = abstract_model(sized, dtype=dtype, param_dtype=param_dtype, lora=lora)
    itemsize = jnp.dtype(dtype).itemsize
    _, trained, base = split(model, train_vision)
    tower = float(_numbers(nnx.state(model.vision)) * itemsize)
    return _Sizes(settings.config(), trained, split_vision(trained)[0], base, tower, itemsize)


def _numbers(tree: Any) -> int:
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


class _Estimate:
    """Estimates the memory of a device in each part of a run, in bytes."""

    def __init__(self, run: Run, devices: Devices, mesh: Mesh, sizes: _Sizes) -> None:
        self.run = run
        self.devices = devices
        assert devices.memory is not None
        self.usable = USABLE * devices.memory
        self.mesh = mesh
        self.row_devices = mesh[0] * mesh[1]
        self.sizes = sizes
        self.engine_devices = sampler_devices(
            (sizes.text, sizes.base), devices.count // devices.hosts
        )
        self.weights = _sharded_bytes(sizes.trained, mesh)
        self.frozen = _sharded_bytes(sizes.base, mesh) + sizes.tower
        if run.plays_episodes and mesh != (1, 1, self.engine_devices):
            # Sharded differently, the engine has a base of its own.
            self.frozen += total_bytes(sizes.base) / self.engine_devices

    # --- updates ---

    def choose_cold_start(self) -> tuple[Remat, int, float]:
        """The first policy and the fewest micro-batches with which an update fits, and its bytes.

        Fewer micro-batches gather the weights less often.
        """
        sft = self.run.sft
        assert sft is not None
        most = sft.shape.fitted(sft.rows, self.row_devices).microbatches
        numbers = [sft.microbatches] if sft.microbatches else list(range(1, most + 1))
        policies: tuple[Remat, ...] = POLICIES if sft.remat == "auto" else (sft.remat,)
        needed = math.inf
        for policy, number in itertools.product(policies, numbers):
            needed = self._cold_start(policy, number)
            if needed <= self.usable:
                return policy, number, needed
        raise _TooLarge("the cold start", needed)

    def choose_rl(self) -> tuple[Remat, int, float]:
        """The first policy with which a micro-batch holds a whole group, and the largest such one.

        If there is none, micro-batches get smaller, down to a trajectory for each row.

        Returns:
            The policy, the bound on the tokens of a micro-batch, and the bytes that it needs.
        """
        rl = self.run.rl
        assert rl is not None
        on_device: tuple[Remat, ...] = POLICIES[:-1] if rl.remat == "auto" else (rl.remat,)
        whole, smaller = self._microbatch_tokens()
        if rl.microbatch_tokens:
            whole, smaller = [rl.microbatch_tokens], []
        choices = [
            *itertools.product(on_device, whole),
            *itertools.product(on_device, smaller),
            # Copies to the host take time, so they are tried last.
            *itertools.product(POLICIES[-1:] if rl.remat == "auto" else (), [*whole, *smaller]),
        ]
        needed = math.inf
        for policy, bound in choices:
            needed = self._rl(policy, bound)
            if needed <= self.usable:
                return policy, bound, needed
        raise _TooLarge("PARA-GRPO", needed)

    def _microbatch_tokens(self) -> tuple[list[int], list[int]]:
        """Bounds on the tokens of a micro-batch: for whole groups at their longest, and for less.

        The last one gives every row just the longest trajectory.
        """
        shape = self.run.rl_shape
        longest = shape.limits
        group = longest.prompt + shape.rollouts * longest.response
        # Rows are multiples of this: rounded down, whole groups would have no room.
        unit = self.row_devices // self._pieces() * self._pieces() * ALIGNMENT
        whole = [-(-groups * group // unit) * unit for groups in range(shape.groups, 0, -1)]
        smaller = [whole[-1]]
        while smaller[-1] > self.row_devices // self._pieces() * shape.trajectory:
            smaller.append(smaller[-1] // 2)
        return whole, smaller[1:]

    def _pieces(self) -> int:
        return row_pieces(self.sizes.config.text, self.mesh[1], self.mesh[2])

    def _rl(self, policy: Remat, bound: int) -> float:
        shape = self.run.rl_shape
        replicas = self.mesh[0]
        # Every replica has the visual vectors of the whole step.
        visual = shape.slots(self.devices.hosts, self.row_devices) * replicas
        frames = shape.frames(self.devices.hosts, self.row_devices)
        if self.run.train_vision == "none":
            frames *= replicas
            cached = self._cached(visual, frames)
        else:
            cached = self._cached(visual / replicas, frames)
        vectors = cached + self._differentiated_vectors(visual)
        largest = shape.microbatches(bound, self.row_devices, self._pieces())[0]
        activations = self._activations(policy, largest.places / self.row_devices)
        # The sum over micro-batches, and the gradient of one of them.
        return self._state("rl") + 2 * self.weights + vectors + activations

    def _cold_start(self, policy: Remat, parts: int) -> float:
        assert self.run.sft is not None
        shape = self.run.sft.shape.fitted(parts, self.row_devices)
        rows = shape.rows / self.row_devices
        gradients = self.weights * (2 if parts > 1 else 1)
        # Every replica has the visual vectors of the batch, and of the next one. What the tower
        # computes for the one after it is spread over all devices.
        visual, frames = rows * shape.visual, rows * shape.visual / self.run.smallest_frame
        replicas = self.mesh[0] if self.run.train_vision == "none" else 1
        vectors = (2 * replicas + 1) * self._cached(visual, frames)
        vectors += self._differentiated_vectors(visual * self.mesh[0])
        activations = self._activations(policy, rows * shape.tokens / parts)
        return self._state("sft") + gradients + vectors + activations

    def _state(self, phase: str) -> float:
        """Trained weights, their moments, and frozen weights. Moments are sharded like weights."""
        optimizer = make_optimizer(getattr(self.run, phase).optimizer)
        moments = total_bytes(jax.eval_shape(optimizer.init, self.sizes.trained))
        share = self.weights / total_bytes(self.sizes.trained)
        return self.weights + moments * share + self.frozen

    def _cached(self, visual: float, frames: float) -> float:
        """What is cached of frames for an update; see `models.trained`."""
        numbers = math.prod(cached_shape(self.sizes.config.vision, self.run.train_vision))
        if self.run.train_vision == "tower":
            visual = frames * self.run.largest_frame
        return visual * numbers * self.sizes.itemsize

    def _differentiated_vectors(self, visual: float) -> float:
        """If they are differentiated: visual vectors, their gradient, and the sum of gradients."""
        if self.run.train_vision == "none":
            return 0.0
        return self._vectors(visual) * (2 + 4 / self.sizes.itemsize)

    def _vectors(self, visual: float) -> float:
        """Visual vectors, one of each level per visual token, in the type of the activations."""
        config = self.sizes.config
        levels = 1 + config.vision.levels
        return visual * levels * config.text.hidden_size * self.sizes.itemsize

    def _activations(self, policy: Remat, tokens: float) -> float:
        """What layers keep for the backward pass, and the temporaries of a layer and the head."""
        text = self.sizes.config.text
        kept = text.num_hidden_layers * _kept(text, policy)
        attention = text.num_attention_heads * text.head_dim
        computed = 6 * text.mlp_width + 2 * text.dispatched + 5 * max(text.hidden_size, attention)
        heads = 2 * (text.num_attention_heads + text.num_key_value_heads) * text.head_dim
        layer = text.hidden_size * heads + text.mlp_weights
        # The weights of a layer are gathered for forward and backward pass, with their gradients.
        gathered = 3 * layer / self.mesh[2]
        scores = 0.0
        if not self.devices.tpu:
            # Scores of a chunk of queries and their gradients, in float32.
            scores = 4 * QUERY_CHUNK * text.num_attention_heads / self.mesh[2] * tokens * 4
        decoder = self.sizes.itemsize * (tokens * (kept + computed) + gathered) + scores
        return max(decoder, self._vision_backward())

    def _vision_backward(self) -> float:
        """The backward pass of the trained part of the tower, for one piece of a batch."""
        part = self.run.train_vision
        if part == "none":
            return 0.0
        vision = self.sizes.config.vision
        # Every device has all of its weights, and their gradient.
        count = _numbers(self.sizes.trained) - _numbers(self.sizes.text)
        joined = vision.spatial_merge_size**2 * vision.hidden_size
        numbers = (1 + vision.levels) * (4 * joined + 2 * vision.out_hidden_size)
        if part == "tower":
            # The input of each block, and the intermediate results of one.
            computed = 8 * vision.hidden_size + 3 * vision.intermediate_size
            per_patch = (vision.depth + vision.levels) * vision.hidden_size + computed
            numbers += vision.spatial_merge_size**2 * per_patch
        return 2 * 4 * count + CHUNK_TOKENS * numbers * self.sizes.itemsize

    # --- rollouts ---

    def choose_engine(self) -> tuple[int, int, float]:
        """Slots, tokens of the cache, and the bytes that rollouts need.

        The cache holds all rollouts that a host plays at once, at their longest. The slots are the
        most with which that fits. If it never does, the cache holds what fits beside the fewest.
        """
        run = self.run
        token = self._token_bytes()
        numbers = [run.engine.slots] if run.engine.slots else self._slots()
        for slots in numbers:
            engine = self._engine(slots)
            tokens = run.engine.cache_tokens or self._cache_for_all(engine)
            needed = self._rollouts_without_cache(engine) + tokens * token
            if needed <= self.usable:
                return slots, tokens, needed
        engine = self._engine(numbers[-1])
        fixed = self._rollouts_without_cache(engine)
        room = int((self.usable - fixed) / token) // engine.page * engine.page
        tokens = run.engine.cache_tokens or max(room, engine.pages * engine.page)
        if fixed + tokens * token > self.usable:
            raise _TooLarge("rollouts", fixed + tokens * token)
        return numbers[-1], tokens, fixed + tokens * token

    def _slots(self) -> Sequence[int]:
        """Room for a host's rollouts and as many sub-agents, up to `MOST_SLOTS`, then less."""
        rl = self.run.rl
        if rl is None:
            return [MOST_SLOTS]
        group = rl.grpo.group_size
        most = min(MOST_SLOTS, 2 * self._prompts() * group)
        # Decoding on pages, fewer slots would save hardly any memory.
        halvings = 0 if self._paged else int(math.log2(most / group))
        return [most // 2**n for n in range(halvings + 1)]

    def _prompts(self) -> int:
        """Groups of rollouts in flight on a host."""
        assert self.run.rl is not None
        groups = capacity(self.run.rl.prompts, self.run.rl.max_staleness)
        return math.ceil(groups / self.devices.hosts)

    @property
    def _paged(self) -> bool:
        """Whether the engine decodes on pages, without copies of them."""
        return self.devices.tpu

    def _engine(self, slots: int) -> EngineSizes:
        """Sizes of an engine whose cache, if it is open, holds a single rollout at its longest."""
        return change(self.run, self.run.name, {"engine.slots": slots}).engine_sizes

    def _cache_for_all(self, engine: EngineSizes) -> int:
        """Tokens of all rollouts that a host plays at once, at their longest."""
        longest = engine.row_lengths[-1]
        if self.run.rl is None:
            return engine.slots * longest
        shape = self.run.rl_shape
        rollouts = min(self._prompts() * shape.rollouts, engine.slots)
        # A group shares the pages of its prompt, but for a partly filled last one.
        pages = self._prompts() * page_count(shape.limits.prompt, engine.page)
        pages += rollouts * (page_count(shape.limits.response, engine.page) + 1)
        return max(pages * engine.page, longest)

    def _token_bytes(self) -> float:
        """Keys and values of a token, sharded by head."""
        text = self.sizes.config.text
        numbers = 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim
        return numbers * self.sizes.itemsize / self.engine_devices

    def _rollouts_without_cache(self, engine: EngineSizes) -> float:
        lengths = itertools.product(engine.prefill_lengths, (0, *engine.row_lengths))
        calls = [self._prefill(engine, length, before) for length, before in lengths]
        config, token = self.sizes.config, self._token_bytes()
        copies = 0.0
        if not self._paged:
            widths = engine.row_lengths
            calls += [decode_bytes(config, engine, token, w, False) for w in widths]
            # Copies of shared prompts, one per group of rows and length.
            copies = engine.slots // engine.rows_per_prefix * sum(engine.prefix_lengths) * token
            # Copies of the layers' weights.
            states = (self.sizes.text, self.sizes.base)
            layers = sum(_numbers(state["layers"]) for state in states if "layers" in state)
            copies += layers * self.sizes.itemsize / self.engine_devices
        state = self._state("rl") if self.run.rl is not None else self.weights + self.frozen
        return state + self._engine_weights() + max(calls) + copies

    def _engine_weights(self) -> float:
        """Bytes of the trained weights in the type of the activations."""
        return _numbers(self.sizes.text) * self.sizes.itemsize / self.engine_devices

    def weight_sync(self) -> float:
        """Bytes while the engine receives new weights, of which there are two copies meanwhile.

        The batch of RL is still there.
        """
        if self.run.rl is None:
            return self.weights + self.frozen + 2 * self._engine_weights()
        slots = self.run.rl_shape.slots(self.devices.hosts, self.row_devices)
        return self._state("rl") + 2 * self._engine_weights() + self._vectors(slots * self.mesh[0])

    def _prefill(self, engine: EngineSizes, length: int, before: int) -> float:
        """A call of prefill: the visual vectors, and what the program computes."""
        text, itemsize = self.sizes.config.text, self.sizes.itemsize
        token = self._token_bytes()
        if not self.devices.tpu:
            config = self.sizes.config
            return prefill_bytes(config, engine, itemsize, token, length, before)
        rows = engine.prefill_rows(length, before)
        tokens = rows * length
        numbers = 2 * text.hidden_size + text.dispatched + text.mlp_width / self.engine_devices
        # Of one layer: the gathered pages, and their keys and values. Those of all layers are
        # joined at the end, when nothing is read any more.
        read = 2 * rows * before * token / text.num_hidden_layers
        bank = self._vectors(math.ceil(engine.bank_tokens / CHUNK) * CHUNK)
        return bank + tokens * (numbers * itemsize + token) + max(tokens * token, read)


def _kept(text: TextConfig, policy: Remat) -> int:
    """Numbers per token that a policy keeps of a layer on the device."""
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
