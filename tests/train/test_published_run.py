"""From published files to a comparison of two evaluations, with the commands of the docs."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import rollout.evaluate as evaluation
import train.export
import train.prepare
from benchmarks.killing import without_clock
from benchmarks.published_run import write_files
from rollout.view.change import changes
from rollout.view.index import Folder
from train.durable.metrics import read_metrics

ROOT = pathlib.Path(__file__).parents[2]
EVALUATE = """
    --benchmark=videomme --data videos --frames 4 --protocol.turn-tokens 16
    --protocol.summary-tokens 16 --protocol.trajectory-tokens 144 --protocol.max-tool-turns 1
    --pixels 1024 1024
""".split()


@pytest.fixture(scope="module")
def folder(assets, tmp_path_factory, request) -> pathlib.Path:
    """The working directory of a user who has downloaded and prepared everything."""
    folder = tmp_path_factory.mktemp("road")
    write_files(folder, assets)
    before = pathlib.Path.cwd()
    request.addfinalizer(lambda: os.chdir(before))
    os.chdir(folder)
    assert train.prepare.main(["--config=published_sft"]) == 0
    return folder


@pytest.fixture
def command(compiled) -> Callable[..., subprocess.Popen[str]]:
    """Starts `train.run` as a program.

    Without the flags of tests/conftest.py: with the real vocabulary it computes more than it
    compiles.
    """

    def start(recipe: str, name: str, *arguments: str) -> subprocess.Popen[str]:
        environment = dict(
            os.environ, PYTHONPATH=str(ROOT), JAX_COMPILATION_CACHE_DIR=str(compiled)
        )
        del environment["XLA_FLAGS"]
        line = [sys.executable, "-m", "benchmarks.published_run", f"--config={recipe}"]
        line += ["--run-dir", f"runs/{name}", *arguments]
        return subprocess.Popen(line, env=environment, stderr=subprocess.PIPE, text=True)

    return start


def finish(process: subprocess.Popen[str]) -> None:
    """Wait until a command has ended without an error."""
    message = process.communicate()[1]
    assert process.returncode == 0, message[-4000:]


def metrics_of(name: str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what is measured."""
    return without_clock(read_metrics(f"runs/{name}/metrics.jsonl"))


def weights_of(name: str) -> pathlib.Path:
    return pathlib.Path(f"runs/{name}/model/model.safetensors")


@pytest.mark.slow
def test_from_published_files_to_a_comparison(folder, command):
    finish(command("published_sft", "sft"))
    lines = metrics_of("sft")
    steps = [(line["phase"], line["step"], line["missing"]) for line in lines]
    assert steps == [("sft", 1, 0), ("sft", 2, 0), ("sft", 3, 0)]
    # The first update has learning rate 0.
    assert lines[2]["loss"] < lines[1]["loss"]
    result = json.loads(pathlib.Path("runs/sft/result.json").read_text())
    assert result["after"] == []

    start = ("--sft.steps", "0", "--model.path", "runs/sft/model")
    finish(command("published_rl", "rl", *start))
    result = json.loads(pathlib.Path("runs/rl/result.json").read_text())
    assert result["before"][0]["n"] == result["after"][0]["n"] == 2
    assert result["token_mismatches"] == 0
    episodes = pathlib.Path("runs/rl/episodes.jsonl").read_text().splitlines()
    videos = [pathlib.Path(json.loads(line)["video"]) for line in episodes]
    assert videos
    for video in videos:
        assert video.is_relative_to(folder / "media") and video.is_file()

    checkpoint = ["--run-dir", "runs/rl", "--phase", "rl", "--step", "1"]
    assert train.export.main([*checkpoint, "--to", "exported"]) == 0
    assert evaluation.main(["--model", "exported", *EVALUATE]) == 0
    shutil.copytree("evaluations/exported", "evaluations/b")
    folders = [Folder(f"evaluations/{name}", name) for name in ("exported", "b")]
    (change,) = changes(*folders)
    assert "+0.0 [" in change and "on 2 questions" in change

    # RL needs its reference, the cold start's weights: the run does not continue with others.
    pathlib.Path("runs/rl/result.json").unlink()  # a finished run needs none
    weights = weights_of("sft")
    weights.write_bytes(weights.read_bytes()[:-4] + b"abcd")
    weights.with_name("sums.json").unlink()
    refused = command("published_rl", "rl", *start)
    message = refused.communicate()[1]
    assert refused.returncode == 1
    assert "is another run's" in message and "weights: " in message
