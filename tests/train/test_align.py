"""Alignment: the tower learns to name what a frame shows, and nothing else is touched."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.qwen3_vl.model import Qwen3VL
from paravt_jax.records import Caption
from train.align import AlignSettings, align

SETTINGS = AlignSettings(steps=30, batch=32)


def fresh(road) -> Qwen3VL:
    """The road's model once more, to be trained on."""
    graph, state = nnx.split(road.model)
    return nnx.merge(graph, jax.tree.map(jnp.copy, state))


def weights_of(module) -> dict[str, np.ndarray]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(module))
    }


def run(road, model, settings, captions=None) -> list[dict[str, float]]:
    told: list[tuple[int, dict[str, float]]] = []
    data = road.data
    align(model, captions or data.captions, data.vocabulary, data.root, settings, 0, lambda *step: told.append(step))
    assert [step for step, _ in told] == list(range(1, settings.steps + 1))
    return [figures for _, figures in told]


def test_frames_are_named_and_only_tower_and_embedding_change(road):
    model = fresh(road)
    before = weights_of(model)
    figures = run(road, model, SETTINGS)
    assert figures[-1]["loss"] < 0.7 * figures[0]["loss"] and 0 <= figures[-1]["accuracy"] <= 1
    after = weights_of(model)
    changed = {name for name in before if (before[name] != after[name]).any()}
    assert {name.split("/")[0] for name in changed} == {"vision", "text"}
    assert all(name.startswith(("vision/", "text/embedding")) for name in changed)
    # The same seed and captions give the same tower.
    again = fresh(road)
    run(road, again, SETTINGS)
    for name, value in weights_of(again).items():
        np.testing.assert_array_equal(value, after[name])


def test_words_have_to_be_single_tokens(road):
    odd = dataclasses.replace(road.data.captions[0], words=("chartreuse",))
    with pytest.raises(ValueError, match="'chartreuse'.*not single tokens; add them"):
        run(road, fresh(road), AlignSettings(steps=1, batch=2), captions=[odd])


def test_a_damaged_video_is_left_out(road, tmp_path):
    good = next(caption for caption in road.data.captions if len(caption.words) == 2)
    for name in (good.video, "bad.mp4"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / good.video).write_bytes((road.data.root / good.video).read_bytes())
    (tmp_path / "bad.mp4").write_bytes(b"no video")
    data, told = road.data, []
    captions = [good, Caption("bad.mp4", 0.0, ("red",))]
    bad = align(fresh(road), captions, data.vocabulary, tmp_path, SETTINGS, 0, lambda _, figures: told.append(figures))
    assert list(bad) == ["bad.mp4"] and bad["bad.mp4"]
    assert told[-1]["accuracy"] == 1, "one frame with two words is soon known by heart"
