"""Measures how much there is to read: `python -m benchmarks.codebase [--lower]`

Prints each figure beside its bound in tests/bounds.json, which a test holds. A bound may fall and
is never raised: delete first. `--lower` lowers bounds that are more than 1 % above their figures.

A code line is not blank, not a comment and not part of a docstring. What a file reaches are the
modules that it imports, directly or not; imports count anywhere in a file, and so do names of
modules in strings.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import io
import json
import pathlib
import re
import tokenize
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from configs.paravt_8b import paravt_8b

ROOT = pathlib.Path(__file__).parents[1]
BOUNDS = ROOT / "tests" / "bounds.json"
CORE = ("paravt_jax", "models", "rollout", "train", "configs")
PACKAGES = (*CORE, "paravt_extras")
# What one reads to follow a run, a training step, and the method on one page.
STARTS = {
    "the command": "train.run",
    "the RL loop": "train.rl",
    "the one page": "examples.grpo_in_one_page",
}
MOST_PARAMETERS = 6
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
    """Read all modules of `PACKAGES` and the examples below `root`, by dotted name."""
    files = {
        _module_name(file.relative_to(root)): file
        for package in (*PACKAGES, "examples")
        for file in sorted((root / package).rglob("*.py"))
    }
    modules = {}
    for name, file in files.items():
        text = file.read_text(encoding="utf-8")
        modules[name] = Module(file, text, code_lines(text), _imports(name, text, files))
    return modules


def code_lines(text: str) -> int:
    """Return the number of code lines of Python source."""
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _LAYOUT_TOKENS:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - set(_docstring_lines(ast.parse(text))))


def reached(modules: Mapping[str, Module], start: str) -> dict[str, Module]:
    """Return `start`, all modules that it reaches by imports, and the packages around these."""
    modules_reached: dict[str, Module] = {}
    pending = [start]
    while pending:
        name = pending.pop()
        if name in modules_reached or name not in modules:
            continue
        modules_reached[name] = modules[name]
        # Importing a module also runs the `__init__` of every package around it.
        pending += _packages(name)
        pending += modules[name].imports
    return modules_reached


def figures(modules: Mapping[str, Module], root: pathlib.Path = ROOT) -> dict[str, int]:
    """Measure the checkout at `root`."""
    measured = {}
    for title, start in STARTS.items():
        files = reached(modules, start).values()
        measured[f"{title}: code lines"] = sum(module.lines for module in files)
        measured[f"{title}: files"] = sum(module.lines > 0 for module in files)
    sources = [module for name, module in modules.items() if not name.startswith("examples")]
    measured["source: code lines"] = sum(module.lines for module in sources)
    for folder in ("tests", "benchmarks"):
        texts = (file.read_text(encoding="utf-8") for file in (root / folder).rglob("*.py"))
        measured[f"{folder}: code lines"] = sum(map(code_lines, texts))
    measured[f"functions with more than {MOST_PARAMETERS} parameters"] = sum(
        _many_parameters(module.text) for module in sources
    )
    measured["settings of paravt_8b"] = _settings(paravt_8b())
    return measured


def _settings(settings: Any) -> int:
    """Return the number of fields of some settings, those of nested settings included."""
    values = [getattr(settings, field.name) for field in dataclasses.fields(settings)]
    return sum(_settings(value) if dataclasses.is_dataclass(value) else 1 for value in values)


def _many_parameters(text: str) -> int:
    """Return the number of functions with more than `MOST_PARAMETERS` parameters."""
    count = 0
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count += sum(arg.arg not in ("self", "cls") for arg in given) > MOST_PARAMETERS
    return count


def find_cycles(modules: Mapping[str, Module]) -> list[list[str]]:
    """Return groups of modules that import each other, directly or through others."""
    reach = {name: _reachable(modules, name) for name in modules}
    groups = {
        tuple(sorted(other for other in reach[name] if name in reach[other]))
        for name in modules
        if name in reach[name]
    }
    return [list(group) for group in sorted(groups)]


def name_a_family(modules: Mapping[str, Module]) -> list[str]:
    """Return modules outside the packages of families whose code names one. Comments may.

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
    """Return the tokens of Python source, one per line, without comments and docstrings."""
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
    """Return the module that `node` imports from, in the module `name`."""
    if not node.level:
        return node.module or ""
    parts = name.split(".")
    if known[name].name == "__init__.py":
        parts.append("__init__")
    return ".".join(parts[: -node.level] + ([node.module] if node.module else []))


def _docstring_lines(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        # Strings below the fields of a dataclass count too.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                yield from range(node.lineno, (node.end_lineno or 0) + 1)


def _reachable(modules: Mapping[str, Module], start: str) -> set[str]:
    """Return what `start` imports, directly or not. It has `start` itself only on a cycle."""
    found: set[str] = set()
    pending = list(modules[start].imports)
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending += modules[name].imports
    return found


def read_bounds() -> dict[str, int]:
    """Return the bound of each figure."""
    return json.loads(BOUNDS.read_text(encoding="utf-8"))


def lowered(bounds: Mapping[str, int], found: Mapping[str, int]) -> dict[str, int]:
    """Return bounds that are at most 1 % above their figures. None is above the one before."""
    return {name: min(int(1.01 * value), bounds.get(name, value)) for name, value in found.items()}


def main() -> None:
    """Print the figures, and lower the bounds if asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.codebase", description=__doc__)
    parser.add_argument("--lower", action="store_true", help="lower the bounds to the figures")
    options = parser.parse_args()
    found = figures(read_modules(ROOT))
    bounds = read_bounds()
    for name, value in found.items():
        print(f"{value:8,}  (at most {bounds.get(name, 0):,})  {name}")
    if options.lower:
        BOUNDS.write_text(json.dumps(lowered(bounds, found), indent=1) + "\n")


if __name__ == "__main__":
    main()
