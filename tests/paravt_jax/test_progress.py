"""One line about a long piece of work, on a terminal and in a log."""

from __future__ import annotations

import sys

import pytest

from paravt_jax import progress as module
from paravt_jax.progress import Progress


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def run_ten(clock):
    with Progress("cold start") as progress:
        for done in range(1, 11):
            clock[0] += 2.0
            progress.update(done, 10, {"loss": 1 / done})


def test_a_log_gets_plain_lines_at_intervals_and_at_the_end(clock, capsys):
    run_ten(clock)
    assert capsys.readouterr().err.splitlines() == [
        "cold start:  10% 1/10 [00:00<?, ?step/s, loss=1]",
        "cold start:  40% 4/10 [00:06<00:12,  2.00s/step, loss=0.25]",
        "cold start:  70% 7/10 [00:12<00:06,  2.00s/step, loss=0.143]",
        "cold start: 100% 10/10 [00:18<00:00,  2.00s/step, loss=0.1]",
    ]


def test_a_terminal_gets_one_line_that_overwrites_itself(clock, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    run_ten(clock)
    text = capsys.readouterr().err
    assert text.count("\n") == 1 and text.endswith("\n")
    assert text.count("\r") == 10
    assert "10/10" in text.rpartition("\r")[2]


def test_the_rate_of_a_resumed_run_is_that_of_this_process(clock, capsys):
    progress = Progress("rl")
    for seconds, done in ((90.0, 51), (10.0, 52), (10.0, 53)):  # the first of a process compiles
        clock[0] += seconds
        progress.update(done, 100)
    assert capsys.readouterr().err.splitlines() == [
        "rl:  51% 51/100 [00:00<?, ?step/s]",
        "rl:  52% 52/100 [00:10<08:00, 10.00s/step]",
        "rl:  53% 53/100 [00:20<07:50, 10.00s/step]",
    ]


def test_only_one_process_of_a_run_shows_it(capsys):
    with Progress("rl", shown=False) as progress:
        progress.update(1, 1)
    assert not capsys.readouterr().err
