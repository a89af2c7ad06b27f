"""Processes that do one thing each at a time, under a deadline: a call that hangs or crashes costs its own result, never the run.

Owns the processes' life. They are started as `python -m paravt_jax.data.workers`, not forked: a
fork would inherit the accelerator's threads and
open readers, which hang. Refuses functions that cannot be pickled. Invariant: every call ends, in its result, its own exception, or a
`WorkerError`; and no process outlives its parent, however that ends.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")


class WorkerError(Exception):
    """A call that did not end by itself: its deadline passed, or its process died."""


class Workers(Generic[_Argument, _Result]):
    """`count` processes that call `function` on what is submitted, in turn; `deadline` in seconds, for each call by itself.

    Results come as futures. Use it in a `with` block, or `close` it: what has not been begun is then cancelled.
    """

    def __init__(self, function: Callable[[_Argument], _Result], count: int, deadline: float):
        if count < 1 or not deadline > 0:
            raise ValueError(
                f"workers: {count} processes, {deadline} s a call; give at least 1, and more than 0 s"
            )
        self._function, self._deadline = pickle.dumps(function), deadline
        self._calls: queue.SimpleQueue[tuple[_Argument, Future[_Result]] | None] = (
            queue.SimpleQueue()
        )
        self._closed = False
        self._processes: dict[int, _Process] = {}
        self._threads = [
            threading.Thread(target=self._serve, args=(n,), daemon=True) for n in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, argument: _Argument) -> Future[_Result]:
        """Has the function called on the argument as soon as a process is free."""
        if self._closed:
            raise ValueError("workers: closed; open new ones")
        future: Future[_Result] = Future()
        self._calls.put((argument, future))
        return future

    def close(self) -> None:
        """Ends the processes, at once: a call that is running ends in a WorkerError."""
        self._closed = True
        with contextlib.suppress(queue.Empty):
            while True:
                if (call := self._calls.get_nowait()) is not None:
                    call[1].cancel()
        for _ in self._threads:
            self._calls.put(None)
        for process in list(self._processes.values()):
            process.kill()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Workers[_Argument, _Result]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self, number: int) -> None:
        """One process's calls, one after the other; a process that fails is replaced when the next call comes."""
        while (call := self._calls.get()) is not None:
            argument, future = call
            if not future.set_running_or_notify_cancel():
                continue
            try:
                if number not in self._processes:
                    self._processes[number] = _Process(self._function)
                if self._closed:  # `close` may have missed this process
                    raise WorkerError("the workers were closed")
                failed, value = self._processes[number].call(argument, self._deadline)
            except Exception as error:
                if (process := self._processes.pop(number, None)) is not None:
                    process.release()
                future.set_exception(
                    error
                    if isinstance(error, WorkerError)
                    else WorkerError(f"the call cannot be made ({error!r})")
                )
                continue
            if failed:
                future.set_exception(value)
            else:
                future.set_result(value)
        if (process := self._processes.pop(number, None)) is not None:
            process.release()


class _Process:
    """One process and the two pipes to it."""

    def __init__(self, function: bytes):
        theirs, self._to = _pipe()
        self._from, results = _pipe()
        # The child takes its modules from where this process takes them.
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)
        }
        command = [sys.executable, "-m", __name__, str(theirs.fileno()), str(results.fileno())]
        self._process = subprocess.Popen(
            command,
            pass_fds=(theirs.fileno(), results.fileno()),
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a signal to the group does not meet it before it listens
        )
        theirs.close()
        results.close()
        self._to.send_bytes(function)
        self._ready = False

    def call(self, argument: Any, deadline: float) -> tuple[bool, Any]:
        """Whether the function failed, and what it returned or raised. Raises WorkerError where it did neither."""
        try:
            if not self._ready:  # the start is not the call's to pay for
                self._from.recv_bytes()
                self._ready = True
            self._to.send_bytes(pickle.dumps(argument, protocol=5))
            if not self._from.poll(deadline):
                raise WorkerError(f"it took longer than {deadline:g} s")
            return pickle.loads(self._from.recv_bytes())
        except (EOFError, OSError) as error:
            raise WorkerError(f"its process died ({type(error).__name__})") from error

    def kill(self) -> None:
        """Ends it; whoever waits for its answer meets the end of the pipe."""
        self._process.kill()

    def release(self) -> None:
        """Ends it and gives its pipes back: for the one thread that uses them."""
        self._process.kill()
        self._process.wait()
        self._to.close()
        self._from.close()


def _pipe() -> tuple[Connection, Connection]:
    """The end to read from and the end to write to."""
    read, write = os.pipe()
    return Connection(read, writable=False), Connection(write, readable=False)


def _work(calls: Connection, results: Connection) -> None:
    """A process's whole life: it ends when its parent has."""
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # both may reach a whole group or job; what is to end is the parent's to say
        signal.signal(number, signal.SIG_IGN)
    function = pickle.loads(calls.recv_bytes())
    results.send_bytes(b"")
    while True:
        try:
            argument = pickle.loads(calls.recv_bytes())
        except EOFError:
            return
        try:
            answer = False, function(argument)
        except Exception as error:
            answer = True, error
        try:
            results.send_bytes(pickle.dumps(answer, protocol=5))
        except BrokenPipeError:
            return


if __name__ == "__main__":
    _work(
        Connection(int(sys.argv[1]), writable=False), Connection(int(sys.argv[2]), readable=False)
    )
