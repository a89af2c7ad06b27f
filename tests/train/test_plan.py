"""The plan without a compiler: slices, meshes, sums, what it says and refuses; and, where libtpu is, real programs through it."""

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
from flax import nnx

from configs import RECIPES
from models.qwen3_vl.config import qwen3_vl
from models.qwen3_vl.flops import flops_per_token
from models.qwen3_vl.model import abstract_model
from rollout.engine import runner
from tests.train.small import small
from train.learn.batch import BatchShape
from train.plan import cache, step
from train.plan import command as plan
from train.plan.compile import (
    ROLLOUTS,
    SIZES,
    Case,
    Measured,
    compile_case,
    memory_shortage,
)
from train.plan.programs import Plan, planned_config, program_names
from train.plan.topology import CHIPS, SCALE, Topology, choose_mesh

ROOT = pathlib.Path(__file__).parents[2]
GIB = 2.0**30
RUN = RECIPES["paravt_8b"]()
assert RUN.rl is not None
RL = RUN.rl
V5E, V5P = Topology("v5e:4x4"), Topology("v5p:2x2x4")
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
SIZE = Measured(SIZES, sizes=RESIDENTS | ALL | {"prefill rows": 1.0})


def paged(pages: int) -> Any:
    """The recipe with so many pages."""
    return dataclasses.replace(RUN, engine=dataclasses.replace(RUN.engine, cache_tokens=64 * pages))


def test_slices_by_name():
    found = [
        (t.chips, t.devices, t.hosts, t.host.name)
        for t in map(Topology, ("v4:2x2x4", "v5e:4x4", "v5p:4x4x4", "v6e:2x2"))
    ]
    expected = [
        (16, 32, 4, "v4:2x2x1"),
        (16, 16, 4, "v5e:2x2"),
        (64, 64, 16, "v5p:2x2x1"),
        (4, 4, 1, "v6e:2x2"),
    ]
    assert found == expected
    assert {Topology(name).name.split(":")[0] for name in SCALE} == set(CHIPS)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v9:2x2", "GENERATION:SHAPE"),
        ("v5e", "GENERATION:SHAPE"),
        ("v5e:4x0", "GENERATION:SHAPE"),
        ("v5e:2x2x2", "2 sides, as v5e:4x4"),
        ("v5p:4x4", "3 sides, as v5p:4x4x4"),
        ("v6e:1x1", "hosts of 4"),
    ],
)
def test_what_is_no_slice_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        Topology(name)


@pytest.mark.parametrize(
    ("recipe", "devices", "rows", "expected"),
    [
        ((1, 16, 1), 16, 56, (1, 16, 1)),
        ((1, 16, 1), 8, 56, (1, 8, 1)),
        ((1, 16, 1), 64, 56, (1, 64, 1)),  # eight rows more are padding
        ((1, 16, 1), 256, 56, (1, 64, 4)),  # no row for the rest: they share
        ((1, 4, 4), 64, 56, (1, 16, 4)),
        ((2, 8, 1), 64, 56, (2, 32, 1)),
        ((2, 8, 1), 256, 56, (2, 32, 4)),
        ((1, 1, 1), 4, 2, (1, 2, 2)),
    ],
)
def test_the_mesh_of_another_slice(recipe, devices, rows, expected):
    assert choose_mesh(recipe, devices, rows) == expected


def test_axes_that_do_not_divide_are_named():
    with pytest.raises(ValueError, match="mesh.data, mesh.tensor: 1 x 3 do not divide 16"):
        choose_mesh((1, 4, 3), 16, 56)


def test_what_lies_beside_a_program():
    decode = Measured("decode", peak=8 * GIB, given=("engine's weights", "KV pool"))
    found = step.held_together(decode, RESIDENTS)
    assert (
        found.others == {"weights": 2 * GIB, "moments": 4 * GIB, "vision tower": GIB}
        and found.total == 15 * GIB
    )
    # From the update to the new weights the engine has nothing on the device.
    update = Measured("RL update", peak=9 * GIB, given=("weights", "moments", "batch"))
    assert step.held_together(update, RESIDENTS).total == 10 * GIB
    sync = Measured("weight sync", peak=7 * GIB, given=("weights",))
    assert step.held_together(sync, RESIDENTS).others == {
        "moments": 4 * GIB,
        "vision tower": GIB,
        "batch": GIB / 4,
    }


def test_the_slowest_of_three_is_the_limit():
    """On v5e: 197 TFLOP/s and 819 GB/s a chip, 200 GB/s to its neighbours; a device of v4 is half a chip."""
    measured = Measured(
        "x",
        devices=16,
        flops=16 * 197e12,
        read=3 * 819e9,
        sent={"all-gather": 100e9, "all-reduce": 300e9},
    )
    found = step.limit(measured, 2, V5E)
    assert (found.compute, found.memory, found.interconnect, found.seconds) == pytest.approx(
        (2, 6, 4, 6)
    )
    assert step.limit(
        Measured("x", devices=2, flops=275e12), 1, Topology("v4:2x2x1")
    ).seconds == pytest.approx(1)


def test_calls_of_a_step():
    """Two prompts of seven on the fullest of four hosts: 2 x 64 frames by 16, 8192 tokens by 32; on two hosts four prompts."""
    calls = step.calls_of(RUN, V5E, 1)
    assert calls == {
        "vision": 8,
        "prefill": 2,
        "decode": 256,
        "reference": 1,
        "RL update": 1,
        "weight sync": 1,
    }
    assert step.calls_of(RUN, Topology("v5p:2x2x2"), 3)["prefill"] == 2
    crowded = dataclasses.replace(RUN, engine=dataclasses.replace(RUN.engine, slots=8))
    assert step.calls_of(crowded, V5E, 1)["decode"] == 2 * 256


def test_rollouts_that_have_no_pages_wait():
    """Two prompts of 80 pages and 16 rollouts of 128, and one where a page is shared."""
    assert step.rollouts_at_once(paged(2224), V5E) == (16, 16, 2224)
    assert step.rollouts_at_once(paged(2223), V5E) == (16, 15, 2224)
    few = paged(1280)
    assert (
        step.rollouts_at_once(few, V5E) == (16, 8, 2224)
        and step.calls_of(few, V5E, 1)["decode"] == 2 * 256
    )
    (found,) = step.pages_advice(few, V5E, 20 * GIB, 2**21)
    assert (
        "of a host's 16 rollouts, all as long as they may be, 8 run at once. 142336 would hold 16, and 20.00 GiB are free"
        in found
    )
    assert not step.pages_advice(few, V5E, GIB, 2**21) and not step.pages_advice(
        paged(2224), V5E, 20 * GIB, 2**21
    )


def test_what_decoding_reads():
    """Two prompts of seven are the fullest host's, sixteen rollouts with 13312 - 4096 tokens each on average, 14 of them at once."""
    sizes = {"engine's weights": 4e9, "KV pool": 2049 * 64 * 36e3}
    run = paged(2048)
    assert step.decode_read(run, V5E, sizes) == pytest.approx(32 * (4e9 + 14 * 9216 * 36e3))
    sizes["KV pool"] = 8193 * 64 * 36e3
    assert step.decode_read(paged(8192), Topology("v5e:2x2"), sizes) == pytest.approx(
        32 * (4e9 + 56 * 9216 * 36e3)
    )


def test_what_an_update_is_worth():
    """Token by token: a prompt's see what is before them and have no scores of words, a row's see the prompt, too."""
    config, shape = qwen3_vl("2b"), BatchShape(groups=2, rows=3, prompt=4, visual=0, suffix=5)
    head = 2 * config.text.vocab_size * config.text.hidden_size
    prompt = sum(flops_per_token(config, seen) - head for seen in range(1, 5))
    row = sum(flops_per_token(config, 4 + seen) for seen in range(1, 6))
    assert step.model_flops(shape, config) == pytest.approx(3 * 2 * (prompt + 3 * row))


def test_tokens_of_a_step_and_the_padding_of_a_mesh():
    rl = dataclasses.replace(RL, subagents_per_rollout=16 / 56, microbatches=1)
    assert step.tokens_of(dataclasses.replace(RUN, rl=rl)) == 7 * (5120 + 8 * 8192) + 16 * (
        1008 + 513
    )
    assert step.tokens_of(RECIPES["sft_8b"]()) == 16 * 8192
    four = dataclasses.replace(RUN, rl=dataclasses.replace(RL, microbatches=4))
    assert not step.padding_advice(
        four, V5E, (1, 16, 1)
    )  # 64 rows for 56, and no number of parts has fewer
    (found,) = step.padding_advice(four, Topology("v5e:2x2"), (1, 1, 4))
    assert (
        "rl.microbatches = 4, so 4 parts" in found
        and "56 rows are padded to 64, with 1 to 56" in found
    )
    (found,) = step.padding_advice(four, Topology("v5e:8x8"), (1, 64, 1))
    assert (
        "7 groups of rollouts are laid out as 16, as many whole groups on each of 16 hosts; an update of rl.prompts = 16"
        in found
    )
    wide = dataclasses.replace(RUN, rl=dataclasses.replace(RL, prompts=9))
    (found,) = step.padding_advice(wide, Topology("v5e:2x2"), (1, 128, 1))
    assert "9 groups of rollouts are laid out as 16, evenly over 128 devices" in found


def test_what_a_host_holds():
    found = step.host_memory(
        RUN, V5E, {name[4:]: size for name, size in ALL.items()} | {"offloaded": 40 * GIB}
    )
    assert list(found.values()) == [4 * GIB, 2 * GIB, 24 * GIB, 4 * GIB, 2 * GIB, GIB, 10 * GIB]
    found = step.host_memory(
        RUN,
        V5E,
        {name[4:]: size for name, size in ALL.items()} | {"offloaded": 40 * GIB},
        replicas=2,
    )
    assert list(found.values()) == [4 * GIB, 2 * GIB, 24 * GIB, 8 * GIB, 2 * GIB, GIB, 10 * GIB]


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
def test_a_lack_of_memory_is_an_answer(message, expected):
    arguments = (jax.ShapeDtypeStruct((1024,), jnp.float32),)
    found = memory_shortage(message, arguments)
    assert found["peak"] == pytest.approx(expected)
    assert found["error"].startswith("out of memory")


def test_another_error_of_the_compiler_is_raised():
    with pytest.raises(RuntimeError, match="E1001"):
        memory_shortage("E1001: a tile is too large", ())


def fake(peaks: dict[str, float], errors: dict[str, str] | None = None):
    """A compiler that knows the answers, and whom it was asked for."""
    asked: list[tuple[str, str]] = []

    def compiled(case: Case, timeout: float) -> Measured:
        asked.append((case.topology.name, case.program))
        if case.program == SIZES:
            return SIZE
        peak, error = peaks.get(case.program, GIB), (errors or {}).get(case.program, "")
        held = {
            "decode": ("engine's weights", "KV pool"),
            "reference": ("batch",),
            "weight sync": ("weights",),
        }
        held |= {"RL update": ("weights", "moments", "batch")}
        measured = Measured(
            case.program,
            error,
            1.0,
            16,
            peak / 2,
            peak / 2,
            peak=peak,
            flops=32e15,
            unshared=48e15,
            read=1e9,
        )
        return dataclasses.replace(
            measured,
            given=held.get(case.program, ()),
            sent={"all-gather": 1e9},
            largest=("3.0GiB f32[1,2]",),
        )

    return compiled, asked


@pytest.fixture
def command(monkeypatch, capsys):
    """The command with a compiler that is fake; gives exit code, what was printed, and whom the compiler was asked for."""

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
    assert (
        code == 0
        and found["fits"]
        and found["complete"]
        and found["mesh"] == [1, 16, 1]
        and not found["advice"]
    )
    assert [name for _, name in asked] == [SIZES, *program_names(RUN)]
    assert program_names(RECIPES["sft_8b"]()) == ("vision", "SFT update")  # it plays nothing
    assert (
        "**fits**. 16 chips, 16 devices of 95.73 GiB, 4 hosts; mesh data x fsdp x tensor = 1 x 16 x 1"
        in printed.out
    )
    assert found["tokens"] == 7 * (5120 + 8 * 8192)
    work = found["work"]
    assert work["saved"] == 16e15 and "save 16.00 PFLOP of 48.00" in printed.out
    assert work["full remat"] == pytest.approx(work["model"] * 4 / 3)
    assert (
        f"{32e15 / work['model']:.2f} times the first (within 1.3) and {24e15 / work['model']:.2f} times the second"
        in printed.out
    )
    update = next(phase for phase in found["phases"] if phase["phase"] == "RL update")
    assert update["seconds"] == pytest.approx(32e15 / 16 / 459e12)
    assert found["step_seconds"] == pytest.approx(
        sum(phase["seconds"] for phase in found["phases"])
    )
    assert next(
        t["total"] for t in found["together"] if t["program"] == "vision"
    ) == GIB * 3 / 4 + sum(RESIDENTS.values())


def test_what_does_not_fit_says_why_and_what_to_change(command):
    code, printed, _ = command(
        "--topology=v5e:4x4", peaks={"RL update": 15 * GIB, "decode": 9 * GIB}
    )
    assert code == 1 and "**does not fit**" in printed.out
    assert (
        "RL update: 0.25 GiB too much. Held: the program 15.00, vision tower 1.00." in printed.out
    )
    assert (
        "decode: 0.25 GiB too much. Held: the program 9.00, moments 4.00, weights 2.00, vision tower 1.00."
        in printed.out
    )
    assert (
        f"engine.cache_tokens = {RUN.engine.cache_tokens}: {RUN.engine.cache_tokens // 2} would free 1.50 GiB"
        in printed.out
    )
    assert (
        "rl.logprob_chunk = 512: 128 holds" in printed.out
        and "largest temporaries are 3.0GiB f32[1,2]" in printed.out
    )


def test_a_program_that_was_not_compiled_is_named(command):
    code, printed, _ = command(
        "--topology=v5p:2x2x4",
        peaks={"reference": 0.0},
        errors={"reference": "not compiled within 5 s"},
    )
    assert code == 1 and "- reference: not compiled within 5 s" in printed.out
    assert "v5p:2x2x4: **not known, not compiled: reference**" in printed.out
    code, printed, _ = command("--topology=v5p:2x2x4", "--only=decode,reference")
    assert code == 0 and "**fits, as far as compiled (decode, reference)**" in printed.out
    assert "| step" not in printed.out  # a sum without one of its parts is none


def test_programs_of_a_host_are_compiled_once_a_generation(command):
    code, printed, asked = command("--topology=all")
    assert len(asked) == len(set(asked))
    assert sum(name == "decode" for _, name in asked) == len(CHIPS) and sum(
        name == "RL update" for _, name in asked
    ) == len(SCALE)
    assert all(re.search(rf"^\| {re.escape(name)} ", printed.out, re.M) for name in SCALE)
    assert code == 0


def test_a_plan_that_was_stopped_goes_on(command, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "compiler_fingerprint", lambda: "one")
    keep = ("--topology=v5p:2x2x4", "--keep", str(tmp_path / "kept"))
    late = {"reference": "not compiled within 5 s"}
    _, first, asked = command(
        *keep,
        peaks={"reference": 0.0, "decode": 99 * GIB},
        errors=late | {"decode": "out of memory"},
    )
    assert len(asked) == 1 + len(program_names(RUN)) and "compiled before" not in first.err
    _, second, asked = command(
        *keep
    )  # what took too long is tried again; a lack of memory is an answer
    assert [name for _, name in asked] == ["reference"]
    assert (
        "v5p:2x2x4, decode: out of memory, compiled before" in second.err
        and "decode: 10.27 GiB too much" in second.out
    )
    assert command(*keep)[1].out == second.out
    assert {name for _, name in command("--topology=v5p:2x2x2", *keep[1:])[2]}.isdisjoint(
        ROLLOUTS
    )  # compiled for a host already
    for changed in (("--rl.microbatches", "2"), ("--rl.remat", "none")):
        assert len(command(*keep, *changed)[2]) == 1 + len(program_names(RUN))
    monkeypatch.setattr(cache, "compiler_fingerprint", lambda: "other code")
    assert len(command(*keep)[2]) == 1 + len(program_names(RUN))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "--topology is missing"),
        (("--topology=v7:2x2",), "GENERATION:SHAPE"),
        (
            ("--topology=v5e:4x4", "--mesh.fsdp=8"),
            "mesh: (1, 8, 1) (data, fsdp, tensor); their product has to be the 16 devices",
        ),
        (
            ("--topology=v5e:4x4", "--keep=/proc/kept"),
            "--keep /proc/kept: No such file or directory; name a folder",
        ),
        (("--topology=v5e:4x4", "--jobs=0"), "--jobs 0, --timeout 1800; give one or more"),
        (
            ("--topology=v5e:4x4", "--json=/nowhere/plan.json"),
            "--json /nowhere/plan.json: no file can be written there",
        ),
        (
            ("--topology=v5e:4x4", "--only=decode,dcode"),
            "--only: dcode; paravt_8b has the programs vision, prefill",
        ),
    ],
)
def test_mistakes_end_it_in_one_line(command, argv, message):
    code, printed, asked = command(*argv)
    assert code == 2 and message in printed.err and printed.err.count("\n") == 1 and not asked


def test_a_missing_compiler_is_said_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert plan.main(["--config=paravt_8b", "--topology=v5e:4x4"]) == 2
    assert (
        capsys.readouterr().err
        == "error: libtpu, the TPU's compiler, is not installed: pip install -e '.[tpu]'\n"
    )


# --- the programs ---


@pytest.fixture(scope="module")
def tiny_plan() -> Plan:
    run = small()
    run = dataclasses.replace(run, engine=dataclasses.replace(run.engine, paged=True))
    return Plan(run, jax.devices()[:1], jax.devices()[:1], (1, 1, 1))


def shapes(tree: Any) -> list[tuple[tuple[int, ...], str]]:
    return [(x.shape, str(x.dtype)) for x in jax.tree.leaves(tree)]


def test_every_program_can_be_traced(tiny_plan):
    for name in program_names(tiny_plan.run):
        program = tiny_plan.program(name)
        with jax.set_mesh(program.mesh):
            program.function.eval_shape(*program.arguments, **program.options)  # pyright: ignore[reportFunctionMemberAccess]


def test_a_run_that_plays_nothing_has_no_engine():
    run = RECIPES["sft_8b"]()
    assert not run.plays_episodes
    sizes = Plan(run, jax.devices()[:1], jax.devices()[:1], (1, 1, 1)).sizes()
    assert (
        "KV pool" not in sizes
        and "engine's weights" not in sizes
        and sizes["all pieces"] == sizes["prefill rows"] == 0
    )
    assert sizes["moments"] == pytest.approx(2 * sizes["weights"], rel=1e-6) and sizes["batch"] > 0


def test_the_engine_is_planned_as_it_warms_up(tiny_plan, monkeypatch):
    """Arguments of decoding and prefill are those of programs that the real engine compiles."""
    called: dict[str, list] = {"prefill": [], "decode": []}

    def recorder(name, answer):
        def record(self):
            def call(*arguments, **options):
                called[name].append((shapes(arguments), options))
                return answer(arguments)

            return call

        return property(record, lambda self, value: None)

    rows = tiny_plan.run.engine_sizes.slots
    drawn = [jnp.zeros((rows, 1)), jnp.zeros((rows, 1)), jnp.zeros(rows), jnp.int32(0)]
    monkeypatch.setattr(
        runner.Programs, "prefill", recorder("prefill", lambda given: given[1]), raising=False
    )
    monkeypatch.setattr(
        runner.Programs,
        "decode",
        recorder("decode", lambda given: (given[1], drawn)),
        raising=False,
    )
    model = abstract_model(planned_config(tiny_plan.run))
    real = runner.ModelRunner(model, tiny_plan.run.engine_sizes)
    real.wake()
    real.warm_up(nnx.split(model.text)[1])
    for name in ("prefill", "prefill after", "decode"):
        monkeypatch.undo()
        program = tiny_plan.program(name)
        assert (shapes(program.arguments), program.options) in called[name.split()[0]], name


def test_sizes_are_those_of_the_arrays(tiny_plan):
    sizes, config = tiny_plan.sizes(), planned_config(tiny_plan.run).text
    weights = sum(x.size for x in jax.tree.leaves(tiny_plan.weights))
    engine = tiny_plan.run.engine_sizes
    assert sizes["weights"] == sizes["all reference"] == sizes["engine's weights"] == 4 * weights
    assert 2 * 4 * weights <= sizes["moments"] <= 2 * 4 * weights + 100
    slots = (engine.pages + 1) * engine.page
    assert (
        sizes["KV pool"]
        == 4 * config.num_hidden_layers * slots * 2 * config.num_key_value_heads * config.head_dim
    )


def test_shared_prompts_save_what_their_tokens_cost(tiny_plan):
    """Forward and backward, seven of eight copies of each prompt; the head is not among it."""
    run = tiny_plan.run
    unshared, shape, config = (
        tiny_plan.program("RL update").unshared,
        run.rl_shapes[0],
        tiny_plan.config,
    )
    head = 2.0 * config.text.vocab_size * config.text.hidden_size
    tokens = shape.groups * (shape.rows - 1) * shape.prompt
    assert unshared is not None
    # XLA's attention on CPU sees up to a chunk's end; backward it is computed once more.
    low, high = (flops_per_token(config, seen) - head for seen in (shape.prompt / 2, shape.prompt))
    assert 3 * tokens * low <= unshared() <= 4 * tokens * high
    again = dataclasses.replace(run, rl=dataclasses.replace(run.rl, remat="full"))
    full = (
        Plan(again, jax.devices()[:1], jax.devices()[:1], (1, 1, 1)).program("RL update").unshared
    )
    assert (
        full is not None and 1.2 < full() / unshared() < 1.4
    )  # the forward pass once more, but for what nothing depends on


# --- the compiler ---

LIBTPU = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu, the TPU's compiler: pip install -e '.[tpu]'",
)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_compiler_ends_with_its_plan(number, tmp_path):
    """A plan that dies leaves no process behind; the compiler here is one that sleeps."""
    sleeping = (
        "import os, pathlib, time; from train.plan import compile; "
        f"compile.measure = lambda case: (pathlib.Path('{tmp_path}/new').write_text(str(os.getpid())), "
        f"os.replace('{tmp_path}/new', '{tmp_path}/child'), time.sleep(300)); compile.main('$3', '$4')"
    )
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} -c "{sleeping}"\n')
    (tmp_path / "python").chmod(0o700)
    code = f"import sys; from train.plan import compile; sys.executable = '{tmp_path}/python'; compile.compile_case(None, 600)"
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
    """What waits is not begun, and nobody waits for what runs; the compiler here sleeps."""
    code = (
        "import importlib.util, os, pathlib, sys, time; from train.plan import command as plan\n"
        "importlib.util.find_spec = lambda name: object()\n"
        f"plan.compile_case = lambda case, timeout: (pathlib.Path('{tmp_path}', case.program).touch(), time.sleep(300))\n"
        "code = plan.main(['--config=paravt_8b', '--topology=v5e:4x4']); sys.stderr.flush(); os._exit(code)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    while not (tmp_path / SIZES).exists():
        assert parent.poll() is None
        time.sleep(0.05)
    parent.send_signal(signal.SIGINT)
    _, said = parent.communicate(timeout=60)
    assert parent.returncode == 130 and "stopped; with --keep it could go on" in said
    assert [file.name for file in tmp_path.iterdir()] == [SIZES]


@LIBTPU
@pytest.mark.slow
def test_a_small_plan():
    """All programs of the laptop model on four chips: they compile, and fit together; decoding makes no copy of the pool."""
    run, topology = RECIPES["paravt_tiny"](), Topology("v5e:2x2")
    (measured,) = plan.measure_all(run, [topology], [(1, 4, 1)], (), 600, 1, compile_case)
    assert {m.program: m.error for m in measured.values() if m.error} == {}
    found = plan.plan(run, topology, (1, 4, 1), measured)
    assert found["fits"] and found["complete"], found["advice"]
    assert found["residents"]["KV pool"] <= measured["decode"].alias
    assert measured["RL update"].sent and 1 < found["work"]["done"] / found["work"]["model"] < 2


@LIBTPU
@pytest.mark.slow
def test_a_lack_of_memory_through_the_compiler():
    """The 8B's prefill behind what is there already, on v5e, with more pages than there is room for."""
    found = compile_case(Case(paged(8192), Topology("v5e:4x4"), (1, 16, 1), "prefill after"), 600)
    assert found.error.startswith("out of memory") and found.peak > 16 * GIB and found.largest


@LIBTPU
@pytest.mark.slow
def test_the_8b_decodes_on_v5p_without_a_copy_of_its_pool():
    found = compile_case(Case(RUN, Topology("v5p:2x2x2"), (1, 8, 1), "decode"), 600)
    pool = 36 * (RUN.engine_sizes.pages + 1) * 64 * 2 * 2 * 128 * 2
    assert not found.error and found.alias >= pool and found.temporary < pool / 3
    assert found.flops == pytest.approx(
        32 * 64 * flops_per_token(qwen3_vl("8b"), RUN.engine_sizes.row_lengths[-1] - 4096)
    )
