"""Exclusive use of a run in a bucket, where there are no locks.

The holder writes an object and renews it. Every write demands the generation that the object had
before, so of two processes only one succeeds. A process that finds the object watches it: if it is
not renewed for `LENGTH` seconds, the holder is dead or cut off, and the process takes over. It
measures with its own clock, so clocks of hosts need not agree. A holder that was cut off learns of
this at its next renewal, and its run ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid

from paravt_jax.data.stored_json import DamagedFileError, parse_json
from train.durable.bucket import ABSENT, Bucket, BucketError, ChangedError
from train.durable.run_directory import RunDirectoryError
from train.durable.step_lines import say

LENGTH = 60.0
"""Seconds without a renewal after which another process takes over."""
EVERY = 15.0
"""Seconds between two renewals."""

NAME = "in-use.json"
_LOOK = 2.0  # seconds between two looks at somebody else's lease


class LeaseError(RunDirectoryError):
    """Another process uses the run."""


class Lease:
    """Holds the lease until `close`.

    Args:
        bucket: The run.
        owner: Names what the kernel allows only one process to hold at a time, such as a locked
            folder. If the object was written by the same owner, that process is dead.

    Raises:
        LeaseError: Another process renews the lease.
        BucketError: The bucket cannot be written to.
    """

    def __init__(self, bucket: Bucket, owner: str):
        self._bucket = bucket
        # A renewal that takes longer would be too late.
        self._renewing = Bucket(bucket.address, patience=EVERY)
        self._content = json.dumps(
            {
                "holder": f"process {os.getpid()} on {socket.gethostname()}",
                "owner": owner,
                "id": uuid.uuid4().hex,
            }
        )
        self._generation = self._acquire(owner)
        self._renewed = time.monotonic()
        self._lost = ""
        # Renewals of the thread and of `require` must not meet.
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._renew_until_closed, daemon=True)
        self._thread.start()

    def require(self) -> None:
        """Raise LeaseError if another process has taken over.

        Raises:
            BucketError: The store cannot be reached to find out.
        """
        # A process that was frozen or cut off may not have noticed yet.
        if time.monotonic() - self._renewed > LENGTH - EVERY:
            self._renew(self._bucket)
        if self._lost:
            raise LeaseError(
                f"--run-dir {self._bucket.address} was taken over by {self._lost}, because this "
                f"process could not renew its lease for {LENGTH:.0f} s; let that one go on"
            )

    def close(self) -> None:
        """Gives the lease back."""
        self._closing.set()
        self._thread.join()
        if not self._lost:
            # ChangedError: taken over since the last renewal.
            try:
                self._renewing.delete(NAME, self._generation)
            except BucketError as error:
                say(f"warning: {error}; the next start waits up to {LENGTH:.0f} s")

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _acquire(self, owner: str) -> int:
        generation = ABSENT
        while True:
            try:
                return self._bucket.write(NAME, self._content, generation)
            except ChangedError:
                pass
            try:
                content, generation = self._bucket.read(NAME)
            except FileNotFoundError:
                generation = ABSENT
                continue
            if content == self._content.encode():
                # The answer to the write was lost, and the write was repeated.
                return generation
            found = self._parsed(content)
            if found["owner"] != owner:
                self._wait(found["holder"], generation)

    def _wait(self, holder: str, generation: int) -> None:
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
            try:
                _, now = self._bucket.read(NAME)
            except FileNotFoundError:
                return
            if now != generation:
                raise LeaseError(
                    f"--run-dir {address} is in use by {holder}: wait for it, stop it, or give "
                    "another --run-dir."
                )

    def _renew_until_closed(self) -> None:
        while not self._lost and not self._closing.wait(EVERY):
            # Perhaps the store can be reached the next time.
            with contextlib.suppress(OSError):
                self._renew(self._renewing)

    def _renew(self, bucket: Bucket) -> None:
        """Renew the lease, or notice that it is lost."""
        with self._lock:
            try:
                self._generation = bucket.write(NAME, self._content, self._generation)
            except ChangedError:
                self._look_who_changed_it(bucket)
            self._renewed = time.monotonic()

    def _look_who_changed_it(self, bucket: Bucket) -> None:
        try:
            content, generation = bucket.read(NAME)
        except FileNotFoundError:
            self._lost = "a process that has ended, or somebody who deleted the lease"
            return
        if content == self._content.encode():
            # The answer to a renewal was lost, and the renewal was repeated.
            self._generation = generation
        else:
            self._lost = self._parsed(content)["holder"]

    def _parsed(self, content: bytes) -> dict[str, str]:
        where = f"{self._bucket.address}/{NAME}"
        try:
            found = parse_json(content, where, dict[str, str], "delete it if no process uses it")
            return {"holder": found["holder"], "owner": found["owner"]}
        except (DamagedFileError, KeyError):
            # It ages like any other.
            return {"holder": "an unknown process", "owner": ""}
