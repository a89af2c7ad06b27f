"""FLOPs of an RL step's update and reference pass: their worth, and what a packed layout does.

    worth   what the tokens need: 2 N D for each of four passes (forward of the reference; forward
            of the update and its backward pass, which counts twice), 2 N D more if the update
            rematerialises, and attention over the visible pairs of tokens in the four passes. N is
            the number of weights in matrix products, D that of tokens. A prompt counts once per
            group, and only tokens of rollouts have logits.
    done    devices times the FLOPs of the heaviest device: padding, prompts that stand in several
            micro-batches, logits of every place, and idle devices included. Attention counts by
            visible pairs, or as a kernel computes it (`paravt_extras.plan.tiles`).

Only lengths are needed, so both are known before a program is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from models.config import ModelConfig
from models.flops import forward_flops
from models.remat import Remat
from train.learn.packing import Chunk, GroupLengths, PackedMicrobatch


class Passes(NamedTuple):
    """How often the matrix products of a forward pass are computed in a step."""

    weights: int
    """Products with weights."""
    attention: int


def passes(remat: Remat) -> Passes:
    """Passes of the update and the reference together."""
    repeated = {"full": Passes(1, 1), "offload": Passes(1, 1), "attention": Passes(1, 0)}
    again = repeated.get(remat, Passes(0, 0))
    return Passes(4 + again.weights, 4 + again.attention)


def real_tokens(groups: Sequence[GroupLengths]) -> int:
    """Tokens without padding; those of a shared prompt count once per group."""
    return sum(group.prompt + sum(group.suffixes) for group in groups)


def visible_pairs(prompt: int, suffixes: Sequence[int]) -> float:
    """Pairs of a token and one that it attends to, itself included.

    A token of the prompt sees those before it; a token of a rollout sees the whole prompt too.
    """
    rows = sum(n * prompt + n * (n + 1) / 2 for n in suffixes)
    return prompt * (prompt + 1) / 2 + rows


def update_flops(groups: Sequence[GroupLengths], config: ModelConfig) -> float:
    """FLOPs that the forward and the backward pass of an update need, without recomputation."""
    pairs = sum(visible_pairs(*group) for group in groups)
    # The backward pass costs twice the forward pass.
    return 3 * forward_flops(config, real_tokens(groups), sampled_tokens(groups), pairs)


def sampled_tokens(groups: Sequence[GroupLengths]) -> int:
    """Tokens behind the prompts, which are those with logits."""
    return sum(sum(group.suffixes) for group in groups)


def worth(groups: Sequence[GroupLengths], config: ModelConfig, remat: Remat) -> float:
    """FLOPs that a step needs for update and reference; see the module's docstring.

    Args:
        groups: lengths of all trajectories.
        config: sizes of the model.
        remat: policy of the update.
    """
    pairs = sum(visible_pairs(*group) for group in groups)
    repeats = passes(remat).weights
    products = forward_flops(config, real_tokens(groups), sampled_tokens(groups), 0.0)
    # Attention is not worth repeating: "attention" keeps its outputs.
    return repeats * products + 4 * forward_flops(config, 0, 0, pairs)


def most_visible_pairs(microbatch: PackedMicrobatch, groups: Sequence[GroupLengths]) -> float:
    """Visible pairs of the row of a micro-batch that has most."""
    return max(sum(_chunk_pairs(chunk, groups) for chunk in row) for row in microbatch.rows)


class Attention(NamedTuple):
    """How `done` counts attention."""

    pairs: Callable[[PackedMicrobatch, Sequence[GroupLengths]], float]
    """Pairs that the device with most of them computes in a micro-batch."""
    backward: float = 2.0
    """Cost of a backward pass, in forward passes."""


VISIBLE = Attention(most_visible_pairs)


def done(
    packed: Sequence[PackedMicrobatch],
    groups: Sequence[GroupLengths],
    config: ModelConfig,
    remat: Remat,
    devices: int,
    attention: Attention = VISIBLE,
) -> float:
    """FLOPs that a packed step computes: devices times the heaviest device.

    Args:
        packed: the micro-batches, from `train.learn.packing.pack`.
        groups: lengths of all trajectories.
        config: sizes of the model.
        remat: policy of the update.
        devices: all devices, idle ones included.
        attention: how attention counts.
    """
    times = passes(remat)
    # `passes` takes a backward pass as two.
    attention_passes = times.attention - 2 + attention.backward
    total = 0.0
    for microbatch in packed:
        shape = microbatch.shape
        # Devices beyond rows and pieces share the products of others (mesh.tensor).
        sharing = max(1, devices // (shape.rows * shape.pieces)) * shape.pieces
        products = forward_flops(config, shape.tokens, shape.tokens, 0.0)
        pairs = forward_flops(config, 0, 0, attention.pairs(microbatch, groups))
        total += (times.weights * products + attention_passes * pairs) / sharing
    return devices * total


def _chunk_pairs(chunk: Chunk, groups: Sequence[GroupLengths]) -> float:
    prompt, suffixes = groups[chunk.group]
    return visible_pairs(prompt, [suffixes[member] for member in chunk.members])
