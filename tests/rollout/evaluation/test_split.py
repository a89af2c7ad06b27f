"""A question's way from its file to its score, and what becomes of those that cannot be played."""

from __future__ import annotations

import collections
import gc
import json
import os
import pathlib

import numpy as np
import pytest

from models.features import FrameFeatures, FrameSettings
from paravt_jax.data import video
from paravt_jax.method.protocol import Protocol, subtitled_text
from paravt_jax.method.records import Question, QuestionKind
from paravt_jax.method.subtitles import Subtitle
from rollout.agent.episode import Environment
from rollout.engine.requests import Sample, SampleStop
from rollout.evaluation.benchmarks import Item, VideoFolder
from rollout.evaluation.folder import EvaluationFolder
from rollout.evaluation.settings import BenchmarkSettings
from rollout.evaluation.split import Player, fitting
from tests.rollout.conftest import Cut

ANSWER = "seen\n</think>\n<answer>B</answer>"


def by_id(lines):
    found = {line["id"]: line for line in lines}
    json.dumps(found, allow_nan=False)
    return found


def answering(player, **answers):
    """A script that plans first and then gives each question its answer."""

    def turns(request):
        sampler, text = player.sampler, player.sampler.vocabulary.decode(request.ids)
        if "crop_video" in text and sampler.is_first(request):
            return answers["plan"]
        return f"seen\n</think>\n<answer>{answers['of'](text)}</answer>"

    return turns


def test_lines_of_a_split(player, items, plan):
    lines = by_id(player(answering(player, plan=plan, of=lambda text: "B")).lines(items))
    assert len(lines) == len(items)
    good, other, third = lines["1-1"], lines["1-2"], lines["2-1"]
    assert [line["score"] for line in (good, other, third)] == [0.0, 1.0, 0.0] and good[
        "read"
    ] == "B"
    assert (good["calls"], good["duration"], third["duration"], other["tasks"]) == (
        1,
        "short",
        "long",
        ["OCR Problems"],
    )
    assert [call["status"] for call in good["turns"][0]["calls"]] == ["executed", "bad_window"]
    assert (
        "".join(t["text"] for t in good["turns"][1]["tokens"]).startswith("<think>\nseen")
        and len(good["overview"]) == 4
    )
    assert good["turns"][0]["calls"][0]["response"].startswith(" seven from 8 to 10")
    assert (
        good["video"] == "data/w0.mp4" == good["file"]
        and good["stop"] == "answered"
        and good["compliant"]
    )
    assert (lines["3-1"]["left_out"], lines["3-2"]["left_out"], lines["4-1"]["left_out"]) == (
        "missing",
        "missing",
        "unreadable",
    )
    assert "no file data/gone.mp4" in lines["3-1"]["reason"] and all(
        line["spent"] >= 0 for line in lines.values()
    )


def test_nothing_is_kept_of_a_video_whose_questions_are_done(player, items, plan):
    playing = player(answering(player, plan=plan, of=lambda text: "B"), episodes=1)
    features, held = playing._environment.features, []
    for line in playing.lines(items):
        held.append((line["id"], len(features._infos), bool(features._store)))
    assert ("1-1", 1, True) in held and held[-1][1:] == (0, False)


def test_as_many_side_by_side_as_asked_and_each_as_alone(player, items, plan):
    script = answering(player, plan=plan, of=lambda text: "C" if "Count" in text else "A")
    many = by_id(player(script, episodes=4).lines(items))
    assert max(len(wave) for wave in player.sampler.waves) == 3
    one = by_id(player(script, episodes=1).lines(items[::-1]))
    assert max(len(wave) for wave in player.sampler.waves) == 1
    for line in (*many.values(), *one.values()):
        del line["spent"]
    assert many == one


@pytest.mark.parametrize(
    ("written", "score", "read"),
    [
        (
            "seen\n</think>\nThe answer is (A).",
            1.0,
            "The answer is (A).",
        ),  # no block: what stands after the thought
        ("seen\n</think>\n<answer>A", 1.0, "A"),
        ("seen\n</think>\n", 0.0, None),
        ("the answer is A", 0.0, None),  # thought, and never said
        ("seen\n</think>\n<answer>A</answer> or B", 1.0, "A"),
    ],
)
def test_answers_of_models_that_do_not_know_the_format(player, items, written, score, read):
    (line,) = player([written]).lines(items[:1])
    assert (line["score"], line["read"]) == (score, read)


def test_an_answer_that_names_no_option_is_counted_as_unread(player, items):
    for said, unread in (("B", False), ("one of them", True), ("A or B", True)):
        (line,) = player([f"x\n</think>\n<answer>{said}</answer>"]).lines(items[:1])
        assert (line["read"], line["unread"], line["score"]) == (said, unread, 0.0)
    (line,) = player(["x\n</think>\n"]).lines(items[:1])
    assert (line["read"], line["unread"]) == (None, False)


def test_blind_opens_no_file_and_offers_no_tool(player, items):
    lines = by_id(player(["guess\n</think>\n<answer>A</answer>"], blind=True).lines(items))
    assert [lines[i]["score"] for i in ("1-1", "1-2", "3-1")] == [1.0, 0.0, 0.0] and len(lines) == 6
    for request, _ in player.sampler.main:
        assert request.frames == () and "crop_video" not in player.sampler.vocabulary.decode(
            request.ids
        )
    assert (
        lines["3-1"]["overview"] == []
        and lines["3-1"]["dispatch"] == "none"
        and lines["3-1"]["k"] == 0
    )


def test_shuffled_options_move_the_letter(player, items):
    plain = by_id(player(["x\n</think>\n<answer>Two.</answer>"]).lines(items[:3]))
    moved = by_id(
        player(["x\n</think>\n<answer>Two.</answer>"], shuffle=True, seed=4).lines(items[:3])
    )
    for id in plain:  # words are right wherever they stand
        assert plain[id]["score"] == moved[id]["score"]
        assert sorted(plain[id]["question"]["options"]) == sorted(moved[id]["question"]["options"])
    assert any(plain[id]["question"]["options"] != moved[id]["question"]["options"] for id in plain)


def test_subtitles_stand_before_the_question_as_words(player, items):
    wanted = [
        Item(item.question, subtitles=f"subtitle/{item.question.video[5:-4]}.srt")
        for item in items[:3]
    ]
    lines = by_id(
        player(["x\n</think>\n<answer>A</answer>"], benchmark="videomme_wsub").lines(wanted)
    )
    assert (lines["1-1"]["subtitles"], lines["2-1"]["subtitles"]) == (2, None)
    texts = {player.sampler.vocabulary.decode(request.ids) for request, _ in player.sampler.main}
    (said,) = {
        text.partition("What is said")[2].partition("How many")[0]
        for text in texts
        if "What is said" in text
    }
    assert said == " in the video:\n<1.0 seconds> Hello there\n<65.5 seconds> Good bye\n\n"


def test_a_search_finds_subtitles_for_which_the_prompt_has_no_room(player, items):
    search = (
        '<tool_call>\n{"name": "search_subtitles", "arguments": {"query": "bye"}}\n</tool_call>'
    )
    turns = ["look\n</think>\n" + search, "seen\n</think>\n<answer>A</answer>"]
    playing = player(
        turns,
        tools=("crop_video", "search_subtitles"),
        subtitle_tokens=48,
        turn_tokens=256,
        summary_tokens=64,
        trajectory_tokens=1024,
    )
    (line,) = playing.lines([Item(items[0].question, subtitles="subtitle/w0.srt")])
    assert line["subtitles"] == 1  # "Hello there" alone stands in the prompt
    assert line["turns"][0]["calls"][0]["response"] == "<65.5 seconds> Good bye"


def test_too_many_subtitles_are_thinned_evenly(player, items):
    protocol = player([""])._environment.protocol
    entries = [Subtitle(float(i), i + 1.0, "words " * (1 + i % 3)) for i in range(200)]
    kept = fitting(entries, protocol, 400)
    assert 5 < len(kept) < 200 and kept[0] == entries[0] and kept[-1].start > 150
    gaps = {round(b.start - a.start) for a, b in zip(kept, kept[1:], strict=False)}
    assert max(gaps) - min(gaps) <= 1
    asked = Question("q", "v", "", QuestionKind.OPEN_ENDED, "")
    bare = len(protocol.vocabulary.encode(subtitled_text([], asked.text)))
    assert len(protocol.vocabulary.encode(subtitled_text(kept, asked.text))) - bare <= 400
    assert fitting(entries[:3], protocol, 400) == entries[:3] and fitting(
        entries, protocol, 16
    ) == [] == fitting([], protocol, 400)


def test_refusals_are_told_from_other_ends(player, items, plan):
    """The main agent's leaves its question out; a sub-agent's is counted beside the score."""
    (line,) = player([Cut("", SampleStop.REFUSED, "status 400")]).lines(items[:1])
    assert (line["left_out"], line["reason"]) == ("refused", "status 400")
    report = Cut("", SampleStop.REFUSED)
    (line,) = player([plan, "seen\n</think>\n<answer>A</answer>"], report).lines(items[:1])
    assert (line["score"], line["calls"], line["refused_reports"]) == (1.0, 0, 1)


def test_a_question_that_is_too_long_is_left_out(player, items):
    question = Question("q", "data/w0.mp4", "why? " * 100, QuestionKind.OPEN_ENDED, "because")
    (line,) = player([""]).lines([Item(question)])
    assert line["left_out"] == "too_long" and "there is room for 64" in line["reason"]


def test_open_ended_answers(player, items):
    question = Question("q", "data/w0.mp4", "What?", QuestionKind.OPEN_ENDED, "merge sort")
    said = ["x\n</think>\n<answer>heap sort</answer>"]
    assert next(player(said).lines([Item(question)]))["score"] == 0.5
    assert next(player(said, open_ended="exact").lines([Item(question)]))["score"] == 0.0


class Answering:
    """A sampler that keeps nothing: every main agent answers at once."""

    def __init__(self, vocabulary):
        self.ids = vocabulary.encode(ANSWER + "<|im_end|>")
        self.waiting, self.count = {}, 0

    def submit(self, request):
        self.count += 1
        self.waiting[self.count] = request
        return self.count

    def step(self):
        waiting, self.waiting = self.waiting, {}
        nothing = np.zeros(len(self.ids), np.float32)
        return [
            (ticket, (Sample(self.ids, nothing, SampleStop.STOP_ID, 0, ""),)) for ticket in waiting
        ]

    def cancel(self, ticket):
        self.waiting.pop(ticket, None)


def resident() -> float:
    """MiB."""
    gc.collect()
    return (
        int(pathlib.Path("/proc/self/statm").read_text().split()[1])
        * os.sysconf("SC_PAGE_SIZE")
        / 2**20
    )


@pytest.mark.slow
@pytest.mark.skipif(
    not pathlib.Path("/proc/self/statm").exists(), reason="reads the process's memory from /proc"
)
def test_memory_is_flat_over_five_thousand_questions(
    small_vocabulary, small_model, videos, tmp_path
):
    (tmp_path / "data").mkdir()
    for number in range(500):
        (tmp_path / "data" / f"v{number}.mp4").symlink_to(videos / "data" / "w0.mp4")
    features = FrameFeatures(
        small_model.vision,
        small_model.config,
        FrameSettings(batch=16, whole_frames=64),
        tmp_path,
        source=video,
    )
    settings = BenchmarkSettings("m", "videomme", frames=64, question_tokens=64, episodes=8)
    environment = Environment(Protocol(small_vocabulary, settings.protocol(64)), features)
    playing = Player(Answering(small_vocabulary), environment, settings, VideoFolder(tmp_path))
    items = [
        Item(
            Question(
                f"q{n}",
                f"data/v{n // 10}.mp4",
                f"Number {n}?",
                QuestionKind.MULTIPLE_CHOICE,
                "B",
                ("x", "y"),
            )
        )
        for n in range(5000)
    ]
    marks = []
    with EvaluationFolder(tmp_path / "out", {"benchmark": "videomme"}, {}, None) as folder:
        for number, line in enumerate(playing.lines(items), 1):
            folder.append(line)
            if number % 1000 == 0:
                marks.append(resident())
    print(
        f"\nresident MiB after every 1,000 questions: {', '.join(f'{mark:.1f}' for mark in marks)}"
    )
    # What is kept of each question grows with every thousand; the allocator takes a step now and then.
    grown = np.diff(marks)
    assert grown.min() < 1 and grown.sum() < 80


@pytest.mark.slow
def test_a_thousand_rows_with_bad_videos_among_them(
    small_vocabulary, small_model, videos, tmp_path
):
    """Every tenth is missing, noise or cut off: these are counted, and nothing else is."""
    (tmp_path / "data").mkdir()
    good = (videos / "data" / "w0.mp4").read_bytes()
    for number in range(1000):
        file = tmp_path / "data" / f"v{number}.mp4"
        if number % 30 == 10:
            file.write_bytes(bytes(range(256)) * 9)
        elif number % 30 == 20:
            file.write_bytes(good[: len(good) * 2 // 3])
        elif number % 30:
            file.symlink_to(videos / "data" / "w0.mp4")
    features = FrameFeatures(
        small_model.vision,
        small_model.config,
        FrameSettings(batch=16, whole_frames=64),
        tmp_path,
        source=video,
    )
    settings = BenchmarkSettings("m", "videomme", question_tokens=64, episodes=8)
    environment = Environment(Protocol(small_vocabulary, settings.protocol(64)), features)
    playing = Player(Answering(small_vocabulary), environment, settings, VideoFolder(tmp_path))
    items = [
        Item(
            Question(
                f"q{n}", f"data/v{n}.mp4", "Why?", QuestionKind.MULTIPLE_CHOICE, "B", ("x", "y")
            )
        )
        for n in range(1000)
    ]
    lines = by_id(playing.lines(items))
    causes = collections.Counter(line.get("left_out", "played") for line in lines.values())
    assert causes == {"played": 900, "missing": 34, "unreadable": 66}
    assert all(
        (line.get("left_out", "played") == "played") == bool(int(id[1:]) % 10)
        for id, line in lines.items()
    )
