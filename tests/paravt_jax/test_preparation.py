"""Preparation of published files: what is stored, what is left out and why, and resuming."""

from __future__ import annotations

import itertools
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

from models.qwen3_vl.dialect import DIALECT
from paravt_jax.data import tokenizer_file
from paravt_jax.data.example_reading import Example, ExampleReading
from paravt_jax.data.preparation import (
    LEFT_OUT,
    SET,
    examples_of_tables,
    open_prepared,
    prepare_examples,
)
from paravt_jax.data.workers import Workers
from paravt_jax.method.conversations import render
from paravt_jax.method.protocol import Protocol, ProtocolSettings
from tests.paravt_jax.published_files import (
    CLIPS,
    answered,
    called,
    image,
    lay_out_media,
    rl_row,
    say,
    video,
    write_rl,
    write_sft,
)

PERSON = "longvt_source/selftrace_1/p.mp4"
CAR = "museg/charades/c.mp4"
BOTTLE = "selfqa/b.mp4"
BUNNY = "longvt_source/videor1_2/x/y.mp4"
PICTURE = "longvt_source/videor1_2/x.png"
TRUNCATED = "museg/et_instruct_164k/cut.mp4"
MISSING = "selfqa/gone.mp4"


def write_files(folder: pathlib.Path, media: pathlib.Path) -> None:
    rl_rows = [
        rl_row(CAR),
        rl_row(MISSING),
        rl_row(f"file://{media / BOTTLE}", "<video>\nWhen does it fall?", "[3.0, 9.5]", "tvg"),
        rl_row(CAR, answer=""),
        rl_row(BUNNY, "<video>Who?", "a rabbit", "oe"),
        rl_row(TRUNCATED),
    ]
    write_rl(folder, rl_rows)
    pictures = [say("user", image(PICTURE), "How many?"), say("assistant", "<answer>2</answer>")]
    videor1_rows = [answered(BUNNY), pictures, "{", answered(MISSING)]
    write_sft(folder, videor1_rows, "paravt_sft_videor1_50k.parquet")
    shown = say("tool", "It shows", video(PERSON))
    selftrace_rows = [
        called(PERSON, [(3, 9), (20, 31)]),
        called(PERSON, [(3, 9)], shown),
        called(PERSON, [(300, 309)], shown),
    ]
    write_sft(folder, selftrace_rows, "paravt_sft_selftrace_15k3.parquet")


@pytest.fixture(scope="module")
def files(assets, small_vocabulary, tmp_path_factory):
    """A folder of annotations and one of media, with a truncated clip among them."""
    folder = tmp_path_factory.mktemp("published")
    media = folder / "media"
    lay_out_media(media, assets, dict(zip((PERSON, CAR, BOTTLE, BUNNY), CLIPS, strict=True)))
    whole = (media / CAR).read_bytes()
    (media / TRUNCATED).parent.mkdir()
    (media / TRUNCATED).write_bytes(whole[: len(whole) // 2])
    Image.fromarray(np.zeros((60, 90, 3), np.uint8)).save(media / PICTURE)
    write_files(folder / "annotations", media)
    tokenizer_file.save(small_vocabulary, folder)
    return folder


def reading_of(files: pathlib.Path, **changes) -> ExampleReading:
    """Settings with the small tokenizer: every worker would need seconds to load the real one."""
    fields = {"root": str(files / "media"), "tokenizer": str(files), "limits": ProtocolSettings()}
    return ExampleReading(**(fields | changes), dialect=DIALECT)


def run(
    files: pathlib.Path,
    folder: pathlib.Path,
    reading: ExampleReading,
    check=lambda: None,
    deadline: float = 120,
):
    rows = examples_of_tables(files / "annotations")
    return prepare_examples(rows, folder, reading, check, deadline)


@pytest.fixture(scope="module")
def folder(files, tmp_path_factory):
    """A prepared set."""
    folder = tmp_path_factory.mktemp("prepared")
    before = {path: path.read_bytes() for path in files.rglob("*.parquet")}
    run(files, folder, reading_of(files))
    assert {path: path.read_bytes() for path in before} == before
    return folder


@pytest.fixture(scope="module")
def prepared(folder, files):
    return open_prepared(folder, reading_of(files))


def test_questions_are_stored_in_order(prepared, files):
    ids = [question.id for question in prepared.questions]
    assert ids == [f"paravt_rl_diverse_4k4:{n}" for n in (0, 2, 4)]
    paths = [question.video for question in prepared.questions]
    assert paths == [CAR, BOTTLE, BUNNY]
    assert prepared.root == files / "media"


@pytest.mark.usefixtures("unchecked")  # checks would read the records
def test_a_flipped_bit_in_a_prepared_set_is_found(folder, files, tmp_path):
    copy = tmp_path / "set"
    shutil.copytree(folder, copy)
    (stored,) = (copy / "records").rglob("*questions*array_record*")
    content = bytearray(stored.read_bytes())
    content[200] ^= 1
    stored.write_bytes(content)
    found = open_prepared(copy, reading_of(files))
    assert found is not None
    with pytest.raises(ValueError, match=rf"{copy}/records: a record is damaged; delete it"):
        list(found.questions)
    shutil.rmtree(copy / "records")
    assert open_prepared(copy, reading_of(files)) is None


@pytest.mark.parametrize("content", ["[null]", "3", '{"kept', '{"checksum": 1,\n"files": {}}'])
def test_other_content_of_a_set_is_one_line(files, tmp_path, content):
    (tmp_path / SET).write_text(content)
    with pytest.raises(ValueError, match=f"{SET}: damaged: .* prepare the set again"):
        open_prepared(tmp_path, reading_of(files))


def test_rows_of_two_tables_of_one_name_have_different_ids(tmp_path):
    for folder in ("a", "b"):
        write_rl(tmp_path / folder, [rl_row(CAR)])
    ids = [example.id for example in examples_of_tables(tmp_path).ordered]
    assert ids == ["a/paravt_rl_diverse_4k4:0", "b/paravt_rl_diverse_4k4:0"]


def test_conversations_are_stored_with_the_frames_they_show(prepared):
    assert [conversation.id for conversation in prepared.conversations] == [
        *(f"paravt_sft_selftrace_15k3:{n}" for n in (0, 1)),
        *(f"paravt_sft_videor1_50k:{n}" for n in (0, 1)),
    ]
    reports, crop, bunny, picture = prepared.conversations
    assert reports.tools and not picture.tools

    (person,) = reports.clips
    assert (person.path, person.still) == (PERSON, False)
    # At most 64 frames, from the first to the last.
    assert len(person.indices) == 64
    assert person.times[0] == 0
    assert 137 < person.times[-1] < 140

    _, window = crop.clips
    assert len(window.times) == 6
    assert 2.9 < window.times[0] < 3.1
    assert window.times[-1] < 9

    # One frame per second.
    assert 5 <= len(bunny.clips[0].indices) <= 6
    assert (bunny.clips[0].height, bunny.clips[0].width) == (720, 1280)

    assert picture.clips[0].still
    assert (picture.clips[0].height, picture.clips[0].width) == (60, 90)


def test_stored_lengths_are_those_of_the_rendered_conversations(prepared, files):
    protocol = Protocol(tokenizer_file.load(files, DIALECT), ProtocolSettings())
    reading = reading_of(files)
    lengths = [len(render(c, protocol, reading.tokens).ids) for c in prepared.conversations]
    assert lengths == prepared.summary["lengths"]
    assert lengths == [conversation.tokens for conversation in prepared.conversations]


def test_every_row_that_is_left_out_is_named_with_its_reason(folder):
    lines = map(json.loads, (folder / LEFT_OUT).read_text().splitlines())
    left_out = {line["id"]: (line["reason"], line["detail"]) for line in lines}
    expected = {
        "paravt_rl_diverse_4k4:1": ("missing video", MISSING),
        "paravt_rl_diverse_4k4:3": ("no answer", "empty"),
        "paravt_rl_diverse_4k4:5": ("unreadable video", "cut.mp4"),
        "paravt_sft_videor1_50k:2": ("broken row", "messages"),
        "paravt_sft_videor1_50k:3": ("missing video", MISSING),
        "paravt_sft_selftrace_15k3:2": ("not in the protocol", "300 to 309 s"),
    }
    assert left_out.keys() == expected.keys()
    for id, (reason, detail) in expected.items():
        assert left_out[id][0] == reason
        assert detail in left_out[id][1]


def test_other_settings_are_refused(folder, files):
    with pytest.raises(ValueError, match="\n  frames: 64 -> 32\n"):
        open_prepared(folder, reading_of(files, frames=32))


def test_an_interrupted_preparation_resumes(folder, prepared, files, tmp_path, monkeypatch):
    done = itertools.count(1)

    def interrupt() -> None:
        if next(done) >= 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(files, tmp_path, reading_of(files), interrupt)
    assert open_prepared(tmp_path, reading_of(files)) is None
    (work,) = tmp_path.glob("work-*")
    with work.open("ab") as file:
        file.write(b'{"source": "cut off')

    read = []

    def submit(pool: Workers, task: Example):
        read.append(task.id)
        return original(pool, task)

    original = Workers.submit
    monkeypatch.setattr(Workers, "submit", submit)
    resumed = run(files, tmp_path, reading_of(files))
    assert len(read) == 13 - 4, "finished rows are not read again"
    assert not list(tmp_path.glob("work-*"))

    assert list(resumed.questions) == list(prepared.questions)
    assert list(resumed.conversations) == list(prepared.conversations)
    for name in (SET, LEFT_OUT):
        assert (tmp_path / name).read_text() == (folder / name).read_text()


PROGRAM = """
import sys, pathlib
from tests.paravt_jax.test_preparation import reading_of, run
files, out = map(pathlib.Path, sys.argv[1:])
run(files, out, reading_of(files), lambda: print("a row", flush=True))
"""


def prepare_and_kill(files: pathlib.Path, out: pathlib.Path, kill_after: int | None) -> None:
    """Prepare in another process, which is killed after this many rows (None: never)."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(files), str(out)],
        cwd=pathlib.Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for done, _ in enumerate(process.stdout, 1):
        if done == kill_after:
            os.kill(process.pid, signal.SIGKILL)
            break
    expected = 0 if kill_after is None else -signal.SIGKILL
    assert process.wait() == expected


@pytest.mark.slow
def test_a_preparation_that_was_killed_twice_ends_with_the_same_set(
    folder, prepared, files, tmp_path
):
    for kill_after in (3, 5, None):
        prepare_and_kill(files, tmp_path, kill_after)
    found = open_prepared(tmp_path, reading_of(files))
    assert found is not None
    assert list(found.questions) == list(prepared.questions)
    assert list(found.conversations) == list(prepared.conversations)
    for name in (SET, LEFT_OUT):
        assert (tmp_path / name).read_text() == (folder / name).read_text()


def test_a_deadline_that_no_row_meets_leaves_all_rows_out(files, tmp_path):
    write_rl(tmp_path / "annotations", [rl_row(CAR)] * 2)
    start = time.monotonic()
    with pytest.raises(ValueError, match="none of 2 rows can be used; see .*mend"):
        run(tmp_path, tmp_path / "out", reading_of(files), deadline=1e-9)
    assert time.monotonic() - start < 300
