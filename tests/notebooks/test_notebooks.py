"""The notebooks have the outputs they should have, and run from first to last in their small form.

CI runs the tiny one. `pytest -m long tests/notebooks` runs the other one, too.
"""

from __future__ import annotations

import re

import nbformat
import pytest
from flax import nnx
from nbclient.exceptions import CellExecutionError

from models.model import VisionLanguageModel
from models.qwen3_vl.sizes import SIZES
from models.weights.hf import save
from tests.notebooks.refresh import ROOT, TINY, execute, read

LARGE = ROOT / "notebooks/paravt_2b_lora.ipynb"
MOST_BYTES = 1_500_000


def printed(notebook: nbformat.NotebookNode) -> str:
    """The text of all outputs."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "".join(output.get("text", "") for output in outputs)


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    nbformat.validate(notebook)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_the_tiny_notebook_has_the_outputs_of_one_session():
    cells = code_cells(read(TINY))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    installing, choosing, *working = cells
    assert installing.outputs == choosing.outputs == []
    assert all(cell.outputs for cell in working)
    assert not any(
        output.output_type == "error" or output.get("name") == "stderr"
        for cell in working
        for output in cell.outputs
    )
    text = TINY.read_text(encoding="utf-8")
    assert len(text) < MOST_BYTES
    assert not re.search(r"(?<![\w.])/(home|root|work|tmp|Users|usr|opt)/", text)


def test_the_2b_notebook_has_no_outputs():
    assert not any(cell.outputs or cell.execution_count for cell in code_cells(read(LARGE)))


@pytest.mark.slow
def test_the_tiny_notebook_trains_and_answers(tmp_path, monkeypatch):
    monkeypatch.setenv("PARAVT_SMALL", "1")
    monkeypatch.setenv("PARAVT_RUN", str(tmp_path / "run"))
    notebook = read(TINY)
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
    notebook = read(LARGE)
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
    notebook = read(LARGE)
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
