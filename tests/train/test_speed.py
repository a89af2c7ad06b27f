"""FLOPs and speed of an update, against counts by hand."""

import numpy as np
import pytest

from models.qwen3_vl.flops import flops_per_token
from models.qwen3_vl.sizes import tiny
from train.learn import speed
from train.learn.batch import Sequences


def batch(prompts: list[int], rows: list[int], padding: int = 0) -> Sequences:
    """Prompts and rows of these lengths; only their segments matter here."""

    def segments(lengths: list[int]) -> np.ndarray:
        width = max(lengths) + padding
        return (np.arange(width) < np.array(lengths)[:, None]).astype(np.int32)

    none = np.zeros(0)
    return Sequences(none, none, segments(prompts), none, none, none, segments(rows), none, none)


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
    assert speed.update_flops([batch([5, 3], [4, 2, 1, 6])], config) == pytest.approx(3 * wanted)


def test_padding_counts_for_nothing():
    config = tiny(100)
    tight, loose = (batch([5, 3], [4, 2, 1, 6], padding) for padding in (0, 9))
    assert speed.update_flops([tight, tight], config) == 2 * speed.update_flops([loose], config)
    assert speed.real_tokens([loose]) == 8 + 13


def test_mfu_is_relative_to_all_devices(monkeypatch):
    monkeypatch.setattr(speed, "peak_flops", lambda: 1e9)
    config, one = tiny(100), batch([5], [4, 2])
    figures = speed.speeds([one], config, seconds=2.0, devices=4)
    assert figures["speed/tokens"] == 5.5
    assert figures["speed/mfu"] == pytest.approx(speed.update_flops([one], config) / 8e9)


def test_the_peak_of_a_cpu_is_measured_and_plausible():
    assert 1e9 < speed.peak_flops() < 1e14 and speed.peak_flops() == speed.peak_flops()
