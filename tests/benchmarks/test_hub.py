"""The stand-in of the Hugging Face hub, and what our downloads do with its answers.

huggingface_hub reads its address at import, so every client is a process of its own.
"""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time
import zipfile

import numpy as np
import pytest

from benchmarks.hub import MEMBER, Hub

ROOT = pathlib.Path(__file__).parents[2]
MODEL = "Qwen/Qwen3-VL-8B-Instruct"
ROWS = "datasets/ParaVT/ParaVT-Parquet"
MEDIA = "datasets/ParaVT/ParaVT-Source"

# Prints the folder, or the error.
FETCH_MODEL = """
import sys
from models.weights.folder import local_folder
try:
    print(local_folder(sys.argv[1], weights=sys.argv[2:] == ["weights"]))
except FileNotFoundError as error:
    sys.exit(str(error))
"""
FETCH_DATA = """
import pathlib, sys
from paravt_jax.data import sources
folder = pathlib.Path(sys.argv[1])
print(sources.fetch("ParaVT/ParaVT-Parquet", folder / "annotations", ["*.parquet"]))
print(sources.media_root("ParaVT/ParaVT-Source", folder))
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A table of rows, and two videos in an archive."""
    folder = tmp_path_factory.mktemp("data")
    for name in ("annotations", "media"):
        (folder / name).mkdir()
    (folder / "annotations" / "rows.parquet").write_bytes(b"rows")
    with zipfile.ZipFile(folder / "media" / "clips.zip", "w") as archive:
        for name in ("0.mp4", "1.mp4"):
            archive.writestr(f"clips/{name}", b"frames")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A repository with a config of one byte, and weights.

    The client writes 10 MiB at a time, so that only larger files are continued in the middle.
    """
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text("1")
    (folder / "README.md").write_text("not asked for")
    noise = np.random.default_rng(0).bytes(24 * 2**20)
    (folder / "model.safetensors").write_bytes(noise)
    return folder


@pytest.fixture
def repositories(data, model):
    return {MODEL: model, ROWS: data / "annotations", MEDIA: data / "media"}


def environment(hub: Hub, home: pathlib.Path, token: str = "") -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "HF_TOKEN"}
    variables = inherited | hub.variables(home) | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    return variables | {"HF_TOKEN": token} if token else variables


def client(code: str, *arguments: object, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)


def fetched(hub: Hub, name: str) -> list[str]:
    """The GET requests for a file."""
    return [line for line in hub.requests if line.startswith("GET") and f"/{name}" in line]


@pytest.mark.slow
def test_a_model_is_fetched_without_its_weights_and_then_with_them(repositories, tmp_path):
    with Hub(repositories) as hub:
        env = environment(hub, tmp_path)
        first = client(FETCH_MODEL, MODEL, env=env)
        assert first.returncode == 0, first.stderr
        folder = pathlib.Path(first.stdout.strip())
        assert [path.name for path in folder.iterdir()] == ["config.json"]
        second = client(FETCH_MODEL, MODEL, "weights", env=env)
        assert pathlib.Path(second.stdout.strip()) == folder
        names = sorted(path.name for path in folder.iterdir())
        assert names == ["config.json", "model.safetensors"]
        for name in names:
            assert (folder / name).read_bytes() == (repositories[MODEL] / name).read_bytes()
        assert len(fetched(hub, "config.json")) == len(fetched(hub, "model.safetensors")) == 1


def test_rows_and_archives_of_media_are_fetched(repositories, data, tmp_path):
    with Hub(repositories) as hub:
        done = client(FETCH_DATA, tmp_path / "set", env=environment(hub, tmp_path / "home"))
    assert done.returncode == 0, done.stderr
    annotations, media = map(pathlib.Path, done.stdout.split())
    names = {path.name for path in (data / "annotations").iterdir()}
    assert {path.name for path in annotations.iterdir()} == names
    assert {path.name for path in media.rglob("*.mp4")} == {"0.mp4", "1.mp4"}


@pytest.mark.parametrize(
    ("token", "words"),
    [
        ("", ["gated", f"/{MODEL} ", "hf auth login", "HF_TOKEN"]),
        (MEMBER, []),
    ],
)
def test_a_gated_model_needs_a_token_and_consent(repositories, tmp_path, token, words):
    with Hub(repositories, gated=[MODEL]) as hub:
        done = client(FETCH_MODEL, MODEL, "weights", env=environment(hub, tmp_path, token))
    assert (done.returncode == 0) == (token == MEMBER)
    if words:
        assert done.stderr.startswith(f"{MODEL}: ") and done.stderr.count("\n") == 1
    for word in words:
        assert word in done.stderr


@pytest.mark.slow
def test_a_killed_download_is_completed_by_the_same_command(repositories, tmp_path):
    with Hub(repositories, cuts=1000) as hub:
        env = environment(hub, tmp_path)
        command = [sys.executable, "-c", FETCH_MODEL, MODEL, "weights"]
        started = subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 30
        while hub.cuts == 1000 or not list(tmp_path.rglob("snapshots/*/config.json")):
            assert time.monotonic() < deadline and started.poll() is None
            time.sleep(0.01)
        started.send_signal(signal.SIGKILL)
        started.wait()

        half = client(FETCH_MODEL, MODEL, "weights", env=env | {"HF_HUB_OFFLINE": "1"})
        assert half.returncode == 1 and half.stderr.startswith(f"{MODEL}: no such folder")
        hub.cuts = 0
        done = client(FETCH_MODEL, MODEL, "weights", env=env)
        assert done.returncode == 0, done.stderr
        assert len(fetched(hub, "config.json")) == 1
    weights = pathlib.Path(done.stdout.strip()) / "model.safetensors"
    assert weights.read_bytes() == (repositories[MODEL] / "model.safetensors").read_bytes()
