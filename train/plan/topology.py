"""TPU slices by name: their chips' peaks, their devices without the hardware, and how a recipe's mesh is laid over them.

Owns the one table of peaks. Refuses names that are no slice of a known generation. Invariant: devices are host-major, so that
one order serves training over all of them and rollouts over a host's own.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re
from typing import Any

INSTALL = "pip install -e '.[tpu]'"


@dataclasses.dataclass(frozen=True)
class Chip:
    """Peaks of one chip: bf16 FLOP/s, bytes/s of HBM, bytes/s that leave it over the interconnect; devices that JAX makes of it.

    `hbm` are the bytes that the compiler lets a program use on one device, measured with libtpu 0.0.51: a little less than the chip has.
    `coordinates`: the axes of a slice's name.
    """

    flops: float
    hbm_rate: float
    ici_rate: float
    devices: int
    hbm: float
    coordinates: int


SOURCE = "docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e}"
# Interconnect: half of the documented bidirectional bandwidth a chip; for v4 the pod's all-reduce bandwidth over its 4096 chips,
# which for v5e and v6e is the same number as that half.
CHIPS = {
    "v4": Chip(275e12, 1200e9, 1.1e15 / 4096, 2, 15.25 * 2**30, 3),
    "v5e": Chip(197e12, 819e9, 200e9, 1, 15.75 * 2**30, 2),
    "v5p": Chip(459e12, 2765e9, 600e9, 1, 95.73 * 2**30, 3),
    "v6e": Chip(918e12, 1638e9, 400e9, 1, 31.24 * 2**30, 2),
}
# docs/scale.md: from the smallest slice that might hold the 8B recipe to a large one of each generation.
SCALE = (
    "v4:2x2x4",
    "v5e:4x4",
    "v5e:8x8",
    "v5p:2x2x2",
    "v5p:2x2x4",
    "v5p:4x4x4",
    "v6e:4x4",
    "v6e:8x8",
)
HOST_CHIPS = 4


@dataclasses.dataclass(frozen=True)
class Topology:
    """A slice like v5p:4x4x4. ValueError for a generation without peaks, and for a shape that is not one of its slices."""

    name: str

    def __post_init__(self):
        generation, _, shape = self.name.partition(":")
        if generation not in CHIPS or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)+", shape):
            raise ValueError(
                f"topology = {self.name!r}: GENERATION:SHAPE with one of {', '.join(CHIPS)}; give one such as v5p:4x4x4"
            )
        if len(self.sides) != self.chip.coordinates:
            example = "x".join("4" * self.chip.coordinates)
            raise ValueError(
                f"topology = {self.name!r}: a slice of {generation} has {self.chip.coordinates} sides, as {generation}:{example}"
            )
        if self.chips % HOST_CHIPS:
            raise ValueError(
                f"topology = {self.name!r}: {self.chips} chips; rollouts take hosts of {HOST_CHIPS}, give a multiple of that"
            )

    @property
    def chip(self) -> Chip:
        return CHIPS[self.name.partition(":")[0]]

    @property
    def sides(self) -> tuple[int, ...]:
        return tuple(int(side) for side in self.name.partition(":")[2].split("x"))

    @property
    def chips(self) -> int:
        return math.prod(self.sides)

    @property
    def devices(self) -> int:
        """Devices in JAX's sense: a chip of v4 is two."""
        return self.chips * self.chip.devices

    @property
    def hosts(self) -> int:
        return self.chips // HOST_CHIPS

    @property
    def host(self) -> Topology:
        """One host of the slice by itself: what runs on a host is compiled for it, since the compiler wants all devices of a slice."""
        return Topology(
            f"{self.name.partition(':')[0]}:{'x'.join(['2', '2', '1'][: self.chip.coordinates])}"
        )

    def make_devices(self) -> list[Any]:
        """The slice's devices by host, for compiling. ImportError without libtpu, saying how to get it."""
        if importlib.util.find_spec("libtpu") is None:
            raise ImportError(f"libtpu, the TPU's compiler, is not installed: {INSTALL}")
        from jax.experimental import topologies

        found = topologies.get_topology_desc(platform="tpu", topology_name=self.name).devices
        devices = sorted(found, key=lambda device: device.process_index)
        assert len(devices) == self.devices, (self.name, len(devices))
        return devices


def choose_mesh(recipe: tuple[int, int, int], devices: int, rows: int) -> tuple[int, int, int]:
    """(data, fsdp, tensor) for so many devices: the recipe's where it has as many, else its `data` and `tensor` kept and `fsdp` fitted.

    A device should have a row of its own, of `rows` in a step: what is beyond the next power of two goes to `tensor`, which shares
    rows. ValueError where the recipe's axes do not divide the devices.
    """
    data, _, tensor = recipe
    if math.prod(recipe) == devices:
        return recipe
    if devices % (data * tensor):
        raise ValueError(
            f"mesh.data, mesh.tensor: {data} x {tensor} do not divide {devices} devices; give others"
        )
    most = max(1, (1 << (rows - 1).bit_length()) // data)
    fsdp = math.gcd(devices // (data * tensor), most)
    return data, fsdp, devices // (data * fsdp)
