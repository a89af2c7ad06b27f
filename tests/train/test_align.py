"""Alignment trains the vision tower and the word embedding, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.compilation import Compilations
from models.family import family
from models.features import FrameSettings
from models.model import VisionLanguageModel
from models.sharding import make_mesh, param_shardings
from paravt_jax.method.records import Caption
from train.durable.saver import Saver
from train.learn.align import AlignSettings, CaptionedFrames, align

RULES = FrameSettings().rules(family().tiny(1).vision)
SETTINGS = AlignSettings(steps=30, batch=32)


def fresh(road) -> VisionLanguageModel:
    """A copy of the model, to be trained."""
    graph, state = nnx.split(road.model)
    return nnx.merge(graph, jax.tree.map(jnp.copy, state))


def weights_of(module) -> dict[str, np.ndarray]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(module))
    }


class FakeSaver(Saver):
    """A saver without a disk. `kept` is the last save; another FakeSaver can resume from it."""

    def __init__(
        self, steps: int, kept: tuple[int, Any, Any] = (0, None, None), until: int | None = None
    ):
        self.finished_steps = kept[0]
        self.last = until or steps
        self.kept = kept
        self.until = until
        self.told: list[dict[str, float]] = []

    @property
    def left(self) -> range:
        return range(self.finished_steps + 1, self.last + 1)

    def steps(self) -> Iterator[int]:
        return iter(self.left)

    def restore(self, start: Any) -> tuple[Any, Any]:
        _, state, cursor = self.kept
        return (start if state is None else state), cursor

    def done(self, step, state, metrics, cursor) -> None:
        assert step == self.finished_steps + len(self.told) + 1
        assert metrics["time/step"] > 0
        # Times differ from run to run.
        self.told.append({name: metrics[name] for name in ("loss", "accuracy")})
        self.kept = step, jax.tree.map(jnp.copy, state), cursor


def run(
    road, model, settings, captions=None, saver: FakeSaver | None = None
) -> list[dict[str, float]]:
    data, saver = road.data, saver or FakeSaver(settings.steps)
    captioned = CaptionedFrames(captions or data.captions, data.vocabulary, data.root, RULES)
    align(model, captioned, settings, 0, saver)
    return saver.told


@pytest.mark.slow
def test_frames_are_named_and_only_tower_and_embedding_change(road):
    model = fresh(road)
    before = weights_of(model)
    figures = run(road, model, SETTINGS)
    assert figures[-1]["loss"] < 0.7 * figures[0]["loss"] and 0 <= figures[-1]["accuracy"] <= 1
    after = weights_of(model)
    changed = {name for name in before if (before[name] != after[name]).any()}
    assert {name.split("/")[0] for name in changed} == {"vision", "text"}
    assert all(name.startswith(("vision/", "text/embedding")) for name in changed)
    # A run that is interrupted and resumed gives the same tower.
    cut = FakeSaver(SETTINGS.steps, until=11)
    told = run(road, fresh(road), SETTINGS, saver=cut)
    again = fresh(road)
    step, state, cursor = cut.kept
    # The cursor is stored as JSON.
    rest = FakeSaver(SETTINGS.steps, (step, state, json.loads(json.dumps(cursor))))
    assert told + run(road, again, SETTINGS, saver=rest) == figures
    assert len(rest.told) == SETTINGS.steps - 11
    for name, value in weights_of(again).items():
        np.testing.assert_array_equal(value, after[name])
    # A finished phase is only restored: no caption is read.
    ended = fresh(road)
    run(
        road,
        ended,
        SETTINGS,
        captions=[Caption("no.mp4", 0.0, ("red",))],
        saver=FakeSaver(SETTINGS.steps, rest.kept),
    )
    for name, value in weights_of(ended).items():
        np.testing.assert_array_equal(value, after[name])


def test_the_update_is_compiled_once(road):
    model, compilations = fresh(road), Compilations()
    # Sharded as in a run.
    shardings = param_shardings(nnx.state(model), make_mesh())
    nnx.update(model, jax.device_put(nnx.state(model), shardings))
    counts = []

    class Counting(FakeSaver):
        def done(self, *step) -> None:
            counts.append(compilations.count)
            super().done(*step)
            counts.append(compilations.count)

    run(road, model, SETTINGS, saver=Counting(3))
    assert counts[2] == counts[1] and counts[4] == counts[3]


@pytest.mark.parametrize(("field", "value"), [("steps", 0), ("batch", 0), ("learning_rate", 0.0)])
def test_invalid_settings_are_refused(field, value):
    with pytest.raises(ValueError, match=rf"align\.{field}: {value}"):
        AlignSettings(**{field: value})


@pytest.mark.slow
def test_a_damaged_video_is_left_out(road, tmp_path):
    good = next(caption for caption in road.data.captions if len(caption.words) == 2)
    for name in (good.video, "bad.mp4"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / good.video).write_bytes((road.data.root / good.video).read_bytes())
    (tmp_path / "bad.mp4").write_bytes(b"no video")
    saver = FakeSaver(SETTINGS.steps)
    captions = [good, Caption("bad.mp4", 0.0, ("red",))]
    captioned = CaptionedFrames(captions, road.data.vocabulary, tmp_path, RULES)
    align(fresh(road), captioned, SETTINGS, 0, saver)
    assert list(captioned.unreadable) == ["bad.mp4"] and captioned.unreadable["bad.mp4"]
    assert saver.told[-1]["accuracy"] == 1, "one frame with two words is soon memorised"
