"""The time left of a phase and of a run, estimated from recorded steps."""

from __future__ import annotations

import itertools

import pytest

from train.durable.time_left import expected_step, time_left, usual_step


def rows(*spans: float, first: int = 1, start: float = 1000.0):
    """Lines of steps that end so many seconds after one another; the first ends at `start`."""
    walls = itertools.accumulate(spans, initial=start)
    return [{"step": step, "wall": wall} for step, wall in enumerate(walls, first)]


def test_the_first_step_tells_nothing_because_it_compiles():
    assert expected_step(rows(), first=1, save_every=5) is None
    assert expected_step(rows(10.0), first=1, save_every=5) == 10.0


def test_recent_steps_count_and_their_mean_covers_a_checkpoint():
    slower = rows(*[1.0] * 50, *[3.0] * 20)
    assert expected_step(slower, first=1, save_every=5) == 3.0
    # Every 40th step takes 41 seconds with its checkpoint: on average a step takes two.
    saving = rows(*([1.0] * 39 + [41.0]) * 3)
    assert expected_step(saving, first=1, save_every=40) == pytest.approx(2.0)


def test_a_resumed_run_uses_earlier_steps_until_it_has_its_own():
    earlier = rows(*[10.0] * 5)
    after_a_day = earlier + rows(30.0, first=7, start=earlier[-1]["wall"] + 86400)
    assert [row["step"] for row in after_a_day] == [1, 2, 3, 4, 5, 6, 7, 8]
    # Step 7 is the first of this process. The day before it is no step.
    assert expected_step(after_a_day[:7], first=7, save_every=5) == 10.0
    assert expected_step(after_a_day, first=7, save_every=5) == 30.0


def test_pauses_of_a_run_that_was_stopped_often_do_not_count():
    assert usual_step(rows(2.0, 2.0, 5000.0, 2.0, 9000.0, 2.0)) == 2.0
    assert usual_step(rows()) is None
    assert usual_step([]) is None


def test_a_clock_that_was_set_back_gives_no_negative_time():
    assert expected_step(rows(-3600.0), first=1, save_every=5) == 0.0


@pytest.mark.parametrize(
    ("steps", "seconds", "text"),
    [(10, None, ""), (10, 60.0, "10 min 00 s left"), (0, 60.0, "")],
)
def test_the_time_left_in_words(steps, seconds, text):
    assert time_left(steps, seconds) == text
