"""The plan compiles a run's programs for TPU, and says whether they fit."""

from __future__ import annotations

import importlib.util

import pytest

from paravt_extras.plan.__main__ import main

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu, the TPU's compiler: pip install -e '.[tpu]'",
)


@pytest.mark.slow
def test_programs_of_the_smallest_recipe_with_adapters_compile_and_fit(capsys):
    arguments = ["--config=paravt_2b_lora", "--topology=v5e:1x1", "--only", "bank,RL optimizer"]
    assert main(arguments) == 0
    *_, table, verdict = capsys.readouterr().out.splitlines()
    assert table.startswith("RL optimizer") and verdict.startswith("fits: 15.75 GiB")


@pytest.mark.slow
def test_a_program_that_is_too_large_is_a_result(capsys):
    arguments = ["--config=paravt_2b_lora", "--topology=v5e:1x1", "--only", "SFT update"]
    assert main([*arguments, "--sft.remat=dots", "--sft.microbatches=1", "--sft.rows=32"]) == 1
    assert "does not fit" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "topology = ''"),
        (["--topology=v5e:3"], "v5e:3"),
        (["--topology=v5e:4x4", "--only", "nothing"], "--only nothing: unknown"),
        (["--topology=v5e:4x4", "--mesh.fsdp", "8", "--mesh.tensor", "1"], "mesh: "),
        (["--topology=v5e:4x4", "--rehearse"], "rehearse"),
    ],
)
def test_a_mistake_is_one_line(arguments, words, capsys):
    assert main(["--config=paravt_8b", *arguments]) == 2
    message = capsys.readouterr().err.strip()
    assert words in message and "\n" not in message
