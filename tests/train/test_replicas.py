"""Two replicas compute what one does, and talk once per update, apart from a few numbers.

The test runs this file as a program with eight fake devices.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from models.lora import LoRASettings, add_adapters, split
from models.sharding import MeshProgram, make_mesh
from models.text import TextDecoder
from tests.collectives import bytes_sent, find_collectives
from tests.processes import on_eight_devices
from tests.train.test_step_meshes import BOUND, TEXT, rl_step, sft_step

FEW_NUMBERS = 1024  # bytes: the metrics of a micro-batch
# Two replicas of four devices each, and what is rematerialised.
MESHES = (((2, 4, 1), "none"), ((2, 2, 2), "offload"))


def main() -> None:
    text = nnx.jit(lambda: TextDecoder(TEXT, rngs=nnx.Rngs(0)))()
    compare(text)
    add_adapters(text, LoRASettings(rank=4), seed=0)
    for adapter in text.layers.adapters.values():
        # With B = 0, A would have no gradient.
        adapter.b.set_value(0.1 * jax.random.normal(jax.random.key(1), adapter.b.shape))
    compare(text)
    print("done")


def compare(text: TextDecoder) -> None:
    """Steps of two replicas with the same steps of one replica on four devices."""
    graph, *states = split(text)
    weights, frozen = jax.tree.map(np.asarray, states)
    play = functools.partial(rl_step, sizes_of=TEXT)
    for name, run, most in (("RL", play, 512), ("SFT", sft_step, 2)):
        one, figures = run(graph, weights, frozen, make_mesh(1, 4, 1), most, "full")
        for shape, remat in MESHES:
            programs: dict[str, str] = {}
            with recording(programs):
                two, found = run(graph, weights, frozen, make_mesh(*shape), most, remat)
            for figure in figures:
                np.testing.assert_allclose(
                    found[figure], figures[figure], rtol=1e-5, atol=1e-6, err_msg=figure
                )
            for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
                assert np.abs(np.asarray(a) - np.asarray(b)).max() < BOUND
            check_traffic(programs, two.weights)
            print(f"{name} {shape}: loss {float(found['loss']):.6f}")


@contextlib.contextmanager
def recording(programs: dict[str, str]) -> Iterator[None]:
    """Collects the text of all programs that are called on a mesh, by the function's name."""
    original = MeshProgram.__call__

    def call(program: Any, *arguments: Any, **options: Any) -> Any:
        name = program.jitted.__name__
        if name not in programs:
            programs[name] = program.lower(*arguments, **options).compile().as_text()
        return original(program, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MeshProgram, "__call__", call)
        yield


def check_traffic(programs: dict[str, str], weights: Any) -> None:
    """Only `apply_gradients` sends more than a few numbers to replicas, besides the frames."""
    # Gradients are float32, and sharded like weights.
    gradients = sum(4 * np.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(weights))
    for name, text in programs.items():
        between = [found for found in find_collectives(text, 8, slices=2) if found.between]
        sent = bytes_sent(between)
        print(f"{name}: {len(between)} collectives between replicas, {sent:.0f} bytes")
        if name == "share_bank":
            # Visual vectors, once per step.
            continue
        if name == "apply_gradients":
            assert {found.kind for found in between} == {"all-reduce"}, between
            # With two replicas, an all-reduce sends each number once.
            assert gradients <= sent < gradients + FEW_NUMBERS, (name, sent, gradients)
        else:
            assert sent < FEW_NUMBERS, (name, between)


@pytest.mark.slow
def test_two_replicas_equal_one_and_talk_once_per_update():
    assert "done" in on_eight_devices(__file__)


if __name__ == "__main__":
    main()
