"""The plan: slices, meshes, sums, messages; and, where libtpu is installed, compiled programs."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks.lengths import drawn, file_of
from configs import RECIPES
from models.flops import flops_per_token
from models.lora import LoRASettings, split
from models.model import abstract_model
from models.qwen3_vl.sizes import qwen3_vl
from paravt_extras.fit import fit
from paravt_extras.meshes import sharded_bytes
from paravt_extras.plan import cache, rates, step
from paravt_extras.plan import command as plan
from paravt_extras.plan.abstract import planned_model
from paravt_extras.plan.compile import (
    SIZES,
    Case,
    Measured,
    compile_case,
    memory_shortage,
)
from paravt_extras.plan.flops import count_flops
from paravt_extras.plan.programs import Plan, microbatch_sizes, planned_config, program_names
from paravt_extras.plan.rollouts import Row
from paravt_extras.plan.workload import Rollout, at_limits
from paravt_extras.slices import CHIPS, SCALE, Topology
from rollout.engine import runner
from rollout.engine.programs import Drawn
from tests.train.small import small
from train.learn.work import visible_pairs, worth
from train.settings import change

ROOT = pathlib.Path(__file__).parents[2]
GIB = 2.0**30
V5E, V5P = Topology("v5e:4x4"), Topology("v5p:2x2x4")
BY_HAND = {
    "mesh.fsdp": 16,
    "mesh.tensor": 1,
    "engine.slots": 64,
    "engine.cache_tokens": 143_360,
    "sft.microbatches": 4,
    "sft.remat": "full",
    "rl.microbatch_tokens": 17_664,
    "rl.remat": "full",
}
RUN = change(RECIPES["paravt_8b"](), "paravt_8b", BY_HAND)
assert RUN.rl is not None
RL = RUN.rl
RESIDENTS = {
    "weights": 2 * GIB,
    "moments": 4 * GIB,
    "engine's weights": 4 * GIB,
    "KV pool": 3 * GIB,
    "vision tower": GIB,
    "batch": GIB / 4,
}
ALL = {
    "all state": 96 * GIB,
    "all batch": 8 * GIB,
    "all reference": 16 * GIB,
    "all pieces": GIB,
    "all tower": 2 * GIB,
}
SIZE = Measured(SIZES, sizes=RESIDENTS | ALL)


def paged(pages: int) -> Any:
    """The recipe with another number of pages."""
    return dataclasses.replace(RUN, engine=dataclasses.replace(RUN.engine, cache_tokens=64 * pages))


def test_slices_by_name():
    expected = {
        "v4:2x2x4": (16, 32, 4, "v4:2x2x1"),
        "v5e:4x4": (16, 16, 4, "v5e:2x2"),
        "v5p:4x4x4": (64, 64, 16, "v5p:2x2x1"),
        "v6e:2x2": (4, 4, 1, "v6e:2x2"),
        "v5e:1x1": (1, 1, 1, "v5e:1x1"),
        "2*v5e:4x4": (32, 32, 8, "v5e:2x2"),
        "12*v5p:2x2x1": (48, 48, 12, "v5p:2x2x1"),
    }
    for name, counts in expected.items():
        t = Topology(name)
        assert (t.chips, t.devices, t.hosts, t.host.name) == counts
        assert t.available.slices == t.slices == int(name.partition("*")[0] if "*" in name else 1)
    assert {Topology(name).name.split(":")[0] for name in SCALE} == set(CHIPS)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v9:2x2", "GENERATION:SHAPE"),
        ("v5e", "GENERATION:SHAPE"),
        ("v5e:4x0", "GENERATION:SHAPE"),
        ("v5e:2x2x2", "2 sides; .* v5e:4x4"),
        ("v5p:4x4", "3 sides; .* v5p:4x4x4"),
        ("v6e:1x3", "3 chips"),
        ("v5p:1x1x1", "1 chips"),
        ("1*v5e:4x4", "not a number of slices; give one such as 2"),
        ("two*v5e:4x4", "not a number of slices; give one such as 2"),
        ("4*v5e:1x1", "1 chips"),
        ("2*v4:2x2x2", "rate between slices of v4 is not documented"),
    ],
)
def test_other_names_are_refused(name, message):
    with pytest.raises(ValueError, match=f"topology = '{re.escape(name)}': .*{message}"):
        Topology(name)


def test_residents_beside_a_program():
    decode = Measured("decode", peak=8 * GIB, given=("engine's weights", "KV pool"))
    found = step.held_together(decode, RESIDENTS)
    assert found.others == {"weights": 2 * GIB, "moments": 4 * GIB, "vision tower": GIB}
    assert found.total == 15 * GIB
    # The engine sleeps from the update until it has new weights: nothing of it is on the device.
    update = Measured("RL update", peak=9 * GIB, given=("weights", "batch"))
    assert step.held_together(update, RESIDENTS).total == 14 * GIB
    optimizer = Measured("RL optimizer", peak=9 * GIB, given=("weights", "moments"))
    assert step.held_together(optimizer, RESIDENTS).others == {
        "vision tower": GIB,
        "batch": GIB / 4,
    }
    sync = Measured("weight sync", peak=7 * GIB, given=("weights",))
    assert step.held_together(sync, RESIDENTS).others == {
        "moments": 4 * GIB,
        "vision tower": GIB,
        "batch": GIB / 4,
    }


def test_the_slowest_of_arithmetic_memory_and_interconnect_is_the_limit():
    """Per chip, v5e has 197 TFLOP/s, 819 GB/s to HBM and 200 GB/s to neighbours."""
    measured = Measured(
        "RL update",
        devices=16,
        flops=16 * 197e12,
        read=3 * 819e9,
        sent={"all-gather": 100e9, "all-reduce": 300e9},
    )
    found = step.phase_of(measured, 2, V5E)
    assert found.compute == pytest.approx(2)
    assert found.memory == pytest.approx(6)
    assert found.interconnect == pytest.approx(4)
    assert found.seconds == pytest.approx(6)
    assert found.expected == pytest.approx(6 / rates.EXPECTED_HBM)
    # A device of v4 is half a chip.
    whole_chip = Measured("RL update", devices=2, flops=275e12)
    found = step.phase_of(whole_chip, 1, Topology("v4:2x2x1"))
    assert found.seconds == pytest.approx(1)
    assert found.expected == pytest.approx(1 / rates.EXPECTED_HFU)


def test_the_optimizer_waits_for_other_slices():
    """A chip of v5e sends 25 Gbit/s to other slices."""
    sent = {"all-reduce": 200e9, "DCN": 25e9 / 8}
    measured = Measured("RL optimizer", devices=32, read=2 * 819e9, sent=sent)
    found = step.phase_of(measured, 1, Topology("2*v5e:4x4"))
    assert found.interconnect == pytest.approx(2)
    assert found.seconds == pytest.approx(3)


def test_a_program_of_a_host_waits_for_its_collectives_on_half_of_the_links():
    measured = Measured("prefill 128", devices=4, read=819e9, sent={"all-reduce": 200e9})
    found = step.phase_of(measured, 1, V5E)
    assert found.interconnect == pytest.approx(2)
    assert found.seconds == pytest.approx(3)


def test_rollouts_without_pages_wait():
    """Two prompts of 80 pages, and 16 rollouts of 128 pages and one for the prompt's last page."""
    assert step.rollouts_at_once(paged(2224), V5E) == (16, 16, 2224)
    assert step.rollouts_at_once(paged(2223), V5E) == (16, 15, 2224)
    few = paged(1280)
    assert step.rollouts_at_once(few, V5E) == (16, 8, 2224)
    (found,) = step.pages_advice(few, V5E, 20 * GIB, 2**21)
    assert "engine.cache_tokens = 81920: of a host's 16 rollouts" in found
    assert "8 run at once. 142336 would hold 16, and 20.00 GiB are free" in found
    assert not step.pages_advice(few, V5E, GIB, 2**21), "too little memory is free"
    assert not step.pages_advice(paged(2224), V5E, 20 * GIB, 2**21), "all run at once already"


MEASURED = {
    "vision": Measured("vision", devices=1, flops=1e12),
    "prefill 5120": Measured("prefill 5120", devices=4, sent={"all-reduce": 5120 * 1e6}),
    "decode 13312": Measured("decode 13312", devices=4, sent={"all-reduce": 32 * 50e6}),
}
ENGINE = {"engine's weights": 4e9, "KV pool": 2225 * 64 * 36e3}


def rows_of(*contexts: int) -> list[Row]:
    """Rows that share nothing."""
    return [Row(context, 0, number) for number, context in enumerate(contexts)]


def test_decoding_reads_weights_blocks_of_tokens_and_a_block_for_each_empty_row():
    run = paged(2224)
    token = step.engine_costs(run, MEASURED, ENGINE, rates.peak(V5E)).token
    # 64 slots: two rows with one block and a half each, and 62 without a sequence.
    cost = token(rows_of(700, 768))
    assert cost.memory == pytest.approx((4e9 + (2 * 2 + 62) * 512 * 36e3) / 819e9)
    # Two of four links of a chip lead to the other chips of its host.
    assert cost.synchronous == pytest.approx(50e6 / 100e9)
    assert cost.seconds == pytest.approx(cost.memory + cost.synchronous)
    likely = step.engine_costs(run, MEASURED, ENGINE, rates.expected(V5E)).token(rows_of(700, 768))
    assert likely.memory == pytest.approx(cost.memory / rates.EXPECTED_HBM)
    assert likely.compute == pytest.approx(cost.compute / rates.EXPECTED_HFU)


def test_phases_of_rollouts_at_their_limits():
    """Each of four hosts has 14 rollouts of 8192 tokens, of three prompts of 64 frames at most."""
    run = paged(2224)
    found = step.rollout_phases(run, V5E, MEASURED, ENGINE, at_limits(run))
    assert [(phase.phase, phase.calls) for phase in found] == [
        ("vision", 3),
        ("prefill", 3),
        ("decode", 256),
    ]
    vision, prefill, decode = found
    assert vision.compute == pytest.approx(12 * 1e12 / 197e12)
    assert prefill.interconnect == pytest.approx(3 * 5120 * 1e6 / 100e9)
    token = step.engine_costs(run, MEASURED, ENGINE, rates.peak(V5E)).token
    assert decode.seconds == pytest.approx(
        8192 * token(rows_of(*[5120 + 4096] * 14)).seconds, rel=0.02
    )
    # Half of the rollouts wait for the pages of the others.
    few = step.rollout_phases(paged(1280), V5E, MEASURED, ENGINE, at_limits(run))
    assert few[-1].calls == 2 * 256


def test_sub_agents_tools_and_the_tail_take_time_with_committed_lengths():
    run = paged(2224)
    workload = drawn("paravt_8b")
    found = {
        phase.phase: phase for phase in step.rollout_phases(run, V5E, MEASURED, ENGINE, workload)
    }
    assert found["tools"].seconds == found["tools"].expected > 1.2
    assert 0.1 < found["tail"].expected / found["decode"].expected < 0.9
    silent = dataclasses.replace(
        workload,
        steps=tuple(
            tuple(
                dataclasses.replace(
                    group, rollouts=tuple(Rollout(rollout.response) for rollout in group.rollouts)
                )
                for group in one
            )
            for one in workload.steps
        ),
    )
    quiet = {
        phase.phase: phase for phase in step.rollout_phases(run, V5E, MEASURED, ENGINE, silent)
    }
    assert "tools" not in quiet
    assert quiet["prefill"].seconds < found["prefill"].seconds
    assert quiet["vision"].seconds < found["vision"].seconds


def test_tokens_of_a_step():
    rl = dataclasses.replace(RL, subagents_per_rollout=16 / 56)
    main_agents = 7 * (5120 + 8 * 8192)
    sub_agents = 16 * (1008 + 513)
    assert step.tokens_of(dataclasses.replace(RUN, rl=rl)) == main_agents + sub_agents
    assert step.tokens_of(RECIPES["sft_8b"]()) == 16 * 8192


def test_calls_of_training_in_a_step():
    """A rollout and its prompt have 13,312 tokens, and a further rollout has 8,192."""

    def calls(most: int) -> dict[str, float]:
        run = change(RUN, "paravt_8b", {"rl.microbatch_tokens": most})
        return step.learner_calls(run, at_limits(run))

    # One of 56 rollouts per micro-batch, two, and a whole group.
    for most, parts in ((14_336, 56), (22_528, 28), (71_680, 7)):
        assert calls(most) == {
            f"reference {most}": parts,
            f"RL update {most}": parts,
            "RL optimizer": 1,
            "weight sync": 1,
        }
    assert step.learner_calls(RECIPES["sft_8b"](), None) == {"SFT update": 1}
    # The reference is computed once, however many updates a step makes.
    run = change(RUN, "twice", {"rl.microbatch_tokens": 71_680, "rl.updates_per_batch": 2})
    twice = step.learner_calls(run, at_limits(run))
    assert twice == {
        "reference 71680": 7,
        "RL update 71680": 7,
        "RL update 71680 later": 7,
        "RL optimizer": 2,
        "weight sync": 1,
    }


def test_micro_batches_are_chosen_by_the_lengths_of_each_step():
    run = change(RUN, "paravt_8b", {"rl.microbatch_tokens": 71_680})
    workload = drawn("paravt_8b")
    calls = step.learner_calls(run, workload)
    assert calls["RL update 71680"] == 1
    halved = change(RUN, "paravt_8b", {"rl.microbatch_tokens": 65_536})
    calls = step.learner_calls(halved, workload)
    assert len([name for name in calls if name.startswith("RL update")]) > 1
    tokens = sum(int(name.split()[-1]) * n for name, n in calls.items() if name[:5] == "RL up")
    assert workload.tokens < tokens < 1.25 * workload.tokens


def test_attention_of_packed_rows_follows_the_lengths():
    """A call has the pairs of an average row of its size; a size that is not used has none."""
    run = change(RUN, "paravt_8b", {"rl.microbatch_tokens": 71_680})
    names = ("RL update 71680", "RL update 36864", "reference 71680", "decode 13312")
    per_pair = {"RL update 71680": 9.0, "RL update 36864": 9.0, "reference 71680": 2.0}
    measured = {name: Measured(name, flops=1e9, pair_flops=per_pair.get(name, 0)) for name in names}
    found = {}
    for workload in (drawn("paravt_8b"), at_limits(run)):
        flops = [m.flops - 1e9 for m in step.with_attention(run, measured, workload).values()]
        assert flops[1] == flops[3] == 0
        assert flops[0] == pytest.approx(9 / 2 * flops[2])
        found[workload.source[:5]] = flops[2] / 2
    groups = run.rl_shape.at_limits
    (prompt, suffixes), *_ = groups
    pairs = visible_pairs(prompt, suffixes)
    # A group in a row: tiles along the diagonal are half empty, and the last one is padding.
    assert pairs < found["every"] < 1.05 * pairs
    assert found["every"] > 2 * found["8 dra"]
    assert step.with_attention(run, measured, None) == measured


@pytest.mark.parametrize("replicas", [1, 2])
def test_memory_of_a_host(replicas):
    arrays = {name.removeprefix("all "): size for name, size in ALL.items()}
    found = step.host_memory(RUN, V5E, arrays | {"offloaded": 40 * GIB}, replicas)
    gib = [size / GIB for size in found.values()]
    assert gib == [4, 2, 24, 4 * replicas, 2, 1, 10]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("total memory required (17.43G) exceeds available HBM (15.75G).", 17.43 * GIB),
        (
            "the total memory required for HLO temporaries (18.00G) exceeds available HBM (15.75G)",
            18 * GIB + 4096,
        ),
        ("required (512.00M) exceeds available HBM (256.00M)", GIB / 2),
    ],
)
def test_a_lack_of_memory_is_a_result(message, expected):
    arguments = (jax.ShapeDtypeStruct((1024,), jnp.float32),)
    found = memory_shortage(message, arguments)
    assert found["peak"] == pytest.approx(expected)
    assert found["error"].startswith("out of memory")


def test_another_error_of_the_compiler_is_raised():
    with pytest.raises(RuntimeError, match="E1001"):
        memory_shortage("E1001: a tile is too large", ())


def fake(peaks: dict[str, float], errors: dict[str, str] | None = None):
    """A compiler with given results, and the list of (slice, program) that it was called with."""
    asked: list[tuple[str, str]] = []

    def compiled(case: Case, timeout: float) -> Measured:
        error = (errors or {}).get(case.program, "")
        asked.append((case.topology.name, case.program))
        if case.program == SIZES:
            return SIZE
        peak = peaks.get(case.program, GIB)
        given = {
            "decode 13312": ("engine's weights", "KV pool"),
            "reference": ("batch",),
            "RL update": ("weights", "batch"),
            "RL optimizer": ("weights", "moments"),
            "weight sync": ("weights",),
        }
        return Measured(
            case.program,
            error=error,
            seconds=1.0,
            devices=16,
            arguments=peak / 2,
            temporary=peak / 2,
            peak=peak,
            flops=32e15,
            read=1e9,
            sent={"all-gather": 1e9},
            given=given.get(case.program, given.get(case.program.rpartition(" ")[0], ())),
            largest=("3.0GiB f32[1,2]",),
        )

    return compiled, asked


@pytest.fixture
def command(monkeypatch, capsys):
    """Calls the command with a fake compiler: (exit code, output, calls of the compiler)."""

    def call(*argv: str, peaks=None, errors=None):
        compiled, asked = fake(peaks or {}, errors)
        monkeypatch.setattr(plan, "compile_case", compiled)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
        code = plan.main(["--config=paravt_8b", *argv])
        return code, capsys.readouterr(), asked

    return call


def test_a_plan_that_fits(command, tmp_path):
    code, printed, asked = command("--topology=v5p:2x2x4", "--json", str(tmp_path / "plan.json"))
    (found,) = json.loads((tmp_path / "plan.json").read_text())
    assert code == 0
    assert found["fits"]
    assert found["complete"]
    assert found["mesh"] == [1, 16, 1]
    assert not found["advice"]
    fitted = fit(RECIPES["paravt_8b"](), V5P.available).run
    assert [name for _, name in asked] == [SIZES, *program_names(fitted)]
    assert "**fits**. 16 chips, 16 devices of 95.73 GiB, 4 hosts" in printed.out
    assert "mesh data x fsdp x tensor = 1 x 16 x 1" in printed.out
    assert found["tokens"] == 7 * (5120 + 8 * 8192)
    update = next(phase for phase in found["phases"] if phase["phase"] == "RL update 71680")
    assert update["calls"] == 7
    assert update["seconds"] == pytest.approx(update["calls"] * 32e15 / 16 / 459e12)
    for name, column in (("step_seconds", "seconds"), ("expected_seconds", "expected")):
        total = sum(phase[column] for phase in found["phases"] if phase["phase"] != "tail")
        assert found[name] == pytest.approx(total)
    assert update["expected"] == pytest.approx(2 * update["seconds"])
    assert "Expected: at 50% of the peak FLOP/s (HFU) and 85% of the HBM" in printed.out
    assert "every sequence at its limit: prompts of 5120 tokens, responses of 8192" in printed.out
    vision = next(held for held in found["together"] if held["program"] == "vision")
    # Its own GiB and all residents but the batch of a quarter.
    assert vision["total"] == GIB * 3 / 4 + sum(RESIDENTS.values())


def test_the_work_of_an_update(command, tmp_path):
    _, printed, _ = command("--topology=v5p:2x2x4", "--json", str(tmp_path / "plan.json"))
    (found,) = json.loads((tmp_path / "plan.json").read_text())
    run = fit(RECIPES["paravt_8b"](), V5P.available).run
    groups = run.rl_shape.at_limits
    work = found["work"]
    assert run.rl is not None and found["remat"] == run.rl.remat == "dots"
    assert work["worth"] == pytest.approx(worth(groups, qwen3_vl("8b"), "dots"))
    # Each of 7 micro-batches is in a program of the reference and in one of the update.
    assert work["compiled"] == 2 * 7 * 32e15
    line = next(line for line in printed.out.splitlines() if "rl.remat dots: worth" in line)
    assert "(8 N D and attention" in line
    assert f"PFLOP, {work['done'] / work['worth']:.2f} times that worth; in whole" in line


def test_a_plan_with_lengths_is_faster(command, tmp_path):
    file = tmp_path / "plan.json"
    arguments = ("--topology=v5p:2x2x4", "--json", str(file))
    _, printed, _ = command(*arguments, "--lengths", str(file_of("paravt_8b")))
    (typical,) = json.loads(file.read_text())
    assert f"8 drawn steps of paravt_8b ({file_of('paravt_8b')}): prompts of 2" in printed.out
    assert re.search(r"^\| of decode, the tail +\|", printed.out, re.M)
    assert re.search(r"^\| tools \(the engine waits\) +\| \d+ +(\| - +){3}\| \d", printed.out, re.M)
    command(*arguments)
    (limits,) = json.loads(file.read_text())
    seconds = {
        plan["lengths"][:5]: sum(p["expected"] for p in plan["phases"] if p["phase"] == "decode")
        for plan in (typical, limits)
    }
    assert 3 * seconds["8 dra"] < seconds["every"]
    assert typical["tokens"] < limits["tokens"] / 5


def test_a_run_without_episodes_has_two_programs():
    assert program_names(RECIPES["sft_8b"]()) == ("vision", "SFT update")


def test_a_plan_that_does_not_fit_says_why_and_what_to_change(command):
    peaks = {"RL update 71680": 11 * GIB, "decode 13312": 9 * GIB}
    code, printed, _ = command("--topology=v5e:4x4", peaks=peaks)
    tokens = fit(RECIPES["paravt_8b"](), V5E.available).run.engine.cache_tokens
    assert code == 1
    for words in (
        "**does not fit**",
        "RL update 71680: 0.25 GiB too much. Held: the program 11.00, moments 4.00, vision tower",
        "decode 13312: 0.25 GiB too much. Held: the program 9.00, moments 4.00, weights 2.00",
        f"engine.cache_tokens = {tokens}: {tokens // 2} would free 1.50 GiB",
        "rl.logprob_chunk = 512: 128 ",
        "largest temporaries are 3.0GiB f32[1,2]",
    ):
        assert words in printed.out


def test_a_step_of_the_optimizer_that_does_not_fit_has_remedies_of_its_own(command):
    peaks = {"RL optimizer": 16 * GIB}
    mesh = ("--mesh.data=2", "--mesh.fsdp=8", "--mesh.tensor=1")
    replicated = command("--topology=v6e:4x4", *mesh, peaks=peaks | {"RL optimizer": 40 * GIB})
    sharded = command("--topology=v5e:4x4", peaks=peaks)
    for code, printed, _ in (replicated, sharded):
        assert code == 1
        assert "'muon', another method, keeps one moment" in printed.out
        assert "rl.microbatch_tokens" not in printed.out.partition("too much")[2]
    assert "mesh.data = 2: with 1 and a larger mesh.fsdp" in replicated[1].out
    assert "mesh.data" not in sharded[1].out


def test_a_program_that_was_not_compiled_is_named(command):
    code, printed, _ = command(
        "--topology=v5p:2x2x4",
        peaks={"reference 71680": 0.0},
        errors={"reference 71680": "not compiled within 5 s"},
    )
    assert code == 1
    assert "- reference 71680: not compiled within 5 s" in printed.out
    assert "v5p:2x2x4: **not known, not compiled: reference 71680**" in printed.out


def test_a_part_of_the_programs_has_no_step_time(command):
    code, printed, _ = command("--topology=v5p:2x2x4", "--only=decode 13312,reference 71680")
    assert code == 0
    assert "**fits, as far as compiled (decode 13312, reference 71680)**" in printed.out
    assert "| step" not in printed.out


@pytest.mark.slow
def test_programs_of_a_host_are_compiled_once_per_generation(command):
    # Slices differ in the engine that is chosen for them, unless it is set by hand.
    engine = ("--engine.slots=16", "--engine.cache-tokens=64000")
    code, printed, asked = command("--topology=all", *engine)
    names = [name for _, name in asked]
    assert code == 0
    assert len(asked) == len(set(asked))
    assert names.count("decode 13312") == len(CHIPS)
    assert sum(name.startswith("RL optimizer") for name in names) == len(SCALE)
    for name in SCALE:
        assert re.search(rf"^\| {re.escape(name)} ", printed.out, re.M)


def test_several_slices_are_planned_together(command):
    code, printed, asked = command("--topology=v5e:4x4,v5p:2x2x4", "--only=decode")
    assert code == 0
    assert {name for name, _ in asked} == {"v5e:4x4", "v5p:2x2x4"}
    assert {program.split()[0] for _, program in asked} == {SIZES, "decode"}
    assert re.findall(r"^\| (v\S+) ", printed.out, re.M) == ["v5e:4x4", "v5p:2x2x4"]


@pytest.mark.slow
def test_a_stopped_plan_can_be_resumed(command, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "compiler_fingerprint", lambda: "one")
    tokens = "--rl.microbatch-tokens=71680"
    keep = ("--topology=v5p:2x2x4", tokens, "--keep", str(tmp_path / "kept"))
    planned = program_names(fit(RECIPES["paravt_8b"](), V5P.available).run)
    peaks = {"reference 71680": 0.0, "decode 13312": 99 * GIB}
    errors = {"reference 71680": "not compiled within 5 s", "decode 13312": "out of memory"}
    _, first, asked = command(*keep, peaks=peaks, errors=errors)
    assert len(asked) == 1 + len(planned)
    assert "compiled before" not in first.err
    # A timeout is tried again; a lack of memory is a result.
    _, second, asked = command(*keep)
    assert [name for _, name in asked] == ["reference 71680"]
    assert "v5p:2x2x4, decode 13312: out of memory, compiled before" in second.err
    assert "decode 13312: 10.27 GiB too much" in second.out
    assert command(*keep)[1].out == second.out
    for changed in (("--rl.logprob-chunk", "256"), ("--rl.remat", "full")):
        assert len(command(*keep, *changed)[2]) == 1 + len(planned)
    monkeypatch.setattr(cache, "compiler_fingerprint", lambda: "other code")
    assert len(command(*keep)[2]) == 1 + len(planned)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "--topology"),
        (("--topology=v7:2x2",), "GENERATION:SHAPE"),
        (("--topology=v5e:4x4", "--mesh.fsdp=8", "--mesh.tensor=1"), "mesh: (1, 8, 1)"),
        (("--topology=v5e:2x2",), "devices = v5e:2x2: too small for the cold start"),
        (("--topology=v5e:4x4", "--keep=/proc/kept"), "--keep /proc/kept"),
        (("--topology=v5e:4x4", "--jobs=0"), "--jobs 0"),
        (("--topology=v5e:4x4", "--json=/nowhere/plan.json"), "--json /nowhere/plan.json"),
        (("--topology=v5e:4x4", "--only=decode,dcode"), "--only: dcode"),
        (("--topology=v5e:4x4", "--lengths=/nowhere.json"), "--lengths /nowhere.json"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_compiled(command, argv, message):
    code, printed, asked = command(*argv)
    assert code == 2
    assert printed.err.startswith("error: ")
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert not asked


def test_a_missing_compiler_is_one_line_with_its_remedy(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert plan.main(["--config=paravt_8b", "--topology=v5e:4x4"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "libtpu" in error
    assert "pip install" in error


# --- the programs ---


@pytest.fixture(scope="module")
def tiny_plan() -> Plan:
    run = small()
    run = dataclasses.replace(run, engine=dataclasses.replace(run.engine, paged=True))
    return Plan(run, jax.devices()[:1], jax.devices()[:1], (1, 1, 1))


def shapes(tree: Any) -> list[tuple[tuple[int, ...], str]]:
    return [(x.shape, str(x.dtype)) for x in jax.tree.leaves(tree)]


@pytest.mark.slow
def test_every_program_can_be_traced(tiny_plan):
    rl = dataclasses.replace(tiny_plan.run.rl, updates_per_batch=2)
    names = program_names(dataclasses.replace(tiny_plan.run, rl=rl))
    first, later = (
        [name for name in names if name.startswith("RL update") and name.endswith("later") is last]
        for last in (False, True)
    )
    assert later == [f"{name} later" for name in first]
    for name in names:
        program = tiny_plan.program(name)
        with jax.set_mesh(program.mesh):
            function: Any = program.function
            function.eval_shape(*program.arguments, **program.options)


def test_a_plan_with_adapters_has_one_base(tiny_plan):
    """On one device, training and engine share it."""
    run = dataclasses.replace(tiny_plan.run, lora=LoRASettings(rank=2, targets=("q", "down")))
    plan = Plan(run, jax.devices()[:1], jax.devices()[:1], (1, 1, 1))
    sizes = plan.sizes()
    assert sizes["base"] == tiny_plan.sizes()["weights"]
    assert "engine's base" not in sizes
    assert sizes["engine's weights"] == sizes["weights"] < sizes["base"] / 100
    assert sizes["moments"] < 2 * sizes["weights"] + 100
    in_int8 = dataclasses.replace(run, lora=dataclasses.replace(run.lora, int8_base=True))
    whole = Plan(in_int8, jax.devices()[:1], jax.devices()[:1], (1, 1, 1)).sizes()
    assert whole["base"] < sizes["base"] / 2
    names = {name.split()[0]: name for name in program_names(run)}
    for family in ("SFT", "RL", "reference", "prefill", "decode", "weight"):
        program = plan.program(names[family])
        with jax.set_mesh(program.mesh):
            function: Any = program.function
            function.eval_shape(*program.arguments, **program.options)


def test_a_run_without_episodes_has_no_engine():
    run = fit(RECIPES["sft_8b"](), V5E.available).run
    assert not run.plays_episodes
    sizes = Plan(run, jax.devices()[:1], jax.devices()[:1], (1, 1, 1)).sizes()
    assert "KV pool" not in sizes
    assert "engine's weights" not in sizes
    assert sizes["all pieces"] == 0
    assert sizes["moments"] == pytest.approx(2 * sizes["weights"], rel=1e-6)
    assert sizes["batch"] > 0


def test_the_planned_programs_are_all_that_the_engine_compiles(tiny_plan, monkeypatch):
    """Compares shapes of arguments with those of the engine's warm-up."""
    called: dict[str, list] = {"bank": [], "prefill": [], "page": [], "decode": []}

    def recorder(name, answer):
        def record(self):
            def call(*arguments, **options):
                called[name].append((shapes(arguments), options))
                return answer(arguments)

            return call

        return property(record, lambda self, value: None)

    rows = tiny_plan.run.engine_sizes.slots
    ids = jnp.zeros((rows, 1), jnp.int32)
    logprobs = jnp.zeros((rows, 1))
    counts = jnp.zeros(rows, jnp.int32)
    drawn = Drawn(ids, logprobs, None, counts, jnp.int32(0))
    prefill = recorder("prefill", lambda given: given[1])
    decode = recorder("decode", lambda given: (given[1], drawn))
    fill = recorder("bank", lambda given: given[0])
    copy = recorder("page", lambda given: given[0])
    monkeypatch.setattr(runner.Programs, "fill", fill, raising=False)
    monkeypatch.setattr(runner.Programs, "copy", copy, raising=False)
    monkeypatch.setattr(runner.Programs, "prefill", prefill, raising=False)
    monkeypatch.setattr(runner.Programs, "decode", decode, raising=False)
    model = abstract_model(planned_config(tiny_plan.run))
    real = runner.ModelRunner(model, tiny_plan.run.engine_sizes)
    real.wake()
    real.warm_up(split(model.text)[1:])
    monkeypatch.undo()
    for family in called:
        names = [name for name in program_names(tiny_plan.run) if name.split()[0] == family]
        programs = [tiny_plan.program(name) for name in names]
        assert [program.name for program in programs] == names
        planned = [(shapes(program.arguments), program.options) for program in programs]
        assert planned == called[family]


def test_sizes_equal_those_of_the_arrays(tiny_plan):
    sizes = tiny_plan.sizes()
    text = planned_config(tiny_plan.run).text
    weights = sum(x.size for x in jax.tree.leaves(tiny_plan.weights))
    engine = tiny_plan.run.engine_sizes
    assert sizes["weights"] == sizes["all reference"] == sizes["engine's weights"] == 4 * weights
    assert 2 * 4 * weights <= sizes["moments"] <= 2 * 4 * weights + 100
    tokens = (engine.pages + 1) * engine.page
    per_token = text.num_hidden_layers * 2 * text.num_key_value_heads * text.head_dim
    assert sizes["KV pool"] == 4 * tokens * per_token


def test_an_update_computes_every_place_of_its_micro_batch(tiny_plan):
    """Forward and backward once, whatever prompts and rollouts are packed into the places."""
    run, config = tiny_plan.run, tiny_plan.config
    (largest, *_) = run.rl_shape.microbatches(run.rl.microbatch_tokens, devices=1, pieces=1)
    program = tiny_plan.program(f"RL update {largest.tokens}")
    with jax.set_mesh(program.mesh):
        found = count_flops(program.function.trace(*program.arguments).jaxpr)
    # The tiles of attention that are visited depend on what is packed: each loop counts once here.
    low = 3 * largest.places * flops_per_token(config, 0)
    high = 4 * largest.places * flops_per_token(config, largest.tokens)
    assert low <= found <= high
    # The reference has a forward pass only.
    reference = tiny_plan.program(f"reference {largest.tokens}")
    with jax.set_mesh(reference.mesh):
        forward = count_flops(reference.function.trace(*reference.arguments).jaxpr)
    assert 3 * forward <= found <= 4 * forward


# --- the compiler ---

LIBTPU = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu, the TPU's compiler: pip install -e '.[tpu]'",
)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_compiler_process_ends_with_its_plan(number, tmp_path):
    """A killed plan leaves no process behind. The compiler here writes its id and sleeps."""
    sleeping = f"""
import os, pathlib, sys, time
from paravt_extras.plan import compile
def measure(case):
    new = pathlib.Path('{tmp_path}/new')
    new.write_text(str(os.getpid()))
    os.replace(new, '{tmp_path}/child')
    time.sleep(300)
compile.measure = measure
compile.main(*sys.argv[1:])
"""
    (tmp_path / "sleeping.py").write_text(sleeping)
    # Called as: python -m paravt_extras.plan.compile CASE RESULT
    run_it = f'PYTHONPATH={ROOT} exec {sys.executable} {tmp_path}/sleeping.py "$3" "$4"'
    (tmp_path / "python").write_text(f"#!/bin/sh\n{run_it}\n")
    (tmp_path / "python").chmod(0o700)
    code = f"""
import sys
from paravt_extras.plan import compile
sys.executable = '{tmp_path}/python'
compile.compile_case(None, 600)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    while not (tmp_path / "child").exists():
        assert parent.poll() is None
        time.sleep(0.05)
    child = int((tmp_path / "child").read_text())
    parent.send_signal(number)
    parent.wait(60)
    for _ in range(600):
        try:
            status = pathlib.Path(f"/proc/{child}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return
        if status.rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    pytest.fail("the compiler is still there")


@pytest.mark.slow
def test_an_interrupt_stops_the_whole_plan(tmp_path):
    """Waiting programs are not begun, and running ones are not waited for. The compiler sleeps."""
    code = f"""
import importlib.util, os, pathlib, sys, time
from paravt_extras.plan import command as plan
def compile_case(case, timeout):
    pathlib.Path('{tmp_path}', case.program).touch()
    time.sleep(300)
importlib.util.find_spec = lambda name: object()
plan.compile_case = compile_case
code = plan.main(['--config=paravt_8b', '--topology=v5e:4x4'])
sys.stderr.flush()
os._exit(code)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    while not (tmp_path / SIZES).exists():
        assert parent.poll() is None
        time.sleep(0.05)
    parent.send_signal(signal.SIGINT)
    _, error = parent.communicate(timeout=60)
    assert parent.returncode == 130
    assert "stopped; with --keep" in error
    assert [file.name for file in tmp_path.iterdir()] == [SIZES]


@LIBTPU
@pytest.mark.slow
def test_a_small_plan():
    """Programs of every kind compile for four chips and fit; decoding copies no pages."""
    topology = Topology("v5e:2x2")
    run = change(RECIPES["paravt_tiny"](), "tiny", {"mesh.fsdp": 4})
    # Those of other sizes would take as long again.
    only = ("vision", "bank", "prefill 432 after 576", "page", "decode 576", "SFT", "weight")
    only += ("reference 1536", "RL update 1536", "RL start", "RL optimizer")
    (measured,) = plan.measure_all([run], [topology], only, 600, 1, compile_case)
    assert {m.program: m.error for m in measured.values() if m.error} == {}
    found = plan.plan(fit(run, topology.available), topology, measured)
    assert found["fits"], found["advice"]
    assert (
        found["residents"]["KV pool"]
        <= measured[f"decode {run.engine_sizes.row_lengths[-1]}"].alias
    )
    assert all(m.sent for name, m in measured.items() if name.startswith("RL update"))


@LIBTPU
@pytest.mark.slow
def test_two_slices_talk_once_per_update():
    """A small model with the real vocabulary on two slices of four chips: a replica in each."""
    topology = Topology("2*v5e:2x2")
    small = {"model.size": "rehearsal", "sft.rows": 8, "rl.microbatch_tokens": 71_680}
    mesh = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}
    run = fit(change(RECIPES["paravt_8b"](), "small", small | mesh), topology.available).run
    largest = f"{microbatch_sizes(run)[0].tokens}"
    only = ("SFT", f"reference {largest}", f"RL update {largest}", "RL optimizer", "weight")
    (measured,) = plan.measure_all([run], [topology], only, 600, 1, compile_case)
    assert {m.program: m.error for m in measured.values() if m.error} == {}
    between = {name: m.sent.get("DCN", 0.0) for name, m in measured.items()}
    _, weights, _ = split(planned_model(run, planned_config(run)).text)
    # Float32, and the weights of this recipe, too.
    gradients = sharded_bytes(weights, (2, 2, 2))
    for name in ("SFT update", "RL optimizer"):
        # Arrays are padded to whole tiles of HBM.
        assert gradients <= between[name] < 1.5 * gradients, name
    assert between["weight sync"] == 0
    assert between[f"RL update {largest}"] < 0.01 * gradients
    assert between[f"reference {largest}"] < 0.1 * gradients
    planned = plan.plan(fit(run, topology.available), topology, measured)
    assert "RL optimizer" in planned["between_slices"]


@LIBTPU
@pytest.mark.slow
def test_a_lack_of_memory_through_the_compiler():
    """Prefill of the 8B model behind cached tokens, on v5e, with more pages than fit."""
    found = compile_case(Case(paged(8192), V5E, (1, 16, 1), "prefill 1024 after 8192"), 600)
    assert found.error.startswith("out of memory")
    assert found.peak > 16 * GIB
    assert found.largest


@LIBTPU
@pytest.mark.slow
def test_the_8b_model_decodes_on_v5p_without_a_copy_of_its_pool():
    found = compile_case(Case(RUN, Topology("v5p:2x2x2"), (1, 8, 1), "decode 13312"), 600)
    # Layers, tokens, two heads per device for each of keys and values, head_dim, bytes.
    pool = 36 * (RUN.engine_sizes.pages + 1) * 64 * 2 * 2 * 128 * 2
    assert not found.error
    assert found.alias >= pool
    assert found.temporary < pool / 3
    context = RUN.engine_sizes.row_lengths[-1]
    assert found.flops == pytest.approx(32 * 64 * flops_per_token(qwen3_vl("8b"), context))
