"""Programs that are compiled before they are called, several at a time."""

from __future__ import annotations

import functools
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import compilation as module
from models.compilation import Compilations, compile_ahead, compile_threads
from models.features import FrameFeatures, FrameSettings
from models.sharding import abstract, make_mesh
from paravt_jax.data import video
from paravt_jax.world import videos as world


@pytest.mark.parametrize("placed", [False, True])
def test_a_call_uses_what_was_compiled_ahead(placed):
    program = jax.jit(lambda x, y: jnp.sin(x) @ y, donate_argnums=0)
    x = jnp.ones((3, 3))
    if placed:
        place = jax.sharding.NamedSharding(make_mesh(), jax.sharding.PartitionSpec())
        x = jax.device_put(x, place)
    counter = Compilations()
    sizes = [np.ones((3, size), np.float32) for size in (1, 2, 3)]
    compiled = compile_ahead([functools.partial(program.lower, abstract(x), y) for y in sizes])
    assert [name for name, _ in compiled] == ["<lambda>"] * 3
    assert counter.count == len(sizes)
    for y in sizes:
        program(x.copy(), y)
    copies = 1
    assert counter.count <= len(sizes) + copies


def lowering(compile: Callable[[], Any]) -> Any:
    """Return the lowering of a program that is compiled by a function."""
    lowered, program = types.SimpleNamespace(compile=compile), types.SimpleNamespace(__name__="")
    return functools.partial(types.MethodType(lambda _: lowered, program))


def test_programs_compile_side_by_side(monkeypatch):
    """Each of two programs only compiles once the other one has begun."""
    monkeypatch.setattr(module, "compile_threads", lambda: 2)
    both = threading.Barrier(2, timeout=60)

    compile_ahead([lowering(both.wait)] * 2)


def test_a_program_that_cannot_be_compiled_ends_the_work(monkeypatch):
    monkeypatch.setattr(module, "compile_threads", lambda: 1)
    compiled = []

    def compile() -> None:
        compiled.append(0)
        time.sleep(0.01)  # meanwhile, what waits is cancelled
        raise ValueError("too large")

    with pytest.raises(ValueError, match="too large"):
        compile_ahead([lowering(compile)] * 50)
    assert len(compiled) < 50


def test_the_host_bounds_how_many_programs_compile_at_a_time(monkeypatch):
    monkeypatch.setattr(module.os, "cpu_count", lambda: 112)
    for memory, threads in ((1e9, 1), (16e9, 2), (192e9, 32), (4e12, 112)):
        monkeypatch.setattr(module, "host_memory", lambda memory=memory: memory)
        assert compile_threads() == threads


def test_no_size_of_a_video_compiles_the_tower_again(small_model, tmp_path):
    """Neither frames of the two sizes that were expected, nor those of a third."""
    sizes = (96, 160, 128)
    names = []
    for size in sizes:
        settings = world.WorldSettings(train_videos=1, heldout_videos=1, size=size)
        shown = world.plan(settings)[0]
        world.render(settings, shown, tmp_path / str(size))
        names.append(f"{size}/{shown.path}")
    settings = FrameSettings(crop_max_pixels=96 * 96)
    features = FrameFeatures(
        small_model.vision, small_model.config, settings, tmp_path, source=video
    )
    too_thin = (8, 4000)
    features.expect([(size, size) for size in sizes[:2]] + [too_thin])
    # 3 x 3 and 5 x 5 tokens in overviews, and the most that are allowed. The larger video has the
    # smaller's size in crops.
    assert features.encoder.sizes == (9, 25, 49)
    programs = list(features.lowerings())
    compile_ahead(programs)
    counter = Compilations()
    for name in names:
        features([*features.overview(name, 4), *features.window(name, 3.0, 9.0, 1.0, 4)])
    assert counter.count == 0


def test_every_new_shape_counts_and_nothing_else():
    program = jax.jit(lambda x: jnp.tanh(x) * 3 + 1)
    program(np.zeros(7, np.float32))
    counter = Compilations()
    assert counter.count == 0, "what was compiled before does not count"
    program(np.zeros(5, np.float32))
    first = counter.count
    assert first >= 1
    program(np.ones(5, np.float32))
    assert counter.count == first
    program(np.zeros(6, np.float32))
    assert counter.count == first + 1
