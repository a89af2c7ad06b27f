"""The table below the paper's: its numbers, averages and notes."""

from __future__ import annotations

import pathlib

import pytest

from paravt_extras.markdown import WIDTH
from paravt_extras.published_scores import COLUMNS
from paravt_extras.table_1 import PUBLISHED, table_1
from rollout.evaluate import main
from tests.rollout.evaluation.finished import folder, left_out, line

ROOT = pathlib.Path(__file__).parents[3]


def six(right: int = 3, **fields):
    """Lines of six questions."""
    return [line(str(i), float(i < right), f"v{i}", **fields) for i in range(6)]


def cells_of(table, label):
    """The cells of the first line with this label, by heading."""
    lines = [text for text in table.splitlines() if text.startswith("|")]
    cells = [[cell.strip("· ") for cell in text.split("|")[1:-1]] for text in lines]
    wanted = next(line for line in cells if line[0] == label)
    return dict(zip(cells[0][1:], wanted[1:], strict=True))


def test_the_table_has_the_papers_lines_and_those_of_each_run(tmp_path):
    table = table_1(
        [
            folder(tmp_path / "mine" / "a", six(calls=2)),
            folder(tmp_path / "mine" / "b", [line("a", 0.4), line("b", 0.2)], benchmark="charades"),
            folder(tmp_path / "none" / "a", [left_out("a", "gone")]),
        ]
    )
    paper = ["62.1", "69.4", "60.4", "39.8", "65.0", "68.6", "50.1", "59.3"]
    assert list(cells_of(table, "ParaVT-8B").values()) == paper
    assert cells_of(table, "Qwen2.5-VL-7B")["average"] == "49.1"
    assert cells_of(table, "Video-Thinker-7B")["LVBench"] == "*"
    assert cells_of(table, "Video-Thinker-7B")["average"] == ""
    mine = cells_of(table, "mine")
    assert (mine["VideoMME"], mine["MLVU"], mine["Charades"]) == ("50.0", "", "30.0")
    assert mine["average"] == ""
    counts = cells_of(table, "questions")
    assert (counts["VideoMME"], counts["MLVU"], counts["Charades"]) == ("6", "", "2/6")
    assert cells_of(table, "95 % interval")["VideoMME"] == "18.8-81.2"
    assert cells_of(table, "calls per question")["VideoMME"] == "2.00"
    assert cells_of(table, "none")["VideoMME"] == ""
    assert table.index("GPT-4o") < table.index("paper, agentic") < table.index("this project")


def test_an_average_needs_a_score_of_every_split_and_the_table_fits_a_terminal(tmp_path):
    folders = [folder(tmp_path / "mine" / split, six(), benchmark=split) for split in COLUMNS]
    assert cells_of(table_1(folders[:6]), "mine")["average"] == ""
    table = table_1(folders)
    assert cells_of(table, "mine")["average"] == "50.0"
    lines = table.splitlines()
    widths = {len(text) for text in lines if text.startswith("|")}
    assert len(widths) == 1, "columns are aligned"
    assert max(widths) <= 126
    assert max(len(text) for text in lines if not text.startswith("|")) <= WIDTH


def test_notes_name_differences_weights_and_commits(tmp_path):
    ours = {name: value for name, value in PUBLISHED.items() if name != "dispatch"}
    served = {"weights": None, "endpoint": "served"}
    first = folder(tmp_path / "mine" / "a", six(), **ours)
    second = folder(tmp_path / "mine" / "c", six(), benchmark="lvbench", **served)
    notes = " ".join(table_1([first, second]).split())
    assert "- mine, VideoMME w/o: dispatch parallel instead of frames; weights w0, commit" in notes
    assert "pixels [50176, 50176] instead of [602112, 50176]" in notes
    assert "weights of served" in notes


def test_the_command_prints_the_table(tmp_path, capsys):
    run = folder(tmp_path / "mine" / "a", six())
    assert main(["--table", str(run)]) == 0
    assert cells_of(capsys.readouterr().out, "mine")["VideoMME"] == "50.0"
    assert main(["--table", str(run), str(run)]) == 1
    assert "another evaluation of videomme in a folder mine" in capsys.readouterr().err
    for unfinished in (tmp_path, run / "config.json"):
        assert main(["--table", str(unfinished)]) == 1
        assert "summary.json: no such file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--table", str(run), "--json"])
    assert "--json: belongs to --compare" in capsys.readouterr().err
