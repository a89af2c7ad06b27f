"""Every split is read as it is published, and what cannot be asked is left out by name."""

from __future__ import annotations

import json

import huggingface_hub
import pytest
from huggingface_hub import errors

from paravt_jax.method.accuracy import accuracy
from paravt_jax.method.records import Question, QuestionKind
from rollout.evaluation.benchmarks import BENCHMARKS, load
from tests.paravt_jax.benchmarks import published

MCQ, TVG, OE = (
    QuestionKind.MULTIPLE_CHOICE,
    QuestionKind.TEMPORAL_GROUNDING,
    QuestionKind.OPEN_ENDED,
)


def read(name, tmp_path, rows=None):
    return load(
        name,
        str(
            published.write_split(
                name, tmp_path / name, published.EXAMPLES[name] if rows is None else rows
            )
        ),
    )


def test_the_papers_seven_splits_are_there_with_its_numbers():
    published = [b for b in BENCHMARKS.values() if b.paper]
    assert [b.name for b in published] == [
        "videomme",
        "videomme_wsub",
        "longvideobench",
        "lvbench",
        "mlvu",
        "mmvu",
        "charades",
    ]
    assert [b.paper["ParaVT-8B"] for b in published] == [62.1, 69.4, 60.4, 39.8, 65.0, 68.6, 50.1]


def test_cgbench_is_its_mini_split_unless_a_file_is_named(tmp_path):
    first, second, third = read("cgbench", tmp_path).items
    assert first.question == Question(
        "4012",
        "cg_videos_720p/Hj8-2.mp4",
        "What colour is the car that leaves?",
        MCQ,
        "B",
        ("Blue.", "Red.", "Green.", "White.", "Black.", "Yellow."),
    )
    assert (first.tasks, second.question.answer, third.question.id) == (
        ("Entity Perception",),
        "F",
        "7",
    )
    full = tmp_path / "cgbench" / "cgbench.json"
    full.write_text(json.dumps([published.cgbench(n, "k_1") for n in range(9)]))
    assert len(load("cgbench", str(full.parent)).items) == 3
    assert len(load("cgbench", str(full)).items) == 9


def test_videomme(tmp_path):
    items = read("videomme", tmp_path).items
    assert items[0].question == Question(
        "001-1",
        "data/fFjv93ACGo8.mp4",
        "How many apples are there?",
        MCQ,
        "B",
        ("One.", "Two.", "Three.", "Four."),
    )
    assert (items[0].duration, items[0].tasks, items[0].subtitles) == (
        "short",
        ("Counting Problem",),
        "",
    )
    assert (
        items[1].question.answer == "D"
        and items[2].duration == "long"
        and items[2].question.video == "data/x_-y.mp4"
    )
    (with_subtitles,) = read("videomme_wsub", tmp_path).items
    assert (
        with_subtitles.subtitles == "subtitle/fFjv93ACGo8.srt"
        and with_subtitles.question == items[0].question
    )


def test_longvideobench_from_its_table_and_from_its_json(tmp_path):
    items = read("longvideobench", tmp_path).items
    assert [(i.question.answer, i.question.options) for i in items] == [
        ("B", ("a cat", "a dog")),
        ("E", ("1", "2", "3", "4", "5")),
    ]
    assert items[0].question.video == "videos/86CxyhFV9MI.mp4"
    assert [(i.duration, i.tasks) for i in items] == [("60", ("T2E",)), ("3600", ("T2E",))]
    rows = [
        {k: v for k, v in row.items() if not k.startswith("option")} | {"candidates": options}
        for row, options in zip(
            published.EXAMPLES["longvideobench"], (["a cat", "a dog"], list("12345")), strict=True
        )
    ]
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "lvb_val.json").write_text(json.dumps(rows))
    assert load("longvideobench", str(tmp_path / "copy")).items == items
    assert load("longvideobench", str(tmp_path / "copy" / "lvb_val.json")).items == items


def test_lvbench_from_its_table_and_from_its_lines(tmp_path):
    first, second = read("lvbench", tmp_path).items
    assert first.question == Question(
        "0",
        "Cm73ma6Ibcs.mp4",
        "What year is shown at the start?",
        MCQ,
        "C",
        ("1636", "1366", "1363", "1633"),
    )
    assert (
        first.tasks == ("key information retrieval", "reasoning")
        and second.tasks == ()
        and second.question.options == ()
    )
    questions = [
        {k: v for k, v in row.items() if k != "video_path"} for row in published.EXAMPLES["lvbench"]
    ]
    line = json.dumps(
        {
            "key": "Cm73ma6Ibcs",
            "type": "cartoon",
            "video_info": {"duration_minutes": 61},
            "qa": questions,
        }
    )
    (tmp_path / "video_info.meta.jsonl").write_text(line + "\n")
    assert load("lvbench", str(tmp_path / "video_info.meta.jsonl")).items == (first, second)


def test_mlvu_from_its_table_and_from_its_own_files(tmp_path):
    first, second = read("mlvu", tmp_path).items
    own = {"video_name": "video", "task_type": "question_type"}
    rows = [
        {own.get(name, name): value for name, value in row.items()}
        for row in published.EXAMPLES["mlvu"]
    ]
    folder = tmp_path / "copy" / "MLVU" / "json"
    folder.mkdir(parents=True)
    for name, some in (
        ("1_plotQA", rows[:1]),
        ("2_needle", rows[1:]),
        ("9_summary", rows),
    ):  # the last is no multiple choice
        (folder / f"{name}.json").write_text(json.dumps(some))
    assert load("mlvu", str(tmp_path / "copy")).items == (first, second)
    assert (first.question.answer, second.question.answer, first.tasks) == ("A", "D", ("plotQA",))
    assert first.question.video == "movie101_66.mp4" and first.question.id != second.question.id


def test_mmvu(tmp_path):
    choice, open_ended = read("mmvu", tmp_path).items
    assert choice.question.video == "videos/Computer_Science/18.mp4" and choice.tasks == (
        "Computer Science",
        "multiple-choice",
    )
    assert choice.question.options == (
        "Quick sort",
        "Merge sort",
        "Heap sort",
        "Radix sort",
        "Shell sort",
    )
    assert open_ended.question == Question(
        "validation_1", "videos/Chemistry/2.mp4", "Which algorithm is shown?", OE, "merge sort"
    )


def test_charades(tmp_path):
    items = read("charades", tmp_path).items
    assert items[0].question.video == "Charades_v1_480/3MSZA.mp4" and items[0].question.kind is TVG
    assert [i.question.answer for i in items] == ["[24.3, 30.4]", "[0, 8.25]", "[24.3, 30.4]"]
    assert (
        "person turn a light on" in items[0].question.text
        and len({i.question.id for i in items}) == 3
    )
    assert accuracy(items[0].question, "from 24.3 to 30.4 seconds") == pytest.approx(1.0)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_right_answer_scores_and_ids_are_unique(name, tmp_path):
    rows = published.EXAMPLES[name]
    items = read(name, tmp_path, [*rows, rows[0]]).items
    assert (
        len({i.question.id for i in items}) == len(rows) + 1
        and items[-1].question.id == f"{items[0].question.id}#2"
    )
    assert all(accuracy(i.question, i.question.answer) == 1.0 for i in items)


BROKEN = [
    ("videomme", {"answer": "E"}, "answer = 'E'"),
    ("videomme", {"answer": None}, "answer is missing"),
    ("videomme", {"question": " "}, "question is missing"),
    ("videomme", {"options": ["A. One."]}, "options are missing"),
    ("videomme", {"videoID": "../../etc/passwd"}, "etc/passwd"),
    ("longvideobench", {"correct_choice": 2}, "correct_choice = 2"),
    ("longvideobench", {"correct_choice": -1}, "correct_choice = -1"),
    ("lvbench", {"video_path": "/etc/passwd"}, "video = '/etc/passwd'"),
    ("lvbench", {"answer": "F"}, "answer = 'F'"),
    ("mlvu", {"answer": "a green car"}, "answer = 'a green car'"),
    (
        "mlvu",
        {"answer": "a boat", "candidates": ["a boat", "a boat", "x", "y"]},
        "answer = 'a boat': equal to several options",
    ),
    ("mmvu", {"question_type": "essay"}, "question_type = 'essay'"),
    ("mmvu", {"video": "https://example.org/18.mp4"}, "video = 'https://example.org/18.mp4'"),
    ("charades", {"timestamp": [30.0, 24.0]}, "timestamp = [30.0, 24.0]"),
    ("cgbench", {"right_answer": "G"}, "right_answer = 'G'"),
    ("cgbench", {"choices": None}, "options are missing"),
    ("charades", {"timestamp": [1.0]}, "timestamp = [1.0]"),
]


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    BROKEN,
    ids=[f"{n}-{next(iter(c))}-{i}" for i, (n, c, _) in enumerate(BROKEN)],
)
def test_a_broken_row_is_left_out_by_its_number(name, change, reason, tmp_path):
    first, *others = published.EXAMPLES[name]
    loaded = read(name, tmp_path, [{**first, **change}, *others, first])
    assert list(loaded.broken) == ["row 0"] and reason in loaded.broken["row 0"]
    assert len(loaded.items) == len(others) + 1


def test_files_that_are_no_table(tmp_path):
    with pytest.raises(FileNotFoundError, match="--data .*holds none of videomme/test-"):
        load("videomme", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="no such file or folder, and no hub id"):
        load("videomme", str(tmp_path / "nowhere" / "at" / "all"))
    for name, content in (
        ("x.parquet", b"PAR1 nothing"),
        ("x.json", b"{"),
        ("x.json", b'{"a": 1}'),
        ("x.jsonl", b"\xff\n"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=name):
            load("videomme", str(tmp_path / name))
    published.write_split("mlvu", tmp_path / "other", published.EXAMPLES["mlvu"])
    with pytest.raises(
        ValueError,
        match=r"none of 2 rows is a question of charades \(video is missing\); check that it is lmms-lab/charades_sta",
    ):
        load("charades", str(tmp_path / "other"))


def test_shards_are_read_in_order(tmp_path):
    for part in (1, 0):
        rows = [published.videomme(f"{part}-{i}", "v", domain=None) for i in range(3)]
        published.write_parquet(tmp_path / "videomme" / f"test-{part:05}-of-00002.parquet", rows)
    assert [i.question.id for i in load("videomme", str(tmp_path)).items] == [
        "0-0",
        "0-1",
        "0-2",
        "1-0",
        "1-1",
        "1-2",
    ]


def test_from_the_hub(tmp_path, monkeypatch):
    asked = []

    def fetch(source, **fields):
        asked.append((source, fields))
        return str(published.write_split("mmvu", tmp_path, published.EXAMPLES["mmvu"]))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert len(load("mmvu").items) == 2
    assert asked == [
        (
            "yale-nlp/MMVU",
            {
                "repo_type": "dataset",
                "allow_patterns": ["validation.json", "*validation-*.parquet"],
            },
        )
    ]

    def fail(source, **fields):
        raise errors.LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(
        FileNotFoundError,
        match="--data yale-nlp/MMVU: not here, and the hub did not give it .*hf auth login",
    ):
        load("mmvu")
