from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from paravt_jax.data.workers import WorkerError, Workers


def test_calls_are_made_elsewhere_and_results_come_back_in_any_order():
    with Workers(pathlib.PurePath, 2, deadline=30) as workers:
        futures = [workers.submit(f"{n}.mp4") for n in range(20)]
        assert [f.result() for f in reversed(futures)] == [
            pathlib.PurePath(f"{n}.mp4") for n in reversed(range(20))
        ]
    with Workers(bytes, 1, deadline=30) as workers:
        assert (
            len(workers.submit(3_000_000).result()) == 3_000_000
        )  # more than a pipe holds at once


def test_a_functions_own_exception_is_the_calls():
    with Workers(os.listdir, 1, deadline=30) as workers:
        with pytest.raises(FileNotFoundError):
            workers.submit("/no such folder").result()
        assert workers.submit("/").result()


def test_a_call_beyond_its_deadline_costs_itself_alone():
    with Workers(time.sleep, 1, deadline=2) as workers:
        futures = [workers.submit(seconds) for seconds in (0, 300, 0)]
        assert futures[0].result() is None
        with pytest.raises(WorkerError, match="longer than 2 s"):
            futures[1].result(60)
        assert futures[2].result(60) is None


def test_a_process_that_dies_costs_its_call_alone():
    with Workers(os._exit, 1, deadline=30) as workers:
        with pytest.raises(WorkerError, match="died"):
            workers.submit(3).result(60)
    with Workers(eval, 2, deadline=30) as workers:
        futures = [
            workers.submit(text)
            for text in ("1 + 1", "__import__('os').abort()", "2 + 2", "lambda: 0", "3 + 3")
        ]
        assert [futures[n].result(60) for n in (0, 2, 4)] == [2, 4, 6]
        for n in (1, 3):  # the latter is a result that cannot be sent
            with pytest.raises(WorkerError, match="died"):
                futures[n].result(60)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_is_the_parents_alone(number):
    with Workers(eval, 1, deadline=30) as workers:
        child = workers.submit("__import__('os').getpid()").result(60)
        os.kill(child, number)
        assert workers.submit("__import__('os').getpid()").result(60) == child


def test_closing_ends_what_runs_and_cancels_what_waits():
    workers = Workers(time.sleep, 1, deadline=300)
    running, waiting = workers.submit(300), workers.submit(0)
    while not running.running():
        time.sleep(0.01)
    start = time.monotonic()
    workers.close()
    assert time.monotonic() - start < 60
    assert waiting.cancelled() and isinstance(running.exception(0), WorkerError)
    with pytest.raises(ValueError, match="closed"):
        workers.submit(0)


def test_no_process_outlives_a_killed_parent():
    code = (
        "from paravt_jax.data.workers import Workers\n"
        "import os\n"
        "workers = Workers(eval, 1, 60)\n"
        "print(workers.submit('__import__(\"os\").getpid()').result(), flush=True)\n"
        "input()\n"
    )
    root = pathlib.Path(__file__).parents[2]
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=root,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None and parent.stdin is not None
    child = int(parent.stdout.readline())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    for _ in range(200):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            break
        if pathlib.Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.05)
    else:
        pytest.fail("the worker is still there")
    parent.stdin.close()
    parent.stdout.close()


@pytest.mark.parametrize(("count", "deadline"), [(0, 1.0), (1, 0.0), (1, float("nan"))])
def test_impossible_workers_are_refused(count, deadline):
    with pytest.raises(ValueError, match="workers"):
        Workers(os.stat, count, deadline)
