"""A server with the interface of `rollout.serve` and one scripted episode, to test its page."""

from __future__ import annotations

import asyncio
import json
import pathlib
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

PAGE = pathlib.Path(__file__).parents[3] / "rollout" / "serve" / "page"
POLICY = "default-src 'self'; img-src 'self' blob: data:; media-src 'self' blob:"
MODELS = {"data": [{"id": "tiny", "paravt": {"frames": 16}}, {"id": "tiny/plain"}]}
INFO = {"duration": 4.0, "width": 64, "height": 32}
WINDOWS = [(0.5, 1.5), (1.0, 2.5), (2.0, 3.2)]
REPORTS = ["Only a <b>4</b>.", "It changes.", "A five, at the end."]
CALLS = [
    {"turn": 1, "call": call, "start": start, "end": end, "status": "executed", "text": report}
    for call, ((start, end), report) in enumerate(zip(WINDOWS, REPORTS, strict=True), 1)
]
EVIDENCE = {"start": 2.0, "end": 3.2, "report": REPORTS[2]}
END = {"stop": "answered", "evidence": [EVIDENCE], "episode": "ep-1"}


def _script(options: list[str], answer: str) -> Iterator[dict[str, Any]]:
    """Yield the chunks of an episode, and an empty one while the sub-agents look."""
    times = [0.25 * n for n in range(16)]
    yield {"paravt": {"event": "queued", "place": 2}}
    yield {"paravt": {"event": "overview", "times": times, "duration": 4.0}}
    yield {"choices": [{"delta": {"reasoning_content": "\n\nThe last digit is near the end."}}]}
    yield from ({"paravt": {**call, "event": "call"}} for call in CALLS)
    yield from ({"paravt": {**call, "event": "report.delta", "text": "Well"}} for call in CALLS)
    yield {}
    yield from ({"paravt": {**call, "event": "report"}} for call in CALLS)
    option = answer if answer in options else None
    yield {"paravt": {**END, "event": "answer", "answer": answer, "option": option}}
    yield {"choices": [], "usage": {"total_tokens": 5312}}


class ScriptedServer:
    """An application to serve, and what it has seen.

    Attributes:
        app: the application.
        address: where it is served.
        compiling: is set while the server is not ready.
        held: is set to make episodes wait while the sub-agents look.
        cancelled: is set when a client leaves an episode before its end.
        asked: the bodies of the questions.
        answer: what it answers.
    """

    def __init__(self) -> None:
        self.compiling, self.held, self.cancelled = (threading.Event() for _ in range(3))
        self.asked, self.address, self.answer = list[dict[str, Any]](), "", "5"
        index = FileResponse(PAGE / "index.html", headers={"Content-Security-Policy": POLICY})
        routes = [
            Route("/", lambda _: index),
            Route("/ready", self.readiness),
            Route("/v1/models", lambda _: JSONResponse(MODELS)),
            Route("/v1/files", self.upload, methods=["POST"]),
            Route("/v1/chat/completions", self.ask, methods=["POST"]),
            Mount("/", StaticFiles(directory=PAGE)),
        ]
        self.app = Starlette(routes=routes)

    def readiness(self, request: Request) -> Response:
        return JSONResponse({"status": "compiling"}, 503 if self.compiling.is_set() else 200)

    async def upload(self, request: Request) -> Response:
        name = (await request.form())["file"].filename  # type: ignore[union-attr]
        if name == "broken.mp4":
            return JSONResponse({"error": {"message": "broken.mp4 has no frames."}}, 422)
        return JSONResponse({"id": f"file-{name}", "paravt": INFO})

    async def ask(self, request: Request) -> Response:
        self.asked.append(await request.json())
        return StreamingResponse(self.stream(), media_type="text/event-stream")

    async def stream(self) -> AsyncIterator[str]:
        try:
            for chunk in _script(self.asked[-1]["paravt"].get("options", []), self.answer):
                yield f"data: {json.dumps(chunk)}\n\n"
                while not chunk and self.held.is_set():
                    await asyncio.sleep(0.02)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
