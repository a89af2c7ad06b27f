"""What plays episodes, and how its sampler gets new weights from the mesh of training.

Each host's sampler has all weights, split over its own devices along the axis `tensor`. The weights
go from device to device, without a copy in host memory. They are cast to the type of the
activations before they move: the engine multiplies in that type anyway, so bfloat16 halves memory
and traffic without changing a token.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from models.features import FrameFeatures
from models.features.encoder import tower_mesh
from models.fingerprint import fingerprint
from models.lora import NOTHING, cast
from models.sharding import MESH_AXES, RULES, make_mesh, param_shardings
from models.trained import VISION, split_vision
from models.vision import encoding_weights
from paravt_jax.processes.hosts import gather
from rollout.engine.requests import Sampler
from train.learn.rl import Learner
from train.learn.rollouts import Actor
from train.learn.update import TrainState


def host_mesh(mesh: Mesh, per_host: int) -> Mesh:
    """Return the devices of `mesh` as hosts along `data` and each host's devices along `tensor`.

    Args:
        mesh: The mesh of training, whose devices are ordered host by host.
        per_host: Number of devices per host.
    """
    return Mesh(mesh.devices.reshape(-1, 1, per_host), MESH_AXES, axis_types=(AxisType.Auto,) * 3)


def make_sync(weights: Any, hosts: Mesh, dtype: DTypeLike) -> jax.stages.Wrapped:
    """Compile `f(weights) -> weights in dtype on the mesh of hosts`.

    Args:
        weights: Real or abstract weights on the mesh of training.
        hosts: The mesh to move them to, from `host_mesh`.
        dtype: The type they are cast to, before they move.
    """
    halfway = _halfway_shardings(weights, hosts)

    def weight_sync(weights: Any) -> Any:
        moved = cast(weights, dtype)
        return moved if halfway is None else jax.lax.with_sharding_constraint(moved, halfway)

    return jax.jit(weight_sync, out_shardings=param_shardings(weights, hosts))


def make_vision_sync(vision: Any, mesh: Mesh, dtype: DTypeLike) -> jax.stages.Wrapped:
    """Compile `f(the tower's trained weights) -> as samplers use them, whole on every device`.

    Args:
        vision: Real or abstract weights of the trained part of the tower.
        mesh: The mesh of training.
        dtype: The type of the activations; see `models.vision.encoding_weights`.
    """

    def vision_sync(weights: Any) -> Any:
        # Copies: the next update donates its weights, and frames are encoded meanwhile.
        return jax.tree.map(jnp.copy, encoding_weights(weights, dtype))

    whole = NamedSharding(mesh, PartitionSpec())
    return jax.jit(vision_sync, out_shardings=jax.tree.map(lambda _: whole, vision))


def stay(weights: Any, hosts: Mesh, dtype: DTypeLike) -> bool:
    """Return whether samplers can use weights, real or abstract, as they are; see `make_sync`."""
    wanted = jax.tree.leaves(param_shardings(weights, hosts))
    return all(
        x.dtype in (dtype, jnp.int8) and x.sharding.is_equivalent_to(sharding, x.ndim)
        for x, sharding in zip(jax.tree.leaves(weights), wanted, strict=True)
    )


def _halfway_shardings(weights: Any, hosts: Mesh) -> Any:
    """Return intermediate shardings of the move; None if the sizes of the mesh do not allow any.

    First, devices along fsdp are regrouped along `tensor`, as the samplers need it. Then the hosts
    exchange the rest. In a single step, XLA would gather every weight in full on every device.
    """
    # 2 hosts of 4 devices:   data  fsdp  tensor
    #   training               1     8     1
    #   halfway                1     2     4
    #   samplers               2     1     4
    mesh: Mesh = jax.tree.leaves(weights)[0].sharding.mesh
    data, fsdp, tensor = (mesh.shape[name] for name in MESH_AXES)
    factor, remainder = divmod(hosts.shape["tensor"], tensor)
    if remainder or factor == 0 or fsdp % factor:
        return None
    devices = mesh.devices.reshape(data, fsdp // factor, tensor * factor)
    return param_shardings(weights, Mesh(devices, MESH_AXES, axis_types=(AxisType.Auto,) * 3))


def sampler_devices(weights: Any, count: int) -> int:
    """Return the number of devices, out of a process's `count`, that its sampler uses.

    It is the largest number that divides both `count` and every weight axis along `tensor`.
    """
    parameters = jax.tree.leaves(weights, is_leaf=lambda x: isinstance(x, nnx.Variable))
    split_sizes = []
    for parameter in parameters:
        for axis, size in zip(parameter.get_metadata("axes"), parameter.shape, strict=True):
            if RULES[axis] == "tensor":
                split_sizes.append(size)
    return math.gcd(count, *split_sizes)


class WeightSync:
    """Brings weights from the mesh of training to this process's sampler.

    Args:
        weights: Trained weights on the mesh of training.
        dtype: The type of the activations.
        frozen: The decoder's other weights, on the same mesh.

    Attributes:
        program: The jitted move of trained weights across processes; None if they can be used as
            they are.
        base: The frozen weights on this process's sampling devices. They are moved once. The
            sampler shares them with training, without a copy, where both have the same shardings:
            on one device, or on one host whose devices all share the heads.
    """

    def __init__(self, weights: Any, dtype: DTypeLike, frozen: Any = NOTHING):
        mesh: Mesh = jax.tree.leaves(weights)[0].sharding.mesh
        local = [
            device for device in mesh.devices.flat if device.process_index == jax.process_index()
        ]
        text, vision = split_vision(weights)
        count = sampler_devices((text, frozen), len(local))
        self._dtype = dtype
        self._local = local
        self._devices = local[:count]
        self._hosts = host_mesh(mesh, count)
        self.program = self._program(text)
        move_base = self._program(frozen)
        self.base = self._take(frozen if move_base is None else move_base(frozen))
        self._frozen_fingerprint = fingerprint(frozen, dtype=dtype)
        self._vision_sync: jax.stages.Wrapped | None = None
        if vision is not None:
            self._vision_sync = make_vision_sync(vision, mesh, dtype)

    def __call__(self, weights: Any) -> Any:
        """Return the decoder's trained weights on this process's sampling devices."""
        text, _ = split_vision(weights)
        return self._take(text if self.program is None else self.program(text))

    @functools.partial(jax.profiler.annotate_function, name="weight sync")
    def load(self, sampler: Any, weights: Any, version: int, features: FrameFeatures) -> int:
        """Load trained weights into a sampler and what it sees with, and check that they have them.

        Args:
            sampler: Gets the weights of the decoder.
            weights: Trained weights on the mesh of training.
            version: Number of the weights.
            features: Gets the weights of the vision tower, if they are trained.

        Returns:
            The fingerprint of all weights, frozen ones included.

        Raises:
            ValueError: The sampler of a process has other weights; raised in all processes.
        """
        # Loading allocates the sampler's memory. Wait until the move has freed its own.
        sampler.load(jax.block_until_ready(self(weights)), version)
        text, vision = split_vision(weights)
        wanted = fingerprint(text, dtype=self._dtype) + self._frozen_fingerprint
        if self._vision_sync is not None:
            moved = self._vision_sync(vision)
            # Every device has them whole; the tower takes those of this process.
            on_tower = NamedSharding(tower_mesh(self._local), PartitionSpec())
            features.load(jax.tree.map(lambda x: self._own(x, on_tower), moved))
            wanted += fingerprint(nnx.State({VISION: moved}))
        wanted %= 2**32
        held = (sampler.fingerprint() + features.fingerprint()) % 2**32
        for process, own in enumerate(gather(held)):
            if own != wanted:
                raise ValueError(
                    f"weights: after step {version}, the sampler of process {process} has weights "
                    f"with fingerprint {own:08x}, and training has {wanted:08x}; a device or a "
                    "transfer may be faulty: start the command again, from the last checkpoint"
                )
        return wanted

    def _program(self, weights: Any) -> jax.stages.Wrapped | None:
        """Return the jitted move; None if there is nothing to move."""
        # Even a program that changes nothing would copy the weights.
        if stay(weights, self._hosts, self._dtype):
            return None
        return make_sync(weights, self._hosts, self._dtype)

    def _take(self, moved: Any) -> Any:
        mesh = make_mesh(1, 1, len(self._devices), devices=self._devices)
        return jax.tree.map(self._own, moved, param_shardings(moved, mesh))

    def _own(self, x: jax.Array, sharding: Any) -> jax.Array:
        """Return this process's shards of an array as an array of its own, without a copy."""
        devices = sharding.device_set
        shards = [shard.data for shard in x.addressable_shards if shard.device in devices]
        return jax.make_array_from_single_device_arrays(x.shape, sharding, shards)


@runtime_checkable
class TrainedSampler(Sampler, Protocol):
    """A sampler that gets new weights after each step: the engine, or a script in a test."""

    def sleep(self) -> None:
        """Free weights and KV cache until the next `load`."""
        ...

    def load(self, weights: Any, version: int) -> None:
        """Sample under `weights`, those after `version` steps, from now on."""
        ...

    def fingerprint(self) -> int:
        """Return the fingerprint of the weights that are sampled from (`models.fingerprint`)."""
        ...


@dataclasses.dataclass(frozen=True)
class TrainedActor(Actor):
    """An actor whose sampler gets new weights after each step."""

    sampler: TrainedSampler
    sync: WeightSync
    """Brings weights from the mesh of training to the sampler."""

    def begin(self, learner: Learner, state: TrainState, step: int) -> None:
        """Load the weights of `state`, those after `step` steps, before the first episodes.

        Args:
            learner: Trains the weights. An actor may compile its programs and the learner's before
                its sampler takes memory.
            state: The state of training.
            step: Number of finished steps.
        """
        self.load(state.weights, step)

    def sleep(self) -> None:
        """Free the sampler's memory until the next `load`."""
        self.sampler.sleep()

    def load(self, weights: Any, version: int) -> int:
        """Load trained weights; samples then report `version`.

        Returns:
            The fingerprint of all weights.

        Raises:
            ValueError: The sampler of a process has other weights; raised in all processes.
        """
        # Free the old weights first: memory may not hold both.
        self.sampler.sleep()
        return self.sync.load(self.sampler, weights, version, self.environment.features)
