"""Compiled programs on disk: what is kept, where, and what happens where nothing can be kept."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
# Prints how many programs were loaded, and the bytes of a result that depends on rounding.
PROGRAM = """
import collections, json, pathlib, sys
import jax, jax.numpy as jnp
from models import compilation
compilation._SECONDS = 0.0
counts = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **_: counts.update([name]))
compilation.use_cache(pathlib.Path(sys.argv[1]))
x = jnp.arange(4096.0).reshape(64, 64)
y = jax.jit(lambda x: jax.nn.softmax(jnp.sin(x) @ x.T) / 3)(x)
loaded = counts["/jax/compilation_cache/cache_hits"]
print(json.dumps([loaded, jax.device_get(y).tobytes().hex()]))
"""


@pytest.fixture
def start(tmp_path):
    """start(NAME=value, ...) runs the program; returns programs loaded, result, and stderr."""

    def run(**variables: str) -> tuple[int, str, str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path)}
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path / "run")],
            env=environment | variables,
            capture_output=True,
            text=True,
            check=True,
        )
        return *json.loads(done.stdout), done.stderr

    return run


def kept(folder: pathlib.Path) -> list[pathlib.Path]:
    return list(folder.glob("*-cache"))


def test_a_second_start_loads_the_same_programs(start, tmp_path):
    folder = tmp_path / "paravt-jax" / "compiled"
    loaded, result, _ = start()
    assert (loaded, len(kept(folder)) > 0) == (0, True)
    # Left by a process that was killed while it wrote.
    cut_off = folder / "jit__lambda_-0-cache"
    cut_off.write_bytes(b"\0")
    again, same, errors = start()
    assert again > 0 and same == result and not cut_off.exists()
    assert "compiled programs" not in errors


def test_the_folder_of_jax_has_precedence_and_an_empty_one_keeps_nothing(start, tmp_path):
    own = tmp_path / "own"
    start(JAX_COMPILATION_CACHE_DIR=str(own), JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0")
    assert kept(own)
    start(JAX_COMPILATION_CACHE_DIR="")
    assert not (tmp_path / "paravt-jax").exists()


def test_a_folder_that_cannot_be_written_is_reported_in_one_line(start, tmp_path):
    file = tmp_path / "file"
    file.touch()
    loaded, _, errors = start(XDG_CACHE_HOME=str(file))
    assert loaded == 0
    (line,) = [line for line in errors.splitlines() if "compiled programs" in line]
    assert str(file) in line and "JAX_COMPILATION_CACHE_DIR" in line
