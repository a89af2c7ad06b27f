"""Devices that a run can use: those that JAX finds, or TPU slices by their name.

The devices of named slices exist only as descriptions, for which XLA can compile without the
hardware.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import pathlib
import re
from typing import Any, NamedTuple

import jax

from models.devices import reported_memory
from models.sharding import slice_of
from paravt_jax.processes import hosts


class Chip(NamedTuple):
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
    kinds: tuple[str, ...]
    """Names that JAX gives to its devices."""
    slices: tuple[str, ...]
    """Shapes of its slices, from small to large."""


_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8")
# Peak rates as documented in docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e}.
CHIPS = {
    "v4": Chip(275e12, 1200e9, 2, 15.25 * 2**30, ("TPU v4",), _CUBES),
    "v5e": Chip(197e12, 819e9, 1, 15.75 * 2**30, ("TPU v5 lite", "TPU v5e"), _FLAT),
    "v5p": Chip(459e12, 2765e9, 1, 95.73 * 2**30, ("TPU v5", "TPU v5p"), _CUBES),
    "v6e": Chip(918e12, 1638e9, 1, 31.24 * 2**30, ("TPU v6 lite", "TPU v6e"), _FLAT),
}
HOST_CHIPS = 4
ACCELERATOR_FILES = {"nvidia[0-9]*": "cuda", "accel[0-9]*": "tpu", "vfio/[0-9]*": "tpu"}
"""Files that an accelerator has in /dev, and the extra that installs what JAX needs, which has the
name of the platform."""


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
        shapes = CHIPS[generation].slices if generation in CHIPS else ()
        is_known = shape in shapes and re.fullmatch(r"([1-9]\d*\*)?", count)
        # Several slices have whole hosts.
        if not is_known or 1 < self.slices and self.chips < self.slices * HOST_CHIPS:
            known = ", ".join(shapes) or f"one of {', '.join(CHIPS)}, as in v5e:4x4 (v5litepod-16)"
            raise ValueError(
                f"topology = {self.name!r}: not a slice GENERATION:SHAPE, nor several such as "
                f"2*v5e:4x4; give {generation if shapes else 'GENERATION'} with {known}"
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
    def chips(self) -> int:
        """Number of chips of all slices."""
        return self.slices * math.prod(map(int, self.slice_name.partition(":")[2].split("x")))

    @property
    def devices(self) -> int:
        """Number of JAX devices. A v4 chip is two of them."""
        return self.chips * self.chip.devices

    @property
    def host(self) -> Topology:
        """The slice that is one host of this one.

        Programs of a single host are compiled for it, because the compiler requires a program to
        use all devices of a slice.
        """
        if self.chips < HOST_CHIPS:
            return self
        shape = "2x2" if self.chip.slices == _FLAT else "2x2x1"
        return Topology(f"{self.slice_name.partition(':')[0]}:{shape}")

    @property
    def available(self) -> Devices:
        hosts = max(1, self.chips // HOST_CHIPS)
        return Devices(self.name, self.devices, hosts, self.chip.hbm, "tpu", self.slices)

    def make_devices(self) -> list[Any]:
        """Return devices to compile for, ordered by host.

        With this order the same list serves training over all devices and rollouts over the
        consecutive devices of one host.

        Raises:
            ImportError: libtpu is not installed.
        """
        if importlib.util.find_spec("libtpu") is None:
            raise ImportError("libtpu, the TPU's compiler: install it with pip install -e '.[tpu]'")
        from jax.experimental import topologies

        # By default a host has 2 x 2 chips.
        options: dict[str, Any] = {}
        if self.slice_name.endswith(":1x1"):
            options["chips_per_host_bounds"] = (1, 1, 1)
        if self.slices > 1:
            options["num_slices"] = self.slices
        described = topologies.get_topology_desc(
            platform="tpu", topology_name=self.slice_name, **options
        ).devices
        return sorted(described, key=lambda device: device.process_index)


def found_devices() -> Devices:
    """Return the devices of all processes of this run, as JAX sees them.

    Once several processes have joined, every one of them has to call this. The memory is then the
    least of all processes, so that all of them choose the same sizes.
    """
    count = jax.device_count()
    own = jax.local_devices()[0]
    unused = _unused_accelerator() if own.platform == "cpu" else ""
    name = f"{count} x {own.device_kind}{unused}"
    of_chip = [chip.hbm for chip in CHIPS.values() if own.device_kind in chip.kinds]
    own_memory = of_chip[0] if of_chip else reported_memory(own)
    known = [memory for memory in hosts.gather(own_memory) if memory is not None]
    memory = min(known) if len(known) == jax.process_count() else None
    slices = len({slice_of(device) for device in jax.devices()})
    return Devices(name, count, jax.process_count(), memory, own.platform, slices)


def _unused_accelerator() -> str:
    """Return what to do about an accelerator of this machine that JAX did not find; empty if there
    is no sign of one."""
    for pattern, kind in ACCELERATOR_FILES.items():
        for file in pathlib.Path("/dev").glob(pattern):
            return (
                f" (JAX did not find what {file} stands for: unset JAX_PLATFORMS, or pip install "
                f"-e '.[{kind}]'; JAX_PLATFORMS={kind} python -c 'import jax; jax.devices()' says "
                "why)"
            )
    return ""
