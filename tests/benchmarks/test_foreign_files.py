"""A share of `benchmarks.foreign_files`: damaged and hostile files of every kind."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from benchmarks import foreign_files


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("foreign")
    return foreign_files.run(folder, cases=80, seed=2)


@pytest.mark.parametrize("kind", foreign_files.CASES)
def test_changed_files_are_read_or_refused_in_one_line(outcomes, kind):
    assert outcomes[kind].unexpected == []
    assert sum(outcomes[kind].outcomes.values()) == 80
    assert len(outcomes[kind].outcomes) > 1, (
        "all cases end alike, so the changes test one check only"
    )


@pytest.mark.skipif(not shutil.which("strace"), reason="needs strace, which is not installed")
def test_strace_finds_an_opened_private_file_and_a_connection(tmp_path):
    folders = foreign_files.Folders(tmp_path)
    folders.outside.mkdir()
    folders.inside.mkdir()
    private = folders.outside / "private.mp4"
    private.write_bytes(b"private")
    (folders.inside / "link.mp4").symlink_to(private)
    opened = ("inside/link.mp4", "inside/../outside/private.mp4", "outside/private.mp4")
    program = "import contextlib, socket\n"
    for name in opened:
        program += f"open({str(tmp_path / name)!r}).close()\n"
    program += "with contextlib.suppress(OSError): socket.create_connection(('192.0.2.1', 9), 0.1)"
    trace = tmp_path / "trace"
    command = [*foreign_files.STRACE, "-o", str(trace), sys.executable, "-c", program]
    subprocess.run(command, check=True)
    calls = foreign_files.forbidden(trace, folders)
    assert sum("open" in call for call in calls) == 3
    assert sum("192.0.2.1" in call for call in calls) == 1
    assert len(calls) == 4


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("strace"), reason="needs strace, which is not installed")
def test_no_reader_reads_a_private_file_or_connects_elsewhere(tmp_path, capfd):
    arguments = ["--folder", str(tmp_path), "--strace", "--cases", "40"]
    assert foreign_files.main(arguments) == 0
    assert "or connections made: 0" in capfd.readouterr().out
