"""Sizes are chosen for the devices, within their memory, and values set by hand stay."""

from __future__ import annotations

import json
import pathlib
import types

import jax
import pytest

import paravt_extras.fit as command
from configs import RECIPES
from models.lora import LoRASettings
from paravt_extras.fit import GIB, OPEN_FIELDS, choose_mesh, fit
from paravt_extras.rehearsal import cut
from paravt_extras.slices import ACCELERATOR_FILES, CHIPS, Devices, Topology
from train.settings import Run, change

ROOT = pathlib.Path(__file__).parents[2]
RUN = RECIPES["paravt_8b"]()
AXES = ("mesh.data", "mesh.fsdp", "mesh.tensor")
SLICES = ("v5e:4x4", "v6e:2x4", "v6e:4x4", "v5p:2x2x1", "v5p:4x4x4", "2*v5e:4x4")


def fitted_to(name: str, run: Run = RUN) -> Run:
    return fit(run, Topology(name).available).run


@pytest.mark.parametrize("name", SLICES)
def test_nothing_stays_open_and_everything_fits(name):
    devices = Topology(name).available
    fitted = fit(RUN, devices)
    assert set(OPEN_FIELDS) <= set(fitted.chosen)
    assert not fit(fitted.run, devices).chosen
    data, fsdp, tensor = fitted.run.mesh.sizes
    assert data * fsdp * tensor == devices.count
    assert data % devices.slices == 0 and data * fsdp % devices.hosts == 0
    assert set(fitted.needs) == {"cold start", "PARA-GRPO", "rollouts"}
    assert devices.memory is not None
    assert max(fitted.needs.values()) <= devices.memory
    run = fitted.run
    assert run.engine.cache_tokens >= run.engine_sizes.longest
    assert run.rl is not None
    assert run.rl_shape.trajectory <= run.rl.microbatch_tokens <= 1.02 * data * run.rl_shape.tokens


@pytest.mark.parametrize(
    ("slice_name", "fields", "expected"),
    [
        ("v5e:4x4", {}, (1, 16, 1)),
        ("v5e:8x8", {}, (1, 64, 1)),
        # More devices than rows: several share each row.
        ("v5e:16x16", {}, (1, 64, 4)),
        ("v5e:8x8", {"mesh.tensor": 4}, (1, 16, 4)),
        ("v5e:8x8", {"mesh.fsdp": 16}, (1, 16, 4)),
        ("v5e:8x8", {"mesh.data": 2}, (2, 32, 1)),
        ("3*v5e:4x4", {}, (3, 16, 1)),
        # On one host, the base is sharded as the engine needs it.
        ("v5e:2x2", {"model.size": "2b", "lora": LoRASettings()}, (1, 1, 4)),
    ],
)
def test_open_axes_of_the_mesh_are_chosen(slice_name, fields, expected):
    assert fitted_to(slice_name, change(RUN, "odd", fields)).mesh.sizes == expected


@pytest.mark.parametrize(
    ("slice_name", "mesh", "words"),
    [
        ("v5e:4x4", (1, 0, 3), "does not divide 16 devices"),
        ("v5e:2x2", (1, 1, 3), "not divide over 3 devices"),
        ("v5e:16x16", (1, 512, 1), "takes 512 of 256 devices"),
        ("v5e:16x16", (1, 128, 1), "several hosts have to use all"),
        ("v5e:16x16", (1, 16, 16), "64 hosts"),
        ("2*v5e:4x4", (1, 32, 1), "2 slices"),
    ],
)
def test_a_mesh_that_does_not_divide_is_refused_in_one_line(slice_name, mesh, words):
    fields: dict[str, int] = dict(zip(AXES, mesh, strict=True))
    with pytest.raises(ValueError, match=f"mesh: {mesh[0]} x .*{words}") as refusal:
        fitted_to(slice_name, change(RUN, "odd", fields))
    assert "\n" not in str(refusal.value)


def test_more_memory_means_less_recomputation():
    order = ("dots", "attention", "full", "offload")
    runs = [fitted_to(name) for name in ("v5p:2x2x4", "v6e:4x4", "v5e:4x4")]
    for phase in ("sft", "rl"):
        policies = [order.index(getattr(run, phase).remat) for run in runs]
        assert policies == sorted(policies)


def test_values_set_by_hand_stay():
    by_hand = {"rl.remat": "full", "rl.microbatch_tokens": 100_000, "engine.cache_tokens": 64_000}
    fitted = fit(change(RUN, "by_hand", by_hand), Topology("v5p:2x2x4").available)
    assert fitted.run.rl is not None
    assert (fitted.run.rl.remat, fitted.run.rl.microbatch_tokens) == ("full", 100_000)
    assert fitted.run.engine.cache_tokens == 64_000
    assert not by_hand.keys() & fitted.chosen.keys()
    tiny = RECIPES["paravt_tiny"]()
    assert fit(tiny, Devices("a wrist watch", 1, 1, 1e6)).run == tiny


def test_a_cold_start_is_estimated_with_the_micro_batches_that_its_rows_allow():
    devices = Topology("v6e:4x4").available
    needs = [
        fit(change(RUN, "by_hand", {"sft.remat": "full", "sft.microbatches": most}), devices).needs
        for most in (1, 2)
    ]
    # 16 rows on 16 devices are one micro-batch.
    assert needs[0] == needs[1]


def test_too_small_a_slice_is_one_line_with_those_that_would_do():
    large = change(RUN, "by_hand", {"engine.cache_tokens": 10**6})
    with pytest.raises(ValueError, match="v5e:4x4: too small for rollouts.*GiB") as refusal:
        fitted_to("v5e:4x4", large)
    named = str(refusal.value).rpartition(": ")[2].split(", ")
    assert named and all(name.startswith("v5p:") for name in named)
    with pytest.raises(ValueError, match="reports no memory.*--mesh.fsdp"):
        fit(RUN, Devices("16 x NPU 3000", 16, 1, None, "npu"))


@pytest.mark.parametrize("name", ["paravt_8b", "paravt_2b_lora", "paravt_8b_lora"])
def test_estimates_are_close_to_what_was_compiled(name):
    """docs/plan-NAME.json: no program needs more than estimated, but for three percent."""
    parts = {"SFT": "cold start", "reference": "PARA-GRPO", "RL": "PARA-GRPO"}
    parts |= dict.fromkeys(("vision", "bank", "prefill", "page", "decode"), "rollouts")
    for plan in json.loads((ROOT / f"docs/plan-{name}.json").read_text()):
        fitted = fit(RECIPES[name](), Topology(plan["topology"]).available)
        for held in plan["together"]:
            part = parts.get(held["program"].split()[0])
            if part is None:
                assert held["program"] == "weight sync"
                continue
            assert held["total"] <= 1.03 * fitted.needs[part], (plan["topology"], held["program"])


@pytest.mark.parametrize("generation", CHIPS)
def test_a_rehearsal_may_have_the_mesh_of_its_run(generation):
    small, real = (run.model.config().text.most_tensor for run in (cut(RUN), RUN))
    for shape in CHIPS[generation].slices:
        devices = Topology(f"{generation}:{shape}").available
        assert choose_mesh(RUN, devices, small) == choose_mesh(RUN, devices, real)


def test_a_gpu_has_all_slots_and_as_many_pages_as_fit():
    run = RECIPES["paravt_2b_lora"]()
    engines = [
        fit(run, Devices("1 x GPU", 1, 1, gib * GIB, "gpu")).run.engine for gib in (12, 16, 20, 72)
    ]
    assert {engine.slots for engine in engines} == {64}
    tokens = [engine.cache_tokens for engine in engines]
    assert tokens == sorted(tokens) and tokens[0] < tokens[1] < tokens[2] == tokens[3]
    large = change(run, "large", {"rl.grpo.group_size": 128})
    assert fit(large, Devices("1 x GPU", 1, 1, 72 * GIB, "gpu")).run.engine.slots == 64


def test_the_command_says_whether_a_recipe_fits_the_devices_here(monkeypatch, capsys):
    assert command.main(["--config=paravt_tiny"]) == 0
    monkeypatch.setitem(ACCELERATOR_FILES, "null", "cuda")
    assert command.main(["--config=paravt_2b_lora"]) == 1
    message = capsys.readouterr().err
    assert "pip install -e '.[cuda]'" in message and "one of v4:2x2x1, v5e:1x1" in message
    monkeypatch.setattr(command, "found_devices", lambda: Devices("T4", 1, 1, 13 * GIB, "gpu"))
    fields = {"platform": "gpu", "device_kind": "T4", "compute_capability": "7.5"}
    monkeypatch.setattr(jax, "local_devices", lambda: [types.SimpleNamespace(**fields)])
    assert command.main(["--config=paravt_2b_lora"]) == 1
    assert "no bfloat16" in capsys.readouterr().err
