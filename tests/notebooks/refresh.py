"""Executes paravt_tiny.ipynb and keeps its outputs: `python -m tests.notebooks.refresh`."""

from __future__ import annotations

import pathlib
import re

import nbformat
from nbclient import NotebookClient

ROOT = pathlib.Path(__file__).parents[2]
TINY = ROOT / "notebooks/paravt_tiny.ipynb"
RUN = ROOT / "runs/notebook"


def read(path: pathlib.Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def execute(notebook: nbformat.NotebookNode) -> None:
    """Run all cells in the checkout, as they would after cloning it."""
    where = {"metadata": {"path": str(ROOT)}}
    NotebookClient(
        notebook, timeout=None, coalesce_streams=True, record_timing=False, resources=where
    ).execute()


def tidy(text: str) -> str:
    """Return the text of a terminal without paths of this machine, and with fewer steps.

    Training prints about a thousand lines. One stays for each tenth of a phase.
    """
    kept: dict[tuple[str, int] | int, str] = {}
    for number, line in enumerate(text.replace(f"{ROOT}/", "").splitlines()):
        step = re.match(r"(.+) (\d+)/(\d+) · ", line)
        key = (step[1], 10 * int(step[2]) // int(step[3])) if step else number
        kept.setdefault(key, line)
    return "".join(f"{line}\n" for line in kept.values())


def main() -> None:
    if RUN.exists():
        raise SystemExit(f"{RUN}: its training would not be shown; delete the folder first")
    notebook = read(TINY)
    execute(notebook)
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if "text" in output:
                output.text = tidy(output.text)
    nbformat.write(notebook, TINY)


if __name__ == "__main__":
    main()
