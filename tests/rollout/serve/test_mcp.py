"""The server as tools, through the official client."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from tests.rollout.serve.conftest import Running
from tests.rollout.serve.test_episodes import OPTIONS, TURNS
from tests.rollout.serve.test_files import raw

pytestmark = pytest.mark.anyio


@contextlib.asynccontextmanager
async def connected(running: Running, key: str = "alice") -> AsyncIterator[Client]:
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx2.AsyncClient(headers=headers, timeout=20) as http:
        async with Client(streamable_http_client(f"{running.url}/mcp", http_client=http)) as client:
            yield client


async def test_a_question_is_answered_with_progress(server, small_world):
    engine = server.service.engine
    engine.turns, engine.spoken = TURNS, 0
    told = []

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        told.append(message)

    asked = {"video": small_world.videos[0].path, "question": "Which?", "options": OPTIONS}
    async with connected(server) as client:
        tools = (await client.list_tools()).tools
        result = await client.call_tool("ask_video", asked, progress_callback=hear)
    assert {tool.name for tool in tools} == {"ask_video", "crop_video"}
    assert all("context" not in tool.input_schema["properties"] for tool in tools)
    found = result.structured_content
    assert (found["option"], found["stop"], len(found["evidence"])) == ("seven", "answered", 3)
    assert "report 8 to 16 s seven from 8 to 10" in told
    assert "first look\ncall 0 to 8 s" in told  # a thought is not told token by token


async def test_a_window_is_reported_with_its_frames(server, small_world):
    asked = {"video": small_world.videos[0].path, "start": 8, "end": 16}
    async with connected(server) as client:
        result = await client.call_tool("crop_video", asked)
    kinds = [part.type for part in result.content]
    assert kinds[:2] == ["text", "text"] and kinds[2:] == ["image"] * (len(kinds) - 2)
    assert "seven from 8 to 10" in str(result.content[0]) and len(kinds) > 4


@pytest.mark.parametrize("tool", ["ask_video", "crop_video"])
async def test_a_refusal_is_an_error_for_the_agent(server, tool):
    asked = {"video": "/etc/passwd"}
    asked |= {"question": "Which?"} if tool == "ask_video" else {"start": 0, "end": 1}
    async with connected(server) as client:
        result = await client.call_tool(tool, asked)
    assert result.is_error and 'text="video: ' in str(result.content)


async def test_a_wrong_argument_is_named_in_a_sentence(server):
    asked = {"video": "x.mp4", "question": "Which?", "frames": "many"}
    async with connected(server) as client:
        result = await client.call_tool("ask_video", asked)
    assert result.is_error
    assert "text=\"frames: 'many'" in str(result.content)


def test_a_body_that_is_refused_is_no_failure_of_the_server(server, monkeypatch, caplog):
    monkeypatch.setattr("rollout.serve.app._PATIENCE", 0.2)
    asked = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
    for size, status in (("100", b"408"), ("10000000", b"413")):
        reply = raw(server.url, "POST /mcp", asked | {"Content-Length": size}, b"{")
        assert reply.startswith(b"HTTP/1.1 " + status)
    assert not caplog.records
