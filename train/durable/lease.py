"""Exclusive use of a run in a bucket, where there are no locks.

The holder writes an object and renews it: each time, it has another content. An object is created
by one process only. A process that finds it watches it: if it is not renewed for `LENGTH` seconds,
the holder is dead or cut off, and the process takes over. It measures with its own clock, so clocks
of hosts need not agree. A holder that was cut off learns of this at its next renewal, and its run
ends.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import uuid
from typing import Any

from paravt_jax.processes.exit_codes import UserError
from train.durable.bucket import named_errors, open_store
from train.durable.metrics import say

LENGTH = 60.0
"""Seconds without a renewal after which another process takes over."""
EVERY = 15.0
"""Seconds between two renewals."""

NAME = "in-use.txt"
_LOOK = 2.0  # seconds between two looks at somebody else's lease


class LeaseError(UserError):
    """Another process uses the run."""


class Lease:
    """Holds the lease until `close`.

    Args:
        address: The run, such as gs://bucket/run.

    Raises:
        LeaseError: Another process renews the lease.
        BucketError: The bucket cannot be written to.
    """

    def __init__(self, address: str):
        self._address = address
        self._file = f"{address}/{NAME}"
        with named_errors(self._file):
            store, top = open_store(address)
        # Any: the types of fsspec are wrong.
        self._store: Any = store
        self._path = f"{top}/{NAME}"
        # The id tells processes of equal containers apart.
        self._holder = f"process {os.getpid()} on {socket.gethostname()}, {uuid.uuid4().hex}"
        self._lost = False
        self._closing = threading.Event()
        self._write("create")
        while not self._is_mine():
            self._wait_for_other(self._read())
            self._write("create")
        self._thread = threading.Thread(target=self._renew_until_closed, daemon=True)
        self._thread.start()

    def require(self) -> None:
        """Raise LeaseError if another process has taken over.

        Raises:
            BucketError: The store cannot be reached to find out.
        """
        # A process that was frozen or cut off may not have noticed yet.
        self._renew()
        if self._lost:
            raise LeaseError(
                f"--run-dir {self._address} was taken over by {_name(self._read())}, because this "
                f"one could not renew its lease for {LENGTH:.0f} s; let that one go on"
            )

    def close(self) -> None:
        """Give the lease back. If the store cannot be reached, the next start waits."""
        self._closing.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            if self._is_mine():
                self._delete()

    def _wait_for_other(self, content: str) -> None:
        """Return when the lease of another process was given back, or was not renewed in time.

        Raises:
            LeaseError: It was renewed.
        """
        if not content:
            return
        say(
            f"{self._address} was last used by {_name(content)}, which did not say that it ended; "
            f"waiting up to {LENGTH:.0f} s for a sign of life"
        )
        end = time.monotonic() + LENGTH
        while (now := self._read()) == content:
            if time.monotonic() > end:
                self._delete()
                return
            time.sleep(_LOOK)
        if now:
            raise LeaseError(
                f"--run-dir {self._address} is in use by {_name(now)}: wait for it, stop it, or "
                "give another --run-dir."
            )

    def _renew_until_closed(self) -> None:
        while not self._lost and not self._closing.wait(EVERY):
            # Perhaps the store can be reached the next time.
            with contextlib.suppress(OSError):
                self._renew()

    def _renew(self) -> None:
        """Renew the lease, or notice that it is lost."""
        self._lost = not self._is_mine()
        if not self._lost:
            self._write("overwrite")

    def _is_mine(self) -> bool:
        return self._read().startswith(self._holder)

    def _write(self, mode: str) -> None:
        content = f"{self._holder}, renewed at {time.time()}".encode()
        # A write whose answer is lost is repeated, and then finds its own object.
        with named_errors(self._file), contextlib.suppress(FileExistsError):
            self._store.pipe_file(self._path, content, mode=mode)

    def _read(self) -> str:
        """Return the content of the lease; "" if there is none."""
        with named_errors(self._file):
            try:
                return self._store.cat_file(self._path).decode()
            except FileNotFoundError:
                return ""

    def _delete(self) -> None:
        with named_errors(self._file), contextlib.suppress(FileNotFoundError):
            self._store.rm_file(self._path)


def _name(content: str) -> str:
    """Return the process that a lease names."""
    return content.partition(",")[0] or "a process that has ended"
