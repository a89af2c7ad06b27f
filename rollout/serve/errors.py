"""Errors of the server, as clients of OpenAI's API know them."""

from __future__ import annotations

import re
from typing import Any

from starlette.responses import JSONResponse, Response

_FIELD = re.compile(r"([\w.]+): ")


class ApiError(Exception):
    """A request that is refused, or an answer that failed.

    Args:
        status: HTTP status.
        message: What is wrong, and what to do: "field: value; rule and remedy".
        code: A word for programs.
        retry: Seconds after which the client may try again.
    """

    def __init__(self, status: int, message: str, code: str | None = None, retry: int = 0):
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = {"Retry-After": str(retry)} if retry else {}

    def body(self) -> dict[str, Any]:
        """Return the error as JSON values."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        field = _FIELD.match(str(self))
        param = field and field[1]
        return {"error": {"message": str(self), "type": kind, "param": param, "code": self.code}}

    def response(self) -> Response:
        """Return the error as a response."""
        return JSONResponse(self.body(), self.status, self.headers)
