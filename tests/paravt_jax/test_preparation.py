"""Published files into a prepared set: what is stored, what is left out and why, and going on where it was killed."""

from __future__ import annotations

import collections
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image

from paravt_jax.data import preparation
from paravt_jax.data.preparation import LEFT_OUT, SUMMARY, find_tables, open_prepared, prepare_rows
from paravt_jax.data.row_reading import Reading
from paravt_jax.method import tokenizer
from paravt_jax.method.conversations import render
from paravt_jax.method.protocol import Protocol, ProtocolSettings
from paravt_jax.world.vocabulary import save_tokenizer
from tests.paravt_jax.published_files import (
    CLIPS,
    answered,
    called,
    image,
    lay_out_media,
    rl_row,
    say,
    video,
    write_bytes,
    write_rl,
    write_sft,
)

PERSON, CAR, BOTTLE, BUNNY = (
    "longvt_source/selftrace_1/p.mp4",
    "museg/charades/c.mp4",
    "selfqa/b.mp4",
    "longvt_source/videor1_2/x/y.mp4",
)
PICTURE, CUT, GONE = (
    "longvt_source/videor1_2/x.png",
    "museg/et_instruct_164k/cut.mp4",
    "selfqa/gone.mp4",
)


def write_files(folder: pathlib.Path, media: pathlib.Path) -> None:
    write_rl(
        folder,
        [
            rl_row(CAR),
            rl_row(GONE),
            rl_row(f"file://{media / BOTTLE}", "<video>\nWhen does it fall?", "[3.0, 9.5]", "tvg"),
            rl_row(CAR, answer=""),
            rl_row(BUNNY, "<video>Who?", "a rabbit", "oe"),
            rl_row(CUT),
        ],
    )
    pictures = [say("user", image(PICTURE), "How many?"), say("assistant", "<answer>2</answer>")]
    write_sft(
        folder, [answered(BUNNY), pictures, "{", answered(GONE)], "paravt_sft_videor1_50k.parquet"
    )
    crop = called(PERSON, [(3, 9)], say("tool", "It shows", video(PERSON)))
    outside = called(PERSON, [(300, 309)], say("tool", "It shows", video(PERSON)))
    write_sft(
        folder,
        [called(PERSON, [(3, 9), (20, 31)]), crop, outside],
        "paravt_sft_selftrace_15k3.parquet",
    )


@pytest.fixture(scope="module")
def files(assets, small_vocabulary, tmp_path_factory):
    """A folder of annotations and one of media, half of a clip among them."""
    folder = tmp_path_factory.mktemp("published")
    media = folder / "media"
    lay_out_media(media, assets, dict(zip((PERSON, CAR, BOTTLE, BUNNY), CLIPS, strict=True)))
    whole = (media / CAR).read_bytes()
    (media / CUT).parent.mkdir()
    (media / CUT).write_bytes(whole[: len(whole) // 2])
    Image.fromarray(np.zeros((60, 90, 3), np.uint8)).save(media / PICTURE)
    write_files(folder / "annotations", media)
    save_tokenizer(small_vocabulary.tokenizer, folder)
    return folder


def reading_of(files: pathlib.Path, **changes) -> Reading:
    """With the small tokenizer that lies beside the files: the real one takes every worker seconds to load."""
    return Reading(
        **{"root": str(files / "media"), "tokenizer": str(files), "limits": ProtocolSettings()}
        | changes
    )


def run(files: pathlib.Path, folder: pathlib.Path, reading: Reading, tell=lambda done, total: None):
    return prepare_rows(
        find_tables(files / "annotations"), folder, reading, workers=2, deadline=120, tell=tell
    )


@pytest.fixture(scope="module")
def prepared(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    before = {path: path.read_bytes() for path in files.rglob("*.parquet")}
    told: list[tuple[int, int]] = []
    run(files, folder, reading_of(files), lambda *step: told.append(step))
    assert {path: path.read_bytes() for path in before} == before
    assert told[-1] == (13, 13) and [done for done, _ in told] == sorted(done for done, _ in told)
    return folder


def test_questions_are_stored_in_order(prepared, files):
    found = open_prepared(prepared)
    assert [question.id for question in found.questions] == [
        f"paravt_rl_diverse_4k4:{n}" for n in (0, 2, 4)
    ]
    assert [question.video for question in found.questions] == [
        CAR,
        str(files / "media" / BOTTLE),
        BUNNY,
    ]
    assert found.root == files / "media"


def test_conversations_are_stored_with_the_frames_they_show(prepared, files):
    found = open_prepared(prepared)
    assert [c.id for c in found.conversations] == [
        *(f"paravt_sft_selftrace_15k3:{n}" for n in (0, 1)),
        *(f"paravt_sft_videor1_50k:{n}" for n in (0, 1)),
    ]
    reports, crop, bunny, picture = found.conversations
    (person,) = reports.clips
    assert (
        len(person.indices) == 64 and person.times[0] == 0 and 137 < person.times[-1] < 140
    )  # at most 64 frames
    assert (person.path, person.still) == (PERSON, False)
    assert (
        len(crop.clips) == 2
        and 2.9 < crop.clips[1].times[0] < 3.1
        and crop.clips[1].times[-1] < 9
        and len(crop.clips[1].times) == 6
    )
    assert 5 <= len(bunny.clips[0].indices) <= 6 and (
        bunny.clips[0].height,
        bunny.clips[0].width,
    ) == (720, 1280)  # one a second
    assert picture.clips[0].still and (picture.clips[0].height, picture.clips[0].width) == (60, 90)
    assert (reports.source, picture.source, reports.tools, picture.tools) == (
        "selftrace",
        "videor1",
        True,
        False,
    )
    rules, reading = Protocol(tokenizer.load(files), ProtocolSettings()), reading_of(files)
    lengths = [len(render(c, rules, reading.tokens).ids) for c in found.conversations]
    assert lengths == list(found.lengths) == [c.tokens for c in found.conversations]


def test_what_is_left_out_is_named_with_its_reason(prepared):
    left = {
        line["id"]: (line["reason"], line["detail"])
        for line in map(json.loads, (prepared / LEFT_OUT).read_text().splitlines())
    }
    expected = {
        "paravt_rl_diverse_4k4:1": ("missing video", "selfqa/gone.mp4: no such file"),
        "paravt_rl_diverse_4k4:3": ("no answer", "the answer is empty"),
        "paravt_rl_diverse_4k4:5": ("unreadable video", "cut.mp4: it "),
        "paravt_sft_videor1_50k:2": ("broken row", "messages is no JSON"),
        "paravt_sft_videor1_50k:3": ("missing video", "selfqa/gone.mp4: no such file"),
        "paravt_sft_selftrace_15k3:2": (
            "not in the protocol",
            "a call of 300 to 309 s: The window is outside the video.",
        ),
    }
    assert left.keys() == expected.keys()
    for id, (reason, words) in expected.items():
        assert left[id][0] == reason and words in left[id][1], left[id]


def test_the_summary_counts(prepared):
    summary = json.loads((prepared / SUMMARY).read_text())
    assert (summary["rows"], summary["kept"], summary["left_out"]) == (13, 7, 6)
    assert summary["kinds"] == {"conversation": 4, "mcq": 1, "tvg": 1, "oe": 1}
    assert summary["reasons"]["missing video"] == 2 and sum(summary["reasons"].values()) == 6
    assert summary["sources"]["selftrace"] == {
        "kept": 2,
        "left_out": {"not in the protocol": 1},
    }
    assert summary["tokens_in_all"] == sum(open_prepared(prepared).lengths)
    assert (summary["with_calls"], summary["without_think"], summary["without_answer_tags"]) == (
        2,
        1,
        0,
    )
    assert 4 < summary["seconds"]["least"] < 6 and 138 < summary["seconds"]["most"] < 140


def test_a_finished_set_is_only_opened_and_another_is_refused(prepared, files, monkeypatch):
    monkeypatch.setattr(preparation, "Workers", None)
    assert run(files, prepared, reading_of(files)) == json.loads((prepared / SUMMARY).read_text())
    with pytest.raises(
        ValueError,
        match=r"holds a set prepared otherwise \(stored -> wanted\):\n  frames: 64 -> 32\nName another folder",
    ):
        run(files, prepared, reading_of(files, frames=32))


def test_an_interrupted_preparation_goes_on(prepared, files, tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "_CHUNK", 2)

    def stop(done: int, total: int) -> None:
        if done >= 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(files, tmp_path, reading_of(files), stop)
    with pytest.raises(FileNotFoundError, match="holds no prepared set; prepare it first"):
        open_prepared(tmp_path)
    chunks = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*-0*.jsonl")}
    assert len(chunks) >= 2
    kept = []
    monkeypatch.setattr(
        preparation,
        "_finish",
        lambda file, futures, finish=preparation._finish: (
            kept.append(file),
            finish(file, futures),
        )[1],
    )
    run(files, tmp_path, reading_of(files))
    assert kept and not set(kept) & set(chunks)
    for name in ("questions", "conversations"):
        assert list(getattr(open_prepared(tmp_path), name)) == list(
            getattr(open_prepared(prepared), name)
        )
    for name in (SUMMARY, LEFT_OUT):
        assert (tmp_path / name).read_text() == (prepared / name).read_text()
    assert not list(tmp_path.glob("work-*"))


def test_nothing_usable_is_an_error_that_says_why(small_vocabulary, tmp_path):
    save_tokenizer(small_vocabulary.tokenizer, tmp_path)
    write_rl(tmp_path / "annotations", [rl_row(GONE)] * 2)
    (tmp_path / "media").mkdir()
    with pytest.raises(
        ValueError,
        match=r"none of 2 rows can be used; .*left_out.jsonl says why, the commonest: missing video",
    ):
        run(tmp_path, tmp_path / "out", reading_of(tmp_path))
    with pytest.raises(FileNotFoundError, match="no parquet files"):
        find_tables(tmp_path / "media")


def test_what_cannot_be_read_is_counted_and_the_rest_kept(small_world, small_vocabulary, tmp_path):
    """An unknown codec, a name that is too long, and a row that is no text, beside good rows."""
    save_tokenizer(small_vocabulary.tokenizer, tmp_path)
    media = tmp_path / "media"
    media.mkdir()
    shutil.copyfile(small_world.folder / small_world.videos[0].path, media / "good.mp4")
    (media / "foreign.mp4").write_bytes((media / "good.mp4").read_bytes().replace(b"avc1", b"zzzz"))
    paths = ("good.mp4", "foreign.mp4", "a" * 300 + ".mp4", "good.mp4")
    write_rl(tmp_path / "annotations", [rl_row(path) for path in paths])
    texts = [json.dumps(answered(path)).encode() for path in paths] + [b"\xff"]
    write_bytes(tmp_path / "annotations", texts, "paravt_sft_tvg_6k3.parquet")
    summary = run(tmp_path, tmp_path / "out", reading_of(tmp_path))
    assert (summary["rows"], summary["kept"]) == (9, 4)
    assert summary["reasons"] == {"unreadable video": 4, "broken row": 1}
    lines = (tmp_path / "out" / LEFT_OUT).read_text().splitlines()
    words = ["codec of its video is unknown", "File name too long"]
    for word, line in zip([*words, *words, "utf-8"], lines, strict=True):
        assert word in json.loads(line)["detail"]
    found = open_prepared(tmp_path / "out")
    assert [q.video for q in found.questions] == ["good.mp4"] * 2 and len(found.conversations) == 2


PROGRAM = """
import sys, pathlib
from paravt_jax.data import preparation
from tests.paravt_jax.test_preparation import reading_of, run
files, out = map(pathlib.Path, sys.argv[1:])
run(files, out, reading_of(files), lambda done, total: print(done, flush=True))
"""


@pytest.mark.slow
def test_a_thousand_rows_with_a_tenth_of_the_videos_bad(
    assets, small_world, small_vocabulary, tmp_path
):
    """Missing, cut, empty and corrupt videos; killed twice on the way. Every row is counted once, under the right name."""
    drawn, real = (
        [small_world.folder / v.path for v in small_world.videos],
        [assets / "videos" / name for name in CLIPS[1:]],
    )
    expected = collections.Counter()
    rows = collections.defaultdict(list)
    media = tmp_path / "media"
    (media / "selfqa").mkdir(parents=True)
    for n in range(1000):
        path, bad = f"selfqa/{n:04d}.mp4", n % 10 == n // 10 % 10
        state = ("missing", "cut", "empty", "corrupt")[n // 10 % 4] if bad else "good"
        content = (real[n // 25 % 3] if n % 25 == 7 else drawn[n % 4]).read_bytes()
        if state == "cut":
            content = content[: len(content) // 3]
        elif state == "corrupt":
            content = (assets / "videos" / "corrupted.mp4").read_bytes()
        if state != "missing":
            (media / path).write_bytes(b"" if state == "empty" else content)
        expected[
            "good"
            if state == "good"
            else "missing video"
            if state == "missing"
            else "unreadable video"
        ] += 1
        rows[n % 4].append(
            rl_row(path) if n % 4 == 0 else called(path, [(0, 2)]) if n % 4 == 1 else answered(path)
        )
    save_tokenizer(small_vocabulary.tokenizer, tmp_path)
    write_rl(tmp_path / "annotations", rows[0])
    for n, name in ((1, "selftrace_15k3"), (2, "charades_12k4"), (3, "tvg_6k3")):
        write_sft(tmp_path / "annotations", rows[n], f"paravt_sft_{name}.parquet")
    for stop_after in (100, 400, None):
        command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(tmp_path / "out")]
        process = subprocess.Popen(
            command, cwd=pathlib.Path(__file__).parents[2], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        for line in process.stdout:
            if stop_after is not None and int(line) >= stop_after:
                os.kill(process.pid, signal.SIGKILL)
                break
        code = process.wait()
        assert code == (0 if stop_after is None else -signal.SIGKILL)
    summary = json.loads((tmp_path / "out" / SUMMARY).read_text())
    assert (summary["rows"], summary["kept"]) == (1000, expected["good"]) == (1000, 900)
    assert summary["reasons"] == {
        name: expected[name] for name in ("unreadable video", "missing video")
    }
    left = [
        json.loads(line)["id"] for line in (tmp_path / "out" / LEFT_OUT).read_text().splitlines()
    ]
    found = open_prepared(tmp_path / "out")
    ids = [*left, *(q.id for q in found.questions), *(c.id for c in found.conversations)]
    assert len(ids) == len(set(ids)) == 1000


def test_a_row_that_takes_too_long_is_left_out_alone(files, tmp_path):
    """No row can be read in no time; the preparation ends all the same, and says so."""
    with pytest.raises(ValueError, match="the commonest: too slow"):
        shutil.copytree(files / "annotations", tmp_path / "annotations")
        (tmp_path / "annotations" / "paravt_sft_videor1_50k.parquet").unlink()
        (tmp_path / "annotations" / "paravt_sft_selftrace_15k3.parquet").unlink()
        start = time.monotonic()
        prepare_rows(
            find_tables(tmp_path / "annotations"),
            tmp_path / "out",
            reading_of(files),
            workers=2,
            deadline=1e-9,
        )
    assert time.monotonic() - start < 300
