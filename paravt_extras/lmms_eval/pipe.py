"""A subprocess under another interpreter that is asked in JSON lines.

Imports only the standard library, because both environments use it.
"""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]

# Lines of the process's stderr that are kept for error messages.
_KEPT_LINES = 20
# Seconds that a process gets to end by itself once its stdin is closed.
_GRACE = 10.0


class PipeError(RuntimeError):
    """The process cannot be started, or has ended; the message has its last words."""


class Pipe:
    """A running process: one JSON object per line to its stdin and from its stdout."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: str | os.PathLike | None = None,
        forward: bool = False,
    ):
        """Start the process.

        Args:
            command: the program and its arguments.
            environment: all of its environment variables.
            folder: its working directory.
            forward: whether its stderr is shown. The last lines are kept in any case.

        Raises:
            PipeError: it cannot be started.
        """
        self._words: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        self._forward = forward
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=dict(environment),
                cwd=folder,
            )
        except OSError as error:
            raise PipeError(str(error)) from error
        # Unread, a full pipe would block the process.
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def send(self, message: Message) -> None:
        """Send a message. Raises PipeError if the process has ended."""
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps(message).encode() + b"\n")
            stdin.flush()
        except OSError as error:
            raise self._ended() from error

    def receive(self, seconds: float | None = None) -> Message:
        """Wait for the next message.

        Args:
            seconds: time limit, after which the process is killed; None waits for ever.

        Raises:
            PipeError: the process has ended, took too long, or wrote something else.
        """
        stdout = self._process.stdout
        assert stdout is not None
        clock = threading.Timer(seconds, self._process.kill) if seconds is not None else None
        if clock:
            clock.start()
        try:
            line = stdout.readline()
        finally:
            if clock:
                clock.cancel()
        if not line.endswith(b"\n"):
            raise self._ended()
        try:
            message = json.loads(line)
        except ValueError as error:
            raise PipeError(f"it wrote {line[:200]!r}, which is not JSON") from error
        if not isinstance(message, dict):
            raise PipeError(f"it wrote {line[:200]!r}, which is not a JSON object")
        return message

    def close(self) -> None:
        """End the process: it ends by itself when its stdin does, and is killed if it does not."""
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            try:
                stream.close()
            except OSError:  # it ended before the last message was written
                pass
        try:
            self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.join(_GRACE)

    def _listen(self) -> None:
        stderr = self._process.stderr
        assert stderr is not None
        with stderr:
            for line in stderr:
                text = line.decode(errors="replace").rstrip()
                self._words.append(text)
                if self._forward:
                    print(text, file=sys.stderr, flush=True)

    def _ended(self) -> PipeError:
        """The error of a process that has ended, with its last line."""
        try:
            code = self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:  # it closed its stdout and goes on
            self._process.kill()
            code = self._process.wait()
        self._listener.join(_GRACE)
        words = [line for line in self._words if line.strip()]
        last = f": {words[-1].strip()}" if words else ""
        return PipeError(f"it ended with status {code}{last}")
