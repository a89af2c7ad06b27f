"""The command: what it refuses in one line, what it goes on with, and the whole road with a real model and real files."""

from __future__ import annotations

import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from models.qwen3_vl.hf import save
from paravt_jax.data.question_files import read_questions
from paravt_jax.world.vocabulary import save_tokenizer as save_vocabulary
from rollout import evaluate as command
from rollout.agent.endpoint import EndpointError
from rollout.evaluation import run as evaluation
from rollout.evaluation.folder import FolderError, latest, read_json, read_lines
from rollout.evaluation.settings import BenchmarkSettings
from tests.paravt_jax.benchmarks import published
from tests.paravt_jax.judge_server import Reply, serving

ROOT = pathlib.Path(__file__).parents[3]
ANSWER = "x\n</think>\n<answer>B</answer>"


@pytest.fixture(scope="session")
def checkpoint(small_model, small_vocabulary, tmp_path_factory) -> pathlib.Path:
    """The small model as a folder that the command takes."""
    folder = tmp_path_factory.mktemp("checkpoint")
    save_vocabulary(small_vocabulary.tokenizer, folder / "tokenizer")
    save(small_model, folder / "model", files=sorted((folder / "tokenizer").iterdir()))
    return folder / "model"


@pytest.fixture
def run(checkpoint, split, videos, player, monkeypatch, tmp_path):
    """run(**settings) is the command with a sampler that follows a script; it returns the summary and what was printed."""

    def make(said=ANSWER, given=None, **fields):
        def scripted_player(settings, folder, where, subtitled, stack):
            return player([said], blind=settings.blind)

        monkeypatch.setattr(evaluation, "_player", scripted_player)
        chosen: dict[str, Any] = {
            "model": str(checkpoint),
            "benchmark": "videomme",
            "data": str(split),
            "videos": str(videos),
            "out": str(tmp_path / "out"),
        }
        stream = io.StringIO()
        settings = BenchmarkSettings(**chosen | fields)
        return evaluation.evaluate(settings, given, stream), stream.getvalue()

    return make


def test_a_run_and_what_it_says(run, checkpoint, tmp_path):
    summary, said = run()
    assert (summary["n"], summary["questions"], summary["accuracy"]) == (
        3,
        6,
        pytest.approx(1 / 3),
    )
    assert summary["left_out"]["missing"] == {
        "questions": 2,
        "videos": {"data/gone.mp4": "no file data/gone.mp4 below --videos"},
    }
    assert list(summary["left_out"]["unreadable"]["videos"]) == ["data/noise.mp4"]
    assert "VideoMME w/o: 33.3 [" in said and "] on 3 of 6 questions\n" in said
    assert "paper" not in said
    assert (
        "left out, missing: 2 questions on 1 videos, such as data/gone.mp4" in said
        and "videomme: 100% 6/6 " in said
        and "score=33.3" in said
    )
    config = read_json(tmp_path / "out" / "config.json")
    assert (
        config["identity"]["weights"]
        and config["settings"]["frames"] == 64
        and config["name"] == checkpoint.parent.name
    )
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == json.loads(
        json.dumps(summary)
    )


def test_what_is_done_is_not_played_again_and_what_was_missing_is(run, videos, player, tmp_path):
    first, _ = run(limit=1)
    assert (first["n"], first["questions"], first["config"]["settings"]["limit"]) == (1, 6, 1)
    lines = (tmp_path / "out" / "questions.jsonl").read_bytes()
    (tmp_path / "out" / "questions.jsonl").write_bytes(lines + lines[:50])  # killed while writing
    second, said = run()
    assert second["n"] == 3 and "videomme: 100% 5/5" in said
    assert (tmp_path / "out" / "questions.jsonl").read_bytes().startswith(lines + b"{")
    third, said = run()
    assert third["n"] == 3 and "videomme: 100% 3/3" in said  # those left out are tried again
    again, _ = run(out=str(tmp_path / "other"))
    for summary in (third, again):
        del summary["seconds_per_question"], summary["config"]
    assert third == again


def test_another_model_or_setting_needs_another_folder(run, checkpoint, tmp_path):
    run(limit=1)
    with pytest.raises(FolderError, match="frames: 64 -> 8"):
        run(limit=1, frames=8)
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


def test_shards_share_a_folder(run, tmp_path):
    parts = [run(shard=f"{index}/2")[0]["n"] for index in (0, 1)]
    whole, _ = run(out=str(tmp_path / "whole"))
    assert parts[0] < parts[1] == whole["n"] == 3
    assert sorted(latest(read_lines(tmp_path / "out"))) == sorted(
        latest(read_lines(tmp_path / "whole"))
    )


def test_an_endpoint_stands_in_for_the_engine(checkpoint, split, videos, tmp_path):
    """The whole command; the folder needs no weights."""
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in checkpoint.glob("*.json"):
        (bare / file.name).write_bytes(file.read_bytes())
    reply = {
        "choices": [
            {"message": {"content": "x\n</think>\n<answer>C</answer>"}, "finish_reason": "stop"}
        ]
    }
    with serving(lambda number, received: Reply(json.dumps(reply).encode())) as server:
        settings = BenchmarkSettings(
            str(bare),
            "videomme",
            str(split),
            str(videos),
            str(tmp_path / "out"),
            endpoint=server.endpoint,
            endpoint_model="m",
        )
        summary = evaluation.evaluate(settings, stream=io.StringIO())
    assert (summary["n"], summary["accuracy"]) == (3, pytest.approx(1 / 3)) and summary["config"][
        "identity"
    ]["weights"] is None
    assert len(server.received) == 3 and summary["left_out"]["missing"]["questions"] == 2


def filtered(*names):
    """Answers a chat, unless one of `names` stands in it."""

    def answer(number, received) -> Reply:
        chat = str(received.body["messages"])
        if any(name in chat for name in names):
            return Reply(b'{"error": {"message": "content_filter"}}', status=400)
        content = "x\n</think>\n<answer>C</answer>"
        reply = {"choices": [{"message": {"content": content}, "finish_reason": "stop"}]}
        return Reply(json.dumps(reply).encode())

    return answer


@pytest.fixture
def by_endpoint(checkpoint, videos, tmp_path):
    """by_endpoint(answer, rows) plays rows against a server; (summary, what was said, requests)."""

    def make(answer, rows):
        data = published.write_split("videomme", tmp_path / "rows", rows)
        stream = io.StringIO()
        with serving(answer) as server:
            settings = BenchmarkSettings(
                str(checkpoint),
                "videomme",
                str(data),
                str(videos),
                str(tmp_path / "out"),
                frames=4,
                blind=True,
                episodes=1,
                endpoint=server.endpoint,
                endpoint_model="m",
            )
            summary = evaluation.evaluate(settings, stream=stream)
        return summary, stream.getvalue(), len(server.received)

    return make


def named(number, video="w0"):
    return published.videomme(str(number), video, "C", question=f"How many of number {number}?")


def test_a_refused_question_costs_that_question(by_endpoint):
    rows = [named(number) for number in range(4)]
    summary, said, _ = by_endpoint(filtered("number 0", "number 2"), rows)
    assert (summary["n"], summary["accuracy"]) == (2, 1.0)
    reason = "status 400 (content_filter)"
    assert summary["left_out"]["refused"] == {"questions": 2, "videos": {"data/w0.mp4": reason}}
    assert f"left out, refused: 2 questions on 1 videos, such as data/w0.mp4: {reason}" in said
    again, _, asked = by_endpoint(filtered(), rows)
    assert again["n"] == 4 and asked == 2  # those that were refused are asked again


def test_broken_rows_are_rows_of_the_split(by_endpoint):
    """Three of five rows have no right answer: a full score on the two others is no full score."""
    rows = [named(number) for number in range(5)]
    rows = [row | {"answer": ""} if number > 1 else row for number, row in enumerate(rows)]
    summary, said, _ = by_endpoint(filtered(), rows)
    assert (summary["n"], summary["accuracy"], len(summary["broken_rows"])) == (2, 1.0, 3)
    assert "on 2 of 5 questions" in said and "broken rows: 3" in said


def test_a_server_that_refuses_everything_ends_the_run_in_one_line(by_endpoint):
    rows = [named(number, f"v{number // 2}") for number in range(60)]
    with pytest.raises(EndpointError, match="refused the first 9 questions, on 5 videos") as error:
        by_endpoint(filtered("number"), rows)
    said = str(error.value)
    assert "content_filter" in said and "vllm --max-model-len" in said and "\n" not in said


def test_a_short_run_in_which_the_server_refuses_everything_ends_the_same_way(
    by_endpoint, tmp_path
):
    """A --limit, a small shard or an own file has fewer videos than the rule for long runs counts."""
    rows = [named(number, f"v{number // 2}") for number in range(3)]
    with pytest.raises(EndpointError, match="refused the first 3 questions, on 2 videos") as error:
        by_endpoint(filtered("number"), rows)
    assert "content_filter" in str(error.value)
    assert not (tmp_path / "out" / "summary.json").exists()
    summary, _, asked = by_endpoint(filtered(), rows)
    assert summary["n"] == asked == 3  # with the set-up mended, they are asked again


def test_a_run_that_was_answered_before_is_not_ended_by_refusals(by_endpoint):
    """The refused questions come first when a run goes on."""
    rows = [named(number, f"v{number}") for number in range(8)]
    by_endpoint(filtered(*(f"number {number}" for number in range(1, 8))), rows)
    summary, _, asked = by_endpoint(filtered("number"), rows)
    assert (summary["n"], summary["left_out"]["refused"]["questions"], asked) == (1, 7, 7)


def own_rows() -> list[dict[str, Any]]:
    """Questions on the split's videos: the first has subtitles, the third a video that is noise."""
    choice = {"question": "How many apples?", "options": ["one", "two"]}
    return [
        {
            **choice,
            "id": "a",
            "video": "data/w0.mp4",
            "answer": "B",
            "subtitles": "subtitle/w0.srt",
        },
        {**choice, "id": "b", "video": "data/w1.mp4", "answer": "A"},
        {**choice, "id": "c", "video": "data/noise.mp4", "answer": "A"},
        {**choice, "id": "d", "video": "data/gone.mp4", "answer": "A"},
        {"id": "e", "video": "data/w1.mp4", "question": "What is it?", "answer": "B"},
    ]


def test_own_questions_from_a_file_and_from_python(run, videos, tmp_path):
    file = tmp_path / "my.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in own_rows()))
    own = {"benchmark": "", "data": "", "questions": str(file)}
    summary, said = run(**own)
    assert (summary["benchmark"], summary["questions"], summary["n"]) == ("own questions", 5, 3)
    assert (summary["accuracy"], summary["with_subtitles"]) == (0.5, 1)
    assert summary["open_ended"]["score"] == 1.0
    assert summary["left_out"]["missing"]["questions"] == 1
    assert list(summary["left_out"]["unreadable"]["videos"]) == ["data/noise.mp4"]
    assert "own questions: 50.0 [" in said and "my: 100% 5/5" in said
    given, _ = run(
        **own | {"questions": ""},
        given=read_questions(file, videos),
        out=str(tmp_path / "python"),
    )
    for found in (summary, given):
        del found["seconds_per_question"], found["config"]
    assert given == summary


def test_a_bad_row_of_own_questions_ends_the_command_in_words(run, checkpoint, tmp_path, capsys):
    file = tmp_path / "my.jsonl"
    file.write_text(json.dumps(own_rows()[1] | {"answer": "C"}) + "\n")
    argv = ["--model", str(checkpoint), "--questions", str(file)]
    assert command.main(argv) == 2
    said = capsys.readouterr().err
    assert f"{file}, line 1: answer: 'C'; the letter of the right option" in said


REFUSED = [
    (["--videos", "nowhere"], "--videos nowhere: no such folder"),
    (["--data", "nowhere/at/all"], "no such file or folder, and no hub id"),
    (["--model", "nowhere/at/all"], "no such folder, and no hub id"),
    (["--frames", "0"], "frames = 0"),
    (["--prompt", "direct", "--dispatch", "parallel"], "--prompt direct knows no tool"),
    (["--blind", "--dispatch", "frames"], "a blind run sees no crops"),
    (["--limit", "0"], "--limit 0"),
    (["--shard", "2/2"], "--shard 2/2"),
    (["--endpoint", "http://localhost:1/v1"], "--endpoint, --endpoint-model"),
    (["--open-ended", "judge"], "belong together"),
    (
        ["--open-ended", "judge", "--judge-model", "m", "--judge", "http://h/v1?key=1"],
        "--judge: the address, not shown here",
    ),
    (["--benchmark", "charades", "--shuffle"], "charades has no options"),
    (["--temperature", "-1"], "temperature = -1"),
    (["--episodes", "0"], "--episodes 0"),
    (["--benchmark", "videomm"], "--benchmark videomm: no such split; give one of videomme"),
    (["--questions", "my.jsonl"], "--benchmark videomme, --questions my.jsonl: only one"),
    (["--benchmark", ""], "holds the files of a split; give --benchmark too"),
]


@pytest.mark.parametrize(("wrong", "said"), REFUSED, ids=[" ".join(wrong) for wrong, _ in REFUSED])
def test_mistakes_are_told_in_words(wrong, said, checkpoint, split, videos, capfd, tmp_path):
    argv = [
        "--model",
        str(checkpoint),
        "--benchmark",
        "videomme",
        "--data",
        str(split),
        "--videos",
        str(videos),
        "--out",
        str(tmp_path / "o"),
    ]
    for flag in wrong[::2]:
        if flag in argv:
            del argv[argv.index(flag) : argv.index(flag) + 2]
    try:
        code = command.main([*argv, *wrong])
    except SystemExit as error:  # tyro's own way
        code = error.code
    out = capfd.readouterr()
    assert code == 2 and " ".join(said.split()) in " ".join(
        (out.err + out.out).replace("│", " ").split()
    )
    assert not (tmp_path / "o" / "summary.json").exists()


@pytest.mark.parametrize(
    "address",
    ["http://user:sk-17@localhost:1/v1", "http://localhost:1/v1?api_key=sk-17"],
)
def test_a_secret_in_the_endpoints_address_is_written_nowhere(
    address,
    checkpoint,
    split,
    videos,
    capfd,
    tmp_path,
):
    argv = [
        f"--model={checkpoint}",
        "--benchmark=videomme",
        f"--data={split}",
        f"--videos={videos}",
        f"--out={tmp_path / 'o'}",
        f"--endpoint={address}",
        "--endpoint-model=m",
    ]
    try:
        code = command.main(argv)
    except SystemExit as error:  # tyro's own way
        code = error.code
    said = capfd.readouterr()
    assert code == 2 and "OPENAI_API_KEY" in said.err + said.out
    assert "sk-17" not in said.err + said.out and not (tmp_path / "o").exists()


def test_settings_of_every_prompt():
    def made(**fields):
        settings = BenchmarkSettings("m", "mlvu", **fields)
        return settings.episode_settings().dispatch, settings.protocol(100)

    assert made()[0] == "parallel" and made()[1].prompt == "agentic" and made()[1].pin_think
    assert made(prompt="agentic-minimal", dispatch="sequential")[0] == "sequential"
    assert made(prompt="reasoning")[0] == "none" and made(prompt="reasoning")[1].pin_think
    assert made(prompt="direct")[0] == "none" and not made(prompt="direct")[1].pin_think
    assert (
        made(blind=True)[0] == "none"
        and BenchmarkSettings("m", "mlvu", blind=True).episode_settings().frames == 0
    )
    assert (
        made()[1].trajectory_tokens == 8192
        and made(dispatch="frames")[1].trajectory_tokens == 8192 + 15 * 100
    )


# The whole road ------------------------------------------------------------------------------------------------------------------


CLIPS = {  # of the shared assets
    "charades": ("Charades_v1_480", "car_30s_h264_12.5fps_cc-by.mp4"),
    "mmvu": ("videos/Art", "bigbuckbunny_5s_720p.mp4"),
}


def start(checkpoint, data, videos, out, *more) -> subprocess.Popen:
    argv = [
        sys.executable,
        "-m",
        "rollout.evaluate",
        f"--model={checkpoint}",
        f"--data={data}",
        f"--videos={videos}",
        f"--out={out}",
    ]
    small = [
        "--frames=4",
        "--turn-tokens=24",
        "--summary-tokens=8",
        "--trajectory-tokens=128",
        "--question-tokens=1024",
        "--max-pixels=4096",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [*argv, *small, *more],
        cwd=ROOT,
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def whole_lines(folder: pathlib.Path) -> Iterator[dict[str, Any]]:
    """The lines of a folder with their transcripts."""
    with (folder / "questions.jsonl").open() as file:
        yield from map(json.loads, file)


@pytest.mark.slow
def test_killed_at_any_moment_it_ends_like_one_that_was_not(checkpoint, videos, tmp_path):
    """Against a server, so that a start costs no compilation."""
    rows = [
        published.videomme(
            f"{i}", ("w0", "w1", "gone", "noise")[i % 4], question=f"How many of number {i}?"
        )
        for i in range(60)
    ]
    data = published.write_split("videomme", tmp_path / "split", rows)

    def answer(number, received) -> Reply:
        text = str(received.body["messages"])
        letter = "ABCD"[sum(text.encode()) % 4]
        content = f"x\n</think>\n<answer>{letter}</answer>"
        reply = {"choices": [{"message": {"content": content}, "finish_reason": "stop"}]}
        return Reply(json.dumps(reply).encode(), delay=0.1)

    def lines(out) -> dict[str, dict]:
        found = latest(whole_lines(out))
        return {id: {k: v for k, v in line.items() if k != "spent"} for id, line in found.items()}

    with serving(answer) as server:
        options = (
            "--benchmark=videomme",
            "--episodes=2",
            f"--endpoint={server.endpoint}",
            "--endpoint-model=m",
            "--turn-tokens=64",
        )
        kills, asked = 0, []
        for count in (1, 17, 40, 1000):  # lines that are there when it is killed; the last is not
            process = start(checkpoint, data, videos, tmp_path / "out", *options)
            file = tmp_path / "out" / "questions.jsonl"
            while process.poll() is None and not (
                file.exists() and file.read_bytes().count(b"\n") >= count
            ):
                time.sleep(0.01)
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                kills += 1
            _, said = process.communicate(timeout=300)
            asked.append(len(server.received))
        assert kills == 3 and process.returncode == 0, said
        assert (
            asked[-1] <= 30 + 3 * 3
        )  # a kill costs the questions in flight, and one answered and not written
        whole = start(checkpoint, data, videos, tmp_path / "whole", *options)
        _, said = whole.communicate(timeout=300)
    assert whole.returncode == 0, said
    assert (
        lines(tmp_path / "out") == lines(tmp_path / "whole") and len(lines(tmp_path / "out")) == 60
    )
    one, other = (read_json(tmp_path / name / "summary.json") for name in ("out", "whole"))
    assert one["n"] == 30 and {**one, "seconds_per_question": 0, "config": 0} == {
        **other,
        "seconds_per_question": 0,
        "config": 0,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more"), [("charades", ("--dispatch=frames",)), ("mmvu", ("--prompt=direct",))]
)
def test_real_clips(name, more, assets, checkpoint, tmp_path):
    folder, clip = CLIPS[name]
    (tmp_path / "videos" / folder).mkdir(parents=True)
    target = tmp_path / "videos" / folder / (clip if name == "charades" else "1.mp4")
    target.symlink_to(assets / "videos" / clip)
    row = (
        published.charades(clip, (3, 9)) if name == "charades" else published.mmvu("v_0", "Art", 1)
    )
    gone = published.charades("gone.mp4") if name == "charades" else published.mmvu("v_1", "Art", 2)
    data = published.write_split(name, tmp_path / "split", [row, gone])
    process = start(
        checkpoint, data, tmp_path / "videos", tmp_path / "out", f"--benchmark={name}", *more
    )
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    summary = read_json(tmp_path / "out" / "summary.json")
    assert (summary["n"], summary["left_out"]["missing"]["questions"]) == (1, 1)
    (line,) = [line for line in whole_lines(tmp_path / "out") if "left_out" not in line]
    assert len(line["overview"]) == 4 and line["turns"] and 0 <= line["score"] <= 1
