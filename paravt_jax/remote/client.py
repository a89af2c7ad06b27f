"""Client for OpenAI-compatible servers: chat completions with retries.

All clients of a process share one event loop in a daemon thread, so callers need no event loop of
their own, but may have one, as in notebooks. Requests can be cancelled at any point, and a process
ends without waiting for open requests.

A failed request returns a `Failure`. Neither failures nor exceptions show the API key.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import os
import random
import re
import threading
import urllib.parse
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal, TypeVar

import httpx2

from paravt_jax.method.judge import ServerSettings

# Upper bound on the bytes of a reply. A longer one is no chat completion and only fills memory.
_BODY_LIMIT = 4 << 20
# Upper bound on the characters that are kept of a server's own message.
_MESSAGE_LIMIT = 300
_RULE = "give an address such as http://localhost:8000/v1"
_HTML_TAG = re.compile("<[^<>]*>")
_SECONDS = re.compile(r"\d+(?:\.\d+)?", re.ASCII)

Answer = TypeVar("Answer")


@dataclasses.dataclass(frozen=True)
class Choice:
    """A chat completion: its text, why it ended, and what the server took out of the text."""

    text: str | None
    """None if the reply has none. Parts of a text are joined."""
    finish_reason: Any
    """The server's value, unchecked; so is the next one."""
    stop_reason: Any
    """The stop string that ended the text, if the server reports it (vLLM and SGLang do)."""
    thought: str = ""
    """Reasoning."""


class UnusableReply(Exception):
    """Raised by a caller's `read` if a completion cannot be used.

    Args:
        what: What is wrong with it.
        remedy: What to do about it; "" if the caller has a remedy for all such replies.
    """

    def __init__(self, what: str, remedy: str = ""):
        super().__init__(what)
        self.remedy = remedy


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a request has no answer."""

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
    """Seconds that the server asks to wait before the next attempt."""
    remedy: str = ""
    """What to do about it, if the reply tells."""


def check_address(field: str, address: str, key_place: str) -> None:
    """Check that an address is the base address of an API, without a secret in it.

    Args:
        field: Name of the setting, for the message.
        address: The address.
        key_place: Where a key belongs instead, for the message.

    Raises:
        ValueError: The address is not of this form. The message does not show an address that may
            contain a secret, because messages are logged.
    """
    if any(mark in address for mark in "@?#"):
        raise ValueError(
            f"{field}: the address (not shown here) has a user, a query or a fragment. These may "
            "be secret, and settings are logged; leave them out and put the key in "
            f"{key_place}"
        )
    if any(mark.isspace() or not mark.isprintable() for mark in address):
        raise ValueError(f"{field}: {address!r} has spaces or control characters; {_RULE}")
    try:
        url = urllib.parse.urlsplit(address)
        host = url.hostname or ""
        host.encode("idna")  # otherwise this fails only when the name is looked up
        _ = url.port  # raises if it is not a number
    except ValueError:  # UnicodeError is a ValueError
        raise ValueError(f"{field}: this is not an address; {_RULE}") from None
    if url.scheme not in ("http", "https") or not host:
        raise ValueError(f"{field}: {address!r} is not an http or https address; {_RULE}")
    if url.path.rstrip("/").endswith("/chat/completions"):
        raise ValueError(
            f"{field}: {address!r} ends in /chat/completions, which the client adds; {_RULE}",
        )


class Client:
    """Requests chat completions from one server.

    Args:
        settings: Address, key variable, time limits and number of attempts.
        draw: Returns a random number in [0, 1), which scales each wait.

    Raises:
        ValueError: The address cannot be used, or the environment contains a key or a proxy that
            cannot be used.
    """

    def __init__(self, settings: ServerSettings, draw: Callable[[], float] = random.random):
        key_place = f"the environment variable that {settings.name}.key_variable names"
        check_address(f"{settings.name}.endpoint", settings.endpoint, key_place)
        self._settings = settings
        self._draw = draw
        self._url = settings.endpoint.rstrip("/") + "/chat/completions"
        self._slots = asyncio.Semaphore(settings.concurrency)
        connections = settings.concurrency
        limits = httpx2.Limits(max_connections=connections, max_keepalive_connections=connections)
        # httpx would limit each read by itself, so a server that sends a byte now and then could
        # hold a request for ever. `_attempt` limits the request as a whole instead.
        self._http = httpx2.AsyncClient(limits=limits, timeout=None)
        # Fails early if the key cannot be used.
        self.key()

    def key(self) -> str | None:
        """Return the key from the environment, or None if there is none.

        Every request reads it again, so that a renewed key is used at once.

        Raises:
            ValueError: An HTTP header cannot contain the key. The message does not show it.
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
    ) -> Future[Answer | Failure]:
        """Request a chat completion, without waiting for it.

        Args:
            body: Fields of the request.
            read: Turns a completion into the answer. It runs on the shared event loop, so it has to
                be quick. If it raises `UnusableReply` the attempt fails; any other exception is
                raised by the future.
            deadline: Seconds for all attempts together, counted from the start of the first one.

        Returns:
            A future of the answer, or of the last attempt's failure. Cancel it to end the request.
        """
        answer = self._ask(json.dumps(body).encode(), self.key(), read, deadline)
        return asyncio.run_coroutine_threadsafe(answer, _event_loop())

    def close(self) -> None:
        """Close the connections in the background."""
        asyncio.run_coroutine_threadsafe(self._http.aclose(), _event_loop())

    async def _ask(
        self,
        content: bytes,
        key: str | None,
        read: Callable[[Choice], Answer],
        deadline: float | None,
    ) -> Answer | Failure:
        # Time in the queue does not count towards the deadline.
        async with self._slots:
            try:
                async with asyncio.timeout(deadline):
                    return await self._attempts(content, key, read)
            except TimeoutError:
                return Failure("deadline", f"no answer within {deadline} s", again=False)

    async def _attempts(
        self, content: bytes, key: str | None, read: Callable[[Choice], Answer]
    ) -> Answer | Failure:
        """Attempt until one succeeds, with random pauses whose bound doubles each time.

        The pause is drawn anew between 0 and its bound ("full jitter"): requests that failed
        together would otherwise come back together. It is added to what the server asks for.
        """
        settings = self._settings
        bound = settings.wait
        attempts_left = settings.attempts
        while True:
            outcome = await self._attempt(content, key, read)
            if not isinstance(outcome, Failure):
                return outcome
            attempts_left -= 1
            if not outcome.again or not attempts_left:
                return outcome
            pause = self._draw() * min(bound, settings.wait_limit)
            await asyncio.sleep(min(outcome.wait + pause, settings.wait_limit))
            bound *= 2

    async def _attempt(
        self, content: bytes, key: str | None, read: Callable[[Choice], Answer]
    ) -> Answer | Failure:
        """One request. Redirects are not followed, so that the key goes to the endpoint only."""
        # Uncompressed, because a few compressed bytes can expand to gigabytes. If a server
        # compresses all the same, the limit counts what the small pieces expand to.
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        timeout = self._settings.timeout
        body = b""
        try:
            async with (
                asyncio.timeout(timeout),
                self._http.stream("POST", self._url, content=content, headers=headers) as response,
            ):
                async for piece in response.aiter_bytes():
                    body += piece
                    if len(body) > _BODY_LIMIT:
                        return Failure("nonsense", f"the reply is longer than {_BODY_LIMIT} bytes")
        except TimeoutError:
            return Failure("timed_out", f"no reply within timeout = {timeout} s")
        except httpx2.HTTPError as error:
            # Only the type: the error's text may quote the request, and with it the key.
            return Failure("unreachable", f"the connection failed ({type(error).__name__})")
        if not response.is_success:
            return self._http_failure(response, _server_message(body, key))
        choice = _choice(body)
        if choice is None:
            what = "the reply is not a complete chat completion"
            return Failure("nonsense", what, _server_message(body, key))
        try:
            return read(choice)
        except UnusableReply as error:
            message = _server_message(body, key)
            return Failure("nonsense", str(error), message, remedy=error.remedy)

    def _http_failure(self, response: httpx2.Response, message: str) -> Failure:
        """The failure of a request whose status is not a success."""
        status = response.status_code
        # 408 (timeout), 429 (too many requests) and server errors may be temporary.
        again = status in (408, 429) or status >= 500
        wait = retry_after(response.headers.get("Retry-After"))
        limit = self._settings.wait_limit
        if again and wait > limit:
            again = False
            message += f" (it asks to wait {wait:,.0f} s, more than the limit of {limit:,.0f} s)"
        return Failure("http_errors", f"status {status}", message, status, again, wait)


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """The event loop of all clients. It runs in its own thread."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="remote-clients", daemon=True).start()
    return loop


def _choice(body: bytes) -> Choice | None:
    """The first choice of a chat completion; None if the body is something else."""
    try:
        choice = json.loads(body)["choices"][0]
        message = choice["message"]
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        return Choice(
            _joined(message.get("content")),
            choice.get("finish_reason"),
            choice.get("stop_reason"),
            _joined(reasoning) or "",
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def _joined(content: Any) -> str | None:
    """A content's text: as it is, or joined from its parts; None if it has none."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    parts = [part for part in content if isinstance(part, dict) and part.get("type") == "text"]
    texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
    return "".join(texts) if texts else None


def _server_message(body: bytes, key: str | None) -> str:
    """The server's own message in brackets and without the key; "" if there is none."""
    message = _message(body)
    if key:
        message = message.replace(key, "[the key]")
    return f" ({message[:_MESSAGE_LIMIT]})" if message else ""


def _message(body: bytes) -> str:
    """The message in a reply, on one line: a field of its JSON, or else its text without HTML."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    for field in ("error", "message", "detail"):
        if isinstance(found, dict) and field in found:
            found = found[field]
    text = found
    if not isinstance(text, str):
        text = _HTML_TAG.sub(" ", body.decode("utf-8", errors="replace"))
    # Control characters could move the cursor of the terminal that shows the message.
    printable = "".join(c if c.isprintable() else " " for c in text)
    return " ".join(printable.split())


def retry_after(header: str | None) -> float:
    """Return the seconds that a Retry-After header asks to wait; 0 if it is none or a date."""
    return float(header) if header and _SECONDS.fullmatch(header) else 0.0
