"""Following a run: its pages, its end, an interrupt, a second follower, and what a failure says."""

from __future__ import annotations

import json
import pathlib
import sys
import time

import pytest

import paravt_extras.follow
from paravt_extras.follow import RunError, follow
from paravt_extras.report.live import live_page, newest_episode
from paravt_jax.data.stored_settings import lock

# Takes the place of `train.run`: a run of a few steps, which behaves as the script of it says.
STAND_IN = """
import json, pathlib, signal, sys, time
sys.path.insert(0, {root!r})
from paravt_jax.data.stored_settings import lock
from train.durable.interrupts import Interrupts
*_, name, flag, folder = sys.argv
assert flag == "--run-dir"
folder = pathlib.Path(folder)
folder.mkdir(parents=True, exist_ok=True)
if name == "--broken":
    print("something else", flush=True)
    sys.exit("error: no room\\nmake some")
if name == "--crash":
    raise KeyError("nobody expects this")
with lock(folder / ".lock"), Interrupts() as interrupts:
    (folder / "config.json").write_text(json.dumps({{"name": "mine", "rl": {{"steps": 3}}}}))
    step = 0
    while step < 3 or name == "--endless":
        step += 1
        line = {{"phase": "rl", "step": step, "wall": time.time(), "accuracy": 0.5, "loss": 0.0}}
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\\n")
        print(f"step {{step}}", flush=True)
        time.sleep(0.1)
        if interrupts.asked():
            (folder / "stopped").touch()
            sys.exit(130)
    (folder / "result.json").write_text("{{}}")
"""


@pytest.fixture
def run_dir(tmp_path, monkeypatch) -> pathlib.Path:
    """The folder of a run that the stand-in makes."""
    script = tmp_path / "stand_in.py"
    script.write_text(
        STAND_IN.format(root=str(pathlib.Path(paravt_extras.follow.__file__).parents[1]))
    )
    monkeypatch.setattr(paravt_extras.follow, "_COMMAND", (sys.executable, str(script)))
    return tmp_path / "run"


def wait_for(path: pathlib.Path) -> None:
    end = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.02)


def test_pages_show_the_curve_as_it_grows_and_then_the_end(run_dir):
    pages: list[str] = []
    follow(["--short"], run_dir, pages.append, every=0.02)
    assert "has recorded no step yet" in pages[0]
    assert any("Its last step is PARA-GRPO 2 of 3" in page for page in pages)
    assert any("step 2</pre>" in page for page in pages)
    assert "The run has finished." in pages[-1]
    assert all("<svg" in page for page in pages[-2:])
    assert len(set(pages)) == len(pages)


@pytest.mark.parametrize(
    ("name", "said"),
    [("--broken", "error: no room\nmake some"), ("--crash", "KeyError: 'nobody expects this'")],
)
def test_a_run_that_fails_is_an_error_with_its_message_alone(run_dir, name, said):
    with pytest.raises(RunError) as error:
        follow([name], run_dir, lambda page: None, every=0.02)
    assert said in str(error.value)
    assert "something else" not in str(error.value)
    assert str(run_dir.with_name("run.log")) in str(error.value)
    assert error.value._render_traceback_() == [str(error.value)]


def test_an_interrupt_stops_the_run_after_its_step(run_dir):
    pages: list[str] = []

    def interrupt(page: str) -> None:
        pages.append(page)
        if "<svg" in page and "<svg" not in pages[-2]:
            raise KeyboardInterrupt

    with pytest.raises(RunError, match="the same call continues"):
        follow(["--endless"], run_dir, interrupt, every=0.02)
    assert (run_dir / "stopped").exists()


def test_a_run_that_goes_on_alone_is_followed_and_not_started_again(run_dir):
    first = paravt_extras.follow._Run(run_dir, run_dir.with_name("run.log"), ["--short"])
    wait_for(run_dir / "config.json")
    follow(["--broken"], run_dir, lambda page: None, every=0.02)
    assert not first.is_running() and first.has_succeeded()
    steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").open()]
    assert steps == [1, 2, 3]


def test_a_run_that_has_not_locked_its_folder_yet_is_not_started_again(run_dir):
    first = paravt_extras.follow._Run(run_dir, run_dir.with_name("run.log"), ["--short"])
    second = paravt_extras.follow._Run(run_dir, run_dir.with_name("run.log"), ["--short"])
    assert second._id == first._id
    while first.is_running():
        time.sleep(0.02)
    assert not second.is_running() and second.has_succeeded()


def test_a_folder_that_another_program_holds_is_left_alone(run_dir):
    run_dir.mkdir()
    with lock(run_dir / ".lock"), pytest.raises(RunError, match="no run on this machine"):
        follow(["--short"], run_dir, lambda page: None, every=0.02)


def test_of_a_progress_bar_the_last_state_is_shown(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"one\n10 %\r50 %\r90 %\n\n")
    assert paravt_extras.follow._lines(log) == ["one", "90 %"]
    assert paravt_extras.follow._lines(tmp_path / "none") == []


def test_the_page_of_a_folder_that_does_not_exist_yet_says_so(tmp_path):
    page = live_page(tmp_path / "run", ["<compiling>"])
    assert "has recorded no step yet" in page
    assert "&lt;compiling&gt;" in page and "<svg" not in page


def test_the_newest_episode_is_of_the_latest_step_and_has_the_most_calls():
    def episode(phase: str, calls: int, step: int | None = None) -> dict:
        return {"phase": phase, "step": step, "turns": [{"calls": [None] * calls}]}

    before, early = episode("before", 5), episode("rl", 4, 1)
    late = [episode("rl", calls, 2) for calls in (0, 3, 1)]
    assert newest_episode([before, early, *late]) is late[1]
    assert newest_episode([before]) is before
    assert newest_episode([]) is None
