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
    place.inside.mkdir()
    place.port.write_text("9")
    private = place.outside / "private.mp4"
    private.write_bytes(b"private")
    (place.inside / "link.mp4").symlink_to(private)
    opened = ("inside/link.mp4", "inside/../outside/private.mp4", "outside/private.mp4")
    program = "import contextlib, socket\n"
    for name in opened:
        program += f"open({str(tmp_path / name)!r}).close()\n"
    for address in (("192.0.2.1", 9), ("127.0.0.1", 8), ("127.0.0.1", 9)):
        program += f"with contextlib.suppress(OSError): socket.create_connection({address}, 0.1)\n"
    trace = tmp_path / "trace"
    command = [*foreign_files.STRACE, "-o", str(trace), sys.executable, "-c", program]
    subprocess.run(command, check=True)
    calls = foreign_files.forbidden(trace, place)
    assert sum("open" in call for call in calls) == 3
    assert sum("192.0.2.1" in call for call in calls) == 1
    assert sum("htons(8)" in call for call in calls) == 1
    assert len(calls) == 5


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("strace"), reason="needs strace, which is not installed")
def test_no_reader_reads_a_private_file_or_connects_elsewhere(tmp_path, capfd):
    arguments = ["--folder", str(tmp_path), "--strace", "--cases", "40"]
    assert foreign_files.main(arguments) == 0
    assert "to other servers: 0" in capfd.readouterr().out
