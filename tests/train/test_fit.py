"""Sizes are chosen for the devices, within their memory, and values set by hand stay."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import pathlib

import jax
import pytest

from configs import RECIPES
from models import device_memory
from models.device_memory import host_memory
from models.lora import LoRASettings
from models.model import num_params
from models.qwen3_vl.sizes import qwen3_vl
from models.remat import Remat
from paravt_extras.fit import GIB, OPEN_FIELDS, choose_mesh, fit
from paravt_extras.plan.programs import microbatch_sizes
from paravt_extras.rehearsal import cut
from paravt_extras.slices import Devices, Topology, found_devices, known_slices
from train.learn.packing import pack
from train.learn.work import done
from train.settings import Run, change

ROOT = pathlib.Path(__file__).parents[2]
RUN = RECIPES["paravt_8b"]()


def fitted_to(name: str, run: Run = RUN) -> Run:
    return fit(run, Topology(name).available).run


@pytest.mark.parametrize(
    ("wanted", "devices", "rows", "hosts", "expected"),
    [
        ((1, 0, 0), 16, 56, 4, (1, 16, 1)),
        # Eight rows are padding.
        ((1, 0, 0), 64, 56, 16, (1, 64, 1)),
        # More devices than rows: four share each row.
        ((1, 0, 0), 256, 56, 64, (1, 64, 4)),
        ((1, 0, 4), 64, 56, 16, (1, 16, 4)),
        ((1, 8, 0), 64, 56, 1, (1, 8, 8)),
        ((2, 0, 0), 64, 56, 1, (2, 32, 1)),
        ((2, 0, 0), 256, 56, 1, (2, 32, 4)),
        ((1, 0, 0), 4, 2, 1, (1, 2, 2)),
        # More hosts than rows: every host has a row, if only padding.
        ((1, 0, 0), 128, 16, 32, (1, 32, 4)),
        # Eight heads do not divide over 16 devices.
        ((1, 0, 0), 256, 16, 1, (1, 32, 8)),
        # Set by hand: some devices stay idle.
        ((1, 4, 1), 16, 56, 1, (1, 4, 1)),
    ],
)
def test_open_axes_of_the_mesh_are_chosen(wanted, devices, rows, hosts, expected):
    assert choose_mesh(wanted, devices, rows, hosts, most_tensor=8) == expected


def test_axes_that_do_not_divide_the_devices_are_refused():
    with pytest.raises(ValueError, match="mesh: 1 x 0 x 3 .*16 devices"):
        choose_mesh((1, 0, 3), 16, 56, hosts=1, most_tensor=8)


MESH_FIELDS: tuple[str, ...] = ("mesh.data", "mesh.fsdp", "mesh.tensor")
# 256 devices on four hosts, so that each has rows of a batch with any of these meshes.
LARGE = Devices("a slice", 256, 4, 95 * GIB, "tpu")


@pytest.mark.parametrize("mesh", [(1, 256, 1), (1, 16, 16), (2, 4, 32)])
def test_meshes_that_divide_no_width_of_the_tower_or_exceed_kv_heads_are_planned(mesh):
    by_hand = dict(zip(MESH_FIELDS, mesh, strict=True))
    found = fit(change(RUN, "by_hand", by_hand), LARGE).run.mesh
    assert (found.data, found.fsdp, found.tensor) == mesh


@pytest.mark.parametrize(
    ("mesh", "nearest"),
    [
        # 32 heads are too few for 64 devices.
        ((1, 4, 64), "--mesh.data 1 --mesh.fsdp 8 --mesh.tensor 32"),
        # Several hosts use all of their devices.
        ((1, 64, 3), "--mesh.data 1 --mesh.fsdp 64 --mesh.tensor 4"),
        ((1, 96, 1), "--mesh.data 1 --mesh.fsdp 128 --mesh.tensor 2"),
        ((1, 512, 1), "--mesh.data 1 --mesh.fsdp 256 --mesh.tensor 1"),
    ],
)
def test_a_mesh_over_which_the_model_does_not_divide_is_refused_with_the_nearest(mesh, nearest):
    by_hand = dict(zip(MESH_FIELDS, mesh, strict=True))
    run = change(RUN, "by_hand", by_hand)
    with pytest.raises(
        ValueError, match=f"mesh: {mesh[0]} x .*; leave it open, or give the nearest .*: "
    ) as refusal:
        fit(run, LARGE)
    assert "\n" not in str(refusal.value)
    assert str(refusal.value).endswith(nearest)
    numbers = map(int, nearest.split()[1::2])
    remedy = change(run, "remedy", dict(zip(by_hand, numbers, strict=True)))
    assert fit(remedy, LARGE)


def test_a_mesh_that_leaves_hosts_without_rows_is_refused_with_the_nearest():
    run = change(RUN, "by_hand", {"mesh.fsdp": 16, "mesh.tensor": 16})
    with pytest.raises(ValueError, match="mesh: 1 x 16 x 16 .*64 hosts; .*fsdp 64 --mesh.tensor 4"):
        fitted_to("v6e:16x16", run)


def test_a_mesh_is_checked_if_nothing_is_open():
    tiny = change(RECIPES["paravt_tiny"](), "odd", {"mesh.fsdp": 5})
    with pytest.raises(ValueError, match=r"mesh: 1 x 5 x 1 .* --mesh.fsdp 1 "):
        fit(tiny, Devices("a laptop", 5, 1, None))
    with pytest.raises(ValueError, match="1 of 2 devices, .* --mesh.data 1 --mesh.fsdp 2 "):
        fit(RECIPES["paravt_tiny"](), Devices("two laptops", 2, 2, None))
    with pytest.raises(ValueError, match="no mesh of 4 devices works: .*--mesh.fsdp one of 3"):
        fit(RECIPES["paravt_tiny"](), Devices("an uneven cluster", 4, 3, None))


def test_every_slice_gets_a_replica():
    one, two = (fit(RUN, Topology(name).available) for name in ("v5e:4x4", "2*v5e:4x4"))
    assert (two.run.mesh.data, two.run.mesh.fsdp, two.run.mesh.tensor) == (2, 16, 1)
    assert two.chosen["mesh.data"] == 2
    assert "mesh.data" not in one.chosen
    # Each slice has a micro-batch as large as that of one alone, and the visual vectors of all.
    assert two.run.rl is not None and one.run.rl is not None
    assert two.run.rl.microbatch_tokens == 2 * one.run.rl.microbatch_tokens
    assert two.needs["PARA-GRPO"] == pytest.approx(one.needs["PARA-GRPO"], rel=0.01)
    more = change(RUN, "more", {"rl.prompts": 2 * one.run.rl.prompts})
    alone = fit(more, Topology("v5e:4x4").available).needs["PARA-GRPO"]
    vectors = alone - one.needs["PARA-GRPO"]
    both = fit(more, Topology("2*v5e:4x4").available).needs["PARA-GRPO"]
    assert both - two.needs["PARA-GRPO"] == pytest.approx(vectors, rel=0.1)


def test_an_odd_number_of_slices_has_replicas_sharded_like_one():
    found = fit(RUN, Topology("3*v5e:4x4").available).run
    assert (found.mesh.data, found.mesh.fsdp, found.mesh.tensor) == (3, 16, 1)
    assert found.sft is not None and found.sft.remat == "full"


def test_a_command_for_one_slice_gets_a_mesh_for_both():
    by_hand = change(RUN, "by_hand", {"mesh.fsdp": 16, "mesh.tensor": 1})
    with pytest.raises(ValueError, match="2 slices.*--mesh.data 2 --mesh.fsdp 16 --mesh.tensor 1$"):
        fit(by_hand, Topology("2*v5e:4x4").available)


def test_tensor_set_by_hand_for_a_tiny_model_is_planned():
    run = change(RECIPES["paravt_tiny"](), "tiny", {"mesh.tensor": 2, "mesh.fsdp": 0})
    assert fit(run, Topology("v5e:2x4").available).run.mesh.tensor == 2


def test_a_replica_in_several_slices_is_refused():
    run = change(RUN, "by_hand", {"mesh.data": 3})
    with pytest.raises(ValueError, match="mesh: 3 x 0 x 0 .* does not divide 32 devices"):
        fitted_to("2*v5e:4x4", run)
    run = change(fitted_to("2*v5e:4x4"), "by_hand", {"mesh.data": 1, "mesh.fsdp": 32})
    with pytest.raises(ValueError, match="1 x 32 x 1 .*2 slices.*--mesh.data 2 --mesh.fsdp 16 "):
        fit(run, Topology("2*v5e:4x4").available)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RECIPES if name.endswith("_8b")])
def test_a_rehearsal_has_the_mesh_of_its_run_on_every_slice(name):
    run = RECIPES[name]()
    rehearsed = cut(run)
    for topology in known_slices():
        devices = topology.available
        mesh = fit(rehearsed, devices).run.mesh
        assert mesh.data * mesh.fsdp * mesh.tensor == devices.count
        assert mesh.data * mesh.fsdp % devices.hosts == 0, "every host has as many rows"
        try:
            real = fit(run, devices).run.mesh
        except ValueError:  # too small a slice
            continue
        assert (mesh.data, mesh.fsdp, mesh.tensor) == (real.data, real.fsdp, real.tensor)


@pytest.mark.parametrize("name", ["v5e:4x4", "v6e:2x4", "v6e:4x4", "v5p:2x2x1", "v5p:4x4x4"])
def test_nothing_stays_open_and_everything_fits(name):
    found = fit(RUN, Topology(name).available)
    assert set(found.chosen) == set(OPEN_FIELDS)
    assert not fit(found.run, found.devices).chosen
    mesh = found.run.mesh
    assert mesh.data * mesh.fsdp * mesh.tensor == Topology(name).devices
    assert set(found.needs) == {"cold start", "PARA-GRPO", "rollouts", "weight sync"}
    assert found.devices.memory is not None
    assert max(found.needs.values()) <= found.devices.memory
    longest = found.run.engine_sizes.row_lengths[-1]
    assert found.run.engine.cache_tokens >= longest, "a whole rollout has room in the cache"


def test_more_memory_means_less_recomputation_and_larger_micro_batches():
    runs = list(map(fitted_to, ("v5p:2x2x4", "v6e:4x4", "v5e:4x4")))
    order = ("dots", "attention", "full", "offload")
    cold_start = [order.index(run.sft.remat) for run in runs if run.sft]
    assert cold_start == sorted(set(cold_start))
    policies = [order.index(run.rl.remat) for run in runs if run.rl]
    assert policies == sorted(policies)
    tokens = [run.rl.microbatch_tokens for run in runs if run.rl]
    assert tokens == sorted(tokens, reverse=True)


@pytest.mark.parametrize("name", ["v5e:4x4", "v6e:4x4", "v5e:8x8"])
def test_no_other_choice_that_fits_does_less_work(name):
    run = fitted_to(name)
    assert run.rl is not None
    groups = run.rl_shape.at_limits

    def work(remat: Remat, tokens: int) -> float:
        by_hand = {"rl.remat": remat, "rl.microbatch_tokens": tokens}
        packed = pack(groups, microbatch_sizes(change(run, run.name, by_hand)))
        return done(packed, groups, qwen3_vl("8b"), remat, run.mesh.fsdp)

    least = work(run.rl.remat, run.rl.microbatch_tokens)
    policies: tuple[Remat, ...] = ("dots", "attention", "full")
    for remat, tokens in itertools.product(policies, (14_336, 71_680, 106_496, 147_456)):
        by_hand = {"rl.remat": remat, "rl.microbatch_tokens": tokens}
        try:
            fitted_to(name, change(RUN, RUN.name, by_hand))
        except ValueError:
            continue
        assert work(remat, tokens) >= 0.999 * least, (remat, tokens)


def test_a_micro_batch_never_has_less_room_than_a_trajectory_nor_more_than_a_step():
    for name in ("v5e:4x4", "v6e:2x4", "v5p:2x2x1", "v5p:2x2x4", "v5p:4x4x4"):
        run = fitted_to(name)
        assert run.rl is not None
        assert run.rl_shape.trajectory <= run.rl.microbatch_tokens <= run.rl_shape.tokens


def test_values_set_by_hand_stay():
    by_hand = {
        "rl.remat": "full",
        "rl.microbatch_tokens": 100_000,
        "engine.cache_tokens": 64_000,
    }
    found = fit(change(RUN, "by_hand", by_hand), Topology("v5p:2x2x4").available)
    assert found.run.rl is not None
    assert (found.run.rl.remat, found.run.rl.microbatch_tokens) == ("full", 100_000)
    assert found.run.engine.cache_tokens == 64_000
    assert not by_hand.keys() & found.chosen.keys()


def test_a_run_without_open_fields_is_not_touched():
    run = RECIPES["paravt_tiny"]()
    found = fit(run, Devices("a wrist watch", 1, 1, 1e6))
    assert found.run == run
    assert not found.needs


@pytest.mark.slow
def test_too_small_a_slice_is_one_line_with_those_that_would_do():
    with pytest.raises(ValueError, match=r"devices = v5e:2x4: .*GiB") as refusal:
        fitted_to("v5e:2x4")
    assert "\n" not in str(refusal.value)
    named = str(refusal.value).rpartition(": ")[2].split(", ")
    assert {name.partition(":")[0] for name in named} == {"v4", "v5e", "v5p", "v6e"}
    for name in named:
        fitted_to(name)
        smaller = [
            slice.name
            for slice in known_slices()
            if slice.chip == Topology(name).chip and slice.chips < Topology(name).chips
        ]
        for other in smaller:
            with pytest.raises(ValueError, match=other):
                fitted_to(other)


def test_a_cache_set_by_hand_that_does_not_fit_is_refused():
    run = change(RUN, "by_hand", {"engine.cache_tokens": 10**6})
    with pytest.raises(ValueError, match="too small for rollouts"):
        fitted_to("v5e:4x4", run)


@pytest.mark.parametrize(
    "name", ["paravt_8b", "paravt_2b_lora", "paravt_4b_lora", "paravt_8b_lora"]
)
def test_estimates_are_close_to_what_was_compiled(name):
    """docs/plan-NAME.json: no program needs more than estimated, but for three percent."""
    plans = json.loads((ROOT / f"docs/plan-{name}.json").read_text())
    assert plans
    parts = {
        "SFT": "cold start",
        "reference": "PARA-GRPO",
        "RL": "PARA-GRPO",
        "vision": "rollouts",
        "bank": "rollouts",
        "prefill": "rollouts",
        "page": "rollouts",
        "decode": "rollouts",
        "weight": "weight sync",
    }
    for plan in plans:
        found = fit(RECIPES[name](), Topology(plan["topology"]).available)
        assert found.chosen == plan["chosen"], plan["topology"]
        largest = dict.fromkeys(found.needs, 0.0)
        for held in plan["together"]:
            part = parts[held["program"].split()[0]]
            largest[part] = max(largest[part], held["total"])
        for part, total in largest.items():
            assert total <= 1.03 * found.needs[part], (plan["topology"], part)
            assert total <= Topology(plan["topology"]).chip.hbm
        # Nor does it need much less, where rows are not split over `tensor`.
        if found.run.mesh.tensor == 1:
            assert largest["PARA-GRPO"] >= 0.95 * found.needs["PARA-GRPO"], plan["topology"]


def test_the_devices_of_a_laptop():
    found = found_devices()
    assert (found.count, found.hosts) == (jax.device_count(), 1)
    assert found.memory is not None and GIB / 4 < found.memory < 4096 * GIB
    assert "cpu" in found.name


def test_the_memory_of_a_host_is_at_most_its_physical_memory():
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < host_memory() <= physical


@pytest.mark.parametrize(("limit", "expected"), [("4096\n", 4096), ("max\n", None)])
def test_a_container_lowers_the_memory_of_a_host(limit, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(
        device_memory, "MEMORY_LIMITS", (tmp_path / "none", tmp_path / "memory.max")
    )
    physical = host_memory()
    (tmp_path / "memory.max").write_text(limit)
    assert host_memory() == (expected or physical)


def test_an_unknown_device_names_the_fields_to_set(monkeypatch):
    class Strange:
        platform = "npu"
        device_kind = "NPU 3000"

        def memory_stats(self) -> None:
            return None

    monkeypatch.setattr(jax, "local_devices", lambda: [Strange()])
    unknown = dataclasses.replace(found_devices(), count=16)
    assert unknown.memory is None
    with pytest.raises(ValueError, match="NPU 3000: .*--mesh.fsdp") as refusal:
        fit(RUN, unknown)
    # The remedy works: all fields that it names, with the values of another device.
    flags = str(refusal.value).partition("set ")[2].split(", ")
    names = [flag.removeprefix("--").replace("-", "_") for flag in flags]
    chosen = fit(RUN, Topology("v5e:4x4").available).chosen
    by_hand = change(RUN, "by_hand", {name: chosen[name] for name in names})
    assert fit(by_hand, unknown).run == by_hand


def test_a_recipe_that_leaves_nothing_open_needs_no_known_memory():
    run = RECIPES["paravt_tiny"]()
    assert fit(run, Devices("1 x NPU 3000", 1, 1, None)).run == run


# --- adapters ---


def adapted(size: str) -> Run:
    return change(RUN, f"{size}_lora", {"model.size": size, "lora": LoRASettings()})


def test_one_chip_trains_adapters_of_a_model_that_it_cannot_train_as_a_whole():
    found = fit(adapted("2b"), Topology("v5e:1x1").available)
    assert max(found.needs.values()) < 15.5 * GIB
    with pytest.raises(ValueError, match="v5e:1x1: too small"):
        fit(change(RUN, "2b", {"model.size": "2b"}), Topology("v5e:1x1").available)


def test_on_one_host_the_base_is_sharded_as_the_engine_needs_it():
    mesh = fitted_to("v5e:2x2", adapted("2b")).mesh
    assert (mesh.data, mesh.fsdp, mesh.tensor) == (1, 1, 4)
    # On several hosts, samplers have the base of their own.
    assert fitted_to("v5e:4x4", adapted("2b")).mesh.fsdp == 16


def test_a_base_of_the_engine_is_counted_where_its_shards_differ():
    devices = Topology("v5e:2x2").available
    run = change(adapted("2b"), "cache", {"engine.cache_tokens": 65_536})
    shared = fit(run, devices).needs["rollouts"]
    own = {"mesh.fsdp": 4, "mesh.tensor": 1}
    apart = fit(change(run, "apart", own), devices).needs["rollouts"]
    decoder = num_params(qwen3_vl("2b")) * 2 / 4
    assert 0.7 * decoder < apart - shared < decoder


# --- GPUs: what a run may take is what JAX reports, and decoding copies pages ---


def gpu(gib: float) -> Devices:
    return Devices("1 x NVIDIA GPU", 1, 1, gib * GIB)


@pytest.mark.parametrize("name", ["L4", "RTX 4090"])
def test_adapters_of_the_smallest_model_fit_a_gpu_of_24_gb(name):
    # 90 % of 22.5 and of 24 GiB: the share that `models.gpu` reserves.
    devices = gpu({"L4": 20.2, "RTX 4090": 21.5}[name])
    found = fit(RECIPES["paravt_2b_lora"](), devices)
    assert devices.memory is not None
    assert max(found.needs.values()) <= 0.97 * devices.memory
    engine = found.run.engine_sizes
    # Copies of what 64 slots read would take 21 GiB.
    assert engine.slots == 16
    shape = found.run.rl_shape
    of_all_slots = 4 * shape.limits.prompt + 16 * shape.limits.response
    assert found.run.engine.cache_tokens > of_all_slots


def test_decoding_on_copies_needs_more_than_on_pages():
    run = change(adapted("2b"), "2b", {"engine.slots": 16, "engine.cache_tokens": 16_384})
    needs = {}
    for paged in (False, True):
        by_hand = change(run, "2b", {"engine.paged": paged})
        needs[paged] = fit(by_hand, gpu(72)).needs["rollouts"]
    text = qwen3_vl("2b").text
    token = 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim * 2
    assert needs[False] - needs[True] > run.engine.read_tokens * token


def test_fewer_slots_on_a_smaller_gpu():
    run = RECIPES["paravt_2b_lora"]()
    slots = [fit(run, gpu(gib)).run.engine.slots for gib in (14, 21.5, 36, 72)]
    assert slots == sorted(slots) and slots[0] == 8 and slots[-1] == 64
    with pytest.raises(ValueError, match="1 x NVIDIA GPU: too small for .* of 7.0 GiB"):
        fit(run, gpu(7))
