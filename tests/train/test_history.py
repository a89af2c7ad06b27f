"""The manifest of a run: what is lost is named, and going back leaves nothing of later steps."""

from __future__ import annotations

import contextlib
import json
import pathlib
import shutil

import jax.numpy as jnp
import pytest

from paravt_jax.data.stored_json import DamagedFileError
from tests.damaged import damaged_versions, flipped
from tests.train.homes import Steps, open_home
from train.durable.checkpoint import Checkpoints
from train.durable.history import HISTORY, History
from train.durable.metrics import read_metrics
from train.durable.run_directory import RunDirectoryError
from train.durable.saver import Saver


def train(folder: pathlib.Path, name: str, steps: int) -> int:
    """Trains a phase, as a new process, to its last step; returns the step it went on from.

    A file is made from the weights of each step, and a result at the end.
    """
    home = open_home(folder)
    home.history.begin()
    kept = Checkpoints(folder / "checkpoints" / name, asynchronous=True)
    with Saver(name, Steps(steps, 2), home, kept, {}) as saver:
        saver.restore({"n": jnp.zeros(())})
        for step in saver.steps():
            file = folder / f"{name}-{step}.json"
            file.write_text("{}")
            home.history.made(file, name, step)
            saver.done(step, {"n": jnp.full((), step, float)}, {"loss": 1.0}, {})
    (folder / "result.json").write_text("{}")
    return saver.finished_steps


def names(folder: pathlib.Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def damage(checkpoint: pathlib.Path) -> None:
    file = checkpoint / "meta" / "metadata"
    file.write_bytes(file.read_bytes()[:-1])


@pytest.fixture
def run(tmp_path) -> pathlib.Path:
    """A run with four steps of SFT and four of RL; each phase keeps checkpoints 2 and 4."""
    train(tmp_path, "sft", 4)
    train(tmp_path, "rl", 4)
    return tmp_path


def lost(run: pathlib.Path, words: str, phase: str = "rl") -> None:
    with pytest.raises(RunDirectoryError, match=words) as error:
        train(run, phase, 4)
    assert "\n" not in str(error.value)


def test_a_finished_run_loses_nothing_by_the_same_command(run, capsys):
    before = names(run)
    assert (train(run, "sft", 4), train(run, "rl", 4)) == (4, 4)
    assert names(run) == before
    assert "not there" not in capsys.readouterr().err


def test_lost_metrics_are_named(run):
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[:5] + lines[6:]))
    lost(run, "metrics.jsonl: lacks step 2 of rl, and 0 others: restore it")
    metrics.unlink()
    lost(run, "metrics.jsonl: lacks step 1 of sft, and 3 others: restore it")


def test_a_lost_file_is_named_and_its_loss_can_be_accepted(run, capsys):
    (run / "rl-3.json").unlink()
    lost(run, "rl-3.json: lost: restore it .* delete history.json")
    (run / HISTORY).unlink()
    assert train(run, "rl", 4) == 4
    assert "history.json: not there" in capsys.readouterr().err


@pytest.mark.parametrize("number", range(4))
def test_a_flipped_bit_of_metrics_is_named(run, number):
    """Also one that leaves a line valid, such as a changed digit."""
    file = run / "metrics.jsonl"
    content = file.read_bytes()
    digits = [place for place, byte in enumerate(content) if chr(byte) in "02468"]
    place = digits[number * (len(digits) - 1) // 3]
    file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    with pytest.raises((RunDirectoryError, DamagedFileError), match=r"metrics\.jsonl"):
        train(run, "rl", 4)


def test_a_changed_evaluation_is_named(run):
    (run / "rl-3.json").write_text('{"rows": []}')
    lost(run, "rl-3.json: damaged: its checksum is not .*: restore it")


def test_metrics_after_the_last_checkpoint_are_not_verified(run):
    """They are removed before the run goes on."""
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"phase": "rl", "step": 5, "wall": 0.0}) + "\n")
    assert train(run, "rl", 6) == 4
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")][-2:] == [5, 6]


@pytest.mark.parametrize("how", ["deleted", "newest deleted", "newest damaged"])
def test_a_lost_phase_that_a_later_one_was_trained_from_is_an_error(run, how):
    folder = run / "checkpoints" / "sft"
    if how == "deleted":
        shutil.rmtree(folder)
    elif how == "newest deleted":
        shutil.rmtree(folder / "4")
    else:
        damage(folder / "4")
    metrics = (run / "metrics.jsonl").read_bytes()
    lost(run, "sft/4: lost or damaged, but rl was trained from its weights", "sft")
    assert (run / "metrics.jsonl").read_bytes() == metrics, "nothing was cut"


def test_all_checkpoints_of_the_last_phase_lost_is_an_error(run):
    shutil.rmtree(run / "checkpoints" / "rl")
    lost(run, "rl: checkpoint 4 is lost: restore it")


@pytest.mark.parametrize("how", ["deleted", "damaged"])
def test_without_its_newest_checkpoint_a_run_goes_on_from_the_one_before(run, capsys, how):
    newest = run / "checkpoints" / "rl" / "4"
    shutil.rmtree(newest) if how == "deleted" else damage(newest)
    (run / "model").mkdir()
    lost(run, "rl/4: lost or damaged, and .*model was exported from it: restore .* move")
    (run / "model").rmdir()
    before = {name: (run / name).stat().st_mtime_ns for name in names(run)}
    capsys.readouterr()
    assert train(run, "rl", 4) == 2
    assert "rl/4: lost or damaged; rl goes on from step 2" in capsys.readouterr().err
    steps = [(row["phase"], row["step"]) for row in read_metrics(run / "metrics.jsonl")]
    assert steps == [(phase, step) for phase in ("sft", "rl") for step in (1, 2, 3, 4)]
    again = {name for name, time in before.items() if (run / name).stat().st_mtime_ns != time}
    assert {name for name in again if name.startswith(("sft", "rl"))} == {"rl-3.json", "rl-4.json"}
    assert train(run, "rl", 4) == 4


def test_going_back_removes_the_result_and_what_later_steps_made(run):
    history = History(run)
    history.go_on("rl", 2)
    assert not names(run) & {"rl-3.json", "rl-4.json", "result.json"}
    assert {"sft-4.json", "rl-1.json", "rl-2.json"} <= names(run)
    content = json.loads((run / HISTORY).read_text())
    assert content["steps"]["rl"] == {"first": 1, "last": 2}
    assert set(content["files"]) == {
        *(f"sft-{n}.json" for n in (1, 2, 3, 4)),
        "rl-1.json",
        "rl-2.json",
    }


def test_a_cold_start_of_another_run_needs_no_metrics_here(run, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    shutil.copytree(run / "checkpoints" / "sft", other / "checkpoints" / "sft")
    assert (train(other, "sft", 4), train(other, "rl", 4)) == (4, 0)
    assert train(other, "rl", 4) == 4
    assert {row["phase"] for row in read_metrics(other / "metrics.jsonl")} == {"rl"}


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", "3", '{"steps": {"rl": 3}, "files": {}}', '{"st']
)
def test_a_damaged_manifest_is_one_line(run, content):
    (run / HISTORY).write_text(content)
    with pytest.raises(DamagedFileError, match="history.json: damaged: .*restore") as error:
        History(run)
    assert "\n" not in str(error.value)


def test_every_flipped_bit_and_every_cut_of_the_manifest_is_named(tmp_path):
    """It judges all other files: a renamed `crc32` would switch a check off."""
    train(tmp_path, "sft", 2)
    file = tmp_path / HISTORY
    for damaged in damaged_versions(file.read_bytes()):
        file.write_bytes(damaged)
        with pytest.raises(DamagedFileError, match=r"history\.json: damaged: .*delete it") as error:
            History(tmp_path)
        assert "\n" not in str(error.value)


def of_an_earlier_version(run: pathlib.Path) -> bytes:
    """The manifest without its checksum."""
    _, _, rest = (run / HISTORY).read_text().partition("\n")
    return f"{{\n{rest}".encode()


def test_a_manifest_of_an_earlier_version_is_used_and_told(run, capsys):
    (run / HISTORY).write_bytes(of_an_earlier_version(run))
    assert train(run, "rl", 6) == 4
    assert "history.json: not verified: it has no checksum" in capsys.readouterr().err
    assert train(run, "rl", 6) == 6
    assert "not verified" not in capsys.readouterr().err, "the first save has written one"


def test_a_damaged_manifest_of_an_earlier_version_is_no_traceback(run):
    """Without a checksum, a flipped bit may stay unnoticed."""
    sound = of_an_earlier_version(run)
    (run / HISTORY).write_bytes(sound.replace(b'"rl"', b'"sl"'))
    with pytest.raises(DamagedFileError, match="history.json: damaged: phase 'sl' is unknown"):
        History(run)
    for place in range(len(sound)):
        (run / HISTORY).write_bytes(flipped(sound, place, place % 8))
        with contextlib.suppress(DamagedFileError, RunDirectoryError):
            History(run)
