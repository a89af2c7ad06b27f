"""The notebooks are clean, and run from the first cell to the last in their small form.

CI runs the tiny one. `pytest -m long tests/notebooks` runs the other one, too.
"""

from __future__ import annotations

import pathlib
import re

import nbformat
import pytest
from flax import nnx
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from models.model import VisionLanguageModel
from models.qwen3_vl.sizes import SIZES
from models.weights.hf import save

ROOT = pathlib.Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def read(path: pathlib.Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def execute(notebook: nbformat.NotebookNode) -> None:
    """Runs all cells in the checkout, as they would after cloning it."""
    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(ROOT)}}).execute()


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


@pytest.mark.slow
def test_the_tiny_notebook_trains_and_answers(tmp_path, monkeypatch):
    monkeypatch.setenv("PARAVT_SMALL", "1")
    monkeypatch.setenv("PARAVT_RUN", str(tmp_path / "run"))
    notebook = read(ROOT / "notebooks/paravt_tiny.ipynb")
    execute(notebook)
    text = printed(notebook)
    assert re.search(r"after +K = +4 +accuracy \d\.\d\d", text)
    assert "answer: " in text
    assert (tmp_path / "run/report.html").is_file()


@pytest.mark.long
def test_the_2b_notebook_trains_adapters_and_compares_them(tmp_path, monkeypatch, assets):
    # The published format, with random weights of small sizes.
    names = ("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json")
    model = nnx.jit(lambda: VisionLanguageModel(SIZES["rehearsal"], rngs=nnx.Rngs(0)))()
    save(model, tmp_path / "weights", files=[assets / "qwen3_vl" / name for name in names])
    monkeypatch.setenv("PARAVT_SMALL", "1")
    monkeypatch.setenv("PARAVT_MODEL", str(tmp_path / "weights"))
    monkeypatch.setenv("PARAVT_RUN", str(tmp_path))
    notebook = read(ROOT / "notebooks/paravt_2b_lora.ipynb")
    execute(notebook)
    text = printed(notebook)
    for phase in ("before", "after"):
        assert re.search(rf"{phase} +K = +4 +accuracy \d\.\d\d  crops per question \d", text)
    assert re.search(r"\[[-+]\d+\.\d, \+\d+\.\d\] on \d questions", text)
    pages = [
        output["data"]["text/html"]
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if "text/html" in output.get("data", {})
    ]
    assert any("paravt_2b_lora" in page and "svg" in page for page in pages)
    run = tmp_path / "paravt_2b_lora"
    assert (run / "adapter/adapter_model.safetensors").is_file()
    assert (run / "model/model.safetensors").is_file()


@pytest.mark.slow
def test_without_a_chip_the_2b_notebook_ends_before_any_download(tmp_path, monkeypatch):
    monkeypatch.delenv("PARAVT_SMALL", raising=False)
    monkeypatch.setenv("PARAVT_RUN", str(tmp_path))
    notebook = read(ROOT / "notebooks/paravt_2b_lora.ipynb")
    with pytest.raises(CellExecutionError, match="take another recipe, or another runtime"):
        execute(notebook)
    (error,) = [
        output
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if output.output_type == "error"
    ]
    assert not any("Traceback" in line for line in error.traceback)
    assert "paravt_2b_lora needs a GPU or a TPU" in printed(notebook)
    assert not list(tmp_path.iterdir())
