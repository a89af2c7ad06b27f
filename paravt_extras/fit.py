"""Chooses the sizes that a recipe leaves open, so that its run fits the devices.

A field that is 0 or "auto" is open. The mesh, micro-batches, rematerialisation and the sizes of the
engine follow from the devices alone, so every start on the same devices chooses the same. A value
that is set by hand stays.

Memory is estimated by arithmetic, in less than a second. The coefficients were fitted to programs
that libtpu compiled for the 8B model, and for adapters of 2B, 4B and 8B (docs/scale.md).
`paravt_extras.plan` compiles the chosen programs and so checks the estimate. Devices other than
TPUs lack its kernels: they have upper bounds for rollouts, and no program has checked these.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from models.attention import QUERY_CHUNK
from models.config import ModelConfig, TextConfig
from models.lora import LoRASettings
from models.model import abstract_model
from models.remat import Remat
from models.trained import apart, split
from models.trained_vision import CHUNK_TOKENS, TrainVision, cached_shape
from paravt_extras.meshes import mesh_sizes, require_dividing, sharded_bytes
from paravt_extras.slices import Devices, known_slices
from rollout.engine.pages import page_count
from rollout.engine.programs import CHUNK
from rollout.engine.settings import EngineSizes
from rollout.evaluation.memory import decode_bytes, prefill_bytes
from train.learn.in_flight import capacity
from train.learn.optimizer import OptimizerSettings, make_optimizer
from train.learn.packed_batch import fit_rows, parts_of_rows
from train.learn.packing import ALIGNMENT, MicrobatchShape, PackedMicrobatch, StepShape, pack
from train.learn.placement import row_pieces
from train.learn.weight_sync import sampler_devices
from train.learn.work import done
from train.settings import ModelSettings, Run, change

GIB = 2.0**30
# Part of a device's memory to plan with. The rest covers errors of the estimate.
USABLE = 0.97
# Tokens of a tiny model: a little more than paravt_tiny has, and a number that divides.
_TINY_VOCABULARY = 512
# The order in which policies are tried: each computes more again, and keeps less, than the last.
POLICIES: tuple[Remat, ...] = ("dots", "attention", "full", "offload")
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
        mesh = self.run.mesh
        named = [f"mesh {mesh.data} x {mesh.fsdp} x {mesh.tensor} (data, fsdp, tensor)"]
        named += [
            f"{name} {value}" for name, value in self.chosen.items() if not name.startswith("mesh.")
        ]
        return ", ".join(named)


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
        ValueError: The axes of the mesh do not divide the devices; model, hosts or slices do not
            divide over the mesh; the memory of the devices is not known; or the run does not fit.
            The last message names the smallest slices on which it would.
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


def choose_mesh(
    wanted: tuple[int, int, int], devices: int, rows: int, hosts: int, most_tensor: int
) -> tuple[int, int, int]:
    """Choose the open axes of a mesh, those that are 0.

    `fsdp` grows until every device has a row of the batch, and then until every host has as many
    rows as the others. The rest of the devices goes to `tensor`, where several devices share a row.

    Args:
        wanted: (data, fsdp, tensor).
        devices: Number of devices.
        rows: Rows in a batch, rounded up here to a power of two.
        hosts: Number of hosts, which have equally many devices.
        most_tensor: The largest size of `tensor` that divides what it shards; every divisor of it
            does, too.

    Raises:
        ValueError: The given axes do not divide `devices`.
    """
    data, fsdp, tensor = wanted
    given = data * max(fsdp, 1) * max(tensor, 1)
    if fsdp and tensor:
        return wanted
    if devices % given:
        raise ValueError(
            f"mesh: {data} x {fsdp} x {tensor} (data, fsdp, tensor; 0 is chosen) does not divide "
            f"{devices} devices; give divisors"
        )
    left = devices // given
    if fsdp:
        return data, fsdp, left
    if tensor:
        return data, left, tensor
    padded_rows = 1 << (rows - 1).bit_length()
    rows_of_replica = max(1, padded_rows // data)
    # As the limit is a power of two, the gcd is the largest such number that divides the devices.
    least = math.gcd(left, 1 << (rows_of_replica.bit_length() - 1))
    fsdp = next(
        size
        for size in range(least, left + 1)
        if left % size == 0 and data * size % hosts == 0 and most_tensor % (left // size) == 0
    )
    return data, fsdp, left // fsdp


def _is_open(run: Run, name: str) -> bool:
    section, _, field = name.partition(".")
    settings = getattr(run, section)
    # A phase that the run does not have leaves nothing open.
    return settings is not None and getattr(settings, field) in (0, "auto")


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


def _fit(run: Run, devices: Devices) -> Fitted:
    sizes = _sizes(run.model, run.lora, run.train_vision)
    rows = run.mesh.rows or rows_of(run)
    most_tensor = sizes.config.text.most_tensor
    if run.lora is not None and devices.hosts == 1 and most_tensor % devices.count == 0:
        # Sharded by heads only, the base serves updates and the engine alike, without a copy.
        rows = 1
    data, fsdp, tensor = mesh_sizes(run)
    if data == 1 and not (fsdp and tensor):
        data = devices.slices
    wanted = (data, fsdp, tensor)
    mesh = choose_mesh(wanted, devices.count, rows, devices.hosts, most_tensor)
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
        engine, needs["rollouts"] = estimate.choose_engine()
        fields |= engine
        needs["weight sync"] = estimate.weight_sync()
    fields = {
        name: value
        for name, value in fields.items()
        if _is_open(run, name) or (name == "mesh.data" and value != run.mesh.data)
    }
    return Fitted(change(run, run.name, fields), devices, fields, needs)


def rows_of(run: Run) -> int:
    """Rows in the largest batch of an update."""
    if run.rl is not None:
        return run.rl_shape.rows
    return 1 if run.sft is None else run.sft.rows


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
    config, dtype = settings.config(), settings.dtype
    # The vocabulary of a tiny model is made from its data, and not known yet.
    sized = settings.config(_TINY_VOCABULARY)
    param_dtype = jnp.float32 if lora is None else dtype
    model = abstract_model(sized, dtype=dtype, param_dtype=param_dtype, lora=lora)
    itemsize = jnp.dtype(dtype).itemsize
    _, trained, base = split(model, train_vision)
    tower = sum(math.prod(x.shape) for x in jax.tree.leaves(nnx.state(model.vision)))
    return _Sizes(config, trained, apart(trained)[0], base, float(tower * itemsize), itemsize)


@functools.cache
def _moments(
    settings: ModelSettings,
    lora: LoRASettings | None,
    train_vision: TrainVision,
    optimizer: OptimizerSettings,
) -> float:
    """Bytes of an optimizer's state over all devices."""
    trained = _sizes(settings, lora, train_vision).trained
    return total_bytes(jax.eval_shape(make_optimizer(optimizer, 1).init, trained))


def total_bytes(tree: Any) -> float:
    """Bytes of all arrays in a tree, each counted once."""
    return float(sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree)))


class _Estimate:
    """Estimates the memory of a device in each part of a run.

    Everything is in bytes per device. Moments and gradients are sharded like their weights.
    """

    # Sequences decoded side by side. More would hardly be faster.
    MOST_SLOTS = 64

    def __init__(
        self, run: Run, devices: Devices, mesh: tuple[int, int, int], sizes: _Sizes
    ) -> None:
        self.run = run
        self.devices = devices
        assert devices.memory is not None
        self.usable = USABLE * devices.memory
        self.mesh = mesh
        self.row_devices = mesh[0] * mesh[1]
        self.sizes = sizes
        self.weights = sharded_bytes(sizes.trained, mesh)
        self.frozen = sharded_bytes(sizes.base, mesh) + sizes.tower
        if run.plays_episodes and mesh != (1, 1, self._sampler_devices()):
            # Sharded differently, the engine has a base of its own.
            self.frozen += total_bytes(sizes.base) / self._sampler_devices()

    def choose_cold_start(self) -> tuple[Remat, int, float]:
        """The first policy, and the smallest number of micro-batches, with which an update fits.

        Fewer micro-batches gather the weights less often.

        Returns:
            The policy, the number of micro-batches, and the bytes that the update needs.
        """
        sft = self.run.sft
        assert sft is not None
        most = parts_of_rows(sft.shape, self.row_devices, sft.rows)
        numbers = [sft.microbatches] if sft.microbatches else list(range(1, most + 1))
        return self._first("the cold start", sft.remat, numbers, self._cold_start)

    def choose_rl(self) -> tuple[Remat, int, float]:
        """The policy and the size of micro-batches with which an RL step does least work.

        Only pairs that fit are compared, by their work for rollouts of the greatest length. Smaller
        micro-batches may keep more for the backward pass, but contain more padding. Offloading is
        only tried if nothing else fits.

        Returns:
            The policy, the bound on the tokens of a micro-batch, and the bytes that it needs.
        """
        rl = self.run.rl
        assert rl is not None
        bounds = [rl.microbatch_tokens] if rl.microbatch_tokens else self._microbatch_tokens()
        policies: tuple[Remat, ...] = POLICIES if rl.remat == "auto" else (rl.remat,)
        choices: list[tuple[Remat, int]] = [
            (policy, bound)
            for policy, bound in itertools.product(policies, bounds)
            if self._rl(policy, bound) <= self.usable
        ]
        if not choices:
            raise _TooLarge("PARA-GRPO", self._rl(policies[-1], bounds[-1]))
        on_device = [choice for choice in choices if choice[0] != "offload"]
        # `min` takes the first of equals: the largest micro-batch.
        policy, bound = min(on_device or choices, key=lambda choice: self._work(*choice))
        return policy, bound, self._rl(policy, bound)

    def _work(self, policy: Remat, bound: int) -> float:
        """FLOPs of update and reference for rollouts of the greatest length."""
        shape = self.run.rl_shape
        sizes = shape.microbatches(bound, self.row_devices, self._pieces())
        groups = shape.at_limits
        return done(_pack(shape, sizes), groups, self.sizes.config, policy, self.row_devices)

    def _first(
        self,
        part: str,
        remat: Remat,
        numbers: Sequence[int],
        needs: Callable[[Remat, int], float],
    ) -> tuple[Remat, int, float]:
        """The first policy and number whose needs are met."""
        needed = math.inf
        for policy in POLICIES if remat == "auto" else (remat,):
            for number in numbers:
                needed = needs(policy, number)
                if needed <= self.usable:
                    return policy, number, needed
        raise _TooLarge(part, needed)

    def choose_engine(self) -> tuple[dict[str, int], float]:
        """Slots and cache of the engine, by field, and the bytes that rollouts need.

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
                return {"engine.slots": slots, "engine.cache_tokens": tokens}, needed
        slots = numbers[-1]
        engine = self._engine(slots)
        fixed = self._rollouts_without_cache(engine)
        tokens = run.engine.cache_tokens
        if not tokens:
            room = int((self.usable - fixed) / token) // engine.page * engine.page
            tokens = max(room, engine.pages * engine.page)
        needed = fixed + tokens * token
        if needed > self.usable:
            raise _TooLarge("rollouts", needed)
        return {"engine.slots": slots, "engine.cache_tokens": tokens}, needed

    def _engine(self, slots: int) -> EngineSizes:
        """Sizes of an engine whose cache, if it is open, holds a single rollout at its longest."""
        return change(self.run, self.run.name, {"engine.slots": slots}).engine_sizes

    def weight_sync(self) -> float:
        """Bytes while the engine receives new weights, of which there are two copies meanwhile.

        The batch of RL is still there.
        """
        batch = 0.0
        if self.run.rl is not None:
            slots = self.run.rl_shape.slots(self.devices.hosts, self.row_devices)
            batch = self._vectors(slots * self.mesh[0])
        return self._resident() + 2 * self._engine_weights() + batch

    def _resident(self) -> float:
        """Weights, and the optimizer's moments while episodes are played."""
        moments = 0.0 if self.run.rl is None else self._moments("rl")
        return self.weights + moments + self.frozen

    def _moments(self, phase: str) -> float:
        run = self.run
        optimizer = getattr(run, phase).optimizer
        found = _moments(run.model, run.lora, run.train_vision, optimizer)
        return found * self.weights / total_bytes(self.sizes.trained)

    # --- updates ---

    def _microbatch_tokens(self) -> list[int]:
        """Bounds on the tokens of a micro-batch: whole groups at their longest, then less.

        The last one gives every row just the longest trajectory.
        """
        shape = self.run.rl_shape
        longest = shape.limits
        group = longest.prompt + shape.rollouts * longest.response
        rows = self.row_devices // self._pieces()
        # Rows are multiples of this: rounded down, whole groups would have no room.
        unit = rows * self._pieces() * ALIGNMENT
        bounds = [-(-groups * group // unit) * unit for groups in range(shape.groups, 0, -1)]
        while bounds[-1] > rows * shape.trajectory:
            bounds.append(bounds[-1] // 2)
        # Of bounds that lead to the same sizes, the smallest is enough.
        by_largest = {self._largest(bound).tokens: bound for bound in bounds}
        return [by_largest[tokens] for tokens in sorted(by_largest, reverse=True)]

    def _pieces(self) -> int:
        return row_pieces(self.sizes.config.text, self.mesh[1], self.mesh[2])

    def _largest(self, bound: int) -> MicrobatchShape:
        return self.run.rl_shape.microbatches(bound, self.row_devices, self._pieces())[0]

    def _rl(self, policy: Remat, bound: int) -> float:
        shape = self.run.rl_shape
        visual = shape.slots(self.devices.hosts, self.row_devices)
        frames = shape.frames(self.devices.hosts, self.row_devices)
        tokens = self._largest(bound).places / self.row_devices
        # The sum over micro-batches, and the gradient of one of them.
        state = self.weights + self._moments("rl") + 2 * self.weights
        activations = max(self._activations(policy, tokens), self._vision_backward())
        # Every replica has the visual vectors of the whole step.
        replicas = self.mesh[0]
        vectors = self._differentiated_vectors(visual * replicas)
        if self.run.train_vision == "none":
            vectors += self._cached(visual, frames) * replicas
        else:
            vectors += self._cached(visual, frames)
        return state + self.frozen + vectors + activations

    def _cold_start(self, policy: Remat, parts: int) -> float:
        assert self.run.sft is not None
        shape = fit_rows(self.run.sft.shape, self.row_devices, parts)
        rows = shape.rows / self.row_devices
        gradients = self.weights * (2 if parts > 1 else 1)  # a sum over micro-batches, and a term
        state = self.weights + self._moments("sft") + gradients
        # The batch, the next one, and what the tower computes for the one after it. A run knows its
        # data, and has room for the visual tokens of the fullest row only.
        visual, frames = rows * shape.visual, rows * shape.visual / self.run.smallest_frame
        cached = 3 * self._cached(visual, frames)
        activations = self._activations(policy, rows * shape.tokens / parts)
        activations = max(activations, self._vision_backward()) + self._differentiated_vectors(
            visual / parts
        )
        return state + self.frozen + cached + activations

    def _cached(self, visual: float, frames: float) -> float:
        """What is cached of frames for an update; see `models.trained_vision`."""
        numbers = math.prod(cached_shape(self.sizes.config.vision, self.run.train_vision))
        if self.run.train_vision == "tower":
            visual = frames * self.run.largest_frame
        return visual * numbers * self.sizes.itemsize

    def _differentiated_vectors(self, visual: float) -> float:
        """If they are differentiated: visual vectors, their gradient, and the sum of gradients."""
        if self.run.train_vision == "none":
            return 0.0
        return self._vectors(visual) * (2 + 4 / self.sizes.itemsize)

    def _vision_backward(self) -> float:
        """The backward pass of the trained part of the tower, for one piece of a batch."""
        part = self.run.train_vision
        if part == "none":
            return 0.0
        vision = self.sizes.config.vision
        # Every device has all of its weights, and their gradient.
        count = sum(math.prod(x.shape) for x in jax.tree.leaves(self.sizes.trained))
        count -= sum(math.prod(x.shape) for x in jax.tree.leaves(self.sizes.text))
        joined = vision.spatial_merge_size**2 * vision.hidden_size
        numbers = (1 + vision.levels) * (4 * joined + 2 * vision.out_hidden_size)
        if part == "tower":
            # The input of each block, and the intermediate results of one.
            computed = 8 * vision.hidden_size + 3 * vision.intermediate_size
            per_patch = (vision.depth + vision.levels) * vision.hidden_size + computed
            numbers += vision.spatial_merge_size**2 * per_patch
        return 2 * 4 * count + CHUNK_TOKENS * numbers * self.sizes.itemsize

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
        # The weights of a layer are gathered for forward and backward pass, with their gradients.
        gathered = 3 * _layer_weights(text) / self.mesh[2]
        scores = 0.0
        if not self.devices.tpu:
            # Scores of a chunk of queries and their gradients, in float32.
            scores = 4 * QUERY_CHUNK * text.num_attention_heads / self.mesh[2] * tokens * 4
        return self.sizes.itemsize * (tokens * (kept + computed) + gathered) + scores

    # --- rollouts ---

    def _slots(self) -> list[int]:
        """Room for a host's rollouts and as many sub-agents, up to `MOST_SLOTS`, then less."""
        rl = self.run.rl
        most = self.MOST_SLOTS
        group = 1
        if rl is not None:
            group = rl.grpo.group_size
            most = min(most, 2 * math.ceil(self._groups / self.devices.hosts) * group)
        if self._paged:
            # Fewer slots would save hardly any memory.
            return [most]
        numbers = [most]
        while numbers[-1] // 2 >= group:
            numbers.append(numbers[-1] // 2)
        return numbers

    @property
    def _groups(self) -> int:
        """Groups of rollouts in flight, on all hosts."""
        rl = self.run.rl
        return 0 if rl is None else capacity(rl.prompts, rl.max_staleness)

    @property
    def _paged(self) -> bool:
        """Whether the engine decodes on pages, without copies of them."""
        paged = self.run.engine.paged
        return self.devices.tpu if paged is None else paged

    def _cache_for_all(self, engine: EngineSizes) -> int:
        """Tokens of all rollouts that a host plays at once, at their longest."""
        longest = engine.row_lengths[-1]
        if self.run.rl is None:
            return engine.slots * longest
        shape = self.run.rl_shape
        prompts = math.ceil(self._groups / self.devices.hosts)
        rollouts = min(prompts * shape.rollouts, engine.slots)
        # A group shares the pages of its prompt, but for a partly filled last one.
        pages = prompts * page_count(shape.limits.prompt, engine.page)
        pages += rollouts * (page_count(shape.limits.response, engine.page) + 1)
        return max(pages * engine.page, longest)

    def _sampler_devices(self) -> int:
        text = (self.sizes.text, self.sizes.base)
        return sampler_devices(text, self.devices.count // self.devices.hosts)

    def _engine_weights(self) -> float:
        """Bytes of the trained weights in the type of the activations."""
        count = sum(math.prod(x.shape) for x in jax.tree.leaves(self.sizes.text))
        return count * self.sizes.itemsize / self._sampler_devices()

    def _token_bytes(self) -> float:
        """Keys and values of a token, sharded by head."""
        text = self.sizes.config.text
        numbers = 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim
        return numbers * self.sizes.itemsize / self._sampler_devices()

    def _rollouts_without_cache(self, engine: EngineSizes) -> float:
        lengths = itertools.product(engine.prefill_lengths, (0, *engine.row_lengths))
        prefill = self._prefill if self.devices.tpu else self._prefill_elsewhere
        temporary = max(prefill(engine, length, before) for length, before in lengths)
        if not self._paged:
            temporary = max(temporary, self._decode(engine)) + self._prefixes(engine)
        return self._resident() + self._engine_weights() + temporary

    def _prefill(self, engine: EngineSizes, length: int, before: int) -> float:
        """A call of prefill on TPU: the visual vectors, and what the program computes."""
        text = self.sizes.config.text
        rows = engine.prefill_rows(length, before)
        tokens = rows * length
        numbers = 2 * text.hidden_size + text.dispatched + text.mlp_width / self._sampler_devices()
        token = self._token_bytes()
        new = tokens * token
        # Of one layer: the gathered pages, and their keys and values.
        read = 2 * rows * before * token / text.num_hidden_layers
        # Keys and values of all layers are joined at the end, when nothing is read any more.
        bank = self._vectors(math.ceil(engine.bank_tokens / CHUNK) * CHUNK)
        return bank + tokens * numbers * self.sizes.itemsize + new + max(new, read)

    def _prefill_elsewhere(self, engine: EngineSizes, length: int, before: int) -> float:
        """A call of prefill on other devices: at most."""
        token = self._token_bytes()
        return prefill_bytes(self.sizes.config, engine, self.sizes.itemsize, token, length, before)

    def _decode(self, engine: EngineSizes) -> float:
        """The largest call that decodes on copies of the pages: at most."""
        config, itemsize, token = self.sizes.config, self.sizes.itemsize, self._token_bytes()
        return max(
            decode_bytes(config, engine, itemsize, token, width, paged=False)
            for width in engine.row_lengths
        )

    def _prefixes(self, engine: EngineSizes) -> float:
        """Copies of shared prompts, one per group of rows and length."""
        blocks = engine.slots // engine.rows_per_prefix
        return blocks * sum(engine.prefix_lengths) * self._token_bytes()


@functools.cache
def _pack(shape: StepShape, sizes: tuple[MicrobatchShape, ...]) -> tuple[PackedMicrobatch, ...]:
    """The micro-batches of a step whose rollouts have the greatest length."""
    return pack(shape.at_limits, sizes)


def _layer_weights(text: TextConfig) -> int:
    """Weights of a layer's matrices."""
    heads = 2 * (text.num_attention_heads + text.num_key_value_heads) * text.head_dim
    return text.hidden_size * heads + text.mlp_weights


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
