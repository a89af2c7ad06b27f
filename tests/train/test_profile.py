"""Traces of training steps: `profile`."""

from __future__ import annotations

import dataclasses
import gzip
import json
import pathlib
from typing import Any

import jax
import pytest

import train.run
from paravt_jax.processes import hosts
from train.durable.profile import Profiler, parse_steps

# Every part of a step, by phase. `evaluation` is that of a checkpoint of RL.
PARTS = {
    "align": {"align", "data", "update", "save"},
    # Later, the frames are in the cache.
    "sft": {"sft", "data", "vision", "update", "save"},
    "rl": {
        "rl",
        "rollout",
        "prefill",
        "decode",
        "reward",
        "data",
        "reference",
        "update",
        "weight sync",
        "save",
        "evaluation",
    },
}
PROGRAMS = {
    "align": {"align_update"},
    "sft": {"add_gradients", "apply_gradients", "encode_frames"},
    "rl": {
        "_prefill",
        "_copy",
        "_fill",
        "_gather",
        "_decode",
        "logprobs",
        "advantages",
        "zero_gradients",
        "add_gradients",
        "apply_gradients",
    },
}
# Of the programs' operations. Those of the backward pass have `transpose(jvp(...))` as well.
SCOPES = {
    "sft": ("jvp(forward)", "transpose(jvp(forward))", "optimizer", "attention", "mlp", "logits"),
    "rl": ("jvp(forward)", "transpose(jvp(forward))", "optimizer", "attention", "mlp", "sample"),
}

SHORT = """
--rl.steps 3 --rl.no-control
--evaluation.frames 4 --evaluation.dispatch parallel --evaluation.temperatures 0
""".split()


def session(folder: pathlib.Path, phase: str) -> pathlib.Path:
    (found,) = (folder / "profile" / phase / "process-0" / "plugins" / "profile").iterdir()
    return found


def events(file: pathlib.Path) -> list[Any]:
    profile = jax.profiler.ProfileData.from_file(str(file))
    return [event for plane in profile.planes for line in plane.lines for event in line.events]


@pytest.mark.slow
def test_a_trace_names_every_part_and_program(small, tmp_path):
    folder = tmp_path / "run"
    command = ["--config=small", "--run-dir", str(folder), "--profile", "1-3", *SHORT]
    assert train.run.main(command) == 0
    for phase, parts in PARTS.items():
        written = session(folder, phase)
        (file,) = written.glob("*.xplane.pb")
        found = events(file)
        names = {event.name for event in found}
        assert parts <= names, f"{phase}: no {parts - names}"
        steps = {dict(event.stats)["step_num"] for event in found if event.name == phase}
        assert steps == {1, 2, 3}
        called = {name[14:-1] for name in names if name.startswith("PjitFunction(")}
        computed = {dict(event.stats).get("hlo_module") for event in found}
        for program in PROGRAMS[phase]:
            assert program in called or f"jit_{program}" in computed, program
        content = file.read_bytes()
        for scope in SCOPES.get(phase, ()):
            assert f"/{scope}/".encode() in content, f"{phase}: no {scope}"
        # Perfetto reads this one.
        (shown_file,) = written.glob("*.trace.json.gz")
        with gzip.open(shown_file) as stream:
            shown = {event.get("name") for event in json.load(stream)["traceEvents"]}
        assert parts <= shown


def traced(folder: pathlib.Path, steps: str, done: range) -> set[int]:
    """The steps in the trace of a phase that runs `done`; empty if there is none."""
    profiler = Profiler(folder, parse_steps(steps))
    for _ in profiler.annotated("rl", done):
        pass
    profiler.close()
    return steps_of(folder)


def steps_of(folder: pathlib.Path) -> set[int]:
    files = list(folder.rglob("*.xplane.pb"))
    assert len(files) <= 1
    found = [dict(event.stats) for file in files for event in events(file) if event.name == "rl"]
    return {stats["step_num"] for stats in found}


def test_a_run_that_was_killed_traces_the_steps_that_are_left(tmp_path):
    assert traced(tmp_path, "2-4", range(3, 8)) == {3, 4}


def test_steps_after_the_last_one_are_not_waited_for(tmp_path):
    assert traced(tmp_path, "2-40", range(1, 4)) == {2, 3}


def test_nothing_is_written_without_a_step_of_the_trace(tmp_path):
    assert traced(tmp_path, "2-3", range(4, 8)) == set()
    assert not list(tmp_path.iterdir())


def test_a_run_that_stops_in_between_keeps_the_trace_so_far(tmp_path):
    profiler = Profiler(tmp_path, parse_steps("2-4"))
    for step in profiler.annotated("rl", range(1, 8)):
        if step == 3:
            break
    profiler.close()
    assert steps_of(tmp_path) == {2, 3}


def test_every_process_writes_a_file(tmp_path, monkeypatch):
    for process in range(2):
        monkeypatch.setattr(hosts, "process_index", lambda process=process: process)
        profiler = Profiler(tmp_path, parse_steps("1"))
        assert list(profiler.annotated("rl", range(1, 3))) == [1, 2]
    found = sorted(file.relative_to(tmp_path).parts[0] for file in tmp_path.rglob("*.xplane.pb"))
    assert found == ["process-0", "process-1"]


@pytest.mark.parametrize("text", ["0", "5-3", "3-", "-3", "a", "3,4", "0-2", "3 - 4"])
def test_what_names_no_steps_is_refused(small, text):
    with pytest.raises(ValueError, match=r"^profile: .*; give a step or the first and the last"):
        dataclasses.replace(small.small(), profile=text)


def test_steps_that_no_phase_reaches_are_refused(small):
    with pytest.raises(ValueError, match=r"^profile: '7-9'; .*align 3, sft 4, rl 6.*earlier"):
        dataclasses.replace(small.small(), profile="7-9")
    assert dataclasses.replace(small.small(), profile="6-9").profile == "6-9"


def test_what_is_traced_may_change_when_a_run_goes_on(small):
    run = small.small()
    assert train.run.resolved(dataclasses.replace(run, profile="2")) == train.run.resolved(run)
