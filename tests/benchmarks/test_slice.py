"""Measured beside planned, at a tiny size on the CPU."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from typing import Any

import jax
import pytest

import benchmarks.slice
from benchmarks.slice import Compiled, by_family, with_work
from paravt_extras.plan.compile import Measured
from paravt_extras.plan.programs import Plan, program_names
from paravt_extras.slices import Topology, generation_of
from tests.train.small import small


@pytest.fixture(scope="module")
def printed() -> dict[str, Any]:
    """What the command prints."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert benchmarks.slice.main(["--config=small", "--minutes", "60"]) == 0
    return json.loads(output.getvalue())


@pytest.mark.slow
def test_every_program_of_a_recipe_runs(printed):
    assert tuple(printed["programs"]) == program_names(small())
    assert printed["left_out"] == []
    for name, row in printed["programs"].items():
        assert "error" not in row, name
        assert row["seconds"]["measured"] > 0, name
        assert row["bytes"]["planned"] > 0, name


@pytest.mark.slow
def test_what_is_not_known_of_a_cpu_is_null(printed):
    assert printed["slice"] is None
    for row in printed["programs"].values():
        assert row["seconds"]["expected"] is None and row["seconds"]["least"] is None
        assert row["bytes"]["measured"] is None


def test_programs_that_are_not_compiled_in_time_are_left_out(capsys):
    assert benchmarks.slice.main(["--config=small", "--minutes", "0"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["programs"] == {}
    assert tuple(found["left_out"]) == program_names(small())


def test_a_mesh_for_other_devices_is_refused(capsys):
    assert benchmarks.slice.main(["--config=small", "--mesh.data", "2"]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: mesh: 2 x 1 x 1 ") and "the nearest one" in error


def test_the_largest_program_of_each_family_comes_first():
    names = ["vision", "prefill 8", "prefill 8 after 64", "prefill 32", "reference 64", "decode 64"]
    first = by_family([*names, "reference 16", "RL update 64", "RL update 16", "RL optimizer"])
    assert set(first[:6]) == {
        "vision",
        "prefill 8 after 64",
        "reference 64",
        "decode 64",
        "RL update 64",
        "RL optimizer",
    }
    assert first[6:] == ["prefill 32", "reference 16", "RL update 16", "prefill 8"]


@pytest.fixture
def plan() -> Plan:
    return Plan(small(), jax.devices()[:1], jax.devices()[:1], (1, 1, 1))


def test_full_rows_add_their_work_to_the_plan(plan):
    update = Measured("RL update 64", flops=100.0, pair_flops=2.0)
    assert with_work(update, plan).flops == 100 + 2 * 64 * 65 / 2
    engine = plan.run.engine_sizes
    decode = with_work(Measured("decode 32", read=100.0), plan)
    assert decode.read == 100 + engine.steps * engine.slots * 32 * plan.token_bytes()
    vision = Measured("vision", flops=5.0, read=3.0)
    assert with_work(vision, plan) == vision


def test_a_slice_has_its_planned_times_and_the_memory_of_its_fullest_device(plan, monkeypatch):
    planned = plan.program("RL optimizer")
    measured = Measured("RL optimizer", devices=1, peak=50.0, flops=197e12, read=0.0)
    compiled = Compiled(planned, None, measured)
    used = iter([[(5, 10), (5, 60)], [(5, 70), (5, 65)]])
    monkeypatch.setattr(benchmarks.slice, "used_memory", lambda devices: next(used))
    monkeypatch.setattr(benchmarks.slice, "fastest", lambda compiled, plan: 3.0)
    row = benchmarks.slice._row(compiled, plan, Topology("v5e:1x1"))
    # One second at the peak rate, and half of it is expected.
    assert row["seconds"] == {"measured": 3.0, "expected": 2.0, "least": 1.0}
    assert row["bytes"] == {"measured": 70, "planned": 50.0}


def test_memory_below_that_of_an_earlier_program_is_not_known(plan, monkeypatch):
    compiled = Compiled(plan.program("RL optimizer"), None, Measured("RL optimizer", peak=50.0))
    monkeypatch.setattr(benchmarks.slice, "used_memory", lambda devices: [(5, 60)])
    monkeypatch.setattr(benchmarks.slice, "fastest", lambda compiled, plan: 3.0)
    row = benchmarks.slice._row(compiled, plan, None)
    assert row["bytes"] == {"measured": None, "planned": 50.0}


@dataclasses.dataclass
class Named:
    device_kind: str


def test_generations_are_known_by_the_names_of_devices():
    assert generation_of(Named("TPU v5 lite")) == "v5e"
    assert generation_of(Named("NVIDIA H100 80GB HBM3")) is None
