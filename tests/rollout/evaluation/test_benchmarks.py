"""Every split is read as it is published; records that are not questions are left out by name."""

from __future__ import annotations

import json

import pytest

from paravt_jax.data.frames import join
from paravt_jax.method.accuracy import accuracy
from paravt_jax.method.records import Question, QuestionKind
from rollout.evaluation.benchmarks import BENCHMARKS, BrokenRecord, load, options_of
from rollout.evaluation.files import VideoFolder
from tests.rollout.evaluation import published

MCQ = QuestionKind.MULTIPLE_CHOICE
TVG = QuestionKind.TEMPORAL_GROUNDING
OE = QuestionKind.OPEN_ENDED


def read(name, tmp_path, records=None):
    """Load a split with these records, by default with its examples."""
    records = published.EXAMPLES[name] if records is None else records
    return load(name, str(published.write_split(name, tmp_path / name, records)))


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
    assert items[0].duration == "short"
    assert items[0].tasks == ("Counting Problem",)
    assert items[0].subtitles == ""
    assert items[1].question.answer == "D"
    assert items[2].duration == "long"
    assert items[2].question.video == "data/x_-y.mp4"
    (subtitled,) = read("videomme_wsub", tmp_path).items
    assert subtitled.subtitles == "subtitle/fFjv93ACGo8.srt"
    assert subtitled.question == items[0].question


def test_longvideobench_from_its_table_and_from_its_json(tmp_path):
    items = read("longvideobench", tmp_path).items
    options = (("a cat", "a dog"), ("1", "2", "3", "4", "5"))
    assert tuple(item.question.options for item in items) == options
    assert [item.question.answer for item in items] == ["B", "E"]
    assert items[0].question.video == "videos/86CxyhFV9MI.mp4"
    assert [item.duration for item in items] == ["60", "3600"]
    assert [item.tasks for item in items] == [("T2E",), ("T2E",)]
    # The JSON file has a list of candidates instead of a column per option.
    records = []
    for record, candidates in zip(published.EXAMPLES["longvideobench"], options, strict=True):
        kept = {name: value for name, value in record.items() if not name.startswith("option")}
        records.append(kept | {"candidates": candidates})
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "lvb_val.json").write_text(json.dumps(records))
    assert load("longvideobench", str(copy)).items == items
    assert load("longvideobench", str(copy / "lvb_val.json")).items == items


def test_lvbench(tmp_path):
    first, second = read("lvbench", tmp_path).items
    assert first.question == Question(
        "0",
        "Cm73ma6Ibcs.mp4",
        "What year is shown at the start?",
        MCQ,
        "C",
        ("1636", "1366", "1363", "1633"),
    )
    assert first.tasks == ("key information retrieval", "reasoning")
    assert second.tasks == ()
    assert second.question.options == ()


def test_mlvu(tmp_path):
    first, second = read("mlvu", tmp_path).items
    assert (first.question.answer, second.question.answer) == ("A", "D")
    assert first.tasks == ("plotQA",)
    assert first.question.video == "movie101_66.mp4"
    assert first.question.id != second.question.id


def test_mmvu(tmp_path):
    choice, open_ended = read("mmvu", tmp_path).items
    assert choice.question.video == "videos/Computer_Science/18.mp4"
    assert choice.tasks == ("Computer Science", "multiple-choice")
    sorts = ("Quick sort", "Merge sort", "Heap sort", "Radix sort", "Shell sort")
    assert choice.question.options == sorts
    assert open_ended.question == Question(
        "validation_1", "videos/Chemistry/2.mp4", "Which algorithm is shown?", OE, "merge sort"
    )


def test_charades(tmp_path):
    questions = [item.question for item in read("charades", tmp_path).items]
    assert questions[0].video == "Charades_v1_480/3MSZA.mp4"
    assert questions[0].kind is TVG
    assert "person turn a light on" in questions[0].text
    assert [q.answer for q in questions] == ["[24.3, 30.4]", "[0, 8.25]", "[24.3, 30.4]"]
    assert len({question.id for question in questions}) == 3
    assert accuracy(questions[0], "from 24.3 to 30.4 seconds") == pytest.approx(1.0)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_right_answer_scores_and_ids_are_unique(name, tmp_path):
    records = published.EXAMPLES[name]
    items = read(name, tmp_path, [*records, records[0]]).items
    assert len({item.question.id for item in items}) == len(records) + 1
    assert items[-1].question.id == f"{items[0].question.id}#2"
    assert all(accuracy(item.question, item.question.answer) == 1.0 for item in items)


BROKEN = [
    ("videomme", {"answer": "E"}, "answer 'E'"),
    ("videomme", {"answer": None}, "answer"),
    ("videomme", {"options": ["A. One."]}, "options"),
    ("videomme", {"videoID": "../../etc/passwd"}, "path below the folder"),
    ("longvideobench", {"correct_choice": 2}, "answer 2"),
    ("lvbench", {"video_path": "/etc/passwd"}, "path below the folder"),
    ("mlvu", {"answer": "a green car"}, "answer 'a green car'"),
    ("mlvu", {"answer": "a boat", "candidates": ["a boat", "a boat", "x", "y"]}, "several"),
    ("longvideobench", {"option0": "N/A"}, "missing before the last"),
    ("mmvu", {"choices": {"A": "one", "B": "", "C": "two"}, "answer": "C"}, "missing before"),
    ("mmvu", {"question_type": "essay"}, "question_type 'essay'"),
    ("mmvu", {"video": "https://example.org/18.mp4"}, "18.mp4"),
    ("charades", {"timestamp": [30.0, 24.0]}, "[30.0, 24.0]"),
    ("videomme", {"answer": "G"}, "answer 'G'"),
]


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    BROKEN,
    ids=[f"{n}-{next(iter(c))}-{i}" for i, (n, c, _) in enumerate(BROKEN)],
)
def test_a_broken_row_is_left_out_by_its_number(name, change, reason, tmp_path):
    first, *others = published.EXAMPLES[name]
    loaded = read(name, tmp_path, [{**first, **change}, *others, first])
    assert list(loaded.broken) == ["0"] and reason in loaded.broken["0"]
    assert len(loaded.items) == len(others) + 1


def test_files_that_are_not_tables_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="--data .*videomme/test-"):
        load("videomme", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="--data .*nowhere/at/all.*: holds none of"):
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


def test_a_text_may_have_any_character_in_a_file_of_lines(tmp_path):
    """JSON allows line separators of Unicode inside a text; they end no line of the file."""
    text = "Which\u2028sign\x85is shown?"
    record = published.videomme("1-0", "v", question=text)
    file = tmp_path / "records.jsonl"
    file.write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")
    (item,) = load("videomme", str(file)).items
    assert item.question.text == text


def test_shards_are_read_in_order(tmp_path):
    for shard in (1, 0):
        records = [published.videomme(f"{shard}-{i}", "v", domain=None) for i in range(3)]
        published.write_parquet(
            tmp_path / "videomme" / f"test-{shard:05}-of-00002.parquet", records
        )
    ids = [item.question.id for item in load("videomme", str(tmp_path)).items]
    assert ids == ["0-0", "0-1", "0-2", "1-0", "1-1", "1-2"]


@pytest.mark.parametrize("unused", [None, "", "N/A"])
def test_unused_options_are_dropped_only_at_the_end(unused):
    assert options_of(["one", "two", unused, unused]) == ("one", "two")
    # Without the gap, index 2 and letter C would name no option, or another one.
    for wrong in (["one", unused, "two"], ["one", unused], ["one"], unused, "one"):
        with pytest.raises(BrokenRecord):
            options_of(wrong)


def test_videos_are_found_where_archives_put_them(tmp_path):
    paths = (
        *("data/a.mp4", "b.mp4", "part_1/c.mp4", "x/d.mp4", "y/d.mp4"),
        *("videos/Chemistry/7.mp4", "videos/Art/7.mp4", "videos/Art/8.mp4"),
        # As macOS writes them.
        "e\u0301te\u0301/cafe\u0301.mp4",
    )
    for path in paths:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    folder = VideoFolder(tmp_path)
    assert folder.find("data/a.mp4") == "data/a.mp4"
    # One folder less, and one more.
    assert folder.find("data/b.mp4") == "b.mp4"
    assert folder.find("c.mp4") == "part_1/c.mp4"
    assert folder.find("Chemistry/7.mp4") == "videos/Chemistry/7.mp4"
    # Two files have this name.
    assert folder.find("d.mp4") is None
    assert folder.find("videos/Art/7.mp4") == "videos/Art/7.mp4"
    # Another subject's.
    assert folder.find("videos/Biology/8.mp4") is None
    assert folder.find("videos/Art/9.mp4") is None
    # As other systems write them.
    assert folder.find("videos/\xe9t\xe9/caf\xe9.mp4") == "e\u0301te\u0301/cafe\u0301.mp4"
    assert join(tmp_path, "\xe9t\xe9/caf\xe9.mp4") == tmp_path / "e\u0301te\u0301/cafe\u0301.mp4"
    with pytest.raises(FileNotFoundError, match="--data .*nowhere"):
        VideoFolder(tmp_path / "nowhere")
