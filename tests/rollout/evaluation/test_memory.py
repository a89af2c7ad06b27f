"""The plan of an evaluation's memory, and the refusal of one that does not fit."""

from __future__ import annotations

import dataclasses

import pytest

from models.features import frame_tokens
from models.qwen3_vl.sizes import qwen3_vl
from paravt_jax.method.protocol import Protocol
from rollout.engine.sizing import MOST_PREFILL, sizes_for_single_episodes
from rollout.evaluation import memory
from rollout.evaluation.memory import GIB, MemoryPlan, plan_memory, require_room
from rollout.evaluation.native_video import VideoRules
from rollout.evaluation.settings import BenchmarkSettings

CONFIG = qwen3_vl("8b")
PUBLISHED = BenchmarkSettings(
    "m", max_pixels=602_112, crop_max_pixels=50_176, snap=28, jpeg=85, dtype="bfloat16"
)


@pytest.fixture
def plan(small_vocabulary):
    """plan(settings) plans an evaluation of the 8B model, with 600 tokens of text per prompt."""

    def planned(settings: BenchmarkSettings, replicas: int = 1) -> MemoryPlan:
        protocol = Protocol(small_vocabulary, settings.protocol(0))
        labels = 12
        pixels = settings.pixels()
        sizes = sizes_for_single_episodes(
            protocol,
            settings.frames * (frame_tokens(pixels, CONFIG.vision) + labels) + 600,
            16 * (frame_tokens(pixels, CONFIG.vision, crop=True) + labels) + 32,
            settings.episodes,
            settings.cache_tokens,
        )
        assert sizes.prefill_lengths[-1] <= MOST_PREFILL
        return plan_memory(settings, CONFIG, sizes, replicas, paged=True)

    return planned


def test_the_plan_counts_what_is_sure_to_be_there(plan):
    planned = plan(PUBLISHED)
    assert 16.0 < planned.kept["weights"] / GIB < 17.5
    # 4 episodes of at least 64 x 576 tokens, at 144 KiB.
    assert planned.kept["KV cache"] > 4 * 64 * 576 * 144 * 1024
    vectors = 64 * 576 * 4 * 4096 * 2  # four vectors of 4,096 bfloat16 per visual token
    assert planned.host["cached features"] > min(vectors, 4 * GIB)
    assert planned.device < 120 * GIB and max(planned.calls.values()) < 24 * GIB


def test_larger_settings_need_more(plan):
    small = plan(BenchmarkSettings("m", dtype="bfloat16"))
    for changes in (
        {"episodes": 8},
        {"max_pixels": 602_112},
        {"frames": 256},
        {"dtype": "float32"},
    ):
        settings = dataclasses.replace(BenchmarkSettings("m", dtype="bfloat16"), **changes)
        assert plan(settings).device > small.device


def test_a_slice_of_two_frames_is_planned_for(plan):
    """A video of 2 frames is one slice, with as many tokens as the whole of a longer one."""
    native = dataclasses.replace(PUBLISHED, native_video=True, frames=768)
    patches = 4 * VideoRules(2).most_tokens
    # Hidden states, attention scores and merged vectors of a patch have 160 kB.
    assert plan(native).calls["vision tower"] > patches * 150e3


def test_a_refusal_names_the_parts_and_what_to_lower(plan, monkeypatch):
    monkeypatch.setattr(memory, "reported_memory", lambda device: 25 * GIB)
    monkeypatch.setattr(memory, "host_memory", lambda: 1000 * GIB)
    with pytest.raises(ValueError, match="^--episodes 4, --frames 64, --max-pixels") as error:
        require_room(PUBLISHED, plan(PUBLISHED))
    message = str(error.value)
    assert "\n" not in message and "KV cache" in message
    assert "lower them in this order, use --dtype bfloat16" in message
    smaller = dataclasses.replace(PUBLISHED, episodes=1, max_pixels=50_176)
    require_room(smaller, plan(smaller))


def test_a_device_that_reports_nothing_is_not_compared(plan, monkeypatch):
    monkeypatch.setattr(memory, "reported_memory", lambda device: None)
    monkeypatch.setattr(memory, "host_memory", lambda: 1000 * GIB)
    require_room(PUBLISHED, plan(PUBLISHED))


def test_the_host_has_to_hold_the_features(plan, monkeypatch):
    monkeypatch.setattr(memory, "reported_memory", lambda device: 1000 * GIB)
    monkeypatch.setattr(memory, "host_memory", lambda: 2 * GIB)
    with pytest.raises(ValueError, match="GiB of the host"):
        require_room(PUBLISHED, plan(PUBLISHED))


def test_replicas_share_the_host(plan, monkeypatch):
    one, eight = plan(PUBLISHED), plan(PUBLISHED, 8)
    assert one.device == eight.device
    assert all(eight.host[part] > one.host[part] for part in one.host)
    assert eight.host["cached features"] == 8 * one.host["cached features"]
    # An overview of 64 frames per episode that is played side by side.
    assert eight.host["overviews read ahead"] >= 8 * 4 * 64 * 576 * 32 * 32 * 3
    monkeypatch.setattr(memory, "reported_memory", lambda device: 1000 * GIB)
    monkeypatch.setattr(memory, "host_memory", lambda: 100 * GIB)
    require_room(PUBLISHED, plan(PUBLISHED))
    with pytest.raises(ValueError, match=r"there are 100\.0 GiB of the host"):
        require_room(PUBLISHED, plan(PUBLISHED, 8), 8)
