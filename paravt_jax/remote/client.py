"""Client for OpenAI-compatible servers: chat completions with retries.

Every client of the process runs on one event loop in a daemon thread. So callers need no event loop
(and may have one, as notebooks do), a request can be cancelled at any point, and the end of a run
does not wait for open requests. What goes wrong with a request is returned as a `Failure`. Neither
failures nor errors show the key.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import email.utils
import functools
import json
import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal, TypeVar

import httpx2

from paravt_jax.method.server import ServerSettings

_BODY_LIMIT = 4 << 20  # bytes of a reply
_SHOWN = 300  # characters of a server's own message
_TAG = re.compile("<[^<>]*>")

Answer = TypeVar("Answer")


@dataclasses.dataclass(frozen=True)
class Choice:
    """A chat completion: its text and why it ended, each as the server gave it."""

    text: Any
    finish_reason: Any
    stop_reason: Any
    """The stop string that ended it, where the server says so (vLLM, SGLang)."""


class UnusableReply(Exception):
    """Raised by a caller's `read` for a completion that is not what was asked for."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """A request without an answer."""

    kind: Literal["timed_out", "unreachable", "http_errors", "nonsense", "deadline"]
    what: str
    """What happened, on one line and without the key."""
    server_message: str = ""
    """The server's own message in brackets, on one line and without the key."""
    status: int = 0
    """The HTTP status, for `http_errors`."""
    again: bool = True
    """Whether another attempt may succeed."""
    wait: float = 0.0
    """Seconds that the server asks to wait before it."""


class Client:
    """Asks one server for chat completions."""

    def __init__(self, settings: ServerSettings):
        """Raises ValueError for a key or a proxy in the environment that cannot be used."""
        self._settings = settings
        self._url = settings.endpoint.rstrip("/") + "/chat/completions"
        self._places = asyncio.Semaphore(settings.concurrency)
        connections = settings.concurrency
        limits = httpx2.Limits(max_connections=connections, max_keepalive_connections=connections)
        # No timeout here: httpx times each read, `_attempt` the request as a whole.
        self._http = httpx2.AsyncClient(limits=limits, timeout=None)
        self.key()

    def key(self) -> str | None:
        """The key, read from the environment anew; None where there is none.

        Raises ValueError, which does not show it, for a key that no header can carry.
        """
        variable = self._settings.key_variable
        key = os.environ.get(variable, "").strip() if variable else ""
        if not re.fullmatch("[!-~]*", key):
            raise ValueError(
                f"{variable}: its value, not shown here, has spaces or characters beyond ASCII; "
                "set it to the key alone"
            )
        return key or None

    def ask(
        self,
        body: dict[str, Any],
        read: Callable[[Choice], Answer],
        deadline: float | None = None,
        failures: list[Failure] | None = None,
    ) -> Future[Answer | Failure]:
        """Requests a chat completion; returns at once.

        Args:
            body: The request's fields.
            read: Makes the answer out of a completion. It runs on the event loop, so it must be
                quick. `UnusableReply` fails the attempt; other errors are raised by the future.
            deadline: Seconds for all attempts together, from the first one on.
            failures: The failed attempts are added to this list, as they occur.

        Returns:
            The answer, or the last attempt's failure. Cancelling the future ends the request.
        """
        content, key = json.dumps(body).encode(), self.key()
        failures = [] if failures is None else failures
        answer = self._ask(content, key, read, deadline, failures)
        return asyncio.run_coroutine_threadsafe(answer, _event_loop())

    def close(self) -> None:
        """Closes the connections, without waiting for that."""
        asyncio.run_coroutine_threadsafe(self._http.aclose(), _event_loop())

    async def _ask(
        self,
        content: bytes,
        key: str | None,
        read: Callable[[Choice], Answer],
        deadline: float | None,
        failures: list[Failure],
    ) -> Answer | Failure:
        settings = self._settings
        pause, left = settings.wait, settings.attempts
        async with self._places:
            try:
                async with asyncio.timeout(deadline):
                    while True:
                        found = await self._attempt(content, key, read)
                        if not isinstance(found, Failure):
                            return found
                        failures.append(found)
                        left -= 1
                        if not found.again or not left:
                            return found
                        await asyncio.sleep(min(max(pause, found.wait), settings.wait_limit))
                        pause *= 2
            except TimeoutError:
                return Failure("deadline", f"no answer within {deadline} s", again=False)

    async def _attempt(
        self, content: bytes, key: str | None, read: Callable[[Choice], Answer]
    ) -> Answer | Failure:
        """One request. Redirects are not followed: the key goes to the address alone."""
        # Compressed, a small body could become a huge one.
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        timeout, body = self._settings.timeout, b""
        try:
            async with (
                asyncio.timeout(timeout),
                self._http.stream("POST", self._url, content=content, headers=headers) as response,
            ):
                async for piece in response.aiter_raw():
                    body += piece
                    if len(body) > _BODY_LIMIT:
                        return Failure("nonsense", f"the reply is longer than {_BODY_LIMIT} bytes")
        except TimeoutError:
            return Failure("timed_out", f"no reply within timeout = {timeout} s")
        except httpx2.HTTPError as error:  # its text may quote what was sent
            return Failure("unreachable", f"the connection failed ({type(error).__name__})")
        if not response.is_success:
            status = response.status_code
            again = status in (408, 429) or status >= 500
            pause = retry_after(response.headers.get("Retry-After"), response.headers.get("Date"))
            message = _server_message(body, key)
            return Failure("http_errors", f"status {status}", message, status, again, pause)
        choice = _choice(body)
        if choice is None:
            what = "the reply is not a complete chat completion"
            return Failure("nonsense", what, _server_message(body, key))
        try:
            return read(choice)
        except UnusableReply as error:
            return Failure("nonsense", str(error), _server_message(body, key))


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """The event loop of all clients, in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="remote-clients", daemon=True).start()
    return loop


def _choice(body: bytes) -> Choice | None:
    """The first choice of a chat completion; None where the body is none."""
    try:
        choice = json.loads(body)["choices"][0]
        text = choice["message"]["content"]
        return Choice(text, choice.get("finish_reason"), choice.get("stop_reason"))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def _server_message(body: bytes, key: str | None) -> str:
    """The server's own message in brackets, without the key; "" where there is none."""
    message = _message(body)
    if key:
        message = message.replace(key, "[the key]")
    return f" ({message[:_SHOWN]})" if message else ""


def _message(body: bytes) -> str:
    """The message in a body, on one line: a field of its JSON, or the text of a page."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    for field in ("error", "message", "detail"):
        if isinstance(found, dict) and field in found:
            found = found[field]
    text = found
    if not isinstance(text, str):
        text = _TAG.sub(" ", body.decode("utf-8", errors="replace"))
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def retry_after(header: str | None, date: str | None = None) -> float:
    """Seconds to wait by a server's Retry-After header; 0 where it is missing or unreadable.

    A Retry-After may be a date. It is compared with `date`, the Date header of the same reply, so
    that only the server's clock matters; without a Date header the wait is 0.
    """
    if not header:
        return 0.0
    if re.fullmatch(r"\d{1,9}(?:\.\d{1,9})?", header, re.ASCII):
        return float(header)
    until, now = _date(header), _date(date or "")
    return max(0.0, (until - now).total_seconds()) if until and now else 0.0


def _date(text: str) -> datetime.datetime | None:
    try:
        found = email.utils.parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return None
    return found if found.tzinfo else found.replace(tzinfo=datetime.UTC)
