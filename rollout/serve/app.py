"""The routes of the server, and the limits that hold for all of them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import hmac
import json
import logging
import pathlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

import prometheus_client
from starlette.applications import Starlette
from starlette.datastructures import Headers, UploadFile
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import (
    FileResponse,
    HTMLResponse,
    JSONResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout.report.episode_card import episode_page
from rollout.serve.chat import PLAIN, Chat, Exchange, read_request
from rollout.serve.errors import ApiError
from rollout.serve.files import KEPT, Files
from rollout.serve.guard import Guard
from rollout.serve.service import Service
from rollout.serve.tools import tools_app

_log = logging.getLogger(__name__)
T = TypeVar("T")
_PAGE = pathlib.Path(__file__).parent / "page"
_SECONDS_PER_CHUNK = 30.0  # a client that sends nothing for longer is gone
# The page's own files, and nothing of anybody else.
_POLICY = "default-src 'self'; img-src 'self' blob: data:; media-src 'self' blob:"


@dataclasses.dataclass(frozen=True)
class HttpLimits:
    """Limits of requests. Sizes are in bytes."""

    body: int
    """Upper bound on the body of a chat completion."""
    upload: int
    """Upper bound on the body of an upload."""
    bodies: int
    """Upper bound on all bodies that are being read, in memory and on disk."""


class BodyLimit:
    """Refuse bodies that are too large or too slow, while they arrive."""

    def __init__(self, app: ASGIApp, limits: HttpLimits):
        self.app = app
        self.limits = limits
        self.reading = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        is_upload = scope["path"] == "/v1/files"
        most = self.limits.upload if is_upload else self.limits.body
        declared = int(Headers(scope=scope).get("content-length", 0))
        size = 0
        whole = False
        too_large = ApiError(413, f"body: more than {most / 2**20:,.0f} MiB; send less")

        async def receive_limited() -> Message:
            nonlocal size, whole
            if whole:
                return await receive()
            if declared > most:
                raise too_large
            try:
                async with asyncio.timeout(_SECONDS_PER_CHUNK):
                    message = await receive()
            except TimeoutError:
                raise ApiError(408, "body: nothing arrived for 30 s; send it again") from None
            chunk = len(message.get("body", b""))
            whole = not message.get("more_body", False)
            size += chunk
            self.reading += chunk
            if size > most:
                raise too_large
            if self.reading > self.limits.bodies:
                raise ApiError(
                    429, "body: too many large requests at once; try again later", retry=5
                )
            return message

        try:
            await self.app(scope, receive_limited, send)
        finally:
            self.reading -= size


class Metrics:
    """Figures for Prometheus."""

    def __init__(self, service: Service):
        self.registry = prometheus_client.CollectorRegistry()
        self.refusals = prometheus_client.Counter(
            "paravt_refusals", "Requests that failed, by cause.", ["cause"], registry=self.registry
        )
        self.tokens = prometheus_client.Counter(
            "paravt_tokens", "Tokens by kind.", ["kind"], registry=self.registry
        )
        self.seconds = prometheus_client.Histogram(
            "paravt_answer_seconds",
            "Seconds from request to end.",
            registry=self.registry,
            buckets=(0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000),
        )
        for name, what, value in (
            ("paravt_playing", "Requests that are answered.", lambda: len(service.owner.playing)),
            ("paravt_waiting", "Requests in the queue.", lambda: len(service.owner.waiting)),
            ("paravt_ready", "Whether questions are answered.", lambda: service.is_ready),
        ):
            gauge = prometheus_client.Gauge(name, what, registry=self.registry)
            gauge.set_function(value)


class Server:
    """The routes over one `Service`.

    Args:
        service: The model.
        files: Videos and pictures of clients.
        chat: Answers chat completions.
        keys: Keys of clients; without any, none is asked for.
    """

    def __init__(self, service: Service, files: Files, chat: Chat, keys: Sequence[str] = ()):
        self.service = service
        self.files = files
        self.chat = chat
        self.keys = keys
        self.metrics = Metrics(service)
        self.tools = tools_app(chat, self.owner_of)

    def app(self, hosts: Sequence[str], limits: HttpLimits) -> Starlette:
        """Return the server as an ASGI application.

        Args:
            hosts: Names under which it is reached, besides those of loopback.
            limits: Limits of requests.
        """
        routes = [
            Route("/", self._page_file("index.html")),
            Route("/page.js", self._page_file("page.js")),
            Route("/page.css", self._page_file("page.css")),
            Route("/health", self._health),
            Route("/ready", self._ready),
            Route("/metrics", self._metrics),
            Route("/v1/models", self._models),
            Route("/v1/chat/completions", self._with_key(self._chat), methods=["POST"]),
            Route("/v1/files", self._with_key(self._upload), methods=["POST"]),
            Route("/v1/files/{id}", self._with_key(self._file), methods=["GET", "DELETE"]),
            Route("/v1/files/{id}/content", self._with_key(self._content)),
            Route("/v1/episodes/{id}.{form}", self._with_key(self._episode)),
            Route("/mcp", _WithKey(self.tools, self.owner_of)),
        ]
        return Starlette(
            routes=routes,
            middleware=[
                Middleware(Guard, hosts=hosts),
                Middleware(BodyLimit, limits=limits),
            ],
            exception_handlers={
                ApiError: self._refuse,
                HTTPException: self._refuse_http,
                ClientDisconnect: self._refuse_gone,
                Exception: self._fail,
            },
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self.service.start()
        expiry = asyncio.create_task(self._expire())
        try:
            async with self.tools.router.lifespan_context(self.tools):
                yield
        finally:
            expiry.cancel()
            await asyncio.to_thread(self.service.close)
            self.files.close()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(KEPT / 60)
            try:
                self.files.expire()
            except OSError:
                _log.exception("old uploads could not be deleted")

    # --- who asks ---

    def _with_key(
        self, handler: Callable[[Request, str], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Wrap a handler that needs a key. It gets the request, and who asks."""

        async def checked(request: Request) -> Response:
            return await handler(request, self.owner_of(request.headers.get("authorization", "")))

        return checked

    def owner_of(self, authorization: str) -> str:
        """Return who sends a header with this key.

        Raises:
            ApiError: The key is wrong or missing.
        """
        if not self.keys:
            return ""
        key = authorization.removeprefix("Bearer ").strip().encode()
        # All of them are compared, so that the time tells nothing.
        known = [hmac.compare_digest(key, other.encode()) for other in self.keys]
        if not any(known):
            message = "Authorization: no such key; send 'Bearer KEY' with one of this server's keys"
            raise ApiError(401, message, code="invalid_api_key")
        return hashlib.sha256(key).hexdigest()

    # --- routes ---

    def _page_file(self, name: str) -> Callable[[Request], Awaitable[Response]]:
        async def send(request: Request) -> Response:
            return FileResponse(_PAGE / name, headers={"Content-Security-Policy": _POLICY})

        return send

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        ready = self.service.is_ready
        failed = self.service.owner.failed
        status = "ready" if ready else "failed" if failed else "compiling"
        return JSONResponse({"status": status}, 200 if ready else 503)

    async def _metrics(self, request: Request) -> Response:
        text = prometheus_client.generate_latest(self.metrics.registry)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def _models(self, request: Request) -> Response:
        about = {"frames": self.service.settings.frames, "context": self.service.context}
        models = [
            {
                "id": name,
                "object": "model",
                "created": 0,
                "owned_by": "paravt",
                "max_model_len": self.service.context,
                "paravt": about,
            }
            # Evaluators that cannot name a model ask the first one.
            for name in (self.chat.name + PLAIN, self.chat.name)
        ]
        return JSONResponse({"object": "list", "data": models})

    async def _chat(self, request: Request, owner: str) -> Response:
        body = await request.body()
        # Large bodies take long, and others are served meanwhile.
        asked = await asyncio.to_thread(read_request, body)
        exchange = await _unless_gone(request, self.chat.begin(asked, owner))
        if asked.stream:
            return _Stream(self._stream(exchange), exchange)
        try:
            reply = await _unless_gone(request, exchange.reply())
        finally:
            exchange.cancel()
        self._count(exchange)
        return JSONResponse(reply)

    async def _stream(self, exchange: Exchange) -> AsyncIterator[str]:
        """Yield server-sent events."""
        try:
            async for chunk in exchange.chunks():
                yield f"data: {json.dumps(chunk)}\n\n"
            self._count(exchange)
            yield "data: [DONE]\n\n"
        except ApiError as error:
            self._note(error)
            yield f"data: {json.dumps(error.body())}\n\n"

    def _count(self, exchange: Exchange) -> None:
        for kind in ("prompt", "completion"):
            self.metrics.tokens.labels(kind).inc(exchange.usage[f"{kind}_tokens"])
        self.metrics.seconds.observe(time.monotonic() - exchange.begun)

    async def _upload(self, request: Request, owner: str) -> Response:
        async with request.form(max_files=1, max_fields=8) as form:
            file = form.get("file")
            if not isinstance(file, UploadFile):
                raise ApiError(400, "file: missing; send a form with the video as file")
            upload, info = await self.files.upload(file.file, file.filename or "video", owner)
        about = {"duration": info.duration, "width": info.width, "height": info.height}
        return JSONResponse(upload.about() | {"paravt": about})

    async def _file(self, request: Request, owner: str) -> Response:
        id = request.path_params["id"]
        if request.method == "GET":
            return JSONResponse(self.files.find(id, owner).about())
        self.files.delete(id, owner)
        return JSONResponse({"id": id, "object": "file", "deleted": True})

    async def _content(self, request: Request, owner: str) -> Response:
        upload = self.files.find(request.path_params["id"], owner)
        return FileResponse(upload.path, filename=upload.name)

    async def _episode(self, request: Request, owner: str) -> Response:
        kept = self.chat.find(request.path_params["id"], owner)
        record = self.service.record(kept.answer, kept.settings)
        if request.path_params["form"] == "json":
            return JSONResponse(record)
        if request.path_params["form"] != "html":
            raise ApiError(404, "episode: give .json or .html")
        record |= {"video": kept.answer.question.video}
        return HTMLResponse(await asyncio.to_thread(episode_page, pathlib.Path("/"), record))

    # --- errors ---

    async def _refuse(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        self._note(error)
        return JSONResponse(error.body(), error.status, error.headers)

    def _note(self, error: ApiError) -> None:
        self.metrics.refusals.labels(error.code or str(error.status)).inc()

    async def _refuse_http(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        refusal = ApiError(error.status_code, f"{request.url.path}: {error.detail}")
        return JSONResponse(refusal.body(), refusal.status)

    async def _refuse_gone(self, request: Request, error: Exception) -> Response:
        return await self._refuse(request, _gone())

    async def _fail(self, request: Request, error: Exception) -> Response:
        _log.error("a request failed", exc_info=error)
        failure = ApiError(500, f"the server failed ({type(error).__name__}); see its log")
        self._note(failure)
        return JSONResponse(failure.body(), 500)


class _WithKey:
    """An application for clients with a key."""

    def __init__(self, app: ASGIApp, owner_of: Callable[[str], str]):
        self.app = app
        self.owner_of = owner_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.owner_of(Headers(scope=scope).get("authorization", ""))
        await self.app(scope, receive, send)


class _Stream(StreamingResponse):
    """Server-sent events of an exchange, which ends when the client goes."""

    def __init__(self, events: AsyncIterator[str], exchange: Exchange):
        super().__init__(events, media_type="text/event-stream")
        self.exchange = exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            # Not in the generator, which never begins if the client has gone before.
            self.exchange.cancel()


async def _unless_gone(request: Request, reply: Awaitable[T]) -> T:
    """Wait for something, as long as the client does.

    Raises:
        ApiError: The client has closed its connection.
    """
    writing = asyncio.ensure_future(reply)
    leaving = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait((writing, leaving), return_when=asyncio.FIRST_COMPLETED)
        if writing.done():
            return writing.result()
        raise _gone()
    finally:
        writing.cancel()
        leaving.cancel()


def _gone() -> ApiError:
    return ApiError(499, "the client closed the connection")


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
