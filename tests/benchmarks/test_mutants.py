"""Every mutant can still be made, and the command tells killed ones from survivors."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shlex
import shutil

import pytest

from benchmarks import mutants
from benchmarks.mutant_table import MUTANTS, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_applicable(mutant: Mutant) -> None:
    text = (mutants.ROOT / mutant.file).read_text(encoding="utf-8")
    changed = mutants.mutate(text, mutant)
    assert changed != text
    compile(changed, mutant.file, "exec")
    for test in mutant.tests:
        assert (mutants.ROOT / test).is_file(), f"{mutant.name}: there is no {test}"


@pytest.mark.parametrize(("old", "count"), [("absent", 0), ("twice", 2)])
def test_a_text_that_does_not_occur_once_is_refused(old: str, count: int) -> None:
    with pytest.raises(mutants.NotApplicable, match=f"mutant m: .* {count} times in a.py"):
        mutants.mutate("twice twice", Mutant("m", "a.py", old, "new", ()))


@pytest.fixture
def small_checkout(tmp_path, monkeypatch) -> pathlib.Path:
    """A stand-in for the checkout with one source file and its test."""
    root = tmp_path / "checkout"
    root.mkdir()
    (root / "double.py").write_text("def double(x):\n    return 2 * x\n")
    (root / "test_double.py").write_text(
        "from double import double\n\n\ndef test_double():\n    assert double(3) == 6\n"
    )
    (root / "conftest.py").write_text(
        "import hypothesis\n\nhypothesis.settings.register_profile('unshrunk')\n"
    )
    monkeypatch.setattr(mutants, "ROOT", root)
    monkeypatch.setattr(mutants, "copy_checkout", lambda folder: shutil.copytree(root, folder))
    return root


@pytest.mark.slow
def test_results_are_kept_and_a_survivor_fails_the_command(
    small_checkout, tmp_path, monkeypatch, capsys
) -> None:
    out = tmp_path / "out.json"
    killed = Mutant("killed", "double.py", "2 * x", "3 * x", ("test_double.py",))
    survivor = dataclasses.replace(killed, name="survivor", new="x + 3")
    monkeypatch.setattr(mutants, "MUTANTS", (killed, survivor))
    command = shlex.split(f"--out {out} --jobs 1")
    assert mutants.main([*command, "--only", "killed"]) == 0
    assert mutants.main(command) == 1
    results = json.loads(out.read_text())
    assert {name: result["outcome"] for name, result in results.items()} == {
        "unchanged: test_double.py": "passed",
        "killed": "killed",
        "survivor": "survived",
    }
    assert "test_double" in results["killed"]["by"]
    told = capsys.readouterr().out
    assert told.count("s  killed\n") == 1, "what is in the file is not run again"
    assert "survived: survivor (double.py)" in told
    assert "1 of 2 killed" in told
    assert "return 2 * x" in (small_checkout / "double.py").read_text()
    monkeypatch.setattr(mutants, "MUTANTS", (dataclasses.replace(survivor, equivalent="why"),))
    assert mutants.main(command) == 0
