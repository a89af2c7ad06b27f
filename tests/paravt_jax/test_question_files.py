"""Files of your own questions: the example of the docs in both formats, and bad files."""

from __future__ import annotations

import csv
import json
import pathlib
import re

import pytest

from paravt_jax.data.question_files import read_columns, read_questions
from paravt_jax.method.records import Question, QuestionKind, Subtitle

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
        table = csv.DictWriter(
            stream, list(dict.fromkeys(name for row in rows for name in row)), ""
        )
        table.writeheader()
        for row in rows:
            table.writerow(
                {
                    name: value if isinstance(value, str) else json.dumps(value)
                    for name, value in row.items()
                }
            )
    return folder / name


@pytest.mark.parametrize("name", ["my.jsonl", "my.csv"])
def test_the_example_of_the_docs(name, rows, tmp_path):
    rows[0]["evidence"] = [12, 14.5]
    goal, when, colour = read_questions(write(tmp_path, rows, name), tmp_path)
    assert goal == Question(
        "goal",
        "match.mp4",
        "Who scores the first goal?",
        QuestionKind.MULTIPLE_CHOICE,
        "B",
        ("the goalkeeper", "number 7", "nobody"),
        evidence=(12.0, 14.5),
    )
    assert when.evidence is None
    assert (when.kind, when.answer) == (QuestionKind.TEMPORAL_GROUNDING, "[2712, 2720]")
    assert (colour.kind, colour.answer) == (QuestionKind.OPEN_ENDED, "merge sort")
    assert colour.subtitles == (Subtitle(1.0, 2.5, "Hello"),)
    assert goal.subtitles == ()


def test_the_id_of_a_row_without_one_is_its_line(rows, tmp_path):
    bare = [{name: value for name, value in row.items() if name != "id"} for row in rows]
    of_jsonl = read_questions(write(tmp_path, bare), tmp_path)
    assert [question.id for question in of_jsonl] == ["1", "2", "3"]
    # Line 1 is the header.
    of_csv = read_questions(write(tmp_path, bare, "my.csv"), tmp_path)
    assert [question.id for question in of_csv] == ["2", "3", "4"]


# What is changed in a good row; the field that the error names, with its value; a word of the rule.
BAD = [
    ({"video": ""}, "video", "required"),
    ({"video": "/etc/passwd"}, "video", "below the folder"),
    ({"video": "../x.mp4"}, "video: '../x.mp4'; give", "below the folder"),
    ({"video": "clips\\x.mp4"}, "video", "with /"),
    ({"question": " "}, "question", "required"),
    ({"answer": None}, "answer: ''; ", "required"),
    ({"answer": None, "anwser": "B"}, "anwser: 'B'; ", "rename the column to answer"),
    ({"answer": "D"}, "answer", "from A to C"),
    ({"answer": "number 7"}, "answer", "letter"),
    ({"answer": ["B"]}, "answer", "text"),
    ({"options": "seven|four"}, "options: 'seven|four'; ", '["a car", "a boat"]'),
    ({"options": [str(n) for n in range(27)]}, "options", "2 to 26 texts"),
    ({"kind": "essay"}, "kind: 'essay'; ", "'mcq', 'tvg' or 'oe'"),
    ({"kind": "oe"}, "kind", "options"),
    ({"kind": "tvg", "options": None, "answer": "20-30"}, "answer: '20-30'; ", "[12.5, 20]"),
    ({"kind": "tvg", "options": None, "answer": [9, 3]}, "answer", "start before end"),
    ({"options": ["a car", " A  car", "x"]}, "options", "occurs twice"),
    ({"options": None}, "answer", "no options: add them, or the kind oe"),
    ({"subtitles": "gone.srt"}, "subtitles", "No such file"),
    ({"subtitles": "../x.srt"}, "subtitles: '../x.srt'; ", "below the folder"),
    ({"evidence": [5, "6"]}, "evidence", "[12.5, 20]"),
    ({"option": "x"}, "option: 'x'; ", "rename the column to options"),
]


@pytest.mark.parametrize(("change", "field", "rule"), BAD)
def test_a_bad_row_is_refused_with_its_line(change, field, rule, rows, tmp_path):
    file = write(tmp_path, [rows[1], {**rows[0], **change}])
    with pytest.raises(ValueError, match="line 2") as error:
        read_questions(file, tmp_path)
    message = str(error.value)
    assert message.startswith(f"{file}, line 2: {field}") and "\n" not in message
    assert rule in message


@pytest.mark.parametrize(
    ("written", "asked"),
    [
        (["A. a bottle", "B. a cup"], ("a bottle", "a cup")),
        (["(A) a bottle", "(B) a cup"], ("a bottle", "a cup")),
        (["A) a bottle", "B) a cup"], ("a bottle", "a cup")),
        (["A: a bottle", "B: a cup"], ("a bottle", "a cup")),
        (["a. a bottle", "b. a cup"], ("a bottle", "a cup")),
        (["<", ">"], ("<", ">")),
        # Not all have their letter, so it belongs to the words.
        (["A. a bottle", "a cup"], ("A. a bottle", "a cup")),
        (["A. Lincoln", "C. Obama"], ("A. Lincoln", "C. Obama")),
        (["C", "C++"], ("C", "C++")),
    ],
)
def test_letters_before_options_are_not_asked_twice(written, asked, rows, tmp_path):
    (question,) = read_questions(write(tmp_path, [rows[0] | {"options": written}]), tmp_path)
    assert (question.options, question.answer) == (asked, "B")


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_tables_of_spreadsheets_are_read(delimiter, tmp_path):
    file = tmp_path / "my.csv"
    lines = [
        ["video", "question", "options", "answer", "level "],
        ["v.mp4", "Who, or what?", '"[""ein Auto"", ""ein Bär""]"', "B", "3"],
    ]
    text = "".join(delimiter.join(cells) + "\r\n" for cells in [*lines, [""] * 5])
    file.write_bytes(text.encode("utf-8-sig"))
    ((question, columns),) = read_columns(file, tmp_path)
    assert (question.text, question.options) == ("Who, or what?", ("ein Auto", "ein Bär"))
    assert columns == {"level": "3"}
    file.write_text(text + delimiter.join(["v.mp4", "a", "b", "c", "d", "e"]))
    with pytest.raises(ValueError, match="line 4: line: .*not those of the header"):
        read_questions(file, tmp_path)


@pytest.mark.parametrize(("name", "indent"), [("my.json", 1), ("my.jsonl", None)])
def test_a_json_list_is_read_with_columns_of_ones_own(name, indent, rows, tmp_path):
    rows = [row | {"level": n, "easy": True, "note": None} for n, row in enumerate(rows)]
    (tmp_path / name).write_text(json.dumps(rows, indent=indent))
    listed = read_columns(tmp_path / name, tmp_path)
    own = [columns for _, columns in listed]
    assert own == [{"level": str(n), "easy": "True"} for n in range(3)]
    # They belong to no question: those train like the questions of a file without them.
    assert [question.id for question, _ in listed] == ["goal", "when", "colour"]
    rows[1]["video"] = "../x"
    (tmp_path / name).write_text(json.dumps(rows, indent=indent))
    with pytest.raises(ValueError, match="question 2: video"):
        read_questions(tmp_path / name, tmp_path)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("video,question,answer,kind\na.mp4,Who?,me\n", 2),
        ("video,question,answer,answer\na.mp4,Who?,me,you\n", 1),
        ("video,question,answer\na.mp4,Who, what?,me\n", 2),
    ],
)
def test_cells_that_are_not_those_of_the_header_are_refused(text, line, tmp_path):
    (tmp_path / "my.csv").write_text(text)
    with pytest.raises(ValueError, match=f"line {line}: line: .*not those of the header"):
        read_questions(tmp_path / "my.csv", tmp_path)


def test_files_without_questions_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"my\.csv"):
        read_questions(tmp_path / "my.csv", tmp_path)
    with pytest.raises(ValueError, match=r"my\.xlsx; .*\.csv, .*\.json"):
        read_questions(tmp_path / "my.xlsx", tmp_path)
    for content, said in ((b"", "no questions"), (b"\xff\xfe\n", "UTF-8")):
        (tmp_path / "my.jsonl").write_bytes(content)
        with pytest.raises(ValueError, match=said):
            read_questions(tmp_path / "my.jsonl", tmp_path)


def test_two_questions_with_one_id_are_refused(rows, tmp_path):
    with pytest.raises(ValueError, match="line 2: id: 'goal'; another question has the same id"):
        read_questions(write(tmp_path, [rows[0], rows[0]]), tmp_path)
