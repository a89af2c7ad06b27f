"""Rates of a slice's devices, and the time of a program at these rates.

Two sets of rates: the peaks, which give a lower limit on a time, and what programs of this kind
usually reach of them, which gives an expected time.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from paravt_extras.plan.collectives import DCN
from paravt_extras.plan.compile import Measured, on_host
from paravt_extras.slices import Topology

# Assumed shares of the peak rates for expected times. Nothing here was measured on a TPU.
EXPECTED_HFU = 0.5
"""Of the peak FLOP/s: hardware FLOPs utilisation, recomputation included."""
EXPECTED_HBM = 0.85
"""Of the peak HBM bandwidth."""


class Rates(NamedTuple):
    """Rates of one device, per second."""

    flops: float
    hbm: float
    """Bytes."""
    links: float
    """Bytes sent to devices of the whole slice."""
    host_links: float
    """Bytes sent to devices of the same host."""
    dcn: float
    """Bytes sent to other slices."""


class Cost(NamedTuple):
    """Seconds that a program needs for each of its parts, at some rates."""

    compute: float = 0.0
    memory: float = 0.0
    links: float = 0.0
    """Collectives that run beside the program."""
    synchronous: float = 0.0
    """Collectives during which the program waits."""

    @property
    def seconds(self) -> float:
        return max(self.compute, self.memory, self.links) + self.synchronous

    def times(self, n: float) -> Cost:
        return Cost(*(n * part for part in self))

    def plus(self, other: Cost) -> Cost:
        return Cost(*(a + b for a, b in zip(self, other, strict=True)))


def peak(topology: Topology) -> Rates:
    """The peak rates of a device."""
    chip = topology.chip
    part = 1 / chip.devices  # each device of a chip gets an equal part of the chip's rates
    links = chip.ici_rate * part
    # A host of 2 x 2 chips has neighbours in two of four directions, or of six: the links that
    # leave the host carry nothing of its own programs.
    dcn = math.inf if chip.dcn_rate is None else chip.dcn_rate * part
    return Rates(chip.flops * part, chip.hbm_rate * part, links, links / chip.coordinates, dcn)


def expected(topology: Topology) -> Rates:
    """The rates that a program is expected to reach."""
    rates = peak(topology)
    return rates._replace(flops=EXPECTED_HFU * rates.flops, hbm=EXPECTED_HBM * rates.hbm)


def cost_of(measured: Measured, rates: Rates) -> Cost:
    """The cost of one call of a compiled program.

    On one host, collectives are small all-reduces between products that need their results: the
    program waits for them. In training programs they are assumed to run beside the products. It
    waits for other slices, too: the optimizer needs the gradients of all of them.
    """
    between = measured.sent.get(DCN, 0.0)
    sent = sum(measured.sent.values()) - between
    waits = on_host(measured.program)
    return Cost(
        measured.flops / max(1, measured.devices) / rates.flops,
        measured.read / rates.hbm,
        0.0 if waits else sent / rates.links,
        (sent / rates.host_links if waits else 0.0) + between / rates.dcn,
    )
