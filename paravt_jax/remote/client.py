"""Client for OpenAI-compatible servers: chat completions with retries.

All clients of a process share one event loop in a daemon thread, so callers need no event loop of
their own, but may have one, as in notebooks. Requests can be cancelled at any point, and a process
ends without waiting for open requests.

A failed request returns a `Failure`. Neither failures nor exceptions show the API key.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import logging
import os
import random
import re
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import httpx2

from paravt_jax.method.judge import ServerSettings

_log = logging.getLogger(__name__)

FIRST_WAIT = 1.0
"""Upper bound on the seconds before the second attempt. It doubles with each further attempt."""
LONGEST_WAIT = 60.0
"""Upper bound on the seconds that a server may ask to wait, and on those of a random pause."""

# Upper bound on the bytes of a reply. A longer one is no chat completion.
_BODY_LIMIT = 4 << 20
# Upper bound on the characters that are kept of a server's own message.
_MESSAGE_LIMIT = 300
_FEWER = "send fewer requests at once"
_ADDRESS = "check the address (up to and including /v1) and the model's name"
_LOG = "look into the server's log"
# What to do about an HTTP status; about others, look into the log.
_REMEDIES = {413: "send fewer or smaller frames (--frames, --pixels)", 429: _FEWER}
_REMEDIES |= dict.fromkeys((401, 403), "check the key and its permissions")
_REMEDIES |= dict.fromkeys((301, 302, 303, 307, 308, 404), _ADDRESS)
REFUSALS = (400, 413, 422, 451)
"""HTTP statuses that refuse one request for its content. The server may accept the next one."""

# Fields that some servers refuse, and the names to send instead; "" leaves a field out.
_OPTIONAL = {"max_tokens": "max_completion_tokens", "temperature": "", "seed": "", "stop": ""}
# How servers say that they do not take a field, and that a request or a value is too large. In that
# case, they may also name the field with the limit.
_UNSUPPORTED = "(support|unknown|unrecogni[sz]ed|unexpected|extra|permitted|allowed|deprecated)"
_TOKENS = ("prompt_tokens", "completion_tokens")
_SECONDS = r"\d+(\.\d+)?(e-3)?"
_TOO_LARGE = "(context|too (long|large)|exceed|at most|maximum)"
# A quota that is used up, and a reply without choices and without an error, do not pass in seconds.
_LASTING = re.compile(rb'insufficient_quota|^(?!.*"error": ?[^n]).*"choices": ?null', re.DOTALL)

Answer = TypeVar("Answer")


@dataclasses.dataclass(frozen=True)
class Choice:
    """A chat completion: its text, what the server took out of the text, and why it ended."""

    text: str | None
    """None if the reply has none."""
    thought: str
    calls: list[Any]
    """Unchecked."""
    finish_reason: str | None
    """The server's value, or the model's refusal."""
    counts: Mapping[str, int]
    """1 under the name of the model that replied, and the numbers of tokens, if given."""


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
    again: bool = True
    """Whether another attempt may succeed."""


Read = Callable[[Choice], Answer | Failure]
"""Turns a completion into an answer, or says why it cannot be used. It runs on the shared event
loop, so it has to be quick."""


class Client:
    """Requests chat completions from one server.

    An optional field for which the server refuses a request, such as `temperature`, is left out or
    renamed. Once a request has succeeded that way, all requests are sent so.

    Args:
        settings: Address, key variable, time limits and number of attempts.

    Raises:
        ValueError: The environment contains a key or a proxy that cannot be used. The message does
            not show the key.
        ImportError: The package for a SOCKS proxy is missing.
    """

    def __init__(self, settings: ServerSettings):
        self._settings = settings
        # Optional fields without which the server answers, and with which it does not.
        self._refused: set[str] = set()
        # What `report` returns: since the start, and until the last report.
        self._counts: Counter[str] = Counter()
        self._reported: Counter[str] = Counter()
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
        answer = self._ask(_encode(body, self._refused), read, deadline)
        return asyncio.run_coroutine_threadsafe(answer, _event_loop())

    def close(self) -> None:
        """Close the connections in the background."""
        asyncio.run_coroutine_threadsafe(self._http.aclose(), _event_loop())

    def report(self) -> Counter[str]:
        """Return what replies since the last report have said, after the name of the settings.

        Returns:
            The number of replies of each model, under its name in the reply; of tokens, as far as
            the server gives them; and 1 for each field that was renamed or left out.
        """
        counts = Counter(self._counts)
        new, self._reported = counts - self._reported, counts
        return Counter({f"{self._settings.name} {what}": count for what, count in new.items()})

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

    async def _attempt(self, content: bytes, read: Read[Answer], *refused: str) -> Answer | Failure:
        """Make one request, and another one without the fields that the server refuses.

        Args:
            content: The request.
            read: Reads a completion.
            refused: Fields that have been left out or renamed in the request.
        """
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
            return Failure(f"no reply within {timeout} s; {_LOG}, or {_FEWER}")
        except httpx2.HTTPError as error:
            # Only the type: the error's text may quote the request, and with it the key.
            cause = type(error).__name__
            return Failure(f"the connection failed ({cause}); check the address and the server")
        key = self._http.headers.get("Authorization", "").removeprefix("Bearer ")
        # A redirect says where to.
        message = _server_message(response.headers.get("Location", "").encode() or reply, key)
        status = response.status_code
        if status in (400, 422) and (fields := _refused_fields(content, reply)):
            changed = _encode(json.loads(content), fields)
            return await self._attempt(changed, read, *refused, *fields)
        # 408 (timeout), 409 (conflict), 425 (too early), 429 (too many requests) and server errors
        # may be temporary, and so may a broken reply.
        temporary = response.is_success or status in (408, 409, 425, 429) or status >= 500
        again = temporary and not _LASTING.search(reply)
        if not response.is_success:
            headers = response.headers
            # A date is ignored.
            asked = (headers.get("retry-after-ms", "") + "e-3", headers.get("retry-after", ""))
            waits = [float(each) for each in asked if re.fullmatch(_SECONDS, each, re.ASCII)]
            # A server knows best why it refuses a request.
            own = message and (status in (400, 422, 451) or (status == 429 and not again))
            text = f"status {status}{message}" + ("" if own else f"; {_REMEDIES.get(status, _LOG)}")
            return Failure(text, status, wait=max(waits, default=0), again=again)
        choice = _choice(reply, key)
        if choice is None:
            text = f"the reply is not a complete chat completion{message}; {_ADDRESS}"
            return Failure(text, again=again)
        for field in sorted(set(refused) - self._refused):
            self._counts[f"{field}: {_OPTIONAL[field] or 'left out'}"] += 1
            _log.warning("%s refuses %s: it is left out or renamed", self._settings.endpoint, field)
        self._refused.update(refused)
        self._counts.update(choice.counts)
        return read(choice)


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all clients. It runs in its own thread."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="remote-clients", daemon=True).start()
    return loop


def _encode(body: Mapping[str, Any], refused: Collection[str]) -> bytes:
    """Return a request; fields that the server refuses are left out or renamed."""
    names = {name: _OPTIONAL[name] if name in refused else name for name in body}
    # Escaped to ASCII: a text may hold half of a surrogate pair, which UTF-8 cannot.
    return json.dumps({new: body[name] for name, new in names.items() if new}).encode()


def _refused_fields(content: bytes, reply: bytes) -> set[str]:
    """Return the optional fields of a request that a refusal names as unsupported."""
    refusal = reply.decode("utf-8", errors="replace")
    # Quoted or beside a colon: "stop" is also an English word. With a value after it, a name in
    # quotes is part of the request, which some servers repeat.
    named = r"""(["'`]FIELD\\?["'`](?!: ?["'\[\d])|: FIELD\b|\bFIELD: )"""
    near = f"(?is)(?!.*{_TOO_LARGE}).*({_UNSUPPORTED}.{{,40}}{named}|{named}.{{,40}}{_UNSUPPORTED})"
    fields = json.loads(content).keys() & _OPTIONAL.keys()
    return {field for field in fields if re.match(near.replace("FIELD", field), refusal)}


def _choice(body: bytes, key: str) -> Choice | None:
    """Return the first choice of a chat completion; None if the body is something else."""
    try:
        reply = json.loads(body)
        choice = reply["choices"][0]
        message = choice["message"]
        content, refusal = message.get("content"), message.get("refusal")
        # `function_call` is an older name.
        calls = message.get("tool_calls") or filter(None, [message.get("function_call")])
        thinking = [part.get("thinking") for part in content or () if isinstance(part, dict)]
        thought = message.get("reasoning_content") or message.get("reasoning") or thinking
        usage = reply["usage"] if isinstance(reply.get("usage"), dict) else {}
        counts = {name: usage.get(name) for name in _TOKENS}
        if reply.get("model"):
            counts[f"model {_shown(str(reply['model']), key)}"] = 1
        ended = f"refusal: {refusal}" if refusal else choice.get("finish_reason")
        return Choice(
            _joined(content),
            _joined(thought) or "",
            list(calls),
            None if ended is None else _shown(str(ended), key),
            {name: count for name, count in counts.items() if isinstance(count, int)},
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def _joined(content: Any) -> str | None:
    """Return a text, which may be in parts; None if there is none."""
    if isinstance(content, list):
        texts = [text for text in map(_joined, content) if text is not None]
        return "".join(texts) if texts else None
    if isinstance(content, dict) and content.get("type") in ("text", "output_text"):
        content = content.get("text")
    return content if isinstance(content, str) else None


def _server_message(body: bytes, key: str) -> str:
    """Return what a server says, in brackets; "" for nothing."""
    text = body.decode("utf-8", errors="replace")
    with contextlib.suppress(ValueError, AttributeError, RecursionError):
        content = json.loads(text)
        error = content.get("error", content)
        # `metadata` is what a server behind this one says.
        said = [error.get(name) for name in ("message", "detail", "metadata")]
        text = "; ".join(str(one) for one in said if one) or text
    message = _shown(text, key)
    return f" ({message})" if message else ""


def _shown(text: str, key: str) -> str:
    """Return a server's text on one line, cut to its bound and without the key."""
    # Control characters could move the cursor of the terminal that shows the message.
    printable = "".join(c if c.isprintable() else " " for c in text)
    # JSON may write a key's "/" as "\/".
    message = " ".join(printable.split()).replace("\\/", "/")
    if key:
        message = message.replace(key, "[the key]")
    return message[:_MESSAGE_LIMIT]
