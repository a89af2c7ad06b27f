"""`paravt`: what it lists, and how it passes its arguments on."""

from __future__ import annotations

import importlib
import os
import pathlib
import shutil
import subprocess
import sys
import textwrap
import tomllib

import pytest

import train.command
from paravt_jax.data.stored import write_checked_json

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def start(monkeypatch, tmp_path):
    """start(*words) runs the script in an empty folder; returns its exit code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["/usr/bin/paravt", *words])
        return train.command.main()

    return run


# As pip's editable install: Python asks for its packages after all folders of sys.path.
EDITABLE = f"""
import sys
from importlib.machinery import PathFinder
class Editable:
    def find_spec(name, path=None, target=None):
        return PathFinder.find_spec(name, [{str(ROOT)!r}])
sys.path.remove("")
sys.meta_path.insert(sys.meta_path.index(PathFinder) + 1, Editable)
"""


def program(code: str, folder: pathlib.Path) -> subprocess.CompletedProcess[str]:
    """Runs code in a process of its own, in another folder than the checkout."""
    command = [sys.executable, "-c", EDITABLE + textwrap.dedent(code)]
    environment = os.environ | {"PYTHONPATH": "", "LC_ALL": "C"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",), ("help",)])
def test_every_command_is_listed_with_its_equivalent(start, capsys, words):
    assert start(*words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "usage: paravt COMMAND [ARGUMENT ...]"
    for word, (command, _) in train.command._COMMANDS.items():
        assert any(line.split()[0] == word and line.endswith(f" {command}") for line in lines)
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize(
    ("word", "module", "flags"),
    [("check", "train.run", ["--check"]), ("report", "paravt_extras.report.__main__", [])],
)
def test_arguments_and_exit_codes_are_passed_on(start, monkeypatch, tmp_path, word, module, flags):
    calls = []

    def main() -> int:
        # A tool of your own is found in the working directory, but hides nothing of ours.
        assert sys.path.index(str(tmp_path)) == len(sys.path) - 1
        calls.append(sys.argv)
        return 7

    monkeypatch.setattr(importlib.import_module(module), "main", main)
    assert start(word, "--config=sft_tiny", "-x", "two words") == 7
    assert calls == [[f"paravt {word}", *flags, "--config=sft_tiny", "-x", "two words"]]


def test_the_list_needs_neither_jax_nor_flax(tmp_path):
    done = program(
        """
        from train.command import main
        code = main()
        heavy = {"jax", "flax", "numpy", "tyro"} & set(sys.modules)
        sys.exit(f"imported: {heavy}" if heavy else code)
        """,
        tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: paravt COMMAND")


@pytest.mark.slow
def test_commands_and_workers_use_nothing_of_the_users_folder(small_world, tmp_path):
    folder = tmp_path / "mes vid\xe9os de l'e\u0301te\u0301"
    for name in ("configs", "models", "paravt_extras", "paravt_jax", "rollout", "tests", "train"):
        (folder / name).mkdir(parents=True)
    for name in ("av", "jax", "json", "types"):
        (folder / f"{name}.py").write_text("raise RuntimeError('of the user')")
    shutil.copy(small_world.folder / small_world.videos[0].path, folder / "caf\xe9.mp4")
    done = program(
        """
        from train.command import _COMMANDS, main
        for words in [*([word, "--help"] for word in _COMMANDS), ["check", "--config=paravt_tiny"]]:
            sys.argv = ["paravt", *words]
            try:
                code = main()
            except SystemExit as stop:
                code = stop.code
            assert not code, words
        from paravt_jax.data import video
        from paravt_jax.data.workers import Workers
        with Workers(video.probe, 1, deadline=60) as workers:
            assert workers.call("caf\xe9.mp4").frames
        """,
        folder,
    )
    assert done.returncode == 0, done.stderr


def test_the_package_installs_the_script():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["paravt"].partition(":")
    assert getattr(importlib.import_module(module), function) is train.command.main


def test_the_page_of_a_run_is_written(start, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    write_checked_json(tmp_path / "mine/config.json", {"name": "mine"})
    assert start("report", "mine") == 0
    page = tmp_path / "mine/report.html"
    assert "mine" in page.read_text()
    assert "mine/report.html" in capsys.readouterr().out
