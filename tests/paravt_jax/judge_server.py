"""An HTTP server on this machine whose replies, good and bad, are given by a test."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


@dataclasses.dataclass(frozen=True)
class Reply:
    """The reply to one request, after `delay` seconds.

    `drip` sends it byte by byte; `close` closes the connection after the body, and without a reply
    if there is none.
    """

    body: bytes = b""
    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()
    delay: float = 0.0
    drip: float = 0.0
    close: bool = False


def says(
    text: Any, finish: Any = "stop", beside: Mapping[str, Any] | None = None, **fields: Any
) -> Reply:
    """A chat completion with this content, and other fields of its message beside it."""
    message = {"role": "assistant", "content": text, **(beside or {})}
    choice = {"message": message, "finish_reason": finish}
    return Reply(json.dumps({"choices": [choice]}).encode(), **fields)


@dataclasses.dataclass(frozen=True)
class Received:
    """One request: path, headers and JSON body. `texts` are the three texts the judge compares."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]

    @property
    def texts(self) -> dict[str, str]:
        return json.loads(self.body["messages"][-1]["content"])


class JudgeServer(ThreadingHTTPServer):
    """A server that replies to its n-th request with `answer(n, received)`.

    `most` is the largest number of requests at the same time.
    """

    daemon_threads = True
    block_on_close = False  # a request that stalls is left behind

    def __init__(self, answer: Callable[[int, Received], Reply]):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = answer
        self.received = list[Received]()
        self.times = list[float]()
        self.now = self.most = 0
        self.lock = threading.Lock()
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up on a stalled request is what these tests are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: JudgeServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        server = self.server
        received = Received(self.path, dict(self.headers), json.loads(body))
        with server.lock:
            number = len(server.received)
            server.received.append(received)
            server.times.append(time.monotonic())
            server.now += 1
            server.most = max(server.most, server.now)
        reply = server.answer(number, received)
        time.sleep(reply.delay)
        with server.lock:
            server.now -= 1
        self.close_connection = reply.close
        if reply.body or not reply.close:
            self._send(reply)

    def _send(self, reply: Reply) -> None:
        self.send_response(reply.status)
        for field in ({"Content-Length": str(len(reply.body))} | dict(reply.headers)).items():
            self.send_header(*field)
        self.end_headers()
        for start in range(len(reply.body)) if reply.drip else ():
            self.wfile.write(reply.body[start : start + 1])
            time.sleep(reply.drip)
        if not reply.drip:
            self.wfile.write(reply.body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on the terminal."""


@contextmanager
def serving(answer: Callable[[int, Received], Reply]) -> Iterator[JudgeServer]:
    """A server while the block runs. Skips the test if there is no client for it."""
    pytest.importorskip("openai")
    server = JudgeServer(answer)
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    )
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
