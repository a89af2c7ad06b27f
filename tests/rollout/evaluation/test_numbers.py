"""Summaries and comparisons agree with the lines that they are made of."""

from __future__ import annotations

import pytest

from paravt_extras.compare import compare, comparison_text
from rollout.evaluate import main
from rollout.evaluation.folder import FolderError
from rollout.evaluation.report import report
from rollout.evaluation.summary import summarise
from tests.rollout.evaluation.finished import config, folder, left_out, line

# --- summaries ---


def test_a_summary_has_the_figures_of_its_lines():
    lines = [
        line("a", 1.0, "v1", calls=0),
        line("b", 0.0, "v2", duration="long", tasks=["t", "u"], calls=3),
        left_out("c", "gone"),
        left_out("d", "gone"),
        left_out("e", "bad", "unreadable"),
        left_out("b2", "v3"),
        line("b2", 0.5, "v3", read=None, compliant=False, stop="no_answer", tasks=[], spent=5.0),
    ]
    broken = {"row 7": "answer is missing"}
    found = summarise(config(), iter(lines), 9, broken)
    assert (found["accuracy"], found["n"], found["questions"]) == (0.5, 3, 9)
    low, high = found["interval"]
    assert 0 < low < 0.5 < high < 1
    assert found["calls"] == pytest.approx(4 / 3)
    assert found["share_with_calls"] == pytest.approx(2 / 3)
    assert found["seconds_per_question"] == 3.0
    assert found["compliance"] == pytest.approx(2 / 3)
    assert found["stops"] == {"answered": 2, "no_answer": 1}
    groups = {
        name: {group: (v["score"], v["n"]) for group, v in found[name].items()}
        for name in ("by_duration", "by_task")
    }
    assert groups["by_duration"] == {"long": (0.0, 1), "short": (0.75, 2)}
    assert groups["by_task"] == {"t": (0.5, 2), "u": (0.0, 1)}
    assert found["left_out"]["missing"] == {"questions": 2, "videos": {"gone": "no file"}}
    assert found["left_out"]["unreadable"]["questions"] == 1
    assert found["broken_rows"] == broken
    assert "miou" not in found
    reordered = [*lines[5:], *lines[:5]]  # as other shards might have written them
    assert found == summarise(config(), iter(reordered), 9, broken)


def test_grounding_has_overlap_and_recall():
    lines = [line("a", 0.3), line("b", 0.69), line("c", 0.7), line("d", 0.1)]
    found = summarise(config("charades"), iter(lines), 4, {})
    assert found["miou"] == pytest.approx(0.4475)
    assert "accuracy" not in found
    assert (found["r@0.3"], found["r@0.5"], found["r@0.7"]) == (0.75, 0.5, 0.25)


def test_kinds_are_not_averaged(tmp_path):
    lines = [line("a", 1.0), line("b", 0.5, kind="tvg", read=None), line("c", 0.1, kind="oe")]
    mixed = summarise(config(), iter(lines), 3, {})
    assert (mixed["accuracy"], mixed["without_answer"]) == (1.0, 0)
    assert (mixed["grounding"]["score"], mixed["open_ended"]["score"]) == (0.5, 0.1)
    assert (mixed["by_task"]["t"]["score"], mixed["by_duration"]["short"]["n"]) == (1.0, 1)
    score, grounding, opened = list(report(mixed, tmp_path))[:3]
    assert score.endswith("on 1 of 3 questions")
    assert "grounding questions alone: 50.0" in grounding
    assert "on 1 questions, 1 without an answer" in grounding
    assert "open-ended questions alone: 10.0" in opened
    alone = summarise(config(), iter(lines[1:]), 2, {})
    assert alone["accuracy"] == 0.5
    assert "grounding" not in alone


def test_a_run_that_played_nothing_has_a_summary_without_a_score():
    found = summarise(config(), iter([left_out("a", "gone")]), 4, {})
    assert found["n"] == 0
    assert "accuracy" not in found
    assert found["left_out"]["missing"]["questions"] == 1


# --- comparisons ---


def test_two_runs_are_compared_question_by_question(tmp_path):
    lines_a = [line(str(i), float(i < 4), f"v{i}") for i in range(10)]
    lines_b = [line(str(i), float(i in (0, 5, 6, 7, 8, 9)), f"v{i}") for i in range(10)]
    first = folder(tmp_path / "a", [*lines_a, line("x", 1.0), left_out("y", "gone")])
    second = folder(tmp_path / "b", [*lines_b, line("y", 1.0)], k=16)
    found = compare(first, second)
    assert found["made_with"] == {"k": [64, 16]}
    assert (found["questions"], found["not_shared"]) == (10, 2)
    counts = [found[name] for name in ("both_right", "only_first", "only_second", "both_wrong")]
    assert counts == [1, 3, 5, 1]
    assert found["only_first_ids"] == ["1", "2", "3"]
    assert found["only_second_ids"] == ["5", "6", "7", "8", "9"]
    assert found["scores"] == [0.4, 0.6]
    assert found["difference"] == pytest.approx(0.2)
    low, high = found["interval"]
    assert -1 < low < 0.2 < high < 1
    assert found["mcnemar_p"] == pytest.approx(2 * (1 + 8 + 28 + 56) / 256)
    assert found["left_out"] == [{"missing": 1}, {}]
    text = comparison_text(first, second, found)
    for part in ("B - A: +20.0", "p = 0.727", "only A: 1, 2, 3", "A left out: 1 missing"):
        assert part in text
    assert "made with: k A 64, B 16" in text


def test_a_comparison_warns_if_few_videos_differ(tmp_path):
    def run(name, better):
        scores = [line(str(i), float(i < better), f"v{i // 2}") for i in range(60)]
        return folder(tmp_path / name, scores)

    base, near, far = run("base", 20), run("near", 38), run("far", 39)
    found = compare(base, near)
    assert (found["videos"], found["differing_videos"]) == (30, 9)
    text = comparison_text(base, near, found)
    assert "warning: scores differ on 9 of 30 videos; with fewer than 10" in text
    assert "warning" not in comparison_text(base, far, compare(base, far))
    # Equal runs: no difference, and an interval with a length.
    same = compare(base, run("same", 20))
    assert same["difference"] == 0
    assert same["interval"][1] == -same["interval"][0] > 0


def test_choice_and_grounding_are_not_averaged_in_a_comparison(tmp_path):
    def run(name, choice, overlap):
        lines = [line("c", choice), line("g", overlap, kind="tvg")]
        return folder(tmp_path / name, lines)

    first, second = run("a", 1.0, 0.2), run("b", 0.0, 0.6)
    found = compare(first, second)
    assert (found["questions"], found["difference"]) == (1, -1.0)
    assert found["other_kinds"]["tvg"]["difference"] == pytest.approx(0.4)
    text = comparison_text(first, second, found)
    assert "1 multiple-choice questions played by both" in text
    assert "1 grounding questions apart: A 20.0, B 60.0, B - A: +40.0" in text


def test_open_ended_answers_that_are_scored_in_two_ways_are_not_compared(tmp_path):
    def run(name, scoring, judge="", **choice):
        lines = [line(id, score) for id, score in choice.items()]
        scored = {"open_ended": scoring, "judge_model": judge}
        return folder(tmp_path / name, [*lines, line("o", 0.5, kind="oe")], **scored)

    first, second = run("a", "f1", c=1.0), run("b", "judge", c=1.0)
    found = compare(first, second)
    assert (found["questions"], found["other_kinds"], found["scored_otherwise"]) == (1, {}, 1)
    text = comparison_text(first, second, found)
    assert "1 open-ended questions are not compared: the runs score them in different ways" in text
    with pytest.raises(ValueError, match="no question in common; .* score them in the same way"):
        compare(run("c", "f1"), run("d", "exact"))
    first, second, third = (run(name, "judge", name[0], c=1.0) for name in ("x", "y", "x2"))
    assert compare(first, second)["scored_otherwise"] == 1
    assert compare(first, third)["scored_otherwise"] == 0


# What differs under the id "x" of two runs.
OTHERS = [
    {"video": "w"},
    {"question": {"text": "Who?", "options": ["a", "b"], "answer": "B"}},
    {"question": {"text": "Which?", "options": ["a", "c"], "answer": "A"}},
    {"question": {"text": "Which?", "options": ["a", "b"], "answer": "A"}},
    {"kind": "oe", "question": {"text": "Which?", "options": [], "answer": "b"}},
]


@pytest.mark.parametrize("other", OTHERS)
def test_different_questions_under_one_id_are_named_and_not_compared(other, tmp_path):
    first = folder(tmp_path / "a", [line("1", 1.0), line("x", 0.0)], questions="h0")
    second = folder(tmp_path / "b", [line("1", 0.0), line("x", 1.0, **other)], questions="h1")
    found = compare(first, second)
    assert (found["questions"], found["difference"]) == (1, -1.0)
    assert found["unequal_ids"] == ["x"]
    assert (
        "warning: 1 ids stand for different questions in A and B (video, text, options or answer) "
        "and are not compared: x; give every question an id of its own"
    ) in comparison_text(first, second, found)


def test_runs_on_other_questions_with_the_same_ids_are_not_compared(tmp_path):
    """Files without ids have the numbers of their lines."""
    first = folder(tmp_path / "a", [line("1", 1.0, "v"), line("2", 1.0, "v")], questions="h0")
    second = folder(tmp_path / "b", [line("1", 1.0, "w"), line("2", 0.0, "w")], questions="h1")
    with pytest.raises(ValueError, match=r"no question in common \(2 ids stand for different"):
        compare(first, second)


def test_subtitles_leave_a_question_the_same(tmp_path):
    def run(name, hash, *questions):
        lines = [line(str(i), 1.0, question=q, subtitles=n) for i, (q, n) in enumerate(questions)]
        return folder(tmp_path / name, lines, questions=hash)

    plain = {"text": "Which?", "options": ["a", "b"], "answer": "B"}
    subtitled = plain | {"text": "Someone says: hello\nWhich?"}
    first = run("a", "h0", (plain, None), (plain, None))
    second = run("b", "h1", (plain, None), (subtitled, 1))
    assert compare(first, second)["questions"] == 2
    # Equal hashes say that the questions are equal.
    third = run("c", "h0", (subtitled, None), (plain, None))
    assert compare(first, third)["questions"] == 2


def test_runs_without_anything_in_common_are_not_compared(tmp_path):
    one = folder(tmp_path / "a", [line("1", 1.0)])
    with pytest.raises(ValueError, match="is videomme, .* is mlvu"):
        compare(one, folder(tmp_path / "b", [line("1", 1.0)], benchmark="mlvu"))
    with pytest.raises(ValueError, match="in common"):
        compare(one, folder(tmp_path / "c", [line("2", 1.0)]))
    with pytest.raises(FolderError, match="nowhere/config.json: .* evaluations/NAME/BENCHMARK"):
        compare(one, tmp_path / "nowhere")
    with pytest.raises(ValueError, match="a is given twice"):
        compare(one, tmp_path / "b" / ".." / "a")


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_comparison_warns_of_a_run_that_is_not_finished(tmp_path, capsys, form):
    first, second = (folder(tmp_path / name, [line("1", 1.0)]) for name in "ab")
    argv = ["--compare", str(first), str(second), *form]
    assert main(argv) == 0
    assert "warning" not in capsys.readouterr().err
    (first / "summary.json").unlink()
    assert main(argv) == 0
    assert f"warning: {first}: it is not finished; repeat the command" in capsys.readouterr().err
