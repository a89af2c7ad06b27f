"""Which packages may import which, and a few habits that readers rely on."""

from __future__ import annotations

import ast
import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest

from benchmarks.codebase import (
    Module,
    figures,
    find_cycles,
    name_a_family,
    reached,
    read_bounds,
    read_modules,
)

ROOT = pathlib.Path(__file__).parents[1]
# The top-level packages, called rooms.
ROOMS = ("paravt_jax", "models", "rollout", "train", "configs", "paravt_extras", "examples")
# What helps around the method. It may import the core, and only commands may import it.
EXTRAS = "paravt_extras"
# Benchmarks may import everything, and only tests import benchmarks.
MAY_IMPORT = {
    "paravt_jax": set(),
    "models": {"paravt_jax"},
    "rollout": {"paravt_jax", "models"},
    "train": {"paravt_jax", "models", "rollout"},
    "configs": {"paravt_jax", "models", "rollout", "train"},
    EXTRAS: {"paravt_jax", "models", "rollout", "train", "configs"},
    "examples": {"paravt_jax", "models", "rollout", "train", "configs"},
}
# The RL loop must not reach these: they import the main path, never the reverse.
SIDE_PATHS = (
    "paravt_jax.data.preparation",
    "paravt_jax.data.published",
    "paravt_jax.data.sources",
    "paravt_jax.remote",
    "rollout.evaluation",
    "rollout.report",
    "train.durable.checkpoint",
    EXTRAS,
)
SOURCES = [file for room in ROOMS for file in sorted((ROOT / room).rglob("*.py"))]


def name(file: pathlib.Path) -> str:
    return file.relative_to(ROOT).as_posix()


def imports(file: pathlib.Path) -> set[str]:
    """Top-level packages that a file imports, including imports inside functions."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level > 0:
            found.add(name(file).partition("/")[0])  # a relative import stays in its room
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found


def is_command(file: pathlib.Path) -> bool:
    """Whether a file is a command: only these import extras, and recipes, to find them by name."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body)


def test_imports_go_one_way() -> None:
    wrong = []
    for file in SOURCES:
        room = name(file).partition("/")[0]
        command = room in ("rollout", "train") and is_command(file)
        allowed = MAY_IMPORT[room] | {room} | ({"configs", EXTRAS} if command else set())
        for other in imports(file) & {*ROOMS, "benchmarks", "tests"} - allowed:
            wrong.append(f"{name(file)} imports {other}: {room} may import {sorted(allowed)}")
        for library in imports(file) & {"torch", "tensorflow"}:
            wrong.append(f"{name(file)} imports {library}, which is no run-time dependency")
    assert wrong == []


def test_there_is_something_to_check() -> None:
    assert {name(file).partition("/")[0] for file in SOURCES} == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_the_room_of_this_checkout_is_the_one_imported(room: str) -> None:
    """Other installed packages may also be called `models`, `train` or `configs`."""
    found = importlib.util.find_spec(room)
    assert found is not None and found.origin is not None
    assert pathlib.Path(found.origin).parent == ROOT / room


def test_every_module_imports_without_torch_openai_and_tensorflow() -> None:
    modules = [
        name(file).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for file in SOURCES
    ]
    # An entry of None makes an import fail, even if the package is installed.
    code = f"""
import importlib, sys
sys.modules['torch'] = sys.modules['openai'] = None
for module in {modules!r}:
    importlib.import_module(module)
sys.exit('tensorflow was imported' if 'tensorflow' in sys.modules else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_files_are_readable() -> None:
    wrong = []
    for file in SOURCES:
        text = file.read_text(encoding="utf-8")
        tree = ast.parse(text)
        if tree.body and not ast.get_docstring(tree):
            wrong.append(f"{name(file)} has no docstring")
        if re.search(r"\b(TODO|FIXME|XXX)\b", text):
            wrong.append(f"{name(file)} has an open task")
        if re.search(r"utils?|helpers?|misc|common", file.stem):
            wrong.append(f"{name(file)}: name the module after its content")
    assert wrong == []


@pytest.fixture(scope="module")
def modules() -> dict[str, Module]:
    """Every module of this checkout, by name."""
    return read_modules(ROOT)


def test_there_is_not_more_to_read_than_before(modules) -> None:
    found = figures(modules)
    bounds = read_bounds()
    over = {name: value for name, value in found.items() if value > bounds[name]}
    assert not over, (
        f"{over} are above their bounds in tests/bounds.json: delete first, a bound never rises"
    )
    # A bound that is far above its figure holds nothing.
    loose = {name: value for name, value in found.items() if bounds[name] > 1.03 * value}
    assert not loose, f"{loose} have fallen: run python -m benchmarks.codebase --lower"


def test_only_its_own_package_names_a_family(modules) -> None:
    # Recipes have hub ids.
    assert [name for name in name_a_family(modules) if not name.startswith("configs.")] == []


def test_no_modules_import_each_other(modules) -> None:
    assert find_cycles(modules) == []


def test_the_main_path_imports_no_side_path(modules) -> None:
    for side in SIDE_PATHS:
        assert any(name.startswith(side) for name in modules), f"{side} does not exist"
    assert not [name for name in reached(modules, "train.learn.rl") if name.startswith(SIDE_PATHS)]
