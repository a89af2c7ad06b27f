"""The table beside the paper's: its numbers, averages, marks and notes."""

from __future__ import annotations

import json
import pathlib
import re

import pytest
import tyro

from configs.table_2 import TABLE_2
from paravt_extras.markdown import WIDTH
from paravt_extras.published_protocol import PUBLISHED, PUBLISHED_CHARADES, differences
from paravt_extras.published_scores import COLUMNS, TABLE_1
from paravt_extras.table_1 import contents, text
from rollout.evaluate import main
from rollout.evaluation.settings import BenchmarkSettings
from rollout.evaluation.summary import summarise
from tests.rollout.evaluation.finished import config, folder, left_out, line

ROOT = pathlib.Path(__file__).parents[3]


def six(right: int = 3, **fields):
    """Lines of six questions."""
    return [line(str(i), float(i < right), f"v{i}", **fields) for i in range(6)]


def printed(*folders):
    return text(contents(folders))


def cells_of(table, label):
    """The cells of the only row with this label, by heading."""
    rows = [row for row in table.splitlines() if row.startswith("|")]
    rows = [[cell.strip("· ") for cell in row.split("|")[1:-1]] for row in rows]
    (found,) = [row for row in rows if row[0] == label]
    return dict(zip(rows[0][1:], found[1:], strict=True))


# --- the paper ---


def test_averages_are_published_for_two_models_and_computed_for_other_complete_rows(tmp_path):
    rows = contents([folder(tmp_path / "a", six())])["paper"]
    averages = {row["model"]: row["average"] for row in rows}
    published = {row["model"]: row["average"] for row in rows if row["average_published"]}
    assert published == {"Qwen3-VL-8B": 55.6, "ParaVT-8B": 59.3}
    assert [name for name, average in averages.items() if average is None] == [
        "GPT-4o",
        "Gemini 1.5 Pro",
        "Video-Thinker-7B",
        "VideoZoomer-7B",
    ]
    assert averages["Qwen2.5-VL-7B"] == pytest.approx(343.6 / 7)


def test_table_2_agrees_with_table_1_on_the_models_that_both_have():
    for key, name in (("base", "Qwen3-VL-8B"), ("paravt", "ParaVT-8B")):
        (model,) = [model for model in TABLE_1 if model.name == name]
        assert all(model.scores[split] == score for split, score in TABLE_2[key].scores.items())
    assert TABLE_2["paravt"].text() == (
        "VideoMME 62.1, with subtitles 69.4, LVBench 39.8, MLVU 65.0; f 0.41, kappa 0.21"
    )
    assert TABLE_2["sequential"].text().endswith("MLVU 64.1")


# --- runs beside it ---


def test_the_table_has_the_papers_rows_and_those_of_each_run(tmp_path):
    table = printed(
        folder(tmp_path / "a", six()),
        folder(tmp_path / "b", [line("a", 0.4), line("b", 0.2)], benchmark="charades"),
        folder(tmp_path / "c", [line("a", 1.0, calls=4)], name="other", benchmark="mmvu"),
        folder(tmp_path / "d", [left_out("a", "gone")], name="none"),
    )
    paper = ["62.1", "69.4", "60.4", "39.8", "65.0", "68.6", "50.1", "59.3 (p)"]
    assert list(cells_of(table, "ParaVT-8B").values()) == paper
    assert cells_of(table, "Qwen2.5-VL-7B")["average"] == "49.1 (c)"
    assert cells_of(table, "Video-Thinker-7B")["LVBench"] == "*"
    assert cells_of(table, "Video-Thinker-7B")["average"] == ""
    mine = cells_of(table, "mine")
    assert mine["VideoMME"] == "50.0"
    assert mine["MLVU"] == ""
    assert mine["Charades"].startswith("30.0 [")
    assert mine["average"] == ""
    assert cells_of(table, "none")["VideoMME"].startswith("- [")
    assert table.index("GPT-4o") < table.index("paper, agentic") < table.index("this project")


def test_under_a_runs_scores_are_the_figures_that_belong_to_them(tmp_path):
    lines = six(unread=True, calls=2)
    lines[5] |= {"read": None, "unread": False}
    table = printed(folder(tmp_path / "a", lines))
    shown = {
        label: cells_of(table, label)["VideoMME"]
        for label in ("questions", "95 % interval", "unread answers", "no answer")
    }
    assert shown.pop("95 % interval") == "18.8-81.2"
    assert shown == {"questions": "6", "unread answers": "5", "no answer": "1"}
    assert cells_of(table, "calls per question")["VideoMME"] == "2.00"
    assert "as read by" not in table


def test_an_average_needs_every_split_to_be_finished(tmp_path):
    folders = [folder(tmp_path / split, six(), benchmark=split) for split in list(COLUMNS)[:6]]
    assert cells_of(printed(*folders), "mine")["average"] == ""
    partly = folder(tmp_path / "partly", six()[:5], benchmark="charades")
    assert cells_of(printed(*folders, partly), "mine")["average"] == ""
    lines = [*six()[:5], left_out("5", "gone")]
    incomplete = folder(tmp_path / "incomplete", lines, benchmark="charades")
    table = printed(*folders, incomplete)
    assert cells_of(table, "mine")["average"] == "51.4 (c) [2]"
    assert "[2] mine: average with incomplete Charades" in table


def test_scores_without_some_rows_carry_a_mark_with_the_reason(tmp_path):
    """A split of ten rows: 2 played, 3 broken, 2 refused, 1 without a file, 2 not asked."""
    lost = [left_out("c", "v", "refused"), left_out("d", "v", "refused"), left_out("e", "w")]
    lines = [line("a", 1.0), line("b", 1.0, refused_reports=2), *lost]
    run = folder(tmp_path / "a", lines)
    broken = {f"row {n}": "answer is missing" for n in (5, 6, 7)}
    (run / "summary.json").write_text(json.dumps(summarise(config(), iter(lines), 7, broken)))
    table = printed(run)
    assert cells_of(table, "mine")["VideoMME"] == "100.0 [1]"
    assert (
        "- [1] mine, VideoMME w/o: 2 of 10 questions, left out: 2 refused, 1 missing, 3 broken, "
        "2 not asked; 2 requests of sub-agents were refused"
    ) in " ".join(table.split())


def test_mmvus_score_is_multiple_choice_and_open_answers_have_lines_of_their_own(tmp_path):
    lines = [line("a", 1.0), line("b", 1.0), line("c", 0.0, kind="oe"), line("d", 0.4, kind="tvg")]
    table = printed(folder(tmp_path / "a", lines, benchmark="mmvu", open_ended="exact"))
    assert cells_of(table, "mine")["MMVU"].startswith("100.0 [")
    assert cells_of(table, "questions")["MMVU"] == "2"
    assert cells_of(table, "open-ended exact, 1")["MMVU"] == "0.0"
    assert cells_of(table, "grounding mIoU, 1")["MMVU"] == "40.0"


def test_notes_name_wording_differences_weights_and_commits_once_for_equal_splits(tmp_path):
    ours = {name: value for name, value in PUBLISHED.items() if name != "dispatch"}
    theirs = {"wording": "f" * 32, "weights": None, "endpoint_model": "served"}
    runs = [
        folder(tmp_path / "a", six(), **ours),
        folder(tmp_path / "b", six(), benchmark="mlvu", **ours),
        folder(tmp_path / "c", six(), benchmark="lvbench", **theirs),
    ]
    notes = " ".join(printed(*runs).split())
    assert (
        "- mine (VideoMME, MLVU): wording 0123456789ab (agentic); dispatch parallel instead of "
        "frames; weights w0, commit c0"
    ) in notes
    assert "- mine (LVBench): wording ffffffffffff (agentic); dispatch parallel" in notes
    assert "frames.max_pixels 50176 instead of 602112" in notes
    assert "weights unknown (served)" in notes


def test_nothing_differs_under_the_published_settings():
    published = {"benchmark": "videomme", **PUBLISHED}
    assert differences(published) == []
    charades = {"benchmark": "charades", **PUBLISHED, **PUBLISHED_CHARADES}
    assert differences(charades) == []
    assert differences(published | {"frames.crop_max_pixels": 0}) == [
        "frames.crop_max_pixels 602112 instead of 50176",
    ]


@pytest.mark.parametrize("benchmark", ["mlvu", "charades"])
def test_the_flags_of_the_docs_play_by_the_published_protocol(benchmark):
    text = (ROOT / "docs/evaluation.md").read_text(encoding="utf-8")
    (block,) = [
        block for block in re.findall(r"```bash\n(.*?)```", text, re.S) if "602112" in block
    ]
    commands = block.replace("\\\n", " ").split("python -m rollout.evaluate")
    (command,) = [command for command in commands if f"--benchmark {benchmark} " in command]
    settings = tyro.cli(BenchmarkSettings, args=command.split())
    assert differences(json.loads(json.dumps(settings.identity()))) == []


def test_the_table_fits_a_terminal(tmp_path):
    folders = [folder(tmp_path / split, six(), benchmark=split) for split in COLUMNS]
    lines = printed(*folders).splitlines()
    rows = [row for row in lines if row.startswith("|")]
    assert len({len(row) for row in rows}) == 1, "columns are aligned"
    assert len(rows[0]) <= 126
    assert max(len(row) for row in lines if not row.startswith("|")) <= WIDTH


def test_the_command_prints_the_table_as_text_and_as_json(tmp_path, capsys):
    run = folder(tmp_path / "a", six())
    assert main(["--table", str(run)]) == 0
    assert cells_of(capsys.readouterr().out, "mine")["VideoMME"] == "50.0"
    assert main(["--table", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["columns"] == list(COLUMNS)
    assert found["paper"][-1]["average"] == 59.3 and found["paper"][-1]["average_published"]
    (mine,) = found["runs"]
    assert mine["scores"]["videomme"]["score"] == 50.0
    assert mine["average"] is None
    assert main(["--table", str(tmp_path)]) == 2
    assert "no finished evaluation" in capsys.readouterr().err
