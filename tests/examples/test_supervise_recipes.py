"""The recipes in examples/supervise: valid shell, and which codes start a command again."""

from __future__ import annotations

import os
import shutil
import subprocess
import time

import pytest

from tests.processes import ROOT

FOLDER = ROOT / "examples" / "supervise"
SCRIPTS = sorted(FOLDER.iterdir())


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_recipes_are_valid_shell(script):
    subprocess.run(["bash", "-n", str(script)], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(script)], check=True)


@pytest.mark.parametrize(
    ("codes", "code", "starts"), [("75 70 134 0", 0, 4), ("75 1", 1, 2), ("137 143", 143, 2)]
)
def test_a_command_is_started_again_after_the_codes_that_deserve_it(codes, code, starts, tmp_path):
    (tmp_path / "codes").write_text(codes.replace(" ", "\n") + "\n")
    command = "code=$(head -n 1 codes); sed -i 1d codes; echo start >>starts; exit $code"
    ended = subprocess.run(
        [FOLDER / "restart.sh", "bash", "-c", command],
        cwd=tmp_path,
        env={**os.environ, "PAUSE": "0"},
    )
    assert ended.returncode == code
    assert (tmp_path / "starts").read_text().count("start") == starts


def test_a_command_that_was_stopped_is_not_started_again(tmp_path):
    script = "trap 'echo saved >>said; exit 143' TERM; echo begun >>said; sleep 60 & wait"
    with subprocess.Popen([FOLDER / "restart.sh", "bash", "-c", script], cwd=tmp_path) as running:
        while not (tmp_path / "said").exists():
            time.sleep(0.05)
        running.terminate()
        assert running.wait(20) == 143
    assert (tmp_path / "said").read_text().split() == ["begun", "saved"]
