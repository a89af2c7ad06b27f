"""The figures of `benchmarks.codebase`, on a project of a few files."""

from __future__ import annotations

import pathlib

from benchmarks.codebase import code_lines, figures, lowered, reached, read_modules

SOURCE = '''"""A file,
in two lines."""

# why

TABLE = {
    "# no comment": 1,  # a comment beside code
}


def call():
    """One line."""
    # why again
    return """not
a docstring"""
'''


def test_comments_docstrings_and_blank_lines_do_not_count():
    assert code_lines(SOURCE) == 6


def test_what_a_file_reaches_counts_wherever_it_is_imported(tmp_path: pathlib.Path):
    files = {
        "train/run.py": "def main():\n    import models.one\n",
        "train/__init__.py": "x = 1\n",
        "models/one.py": "from train import two\n",
        "train/two.py": "def f(a, b, c, d, e, f, g): ...\ndef g(self, a, b, c, d, e, f): ...\n",
        "models/alone.py": "x = 1\n" * 50,
        "tests/three.py": "y = 1\n" * 100,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    modules = read_modules(tmp_path)
    assert sorted(reached(modules, "train.run")) == [
        "models.one",
        "train",
        "train.run",
        "train.two",
    ]
    measured = figures(modules, tmp_path)
    assert measured["the command: code lines"] == 2 + 1 + 1 + 2
    assert measured["the command: files"] == 4
    assert measured["source: code lines"] == 56
    assert measured["tests: code lines"] == 100
    assert measured["functions with more than 6 parameters"] == 1


def test_a_bound_never_rises():
    assert lowered({"files": 100}, {"files": 120}) == {"files": 100}
    assert lowered({"files": 200}, {"files": 120}) == {"files": 121}
