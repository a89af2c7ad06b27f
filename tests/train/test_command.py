"""`paravt`: what it lists, and how it passes its arguments on."""

from __future__ import annotations

import importlib
import pathlib
import subprocess
import sys
import textwrap
import tomllib

import pytest

import train.command
from paravt_jax.data.stored import write_checked_json

ROOT = pathlib.Path(__file__).parents[2]
EQUIVALENTS = {
    "run": ("train.run", []),
    "check": ("train.run", ["--check"]),
    "plan": ("paravt_extras.plan", []),
    "prepare": ("train.prepare", []),
    "scenes": ("paravt_extras.scenes.__main__", []),
    "download": ("paravt_extras.download", []),
    "ask": ("rollout.ask", []),
    "evaluate": ("rollout.evaluate", []),
    "report": ("paravt_extras.report.__main__", []),
    "export": ("train.export", []),
}


@pytest.fixture
def start(monkeypatch, tmp_path):
    """start(*words) runs the script in an empty folder; returns its exit code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["/usr/bin/paravt", *words])
        return train.command.main()

    return run


def program(code: str, folder: pathlib.Path) -> subprocess.CompletedProcess[str]:
    """Runs code in a process of its own, in another folder than the checkout."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{textwrap.dedent(code)}"
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",), ("help",)])
def test_every_command_is_listed_with_its_equivalent(start, capsys, words):
    assert start(*words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "usage: paravt COMMAND [ARGUMENT ...]"
    for word, (module, flags) in EQUIVALENTS.items():
        equivalent = " ".join(["python -m", module.removesuffix(".__main__"), *flags])
        assert any(line.split()[0] == word and line.endswith(equivalent) for line in lines)
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("word", EQUIVALENTS)
def test_arguments_and_exit_codes_are_passed_on(start, monkeypatch, tmp_path, word):
    module, flags = EQUIVALENTS[word]
    calls = []

    def main() -> int:
        # A tool of your own is found in the working directory, but hides nothing of ours.
        assert sys.path.index(str(tmp_path)) == len(sys.path) - 1
        calls.append(sys.argv)
        return 7

    monkeypatch.setattr(importlib.import_module(module), "main", main)
    assert start(word, "--config=sft_tiny", "-x", "two words") == 7
    assert calls == [[f"paravt {word}", *flags, "--config=sft_tiny", "-x", "two words"]]


def test_an_unknown_word_is_answered_with_the_commands(start, capsys):
    assert start("runn") == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "runn: no such command; give one of run, check" in message


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


def test_the_package_installs_the_script():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["paravt"].partition(":")
    assert getattr(importlib.import_module(module), function) is train.command.main


def test_the_pages_of_a_run_are_written_anew(start, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    write_checked_json(tmp_path / "mine/config.json", {"name": "mine"})
    assert start("report", "mine") == 0
    page = tmp_path / "mine/report.html"
    assert "mine" in page.read_text()
    page.write_text("old")
    assert start("report", "mine") == 0
    assert page.read_text() != "old"
    assert "mine/report.html" in capsys.readouterr().out


def test_a_report_of_a_folder_without_a_run_is_refused(start, tmp_path, capsys):
    assert start("report", "nothing") == 1
    assert "run_dir = nothing: " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
