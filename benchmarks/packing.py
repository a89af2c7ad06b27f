"""FLOPs of an RL step's update and reference pass, packed and padded, against their worth.

python -m benchmarks.packing
python -m benchmarks.packing --lengths runs/paravt_8b/metrics.jsonl --topology v5e:4x4,v5e:8x8

Without options: `paravt_8b` on three slices of 16 chips and `paravt_tiny` on one device, each at
its committed lengths (benchmarks/lengths_*.json) and at its limits. `train.learn.work` defines
"worth" and "done"; at the committed lengths, their ratio should be at most 1.25. Attention counts
by visible pairs; by all pairs of the tiles that a kernel visits (512 x 512 on TPU, 64 x 64 for the
tiny recipe on CPU); and by tiles with the products that the kernel repeats in its backward pass.
The padded layout is that of earlier versions, in which every rollout had its longest length.
Nothing is compiled.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import pathlib
import sys
from collections.abc import Sequence

from benchmarks.lengths import file_of
from configs import RECIPES
from models.config import ModelConfig
from models.flops import forward_flops
from models.remat import Remat
from paravt_extras.fit import fit
from paravt_extras.plan.programs import planned_config
from paravt_extras.plan.tiles import flash_attention, xla_attention
from paravt_extras.plan.units import si
from paravt_extras.plan.workload import Workload, at_limits, lengths_of, read
from paravt_extras.slices import Topology
from rollout.evaluation.markdown import table
from train.learn.packing import GroupLengths, MicrobatchShape, pack
from train.learn.placement import row_pieces
from train.learn.work import (
    VISIBLE,
    Attention,
    done,
    passes,
    real_tokens,
    visible_pairs,
    worth,
)
from train.settings import Run

SLICES = ("v5e:4x4", "v6e:4x4", "v5p:2x2x4")
REMATS: dict[str, Remat] = {"without": "none", "with": "full"}
# Micro-batches that earlier versions chose for paravt_8b, by slice (commit 033e84d).
PADDED_PARTS = {"v5e:4x4": 4, "v6e:4x4": 2, "v5p:2x2x4": 2}


@dataclasses.dataclass(frozen=True)
class Counted:
    """Means over the steps of a workload."""

    tokens: float
    """Tokens without padding, each prompt once."""
    worth: float
    packed: float
    """By visible pairs."""
    tiles: float
    """By the pairs of the tiles that the kernel visits."""
    kernel: float
    """By tiles, with the products that the kernel repeats in its backward pass."""
    padded: float
    microbatches: float


def count(run: Run, workload: Workload, devices: int, parts: int, remat: Remat) -> Counted:
    """Counts the FLOPs of a workload on the devices of a run whose sizes are chosen.

    Args:
        run: the recipe.
        workload: lengths of some steps.
        devices: number of devices, over all of which rows are spread.
        parts: micro-batches of the padded layout.
        remat: policy of the update.
    """
    config = planned_config(run)
    sizes = microbatch_sizes(run, config, devices)
    steps = [lengths_of(step) for step in workload.steps]
    packs = [pack(groups, sizes) for groups in steps]
    kernel = xla_attention(config) if run.model.size == "tiny" else flash_attention(config)

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(steps)

    def computed(attention: Attention) -> float:
        return mean(
            [
                done(packed, groups, config, remat, devices, attention)
                for packed, groups in zip(packs, steps, strict=True)
            ]
        )

    return Counted(
        tokens=mean([real_tokens(groups) for groups in steps]),
        worth=mean([worth(groups, config, remat) for groups in steps]),
        packed=computed(VISIBLE),
        tiles=computed(Attention(kernel.pairs)),
        kernel=computed(kernel),
        padded=padded_flops(steps[0], run, devices, parts, remat),
        microbatches=mean([len(packed) for packed in packs]),
    )


def microbatch_sizes(run: Run, config: ModelConfig, devices: int) -> tuple[MicrobatchShape, ...]:
    """The sizes of micro-batches that a run compiles."""
    assert run.rl is not None
    pieces = row_pieces(config.text, devices)
    return run.rl_shape.microbatches(run.rl.microbatch_tokens, devices, pieces)


def padded_flops(
    groups: Sequence[GroupLengths], run: Run, devices: int, parts: int, remat: Remat
) -> float:
    """FLOPs of the padded layout: prompts and rollouts at their limits, rows for all devices."""
    assert run.rl is not None
    longest = run.lengths(max(run.rl.frame_budgets))
    rows = run.rl.grpo.group_size
    padded_groups = parts * groups_per_part(math.ceil(len(groups) / parts), rows, devices)
    # With fewer prompts than devices, each was computed in equal pieces.
    pieces = max(1, devices * parts // padded_groups)
    prompt = math.ceil(longest.prompt / pieces) * pieces
    suffixes = (longest.response,) * rows
    config = planned_config(run)
    sampled = padded_groups * sum(suffixes)
    times = passes(remat)
    products = forward_flops(config, padded_groups * prompt + sampled, sampled, 0.0)
    pairs = padded_groups * visible_pairs(prompt, suffixes)
    return times.weights * products + times.attention * forward_flops(config, 0, 0, pairs)


def groups_per_part(groups: int, rows: int, devices: int) -> int:
    """Groups of a micro-batch, padded so that each device gets whole groups or each group the same
    number of devices."""
    while groups % devices and (devices % groups or groups * rows % devices):
        groups += 1
    return groups


def rows_of(place: str, run: Run, workload: Workload, devices: int, parts: int) -> list[list[str]]:
    """Lines of the table, without and with rematerialisation."""
    lines = []
    for word, remat in REMATS.items():
        counted = count(run, workload, devices, parts, remat)

        def ratio(flops: float, counted: Counted = counted) -> str:
            return f"{flops / counted.worth:.2f}"

        lines.append(
            [
                run.name,
                place,
                workload.source,
                word,
                f"{counted.tokens:.0f}",
                si(counted.worth, "FLOP"),
                ratio(counted.padded),
                ratio(counted.packed),
                ratio(counted.tiles),
                ratio(counted.kernel),
                si(counted.padded / counted.tokens, "FLOP"),
                si(counted.kernel / counted.tokens, "FLOP"),
                f"{counted.microbatches:.1f}",
            ]
        )
    return lines


HEADER = (
    "recipe",
    "devices",
    "lengths",
    "remat",
    "real tokens",
    "worth",
    "padded / worth",
    "packed / worth",
    "by tiles / worth",
    "by kernel / worth",
    "padded per token",
    "by kernel, per token",
    "micro-batches",
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.packing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--lengths", type=pathlib.Path, help="lengths of paravt_8b; see paravt_extras.plan"
    )
    parser.add_argument("--topology", default=",".join(SLICES), help="slices for paravt_8b")
    arguments = parser.parse_args(argv)
    lines = []
    try:
        lines += _large(arguments.lengths, arguments.topology.split(","))
        lines += [] if arguments.lengths else _tiny()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(HEADER, merged(lines)))
    return 0


def merged(lines: Sequence[Sequence[str]]) -> list[list[str]]:
    """One line for all slices with equal figures; a line begins with the recipe and the slice."""
    places: dict[tuple[str, ...], list[str]] = {}
    for recipe, place, *figures in lines:
        places.setdefault((recipe, *figures), []).append(place)
    return [[line[0], ", ".join(found), *line[1:]] for line, found in places.items()]


def _large(lengths: pathlib.Path | None, slices: Sequence[str]) -> list[list[str]]:
    recipe = RECIPES["paravt_8b"]()
    workloads = [read(lengths or file_of("paravt_8b"), recipe), at_limits(recipe)]
    lines = []
    for name in slices:
        topology = Topology(name)
        run = fit(recipe, topology.available).run
        parts = PADDED_PARTS.get(name, 1)
        for workload in workloads:
            lines += rows_of(name, run, workload, topology.devices, parts)
    return lines


def _tiny() -> list[list[str]]:
    run = RECIPES["paravt_tiny"]()
    workloads = [read(file_of("paravt_tiny"), run), at_limits(run)]
    return [
        line for workload in workloads for line in rows_of("1 device", run, workload, 1, parts=1)
    ]


if __name__ == "__main__":
    sys.exit(main())
