"""Exclusive use of a run in a bucket, where there are no locks.

The holder writes an object and renews it. Every write demands the generation that the object had
before, a number that grows with each write, so of two processes only one succeeds. A process that
finds the object watches it: if it is not renewed for `LENGTH` seconds, the holder is dead or cut
off, and the process takes over. It measures with its own clock, so clocks of hosts need not agree.
A holder that was cut off learns of this at its next renewal, and its run ends.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import uuid
from typing import Any

from train.durable.bucket import Bucket, ChangedError
from train.durable.run_directory import RunDirectoryError
from train.durable.step_lines import say

LENGTH = 60.0
"""Seconds without a renewal after which another process takes over."""
EVERY = 15.0
"""Seconds between two renewals."""

NAME = "in-use.txt"
_LOOK = 2.0  # seconds between two looks at somebody else's lease
_ABSENT = 0  # the generation of an object that does not exist


class LeaseError(RunDirectoryError):
    """Another process uses the run."""


class Lease:
    """Holds the lease until `close`.

    Args:
        bucket: The run.

    Raises:
        LeaseError: Another process renews the lease.
        BucketError: The bucket cannot be written to.
    """

    def __init__(self, bucket: Bucket):
        self._bucket = bucket
        # The id tells processes of equal containers apart.
        self._content = f"process {os.getpid()} on {socket.gethostname()}, {uuid.uuid4().hex}"
        self._generation = _ABSENT
        self._renewed = 0.0
        while not self._write():
            holder, self._generation = self._read()
            if self._generation != _ABSENT:
                self._wait(holder.partition(",")[0])
        self._lost = False
        # Renewals of the thread and of `require` must not meet.
        self._lock = threading.Lock()
        self._closing = threading.Event()
        threading.Thread(target=self._renew_until_closed, daemon=True).start()

    def require(self) -> None:
        """Raise LeaseError if another process has taken over.

        Raises:
            BucketError: The store cannot be reached to find out.
        """
        # A process that was frozen or cut off may not have noticed yet.
        if time.monotonic() - self._renewed > LENGTH - EVERY:
            self._renew()
        if self._lost:
            holder = self._read()[0].partition(",")[0]
            raise LeaseError(
                f"--run-dir {self._bucket.address} was taken over by "
                f"{holder or 'a process that has ended'}, because this one could not renew its "
                f"lease for {LENGTH:.0f} s; let that one go on"
            )

    def close(self) -> None:
        """Give the lease back."""
        self._closing.set()
        with self._lock:
            if self._lost:
                return
            try:
                with self._bucket.in_one_line(NAME):
                    self._bucket.blob(NAME).delete(**self._if_unchanged())
            except OSError as error:
                say(f"warning: {error}; the next start waits up to {LENGTH:.0f} s")

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self, holder: str) -> None:
        """Return when a lease is given back, or was not renewed for `LENGTH` seconds.

        Raises:
            LeaseError: It was renewed.
        """
        address = self._bucket.address
        say(
            f"{address} was last used by {holder}, which did not say that it ended; waiting "
            f"up to {LENGTH:.0f} s for a sign of life"
        )
        end = time.monotonic() + LENGTH
        while time.monotonic() < end:
            time.sleep(_LOOK)
            _, generation = self._read()
            if generation == _ABSENT:
                self._generation = _ABSENT
                return
            if generation != self._generation:
                raise LeaseError(
                    f"--run-dir {address} is in use by {holder}: wait for it, stop it, or give "
                    "another --run-dir."
                )

    def _renew_until_closed(self) -> None:
        while not self._lost and not self._closing.wait(EVERY):
            # Perhaps the store can be reached the next time.
            with contextlib.suppress(OSError):
                self._renew()

    def _renew(self) -> None:
        """Renew the lease, or notice that it is lost."""
        with self._lock:
            if not self._closing.is_set():
                self._lost = not self._write()

    def _write(self) -> bool:
        """Write the lease if it has the expected generation; return whether it is ours then."""
        blob = self._bucket.blob(NAME)
        try:
            with self._bucket.in_one_line(NAME):
                blob.upload_from_string(self._content, **self._if_unchanged())
            self._generation = int(blob.generation)
        except ChangedError:
            # Perhaps only the answer to a write was lost, and the write was repeated.
            content, generation = self._read()
            if content != self._content:
                return False
            self._generation = generation
        self._renewed = time.monotonic()
        return True

    def _if_unchanged(self) -> dict[str, Any]:
        """Options of a request that fails with ChangedError if another process came between."""
        return self._bucket.options | {"if_generation_match": self._generation}

    def _read(self) -> tuple[str, int]:
        """Return content and generation of the lease; "" and `_ABSENT` if there is none."""
        blob = self._bucket.blob(NAME)
        with contextlib.suppress(FileNotFoundError), self._bucket.in_one_line(NAME):
            blob.reload(**self._bucket.options)
            return blob.download_as_text(**self._bucket.options), int(blob.generation)
        return "", _ABSENT
