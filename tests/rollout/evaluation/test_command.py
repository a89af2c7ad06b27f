"""The command: mistakes end in one line, stopped runs continue, real models and files work."""

from __future__ import annotations

import csv
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from paravt_jax.data.question_files import read_questions
from paravt_jax.method.protocol import ProtocolSettings
from paravt_jax.method.records import Question, QuestionKind
from rollout import evaluate as command
from rollout.evaluation import run as evaluation
from rollout.evaluation.folder import FolderError, latest, read_json
from rollout.evaluation.settings import BenchmarkSettings
from tests.paravt_jax.judge_server import says, serving
from tests.rollout.evaluation import published

ROOT = pathlib.Path(__file__).parents[3]
ANSWER = "x\n</think>\n<answer>B</answer>"


@pytest.fixture
def run(checkpoint, split, player, monkeypatch, capfd, tmp_path):
    """run(**settings) evaluates with a scripted sampler; returns summary and printed text."""

    def evaluate(records=None, said=ANSWER, **fields):
        def scripted_player(setup, reader, judge, devices):
            return player([said], scorer=judge, benchmark=setup.settings.benchmark)

        monkeypatch.setattr(evaluation, "load_player", scripted_player)
        defaults: dict[str, Any] = {
            "model": str(checkpoint),
            "benchmark": "videomme",
            "data": str(split),
            "out": str(tmp_path / "out"),
        }
        summary = evaluation.evaluate(BenchmarkSettings(**defaults | fields), records)
        return summary, capfd.readouterr().err

    return evaluate


def without_run(summary: dict[str, Any]) -> dict[str, Any]:
    """A summary without what may differ between two runs on the same questions."""
    varying = ("seconds_per_question", "config")
    return {k: v for k, v in summary.items() if k not in varying}


# --- a run with a scripted sampler ---


def test_a_run_returns_writes_and_prints_its_summary(run, tmp_path):
    summary, printed = run()
    assert (summary["n"], summary["questions"]) == (3, 6)
    assert summary["accuracy"] == pytest.approx(1 / 3)
    causes = {failure["id"]: failure["left_out"] for failure in summary["left_out"]}
    assert causes == {"3-1": "missing", "3-2": "missing", "4-1": "unreadable"}
    missing = "2 missing, 1 unreadable, such as 3-1 (data/gone.mp4): no file data/gone.mp4"
    last = printed.splitlines()[-1]
    assert last.startswith(f"error: more than 10% of the questions were left out ({missing}")
    assert str(tmp_path / "out" / "questions.csv") in last
    assert "VideoMME w/o: 33.3 [" in printed
    assert "] on 3 of 6 questions\n" in printed
    assert "| 6/6 [" in printed
    assert "mcq=33.3" in printed
    config = read_json(tmp_path / "out" / "config.json")
    assert config["identity"]["weights"] and config["settings"]["k"] == 64
    assert read_json(tmp_path / "out" / "summary.json") == json.loads(json.dumps(summary))


def test_a_second_run_plays_only_what_has_no_score(run, tmp_path):
    first, _ = run(limit=1)
    assert (first["n"], first["questions"]) == (1, 6)
    file = tmp_path / "out" / "questions.jsonl"
    lines = file.read_bytes()
    file.write_bytes(lines + lines[:50])  # killed while writing
    second, printed = run()
    assert second["n"] == 3
    assert "1 answers are kept; 5 questions are asked" in printed
    assert file.read_bytes().startswith(lines + b"{")
    third, printed = run()
    assert "| 3/3 [" in printed  # questions that were left out are tried again
    at_once, _ = run(out=str(tmp_path / "other"))
    assert without_run(third) == without_run(at_once)


def test_another_model_or_setting_needs_another_folder(run, checkpoint, tmp_path):
    run(limit=1)
    with pytest.raises(FolderError, match="k: 64 -> 8"):
        run(limit=1, k=8)
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in checkpoint.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    run(limit=1, model=str(copy))  # the same weights elsewhere are the same model
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    with pytest.raises(FolderError, match="weights: "):
        run(limit=1, model=str(copy))


def beside(videos: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """The folder, now with the videos and their subtitles."""
    for name in ("data", "subtitle"):
        shutil.copytree(videos / name, folder / name)
    return folder


def test_a_file_of_own_questions_grows_and_is_mended(run, videos, tmp_path):
    """Answers to unchanged questions are kept, whatever their columns say now."""
    file = beside(videos, tmp_path) / "my.csv"
    choice = ('How many apples?,"[""one"", ""two""]"', "B,mcq")
    a = "a,data/w0.mp4,{},{},subtitle/w0.srt,easy".format(*choice)
    b = "b,data/w1.mp4,Which letter?,,B,oe,,hard"

    def evaluate(*lines):
        header = "id,video,question,options,answer,kind,subtitles,level"
        file.write_text("\n".join([header, *lines]))
        summary, printed = run(benchmark="", data=str(file))
        with (tmp_path / "out" / "questions.csv").open(newline="") as table:
            return summary, printed, list(csv.DictReader(table))

    first, printed, _ = evaluate(a, b)
    assert (first["accuracy"], first["with_subtitles"]) == (1.0, 1)
    assert "mcq=100, oe=100, left out=0" in printed
    records = read_questions(file, videos)
    from_python, _ = run(records, benchmark="", data=str(videos), out=str(tmp_path / "python"))
    assert from_python["open_ended"]["score"] == first["open_ended"]["score"] == 1.0
    mended = (a.replace("B,mcq", "A,mcq"), b.replace("hard", "easy"))
    new = ('c,data/w1.mp4,When?,,"[500, 600]",tvg,,', "d,sub/w1.mp4,Who?,,B,oe,,")
    summary, printed, table = evaluate(*mended, *new)
    assert "1 answers are kept; 3 questions are asked" in printed
    assert summary["open_ended"]["by_column"]["level: easy"]["n"] == 1
    fields = ("id", "kind", "right", "read", "score", "stop", "left_out", "level")
    assert [",".join(line[field] for field in fields) for line in table] == [
        "a,mcq,A,B,0.0,answered,,easy",
        "b,oe,B,B,1.0,answered,,easy",
        "c,tvg,,,,,broken,",
        "d,oe,,,,,missing,",
    ]
    assert table[2]["reason"].startswith("its answer is [500, 600], and its video ends at ")
    gone, _, table = evaluate(b)
    assert (gone["n"], "accuracy" in gone, len(table)) == (1, False, 1)


def test_broken_records_count_as_records_of_the_split(run, tmp_path):
    """Three of five have no right answer: a full score on the two others is no full score."""
    records = [published.videomme(str(number), "w0", "B") for number in range(5)]
    for record in records[2:]:
        record["answer"] = ""
    data = published.write_split("videomme", tmp_path / "records", records)
    summary, printed = run(data=str(data))
    assert (summary["n"], summary["accuracy"], len(summary["broken_records"])) == (2, 1.0, 3)
    assert "on 2 of 5 questions" in printed
    assert "broken records: 3" in printed


def test_open_ended_answers_have_the_scores_of_the_judge(run, videos):
    question = Question("q", "data/w0.mp4", "Who?", QuestionKind.OPEN_ENDED, "the letter B")
    with serving(lambda *_: says("0.5")) as server:
        judge = (server.endpoint, "m")
        summary, _ = run([question], benchmark="", data=str(videos), judge=judge)
    assert summary["open_ended"]["score"] == 0.5
    assert [received.body["model"] for received in server.received] == ["m"]


# --- mistakes ---


def call(argv, capfd) -> tuple[int | str | None, str]:
    """The command's exit code, and what it printed on one line without tyro's frames."""
    try:
        code = command.main(argv)
    except SystemExit as error:  # raised by tyro
        code = error.code
    out = capfd.readouterr()
    return code, " ".join((out.err + out.out).replace("│", " ").split())


MISTAKES = [
    (["--model", "nowhere/at/all"], "nowhere/at/all: neither a folder"),
    (["--judge", "localhost", "m"], "judge: the address 'localhost' is not the base of an API"),
    (
        ["--protocol.prompt", "reasoning", "--dispatch", "parallel"],
        "--dispatch parallel: no tool is offered",
    ),
    (["--frames", "-1"], "--frames -1: "),
    (["--benchmark", "videomm"], "--benchmark videomm: no such split; give one of videomme"),
    (["--data", ""], "--data is missing"),
    (["--pixels", "602112", "9"], "--pixels 602112 9: at least 784"),
    (["--benchmark", ""], "--benchmark is missing, and --data"),
]


@pytest.mark.parametrize(
    ("wrong", "message"), MISTAKES, ids=[" ".join(wrong) for wrong, _ in MISTAKES]
)
def test_a_mistake_ends_in_a_message(wrong, message, checkpoint, split, capfd, tmp_path):
    flags = {
        "--model": str(checkpoint),
        "--benchmark": "videomme",
        "--data": str(split),
        "--out": str(tmp_path / "o"),
    }
    argv = [word for flag, value in flags.items() if flag not in wrong for word in (flag, value)]
    code, printed = call([*argv, *wrong], capfd)
    assert code in (1, 2)
    assert message in printed
    assert not (tmp_path / "o" / "summary.json").exists()


# --- settings ---


@pytest.mark.parametrize(
    ("k", "prompt", "dispatch"),
    [(64, "agentic", "parallel"), (64, "reasoning", "none"), (0, "agentic", "none")],
)
def test_by_default_dispatch_follows_from_the_prompt(k, prompt, dispatch):
    settings = BenchmarkSettings("m", "mlvu", k=k, protocol=ProtocolSettings(prompt=prompt))
    assert settings.episode_settings().dispatch == dispatch


# --- the whole command, as a process ---


CLIPS = {  # of the shared assets
    "charades": ("Charades_v1_480", "car_30s_h264_12.5fps_cc-by.mp4"),
    "mmvu": ("videos/Art", "bigbuckbunny_5s_720p.mp4"),
}


def start(checkpoint, data, out, *more) -> subprocess.Popen:
    """Starts the command with small limits."""
    argv = [
        sys.executable,
        "-m",
        "rollout.evaluate",
        f"--model={checkpoint}",
        f"--data={data}",
        f"--out={out}",
        "--frames=4",
        "--protocol.turn-tokens=24",
        "--protocol.summary-tokens=8",
        "--protocol.trajectory-tokens=128",
        "--protocol.text-tokens=2048",
        *("--pixels", "4096", "4096"),
        *more,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        argv,
        cwd=ROOT,
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen) -> None:
    """Waits for a run of which half the questions are left out."""
    _, printed = process.communicate(timeout=300)
    assert process.returncode == 1, printed
    assert printed.splitlines()[-1].startswith("error: more than 10% of the questions")


def kill_after(process: subprocess.Popen, file: pathlib.Path, lines: int) -> bool:
    """Kills the process once the file has this many lines; False if it ended before."""
    while process.poll() is None:
        if file.exists() and file.read_bytes().count(b"\n") >= lines:
            process.send_signal(signal.SIGKILL)
            process.communicate(timeout=300)
            return True
        time.sleep(0.01)
    return False


def transcripts(folder: pathlib.Path) -> Iterator[dict[str, Any]]:
    """The lines of a folder with their transcripts."""
    with (folder / "questions.jsonl").open() as file:
        yield from map(json.loads, file)


def outcomes(folder: pathlib.Path) -> dict[str, list[Any]]:
    """Of each question: why it is left out, or its score and what the model wrote."""
    outcomes = {}
    for line in latest(transcripts(folder)).values():
        written = [turn["text"] for turn in line.get("turns", ())]
        outcomes[line["id"]] = [line.get("left_out"), line.get("score"), *written]
    return outcomes


@pytest.mark.slow
def test_a_run_that_is_killed_ends_like_one_that_was_not(checkpoint, videos, tmp_path):
    records = [
        published.videomme(
            f"{i}", ("w0", "w1", "gone", "noise")[i % 4], question=f"How many of number {i}?"
        )
        for i in range(60)
    ]
    data = published.write_split("videomme", beside(videos, tmp_path / "split"), records)
    out = tmp_path / "out"
    options = ("--benchmark=videomme", "--episodes=2")
    for lines in (1, 17, 40):
        process = start(checkpoint, data, out, *options)
        assert kill_after(process, out / "questions.jsonl", lines)
    finish(start(checkpoint, data, out, *options))
    finish(start(checkpoint, data, tmp_path / "whole", *options))
    answered = [line["id"] for line in transcripts(out) if "left_out" not in line]
    assert len(answered) == len(set(answered)) == 30, "a question was asked after its answer"
    assert len(outcomes(out)) == 60
    assert outcomes(out) == outcomes(tmp_path / "whole")
    summary = read_json(out / "summary.json")
    assert without_run(summary) == without_run(read_json(tmp_path / "whole" / "summary.json"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("charades", ("--dispatch=sequential",)),
        ("mmvu", ("--protocol.prompt=direct", "--protocol.no-pin-think")),
    ],
)
def test_a_real_clip_is_played(name, more, assets, checkpoint, tmp_path):
    folder, clip = CLIPS[name]
    (tmp_path / "split" / folder).mkdir(parents=True)
    if name == "charades":
        records = [published.charades(clip, (3, 9)), published.charades("gone.mp4")]
        target = clip
    else:
        records = [published.mmvu("v_0", "Art", 1), published.mmvu("v_1", "Art", 2)]
        target = "1.mp4"
    shutil.copy(assets / "videos" / clip, tmp_path / "split" / folder / target)
    data = published.write_split(name, tmp_path / "split", records)
    out = tmp_path / "out"
    finish(start(checkpoint, data, out, f"--benchmark={name}", *more))
    summary = read_json(out / "summary.json")
    assert (summary["n"], len(summary["left_out"])) == (1, 1)
    (line,) = [line for line in transcripts(out) if "left_out" not in line]
    assert len(line["overview"]) == 4
    assert line["turns"]
    assert 0 <= line["score"] <= 1


def test_a_judge_may_move_and_another_model_there_is_another_evaluation():
    servers = [("http://a/v1", "m"), ("http://b:8000/v1", "m"), ("http://a/v1", "n")]
    first, moved, other = (
        BenchmarkSettings("m", "mmvu", judge=server).identity() for server in servers
    )
    assert first == moved != other
