"""FLOPs of a packed step, by hand: their worth, and what the heaviest device does."""

from __future__ import annotations

import pytest

from models.flops import flops_per_token, forward_flops
from models.qwen3_vl.sizes import qwen3_vl
from models.remat import Remat
from train.learn.packing import Chunk, GroupLengths, MicrobatchShape, PackedMicrobatch
from train.learn.work import (
    done,
    passes,
    real_tokens,
    update_flops,
    visible_pairs,
    worth,
)

CONFIG = qwen3_vl("2b")
HEAD = 2.0 * CONFIG.text.vocab_size * CONFIG.text.hidden_size
LAYERS = flops_per_token(CONFIG, 0.0) - HEAD
PAIR = flops_per_token(CONFIG, 1.0) - flops_per_token(CONFIG, 0.0)
# Two rollouts behind a prompt of three tokens, and one behind another.
GROUPS = [GroupLengths(3, (2, 4)), GroupLengths(1, (6,))]
PAIRS = visible_pairs(3, (2, 4)) + visible_pairs(1, (6,))


def test_a_token_sees_its_prompt_and_what_is_before_it():
    groups = [(3, (2, 4)), (1, (6,)), (0, (5,)), (4, ())]
    for prompt, suffixes in groups:
        sequences = [prompt + n for n in suffixes]
        seen = sum(query + 1 for length in sequences for query in range(prompt, length)) + sum(
            range(1, prompt + 1)
        )
        assert visible_pairs(prompt, suffixes) == seen


def test_forward_flops_are_those_of_every_token():
    seen = [1, 2, 3, 4]
    expected = sum(flops_per_token(CONFIG, n) for n in seen)
    assert forward_flops(CONFIG, 4, 4, sum(seen)) == pytest.approx(expected)
    assert forward_flops(CONFIG, 4, 1, sum(seen)) == pytest.approx(expected - 3 * HEAD)


@pytest.mark.parametrize(
    ("remat", "weights", "attention"),
    [("none", 4, 4), ("dots", 4, 4), ("attention", 5, 4), ("full", 5, 5), ("offload", 5, 5)],
)
def test_worth_counts_prompts_once_and_logits_of_rollouts(remat, weights, attention):
    assert passes(remat) == (weights, attention)
    assert real_tokens(GROUPS) == 16
    expected = weights * (16 * LAYERS + 12 * HEAD) + 4 * PAIRS * PAIR
    assert worth(GROUPS, CONFIG, remat) == pytest.approx(expected)
    update = 3 * (16 * LAYERS + 12 * HEAD + PAIRS * PAIR)
    assert update_flops(GROUPS, CONFIG) == pytest.approx(update)


def microbatch(rows: int, tokens: int, pieces: int, *chunks: tuple[Chunk, ...]):
    return PackedMicrobatch(MicrobatchShape(rows, tokens, pieces), chunks)


FIRST, SECOND = Chunk(0, (0, 1)), Chunk(1, (0,))


def test_a_full_row_does_what_it_is_worth_but_for_the_logits_of_prompts():
    packed = [microbatch(1, 16, 1, (FIRST, SECOND))]
    policies: tuple[Remat, ...] = ("none", "full")
    for remat in policies:
        weights, attention = passes(remat)
        found = done(packed, GROUPS, CONFIG, remat, 1)
        extra = weights * 4 * HEAD + (attention - 4) * PAIRS * PAIR
        assert found == pytest.approx(worth(GROUPS, CONFIG, remat) + extra)


def test_the_heaviest_row_counts_on_every_device():
    packed = [microbatch(2, 9, 1, (FIRST,), (SECOND,))]
    heaviest = max(visible_pairs(3, (2, 4)), visible_pairs(1, (6,)))
    expected = 2 * 4 * (9 * (LAYERS + HEAD) + heaviest * PAIR)
    assert done(packed, GROUPS, CONFIG, "none", 2) == pytest.approx(expected)


def test_devices_that_share_a_row_share_its_work():
    apart = done([microbatch(1, 16, 1, (FIRST, SECOND))], GROUPS, CONFIG, "none", 1)
    shared = done([microbatch(1, 16, 4, (FIRST, SECOND))], GROUPS, CONFIG, "none", 4)
    by_tensor = done([microbatch(1, 16, 2, (FIRST, SECOND))], GROUPS, CONFIG, "none", 4)
    assert apart == pytest.approx(shared) == pytest.approx(by_tensor)


def test_padding_repeated_prompts_and_idle_devices_are_done_but_worth_nothing():
    best = done([microbatch(1, 16, 1, (FIRST, SECOND))], GROUPS, CONFIG, "none", 1)
    padded = done([microbatch(1, 20, 1, (FIRST, SECOND))], GROUPS, CONFIG, "none", 1)
    assert padded - best == pytest.approx(4 * 4 * (LAYERS + HEAD))
    cut = [
        microbatch(1, 12, 1, (Chunk(0, (0,)), SECOND)),
        microbatch(1, 7, 1, (Chunk(0, (1,)),)),
    ]
    repeated = done(cut, GROUPS, CONFIG, "none", 1) - best
    pairs = visible_pairs(3, ())
    assert repeated == pytest.approx(4 * (3 * (LAYERS + HEAD) + pairs * PAIR))
    # The second row is empty.
    idle = done([microbatch(2, 16, 1, (FIRST, SECOND))], GROUPS, CONFIG, "none", 2)
    assert idle == pytest.approx(2 * best)
