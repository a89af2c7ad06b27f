"""Worker processes that make one call at a time, each with a deadline.

A call that hangs or crashes its process fails with a `WorkerError`, and a new process takes over.
Other calls are not affected. If the parent process ends, a worker ends after its current call.

One thread of the parent serves each process:

    submit -> priority queue -> thread 0 <-> pipe <-> process 0
                            \\-> thread 1 <-> pipe <-> process 1

The processes are started as `python -m paravt_jax.data.workers`, because forks can hang: they copy
open video readers, and the locks of the accelerator runtime without its threads.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import pickle
import queue
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection, Pipe
from typing import Any, Generic, TypeVar

_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")


class WorkerError(Exception):
    """A call has no result: its deadline passed, its process died, or it needs too much memory."""


class DeadlineError(WorkerError):
    """A call took longer than its deadline."""


class Workers(Generic[_Argument, _Result]):
    """A pool of processes that call one function on submitted arguments.

    Use it in a `with` block, or call `close`.

    Args:
        function: What to call: a function of a module, or a `functools.partial` of one. It,
            arguments and results are pickled.
        count: Number of processes, at least 1.
        deadline: Seconds that each call may take, above 0. Starting a process does not count.
        memory: Bytes that a process may allocate. A call that needs more fails.

    Example:
        >>> with Workers(os.path.getsize, count=2, deadline=10) as workers:
        ...     sizes = [workers.submit(path) for path in paths]
        ...     total = sum(size.result() for size in sizes)
    """

    def __init__(
        self,
        function: Callable[[_Argument], _Result],
        count: int,
        deadline: float,
        memory: int = 4 << 30,
    ):
        self._setup = pickle.dumps((function, memory))
        self._deadline = deadline
        self._memory = memory
        # Priority, number, and the call; None tells a thread to finish. The number keeps the order
        # among equal priorities. It is unique, so that calls themselves are never compared.
        self._calls: queue.PriorityQueue[
            tuple[float, int, tuple[_Argument, Future[_Result]] | None]
        ] = queue.PriorityQueue()
        self._numbers = itertools.count()
        # Guards the two fields below: no call may join, and no process start, after `close`.
        self._lock = threading.Lock()
        self._closed = False
        self._processes: set[_Process] = set()
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, argument: _Argument, priority: int = 0) -> Future[_Result]:
        """Call the function on `argument` as soon as a process is free.

        Args:
            argument: The argument.
            priority: Waiting calls with a smaller number are made first, equal ones in order.

        Returns:
            A future of the result. It fails with the exception that the function raised, or with a
            `WorkerError`. It can be cancelled until the call begins.
        """
        future: Future[_Result] = Future()
        with self._lock:
            if self._closed:
                raise ValueError("workers: closed; open new ones")
            self._calls.put((priority, next(self._numbers), (argument, future)))
        return future

    def close(self) -> None:
        """Stop at once: waiting calls are cancelled, running ones fail with a `WorkerError`."""
        with self._lock:
            self._closed = True
        with contextlib.suppress(queue.Empty):
            while True:
                _, _, call = self._calls.get_nowait()
                if call is not None:
                    _, future = call
                    cancel(future)
        # One None per thread tells it to finish. The kill unblocks threads that wait for a result:
        # they read the end of the pipe.
        for _ in self._threads:
            self._calls.put((math.inf, next(self._numbers), None))
        for process in self._processes.copy():
            process.kill()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Workers[_Argument, _Result]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        """Make calls in one process, one after another, until `close`."""
        process: _Process | None = None
        while (call := self._calls.get()[2]) is not None:
            argument, future = call
            value: Any
            # False if the caller has cancelled this call.
            if not future.set_running_or_notify_cancel():
                continue
            try:
                process = process or self._start()
                failed, value = process.call(pickle.dumps(argument), self._deadline)
            # Broad because an exception that escapes would end this thread, and callers would wait
            # for ever for this future and for all that are still in the queue. Classes may raise
            # anything when they are pickled.
            except Exception as error:
                # The process may be dead or in the middle of a message. The next call gets another.
                self._stop(process)
                process = None
                if not isinstance(error, WorkerError):
                    error = WorkerError(f"the call cannot be made ({error!r})")
                failed, value = True, error
            if isinstance(value, MemoryError):
                limit = self._memory / 2**30
                failed, value = True, WorkerError(f"it needs more than {limit:g} GiB of memory")
            if failed:
                future.set_exception(value)
            else:
                future.set_result(value)
        self._stop(process)

    def _start(self) -> _Process:
        with self._lock:
            if self._closed:
                raise WorkerError("the workers were closed")
            process = _Process(self._setup)
            self._processes.add(process)
        return process

    def _stop(self, process: _Process | None) -> None:
        if process is not None:
            self._processes.remove(process)
            process.release()


def cancel(future: Future[Any]) -> None:
    """Cancel a future that no thread will run, and wake all threads that wait for it."""
    future.cancel()
    # `concurrent.futures.wait` and `as_completed` learn of it only here.
    future.set_running_or_notify_cancel()


class _Process:
    """One process and the pipe to it."""

    def __init__(self, setup: bytes):
        self._pipe, child_end = Pipe()
        # The child imports modules from the same places as this process.
        paths = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(child_end.fileno())],
            pass_fds=[child_end.fileno()],
            env=os.environ | {"PYTHONPATH": paths},
            stdin=subprocess.DEVNULL,
            # Ctrl-C goes to the whole process group. A child in its own session never gets it, not
            # even before it can ignore signals.
            start_new_session=True,
        )
        # Only the child may hold this end. Otherwise its death would not end the pipe here.
        child_end.close()
        self._pipe.send_bytes(setup)
        self._ready = False

    def call(self, message: bytes, deadline: float) -> tuple[bool, Any]:
        """Make one call with a pickled argument.

        Returns:
            Whether the function raised an exception; and that exception, or else the result.

        Raises:
            WorkerError: The deadline passed or the process died.
        """
        try:
            if not self._ready:
                # Imports take seconds. They do not count towards the first call's deadline.
                self._pipe.recv_bytes()
                self._ready = True
            self._pipe.send_bytes(message)
            if not self._pipe.poll(deadline):
                raise DeadlineError(f"it took longer than {deadline:g} s")
            return self._pipe.recv()
        except (EOFError, OSError) as error:
            raise WorkerError(f"its process died ({type(error).__name__})") from error

    def kill(self) -> None:
        """Kill the process. Another thread that waits for its result then reads the pipe's end."""
        self._process.kill()

    def release(self) -> None:
        """Kill the process and close the pipe. Only the thread that uses it may do this."""
        self._process.kill()
        self._process.wait()
        self._pipe.close()


def _limit_memory(memory: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    # Only root may raise the hard limit, and a scheduler may have set a lower one.
    if hard != resource.RLIM_INFINITY:
        memory = min(memory, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (memory, hard))


def _work(pipe: Connection) -> None:
    """Run the main loop of a worker process."""
    # A scheduler may signal every process of a job. The parent decides when its workers end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    function, memory = pipe.recv()
    _limit_memory(memory)
    # Tell the parent that the imports are done.
    pipe.send_bytes(b"")
    while True:
        try:
            argument = pipe.recv()
        except (EOFError, ConnectionResetError):
            # The parent has ended, or was killed: either closes its end of the pipe.
            return
        # Broad because the exception is the call's result: the parent raises it in the caller.
        try:
            answer = pickle.dumps((False, function(argument)))
        except Exception as error:
            answer = _pickled_error(error)
        try:
            pipe.send_bytes(answer)
        except (BrokenPipeError, ConnectionResetError):
            return


def _pickled_error(error: Exception) -> bytes:
    """Pickle an exception; only its text if it cannot be read again."""
    try:
        answer = pickle.dumps((True, error))
        pickle.loads(answer)
    except Exception:
        answer = pickle.dumps((True, RuntimeError(f"{type(error).__name__}: {error}")))
    return answer


if __name__ == "__main__":
    _work(Connection(int(sys.argv[1])))
