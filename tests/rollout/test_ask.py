"""`rollout.ask`: questions about a file, from Python and with the command."""

from __future__ import annotations

import errno
import functools
import itertools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from models.features import FrameSettings
from paravt_jax.data.frames import VideoError
from paravt_jax.method.protocol import Protocol, ProtocolSettings, render_call
from paravt_jax.method.records import (
    CropCall,
    Question,
    QuestionKind,
    StopReason,
)
from paravt_jax.processes.exit_codes import TEMPORARY
from rollout import ask
from rollout.agent.episode import Environment, EpisodeSettings, play
from rollout.ask import Assistant
from rollout.engine.engine import Engine
from rollout.engine.requests import SampleStop, run
from rollout.engine.runner import ModelRunner
from rollout.engine.settings import EngineSizes
from tests.rollout.conftest import Cut

ROOT = pathlib.Path(__file__).parents[2]
PROTOCOL = ProtocolSettings(max_calls=2, turn_tokens=24, summary_tokens=4, trajectory_tokens=40)
TEXT = "What number is shown in the scene that starts at 8 s?"


@pytest.fixture(scope="module")
def assistant(small_model, small_vocabulary) -> Assistant:
    return Assistant(small_model, small_vocabulary, PROTOCOL, FrameSettings(batch=8))


def test_an_answer_is_the_episode_that_training_would_play(
    assistant, small_model, small_vocabulary, small_world, small_features
):
    path = small_world.videos[0].path
    episode = assistant.ask(small_world.folder / path, TEXT, EpisodeSettings(4, 0.7), seed=5)
    sizes = EngineSizes(longest=320, slots=2, rows_per_prefix=2, pages=60, few_rows=2)
    question = Question("q", path, TEXT, QuestionKind.OPEN_ENDED, "")
    environment = Environment(Protocol(small_vocabulary, PROTOCOL), small_features)
    (expected,) = run(
        Engine(small_model, small_features, sizes),
        [play(environment, question, EpisodeSettings(4, 0.7), 5)],
    )
    np.testing.assert_array_equal(episode.trajectory.ids, expected.trajectory.ids)
    assert episode.stop is expected.stop
    assert len(episode.trajectory.frames) == 4
    assert episode.turns[0].text


def test_an_unreadable_video_and_a_long_question_are_refused(assistant, tmp_path):
    with pytest.raises(VideoError, match="absent.mp4"):
        assistant.ask(tmp_path / "absent.mp4", TEXT)
    with pytest.raises(ValueError, match="question: more than 512 tokens"):
        assistant.ask(tmp_path / "absent.mp4", "why? " * 2000)


def test_after_an_interrupt_the_same_question_has_the_same_answer(
    assistant, small_world, monkeypatch
):
    """Ctrl-C in a notebook, in any part of the engine, loses none of its pages."""
    video = str(small_world.folder / small_world.videos[0].path)
    ask = functools.partial(assistant.ask, video, TEXT, EpisodeSettings(4, 0.7), seed=5)
    wanted = ask()
    engine = assistant._engine(video, 4)

    def interrupted(*_):
        raise KeyboardInterrupt

    for method in ("prefill", "decode"):
        engine.forget()
        for _ in range(3):  # if pages were lost, there would be none left the third time
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(ModelRunner, method, interrupted)
                ask()
        np.testing.assert_array_equal(ask().trajectory.ids, wanted.trajectory.ids)


def test_threads_share_an_assistant(assistant, small_world):
    """As in a server: each of them gets the answer that it would get alone."""
    video = small_world.folder / small_world.videos[0].path

    def ask(second):
        text = f"Which digit appears at {second} s?"
        return assistant.ask(video, text, EpisodeSettings(4, 0.7)).trajectory.ids.tolist()

    seconds = range(4)
    alone = [ask(second) for second in seconds]
    with ThreadPoolExecutor(len(seconds)) as threads:
        assert list(threads.map(ask, seconds)) == alone


def test_a_stopped_answer_keeps_what_was_written(assistant, small_world, monkeypatch):
    # Sampled for the first time, few drafts are right: an answer takes several calls.
    setting = EpisodeSettings(4, 0.7)
    ask = functools.partial(
        assistant.ask, small_world.folder / small_world.videos[0].path, TEXT, setting, seed=7
    )
    steps = itertools.chain([False, False], itertools.repeat(True))
    with monkeypatch.context() as patch:
        patch.setattr(assistant, "stopped", lambda: next(steps))
        cut = ask()
    whole = ask()
    assert cut.stop is StopReason.STOPPED
    assert whole.turns[0].text.startswith(cut.turns[0].text)


# The command

CALLS = (CropCall(0, 16), CropCall(112, 128))
PLAN = "\n".join(["look closer", "</think>", *map(render_call, CALLS)])
REPORT = " seven from 8 to 10"


@pytest.fixture
def command(
    small_world, small_model, small_vocabulary, small_environment, scripted, monkeypatch, capsys
):
    """command(*argv) asks a model that looks closer and answers B; it returns exit code, stdout
    and stderr. `command.turns` and `command.report` are what it writes. Without `command.ready`,
    weights must not be read.
    """
    video = str(small_world.folder / small_world.videos[0].path)
    question = ("--model=m", "--video", video, "--frames=4", "--option=seven", "--option=four")

    def load(source, limits, **fields):
        assert start.ready, "the weights are read before the mistake is found"
        assistant = Assistant(small_model, small_vocabulary, small_environment.protocol.settings)
        sampler = scripted(start.turns, report=start.report)
        monkeypatch.setattr(assistant, "_engine", lambda video, frames: sampler)
        return assistant

    def start(*argv):
        code = ask.main((*question, *argv))
        said = capsys.readouterr()
        return code, said.out, said.err

    start.ready = True
    start.turns = [PLAN, "so\n</think>\n<answer>B</answer>"]
    start.report = REPORT
    monkeypatch.setattr(ask, "load_vocabulary", lambda source: small_vocabulary)
    monkeypatch.setattr(ask.Assistant, "load", load)
    former = signal.getsignal(signal.SIGINT)
    yield start
    signal.signal(signal.SIGINT, former)


def test_the_command_prints_the_episode_and_writes_its_page(command, tmp_path):
    file = tmp_path / "page.html"
    code, out, err = command(TEXT, "--html", str(file))
    assert code == 0
    assert out == "\n".join(
        [
            "--- turn 1",
            f"<think>\n{PLAN}",
            "    crop 1, 0 to 16 s (executed): seven from 8 to 10",
            "    crop 2, 112 to 128 s (executed): seven from 8 to 10",
            "--- turn 2",
            "<think>\nso\n</think>\n<answer>B</answer>",
            "--- answer: B (the episode ended: answered)\n",
        ]
    )
    # While it happens: every turn, every window, every report.
    happened = [line.partition(" s  ")[2].partition(":")[0] for line in err.splitlines()[1:-1]]
    calls = ["call 1, 0 to 16 s", "call 2, 112 to 128 s"]
    assert happened == ["turn 1", *calls, *calls, "turn 2"]
    assert err.endswith(f"page: {file}\n")

    page = file.read_text()
    assert page.startswith("<!doctype html>")
    assert not re.search("<script|https?:", page)
    # The answer comes first, with the moments that support it.
    first, card = page.split("</header>")
    assert first.index(TEXT) < first.index("<h1>four</h1>") < first.index('class="moment"')
    assert re.findall('href="#(.*)"', first) == re.findall('<div class="crop" id="(.*)"', card)
    assert first.count("data:image/png;base64,") == first.count("seven from 8 to 10") == 2
    assert card.count("four (chosen)") == 1
    # Which answer is right is not known.
    assert not re.search("[✓✗○]", page)


def test_json_is_all_that_is_printed_and_ctrl_c_keeps_what_there_is(command, tmp_path):
    code, out, _ = command(TEXT, "--json")
    record = json.loads(out)
    assert (code, record["answer"], record["option"]) == (0, "B", "four")
    assert record["tokens"] > 0 and record["seconds"] > 0
    windows = [(call["start"], call["end"]) for call in record["turns"][0]["calls"]]
    assert windows == [(call.start, call.end) for call in CALLS]

    def report(request):
        if request.frames[0].time == 0:
            return REPORT
        signal.raise_signal(signal.SIGINT)
        return Cut("", SampleStop.DEADLINE)

    command.report = report
    command.turns = [PLAN, Cut("", SampleStop.DEADLINE)]
    code, out, err = command(TEXT, "--json", "--html", str(tmp_path / "page.html"))
    record = json.loads(out)
    assert (code, record["stop"], record["option"]) == (130, "stopped", None)
    assert [call["status"] for call in record["turns"][0]["calls"]] == ["executed", "timed_out"]
    assert '<p class="quiet">stopped</p>' in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("start", ["-m rollout.ask", "-c import train.command as c; c.main()"])
def test_ctrl_c_while_modules_are_imported_is_one_line(start, tmp_path):
    (tmp_path / "tyro.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    done = subprocess.run(
        [sys.executable, *start.split(" ", 1), "ask"],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "\nstopped; give the same command again\n"


def test_a_page_for_which_there_is_no_room_is_named(command, tmp_path, monkeypatch):
    def fsync(number):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    code, out, err = command(TEXT, "--html", str(tmp_path / "page.html"))
    assert code == TEMPORARY and "--- answer: B" in out
    assert str(tmp_path / "page.html") in err.splitlines()[-1]


def test_mistakes_are_one_line_each(command, tmp_path):
    (tmp_path / "noise.mp4").write_bytes(bytes(range(256)) * 9)
    (tmp_path / "talk.srt").write_text("00:01 --> 00:02\nhello\n")
    command.ready = False
    for argv, message in (
        (("--video", f"{tmp_path}/none.mp4"), "--video .*none.mp4: no such file; give"),
        (("--video", f"{tmp_path}/noise.mp4"), "--video .*noise.mp4: it cannot be decoded"),
        (("--html", f"{tmp_path}/no/page.html"), "--html .*page.html: cannot be written; name"),
        (("--html", str(tmp_path)), "--html .*: cannot be written; name"),
        (("--frames", "0"), "--frames: 0; give"),
        (("--seconds", "0"), "--seconds: 0.0; give"),
        (("--turn-tokens", "0"), "--turn-tokens: 0; give"),
        (("--option", "four"), "--option: .*four.*; give"),
        (("--option", "four " * 999), "question: more than 512 tokens .*fewer"),
        (("--option", "\udcc3"), "'utf-8' .*; give .* locale"),
        (("--subtitles", f"{tmp_path}/no.srt"), "--subtitles .*no.srt: no such file; give"),
        (
            ("--subtitles", str(tmp_path / "talk.srt"), "--dispatch=none"),
            "--subtitles .*--dispatch none",
        ),
    ):
        code, out, err = command(TEXT, *argv)
        assert (code, out) == (1, ""), (argv, err)
        assert re.fullmatch(f"error: {message}.*\n", err), (argv, err)
    assert command(" ") == (1, "", "error: question: it is empty; ask something about the video\n")
