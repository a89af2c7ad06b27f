"""A run whose device has no memory left says which settings to lower."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import pytest

import train.run
from configs.lora import paravt_2b_lora
from paravt_extras.fit import fit
from paravt_extras.slices import Topology
from train.durable.run_folder import MAY_CHANGE
from train.out_of_memory import OutOfMemoryError, naming_remedies


def take_too_much(*_):
    jnp.zeros((2**46,)).block_until_ready()


def fitted():
    return fit(paravt_2b_lora(), Topology("v5e:1x1").available).run


def test_the_settings_to_lower_are_flags_and_a_run_may_resume_with_other_values():
    run = fitted()
    with pytest.raises(OutOfMemoryError, match="RESOURCE_EXHAUSTED") as error, naming_remedies(run):
        take_too_much()
    free, defining = str(error.value).split("new --run-dir")
    named = re.findall(r"--([\w.-]+) \(now (\w+)", free)
    assert len(named) == 6 and "--rl.frame-budgets (now 4 8" in defining
    for flag, value in named:
        name = flag.replace("-", "_")
        assert str(functools.reduce(getattr, name.split("."), run)) == value
        assert name in MAY_CHANGE or name.split(".")[0] in MAY_CHANGE


def test_other_errors_of_programs_pass():
    with pytest.raises(jax.errors.JaxRuntimeError, match="^INTERNAL"), naming_remedies(fitted()):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")


def test_the_command_prints_the_settings_and_no_traceback(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train.run, "prepare", take_too_much)
    assert train.run.main(["--config=paravt_tiny", "--run-dir", str(tmp_path / "run")]) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: a device has no memory left")
    assert "--engine.cache-tokens" in message and "Traceback" not in message
