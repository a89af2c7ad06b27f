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

import paravt_extras.plan.programs
from configs import RECIPES
from models import attention
from models.attention import paged
from paravt_extras.fit import GIB, fit
from paravt_extras.plan.programs import Plan, program_names
from paravt_extras.slices import Devices
from rollout.engine.programs import Programs

# 90 % of what a GPU of 24 GB has.
SMALL_GPU = Devices("1 x L4", 1, 1, 20.2 * GIB, "gpu")


@pytest.fixture
def plan(monkeypatch) -> Plan:
    for module in (attention, paged):
        monkeypatch.setattr(module, "platform", lambda: "gpu")
    # JAX asks the installed library for its version.
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91002)
    # Away from TPUs, the engine copies pages to dense arrays before it decodes.
    monkeypatch.setattr(
        paravt_extras.plan.programs,
        "Programs",
        lambda model, page, paged: Programs(model, page, False),
    )
    run = fit(RECIPES["paravt_2b_lora"](), SMALL_GPU).run
    devices = jax.devices()[:1]
    return Plan(run, devices, devices, (1, 1, 1))


def kernels(plan: Plan, name: str) -> dict[str, int]:
    """How often a program calls each kernel of cuDNN and of `triton`, per layer of its scans."""
    program = plan.program(name)
    with jax.set_mesh(program.mesh):
        traced = program.function.trace(*program.arguments, **program.options)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return collections.Counter(re.findall(r'(?:__cudnn\$|name = "packed_attention_)(\w+)', text))


def test_tower_prefill_and_cold_start_attend_with_cudnn(plan):
    names = program_names(plan.run)
    alone, behind = (
        [name for name in names if name.startswith("prefill") and ("after" in name) == cached][-1]
        for cached in (False, True)
    )
    assert kernels(plan, "vision") == {"fmhaSoftmax": 1}
    assert kernels(plan, alone) == {"fmhaScaleBiasSoftmax": 1}
    assert kernels(plan, behind) == {"fmhaScaleBiasSoftmax": 1}
    update = kernels(plan, "SFT update")
    assert update["fmhaScaleBiasSoftmaxBackward"] == 1 and update["fmhaScaleBiasSoftmax"]


def test_packed_rows_attend_with_triton_and_decoding_with_xla(plan):
    # The last name of a family is that of its smallest program.
    decode, reference, update = (
        [name for name in program_names(plan.run) if name.startswith(family)][-1]
        for family in ("decode", "reference", "RL update")
    )
    assert kernels(plan, decode) == {}
    assert kernels(plan, reference) == {"forward": 1}
    assert kernels(plan, update).keys() == {"forward", "d_queries", "d_keys"}


@pytest.mark.parametrize("name", ["page copy", "bank fill", "RL start", "RL optimizer"])
def test_the_other_programs_lower(plan, name):
    assert kernels(plan, name) == {}
