"""One line about a long piece of work, on a terminal and in a log."""

from __future__ import annotations

import io

import pytest
import tqdm.std

from paravt_jax.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(tqdm.std, "time", lambda: now[0])
    return now


def run_ten(stream, clock, **options):
    with Progress("cold start", stream=stream, **options) as progress:
        for done in range(1, 11):
            clock[0] += 2.0
            progress.update(done, 10, {"loss": 1 / done})
    return stream.getvalue()


def test_a_log_gets_plain_lines_at_intervals_and_at_the_end(clock):
    text = run_ten(io.StringIO(), clock, every=5.0)
    assert text.splitlines() == [
        "cold start:  10% 1/10 [00:00<?, ?step/s, loss=1]",
        "cold start:  40% 4/10 [00:06<00:12,  2.00s/step, loss=0.25]",
        "cold start:  70% 7/10 [00:12<00:06,  2.00s/step, loss=0.143]",
        "cold start: 100% 10/10 [00:18<00:00,  2.00s/step, loss=0.1]",
    ]
    assert "\r" not in text


def test_a_terminal_gets_one_line_that_overwrites_itself(clock):
    text = run_ten(Terminal(), clock)
    assert text.count("\n") == 1
    assert text.endswith("\n")
    assert text.count("\r") >= 10
    assert "10/10" in text.rpartition("\r")[2]
    assert "loss=0.1" in text.rpartition("\r")[2]


def test_the_rate_of_a_resumed_run_is_that_of_this_process(clock):
    stream = io.StringIO()
    progress = Progress("rl", stream=stream)
    for seconds, done in ((90.0, 51), (10.0, 52), (10.0, 53)):  # the first of a process compiles
        clock[0] += seconds
        progress.update(done, 100)
    assert stream.getvalue().splitlines() == [
        "rl:  51% 51/100 [00:00<?, ?step/s]",
        "rl:  52% 52/100 [00:10<08:00, 10.00s/step]",
        "rl:  53% 53/100 [00:20<07:50, 10.00s/step]",
    ]


def test_work_done_in_one_update_has_one_line_and_no_work_has_none(clock):
    stream = io.StringIO()
    with Progress("check", stream=stream) as progress, Progress("unpack", stream=stream):
        progress.update(1, 1)
    assert stream.getvalue().count("\n") == 1
    assert "unpack" not in stream.getvalue()


def test_only_one_process_of_a_run_shows_it():
    stream = io.StringIO()
    with Progress("rl", stream=stream, shown=False) as progress:
        progress.update(1, 1)
    assert not stream.getvalue()
