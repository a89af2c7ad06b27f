"""Chat completions from an OpenAI-compatible server, requested with the package `openai`.

All clients of a process share one event loop in a daemon thread, so callers need no event loop of
their own, but may have one, as in notebooks. Requests can be cancelled at any point, and a process
ends without waiting for open requests.

A failed request returns a `Failure`. Neither failures nor exceptions show the API key.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import os
import re
import threading
from concurrent.futures import Future
from typing import Any

import httpx2
import pydantic

from paravt_jax.method.judge import JudgeSettings

_log = logging.getLogger(__name__)
# Upper bound on the characters of a message with a server's words.
_TEXT_LIMIT = 300
# What to do about an HTTP status. About others, a server knows best.
_REMEDIES = {401: "; check the key", 404: "; check the address, up to /v1, and the model's name"}
_REMEDIES |= {429: "; send fewer requests at once"}
# Fields that some servers refuse, and the names to send instead; "" leaves a field out.
_OPTIONAL = {"max_tokens": "max_completion_tokens", "temperature": ""}
# How servers say that they did not finish a reply.
_BROKEN = re.compile("error|abort|cancel|failed|timeout|insufficient", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a request has no answer."""

    text: str
    """What happened, what to do, and the server's own message: one line, without the key."""


class Message(pydantic.BaseModel):
    """What a model wrote."""

    content: str | None = None


class Choice(pydantic.BaseModel):
    """A message, and the server's word for why it ended."""

    message: Message
    finish_reason: str | None = None


# Nothing, and nothing says why: an accident.
_EMPTY = Choice(message=Message(), finish_reason="stop")


class _Reply(pydantic.BaseModel):
    choices: list[Choice] = pydantic.Field(min_length=1)


class Client:
    """Requests chat completions from one server.

    An optional field that the server does not support, such as `temperature`, is left out or
    renamed in all further requests.

    Args:
        settings: Address, key variable, timeout, number of attempts and concurrency.

    Raises:
        ValueError: The environment contains a key or a proxy that cannot be used. The message does
            not show the key.
        ImportError: The package openai, or the one for a SOCKS proxy, is missing.
    """

    def __init__(self, settings: JudgeSettings):
        try:
            import openai  # takes a second, which commands without a server do not wait
        except ModuleNotFoundError as error:
            message = "judge: install openai with pip install -e '.[judge]'"
            raise ModuleNotFoundError(message) from error
        self._key = os.environ.get(settings.key_variable, "").strip() or "no-key"
        if not re.fullmatch("[!-~]*", self._key):
            wrong = "has spaces or characters beyond ASCII; set it to the key alone"
            raise ValueError(f"judge: the key in {settings.key_variable} {wrong}")
        # Redirects are not followed, so that the key goes to the endpoint only.
        http = httpx2.AsyncClient(
            timeout=settings.timeout,
            limits=httpx2.Limits(),
            event_hooks={"response": [_require_completion]},
        )
        self._server = openai.AsyncOpenAI(
            api_key=self._key,
            base_url=settings.endpoint,
            max_retries=settings.attempts - 1,
            http_client=http,
        )
        self._slots = asyncio.Semaphore(settings.concurrency)
        # The optional fields that the server does not support, and what to send instead.
        self._renamed: dict[str, str] = {}

    def ask(self, body: dict[str, Any]) -> Future[Choice | Failure]:
        """Request a chat completion, without waiting for it.

        Args:
            body: Fields of the request.

        Returns:
            A future of the reply, or of the last attempt's failure. Cancel it to end the request.
        """
        return asyncio.run_coroutine_threadsafe(self._ask(body), _event_loop())

    def close(self) -> None:
        """Close the connections in the background."""
        asyncio.run_coroutine_threadsafe(self._server.close(), _event_loop())

    async def _ask(self, body: dict[str, Any]) -> Choice | Failure:
        async with self._slots:
            return await self._complete(body)

    async def _complete(self, body: dict[str, Any]) -> Choice | Failure:
        import openai

        sent = {self._renamed.get(name, name): value for name, value in body.items()}
        sent.pop("", None)
        path = "/chat/completions"
        try:
            response = await self._server.post(path, cast_to=httpx2.Response, body=sent)
        except openai.APIStatusError as error:
            field, status = str(error.param), error.status_code
            if field in _OPTIONAL and field in sent and "unsupported" in (error.code or ""):
                self._renamed[field] = _OPTIONAL[field]
                _log.warning(
                    "%s: %s from now on", self._shown(str(error)), _OPTIONAL[field] or "left out"
                )
                return await self._complete(body)
            said = error.response.headers.get("Location", error.response.text)
            text = f"status {status}{_REMEDIES.get(status, '')}: {said}"
            return Failure(self._shown(text))
        except openai.APIConnectionError as error:
            text = f"no usable reply: {type(error.__cause__).__name__} {error.__cause__}"
            return Failure(self._shown(text))
        return _Reply.model_validate_json(response.content).choices[0]

    def _shown(self, text: str) -> str:
        """Return a server's words on one line, cut to a bound and without the key."""
        # Control characters could move the cursor of the terminal that shows the message.
        printable = "".join(c if c.isprintable() else " " for c in text)
        # JSON may write a key's "/" as "\/".
        line = " ".join(printable.split()).replace("\\/", "/")
        return line.replace(self._key, "[the key]")[:_TEXT_LIMIT]


async def _require_completion(response: httpx2.Response) -> None:
    """Read a reply; raise an error, after which `openai` asks again, if it cannot be used."""
    try:
        # httpx limits each read by itself, so a byte now and then could hold a request for ever.
        async with asyncio.timeout(response.request.extensions["timeout"]["read"]):
            body = await response.aread()
        if response.is_success:
            choice = _Reply.model_validate_json(body).choices[0]
            if choice == _EMPTY or _BROKEN.search(choice.finish_reason or ""):
                raise ValueError("another attempt may be better")
    except TimeoutError as error:
        raise httpx2.ReadTimeout("the reply did not end") from error
    except ValueError as error:
        message = f"not a complete chat completion: {response.text}"
        raise httpx2.DecodingError(message) from error


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all clients. It runs in its own thread."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="remote-clients", daemon=True).start()
    return loop
