"""Emergency saves: when they are made, which of them are used, and that they restore every bit.

1. A phase goes on from a copy that is newer than its last checkpoint.
2. A copy that is damaged, of other settings or of another history is not used.
3. Processes use a step only if all of them have it.
4. Saves take a bounded share of the time, and a full disk does not end the run.
"""

from __future__ import annotations

import errno
import json
import pathlib
import signal
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.durable import emergency
from train.durable.checkpoint import Checkpoints
from train.durable.emergency import EmergencySaves
from train.durable.history import History
from train.durable.interrupts import Interrupts
from train.durable.metrics import MetricsWriter, read_metrics
from train.durable.phase import Phase, Saves

PROGRAM = pathlib.Path(__file__).with_name("small.py")
STEPS = 7


@pytest.fixture
def always(monkeypatch):
    """A save is due after every step."""
    monkeypatch.setattr(emergency, "SHARE", 1.0)


class Died(RuntimeError):
    """Stands for the death of the process."""


def state_after(step: int) -> dict[str, jax.Array | np.ndarray]:
    keys = jax.random.split(jax.random.key(step), 2)
    return {
        "w": jax.random.normal(keys[0], (3, 5), jnp.bfloat16),
        "m": jax.random.normal(keys[1], (4,)),
        "step": jnp.int32(step),
        "tower": np.arange(6, dtype=np.float32).reshape(2, 3) + step,
    }


def run(
    folder: pathlib.Path, dies_after: int = STEPS, identity: str = "mine", destroys: int = 0
) -> list[int]:
    """The steps that a start of a phase makes. Its checkpoints are 3 and 6."""
    with Phase(
        name="rl",
        steps=STEPS,
        saves=Saves(
            Checkpoints(folder / "rl", asynchronous=True),
            every=3,
            meta={},
            emergency=EmergencySaves(folder / "shm", {"of": identity}),
        ),
        metrics=MetricsWriter(folder, tensorboard=False),
        interrupts=Interrupts(),
        history=History(folder),
    ) as phase:
        state, cursor = phase.resume({name: leaf * 0 for name, leaf in state_after(1).items()})
        assert cursor == ({"at": phase.finished_steps} if phase.finished_steps else None)
        if phase.finished_steps:
            wanted = state_after(phase.finished_steps)
            for name, leaf in wanted.items():
                assert isinstance(state[name], np.ndarray) == isinstance(leaf, np.ndarray)
                assert state[name].dtype == leaf.dtype
                assert np.asarray(state[name]).tobytes() == np.asarray(leaf).tobytes()
        for step in phase.left:
            bad = {"m": jnp.full(4, jnp.inf)} if step == destroys else {}
            phase.done(step, {"loss": 1.0}, state_after(step) | bad, {"at": step})
            if step == dies_after != STEPS:
                raise Died
        return list(phase.left)


def copies(folder: pathlib.Path) -> list[int]:
    return sorted(int(path.name) for path in (folder / "shm" / "0").glob("*"))


def died(folder: pathlib.Path, after: int) -> None:
    with pytest.raises(Died):
        run(folder, after)


def test_a_phase_goes_on_from_a_newer_copy_and_removes_all_at_its_end(always, tmp_path, capfd):
    died(tmp_path, 5)
    assert copies(tmp_path) == [4, 5]
    before = read_metrics(tmp_path / "metrics.jsonl")
    assert run(tmp_path) == [6, 7]
    assert "PARA-GRPO 5/7 is restored from an emergency save" in capfd.readouterr().err
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert rows[:5] == before
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert copies(tmp_path) == []


def test_a_destroyed_state_is_not_copied(always, tmp_path):
    died(tmp_path, 4)
    with pytest.raises(ValueError, match="after PARA-GRPO 5/7, m is not finite"):
        run(tmp_path, destroys=5)
    assert copies(tmp_path) == [4]
    assert run(tmp_path) == [5, 6, 7]


def test_a_checkpoint_that_is_newer_is_used(always, tmp_path):
    died(tmp_path, 6)
    # Regular checkpoints are no reason for a copy.
    assert copies(tmp_path) == [4, 5]
    assert run(tmp_path) == [7]


def test_a_damaged_copy_is_named_and_the_one_before_it_is_used(always, tmp_path, capfd):
    died(tmp_path, 5)
    file = tmp_path / "shm/0/5/arrays"
    data = bytearray(file.read_bytes())
    data[7] ^= 1
    file.write_bytes(data)
    assert run(tmp_path) == [5, 6, 7]
    assert f"{tmp_path / 'shm/0/5'}: " in capfd.readouterr().err


@pytest.mark.parametrize("name", ["arrays", "record.json", "sums.json"])
def test_a_copy_that_lost_a_file_is_not_used(always, tmp_path, name):
    died(tmp_path, 4)
    (tmp_path / "shm/0/4" / name).unlink()
    assert run(tmp_path) == [4, 5, 6, 7]


def test_a_copy_of_other_settings_is_not_used(always, tmp_path):
    died(tmp_path, 5)
    assert run(tmp_path, identity="another") == [4, 5, 6, 7]


def test_a_copy_of_another_history_is_not_used(always, tmp_path):
    """The folder was restored from a backup, and trained on from there."""
    died(tmp_path, 5)
    file = tmp_path / "metrics.jsonl"
    rows = read_metrics(file)
    rows[4]["wall"] += 1
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert run(tmp_path) == [5, 6, 7]


def test_saves_take_a_bounded_share_of_the_time(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(emergency, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    saves = EmergencySaves(tmp_path, {})

    def slow_write(*_: object) -> None:
        now[0] += 2.0

    monkeypatch.setattr(saves, "_write", slow_write)
    assert saves.due()
    saves.save(1, state_after(1), {}, 0.0)
    now[0] += 37.9
    assert not saves.due()
    now[0] += 0.2
    assert saves.due(), "2 of 40 seconds are 5 %"


def test_a_folder_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"checkpoints.emergency: .*\(Not a directory\); give a"):
        EmergencySaves(tmp_path / "file" / "shm", {})


def test_a_full_disk_ends_the_saves_and_not_the_run(always, tmp_path, monkeypatch, capfd):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(EmergencySaves, "_write", full)
    assert run(tmp_path) == [1, 2, 3, 4, 5, 6, 7]
    lines = [line for line in capfd.readouterr().err.splitlines() if "emergency" in line]
    assert len(lines) == 1
    assert "No space left on device" in lines[0] and "make room" in lines[0]


@pytest.mark.slow
def test_two_processes_use_the_newest_copy_that_both_have(together, tmp_path):
    program = str(PROGRAM.with_name("hosts_program.py"))
    for ended in together([program, "rescue", str(tmp_path)], 2, devices=2):
        assert ended.code == 0, ended.err[-3000:]
        assert json.loads(ended.out.splitlines()[-1]) == {"newest": 2, "equal": True, "cursor": 2}


@pytest.mark.slow
def test_a_killed_run_goes_on_from_its_emergency_save_bit_for_bit(together, tmp_path):
    """No checkpoint is made within the phase that is killed."""
    whole, killed, memory = (tmp_path / name for name in ("whole", "killed", "memory"))

    def command(folder: pathlib.Path) -> list[str]:
        settings = "--sft.save-every 100 --rl.save-every 100 --rl.no-control --evaluation.no-curve"
        places = ["--run-dir", str(folder), "--checkpoints.emergency", str(memory)]
        return [str(PROGRAM), "--config=small", *settings.split(), *places]

    def rows(folder: pathlib.Path) -> list[dict]:
        return read_metrics(folder / "metrics.jsonl")

    def kill(processes) -> None:
        while not any(row["phase"] == "rl" and row["step"] == 4 for row in rows(killed)):
            assert processes[0].poll() is None
            time.sleep(0.05)
        processes[0].send_signal(signal.SIGKILL)

    (ended,) = together(command(whole), 1, devices=1, timeout=900)
    assert ended.code == 0, ended.err[-3000:]
    (ended,) = together(command(killed), 1, devices=1, timeout=900, disturb=kill)
    assert ended.code == -signal.SIGKILL
    (ended,) = together(command(killed), 1, devices=1, timeout=900)
    assert ended.code == 0, ended.err[-3000:]
    assert "is restored from an emergency save" in ended.err
    for mine, other in zip(rows(killed), rows(whole), strict=True):
        same = ("phase", "step", "loss", "grad_norm", "reward/total", "weights/fingerprint")
        assert [mine.get(name) for name in same] == [other.get(name) for name in same]
    weights = "model/model.safetensors"
    assert (killed / weights).read_bytes() == (whole / weights).read_bytes()
    assert not list(memory.glob("*/*/*/*"))
