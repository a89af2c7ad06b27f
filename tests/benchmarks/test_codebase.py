"""The figures of `benchmarks.codebase`, on a project of two files."""

from __future__ import annotations

import pathlib

from benchmarks.codebase import reading, sort_lines

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


def test_every_line_is_sorted_by_what_it_holds():
    lines = sort_lines(SOURCE)
    assert lines.code == {6, 7, 8, 11, 14, 15}
    assert lines.comments == {4, 13}
    assert lines.docstrings == {1, 2, 12}


def test_reading_counts_sources_without_tests_and_without_indentation(tmp_path: pathlib.Path):
    for folder in ("models", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "models/one.py").write_text("if True:\n    x = 1\n    # why\n")
    (tmp_path / "models/two.py").write_text(f'"""Two."""\nlong = "{"a" * 100}"\n')
    (tmp_path / "tests/three.py").write_text("y = 1\n" * 100)
    figures = reading(tmp_path)
    assert figures["lines, tests left out"] == "5"
    assert figures["characters per code line"] == f"{(8 + 5 + 109) / 3:.1f}"
    assert figures["code lines beyond 100 columns"] == "33.3%"
    assert figures["comment lines per 100 lines of code"] == "33.3"
    assert figures["docstring lines, of lines that are not blank"] == "20.0%"
