"""The routes of the server, and the limits that hold for all of them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import pathlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import anyio
import prometheus_client
import pydantic
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
from rollout.serve.chat import PLAIN, Chat
from rollout.serve.chat_reply import Exchange
from rollout.serve.chat_request import ChatRequest, refusal
from rollout.serve.errors import ApiError
from rollout.serve.files import KEPT
from rollout.serve.guard import Guard
from rollout.serve.service import Service
from rollout.serve.tools import tools_app

_log = logging.getLogger(__name__)
_PAGE = pathlib.Path(__file__).parent / "page"
_PATIENCE = 30.0  # seconds: a client that sends nothing for longer is gone
_SLOWEST = 2**20  # bytes per second in which the largest body has to arrive
_ERRORS = (ApiError, pydantic.ValidationError, HTTPException, ClientDisconnect, Exception)
# The page's own files, and nothing of anybody else.
_POLICY = "default-src 'self'; img-src 'self' blob: data:; media-src 'self' blob:"


class BodyLimit:
    """Refuse bodies that are too large or too slow, while they arrive.

    Args:
        app: Gets all other requests.
        body: Upper bound on a body, in bytes.
        upload: Upper bound on the body of an upload.
    """

    def __init__(self, app: ASGIApp, body: int, upload: int):
        self.app = app
        self.body = body
        self.upload = upload
        self.most = 2 * max(body, upload)  # bytes of all bodies together, in memory and on disk
        self.reading = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        is_upload = scope["path"] == "/v1/files"
        most = self.upload if is_upload else self.body
        declared = int(Headers(scope=scope).get("content-length", 0))
        size = 0
        whole = False
        too_large = ApiError(413, f"body: more than {most / 2**20:,.0f} MiB; send less")
        ends = time.monotonic() + _PATIENCE + most / _SLOWEST

        async def receive_limited() -> Message:
            nonlocal size, whole
            if whole:
                return await receive()
            if declared > most:
                raise too_large
            try:
                async with asyncio.timeout(min(_PATIENCE, ends - time.monotonic())):
                    message = await receive()
            except TimeoutError:
                message = f"body: a pause of {_PATIENCE:g} s, or too slow as a whole; send it again"
                error = ApiError(408, message)
                # What comes later is not waited for. Elsewhere, clients that send first and read
                # then would find no reply, but a closed connection.
                error.headers["Connection"] = "close"
                raise error from None
            chunk = len(message.get("body", b""))
            whole = not message.get("more_body", False)
            size += chunk
            self.reading += chunk
            if size > most:
                raise too_large
            if self.reading > self.most:
                raise ApiError(429, "body: too many large requests; try again later", retry=5)
            return message

        try:
            await self.app(scope, receive_limited, send)
        finally:
            self.reading -= size


class Requests:
    """Count all requests to an application, whoever answers them, and time them.

    A handler whose reply fails after its beginning sets `status` in the state of the request.
    """

    def __init__(self, app: ASGIApp, registry: prometheus_client.CollectorRegistry):
        self.app = app
        self.seconds = prometheus_client.Histogram(
            "paravt_request_seconds",
            "Seconds from a request to the end of its reply.",
            ["route", "status"],
            registry=registry,
            buckets=(0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun = time.monotonic()
        state = scope.setdefault("state", {})

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                state["status"] = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_noted)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            labels = self.seconds.labels(route, state.get("status", 499))
            labels.observe(time.monotonic() - begun)


class WithKey:
    """Let clients with a key in; `client` in the state of their requests says who they are.

    Args:
        app: Gets their requests.
        keys: The keys; without any, all come in.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]):
        self.app = app
        self.keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = Headers(scope=scope).get("authorization", "").removeprefix("Bearer ").strip().encode()
        # All of them are compared, so that the time tells nothing.
        known = [hmac.compare_digest(key, other.encode()) for other in self.keys]
        if self.keys and not any(known):
            message = "Authorization: no such key; send 'Bearer KEY' with one of this server's keys"
            raise ApiError(401, message, code="invalid_api_key")
        scope["state"]["client"] = hashlib.sha256(key).hexdigest() if self.keys else ""
        await self.app(scope, receive, send)


def _registry(service: Service) -> prometheus_client.CollectorRegistry:
    """Return figures of a service for Prometheus."""
    registry = prometheus_client.CollectorRegistry()
    owner, engine = service.owner, service.engine
    for name, what, value in (
        ("playing", "Questions that are being answered.", lambda: len(owner.playing)),
        ("waiting", "Questions that wait in the queue.", lambda: len(owner.waiting)),
        ("ready", "1 if questions are answered, else 0.", lambda: service.is_ready),
        ("computed_tokens", "Tokens of prompts computed so far.", lambda: engine.prefilled_tokens),
        ("cached_tokens", "Tokens of prompts found cached so far.", lambda: engine.reused_tokens),
        ("sampled_tokens", "Tokens sampled so far.", lambda: engine.sampled_tokens),
    ):
        prometheus_client.Gauge(f"paravt_{name}", what, registry=registry).set_function(value)
    return registry


class Server:
    """The routes.

    Args:
        chat: Answers chat completions, with its service and files.
        keys: Keys of clients; without any, none is asked for.
    """

    def __init__(self, chat: Chat, keys: Sequence[str] = ()):
        self.chat = chat
        self.service = chat.service
        self.files = chat.files
        self.keys = keys
        self.registry = _registry(chat.service)
        self.tools = tools_app(chat)
        # Reading the frames of a page takes long. Neither questions nor other pages wait for it.
        self.drawing = anyio.CapacityLimiter(1)

    def app(self, hosts: Sequence[str], body: int, upload: int) -> ASGIApp:
        """Return the server as an ASGI application.

        Args:
            hosts: Names under which it is reached, besides those of loopback.
            body: Upper bound on the body of a request, in bytes.
            upload: Upper bound on the body of an upload.
        """
        with_key = [Middleware(WithKey, keys=self.keys)]
        routes = [
            Route("/", _page_file("index.html")),
            Route("/page.js", _page_file("page.js")),
            Route("/page.css", _page_file("page.css")),
            Route("/health", self._health),
            Route("/ready", self._ready),
            Route("/metrics", lambda _: prometheus_client.make_asgi_app(self.registry)),
            Route("/v1/models", self._models),
            Route("/v1/chat/completions", self._chat, methods=["POST"], middleware=with_key),
            Route("/v1/files", self._upload, methods=["POST"], middleware=with_key),
            Route("/v1/files/{id}", self._file, methods=["GET", "DELETE"], middleware=with_key),
            Route("/v1/files/{id}/content", self._content, middleware=with_key),
            Route("/v1/episodes/{id}.html", self._episode, middleware=with_key),
            Route("/mcp", self._tools, methods=["GET", "POST", "DELETE"], middleware=with_key),
        ]
        app = Starlette(
            routes=routes,
            middleware=[Middleware(BodyLimit, body=body, upload=upload)],
            exception_handlers=dict.fromkeys(_ERRORS, _refuse),
            lifespan=self._lifespan,
        )
        return Requests(Guard(app, hosts), self.registry)

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

    # --- routes ---

    async def _health(self, request: Request) -> Response:
        failed = self.service.owner.ended
        return JSONResponse({"status": "failed" if failed else "ok"}, 503 if failed else 200)

    async def _ready(self, request: Request) -> Response:
        ready = self.service.is_ready
        failed = self.service.owner.ended
        status = "ready" if ready else "failed" if failed else "compiling"
        return JSONResponse({"status": status}, 200 if ready else 503)

    async def _models(self, request: Request) -> Response:
        paravt = {"frames": self.service.settings.frames, "context": self.service.context}
        models = [
            {
                "id": name,
                "object": "model",
                "created": 0,
                "owned_by": "paravt",
                "max_model_len": self.service.context,
                "paravt": paravt,
            }
            # Evaluators that cannot name a model ask the first one.
            for name in (self.chat.name + PLAIN, self.chat.name)
        ]
        return JSONResponse({"object": "list", "data": models})

    async def _chat(self, request: Request) -> Response:
        body = await request.body()
        # Large bodies take long, and others are served meanwhile.
        asked = await asyncio.to_thread(ChatRequest.model_validate_json, body)
        exchange = await _unless_gone(request, self.chat.begin(asked, request.state.client))
        if asked.stream:
            return _Stream(_events(request, exchange), exchange)
        try:
            return JSONResponse(await _unless_gone(request, exchange.reply()))
        finally:
            exchange.cancel()

    async def _upload(self, request: Request) -> Response:
        async with request.form(max_files=1, max_fields=8) as form:
            file = form.get("file")
            if not isinstance(file, UploadFile):
                raise ApiError(400, "file: missing; send a form with the video as file")
            name = file.filename or "video"
            upload, info = await self.files.upload(file.file, name, request.state.client)
        paravt = {"duration": info.duration, "width": info.width, "height": info.height}
        return JSONResponse(upload.as_json() | {"paravt": paravt})

    async def _file(self, request: Request) -> Response:
        id, client = request.path_params["id"], request.state.client
        if request.method == "GET":
            return JSONResponse(self.files.find(id, client).as_json())
        self.files.delete(id, client)
        return JSONResponse({"id": id, "object": "file", "deleted": True})

    async def _content(self, request: Request) -> Response:
        upload = self.files.find(request.path_params["id"], request.state.client)
        return FileResponse(upload.path, filename=upload.name)

    async def _tools(self, request: Request) -> ASGIApp:
        # MCP's application would answer and log the refusal of a body as a failure of its own.
        body: list[Message] = [{"type": "http.request", "body": await request.body()}]

        async def receive() -> Message:
            return body.pop() if body else await request.receive()

        return lambda scope, _, send: self.tools(scope, receive, send)

    async def _episode(self, request: Request) -> Response:
        kept = self.chat.episodes.find(request.path_params["id"], request.state.client)
        record = self.service.record(kept.answer, kept.settings)
        record |= {"video": kept.answer.question.video}
        page = await anyio.to_thread.run_sync(
            episode_page, pathlib.Path("/"), record, limiter=self.drawing
        )
        return HTMLResponse(page)


def _page_file(name: str) -> Callable[[Request], Response]:
    return lambda _: FileResponse(_PAGE / name, headers={"Content-Security-Policy": _POLICY})


async def _refuse(request: Request, error: Exception) -> Response:
    """Return an error as a response."""
    match error:
        case ApiError():
            return error.response()
        case pydantic.ValidationError():
            return refusal(error).response()
        case HTTPException():
            return ApiError(error.status_code, f"{request.url.path}: {error.detail}").response()
        case ClientDisconnect():
            return ApiError(499, "the client closed the connection").response()
    _log.error("a request failed", exc_info=error)
    return ApiError(500, f"the server failed ({type(error).__name__}); see its log").response()


async def _events(request: Request, exchange: Exchange) -> AsyncIterator[str]:
    """Yield server-sent events."""
    try:
        async for chunk in exchange.chunks():
            yield f"data: {json.dumps(chunk)}\n\n"
        yield "data: [DONE]\n\n"
    except ApiError as error:
        request.state.status = error.status
        yield f"data: {json.dumps(error.body())}\n\n"


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


async def _unless_gone(request: Request, reply: Awaitable[Any]) -> Any:
    """Wait for something, as long as the client does.

    Raises:
        ClientDisconnect: It has closed its connection.
    """
    writing = asyncio.ensure_future(reply)
    leaving = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait((writing, leaving), return_when=asyncio.FIRST_COMPLETED)
        if writing.done():
            return writing.result()
        raise ClientDisconnect
    finally:
        writing.cancel()
        leaving.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
