"""FLOPs of an update, by hand."""

from __future__ import annotations

import pytest

from models.config import flops_per_token, forward_flops
from models.qwen3_vl.sizes import qwen3_vl
from train.learn.packing import GroupLengths
from train.learn.speed import real_tokens, update_flops, visible_pairs

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


def test_an_update_counts_prompts_once_and_logits_of_rollouts():
    assert real_tokens(GROUPS) == 16
    update = 3 * (16 * LAYERS + 12 * HEAD + PAIRS * PAIR)
    assert update_flops(GROUPS, CONFIG) == pytest.approx(update)
