"""Every remedy that an error names works when it is typed."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import json
import pathlib
import re
import shutil
import sys
import tomllib
import types
from typing import Any

import pytest

import paravt_extras.check
import train.command
from train.durable.run_folder import claim_folder

ROOT = pathlib.Path(__file__).parents[2]
ROOMS = ("paravt_jax", "models", "rollout", "train", "configs", "paravt_extras")
FLAG = r"(?<![\w-])--[a-z][\w.-]*\w"
# Whose commands have the flags that a room's texts name, if not any.
USERS = {"rollout": ("rollout",), "train": ("train",), "configs": ("configs", "train")}
# Of git, and of a run that evaluates; part of a drawing; of another command, which is named.
OTHERS = {"rollout": {"--abbrev", "--always", "--dirty", "--exclude", "--data.media"}}
OTHERS |= {"train": {"--encode"}, "configs": {"--out"}}


def start(*words: str) -> tuple[Any, str]:
    """Run a command as a module; return its code, and what it prints on one line."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", list(words))
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            try:
                code = importlib.import_module(words[0]).main()
            except SystemExit as stop:
                code = stop.code
    return code, " ".join(printed.getvalue().replace("│", " ").split())


def strings(room: str) -> str:
    files = (ROOT / room).rglob("*.py")
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text())))
    return "\n".join(
        x.value for x in nodes if isinstance(x, ast.Constant) and isinstance(x.value, str)
    )


def test_flags_commands_and_extras_that_the_source_names_exist():
    texts = {room: strings(room) for room in ROOMS}
    text = "\n".join(texts.values())
    flags = {room: {*OTHERS.get(room, ())} for room in ROOMS}
    for module in {*re.findall(r"python -m (\w[\w.]*\w)", text)}:
        spec = importlib.util.find_spec(module)
        assert spec is not None, module
        name = module if spec.submodule_search_locations is None else f"{module}.__main__"
        if hasattr(importlib.import_module(name), "main"):
            for recipe in ([], ["--config=paravt_tiny"], ["--config=paravt_8b_lora"]):
                shown = start(name, *recipe, "--help")[1]
                flags[name.partition(".")[0]] |= {*re.findall(FLAG, shown)}
    for room in ROOMS:
        known = set().union(*(flags[user] for user in USERS.get(room, ROOMS)))
        assert {*re.findall(FLAG, texts[room])} <= known, room
    assert {*re.findall(r"\bparavt ([a-z]+)", text)} <= train.command._COMMANDS.keys()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {*re.findall(r"pip install -e '\.\[(\w+)\]'", text)}
    assert extras and extras <= project["optional-dependencies"].keys()


# --- what is missing or damaged ---

TINY = {"--config": "paravt_tiny", "--run-dir": "run"}
OWN = TINY | {"--config": "paravt_8b", "--model.size": "tiny", "--model.path": "model"}
OWN |= {"--sft.steps": "0", "--evaluation.questions": "0", "--data.questions": "mine.jsonl"}
OWN |= {"--data.media": "both"}
# Alternatives, each of one or more flags. Capitals stand for a value of one's own.
TYPED = re.compile(rf"(?:{FLAG}(?: [\dA-Z]+\b)? ?)+")


def cut_off(home: pathlib.Path) -> None:
    weights = min((home / "damaged").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1])


def other_run(home: pathlib.Path) -> None:
    with claim_folder(home / "run", {"seed": 3}):
        (home / "run" / "metrics.jsonl").touch()


def damaged_run(home: pathlib.Path) -> None:
    other_run(home)
    (home / "run" / "config.json").write_text("[]")


# What is started, what is damaged before, and what stands for values that the remedies leave open.
CASES = {
    "no recipe": ({}, None, {"--config": "paravt_tiny"}),
    "unknown recipe": ({"--config": "paravt_tinny"}, None, {"--config": "paravt_tiny"}),
    "no weights": (OWN | {"--model.path": "nowhere"}, None, {"--model.path": "model"}),
    "hub offline": (OWN | {"--model.path": "owner/none"}, None, {"--model.path": "model"}),
    "cut off": (OWN | {"--model.path": "damaged"}, cut_off, {"--model.path": "model"}),
    "no tokenizer": (
        OWN | {"--model.path": "damaged"},
        lambda home: (home / "damaged" / "tokenizer.json").unlink(),
        {"--model.path": "model"},
    ),
    "no videos": (OWN | {"--data.media": "model"}, None, {"--data.media": "both"}),
    "half of the videos": (OWN | {"--data.media": "half"}, None, {"--data.media": "both"}),
    "demonstrations": (OWN | {"--sft.steps": "1"}, None, {"--model.path": "model"}),
    "all held out": (OWN | {"--evaluation.questions": "9"}, None, {}),
    "mesh": (TINY | {"--mesh.fsdp": "3"}, None, {}),
    "open mesh": (TINY | {"--mesh.fsdp": "0", "--mesh.tensor": "3"}, None, {}),
    "another run": (TINY, other_run, {"--run-dir": "new"}),
    "damaged run": (TINY, damaged_run, {"--run-dir": "new"}),
    "no run": (TINY | {"--run-dir": "model"}, None, {"--run-dir": "new"}),
    "below a file": (TINY | {"--run-dir": "mine.jsonl/run"}, None, {"--run-dir": "new"}),
    "full disk": (TINY | {"--run-dir": "full/run"}, None, {"--run-dir": "new"}),
}


@pytest.fixture
def home(tiny_model, tmp_path, monkeypatch) -> pathlib.Path:
    """A working directory with weights, questions, videos and a full disk."""
    (tmp_path / "model").symlink_to(tiny_model)
    shutil.copytree(tiny_model, tmp_path / "damaged")
    for path in ("both/a.mp4", "both/b.mp4", "half/a.mp4", "full/b.mp4"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).touch()
    asked = {"question": "Which?", "options": ["x", "y"], "answer": "A"}
    lines = [json.dumps({"video": name, **asked}) + "\n" for name in ("a.mp4", "b.mp4")]
    (tmp_path / "mine.jsonl").write_text("".join(lines))

    def usage(path: pathlib.Path) -> types.SimpleNamespace:
        return types.SimpleNamespace(free=10**6 if path.name == "full" else 10**12)

    monkeypatch.setattr(paravt_extras.check.shutil, "disk_usage", usage)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("case", CASES)
def test_a_remedy_that_a_start_prints_is_enough(case, home):
    settings, damage, values = CASES[case]
    if damage is not None:
        damage(home)
    files = sorted(home.rglob("*"))
    code, printed = start("train.run", *(f"{flag}={value}" for flag, value in settings.items()))
    message = printed.partition("error: ")[2]
    assert code and message and sorted(home.rglob("*")) == files
    # Where the rest names no flag, it is about the value of the one that the message begins with.
    remedies = TYPED.findall(message.partition("; ")[2]) or TYPED.findall(message)
    assert remedies, message
    for remedy in remedies:
        typed = re.findall(rf"({FLAG})(?: ([\dA-Z]+)\b)?", remedy)
        changed = {flag: value if value.isdigit() else values[flag] for flag, value in typed}
        words = [f"{flag}={value}" for flag, value in (settings | changed).items()]
        assert start("train.run", *words, "--check")[0] == 0, (message, remedy)
