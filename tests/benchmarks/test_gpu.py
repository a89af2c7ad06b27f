"""The script for a machine with a GPU, with a tiny model on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.gpu import PARTS


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
