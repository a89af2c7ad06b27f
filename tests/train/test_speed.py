"""FLOPs and speed of a step, against counts by hand."""

import types

import pytest

from models.qwen3_vl.sizes import tiny
from train.learn import speed
from train.learn.packing import GroupLengths
from train.learn.speed import flops_per_token

GROUPS = [GroupLengths(5, (4, 2)), GroupLengths(3, (1, 6))]
PEAKS = {"H100 PCIe": 756e12, "H100 80GB HBM3": 989e12, "H200 NVL": 835e12, "RTX 4090": 165e12}


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
    assert speed.score_flops(GROUPS, config) == pytest.approx(wanted)


def test_a_shared_prompt_counts_once():
    config = tiny(100)
    apart = [GroupLengths(prompt, (n,)) for prompt, suffixes in GROUPS for n in suffixes]
    assert speed.real_tokens(GROUPS) == 8 + 13
    assert speed.real_tokens(apart) == 16 + 13
    assert speed.score_flops(apart, config) > speed.score_flops(GROUPS, config)


def test_groups_add_up_in_any_order():
    config = tiny(100)
    whole = speed.score_flops(GROUPS[::-1], config)
    parts = [speed.score_flops([group], config) for group in GROUPS]
    assert whole == pytest.approx(sum(parts))
    assert speed.score_flops([], config) == speed.real_tokens([]) == 0


def test_a_conversation_is_all_scored():
    """It has no prompt: every token needs logits."""
    config = tiny(100)
    wanted = sum(flops_per_token(config, context) for context in range(1, 8))
    flops = speed.score_flops([GroupLengths(0, (7,))], config)
    assert flops == pytest.approx(wanted)


def test_mfu_is_relative_to_all_devices_and_all_updates(monkeypatch):
    monkeypatch.setattr(speed, "peak_flops", lambda: 1e9)
    config, one = tiny(100), GROUPS[:1]
    seconds = {"time/rollout": 9.0, "time/reference": 0.5, "time/update": 4.0}
    figures = speed.speeds(one, config, seconds, devices=4, updates=2)
    assert figures["speed/tokens"] == 5.5
    flops = speed.score_flops(one, config)
    assert figures["speed/mfu_update"] == pytest.approx(3 * flops / 8e9)
    assert figures["speed/mfu_reference"] == pytest.approx(flops / 2e9)
    cold = speed.speeds(one, config, {"time/step": 2.0}, devices=4)
    assert cold == {name: figures[name] for name in ("speed/tokens", "speed/mfu_update")}


@pytest.mark.parametrize(("name", "peak"), [*PEAKS.items(), ("RTX 4090 Laptop GPU", None)])
def test_the_peak_is_that_of_the_chip(monkeypatch, name, peak):
    chip = types.SimpleNamespace(platform="gpu", device_kind=name)
    monkeypatch.setattr(speed.jax, "local_devices", lambda: [chip])
    assert speed.peak_flops() == peak


def test_a_cpu_has_no_published_peak():
    assert speed.speeds(GROUPS, tiny(100), {"time/step": 1.0}, 1).keys() == {"speed/tokens"}
