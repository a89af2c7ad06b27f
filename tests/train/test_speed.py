"""FLOPs and speed of an update, against counts by hand."""

import pytest

from models.config import flops_per_token
from models.qwen3_vl.sizes import tiny
from train.learn import speed
from train.learn.packing import GroupLengths

GROUPS = [GroupLengths(5, (4, 2)), GroupLengths(3, (1, 6))]


def test_flops_of_an_update_token_by_token():
    config = tiny(100)
    head = 2 * config.text.vocab_size * config.text.hidden_size
    wanted = sum(
        flops_per_token(config, context) - head
        for length in (5, 3)
        for context in range(1, length + 1)
    )
    for length, before in ((4, 5), (2, 5), (1, 3), (6, 3)):
        wanted += sum(flops_per_token(config, before + own) for own in range(1, length + 1))
    assert speed.update_flops(GROUPS, config) == pytest.approx(3 * wanted)


def test_a_shared_prompt_counts_once():
    config = tiny(100)
    apart = [GroupLengths(prompt, (n,)) for prompt, suffixes in GROUPS for n in suffixes]
    assert speed.real_tokens(GROUPS) == 8 + 13
    assert speed.real_tokens(apart) == 16 + 13
    assert speed.update_flops(apart, config) > speed.update_flops(GROUPS, config)


def test_groups_add_up_in_any_order():
    config = tiny(100)
    whole = speed.update_flops(GROUPS[::-1], config)
    parts = [speed.update_flops([group], config) for group in GROUPS]
    assert whole == pytest.approx(sum(parts))
    assert speed.update_flops([], config) == speed.real_tokens([]) == 0


def test_a_conversation_is_all_scored():
    """It has no prompt: every token needs logits."""
    config = tiny(100)
    wanted = sum(flops_per_token(config, context) for context in range(1, 8))
    flops = speed.update_flops([GroupLengths(0, (7,))], config)
    assert flops == pytest.approx(3 * wanted)


def test_mfu_is_relative_to_all_devices(monkeypatch):
    monkeypatch.setattr(speed, "peak_flops", lambda: 1e9)
    config, one = tiny(100), GROUPS[:1]
    figures = speed.speeds(one, config, seconds=2.0, devices=4)
    assert figures["speed/tokens"] == 5.5
    assert figures["speed/mfu"] == pytest.approx(speed.update_flops(one, config) / 8e9)


def test_a_cpu_has_no_published_peak():
    assert "speed/mfu" not in speed.speeds(GROUPS, tiny(100), seconds=1.0, devices=1)
