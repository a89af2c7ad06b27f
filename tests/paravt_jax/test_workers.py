"""Worker processes: results, exceptions, deadlines, crashes, signals and the end of the parent."""

from __future__ import annotations

import os
import pathlib
import pickle
import signal
import subprocess
import sys
import time
from concurrent.futures import wait

import pytest

from paravt_jax.data.workers import WorkerError, Workers


def test_each_call_gets_its_own_result():
    with Workers(pathlib.PurePath, 2, deadline=30) as workers:
        futures = [workers.submit(f"{n}.mp4") for n in range(20)]
        results = [future.result() for future in reversed(futures)]
    assert results == [pathlib.PurePath(f"{n}.mp4") for n in reversed(range(20))]


def test_an_exception_of_the_function_is_raised_by_its_call_only():
    with Workers(os.listdir, 1, deadline=30) as workers:
        with pytest.raises(FileNotFoundError):
            workers.submit("/no such folder").result()
        assert workers.submit("/").result()


def test_a_call_beyond_its_deadline_fails_alone():
    with Workers(time.sleep, 1, deadline=0.5) as workers:
        futures = [workers.submit(seconds) for seconds in (0, 300, 0)]
        assert futures[0].result() is None
        with pytest.raises(WorkerError, match="0.5 s"):
            futures[1].result(60)
        assert futures[2].result(60) is None


def test_a_call_whose_process_dies_fails_alone():
    abort = "__import__('os').abort()"
    exit = "__import__('os')._exit(3)"
    unsendable = "(_ for _ in ()).throw(type('Local', (Exception,), {}))"
    with Workers(eval, 2, deadline=30) as workers:
        futures = [workers.submit(text) for text in ("1 + 1", abort, "2 + 2", exit, unsendable)]
        assert [futures[n].result(60) for n in (0, 2)] == [2, 4]
        for n in (1, 3, 4):
            with pytest.raises(WorkerError, match="died"):
                futures[n].result(60)


def test_a_result_that_cannot_be_sent_fails_alone():
    with Workers(eval, 1, deadline=30) as workers:
        with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
            workers.submit("lambda: 0").result(60)
        assert workers.submit("1 + 1").result(60) == 2


def test_a_call_that_needs_too_much_memory_fails_alone():
    with Workers(bytes, 1, deadline=30, memory=1 << 30) as workers:
        with pytest.raises(WorkerError, match="more than 1 GiB of memory"):
            workers.submit(2 << 30).result(60)
        assert workers.submit(3).result(60) == bytes(3)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_workers_leave_signals_to_their_parent(number):
    with Workers(eval, 1, deadline=30) as workers:
        process_id = workers.submit("__import__('os').getpid()").result(60)
        os.kill(process_id, number)
        assert workers.submit("__import__('os').getpid()").result(60) == process_id


def test_closing_ends_running_calls_and_waiting_ones():
    workers = Workers(time.sleep, 1, deadline=300)
    running, waiting = workers.submit(300), workers.submit(0)
    start = time.monotonic()
    workers.close()
    assert time.monotonic() - start < 60
    assert not wait([running, waiting], 0).not_done
    for call in (running, waiting):
        assert isinstance(call.exception(0), WorkerError)
    with pytest.raises(RuntimeError, match="after shutdown"):
        workers.submit(0)


PARENT = """
import os
from paravt_jax.data.workers import Workers
workers = Workers(eval, 1, 60)
print(workers.submit("__import__('os').getpid()").result(), flush=True)
input()
"""


def is_running(process_id: int) -> bool:
    try:
        status = pathlib.Path(f"/proc/{process_id}/stat").read_text()
    except FileNotFoundError:
        return False
    # A zombie has ended, but its exit code has not been read yet.
    state = status.rpartition(")")[2].split()[0]
    return state != "Z"


def test_no_worker_outlives_a_killed_parent():
    with subprocess.Popen(
        [sys.executable, "-c", PARENT],
        cwd=pathlib.Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        assert is_running(worker)
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        give_up = time.monotonic() + 10
        while is_running(worker):
            assert time.monotonic() < give_up, "the worker is still there"
            time.sleep(0.05)
