"""A share of `benchmarks.foreign_files`: damaged and hostile files of every kind."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys

import pytest

from benchmarks import foreign_files


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("foreign")
    return foreign_files.run(folder, cases=120, seed=2)


@pytest.mark.parametrize("kind", foreign_files.CASES)
def test_changed_files_are_read_or_refused_in_one_line(found, kind):
    assert found[kind].unexpected == []
    assert sum(found[kind].outcomes.values()) == 120
    assert len(found[kind].outcomes) > 1, "all cases end alike, so the changes test one check only"


def test_a_case_depends_on_its_number_only():
    first, again = (foreign_files.changed_bytes(b"x" * 100, random.Random("0")) for _ in range(2))
    assert first == again
    assert first != b"x" * 100


def test_another_error_than_the_documented_ones_is_found_and_its_case_kept(tmp_path):
    def fail(case):
        raise KeyError(case)

    broken = foreign_files.Kind(lambda rng: "case", fail)
    result = foreign_files.run_kind("broken", broken, 0, 1, tmp_path)
    assert result.unexpected == ["broken 0: KeyError: 'case'"]
    assert (tmp_path / "broken-0").read_text() == "'case'"


@pytest.mark.skipif(not shutil.which("strace"), reason="needs strace, which is not installed")
def test_strace_finds_an_opened_private_file_and_a_connection(tmp_path):
    place = foreign_files.Place(tmp_path)
    place.outside.mkdir()
    private = place.outside / "private.mp4"
    private.write_bytes(b"private")
    trace = tmp_path / "trace"
    program = (
        "import contextlib, socket\n"
        f"open({str(private)!r}).close()\n"
        "with contextlib.suppress(OSError): socket.create_connection(('192.0.2.1', 9), 0.1)\n"
    )
    command = ["strace", "-f", "-qq", "-e", "trace=open,openat,connect", "-o", str(trace)]
    subprocess.run([*command, sys.executable, "-c", program], check=True)
    calls = foreign_files.forbidden(trace, place)
    assert any("private.mp4" in call for call in calls)
    assert any("192.0.2.1" in call for call in calls)


@pytest.mark.skipif(not shutil.which("strace"), reason="needs strace, which is not installed")
def test_no_reader_opens_a_private_file_or_leaves_the_machine(tmp_path, capfd):
    arguments = ["--folder", str(tmp_path), "--strace", "--cases", "40"]
    assert foreign_files.main(arguments) == 0
    assert "leave the machine: 0" in capfd.readouterr().out
