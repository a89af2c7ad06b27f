"""The script for a machine with a GPU, with a tiny model on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.gpu import PARTS


@pytest.mark.slow
def test_what_was_measured_before_the_time_was_up_is_stored_and_printed(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    file = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--size", "tiny", "--json", str(file)]
    command += ["--seconds", "45"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr[-3000:]
    assert json.loads(file.read_text())["parts"]["ceilings"]["ended"]
    assert "| ceilings | matrix product |" in done.stdout
    assert "| transformers | not to its end |" in done.stdout


@pytest.mark.long
def test_every_part_is_measured_and_stored(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    file = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--size", "tiny", "--json", str(file)]
    subprocess.run([*command, "--seconds", "1200"], check=True)
    parts = json.loads(file.read_text())["parts"]
    assert parts.keys() == PARTS.keys() and all(part["ended"] for part in parts.values())
    assert subprocess.run([*command, "--size", "2b"]).returncode == 2
    again = subprocess.run([*command, "--seconds", "0"], capture_output=True, text=True, check=True)
    assert "| learn | alone: update |" in again.stdout and "not to its end" not in again.stdout
