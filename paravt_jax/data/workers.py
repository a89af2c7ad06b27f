"""Worker processes that make one call at a time, each with a deadline.

A call that hangs or crashes its process fails with a `WorkerError`, and a new process takes over.
Other calls are not affected. If the parent process ends, a worker ends after its current call.

Each call is made by a thread of the parent, which has a process of its own:

    submit -> thread <-> pipe <-> process

The processes are started as `python -m paravt_jax.data.workers`, because forks can hang: they copy
open video readers, and the locks of the accelerator runtime without its threads.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
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

    Use it in a `with` block, or call `close`: otherwise Python's exit waits for all calls.

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
        self._threads = ThreadPoolExecutor(count)
        # Guards the fields below: no process may start after `close`.
        self._lock = threading.Lock()
        self._closed = False
        self._processes: dict[int, _Process] = {}
        """By the identity of their threads."""

    def submit(self, argument: _Argument) -> Future[_Result]:
        """Call the function on `argument` as soon as a process is free, in the order of calls.

        Returns:
            A future of the result. It fails with the exception that the function raised, or with a
            `WorkerError`.
        """
        return self._threads.submit(self.call, argument)

    def call(self, argument: _Argument) -> _Result:
        """Call the function on `argument` in this thread's process, and wait for the result."""
        thread = threading.get_ident()
        with self._lock:
            if self._closed:
                raise WorkerError("the workers were closed")
            if thread not in self._processes:
                self._processes[thread] = _Process(self._setup)
            process = self._processes[thread]
        try:
            failed, value = process.call(pickle.dumps(argument), self._deadline)
        # Broad because classes may raise anything when they are pickled, and when they are read.
        except Exception as error:
            # The process may be dead or in the middle of a message. The next call gets another.
            with self._lock:
                del self._processes[thread]
            process.stop()
            if isinstance(error, WorkerError):
                raise
            raise WorkerError(f"the call cannot be made ({error!r})") from error
        if isinstance(value, MemoryError):
            raise WorkerError(f"it needs more than {self._memory / 2**30:g} GiB of memory")
        if failed:
            raise value
        return value

    def close(self) -> None:
        """Stop at once: waiting and running calls fail with a `WorkerError`."""
        with self._lock:
            self._closed = True
            for process in self._processes.values():
                process.kill()
        self._threads.shutdown()
        for process in self._processes.values():
            process.stop()

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Process:
    """One process and the pipe to it."""

    def __init__(self, setup: bytes):
        self._pipe, child_end = Pipe()
        # The child imports modules from the same places as this process. With -P, Python does not
        # put the working directory first, where a file of the user's could hide a module. The
        # path of a notebook begins with it, as "".
        paths = os.pathsep.join([*filter(None, sys.path), os.getcwd()])
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, str(child_end.fileno())],
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

    def stop(self) -> None:
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
            # If it cannot be pickled, this process ends, and the call fails with that.
            answer = pickle.dumps((True, error))
        try:
            pipe.send_bytes(answer)
        except (BrokenPipeError, ConnectionResetError):
            return


if __name__ == "__main__":
    _work(Connection(int(sys.argv[1])))
