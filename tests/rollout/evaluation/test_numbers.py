"""Summaries and comparisons agree with the lines that they are made of."""

from __future__ import annotations

import json

import pytest

from paravt_extras.compare import compare, comparison_text
from rollout.evaluate import main
from rollout.evaluation.folder import FolderError
from rollout.evaluation.summary import MOST_VALUES, has_failed, report, summarise
from tests.rollout.evaluation.finished import config, folder, left_out, line

# --- summaries ---


def test_a_summary_has_the_figures_of_its_lines():
    lines = [
        line("a", 1.0, "v1", calls=0),
        line("b", 0.0, "v2", duration="long", tasks=["t", "u"], calls=3),
        left_out("c", "gone"),
        left_out("d", "gone"),
        left_out("e", "bad", "unreadable"),
        line("b2", 0.5, "v3", read=None, compliant=False, stop="no_answer", tasks=[], spent=5.0),
    ]
    broken = {"7": "answer is missing"}
    summary = summarise(config(), lines, 9, broken)
    assert (summary["accuracy"], summary["n"], summary["questions"]) == (0.5, 3, 9)
    low, high = summary["interval"]
    assert 0 < low < 0.5 < high < 1
    assert summary["calls"] == pytest.approx(4 / 3)
    assert summary["seconds_per_question"] == 3.0
    assert summary["compliance"] == pytest.approx(2 / 3)
    assert summary["stops"] == {"answered": 2, "no_answer": 1}
    groups = {
        name: {group: (v["score"], v["n"]) for group, v in summary[name].items()}
        for name in ("by_duration", "by_task")
    }
    assert groups["by_duration"] == {"long": (0.0, 1), "short": (0.75, 2)}
    assert groups["by_task"] == {"t": (0.5, 2), "u": (0.0, 1)}
    missing = {"video": "gone", "left_out": "missing", "reason": "no file"}
    # Each with its reason, though two are about one video.
    assert summary["left_out"][:2] == [{"id": id} | missing for id in ("c", "d")]
    assert summary["left_out"][2]["left_out"] == "unreadable"
    assert summary["broken_records"] == broken
    assert has_failed(summary) and not has_failed(summary | {"n": 27})
    assert "miou" not in summary
    reordered = [*lines[4:], *lines[:4]]
    assert summary == summarise(config(), reordered, 9, broken)


def test_grounding_has_overlap_and_recall():
    lines = [line("a", 0.3), line("b", 0.69), line("c", 0.7), line("d", 0.1)]
    summary = summarise(config("charades"), lines, 4, {})
    assert summary["miou"] == pytest.approx(0.4475)
    assert "accuracy" not in summary
    assert (summary["r@0.3"], summary["r@0.5"], summary["r@0.7"]) == (0.75, 0.5, 0.25)


def test_kinds_are_not_averaged(tmp_path):
    lines = [line("a", 1.0), line("b", 0.5, kind="tvg", read=None), line("c", 0.1, kind="oe")]
    mixed = summarise(config(), [one | {"columns": {"level": "easy"}} for one in lines], 3, {})
    for figures, mean in ((mixed, 1.0), (mixed["grounding"], 0.5), (mixed["open_ended"], 0.1)):
        assert figures["by_column"]["level: easy"]["score"] == mean
    assert (mixed["accuracy"], mixed["without_answer"]) == (1.0, 0)
    assert (mixed["grounding"]["score"], mixed["open_ended"]["score"]) == (0.5, 0.1)
    assert (mixed["by_task"]["t"]["score"], mixed["by_duration"]["short"]["n"]) == (1.0, 1)
    score, grounding, opened = list(report(mixed, tmp_path))[:3]
    assert score.endswith("on 1 of 3 questions")
    assert "grounding: 50.0" in grounding and "open-ended: 10.0" in opened
    alone = summarise(config(), lines[1:], 2, {})
    assert alone["accuracy"] == 0.5
    assert "grounding" not in alone


def test_figures_are_given_by_columns_with_few_values():
    for values in (MOST_VALUES, MOST_VALUES + 1):
        lines = [line(str(n), float(n % 2), columns={"of": str(n)}) for n in range(values)]
        groups = summarise(config(), lines, values, {})["by_column"]
        expected = {f"of: {n}": n % 2 for n in range(values) if values == MOST_VALUES}
        assert {name: group["score"] for name, group in groups.items()} == expected


# --- comparisons ---


def test_two_runs_are_compared_question_by_question(tmp_path):
    lines_a = [line(str(i), float(i < 4), f"v{i}") for i in range(10)]
    lines_b = [line(str(i), float(i in (0, 5, 6, 7, 8, 9)), f"v{i}") for i in range(10)]
    first = folder(tmp_path / "a", [*lines_a, line("x", 1.0), left_out("y", "gone")])
    second = folder(tmp_path / "b", [*lines_b, line("y", 1.0)], k=16)
    comparison = compare(first, second)
    assert (comparison["made_with"], comparison["not_shared"]) == ({"k": [64, 16]}, 2)
    (figures,) = comparison["kinds"].values()
    counts = [figures[name] for name in ("both_right", "only_first", "only_second", "both_wrong")]
    assert (figures["questions"], counts) == (10, [1, 3, 5, 1])
    assert figures["only_first_ids"] == ["1", "2", "3"]
    assert figures["only_second_ids"] == ["5", "6", "7", "8", "9"]
    assert figures["scores"] == [0.4, 0.6]
    assert figures["difference"] == pytest.approx(0.2)
    low, high = figures["interval"]
    assert -1 < low < 0.2 < high < 1
    assert figures["mcnemar_p"] == pytest.approx(2 * (1 + 8 + 28 + 56) / 256)
    text = comparison_text(first, second, comparison)
    for words in ("+20.0", "0.727", "k: A 64, B 16"):
        assert words in text


def test_a_comparison_warns_if_few_videos_differ(tmp_path):
    def run(name, better):
        scores = [line(str(i), float(i < better), f"v{i // 2}") for i in range(60)]
        return folder(tmp_path / name, scores)

    base, near, far = run("base", 20), run("near", 38), run("far", 39)
    text = " ".join(comparison_text(base, near, compare(base, near)).split())
    assert "warning: scores of multiple choice differ on 9 of 30 videos" in text
    assert "warning" not in comparison_text(base, far, compare(base, far))


def test_kinds_are_not_averaged_in_a_comparison_and_judges_not_mixed(tmp_path):
    def run(name, choice, overlap, judge):
        lines = [line("c", choice), line("g", overlap, kind="tvg"), line("o", 0.5, kind="oe")]
        return folder(tmp_path / name, lines, judge=judge)

    first, second = run("a", 1.0, 0.2, "j"), run("b", 0.0, 0.6, "j")
    kinds = compare(first, second)["kinds"]
    differences = {kind: figures["difference"] for kind, figures in kinds.items()}
    assert differences == pytest.approx({"mcq": -1.0, "tvg": 0.4, "oe": 0.0})
    assert "oe" not in compare(first, run("c", 1.0, 0.2, "other"))["kinds"]


# What differs under the id "x" of two runs.
OTHERS = [
    {"video": "w"},
    {"question": {"text": "Who?", "options": ["a", "b"], "answer": "B"}},
    {"question": {"text": "Which?", "options": ["a", "c"], "answer": "A"}},
    {"kind": "oe", "question": {"text": "Which?", "options": [], "answer": "b"}},
]


@pytest.mark.parametrize("other", OTHERS)
def test_different_questions_under_one_id_are_not_compared(other, tmp_path):
    first = folder(tmp_path / "a", [line("1", 1.0), line("x", 0.0)], questions="h0")
    second = folder(tmp_path / "b", [line("1", 0.0), line("x", 1.0, **other)], questions="h1")
    comparison = compare(first, second)
    assert [figures["questions"] for figures in comparison["kinds"].values()] == [1]
    assert comparison["not_shared"] == 2


def test_runs_without_anything_in_common_are_not_compared(tmp_path):
    one = folder(tmp_path / "a", [line("1", 1.0)])
    with pytest.raises(ValueError, match="is videomme, .* is mlvu"):
        compare(one, folder(tmp_path / "b", [line("1", 1.0)], benchmark="mlvu"))
    with pytest.raises(ValueError, match="in common"):
        compare(one, folder(tmp_path / "c", [line("2", 1.0)]))
    with pytest.raises(FolderError, match="nowhere/config.json: no such file"):
        compare(one, tmp_path / "nowhere")
    with pytest.raises(ValueError, match="a is given twice"):
        compare(one, tmp_path / "b" / ".." / "a")


def test_the_command_compares(tmp_path, capsys):
    first, second = (folder(tmp_path / name, [line("1", 1.0)]) for name in "ab")
    assert main(["--compare", str(first), str(second), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == compare(first, second)
    assert main(["--compare", str(first), str(second)]) == 0
    assert "multiple choice" in capsys.readouterr().out
