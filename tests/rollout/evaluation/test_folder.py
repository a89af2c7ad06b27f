"""The folder keeps whole lines, continues what a killed process left, and refuses other runs."""

from __future__ import annotations

import pytest

from rollout.evaluation.folder import EvaluationFolder, FolderError, latest, read_json, read_lines

IDENTITY = {"benchmark": "mlvu", "frames": 64, "pair": (1, 2)}


def opened(path, identity=IDENTITY, commit: str | None = "c1", process=0) -> EvaluationFolder:
    return EvaluationFolder(path, identity, {"details": "n"}, commit, process)


def test_half_a_line_is_cut_off_and_the_last_line_of_a_question_counts(tmp_path):
    with opened(tmp_path) as folder:
        folder.append({"content": "a", "score": 1.0, "turns": ["long"]})
        folder.append({"content": "b", "left_out": "missing"})
    file = tmp_path / "questions.jsonl"
    whole = file.read_bytes()
    for end in range(len(whole) - 5, len(whole)):  # killed in the middle of the second line
        file.write_bytes(whole[:end])
        assert list(latest(read_lines(tmp_path))) == ["a"]
    with opened(tmp_path) as folder:
        folder.append({"content": "b", "score": 0.5})
        folder.append({"content": "b", "score": 0.25})
    scores = {content: line["score"] for content, line in latest(read_lines(tmp_path)).items()}
    assert scores == {"a": 1.0, "b": 0.25}
    assert "turns" not in next(read_lines(tmp_path))
    assert b'"turns": ["long"]' in file.read_bytes()


@pytest.mark.parametrize("damage", [b'{"content": "b", "sco', b"\xff\xfe", b"[]", b"{}"])
def test_a_damaged_whole_line_is_named_with_its_remedy(tmp_path, damage):
    with opened(tmp_path) as folder:
        folder.append({"content": "a", "score": 1.0})
    with (tmp_path / "questions.jsonl").open("ab") as file:
        file.write(damage + b"\n")
    with pytest.raises(
        FolderError, match=r"questions\.jsonl, line 2: is damaged, or .*; delete the"
    ):
        latest(read_lines(tmp_path))


@pytest.mark.parametrize(
    ("change", "difference"),
    [({"frames": 16}, r"\n  frames: 64 -> 16\n"), ({"seed": 3}, r"seed: \(absent\) -> 3")],
)
def test_another_evaluation_is_refused_with_the_difference(tmp_path, change, difference):
    for _ in range(2):  # the refusal leaves no lock
        with opened(tmp_path), pytest.raises(FolderError, match="lock: in use"):
            opened(tmp_path)
        with pytest.raises(FolderError, match=difference):
            opened(tmp_path, IDENTITY | change)


def test_every_process_has_a_file(tmp_path):
    with opened(tmp_path) as first, opened(tmp_path, process=1) as second:
        for process, name in enumerate((r"questions\.jsonl", r"questions-1\.jsonl")):
            with pytest.raises(FolderError, match=f"{name}.lock: in use"):
                opened(tmp_path, process=process)
        first.append({"content": "a"})
        second.append({"content": "b"})
    assert [line["content"] for line in read_lines(tmp_path)] == ["b", "a"]


def test_an_answer_counts_whichever_process_left_the_question_out_before(tmp_path):
    with opened(tmp_path) as first, opened(tmp_path, process=1) as second:
        second.append({"content": "a", "left_out": "missing"})
        first.append({"content": "a", "score": 1.0})
        first.append({"content": "b", "left_out": "missing"})
        second.append({"content": "b", "score": 0.5})
        second.append({"content": "c", "left_out": "missing"})
        second.append({"content": "c", "left_out": "unreadable"})
    scores = {content: line.get("score") for content, line in latest(read_lines(tmp_path)).items()}
    assert scores == {"a": 1.0, "b": 0.5, "c": None}


def test_a_folder_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FolderError, match="--out .*file cannot be used"):
        opened(tmp_path / "file")
    with pytest.raises(FolderError, match=r"config\.json: no such file"):
        read_json(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(FolderError, match=r"config\.json: is damaged"):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize("name", ["config.json", "questions.jsonl", "videos"])
def test_a_folder_of_something_else_is_refused_untouched(tmp_path, name):
    (tmp_path / name).write_text('{"hidden_size": 64}')
    with pytest.raises(FolderError, match=rf"holds {name}; give a new or empty folder") as error:
        opened(tmp_path)
    assert "\n" not in str(error.value)
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_a_start_that_was_killed_at_once_is_continued(tmp_path):
    for name in (".questions.jsonl.lock", "questions.jsonl", "config.json.tmp"):
        (tmp_path / name).touch()
    (tmp_path / "config.json.tmp").write_text('{"ident')
    with opened(tmp_path):
        assert read_json(tmp_path / "config.json")["identity"]
