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
from tests.train.homes import open_home, open_phase

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
        "_decode",
        "logprobs",
        "advantages",
        "make_zeros",
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
--rl.steps 2 --rl.save-every 1
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
    command = ["--config=small", "--run-dir", str(folder), "--profile", "1", *SHORT]
    assert train.run.main(command) == 0
    for phase, parts in PARTS.items():
        written = session(folder, phase)
        (file,) = written.glob("*.xplane.pb")
        found = events(file)
        names = {event.name for event in found}
        assert parts <= names, f"{phase}: no {parts - names}"
        steps = {dict(event.stats)["step_num"] for event in found if event.name == phase}
        assert steps == {1}
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


def test_every_process_traces_one_step(tmp_path, monkeypatch):
    for process in range(2):
        monkeypatch.setattr(hosts, "process_index", lambda process=process: process)
        home = open_home(tmp_path / f"run-{process}", profile=2)
        with open_phase("rl", home, steps=4, save_every=4) as saver:
            assert list(saver.steps()) == [1, 2, 3, 4]
        (file,) = tmp_path.rglob(f"profile/rl/process-{process}/**/*.xplane.pb")
        found = [dict(event.stats) for event in events(file) if event.name == "rl"]
        assert {stats["step_num"] for stats in found} == {2}


@pytest.mark.parametrize("step", [-1, 7])
def test_a_step_that_no_phase_reaches_is_refused(small, step):
    with pytest.raises(ValueError, match=rf"^profile: {step}; .*'align': 3, 'sft': 4, 'rl': 6"):
        dataclasses.replace(small.small(), profile=step)
