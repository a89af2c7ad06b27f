"""Query-key pairs that attention kernels compute in packed rows: those of whole tiles.

A kernel skips the tiles in which no query sees a key, and computes the others whole, padding
included. Which tiles those are follows from the lengths of a step, by the arrays that a run would
build and the function by which the kernels choose (`models.attention.target.visible_tiles`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from models.attention import flash, xla
from models.attention.target import Masks, pad_rows, visible_tiles
from models.config import ModelConfig
from paravt_jax.method.records import Author, Segment, Trajectory
from train.learn.batch import Group, build
from train.learn.packing import Chunk, GroupLengths, MicrobatchShape, PackedMicrobatch
from train.learn.work import Attention


def flash_attention(config: ModelConfig) -> Attention:
    """How `train.learn.work.done` counts the kernel of a TPU.

    Its two backward kernels have seven products per pair, the forward kernel two: both compute the
    scores again.
    """
    return Attention(functools.partial(most_pairs, config=config, tile=flash.TILE), 7 / 2)


def xla_attention(config: ModelConfig) -> Attention:
    """The same for attention in plain XLA, which has five products backward."""
    return Attention(functools.partial(most_pairs, config=config, tile=xla.TILE), 5 / 2)


def most_pairs(
    packed: PackedMicrobatch, groups: Sequence[GroupLengths], config: ModelConfig, tile: int
) -> float:
    """Pairs that a kernel computes in the row of a micro-batch that has most.

    Args:
        packed: a micro-batch.
        groups: lengths of all trajectories of its step.
        config: model whose placeholder of images is not 0.
        tile: size of the kernel's tiles, in queries and in keys; shorter rows are one tile.
    """
    tokens = packed.shape.tokens
    rows = [
        tuple(
            GroupLengths(groups[n].prompt, tuple(groups[n].suffixes[member] for member in members))
            for n, members in row
        )
        for row in packed.rows
    ]
    return max(_row_pairs(row, tokens, config, min(tile, tokens)) for row in rows)


@functools.cache
def _row_pairs(
    chunks: tuple[GroupLengths, ...], tokens: int, config: ModelConfig, tile: int
) -> float:
    """Pairs that a kernel computes in a row of these chunks."""
    whole = (Chunk(n, tuple(range(len(chunk.suffixes)))) for n, chunk in enumerate(chunks))
    packed = PackedMicrobatch(MicrobatchShape(1, tokens), (tuple(whole),))
    rollouts = sum(len(chunk.suffixes) for chunk in chunks)
    batch = build(packed, _groups(chunks), config, rollouts, tokens)
    segments, starts = (pad_rows(x, tile) for x in (batch.segments, batch.starts))
    masks = Masks(segments, None, starts, jnp.asarray(batch.shared))
    return float(visible_tiles(masks, tile, tile).sum()) * tile**2


def _groups(lengths: Sequence[GroupLengths]) -> list[Group]:
    """Groups of these lengths, of text only."""
    groups = []
    rollout = 0
    for prompt, suffixes in lengths:
        # What follows a prompt begins with its last token.
        trajectories = tuple(
            Trajectory((_text(prompt + 1, Author.PROMPT), _text(suffix - 1, Author.TOOL)))
            for suffix in suffixes
        )
        groups.append(Group(trajectories, rollout, (), 0))
        rollout += len(suffixes)
    return groups


def _text(tokens: int, author: Author) -> Segment:
    return Segment(np.zeros(tokens, np.int32), author)
