"""The same episodes as tools of MCP, for agents and IDEs."""

from __future__ import annotations

import asyncio
import io
import time
from typing import Any

import pydantic
from mcp.server.mcpserver import Context, Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.transport_security import TransportSecuritySettings
from PIL import Image as Picture
from starlette.applications import Starlette
from starlette.datastructures import State
from starlette.requests import Request

from paravt_jax.data.frames import ReadTask
from paravt_jax.method.records import CropCall, FailedCall
from paravt_jax.method.tools.crop_video import resolve_window
from rollout.ask import Answer
from rollout.serve.chat import Chat
from rollout.serve.chat_reply import EpisodeExchange, value_of
from rollout.serve.chat_request import ChatRequest, refusal
from rollout.serve.errors import ApiError
from rollout.serve.owner import Job, Result

_INSTRUCTIONS = (
    "Ask about a video, or look closer at one window of it. Name a video by the id of an upload "
    "(POST /v1/files), or by its path below the server's folder of videos."
)
_PAUSE = 1.0  # seconds between notes about a thought
_THUMBNAIL = 448  # pixels of the longer side


def tools_app(chat: Chat) -> Starlette:
    """Return an application with the route `/mcp`. The state of a request has its `client`."""
    server = _Server("paravt", instructions=_INSTRUCTIONS, log_level="ERROR")
    tools = _Tools(chat)
    for tool in (tools.ask_video, tools.crop_video):
        server.add_tool(tool)
    return server.streamable_http_app(
        stateless_http=True,
        # `Guard` checks hosts and origins of all routes.
        transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
    )


class _Server(MCPServer):
    """Tells an agent in a sentence why a call is refused."""

    async def call_tool(
        self, name: str, arguments: dict[str, Any], context: Context | None = None
    ) -> Any:
        try:
            return await super().call_tool(name, arguments, context)
        except ToolError as error:
            cause = error.__cause__
            if isinstance(cause, pydantic.ValidationError):
                cause = refusal(cause)
            if not isinstance(cause, ApiError):
                raise
            if context is not None:
                _state(context).status = cause.status
            raise ToolError(str(cause)) from cause


class _Tools:
    """The tools. Their docstrings are what agents read."""

    def __init__(self, chat: Chat):
        self._chat = chat

    async def ask_video(
        self,
        video: str,
        question: str,
        context: Context,
        options: list[str] | None = None,
        frames: int | None = None,
    ) -> dict[str, Any]:
        """Answer a question about a video: watch an overview, look closer at several moments side
        by side, and answer. The result has the answer, and the windows with what was seen there.

        Args:
            video: An uploaded video's id, or a path below the server's folder of videos.
            question: The question.
            options: Answers to choose from.
            frames: Number of overview frames; more see more, and take longer.
        """
        content = [
            {"type": "video_url", "video_url": {"url": video}},
            {"type": "text", "text": question},
        ]
        asked = {"frames": frames, "options": options or (), "trace": False}
        messages = [{"role": "user", "content": content}]
        body = {"model": self._chat.name, "messages": messages, "paravt": asked, "stream": True}
        request = ChatRequest.model_validate(body)
        exchange = await self._chat.begin(request, _state(context).client)
        assert isinstance(exchange, EpisodeExchange)
        answer = Answer(**vars(await self._value(exchange.job, context)))
        return exchange.paravt(answer, exchange.keep(answer))

    async def crop_video(
        self, video: str, start: float, end: float, context: Context
    ) -> list[str | Image]:
        """Look closer at one window of a video: a short report, and its frames.

        Args:
            video: An uploaded video's id, or a path below the server's folder of videos.
            start: Start of the window, in seconds.
            end: End of the window, in seconds.
        """
        files = self._chat.files
        path = await files.video(video, _state(context).client)
        info = await files.probe(path)
        look = resolve_window(CropCall(start, end), info.duration)
        if isinstance(look, FailedCall):
            raise ApiError(400, look.reason)
        job = self._chat.service.look(path, look.window)
        frames, report = await self._value(job, context)
        indices = tuple(frame.index for frame in frames)
        read = await files.read(ReadTask(str(path), indices, None))
        times = ", ".join(f"{frame.time:g}" for frame in frames)
        pictures = await asyncio.to_thread(lambda: [_picture(each) for each in read.frames])
        return [f"{report} {look.note}".strip(), f"Frames at {times} seconds:", *pictures]

    async def _value(self, job: Job, context: Context) -> Any:
        """Wait for a job, and report its progress. If the client cancels, so does the job."""
        try:
            count, heard, told = 0, "", time.monotonic()
            async for event in job.events():
                if isinstance(event, Result):
                    return value_of(event)
                heard += _line(event)
                growing = event["event"] == "thought" and time.monotonic() < told + _PAUSE
                if growing or not heard:
                    continue
                count += 1
                await context.report_progress(count, message=heard.strip())
                heard, told = "", time.monotonic()
        finally:
            self._chat.service.owner.cancel(job)


def _state(context: Context) -> State:
    """Return the state of the HTTP request of a call."""
    request = context.request_context.request
    assert isinstance(request, Request)
    return request.state


def _line(event: dict[str, Any]) -> str:
    """Return a line for an event, or what was thought. Reports are told when they are whole."""
    if event["event"] in ("thought", "report.delta"):
        return event["text"] if event["event"] == "thought" else ""
    window = f"{event['start']:g} to {event['end']:g} s" if event.get("end") else ""
    return f"\n{event['event']} {window} {event.get('text', '')}".rstrip()


def _picture(frame: Any) -> Image:
    """Return a frame for an agent to look at."""
    picture = Picture.fromarray(frame)
    picture.thumbnail((_THUMBNAIL, _THUMBNAIL))
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=80)
    return Image(data=buffer.getvalue(), format="jpeg")
