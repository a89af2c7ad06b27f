"""The notebooks are clean, and run from the first cell to the last in their small form."""

from __future__ import annotations

import pathlib
import re

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = pathlib.Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def read(path: pathlib.Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def printed(notebook: nbformat.NotebookNode) -> str:
    """The text of all outputs."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "".join(output.get("text", "") for output in outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_valid_and_has_no_outputs(path):
    notebook = read(path)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    assert all(not cell.outputs and cell.execution_count is None for cell in code)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_badge_opens_this_notebook(path):
    text = read(path).cells[0].source
    assert re.findall(r"blob/main/(notebooks/\w+\.ipynb)\)", text) == [f"notebooks/{path.name}"]


@pytest.mark.slow
def test_the_tiny_notebook_trains_and_answers(tmp_path, monkeypatch):
    monkeypatch.setenv("PARAVT_SMALL", "1")
    monkeypatch.setenv("PARAVT_RUN", str(tmp_path / "run"))
    notebook = read(ROOT / "notebooks/paravt_tiny.ipynb")
    # Cells run in the checkout, as they would after cloning it.
    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(ROOT)}}).execute()
    text = printed(notebook)
    assert re.search(r"after +K = +4 +accuracy \d\.\d\d", text)
    assert "answer: " in text
    assert (tmp_path / "run/report.html").is_file()
