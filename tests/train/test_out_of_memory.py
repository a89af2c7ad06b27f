"""A run whose device has no memory left says which settings to lower."""

from __future__ import annotations

import errno
import functools
import re

import jax
import jax.numpy as jnp
import pytest

import train.run
from configs.lora import paravt_2b_lora
from paravt_extras.fit import fit
from paravt_extras.slices import Topology
from paravt_jax.processes.exit_codes import TEMPORARY
from train.cli import parse
from train.durable.run_directory import MAY_CHANGE
from train.out_of_memory import OutOfMemoryError, naming_remedies


def take_too_much(*_):
    jnp.zeros((2**46,)).block_until_ready()


def fitted():
    return fit(paravt_2b_lora(), Topology("v5e:1x1").available).run


def test_every_part_of_a_run_names_its_settings_with_lower_values():
    run = fitted()
    with pytest.raises(OutOfMemoryError) as error, naming_remedies(run):
        take_too_much()
    first, _, *parts, last = str(error.value).splitlines()
    assert "RESOURCE_EXHAUSTED" in first
    assert [part.split(":")[0].strip() for part in parts] == ["cold start", "PARA-GRPO", "rollouts"]
    assert run.rl is not None
    tokens = run.rl.microbatch_tokens
    assert f"--rl.microbatch-tokens {tokens // 2} (now {tokens})" in parts[1]
    cache = run.engine.cache_tokens
    assert f"--engine.cache-tokens {cache // 2} (now {cache})" in parts[2]
    assert "--sft.row-tokens (now 4096)" in last and "--rl.frame-budgets (now 4 8" in last


@pytest.mark.slow
def test_named_flags_exist_and_a_run_may_resume_with_the_lower_values():
    run = fitted()
    with pytest.raises(OutOfMemoryError) as error, naming_remedies(run):
        take_too_much()
    lower = re.findall(r"(--[\w.-]+) (\w+) \(now", str(error.value))
    assert len(lower) >= 6
    for flag, value in lower:
        assert parse([flag, value, "--config=x"], {"x": lambda: run}) != run
        name = flag.removeprefix("--").replace("-", "_")
        assert name in MAY_CHANGE or name.split(".")[0] in MAY_CHANGE
    for flag in re.findall(r"(--[\w.-]+) \(now", str(error.value)):
        name = flag.removeprefix("--").replace("-", "_")
        assert functools.reduce(getattr, name.split("."), run)


def test_other_errors_of_programs_pass():
    with pytest.raises(jax.errors.JaxRuntimeError, match="^INTERNAL"), naming_remedies(fitted()):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")


def test_the_command_prints_the_settings_and_no_traceback(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train.run, "prepare", take_too_much)
    assert train.run.main(["--config=paravt_tiny", "--run-dir", str(tmp_path / "run")]) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: a device has no memory left")
    assert "--engine.cache-tokens" in message and "Traceback" not in message


def test_a_full_disk_is_one_line_with_what_to_do(monkeypatch, capsys, tmp_path):
    def fill(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(train.run, "execute", fill)
    assert train.run.main(["--config=paravt_tiny", "--run-dir", str(tmp_path / "run")]) == TEMPORARY
    assert re.search(r"error: a disk is full .*make room, .*continues", capsys.readouterr().err)
