"""Summaries, comparisons and tables say what the lines say."""

from __future__ import annotations

import json

import pytest

from rollout.evaluation.compare import compare, comparison_text, table
from rollout.evaluation.folder import FolderError
from rollout.evaluation.summary import summarise


def line(id, score, video="v", **fields):
    return {
        "id": id, "video": video, "score": score, "read": "B", "unread": False, "calls": 1, "turn_count": 2,
        "refused_reports": 0, "stop": "answered", "compliant": True, "spent": 2.0, "kind": "mcq",
        "duration": "short", "tasks": ["t"], "subtitles": None, **fields,
    }  # fmt: skip


def left(id, video, cause="missing"):
    return {
        "id": id,
        "video": video,
        "left_out": cause,
        "reason": "no file",
        "duration": "",
        "tasks": [],
    }


def config(benchmark="videomme", name="mine", **fields):
    identity = {
        "benchmark": benchmark,
        "frames": 64,
        "dispatch": "parallel",
        "prompt": "agentic",
        "temperature": 0.0,
    }
    return {
        "identity": identity | {"blind": False, "shuffle": False, "weights": "w0"} | fields,
        "name": name,
        "commits": ["c0"],
    }


def test_a_summary_is_made_of_its_lines():
    lines = [
        line("a", 1.0, "v1", calls=0),
        line("b", 0.0, "v2", duration="long", tasks=["t", "u"], calls=3),
        left("c", "gone"),
        left("d", "gone"),
        left("e", "bad", "unreadable"),
        left("b2", "v3"),
        line("b2", 0.5, "v3", read=None, compliant=False, stop="no_answer", tasks=[], spent=5.0),
    ]
    found = summarise(config(), iter(lines), 9, {"row 7": "answer is missing"})
    assert (found["accuracy"], found["n"], found["questions"]) == (0.5, 3, 9)
    low, high = found["interval"]
    assert 0 < low < 0.5 < high < 1
    assert found["calls"] == pytest.approx(4 / 3) and found["share_with_calls"] == pytest.approx(
        2 / 3
    )
    assert (found["seconds_per_question"], found["without_answer"], found["format"]) == (
        3.0,
        1,
        pytest.approx(2 / 3),
    )
    assert found["stops"] == {"answered": 2, "no_answer": 1}
    assert {g: (v["score"], v["n"]) for g, v in found["by_duration"].items()} == {
        "long": (0.0, 1),
        "short": (0.75, 2),
    }
    assert {g: (v["score"], v["n"]) for g, v in found["by_task"].items()} == {
        "t": (0.5, 2),
        "u": (0.0, 1),
    }
    missing, unreadable = found["left_out"]["missing"], found["left_out"]["unreadable"]
    assert (
        missing == {"questions": 2, "videos": {"gone": "no file"}} and unreadable["questions"] == 1
    )
    assert found["broken_rows"] == {"row 7": "answer is missing"} and "miou" not in found
    assert found == summarise(
        config(), iter(lines[:5] + lines[5:]), 9, {"row 7": "answer is missing"}
    )


def test_grounding_has_overlap_and_recall():
    lines = [line("a", 0.3), line("b", 0.69), line("c", 0.7), line("d", 0.1)]
    found = summarise(config("charades"), iter(lines), 4, {}, "miou")
    assert found["miou"] == pytest.approx(0.4475) and "accuracy" not in found
    assert (found["r@0.3"], found["r@0.5"], found["r@0.7"]) == (0.75, 0.5, 0.25)


def test_open_ended_answers_have_a_score_of_their_own():
    """The paper's column of MMVU is multiple choice; F1 is another number."""
    lines = [line("a", 1.0), line("b", 0.0), line("c", 0.4, kind="oe"), line("d", 0.2, kind="oe")]
    found = summarise(config("mmvu"), iter(lines), 4, {})
    assert (found["n"], found["accuracy"]) == (4, 0.5)
    opened = found["open_ended"]
    assert (opened["n"], opened["score"]) == (2, pytest.approx(0.3))
    assert opened["interval"][0] < 0.3 < opened["interval"][1]
    alone = summarise(config("mmvu"), iter(lines[2:]), 4, {})
    assert "accuracy" not in alone and alone["open_ended"]["n"] == 2
    assert "open_ended" not in summarise(config(), iter(lines[:2]), 2, {})


def test_answers_that_were_not_read_and_reports_that_were_refused_are_counted():
    lines = [
        line("a", 0.0, unread=True),
        line("b", 0.0, read=None),
        line("c", 1.0, refused_reports=2),
    ]
    found = summarise(config(), iter(lines), 3, {})
    assert (found["unread"], found["without_answer"], found["refused_reports"]) == (1, 1, 2)


def test_nothing_played_is_a_summary_too():
    found = summarise(config(), iter([left("a", "gone")]), 4, {})
    assert (
        found["n"] == 0
        and "accuracy" not in found
        and found["left_out"]["missing"]["questions"] == 1
    )


def folder(path, lines, **fields):
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config(**fields)))
    (path / "questions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    score = "miou" if fields.get("benchmark") == "charades" else "accuracy"
    summary = summarise(config(**fields), iter(lines), 6, {}, score)
    (path / "summary.json").write_text(json.dumps(summary))
    return path


def test_two_runs_question_by_question(tmp_path):
    first = folder(
        tmp_path / "a",
        [line(str(i), float(i < 4), f"v{i}") for i in range(10)]
        + [line("x", 1.0), left("y", "gone")],
    )
    second = folder(
        tmp_path / "b",
        [line(str(i), float(i in (0, 5, 6, 7, 8, 9)), f"v{i}") for i in range(10)]
        + [line("y", 1.0)],
        frames=16,
    )
    found = compare(first, second)
    assert found["made_with"] == {"frames": [64, 16]}
    cells = [found[name] for name in ("both_right", "only_first", "only_second", "both_wrong")]
    assert cells == [1, 3, 5, 1] and (found["questions"], found["not_shared"]) == (10, 2)
    assert (found["scores"], found["difference"]) == ([0.4, 0.6], pytest.approx(0.2))
    assert found["mcnemar_p"] == pytest.approx(2 * (1 + 8 + 28 + 56) / 256)
    low, high = found["interval"]
    assert -1 < low < 0.2 < high < 1
    assert found["only_first_ids"] == ["1", "2", "3"] and found["only_second_ids"] == [
        "5",
        "6",
        "7",
        "8",
        "9",
    ]
    text = comparison_text(first, second, found)
    assert (
        "B - A: +20.0" in text
        and "p = 0.727" in text
        and "only A: 1, 2, 3" in text
        and "made with: frames A 64, B 16" in text
    )


def test_grounding_is_right_from_half_an_overlap_on(tmp_path):
    first = folder(tmp_path / "a", [line("1", 0.5), line("2", 0.49)], benchmark="charades")
    second = folder(tmp_path / "b", [line("1", 0.4), line("2", 0.9)], benchmark="charades")
    found = compare(first, second)
    assert (found["only_first"], found["only_second"], found["difference"]) == (
        1,
        1,
        pytest.approx(0.155),
    )


def test_runs_that_cannot_be_compared(tmp_path):
    one, other = (
        folder(tmp_path / "a", [line("1", 1.0)]),
        folder(tmp_path / "b", [line("1", 1.0)], benchmark="mlvu"),
    )
    with pytest.raises(ValueError, match="is videomme, .* is mlvu; compare runs of one split"):
        compare(one, other)
    with pytest.raises(ValueError, match="have no question in common"):
        compare(one, folder(tmp_path / "c", [line("2", 1.0)]))
    with pytest.raises(FolderError, match="is not there"):
        compare(one, tmp_path / "nowhere")


def test_a_table_stands_beside_the_papers_rows(tmp_path):
    runs = [
        folder(tmp_path / "a", [line(str(i), float(i < 3), f"v{i}") for i in range(6)]),
        folder(
            tmp_path / "b",
            [line("a", 0.4), line("b", 0.2)],
            benchmark="charades",
            prompt="agentic-minimal",
        ),
        folder(tmp_path / "c", [line("a", 1.0)], blind=True),
        folder(tmp_path / "d", [line("a", 1.0, calls=4)], name="other", benchmark="mmvu"),
        folder(tmp_path / "e", [left("a", "gone")], name="none"),
    ]
    rows = table(runs).split("\n")
    titles = "VideoMME w/o | VideoMME w/ sub | LongVideoBench | LVBench | MLVU | MMVU | Charades-STA mIoU"
    assert rows[0] == f"| per cent | {titles} |"
    assert rows[2] == "| ParaVT-8B (paper) | 62.1 | 69.4 | 60.4 | 39.8 | 65.0 | 68.6 | 50.1 |"
    assert rows[3].startswith("| Qwen3-VL-8B (paper) | 59.9 |") and rows[4].startswith(
        "| LongVT-RFT-7B (paper) | 59.5 |"
    )
    cells = [row.split(" | ") for row in rows[5:13]]
    assert (
        cells[0][0] == "| mine"
        and cells[0][1].startswith("50.0 [")
        and cells[0][2] == "-"
        and cells[0][7].startswith("30.0* [")
    )
    assert cells[1][0] == "| mine: calls per question" and cells[1][1] == "1.00"
    assert cells[2][0] == "| mine" and cells[2][1].startswith(
        "100.0* ["
    )  # a split that is there twice opens another row
    assert cells[4][0] == "| other" and cells[5][6] == "4.00" and cells[6][1] == "-"
    notes = "\n".join(rows[13:])
    assert (
        "prompt agentic-minimal, greedy; weights w0, commit c0" in notes
        and "greedy, blind" in notes
    )


def test_a_table_marks_rows_that_were_left_out_and_says_why(tmp_path):
    """A split of ten rows: 2 played, 3 broken, 2 refused, 1 without a file, 2 not asked for."""
    run = tmp_path / "a"
    lost = [left("c", "v", "refused"), left("d", "v", "refused"), left("e", "w")]
    lines = [line("a", 1.0), line("b", 1.0, unread=True), *lost]
    folder(run, lines)
    broken = {f"row {n}": "answer is missing" for n in (5, 6, 7)}
    (run / "summary.json").write_text(json.dumps(summarise(config(), iter(lines), 7, broken)))
    text = table([run])
    assert "| mine | 100.0* [" in text
    assert (
        "- mine, videomme: 2 of 10 questions (\\* left out: 2 refused, 1 missing, 3 broken, 2 not asked), "
        "1 whose answer names no option or span, K = 64"
    ) in text


def test_a_table_names_a_summary_of_an_older_version(tmp_path):
    file = folder(tmp_path / "a", [line("a", 1.0)]) / "summary.json"
    summary = json.loads(file.read_text())
    summary["played"] = summary.pop("n")
    file.write_text(json.dumps(summary))
    with pytest.raises(FolderError, match=r"a/summary\.json: it lacks n, .*older version.*--out"):
        table([tmp_path / "a"])


def test_a_table_without_a_gap_has_no_mark(tmp_path):
    text = table([folder(tmp_path / "a", [line(str(n), 1.0) for n in range(6)])])
    assert "| mine | 100.0 [" in text and "6 of 6 questions, K = 64" in text


def test_mmvus_cell_is_multiple_choice_and_open_ended_stands_below(tmp_path):
    lines = [line("a", 1.0), line("b", 1.0), line("c", 0.0, kind="oe")]
    run = folder(tmp_path / "a", lines, benchmark="mmvu", open_ended="exact")
    text = table([run])
    assert (
        "| 100.0* [" in text and "of which 1 open-ended are not in the score (exact 0.0 [" in text
    )


def test_a_table_says_that_the_papers_rows_were_measured_otherwise(tmp_path):
    assert "other frame sizes, prompts and times" in table(
        [folder(tmp_path / "a", [line("a", 1.0)])]
    )


def test_a_comparison_says_what_each_run_left_out(tmp_path):
    first = folder(tmp_path / "a", [line("1", 1.0), left("2", "v", "refused"), left("3", "v")])
    second = folder(tmp_path / "b", [line("1", 1.0)])
    found = compare(first, second)
    assert found["left_out"] == [{"missing": 1, "refused": 1}, {}]
    assert "  A left out: 1 missing, 1 refused" in comparison_text(first, second, found)
