"""The scenes: what is asked can be seen, only with crops or many frames, and not be guessed."""

from __future__ import annotations

import collections
import math
import pathlib
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import ImageColor

from configs.paravt_8b import paravt_8b
from paravt_extras import scenes
from paravt_extras.scenes import FPS, Moment, SceneSettings, SceneVideo
from paravt_jax.data import tokenizer_file, video
from paravt_jax.data.frames import PixelRules, overview_indices, window_indices
from paravt_jax.data.question_files import read_questions
from paravt_jax.method.accuracy import accuracy, overlap, read_range
from paravt_jax.method.records import Question, QuestionKind
from train.prepare import prepare_set
from train.settings import change

VIDEOS = scenes.plan_videos(SceneSettings(seed=5, videos=120, heldout=120))
ASKED = [(each, *asked) for each in VIDEOS for asked in scenes.questions(each, 5)]
FEW = SceneSettings(videos=4, heldout=1, lines=320)
FLAGS = ("--videos=4", "--heldout=1", "--lines=320")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    """A folder that the command has written."""
    folder = tmp_path_factory.mktemp("scenes") / "few"
    assert scenes.main([f"--out={folder}", *FLAGS]) == 0
    return folder


def shows(moment: Moment, times: np.ndarray) -> np.ndarray:
    return (times >= moment.start) & (times < moment.end)


def test_no_moment_is_in_four_frames_and_crops_or_64_frames_show_all():
    for each in VIDEOS:
        info = each.info
        windows = [(n * each.seconds / 3, (n + 1) * each.seconds / 3) for n in range(3)]
        crops = [info.times[window_indices(info, *window, 1.0, 16)] for window in windows]
        for moment in each.moments:
            assert not shows(moment, overview_indices(info.frames, 4) / FPS).any()
            assert shows(moment, overview_indices(info.frames, 64) / FPS).any()
            assert shows(moment, np.concatenate(crops)).any()


def test_a_file_shows_each_card_from_its_first_to_its_last_frame(folder):
    for each in scenes.plan_videos(FEW):
        info = video.probe(folder / "media" / each.path)
        assert (info.frames, info.duration, info.height) == (each.seconds * FPS, each.seconds, 320)
        for moment in each.moments:
            first, after = round(moment.start * FPS), round(moment.end * FPS)
            numbers = [first - 1, first, after - 1, after]
            frames = video.read(folder / "media" / each.path, numbers).astype(int)
            cards = [(frame > 235).all(-1).mean() > 0.15 for frame in frames]
            assert cards == [False, True, True, False]
            # The shape has the colour that questions name.
            near = np.abs(frames[1] - ImageColor.getrgb(moment.colour)).max(-1) < 40
            assert near.mean() > 0.02
            # A word is higher than a patch of the vision tower, at the pixels of the recipes.
            word = np.flatnonzero(np.any(np.all(frames[1, 224:] < 80, -1), 1))
            height, _ = PixelRules().size(info.height, info.width)
            assert np.ptp(word) * height / info.height >= 16


def expected(each: SceneVideo, question: Question) -> str:
    """The right answer, read from the video by what the question names."""
    shown = {moment.word: moment for moment in each.moments}
    named = [shown[word] for word in re.findall(r"\b[A-Z]{4,}\b", question.text)]
    if "end of the video" in question.text:
        return each.chapters[-1][1]
    if "first?" in question.text:
        return min(question.options, key=lambda word: shown[word].start)
    if not named:
        (only,) = (m for m in each.moments if f" {m.colour} {m.shape} " in question.text)
        return only.word
    if "When" in question.text:
        return f"[{named[0].start:g}, {named[0].end:g}]"
    numbers = [moment.number for moment in named]
    return str(sum(numbers)) if "sum" in question.text else ", then ".join(map(str, numbers))


def test_the_video_shows_the_answer_and_no_other_option():
    for each, question, moments in ASKED:
        answer = question.answer
        if question.options:
            assert len(set(question.options)) == len(question.options)
            answer = question.options["ABCDE".index(answer)]
        assert answer == expected(each, question)
        assert accuracy(question, question.answer) == 1
        evidence = (moments[0].start, moments[0].end - 1 / FPS) if len(moments) == 1 else None
        assert question.evidence == evidence
    assert {len(moments) for _, _, moments in ASKED} == {0, 1, 2, 4}
    assert {question.kind for _, question, _ in ASKED} == {*QuestionKind}


def test_no_letter_and_no_rank_is_right_more_often_than_others():
    right = collections.defaultdict(collections.Counter)
    for _, question, _ in ASKED:
        if question.options:
            family, place = question.id.split("/")[-1], "ABCDE".index(question.answer)
            right[family, "letter"][place] += 1
            right[family, "rank"][sorted(question.options).index(question.options[place])] += 1
    for (family, feature), counts in right.items():
        total, chance = counts.total(), 1 / (5 if family == "end" else 4)
        spread = math.sqrt(total * chance * (1 - chance))
        assert max(counts.values()) < total * chance + 3.5 * spread, (family, feature)


def span_of(text: str) -> tuple[float, float]:
    span = read_range(text)
    assert span is not None
    return span


def test_a_demonstration_answers_from_its_reports():
    calls = collections.Counter()
    for each in VIDEOS[3:120:4]:
        asked = scenes.questions(each, 5)
        for (question, moments), turns in zip(asked, scenes.demonstrations(each, 5), strict=True):
            texts = [(turn["role"], turn["content"][-1]["text"]) for turn in turns]
            reports = " ".join(text for role, text in texts if role == "tool")
            calls[texts[2][1].count("<tool_call>")] += 1
            for moment in moments:
                assert f"number {moment.number} is above the word {moment.word}" in reports
            (answer,) = re.findall("<answer>(.*)</answer>", texts[-1][1])
            if question.kind is QuestionKind.TEMPORAL_GROUNDING:
                assert overlap(span_of(answer), span_of(question.answer)) > 0.5
            else:
                assert answer == question.answer
    assert set(calls) == {0, 1, 3} and calls[3] > calls.total() / 2


def test_the_same_command_does_nothing_and_other_flags_are_refused(folder, capsys):
    for split in scenes.SPLITS:
        videos = [v for v in scenes.plan_videos(FEW) if v.split == split and not v.demonstrated]
        asked = [question for v in videos for question, _ in scenes.questions(v, FEW.seed)]
        assert read_questions(folder / f"{split}.jsonl", folder / "media") == (*asked,)
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("*.*") if file.suffix}
    for flag, message in (
        ("--seed=0", ""),
        ("--seed=2", "seed: 0 -> 2"),
        ("--videos=2", "--videos: 2; give 4"),
    ):
        assert scenes.main([f"--out={folder}", *FLAGS, flag]) == bool(message)
        assert message in capsys.readouterr().err
    assert len(before) == 10 and all(f.stat().st_mtime_ns == t for f, t in before.items())


@pytest.mark.slow
def test_a_stopped_command_leaves_whole_videos_and_goes_on(tmp_path, folder):
    # So many videos that a busy machine cannot draw all of them before the signals arrive.
    arguments = [sys.executable, "-m", "paravt_extras.scenes", f"--out={tmp_path}", *FLAGS]
    arguments += ["--videos=12"]
    drawn: dict[pathlib.Path, int] = {}
    for number, code in ((signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)):
        process = subprocess.Popen(arguments, stderr=subprocess.DEVNULL)
        while len([*tmp_path.rglob("*.mp4")]) <= len(drawn) and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(timeout=120) == code
        drawn = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.mp4")}
        assert 1 <= len(drawn) < 13 and not (tmp_path / "train.jsonl").exists()
    subprocess.run(arguments, check=True)
    assert all(file.stat().st_mtime_ns == changed for file, changed in drawn.items())
    assert len([*tmp_path.rglob("*.mp4")]) == 13 and not [*tmp_path.rglob("*.tmp")]
    # The bytes do not depend on stops and on the number of videos.
    for file in folder.rglob("*.mp4"):
        assert (tmp_path / file.relative_to(folder)).read_bytes() == file.read_bytes()


def test_the_recipes_prepare_every_row(folder, tmp_path, small_vocabulary):
    """Questions and demonstrations as `paravt_8b` reads them, with four overview frames."""
    tokenizer_file.save(small_vocabulary, tmp_path / "tokenizer")
    fields = {
        "model.path": str(tmp_path / "tokenizer"),
        "data.annotations": str(folder / "annotations"),
        "data.media": str(folder / "media"),
        "data.frames": scenes.FRAMES,
    }
    run = change(paravt_8b(), "scenes", fields)
    assert run.data is not None
    prepared = prepare_set(run, run.data, tmp_path / "set")
    assert (len(prepared.questions), len(prepared.conversations)) == (21, 7)
    for conversation in prepared.conversations:
        (clip,) = conversation.clips
        # The thought names the times that the prompt shows.
        thought = str(conversation.turns[1].content[0])
        assert len(clip.times) == 4 and all(f" {time:.1f} (" in thought for time in clip.times)
