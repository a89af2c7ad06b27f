"""Files of your own questions: the example of the docs in both forms, and what is refused."""

from __future__ import annotations

import csv
import json
import pathlib
import re

import pytest

from paravt_jax.data.question_files import COLUMNS, read_questions, require_unique_ids
from paravt_jax.method.records import Question, QuestionKind
from paravt_jax.method.subtitles import Subtitle

DOCS = pathlib.Path(__file__).parents[2] / "docs" / "evaluation.md"
SRT = "1\n00:00:01,000 --> 00:00:02,500\nHello\n"


@pytest.fixture
def rows(tmp_path) -> list[dict]:
    """The rows of the example in docs/evaluation.md, with the subtitles that it names."""
    (tmp_path / "talk.srt").write_text(SRT)
    found = re.search(r"```jsonl\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return [json.loads(line) for line in found[1].splitlines()]


def write(folder: pathlib.Path, rows: list[dict], name: str = "my.jsonl") -> pathlib.Path:
    if name.endswith(".jsonl"):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder / name
    with (folder / name).open("w", newline="") as stream:
        table = csv.DictWriter(stream, COLUMNS)
        table.writeheader()
        for row in rows:
            cells = {n: v if isinstance(v, str) else json.dumps(v) for n, v in row.items()}
            table.writerow(cells)
    return folder / name


@pytest.mark.parametrize("name", ["my.jsonl", "my.csv"])
def test_the_example_of_the_docs(name, rows, tmp_path):
    goal, when, colour = read_questions(write(tmp_path, rows, name), tmp_path)
    assert goal == Question(
        "goal",
        "match.mp4",
        "Who scores the first goal?",
        QuestionKind.MULTIPLE_CHOICE,
        "B",
        ("the goalkeeper", "number 7", "nobody"),
    )
    assert (when.kind, when.answer) == (QuestionKind.TEMPORAL_GROUNDING, "[2712, 2720]")
    assert (colour.kind, colour.answer) == (QuestionKind.OPEN_ENDED, "merge sort")
    assert colour.subtitles == (Subtitle(1.0, 2.5, "Hello"),) and goal.subtitles == ()


def test_questions_on_one_video_share_its_subtitles(rows, tmp_path):
    file = write(tmp_path, [rows[2] | {"id": id} for id in "ab"])
    first, second = read_questions(file, tmp_path)
    assert first.subtitles is second.subtitles and first.subtitles


def test_a_row_without_an_id_goes_by_its_line(rows, tmp_path):
    bare = [{name: value for name, value in row.items() if name != "id"} for row in rows]
    assert [q.id for q in read_questions(write(tmp_path, bare), tmp_path)] == ["1", "2", "3"]
    found = read_questions(write(tmp_path, bare, "my.csv"), tmp_path)
    assert [q.id for q in found] == ["2", "3", "4"]  # the header is line 1


BAD = [
    ({"video": None}, "video: ''; it is needed"),
    ({"video": "/etc/passwd"}, "video: '/etc/passwd'; a path below the folder of videos"),
    ({"video": "../x.mp4"}, "video: '../x.mp4'; a path below"),
    ({"question": " "}, "question: ' '; it is needed"),
    ({"answer": None}, "answer: ''; it is needed"),
    ({"answer": "D"}, "answer: 'D'; the letter of the right option: give one from A to C"),
    ({"answer": "number 7"}, "answer: 'number 7'; the letter"),
    ({"answer": "AB"}, "answer: 'AB'; the letter"),
    ({"answer": ["B"]}, "answer: \"['B']\"; it is a text"),
    ({"options": ["one"]}, "options: \"['one']\"; a JSON list of 2 to 26 texts"),
    ({"options": "a, b"}, "options: 'a, b'; a JSON list"),
    ({"kind": "essay"}, "kind: 'essay'; one of mcq, tvg, oe"),
    ({"kind": "oe"}, "kind: 'oe'; mcq has options and the others have none"),
    ({"kind": "tvg", "options": None}, "answer: 'B'; a span of seconds"),
    ({"kind": "tvg", "options": None, "answer": [9, 3]}, "answer: '[9, 3]'; a span of seconds"),
    ({"subtitles": "gone.srt"}, "subtitles: 'gone.srt'; no such file below"),
    ({"subtitles": "talk.txt"}, "subtitles: 'talk.txt'; a SubRip file"),
    ({"option": "x"}, "column: 'option'; the columns are id, video, question"),
    ({"id": "when"}, "id: 'when'; line 1 has it"),
]


@pytest.mark.parametrize(("change", "said"), BAD, ids=[said[:40] for _, said in BAD])
def test_a_bad_row_is_refused_with_its_line(change, said, rows, tmp_path):
    file = write(tmp_path, [rows[1], {**rows[0], **change}])
    with pytest.raises(ValueError, match="line 2") as error:
        read_questions(file, tmp_path)
    assert str(error.value).startswith(f"{file}, line 2: {said}")


def test_every_bad_row_is_named_up_to_ten(rows, tmp_path):
    file = write(tmp_path, [{"video": "a.mp4", "answer": "x"}] * 12)
    file.write_text("no json\n" + file.read_text())
    with pytest.raises(ValueError, match="line 1: row: 'no json'; every line is one JSON") as error:
        read_questions(file, tmp_path)
    assert len(str(error.value).splitlines()) == 11 and "and 3 more bad rows" in str(error.value)


def test_cells_that_a_csv_row_lacks_are_refused(tmp_path):
    (tmp_path / "my.csv").write_text("video,question,answer\na.mp4,Who, what?,me\n")
    with pytest.raises(ValueError, match="line 2: row: .*the header has 3 columns"):
        read_questions(tmp_path / "my.csv", tmp_path)


def test_a_cell_that_is_too_long_is_refused_with_its_line(tmp_path):
    file = tmp_path / "my.csv"
    file.write_text("video,question,answer\na.mp4," + "why " * 50_000 + ",B\n")
    with pytest.raises(ValueError, match=r"my\.csv.*line 2.*cannot be read as CSV"):
        read_questions(file, tmp_path)


def test_files_that_hold_no_questions(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file"):
        read_questions(tmp_path / "my.csv", tmp_path)
    with pytest.raises(ValueError, match=r"has to end in \.csv or \.jsonl"):
        read_questions(tmp_path / "my.xlsx", tmp_path)
    for content, said in ((b"", "it has no rows"), (b"\xff\xfe\n", "it is no UTF-8")):
        (tmp_path / "my.jsonl").write_bytes(content)
        with pytest.raises(ValueError, match=said):
            read_questions(tmp_path / "my.jsonl", tmp_path)


def test_an_id_names_one_question():
    one = Question("a", "v.mp4", "Who?", QuestionKind.OPEN_ENDED, "me")
    with pytest.raises(ValueError, match="two have the id 'a'"):
        require_unique_ids([one, one])
