"""The running time of a run, over all its starts."""

from __future__ import annotations

from train.durable.clock import Clock, in_words


def test_a_resumed_run_also_says_how_long_it_took_in_all(tmp_path):
    file = tmp_path / "seconds.json"
    file.write_text("3600.0")
    with Clock(file) as clock:
        assert clock.total >= 3600
    assert in_words(50.0, file) == "50 s (1 h 00 min in all)"


def test_a_run_with_one_start_has_one_time(tmp_path):
    file = tmp_path / "seconds.json"
    assert in_words(50.0, file) == "50 s"
    file.write_text("45.0")
    assert in_words(50.0, file) == "50 s"
