"""The programs of paravt_2b_lora, lowered for a GPU of CUDA that need not be here.

Lowering shows that the programs exist on a GPU and which kernels attend. It says nothing about
speed or memory, which `python -m benchmarks.gpu` measures.
"""

from __future__ import annotations

import collections
import re

import jax
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from configs import RECIPES
from models import attention
from models.attention import paged
from paravt_extras.fit import GIB, fit
from paravt_extras.plan import Program, programs
from paravt_extras.slices import Devices

# 90 % of what a GPU of 24 GB has.
SMALL_GPU = Devices("1 x L4", 1, 1, 20.2 * GIB, "gpu")


@pytest.fixture
def plan(monkeypatch) -> list[Program]:
    for module in (attention, paged):
        monkeypatch.setattr(module, "platform", lambda: "gpu")
    # JAX asks the installed library for its version.
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91002)
    run = fit(RECIPES["paravt_2b_lora"](), SMALL_GPU).run
    devices = jax.devices()[:1]
    return programs(run, devices, devices)


def kernels(plan: list[Program], name: str) -> dict[str, int]:
    """How often the last program with this name calls each kernel, per layer of its scans.

    The kernels are those of cuDNN, `triton` and `paged_triton`. The last program of a name is the
    smallest.
    """
    lowering = [program for program in plan if program.name.startswith(name)][-1].lower
    program = lowering.func.__self__
    with jax.set_mesh(program.mesh):
        traced = program.jitted.trace(*program.first, *lowering.args, **lowering.keywords)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    names = r'(?:__cudnn\$|name = "(?:packed_attention_|(?=paged)))(\w+)'
    return collections.Counter(re.findall(names, text))


def test_tower_and_cold_start_attend_with_cudnn(plan):
    assert kernels(plan, "vision") == {"fmhaScaleBiasSoftmax": 1}
    update = kernels(plan, "SFT add_gradients")
    assert update["fmhaScaleBiasSoftmaxBackward"] == 1 and update["fmhaScaleBiasSoftmax"]


@pytest.mark.slow
def test_packed_rows_and_pages_attend_with_triton(plan):
    assert kernels(plan, "prefill") == {"paged_attention": 1}
    # Shared pages, and each row's own. Layers are apart, for their weights.
    layers = RECIPES["paravt_2b_lora"]().model.config().text.num_hidden_layers
    assert kernels(plan, "decode") == {"paged_attention": 2 * layers}
    assert kernels(plan, "RL logprobs") == {"forward": 1}
    assert kernels(plan, "RL add_gradients").keys() == {"forward", "d_queries", "d_keys"}


def test_a_run_has_few_programs_and_its_optimizer_lowers(plan):
    assert len(plan) <= 15
    assert kernels(plan, "RL apply_gradients") == {}
