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
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import httpx2

from paravt_jax.method.judge import ServerSettings

FIRST_WAIT = 1.0
"""Upper bound on the seconds before the second attempt. It doubles with each further attempt."""
LONGEST_WAIT = 60.0
"""Upper bound on the seconds that a server may ask to wait, and on those of a random pause."""

# Upper bound on the bytes of a reply. A longer one is no chat completion.
_BODY_LIMIT = 4 << 20
# Upper bound on the characters that are kept of a server's own message.
_MESSAGE_LIMIT = 300
_FEWER = "send fewer requests at once (--episodes, or the judge's concurrency)"
_ADDRESS = "check the address (up to and including /v1) and the model's name"
_KEY = "check the key and its permissions"
_LOG = "look into the server's log"
# What to do about an HTTP status; about others, look into the log.
_REMEDIES = {401: _KEY, 403: _KEY, 429: _FEWER}
_REMEDIES |= dict.fromkeys((301, 302, 303, 307, 308, 404), _ADDRESS)

Answer = TypeVar("Answer")


@dataclasses.dataclass(frozen=True)
class Choice:
    """A chat completion: its text, and why it ended."""

    text: str | None
    """None if the reply has none."""
    finish_reason: Any
    """The server's value, unchecked; so is the next one."""
    stop_reason: Any
    """The stop string that ended the text, if the server reports it (vLLM and SGLang do)."""
    parsed: bool = False
    """Whether the server took reasoning or tool calls out of the text."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a request has no answer."""

    text: str
    """What happened, with the server's own message in brackets, and what to do: one line, without
    the key."""
    status: int = 0
    """The HTTP status, if the server answered with an error."""
    late: bool = False
    """Whether the deadline of the request ended it."""
    wait: float = 0.0
    """Seconds that the server asks to wait before the next attempt."""

    @property
    def again(self) -> bool:
        """Whether another attempt may succeed."""
        # 408 (timeout), 429 (too many requests) and server errors may be temporary.
        return self.status in (0, 408, 429) or self.status >= 500


Read = Callable[[Choice], Answer | Failure]
"""Turns a completion into an answer, or says why it cannot be used. It runs on the shared event
loop, so it has to be quick."""


class Client:
    """Requests chat completions from one server.

    Args:
        settings: Address, key variable, time limits and number of attempts.

    Raises:
        ValueError: The environment contains a key or a proxy that cannot be used. The message does
            not show the key.
    """

    def __init__(self, settings: ServerSettings):
        self._settings = settings
        self._url = settings.endpoint.rstrip("/") + "/chat/completions"
        self._slots = asyncio.Semaphore(settings.concurrency)
        key = os.environ.get(settings.key_variable, "").strip()
        if not re.fullmatch("[!-~]*", key):
            raise ValueError(
                f"{settings.name}: the key in {settings.key_variable}, not shown here, has spaces "
                "or characters beyond ASCII; set it to the key alone"
            )
        # Uncompressed: a few bytes could become gigabytes.
        headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        # httpx would limit each read by itself, so a server that sends a byte now and then could
        # hold a request for ever. `_attempt` limits the request as a whole instead. Redirects are
        # not followed, so that the key goes to the endpoint only.
        self._http = httpx2.AsyncClient(headers=headers, limits=httpx2.Limits(), timeout=None)

    def ask(
        self, body: dict[str, Any], read: Read[Answer], deadline: float | None = None
    ) -> Future[Answer | Failure]:
        """Request a chat completion, without waiting for it.

        Args:
            body: Fields of the request.
            read: Reads a completion. The future raises its exceptions.
            deadline: Seconds for all attempts together, counted from the start of the first one.

        Returns:
            A future of the answer, or of the last attempt's failure. Cancel it to end the request.
        """
        # Escaped to ASCII: a text may hold half of a surrogate pair, which UTF-8 cannot.
        answer = self._ask(json.dumps(body).encode(), read, deadline)
        return asyncio.run_coroutine_threadsafe(answer, _event_loop())

    def close(self) -> None:
        """Close the connections in the background."""
        asyncio.run_coroutine_threadsafe(self._http.aclose(), _event_loop())

    async def _ask(
        self, content: bytes, read: Read[Answer], deadline: float | None
    ) -> Answer | Failure:
        # Time in the queue does not count towards the deadline.
        async with self._slots:
            try:
                async with asyncio.timeout(deadline):
                    return await self._attempts(content, read)
            except TimeoutError:
                return Failure(f"no answer within {deadline} s; allow more time", late=True)

    async def _attempts(self, content: bytes, read: Read[Answer]) -> Answer | Failure:
        """Attempt until one succeeds, with random pauses whose bound doubles each time.

        The pause is drawn anew between 0 and its bound ("full jitter"): requests that failed
        together would otherwise come back together. It is added to what the server asks for.
        """
        for number in range(self._settings.attempts - 1):
            outcome = await self._attempt(content, read)
            if not isinstance(outcome, Failure) or not outcome.again:
                return outcome
            pause = random.uniform(0, FIRST_WAIT * 2**number)
            await asyncio.sleep(min(outcome.wait, LONGEST_WAIT) + min(pause, LONGEST_WAIT))
        return await self._attempt(content, read)

    async def _attempt(self, content: bytes, read: Read[Answer]) -> Answer | Failure:
        """Make one request."""
        timeout = self._settings.timeout
        reply = b""
        try:
            async with (
                asyncio.timeout(timeout),
                self._http.stream("POST", self._url, content=content) as response,
            ):
                async for piece in response.aiter_bytes():
                    reply += piece
                    if len(reply) > _BODY_LIMIT:
                        return Failure(f"the reply is longer than {_BODY_LIMIT} bytes; {_ADDRESS}")
        except TimeoutError:
            return Failure(
                f"no reply within timeout = {timeout} s; {_LOG}, {_FEWER}, or raise the time limit "
                "(the judge's timeout)"
            )
        except httpx2.HTTPError as error:
            # Only the type: the error's text may quote the request, and with it the key.
            cause = type(error).__name__
            return Failure(
                f"the connection failed ({cause}); check the address, and that the server runs"
            )
        key = self._http.headers.get("Authorization", "").removeprefix("Bearer ")
        message = _server_message(reply, key)
        status = response.status_code
        if not response.is_success:
            asked = response.headers.get("Retry-After", "")  # seconds; a date is ignored
            wait = float(asked) if re.fullmatch(r"\d+(\.\d+)?", asked, re.ASCII) else 0.0
            remedy = _REMEDIES.get(status, _LOG)
            return Failure(f"status {status}{message}; {remedy}", status, wait=wait)
        choice = _choice(reply)
        if choice is None:
            return Failure(f"the reply is not a complete chat completion{message}; {_ADDRESS}")
        return read(choice)


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all clients. It runs in its own thread."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="remote-clients", daemon=True).start()
    return loop


def _choice(body: bytes) -> Choice | None:
    """Return the first choice of a chat completion; None if the body is something else."""
    try:
        choice = json.loads(body)["choices"][0]
        message = choice["message"]
        text = _joined(message.get("content"))
        parsed = any(map(message.get, ("reasoning_content", "reasoning", "tool_calls")))
        return Choice(text, choice.get("finish_reason"), choice.get("stop_reason"), parsed)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def _joined(content: Any) -> str | None:
    """Return a content's text, which may be a list of items; None if it has none."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    items = [item for item in content if isinstance(item, dict) and item.get("type") == "text"]
    texts = [item["text"] for item in items if isinstance(item.get("text"), str)]
    return "".join(texts) if texts else None


def _server_message(body: bytes, key: str) -> str:
    """Return what a server says in brackets, on one line and without the key; "" for nothing."""
    text = body.decode("utf-8", errors="replace")
    # Control characters could move the cursor of the terminal that shows the message.
    printable = "".join(c if c.isprintable() else " " for c in text)
    # JSON may write a key's "/" as "\/".
    message = " ".join(printable.split()).replace("\\/", "/")
    if key:
        message = message.replace(key, "[the key]")
    return f" ({message[:_MESSAGE_LIMIT]})" if message else ""
