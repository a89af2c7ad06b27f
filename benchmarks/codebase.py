"""Measures the size and readability of the code: `python -m benchmarks.codebase [--against COMMIT]`

Prints a table of figures for this checkout, and for another commit beside it if one is given.

A code line is not blank, not a comment and not part of a docstring. "The walk" is the set of files
that the RL learner and the sampling engine reach by imports. It is what one reads to understand a
training step. Imports count anywhere in a file, and so do names of modules in strings.

Code lines are counted after formatting at 100 columns, so that two layouts can be compared. The
figures on readability come from the committed files, without tests. Characters per line do not
include indentation.
"""

from __future__ import annotations

import argparse
import ast
import io
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterator, Mapping
from typing import NamedTuple

PACKAGES = ("paravt_jax", "models", "rollout", "train", "configs")
# The walk starts at the RL learner and the engine that it samples from. The second name of each is
# that in older commits.
STARTS = (("train.learn.rl", "train.rl"), ("rollout.engine.engine", "rollout.engine"))
COLUMNS = 100
FAMILY = re.compile(r"qwen\d", re.IGNORECASE)

_LAYOUT_TOKENS = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


class Module(NamedTuple):
    """A source file: its text, number of code lines, and the project modules that it imports."""

    file: pathlib.Path
    text: str
    lines: int
    imports: frozenset[str]


def read_modules(root: pathlib.Path) -> dict[str, Module]:
    """Read all modules of `PACKAGES` below `root`, by dotted name."""
    files = {
        _module_name(file.relative_to(root)): file
        for package in PACKAGES
        for file in sorted((root / package).rglob("*.py"))
    }
    modules = {}
    for name, file in files.items():
        text = file.read_text(encoding="utf-8")
        modules[name] = Module(file, text, code_lines(text), _imports(name, text, files))
    return modules


class LineNumbers(NamedTuple):
    """The line numbers of a file's code, comments and docstrings, counted from 1."""

    code: set[int]
    comments: set[int]
    docstrings: set[int]


def sort_lines(text: str) -> LineNumbers:
    """Classify the lines of Python source. A line with code and a comment counts as code."""
    code: set[int] = set()
    comments: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        if token.type not in _LAYOUT_TOKENS:
            code.update(range(token.start[0], token.end[0] + 1))
    docstrings = set(_docstring_lines(ast.parse(text)))
    return LineNumbers(code - docstrings, comments - code, docstrings)


def code_lines(text: str) -> int:
    """Number of code lines of Python source."""
    return len(sort_lines(text).code)


def reading(root: pathlib.Path) -> dict[str, str]:
    """Figures on the readability of the sources below `root`, without tests."""
    lines = filled = comments = docstrings = 0
    lengths: list[int] = []
    widths: list[int] = []
    for package in (*PACKAGES, "benchmarks", "examples"):
        for file in sorted((root / package).rglob("*.py")):
            text = file.read_text(encoding="utf-8")
            numbers = sort_lines(text)
            file_lines = text.splitlines()
            lines += len(file_lines)
            filled += sum(bool(line.strip()) for line in file_lines)
            comments += len(numbers.comments)
            docstrings += len(numbers.docstrings)
            code = [file_lines[number - 1] for number in numbers.code]
            widths += [len(line) for line in code]
            lengths += [len(line.strip()) for line in code]
    wide = sum(width > COLUMNS for width in widths)
    return {
        "lines, tests left out": f"{lines:,}",
        "characters per code line": f"{sum(lengths) / len(lengths):.1f}",
        f"code lines beyond {COLUMNS} columns": f"{wide / len(widths):.1%}",
        "comment lines per 100 lines of code": f"{100 * comments / len(widths):.1f}",
        "docstring lines, of lines that are not blank": f"{docstrings / filled:.1%}",
    }


def walk(modules: Mapping[str, Module]) -> dict[str, Module]:
    """`STARTS`, all modules that they reach by imports, and the packages that contain these."""
    reached: dict[str, Module] = {}
    pending = [next(name for name in names if name in modules) for names in STARTS]
    while pending:
        name = pending.pop()
        if name in reached:
            continue
        reached[name] = modules[name]
        # Importing a module also runs the `__init__` of every package around it.
        pending += [package for package in _packages(name) if package in modules]
        pending += modules[name].imports
    return reached


def find_cycles(modules: Mapping[str, Module]) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others."""
    reach = {name: _reachable(modules, name) for name in modules}
    groups = {
        tuple(sorted(other for other in reach[name] if name in reach[other]))
        for name in modules
        if name in reach[name]
    }
    return [list(group) for group in sorted(groups)]


def name_a_family(modules: Mapping[str, Module]) -> list[str]:
    """Modules outside the packages of families whose code names one. Comments and docstrings may.

    `models.family` lists the families.
    """
    return [
        name
        for name, module in modules.items()
        if not FAMILY.match(name.removeprefix("models."))
        and name != "models.family"
        and FAMILY.search(_code_text(module.text))
    ]


def _code_text(text: str) -> str:
    """The tokens of Python source, one per line, without comments and docstrings."""
    docstrings = set(_docstring_lines(ast.parse(text)))
    return "\n".join(
        token.string
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type != tokenize.COMMENT and token.start[0] not in docstrings
    )


def _module_name(file: pathlib.Path) -> str:
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _packages(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _imports(name: str, text: str, known: Mapping[str, pathlib.Path]) -> frozenset[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(node, name, known)
            for alias in node.names:
                submodule = f"{module}.{alias.name}"
                found.add(submodule if submodule in known else module)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
            found.add(node.value)
    return frozenset(found & known.keys()) - {name}


def _absolute(node: ast.ImportFrom, name: str, known: Mapping[str, pathlib.Path]) -> str:
    """The module that `node` imports from, in the module `name`."""
    if not node.level:
        return node.module or ""
    parts = name.split(".")
    if known[name].name == "__init__.py":
        parts.append("__init__")
    return ".".join(parts[: -node.level] + ([node.module] if node.module else []))


def _docstring_lines(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for statement in node.body:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                # Strings below the fields of a dataclass count too.
                if isinstance(statement.value.value, str):
                    yield from range(statement.lineno, (statement.end_lineno or 0) + 1)


def _reachable(modules: Mapping[str, Module], start: str) -> set[str]:
    """Modules that `start` imports, directly or indirectly. Contains `start` only if on a cycle."""
    reached: set[str] = set()
    pending = list(modules[start].imports)
    while pending:
        name = pending.pop()
        if name not in reached:
            reached.add(name)
            pending += modules[name].imports
    return reached


def _formatted_copy(root: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Copy the sources and tests of `root` to `folder`, and format them at `COLUMNS` columns."""
    for name in (*PACKAGES, "tests", "benchmarks", "examples"):
        if (root / name).exists():
            shutil.copytree(
                root / name, folder / name, ignore=shutil.ignore_patterns("__pycache__")
            )
    command = [
        sys.executable,
        "-m",
        "ruff",
        "format",
        "--quiet",
        "--isolated",
        f"--line-length={COLUMNS}",
        str(folder),
    ]
    subprocess.run(command, check=True)
    return folder


def measure(root: pathlib.Path) -> dict[str, str]:
    """Measure the checkout at `root`. Returns its figures by name."""
    with tempfile.TemporaryDirectory() as folder:
        copy = _formatted_copy(root, pathlib.Path(folder))
        modules = read_modules(copy)
        reached = walk(modules)
        tests = [code_lines(file.read_text("utf-8")) for file in (copy / "tests").rglob("*.py")]
        longest = max(module.lines for module in modules.values())
    counts = {
        "the walk: code lines": sum(module.lines for module in reached.values()),
        "the walk: files with code": sum(module.lines > 0 for module in reached.values()),
        "sources: code lines": sum(module.lines for module in modules.values()),
        "sources: files": len(modules),
        "sources: code lines of the longest file": longest,
        "tests: code lines": sum(tests),
        "tests: files": len(tests),
        "import cycles": len(find_cycles(modules)),
        "files outside its package whose code names a model family": len(name_a_family(modules)),
    }
    return {name: f"{count:,}" for name, count in counts.items()} | reading(root)


def measure_commit(root: pathlib.Path, commit: str) -> dict[str, str]:
    """`measure` of another commit of the repository at `root`."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "-C", str(root), "archive", commit], check=True, capture_output=True
        )
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        return measure(pathlib.Path(folder))


def main() -> None:
    """Print the table in Markdown. With `--walk`, print the files of the walk first."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.codebase", description=__doc__)
    parser.add_argument("--against", metavar="COMMIT", help="commit to compare with")
    parser.add_argument("--walk", action="store_true", help="print the walk file by file")
    options = parser.parse_args()
    root = pathlib.Path(__file__).parents[1]
    if options.walk:
        modules = read_modules(root)
        for name, module in sorted(walk(modules).items()):
            print(f"{module.lines:6d}  {name}")
    columns = {"this checkout": measure(root)}
    if options.against:
        columns = {options.against: measure_commit(root, options.against), **columns}
    print(f"| | {' | '.join(columns)} |")
    print("|---" * (len(columns) + 1) + "|")
    for name in columns["this checkout"]:
        print(f"| {name} | {' | '.join(column[name] for column in columns.values())} |")


if __name__ == "__main__":
    main()
