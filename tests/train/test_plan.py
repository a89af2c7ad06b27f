"""The plan compiles a run's programs for TPU, and says whether they fit."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from paravt_extras.plan.__main__ import main
from tests.models.program import FOR_TPU

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu, the TPU's compiler: pip install -e '.[tpu]'",
)


def planned(*arguments: str) -> tuple[int, list[str]]:
    """The exit code and the lines of the command, in a process without the flags for CPU."""
    line = [sys.executable, "-m", "paravt_extras.plan", "--topology=v5e:1x1", *arguments]
    environment = {**os.environ, **FOR_TPU, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(line, capture_output=True, text=True, env=environment, check=False)
    return done.returncode, done.stdout.splitlines() or [done.stderr]


@pytest.mark.slow
def test_programs_of_the_smallest_recipe_with_adapters_compile_and_fit():
    code, lines = planned("--config=paravt_2b_lora", "--only", "bank,RL optimizer")
    assert code == 0, lines
    assert lines[-2].startswith("RL optimizer") and lines[-1].startswith("fits: 15.75 GiB")


@pytest.mark.slow
def test_a_program_that_is_too_large_is_a_result():
    sizes = ("--sft.remat=none", "--sft.microbatches=1")
    code, lines = planned("--config=sft_2b_lora", "--only", "SFT update", *sizes)
    assert code != 0 and "does not fit" in lines[-1] or "too small" in lines[-1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "topology = ''"),
        (["--topology=v5e:3"], "v5e:3"),
        (["--topology=v5e:4x4", "--only", "nothing"], "--only nothing: unknown"),
        (["--topology=v5e:4x4", "--mesh.fsdp", "8", "--mesh.tensor", "1"], "mesh: "),
    ],
)
def test_a_mistake_is_one_line(arguments, words, capsys):
    assert main(["--config=paravt_8b", *arguments]) == 2
    message = capsys.readouterr().err.strip()
    assert words in message and "\n" not in message
