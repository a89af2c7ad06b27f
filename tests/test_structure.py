"""Which packages may import which, and a few habits that readers rely on."""

from __future__ import annotations

import ast
import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest

from benchmarks.codebase import Module, find_cycles, name_a_family, read_modules, walk

ROOT = pathlib.Path(__file__).parents[1]
# The top-level packages, called rooms.
ROOMS = ("paravt_jax", "models", "rollout", "train", "configs", "examples")
# Benchmarks may import everything, and only tests import benchmarks.
MAY_IMPORT = {
    "paravt_jax": set(),
    "models": {"paravt_jax"},
    "rollout": {"paravt_jax", "models"},
    "train": {"paravt_jax", "models", "rollout"},
    "configs": {"paravt_jax", "models", "rollout", "train"},
    "examples": {"paravt_jax", "models", "rollout", "train", "configs"},
}
# Bounds on the walk: the code lines and files that the RL learner and the engine reach by imports,
# which is what one reads to understand a training step. See `benchmarks.codebase`. The bound was
# 7,000 while several statements shared a line, and 7,500 in 60 files while an agent's texts were
# part of the protocol's code, and 7,600 while answers were read in fewer forms, and 7,800 before
# there were adapters and fingerprints, and 8,100 in 63 files while the vision tower was frozen, and
# 8,500 before rollouts could outlive an update, files were read beside decoding, and programs were
# compiled ahead, 9,400 before a layer could have experts, 9,550 before the choices of experts were
# compared, and 9,850 in 72 files before the parts of a step had names in traces, and 9,870 in 73
# files before exit codes told what a restart can mend, and 9,910 in 74 before an update ran in
# several replicas.
MOST_LINES = 10_090
MOST_FILES = 75
# The walk must not reach these: they import the main path, never the reverse.
SIDE_PATHS = (
    "paravt_jax.data.preparation",
    "paravt_jax.data.published",
    "paravt_jax.data.sources",
    "paravt_jax.remote",
    "rollout.agent.endpoint",
    "rollout.evaluation",
    "rollout.report",
    "train.check",
    "train.durable.checkpoint",
    "train.phases",
    "train.plan",
    "train.published_data",
    "train.report",
    "train.studies",
)
# Runs in lmms-eval's environment, where lmms_eval can be imported.
ELSEWHERE = "rollout.evaluation.lmms_eval.model"
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
    """Whether a file is a command: only commands may import `configs`, to find recipes by name."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body)


@pytest.mark.parametrize("file", SOURCES, ids=name)
def test_imports_go_one_way(file: pathlib.Path) -> None:
    room = name(file).partition("/")[0]
    command = room in ("rollout", "train") and is_command(file)
    allowed = MAY_IMPORT[room] | {room} | ({"configs"} if command else set())
    assert imports(file) & {*ROOMS, "benchmarks", "tests"} <= allowed, (
        f"{name(file)}: {room} may import {sorted(allowed)}"
    )
    assert not imports(file) & {"torch", "tensorflow"}, (
        f"{name(file)}: neither torch nor TensorFlow is a run-time dependency"
    )


def test_there_is_something_to_check() -> None:
    assert {name(file).partition("/")[0] for file in SOURCES} == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_the_room_of_this_checkout_is_the_one_imported(room: str) -> None:
    """Other installed packages may also be called `models`, `train` or `configs`."""
    found = importlib.util.find_spec(room)
    assert found is not None and found.origin is not None
    assert pathlib.Path(found.origin).parent == ROOT / room


def test_every_module_imports_without_torch_and_tensorflow() -> None:
    modules = [
        name(file).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for file in SOURCES
    ]
    # An entry of None makes `import torch` fail, even if torch is installed: transformers tries it.
    code = f"""
import importlib, sys
sys.modules['torch'] = None
for module in {modules!r}:
    if module != {ELSEWHERE!r}:
        importlib.import_module(module)
sys.exit('tensorflow was imported' if 'tensorflow' in sys.modules else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("file", SOURCES, ids=name)
def test_files_are_readable(file: pathlib.Path) -> None:
    text = file.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert ast.get_docstring(tree) or not tree.body, f"{name(file)} has no docstring"
    assert not re.search(r"\b(TODO|FIXME|XXX)\b", text), f"{name(file)} has an open task"
    assert not re.search(r"utils?|helpers?|misc|common", file.stem), (
        f"{name(file)}: name the module after its content"
    )


@pytest.fixture(scope="module")
def modules() -> dict[str, Module]:
    """Every module of this checkout, by name."""
    return read_modules(ROOT)


def test_the_walk_is_short(modules) -> None:
    reached = walk(modules)
    lines = sum(module.lines for module in reached.values())
    files = sum(module.lines > 0 for module in reached.values())
    print(f"the walk: {lines} code lines in {files} files")
    assert lines <= MOST_LINES, (
        f"the walk has {lines} code lines: move code that a training step does not need elsewhere"
    )
    assert files <= MOST_FILES, f"the walk has {files} files"


def test_only_its_own_package_names_a_family(modules) -> None:
    # Names of published models in tables, hub ids in recipes, and lmms-eval's own module.
    allowed = ("configs.", "rollout.evaluation.paper", "rollout.evaluation.lmms_eval.")
    assert [name for name in name_a_family(modules) if not name.startswith(allowed)] == []


def test_no_modules_import_each_other(modules) -> None:
    assert find_cycles(modules) == []


def test_the_main_path_imports_no_side_path(modules) -> None:
    for side in SIDE_PATHS:
        assert any(name.startswith(side) for name in modules), f"{side} does not exist"
    assert not [name for name in walk(modules) if name.startswith(SIDE_PATHS)]


@pytest.mark.parametrize("package", ["train.plan", "train.studies"])
def test_only_its_own_modules_import(modules, package: str) -> None:
    # The script `paravt` imports a command by its name when it is asked for.
    others = [name for name in modules if not name.startswith(package) and name != "train.command"]
    for name in others:
        imported = [found for found in modules[name].imports if found.startswith(package)]
        assert imported == [], f"{name} imports {imported}"
