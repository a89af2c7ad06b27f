"""The check before a run: the good and the bad case of each item."""

from __future__ import annotations

import pathlib
import re
import types

import jax.numpy as jnp
import pytest

import paravt_extras.check as command
import train.run
from configs.paravt_8b import paravt_8b
from configs.paravt_tiny import paravt_tiny
from paravt_extras.check import Finding, NotReadyError, check, require_ready
from paravt_jax.processes.exit_codes import FAILED, TEMPORARY
from train.durable.run_folder import MAY_CHANGE, RunFolder
from train.run import resolved
from train.settings import Run, change

SLICE = "v5e:4x4"


def checked(run: Run, folder: pathlib.Path, topology: str = SLICE) -> dict[str, Finding]:
    findings = check(run, resolved(run), RunFolder(folder / "run"), topology)
    return {finding.item: finding for finding in findings}


def large(**fields: object) -> Run:
    return change(paravt_8b(), "large", {name.replace("__", "."): v for name, v in fields.items()})


def test_a_small_run_is_ready_and_prints_nothing(tmp_path, capsys):
    run = paravt_tiny()
    require_ready(run, resolved(run), RunFolder(tmp_path / "run"))
    assert capsys.readouterr() == ("", "")
    assert not list(tmp_path.iterdir())


def test_too_small_a_slice_is_an_error_and_a_large_one_names_the_sizes(tmp_path):
    assert checked(paravt_8b(), tmp_path, "v5e:2x4")["devices"].code
    finding = checked(paravt_8b(), tmp_path)["devices"]
    assert not finding.code and "mesh 1 x 16 x 1" in finding.text


def test_weights_are_of_the_recipes_size(tiny_model, tmp_path):
    right = change(paravt_tiny(), "right", {"model.path": str(tiny_model), "align": None})
    assert not checked(right, tmp_path)["--model.path"].code
    wrong = checked(large(model__path=str(tiny_model)), tmp_path)["--model.path"]
    assert wrong.code and "model.size 8b" in wrong.text


def test_what_the_hub_has_is_shown_with_its_size(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "list_files", lambda *_: {"a.parquet": 10**9, "b.zip": 10**9})
    found = checked(large(data__folder=str(tmp_path / "set")), tmp_path)
    for item in ("--model.path", "--data.annotations", "--data.media"):
        assert not found[item].code and "2.00GB" in found[item].text


def test_a_full_disk_may_pass_by_itself_and_nothing_else(tmp_path, monkeypatch):
    usage = types.SimpleNamespace(free=10**9, total=0, used=0)
    monkeypatch.setattr(command.shutil, "disk_usage", lambda path: usage)
    finding = checked(paravt_8b(), tmp_path, topology="")["disk"]
    assert finding.code and "1.00GB free" in finding.text
    assert NotReadyError([finding]).exit_code == TEMPORARY
    other = Finding("--model.path", "none", FAILED)
    assert NotReadyError([finding, other]).exit_code == FAILED


def test_a_device_without_memory_is_one_line_with_what_a_resumed_run_may_change(
    tmp_path, monkeypatch, capsys
):
    def take_too_much(*_: object) -> None:
        jnp.zeros((2**46,)).block_until_ready()

    monkeypatch.setattr(train.run, "prepare", take_too_much)
    assert train.run.main(["--config=paravt_tiny", "--run-dir", str(tmp_path / "run")]) == FAILED
    message = capsys.readouterr().err
    assert message.startswith("error: no memory is left (JaxRuntimeError: RESOURCE_EXHAUSTED")
    free, _ = message.split("new --run-dir")
    for flag in re.findall(r"--([\w.-]+)", free):
        name = flag.replace("-", "_")
        assert name in MAY_CHANGE or name.split(".")[0] in MAY_CHANGE


def test_a_full_disk_is_named(tmp_path, monkeypatch, capsys):
    def store(*_: object) -> None:
        raise RuntimeError("Failed to write: No space left on device")  # of array_record

    monkeypatch.setattr(train.run, "prepare", store)
    line = ["--config=paravt_tiny", "--run-dir", str(tmp_path / "run")]
    assert train.run.main(line) == TEMPORARY
    assert f"'{tmp_path / 'run'}'; make room" in capsys.readouterr().err


def test_a_run_that_needs_an_accelerator_does_not_start_on_a_cpu(tmp_path):
    run = large(run_dir=str(tmp_path / "run"))
    assert "needs a GPU or a TPU" in checked(run, tmp_path, topology="")["devices"].text
    with pytest.raises(ValueError, match="needs a GPU or a TPU"):
        train.run.execute(run)
    assert not list(tmp_path.iterdir())
