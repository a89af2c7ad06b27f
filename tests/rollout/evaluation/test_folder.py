"""What a killed process left behind is gone on with; what is another evaluation's is refused."""

from __future__ import annotations

import json

import pytest

from rollout.evaluation.folder import EvaluationFolder, FolderError, latest, read_json, read_lines

IDENTITY = {"benchmark": "mlvu", "frames": 64, "pair": (1, 2)}


def opened(path, identity=IDENTITY, commit: str | None = "c1", shard=(0, 1)) -> EvaluationFolder:
    return EvaluationFolder(path, identity, {"name": "n"}, commit, shard)


def test_lines_survive_and_half_a_line_is_cut_off(tmp_path):
    with opened(tmp_path) as folder:
        folder.append({"id": "a", "score": 1.0, "turns": ["long"]})
        folder.append({"id": "b", "left_out": "missing"})
    file = tmp_path / "questions.jsonl"
    whole = file.read_bytes()
    for cut in range(len(whole) - 5, len(whole)):  # killed in the middle of the second line
        file.write_bytes(whole[:cut])
        assert list(latest(read_lines(tmp_path))) == ["a"]
    with opened(tmp_path) as folder:
        folder.append({"id": "b", "score": 0.5})
        folder.append({"id": "b", "score": 0.25})
    assert {id: line["score"] for id, line in latest(read_lines(tmp_path)).items()} == {
        "a": 1.0,
        "b": 0.25,
    }
    assert "turns" not in next(read_lines(tmp_path)) and b'"turns": ["long"]' in file.read_bytes()


def test_another_evaluation_is_refused_with_the_difference(tmp_path):
    opened(tmp_path).close()
    opened(tmp_path).close()  # the same one is not
    with pytest.raises(
        FolderError,
        match=r"another evaluation \(stored -> wanted\):\n  frames: 64 -> 16\nName another --name or",
    ):
        opened(tmp_path, IDENTITY | {"frames": 16})
    with pytest.raises(FolderError, match=r"seed: \(absent\) -> 3"):
        opened(tmp_path, IDENTITY | {"seed": 3})
    opened(tmp_path).close()  # a refusal leaves no lock


def test_commits_are_kept_in_order(tmp_path):
    for commit in ("c1", "c1", "c2", None):
        opened(tmp_path, commit=commit).close()
    assert read_json(tmp_path / "config.json")["commits"] == ["c1", "c2", None]
    EvaluationFolder(
        tmp_path, IDENTITY, {"name": "other"}, "c2"
    ).close()  # what decides no answer is that of the last start
    assert read_json(tmp_path / "config.json") == {
        "identity": IDENTITY | {"pair": [1, 2]},
        "name": "other",
        "commits": ["c1", "c2", None],
    }


def test_one_process_a_shard_and_the_last_summary_has_all(tmp_path):
    make = lambda config, lines: {"ids": [line["id"] for line in lines], "name": config["name"]}  # noqa: E731
    with opened(tmp_path, shard=(0, 2)) as first, opened(tmp_path, shard=(1, 2)) as second:
        with pytest.raises(
            FolderError, match="questions-0-of-2.jsonl is in use by another process"
        ):
            opened(tmp_path, shard=(0, 2))
        first.append({"id": "a"})
        second.append({"id": "b"})
        assert second.summarise(make) == {"ids": ["a", "b"], "name": "n"}
    assert json.loads((tmp_path / "summary.json").read_text())["ids"] == ["a", "b"]


def test_folders_that_cannot_be_used(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FolderError, match="--out .*file cannot be used"):
        opened(tmp_path / "file")
    with pytest.raises(
        FolderError, match="config.json: is not there; give the folder of an evaluation"
    ):
        read_json(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(FolderError, match="is damaged"):
        opened(tmp_path)
