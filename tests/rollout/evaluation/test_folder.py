"""The folder keeps whole lines, continues what a killed process left, and refuses other runs."""

from __future__ import annotations

import pytest

from rollout.evaluation.folder import (
    EvaluationFolder,
    FolderError,
    answered,
    latest,
    read_json,
    read_lines,
)

IDENTITY = {"benchmark": "mlvu", "frames": 64, "pair": (1, 2)}


def opened(path, identity=IDENTITY, commit: str | None = "c1", process=0) -> EvaluationFolder:
    return EvaluationFolder(path, identity, {"details": "n"}, commit, process)


def test_half_a_line_is_cut_off_and_the_last_line_of_a_question_counts(tmp_path):
    with opened(tmp_path) as folder:
        folder.append({"id": "a", "score": 1.0, "turns": ["long"]})
        folder.append({"id": "b", "left_out": "missing"})
    file = tmp_path / "questions.jsonl"
    whole = file.read_bytes()
    for end in range(len(whole) - 5, len(whole)):  # killed in the middle of the second line
        file.write_bytes(whole[:end])
        assert list(latest(read_lines(tmp_path))) == ["a"]
    with opened(tmp_path) as folder:
        folder.append({"id": "b", "score": 0.5})
        folder.append({"id": "b", "score": 0.25})
    scores = {id: line["score"] for id, line in latest(read_lines(tmp_path)).items()}
    assert scores == {"a": 1.0, "b": 0.25}
    assert "turns" not in next(read_lines(tmp_path))
    assert b'"turns": ["long"]' in file.read_bytes()


@pytest.mark.parametrize("damage", [b'{"id": "b", "sco', b"\xff\xfe", b"[]", b"{}"])
def test_a_damaged_whole_line_is_named_with_its_remedy(tmp_path, damage):
    with opened(tmp_path) as folder:
        folder.append({"id": "a", "score": 1.0})
    with (tmp_path / "questions.jsonl").open("ab") as file:
        file.write(damage + b"\n")
    with pytest.raises(FolderError, match=r"questions\.jsonl, line 2: is damaged; delete the line"):
        answered(tmp_path)


@pytest.mark.parametrize(
    ("change", "difference"),
    [({"frames": 16}, r"\n  frames: 64 -> 16\n"), ({"seed": 3}, r"seed: \(absent\) -> 3")],
)
def test_another_evaluation_is_refused_with_the_difference(tmp_path, change, difference):
    opened(tmp_path).close()
    with pytest.raises(FolderError, match=difference):
        opened(tmp_path, IDENTITY | change)
    opened(tmp_path).close()  # the refusal leaves no lock


def test_every_process_has_a_file(tmp_path):
    with opened(tmp_path) as first, opened(tmp_path, process=1) as second:
        for process, name in enumerate((r"questions\.jsonl", r"questions-1\.jsonl")):
            with pytest.raises(FolderError, match=f"{name}.lock: in use"):
                opened(tmp_path, process=process)
        first.append({"id": "a"})
        second.append({"id": "b"})
    assert [line["id"] for line in read_lines(tmp_path)] == ["b", "a"]


def test_an_answer_counts_whichever_process_left_the_question_out_before(tmp_path):
    with opened(tmp_path) as first, opened(tmp_path, process=1) as second:
        second.append({"id": "a", "left_out": "missing"})
        first.append({"id": "a", "score": 1.0})
        first.append({"id": "b", "left_out": "missing"})
        second.append({"id": "b", "score": 0.5})
        second.append({"id": "c", "left_out": "missing"})
        second.append({"id": "c", "left_out": "unreadable"})
    scores = {id: line.get("score") for id, line in latest(read_lines(tmp_path)).items()}
    assert scores == {"a": 1.0, "b": 0.5, "c": None}
    assert answered(tmp_path) == {"a", "b"}


def test_a_folder_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FolderError, match="--out .*file cannot be used"):
        opened(tmp_path / "file")
    with pytest.raises(FolderError, match=r"config\.json: no such file"):
        read_json(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(FolderError, match=r"config\.json: is damaged"):
        read_json(tmp_path / "config.json")
