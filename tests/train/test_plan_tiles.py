"""Pairs that kernels compute in packed rows, against tiles that are counted one by one."""

from __future__ import annotations

import itertools

import pytest

from models.attention import flash, xla
from models.flops import forward_flops
from models.qwen3_vl.sizes import tiny
from paravt_extras.plan.tiles import flash_attention, most_pairs, xla_attention
from train.learn.packing import Chunk, GroupLengths, MicrobatchShape, PackedMicrobatch
from train.learn.work import Attention, done, most_visible_pairs

CONFIG = tiny(97)
GROUPS = [GroupLengths(9, (5, 7, 3)), GroupLengths(6, (11,)), GroupLengths(4, (2, 8))]
SHARED, ALONE, SECOND = Chunk(0, (0, 1, 2)), Chunk(1, (0,)), Chunk(2, (0, 1))


def visible(row: tuple[Chunk, ...], tokens: int) -> set[tuple[int, int]]:
    """The pairs (query, key) of a row by its definition: prompts first, then trajectories."""
    prompts: dict[int, list[int]] = {}
    sequences: list[list[int]] = []
    free = itertools.count()

    def take(count: int) -> list[int]:
        return [next(free) for _ in range(count)]

    # A prompt of a single trajectory stands with it, behind those that several share.
    order = sorted(row, key=lambda chunk: len(chunk.members) == 1)
    for chunk in order:
        if len(chunk.members) > 1:
            prompts[chunk.group] = take(GROUPS[chunk.group].prompt)
            sequences.append(prompts[chunk.group])
    for chunk in order:
        for member in chunk.members:
            prompt = prompts.get(chunk.group) or take(GROUPS[chunk.group].prompt)
            sequences.append(prompt + take(GROUPS[chunk.group].suffixes[member]))
    # Padding sees itself.
    sequences += [[place] for place in range(next(free), tokens)]
    return {
        (query, key)
        for sequence in sequences
        for query, key in itertools.product(sequence, sequence)
        if key <= query
    }


@pytest.mark.parametrize("tile", [4, 8, 16, 64])
@pytest.mark.parametrize(
    "rows",
    [
        ((SHARED,),),
        ((SHARED, ALONE, SECOND),),
        ((ALONE, SECOND), (SHARED,)),
        ((SECOND, SHARED), (Chunk(1, (0,)),), ()),
    ],
)
def test_a_tile_counts_whole_if_one_of_its_pairs_is_visible(rows, tile):
    tokens = 64
    shape = MicrobatchShape(max(2, len(rows)), tokens)
    found = most_pairs(PackedMicrobatch(shape, rows), GROUPS, CONFIG, tile)
    tiles = [{(q // tile, k // tile) for q, k in visible(row, tokens)} for row in rows]
    assert found == max(map(len, tiles)) * tile**2
    assert found >= most_visible_pairs(PackedMicrobatch(shape, rows), GROUPS)


def test_a_row_in_pieces_has_the_tiles_of_a_whole_one():
    whole, cut = (MicrobatchShape(1, 64, pieces) for pieces in (1, 4))
    rows = ((SHARED, ALONE, SECOND),)
    counted = [most_pairs(PackedMicrobatch(x, rows), GROUPS, CONFIG, 8) for x in (whole, cut)]
    assert counted[0] == counted[1]


def test_a_row_that_is_shorter_than_a_tile_is_one():
    packed = PackedMicrobatch(MicrobatchShape(1, 32), ((SHARED,),))
    assert flash_attention(CONFIG).pairs(packed, GROUPS) == 32**2
    assert flash.TILE > xla.TILE > 32


def test_tiles_and_repeated_products_are_done():
    """Four passes: reference, forward, and a backward pass of two, or as many as a kernel has."""
    packed = [PackedMicrobatch(MicrobatchShape(1, 64), ((SHARED, ALONE, SECOND),))]

    def attention(counted: Attention, remat) -> float:
        without = Attention(lambda *_: 0.0)
        results = [done(packed, GROUPS, CONFIG, remat, 1, x) for x in (counted, without)]
        return results[0] - results[1]

    tile = forward_flops(CONFIG, 0, 0, 64**2)
    flash_kernel, xla_loops = flash_attention(CONFIG), xla_attention(CONFIG)
    assert attention(Attention(flash_kernel.pairs), "none") == pytest.approx(4 * tile)
    # Two products forward; seven backward in the kernels of a TPU, five in XLA.
    assert attention(flash_kernel, "none") == pytest.approx((2 + 7 / 2) * tile)
    assert attention(xla_loops, "none") == pytest.approx((2 + 5 / 2) * tile)
    assert attention(flash_kernel, "full") == pytest.approx((3 + 7 / 2) * tile)
