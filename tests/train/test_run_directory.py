"""The directory of a run: one configuration, one process."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import jax.numpy as jnp
import pytest

from paravt_jax.data.stored import DamagedFileError, write_checked_json
from tests.damaged import damaged_versions
from train.durable.checkpoint import CheckpointError, Checkpoints
from train.durable.run_folder import (
    FORMAT,
    RunFolderError,
    claim_folder,
    read_config,
)

ROOT = pathlib.Path(__file__).parents[2]
CONFIG: dict[str, Any] = {"rl": {"lr": 1e-3, "frames": (4, 8), "anchor": None}, "seed": 0}


def claim(folder: pathlib.Path | str, config: dict[str, Any]) -> None:
    """Claim a folder for a moment."""
    with claim_folder(folder, config):
        pass


def test_a_new_folder_is_created_and_the_same_configuration_resumes(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "runs" / "a"
    with claim_folder(folder, CONFIG):
        written = json.loads((folder / "config.json").read_text())
    assert isinstance(written.pop("checksum"), int)
    assert written == {
        "format": FORMAT,
        "rl": {"lr": 1e-3, "frames": [4, 8], "anchor": None},
        "seed": 0,
    }
    (folder / "metrics.jsonl").write_text("{}\n")
    claim(folder, CONFIG)
    assert (folder / "metrics.jsonl").read_text() == "{}\n"


def test_another_configuration_is_refused_with_exactly_the_differences(
    tmp_path: pathlib.Path,
) -> None:
    other = {"rl": {"lr": 1.0}, "seed": 3}
    claim(tmp_path, other)
    # Without other files there, the configuration may still change.
    claim(tmp_path, CONFIG)
    (tmp_path / "videos").mkdir()
    before = (tmp_path / "config.json").read_bytes()
    rl = {"lr": 2e-3, "frames": (4, 8), "anchor": "credit"}
    with pytest.raises(RunFolderError) as refusal:
        claim(tmp_path, {"rl": rl, "extra": {}, "seed": 0})
    assert str(refusal.value).splitlines()[1:-1] == [
        "  rl.lr: 0.001 -> 0.002",
        '  rl.anchor: null -> "credit"',
        "  extra: (absent) -> {}",
    ]
    assert (tmp_path / "config.json").read_bytes() == before
    # The refusal has released the lock.
    claim(tmp_path, CONFIG)


def test_the_mesh_and_what_is_kept_on_disk_may_change_on_resume(
    tmp_path: pathlib.Path,
) -> None:
    here = CONFIG | {"mesh": {"fsdp": 1}, "max_left_out": 0.05}
    there = CONFIG | {"mesh": {"fsdp": 8}, "max_left_out": 0.5}
    here |= {"engine": {"slots": 8}, "rl": CONFIG["rl"] | {"microbatch_tokens": 0, "remat": "auto"}}
    there |= {
        "engine": {"slots": 9},
        "rl": CONFIG["rl"] | {"microbatch_tokens": 4, "remat": "full"},
    }
    claim(tmp_path, here)
    (tmp_path / "videos").mkdir()
    claim(tmp_path, there)
    assert json.loads((tmp_path / "config.json").read_text())["mesh"] == {"fsdp": 8}


def test_every_flipped_bit_of_a_configuration_is_named(tmp_path: pathlib.Path) -> None:
    """A changed digit is no other configuration, and another format is no other version."""
    claim(tmp_path, CONFIG)
    file = tmp_path / "config.json"
    for damaged in damaged_versions(file.read_bytes()):
        file.write_bytes(damaged)
        with pytest.raises(DamagedFileError, match=r"config\.json: damaged: .*delete it") as error:
            read_config(tmp_path, "--run-dir")
        assert "\n" not in str(error.value)


def test_a_lost_configuration_is_that_of_the_newest_checkpoint(tmp_path, capsys):
    claim(tmp_path, CONFIG)
    written = (tmp_path / "config.json").read_bytes()
    for step, seed in ((9, 3), (10, 0)):
        settings = {"settings": CONFIG | {"seed": seed}}
        checkpoints = Checkpoints(tmp_path / "checkpoints" / "sft", settings)
        checkpoints.save(step, {"w": jnp.zeros(2)}, {})
        checkpoints.close()
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(DamagedFileError, match="delete it and start the run's command, which rest"):
        claim(tmp_path, CONFIG)
    (tmp_path / "config.json").unlink()
    with pytest.raises(RunFolderError, match="seed: 0 -> 3"):
        claim(tmp_path, CONFIG | {"seed": 3})
    claim(tmp_path, CONFIG)
    assert (tmp_path / "config.json").read_bytes() == written
    assert "config.json: lost; " in capsys.readouterr().err
    (tmp_path / "config.json").unlink()
    metadata = tmp_path / "checkpoints" / "sft" / "10" / "meta" / "metadata"
    for damage in (lambda: metadata.write_bytes(b"{}"), metadata.unlink):
        damage()
        with pytest.raises(
            CheckpointError, match=rf"^{tmp_path}.*sft/10 cannot .* delete it to res"
        ):
            claim(tmp_path, CONFIG)
    shutil.rmtree(metadata.parents[1])
    claim(tmp_path, CONFIG | {"seed": 3})


def test_a_directory_of_another_format_is_refused_in_one_line(tmp_path: pathlib.Path) -> None:
    write_checked_json(tmp_path / "config.json", CONFIG | {"format": FORMAT + 1})
    before = (tmp_path / "config.json").read_bytes()
    (tmp_path / "videos").mkdir()
    with pytest.raises(RunFolderError, match="use the version") as refusal:
        claim(tmp_path, CONFIG)
    assert f"has format {FORMAT + 1}" in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert (tmp_path / "config.json").read_bytes() == before


HOLDER = """
import os, sys, time
from train.durable.run_folder import claim_folder
with claim_folder(sys.argv[1], {}):
    worker = os.fork()  # like a data worker
    if worker:
        print(worker, flush=True)
    time.sleep(60)
"""


def test_the_lock_admits_one_process_and_ends_with_it(tmp_path: pathlib.Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    worker = int(holder.stdout.readline())
    try:
        used = rf"^{tmp_path}/.lock: in use .*{holder.pid}\); wait for it, or stop it$"
        with pytest.raises(BlockingIOError, match=used):
            claim(tmp_path, {})
        holder.kill()
        holder.wait()
        time.sleep(0.1)
        # The orphaned worker still runs, without the lock.
        os.kill(worker, 0)
        claim(tmp_path, {})
    finally:
        holder.kill()
        holder.stdout.close()
        os.kill(worker, signal.SIGKILL)
