"""Devices that a run can use: those that JAX finds, or TPU slices by their name.

The devices of named slices exist only as descriptions, for which XLA can compile without the
hardware.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re
from collections.abc import Iterator
from typing import Any

import jax

from models.device_memory import reported_memory
from models.sharding import slice_of
from paravt_jax.processes import hosts

INSTALL = "pip install -e '.[tpu]'"


@dataclasses.dataclass(frozen=True)
class Chip:
    """Peak rates of one chip, and how JAX sees it."""

    flops: float
    """FLOP/s in bfloat16."""
    hbm_rate: float
    """Bytes/s between HBM and the compute units."""
    devices: int
    """JAX devices per chip."""
    hbm: float
    """Bytes per device that the compiler lets a program use, measured with libtpu 0.0.51.

    A little less than the chip has.
    """
    coordinates: int
    """Number of sides in the name of a slice: 3 for v5p:2x2x4."""


# Peak rates as documented in docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e}.
CHIPS = {
    "v4": Chip(275e12, 1200e9, 2, 15.25 * 2**30, 3),
    "v5e": Chip(197e12, 819e9, 1, 15.75 * 2**30, 2),
    "v5p": Chip(459e12, 2765e9, 1, 95.73 * 2**30, 3),
    "v6e": Chip(918e12, 1638e9, 1, 31.24 * 2**30, 2),
}
HOST_CHIPS = 4
# Names that JAX gives to the devices of a generation.
_KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
}
_MOST_CHIPS = 256


@dataclasses.dataclass(frozen=True)
class Devices:
    """What the choice of mesh, micro-batches and engine sizes depends on."""

    name: str
    """The slice or the kind of device, for messages."""
    count: int
    """Number of JAX devices."""
    hosts: int
    """Number of processes that share them."""
    memory: float | None
    """Bytes per device that programs may use; None: not known."""
    platform: str = "cpu"
    """As JAX names it: tpu, gpu or cpu."""
    slices: int = 1
    """Number of TPU slices, which have equally many devices."""

    @property
    def tpu(self) -> bool:
        """Whether they are TPUs, whose kernels need less memory than plain XLA."""
        return self.platform == "tpu"


@dataclasses.dataclass(frozen=True)
class Topology:
    """A slice, named like v5p:4x4x4, or several equal ones, like 2*v5p:4x4x4.

    Raises:
        ValueError: the generation is not in `CHIPS`, or the shape is not one of its slices.
    """

    name: str

    def __post_init__(self):
        generation, _, shape = self.slice_name.partition(":")
        count = self.name.removesuffix(self.slice_name)
        if count and not re.fullmatch(r"[2-9]\*|[1-9]\d+\*", count):
            raise ValueError(
                f"topology = {self.name!r}: {count!r} is not a number of slices; give one such as "
                "2*v5e:4x4 (two slices)"
            )
        if generation not in CHIPS or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)+", shape):
            raise ValueError(
                f"topology = {self.name!r}: not GENERATION:SHAPE with one of {', '.join(CHIPS)}; "
                "give one such as v5e:1x1 (one chip), v5e:4x4 (v5litepod-16) or v5p:4x4x4"
            )
        if len(self.sides) != self.chip.coordinates:
            example = "x".join("4" * self.chip.coordinates)
            raise ValueError(
                f"topology = {self.name!r}: a slice of {generation} has {self.chip.coordinates} "
                f"sides; give one such as {generation}:{example}"
            )
        chips = math.prod(self.sides)
        if chips % HOST_CHIPS and not self.single:
            raise ValueError(
                f"topology = {self.name!r}: slices of {chips} chips; a host has {HOST_CHIPS}, give "
                "a multiple of that, or a single chip of v5e or v6e"
            )

    @property
    def chip(self) -> Chip:
        return CHIPS[self.slice_name.partition(":")[0]]

    @property
    def slice_name(self) -> str:
        """The name of one slice."""
        return self.name.rpartition("*")[2]

    @property
    def slices(self) -> int:
        return int(self.name.rpartition("*")[0] or 1)

    @property
    def sides(self) -> tuple[int, ...]:
        return tuple(int(side) for side in self.slice_name.partition(":")[2].split("x"))

    @property
    def chips(self) -> int:
        """Number of chips of all slices."""
        return self.slices * math.prod(self.sides)

    @property
    def single(self) -> bool:
        """Whether the slice is a single chip, which exists for generations of two coordinates."""
        return self.chips == 1 and self.chip.coordinates == 2

    @property
    def devices(self) -> int:
        """Number of JAX devices. A v4 chip is two of them."""
        return self.chips * self.chip.devices

    @property
    def hosts(self) -> int:
        return max(1, self.chips // HOST_CHIPS)

    @property
    def host(self) -> Topology:
        """The slice that is one host of this one.

        Programs of a single host are compiled for it, because the compiler requires a program to
        use all devices of a slice.
        """
        if self.single:
            return self
        generation = self.slice_name.partition(":")[0]
        sides = ("2", "2", "1")[: self.chip.coordinates]
        return Topology(f"{generation}:{'x'.join(sides)}")

    @property
    def available(self) -> Devices:
        return Devices(self.name, self.devices, self.hosts, self.chip.hbm, "tpu", self.slices)

    def make_devices(self) -> list[Any]:
        """Devices to compile for, ordered by host.

        With this order the same list serves training over all devices and rollouts over the
        consecutive devices of one host.

        Raises:
            ImportError: libtpu is not installed.
        """
        if importlib.util.find_spec("libtpu") is None:
            raise ImportError(f"libtpu, the TPU's compiler, is not installed: {INSTALL}")
        from jax.experimental import topologies

        # By default a host has 2 x 2 chips.
        options: dict[str, Any] = {}
        if self.single:
            options["chips_per_host_bounds"] = (1, 1, 1)
        if self.slices > 1:
            options["num_slices"] = self.slices
        found = topologies.get_topology_desc(
            platform="tpu", topology_name=self.slice_name, **options
        ).devices
        devices = sorted(found, key=lambda device: device.process_index)
        assert len(devices) == self.devices, (self.name, len(devices))
        return devices


def found_devices() -> Devices:
    """The devices of all processes of this run, as JAX sees them.

    Once several processes have joined, every one of them has to call this. The memory is then the
    least of all processes, so that all of them choose the same sizes.
    """
    count = jax.device_count()
    own = jax.local_devices()[0]
    name = f"{count} x {own.device_kind}"
    known = [memory for memory in hosts.gather(device_memory(own)) if memory is not None]
    memory = min(known) if len(known) == jax.process_count() else None
    slices = len({slice_of(device) for device in jax.devices()})
    return Devices(name, count, jax.process_count(), memory, own.platform, slices)


def generation_of(device: Any) -> str | None:
    """The generation of a TPU, a key of `CHIPS`; None for other devices."""
    return _KINDS.get(device.device_kind)


def device_memory(device: Any) -> float | None:
    """Bytes that programs may use on a device; None if JAX does not report it for its kind."""
    generation = generation_of(device)
    if generation is not None:
        return CHIPS[generation].hbm
    return reported_memory(device)


def known_slices() -> Iterator[Topology]:
    """All slices of every generation, from small to large."""
    for generation, chip in CHIPS.items():
        if chip.coordinates == 2:
            yield Topology(f"{generation}:1x1")
        sides = [2] * chip.coordinates
        if chip.coordinates == 3:
            sides[-1] = 1
        while math.prod(sides) <= _MOST_CHIPS:
            yield Topology(f"{generation}:{'x'.join(map(str, sides))}")
            # The next slice has twice the chips: the last of the shortest sides doubles.
            shortest = min(sides)
            last = max(n for n, side in enumerate(sides) if side == shortest)
            sides[last] *= 2
