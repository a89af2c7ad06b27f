"""JSON lines to and from a process."""

from __future__ import annotations

import os
import sys
import time

import pytest

from paravt_extras.lmms_eval.pipe import Pipe, PipeError


def start(code: str, **options) -> Pipe:
    return Pipe([sys.executable, "-c", code], os.environ, **options)


def test_messages_come_back_whole() -> None:
    pipe = start("import sys\nfor line in sys.stdin: print(line, end='', flush=True)")
    for message in ({"text": "zwei\nlines, “quoted” 🎈"}, {"text": "x" * 1_000_000}):
        pipe.send(message)
        assert pipe.receive(60) == message
    pipe.close()


def test_a_process_that_dies_leaves_its_last_line() -> None:
    pipe = start("import sys; sys.stdin.readline(); sys.exit('first\\nno memory left')")
    pipe.send({})
    with pytest.raises(PipeError, match="^it ended with status 1: no memory left$"):
        pipe.receive(60)
    pipe.close()


def test_a_message_to_a_dead_process_is_an_error() -> None:
    pipe = start("import sys; sys.exit('cannot start')")
    with pytest.raises(PipeError, match="cannot start"):
        for _ in range(1000):
            pipe.send({"text": "x" * 10_000})
    pipe.close()


def test_a_process_that_hangs_is_killed() -> None:
    pipe = start("import time; time.sleep(600)")
    began = time.monotonic()
    with pytest.raises(PipeError, match="status -9"):
        pipe.receive(0.2)
    pipe.close()
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("line", ["hello", "[1]"])
def test_other_lines_than_json_objects_are_an_error(line) -> None:
    pipe = start(f"print({line!r}, flush=True); import sys; sys.stdin.read()")
    with pytest.raises(PipeError, match="which is not"):
        pipe.receive(60)
    pipe.close()


def test_much_text_on_stderr_blocks_nothing(capfd) -> None:
    code = "import sys; print('x' * 70 + '\\n', file=sys.stderr) or print('{}', flush=True)"
    pipe = start(f"for _ in range(5000): {code}", forward=True)
    for _ in range(5000):
        assert pipe.receive(60) == {}
    pipe.close()
    assert capfd.readouterr().err.count("x" * 70) == 5000


def test_a_process_ends_by_itself_when_it_is_closed(tmp_path) -> None:
    code = "import sys; sys.stdin.read(); open('ended', 'w')"
    start(code, folder=tmp_path).close()
    assert (tmp_path / "ended").exists()
