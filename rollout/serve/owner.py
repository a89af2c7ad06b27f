"""The one thread that steps an engine, for clients that come and go.

Handlers only enqueue jobs. The thread plays up to `episodes` of them side by side; the others wait
in line. Whatever happens in a job is an event of its client, and its last event is a `Result`.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import itertools
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from rollout.engine.requests import Sampler, Scheduler
from rollout.serve.errors import ApiError

_log = logging.getLogger(__name__)

# Seconds that the thread waits for files before it looks at its queue again.
_PATIENCE = 0.02
_GRACE = 5.0  # seconds that the thread has to end


@dataclasses.dataclass(frozen=True)
class Result:
    """What became of a job: its value, or the error that ended it."""

    value: Any = None
    error: Exception | None = None


Event = dict[str, Any] | Result


class Job:
    """A client's work. Its events arrive in the event loop in which it was made.

    Args:
        agent: an `async` function that a `Scheduler` plays. It is called when the job's turn comes.
        number: identifies the job.
    """

    def __init__(self, agent: Callable[[Job], Coroutine[Any, Any, Any]], number: int):
        self.agent = agent
        self.number = number
        self.place = -1  # in the queue, as last told; the first is 1
        self.since = time.monotonic()  # when it entered the queue, or was begun
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    def tell(self, event: Event) -> None:
        """Hand an event to the client. Any thread may call it."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def events(self) -> AsyncIterator[Event]:
        """Yield the events of this job; the last one is its `Result`."""
        while True:
            event = await self._events.get()
            yield event
            if isinstance(event, Result):
                return


class Owner:
    """Plays jobs in a thread of its own.

    Args:
        sampler: answers the requests of all agents. Nothing else may use it.
        episodes: upper bound on jobs that are played side by side.
        waiting: upper bound on jobs in the queue.
        patience: upper bound on the seconds that a job waits there. Jobs limit themselves when they
            are played, but files may take long to read: after twice that time they are given up.

    Attributes:
        playing: jobs that are played, by number.
        waiting: jobs in the queue.
        ended: why the thread has ended and plays nothing any more; None while it plays.
    """

    def __init__(self, sampler: Sampler, episodes: int, waiting: int, patience: float):
        self.playing: dict[int, Job] = {}
        self.waiting: collections.deque[Job] = collections.deque()
        self._sampler = sampler
        self._episodes = episodes
        self._most_waiting = waiting
        self._patience = patience
        self._numbers = itertools.count()
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._open = 0  # jobs that have no result yet, in the queue or played
        self._lock = threading.Lock()
        self.ended: Exception | None = None
        self._scheduler = Scheduler(sampler, _PATIENCE, self._fail)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, prepare: Callable[[], None]) -> None:
        """Start the thread, which calls `prepare` before it plays jobs."""
        self._calls.put(prepare)
        self._thread.start()

    def submit(self, agent: Callable[[Job], Coroutine[Any, Any, Any]]) -> Job:
        """Enqueue a job. Call it in an event loop, and `cancel` the job in any case.

        Raises:
            ApiError: the queue is full.
        """
        with self._lock:
            if self._open >= self._episodes + self._most_waiting:
                message = f"queue: {self._most_waiting} requests wait already; try again later"
                raise ApiError(429, message, "busy", retry=5)
            job = Job(agent, next(self._numbers))
            if self.ended is not None:
                job.tell(Result(error=self.ended))
                return job
            self._open += 1
            self._calls.put(lambda: self.waiting.append(job))
        return job

    def cancel(self, job: Job) -> None:
        """Give up a job. If it has ended, nothing happens."""
        if self.ended is None:
            gone = ApiError(499, "the client closed the connection")
            self._calls.put(lambda: self._cancel(job, gone))

    def end(self) -> None:
        """Begin to give up all jobs, and to end the thread."""
        self._calls.put(None)

    def close(self) -> None:
        """Give up all jobs and end the thread."""
        self.end()
        self._thread.join(_GRACE)

    # --- in the thread ---

    def _run(self) -> None:
        ended: Exception = ApiError(503, "server: it stops; ask again later", "stopping", retry=30)
        try:
            while self._take_calls():
                self._begin()
                if self.playing:
                    self._step()
        except Exception as error:
            _log.exception("the engine's thread failed")
            ended = error
        with self._lock:
            self.ended = ended
        # Take what was enqueued before that.
        while not self._calls.empty():
            call = self._calls.get()
            if call is not None:
                call()
        for job in [*self.playing.values(), *self.waiting]:
            self._end(job, Result(error=ended))
        self.waiting.clear()
        self._scheduler.close()

    def _take_calls(self) -> bool:
        """Carry out what other threads asked for; without jobs, wait for it. False: the end."""
        idle = not (self.playing or self.waiting)
        while idle or not self._calls.empty():
            call = self._calls.get()
            if call is None:
                return False
            call()
            idle = False
        return True

    def _begin(self) -> None:
        """Start jobs while there is room, and tell the others their place in the queue."""
        now = time.monotonic()
        limits = (self.waiting, self._patience), (self.playing.values(), 2 * self._patience)
        for jobs, limit in limits:
            for job in [job for job in jobs if now - job.since > limit]:
                message = f"queue: neither its turn nor its video came in {limit:g} s; ask later"
                self._cancel(job, ApiError(503, message, "busy", retry=5))
        while self.waiting and len(self.playing) < self._episodes:
            job = self.waiting.popleft()
            job.since = now
            self.playing[job.number] = job
            job.tell({"event": "queued", "place": 0})
            self._scheduler.add(job.number, job.agent(job))
        for place, job in enumerate(self.waiting, 1):
            if place != job.place:
                job.place = place
                job.tell({"event": "queued", "place": place})

    def _step(self) -> None:
        try:
            self._scheduler.step()
        except Exception as error:
            # Whose fault it was is unknown, so all that are played share it. The next ones start
            # afresh.
            _log.exception("a step of the engine failed")
            for job in [*self.playing.values()]:
                self._end(job, Result(error=error))
            self._scheduler.close()
            self._scheduler = Scheduler(self._sampler, _PATIENCE, self._fail)
        for number, value in self._scheduler.take_finished():
            self._end(self.playing[number], Result(value))

    def _fail(self, number: int, error: Exception) -> None:
        self._end(self.playing[number], Result(error=error))

    def _cancel(self, job: Job, reason: Exception) -> None:
        if job in self.waiting:
            self.waiting.remove(job)
        elif job.number in self.playing:
            self._scheduler.drop(job.number)
        else:
            return
        self._end(job, Result(error=reason))

    def _end(self, job: Job, result: Result) -> None:
        self.playing.pop(job.number, None)
        with self._lock:
            self._open -= 1
        job.tell(result)
