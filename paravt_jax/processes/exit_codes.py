"""Why commands end: stops, errors that a user can mend, and exit codes.

`examples/supervise` decides by the codes what to start again.
"""

from __future__ import annotations

import errno
import os

FAILED = 1
"""Settings, data or files have to change first: the same command would fail again."""
LOST = 70
"""Contact with another process was lost, or the program failed in an unforeseen way."""
TEMPORARY = 75
"""A full disk, a store or network that does not answer, or a process that did not start in time."""


class UserError(Exception):
    """An error that a user can mend: its message names what is wrong, and what to do."""


class Stopped(BaseException):
    """The run stopped on request; the message says what was saved.

    It derives from BaseException, so that no `except Exception` on the way out takes it for an
    error. `code` is the exit code by shell convention, 128 + signal number: 130 for Ctrl-C, 143 for
    SIGTERM.
    """

    def __init__(self, number: int, kept: str):
        # Pickling an exception restores it from these arguments; it is sent to other processes.
        super().__init__(number, kept)
        self.code = 128 + number

    def __str__(self) -> str:
        return self.args[1]


USER_ERRORS = (UserError, ValueError, OSError, ImportError)
"""What a command prints in one line. Any other exception is a fault of the program."""

# Of disks and networks that may recover.
_TEMPORARY_ERRNOS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EIO,
    errno.ESTALE,
    errno.EHOSTUNREACH,
    errno.EHOSTDOWN,
    errno.ENETUNREACH,
    errno.ENETDOWN,
)


def stop_at_once(*_: object, line: str = "stopped; give the same command again") -> None:
    """Handle Ctrl-C while a command imports its modules: one line instead of a traceback."""
    os.write(2, f"\n{line}\n".encode())
    os._exit(130)


def one_line(error: BaseException) -> str:
    """Return an error on one line, with its end: TensorStore puts the cause after long paths."""
    line = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return line if len(line) <= 300 else f"{line[:100]} ... {line[-190:]}"


def exit_code(error: BaseException) -> int:
    """Return the exit code of a command that ends because of `error`.

    An error whose class sets `exit_code` ends with that code. Others end with the code of their
    cause.
    """
    cause: BaseException | None = error
    while cause is not None:
        code = getattr(cause, "exit_code", None)
        if code is not None:
            return code
        if isinstance(cause, ConnectionError | TimeoutError):
            return TEMPORARY
        if isinstance(cause, OSError) and cause.errno in _TEMPORARY_ERRNOS:
            return TEMPORARY
        cause = cause.__cause__
    return FAILED
