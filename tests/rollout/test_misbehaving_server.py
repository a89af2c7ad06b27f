"""An evaluation against a server that misbehaves as servers and proxies do.

It answers each question only after one of the faults in `FAULTS`: errors with and without
Retry-After, proxies' pages, broken and endless bodies, closed connections, refusals.
"""

from __future__ import annotations

import contextlib
import dataclasses
import email.utils
import gzip
import json
import pathlib
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from models.family import family
from models.weights.hf_config import to_hf
from paravt_jax.data import tokenizer_file
from paravt_jax.method.protocol import ProtocolSettings
from paravt_jax.world.vocabulary import build_vocabulary
from rollout.evaluation.folder import latest, read_lines
from rollout.evaluation.run import evaluate
from rollout.evaluation.settings import BenchmarkSettings

# Time limit of a request. Faults that stall take longer.
REQUEST_SECONDS = 2.0
_STALL = 2.5 * REQUEST_SECONDS
_QUESTION = re.compile(r"Question (\d+)\b")
_PROXY_PAGE = b"<html><head><title>502</title></head><body><h1>Bad gateway</h1></body></html>"


@dataclasses.dataclass(frozen=True)
class Fault:
    """A way to misbehave, once per question unless it is `lasting`."""

    send: Callable[[_Handler], None]
    answers: bool = False
    """Whether the reply contains the answer nevertheless."""
    lasting: str = ""
    """How a question ends that always gets this reply: "refused", or "" for none."""


def completion(text: str | list[dict[str, str]] | None, finish: str | None = "stop") -> bytes:
    """The body of a chat completion."""
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": finish}
    return json.dumps({"choices": [choice]}).encode()


ANSWER = "I see it.\n</think>\n<answer>B</answer>"


def _replies(body: bytes, status: int = 200, **headers: str) -> Callable[[_Handler], None]:
    """A fault that sends a whole reply. `_` in names of headers stands for "-"."""
    return lambda handler: handler.reply(body, status, headers)


def _error(status: int, message: str, **headers: str) -> Callable[[_Handler], None]:
    return _replies(json.dumps({"error": {"message": message}}).encode(), status, **headers)


def _retry_at_date(handler: _Handler) -> None:
    until = email.utils.formatdate(time.time() + 1, usegmt=True)
    handler.reply(b'{"error": "busy"}', 429, {"Retry-After": until})


def _close(handler: _Handler) -> None:
    handler.close_connection = True


def _reset(handler: _Handler) -> None:
    # With no time to linger, closing sends a reset instead of an orderly end.
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()
    handler.close_connection = True


def _half_a_body(handler: _Handler) -> None:
    """Promises more bytes than it sends."""
    body = completion(ANSWER)
    handler.head(200, len(body), {})
    handler.wfile.write(body[: len(body) // 2])
    handler.close_connection = True


def _drip(handler: _Handler) -> None:
    """Sends a byte now and then, so that no single wait is long."""
    body = completion(ANSWER)
    handler.head(200, len(body), {})
    start = time.monotonic()
    for byte in body:
        if time.monotonic() - start > _STALL:
            break
        handler.wfile.write(bytes([byte]))
        handler.wfile.flush()
        time.sleep(_STALL / 20)
    handler.close_connection = True


def _hang(handler: _Handler) -> None:
    time.sleep(_STALL)
    handler.close_connection = True


FAULTS: dict[str, Fault] = {
    "none": Fault(_replies(completion(ANSWER)), answers=True),
    "429, Retry-After in seconds": Fault(_error(429, "slow down", Retry_After="0.2")),
    "429, Retry-After as a date": Fault(_retry_at_date),
    "429 alone": Fault(_error(429, "slow down")),
    "408": Fault(_error(408, "too slow")),
    "500": Fault(_error(500, "out of memory")),
    "502, a proxy's page": Fault(_replies(_PROXY_PAGE, 502, Content_Type="text/html")),
    "503, Retry-After": Fault(_error(503, "loading the model", Retry_After="0.1")),
    "504, no body": Fault(_replies(b"", 504)),
    "a proxy's page with status 200": Fault(_replies(_PROXY_PAGE, 200, Content_Type="text/html")),
    "truncated JSON": Fault(_replies(completion(ANSWER)[:-20])),
    "half of the promised body": Fault(_half_a_body),
    "empty body": Fault(_replies(b"")),
    "slow drip": Fault(_drip),
    "no reply": Fault(_hang),
    "closed without a reply": Fault(_close),
    "reset": Fault(_reset),
    "no choices": Fault(_replies(b'{"choices": []}')),
    "null content": Fault(_replies(completion(None))),
    "no finish reason": Fault(_replies(completion(ANSWER, None))),
    "huge body": Fault(_replies(completion("x" * (5 << 20)))),
    "invalid UTF-8": Fault(_replies(completion("abc").replace(b"abc", b"\xff\xfe"))),
    "redirect": Fault(_replies(b"", 307, Location="http://127.0.0.1:9/v1")),
    "lone surrogate": Fault(_replies(completion("\ud83d " + ANSWER)), answers=True),
    "extra end tokens": Fault(
        _replies(completion(ANSWER + "<|im_end|><|im_end|>\n<|im_start|>user\nC")), answers=True
    ),
    "gzip although not asked for": Fault(
        _replies(gzip.compress(completion(ANSWER)), Content_Encoding="gzip"), answers=True
    ),
    "wrong content type": Fault(
        _replies(completion(ANSWER), Content_Type="text/plain"), answers=True
    ),
    "content in parts": Fault(
        _replies(completion([{"type": "text", "text": ANSWER}])), answers=True
    ),
    "content_filter": Fault(_replies(completion("", "content_filter")), lasting="refused"),
    "400, context length": Fault(_error(400, "the context is too long"), lasting="refused"),
}


class MisbehavingServer(ThreadingHTTPServer):
    """A server that shows question n the n-th fault, in turn, and answers it the next time.

    `asked` has the number of every question that was asked, and whether it got its answer then.
    """

    daemon_threads = True
    block_on_close = False  # a request that stalls is left behind
    request_queue_size = 64

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[tuple[int, bool]] = []
        self.lock = threading.Lock()
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up on a stalled request is expected."""


def fault_of(number: int) -> str:
    """The name of the fault of a question."""
    return list(FAULTS)[number % len(FAULTS)]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: MisbehavingServer

    def do_POST(self) -> None:
        chat = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"]
        asked = _QUESTION.search(json.dumps(chat))
        assert asked, chat
        number = int(asked[1])
        fault = FAULTS[fault_of(number)]
        with self.server.lock:
            before = any(other == number for other, _ in self.server.asked)
            again = before and not fault.lasting
            self.server.asked.append((number, again or fault.answers))
        if again:
            self.reply(completion(ANSWER), 200, {})
        else:
            fault.send(self)

    def reply(self, body: bytes, status: int, headers: dict[str, str]) -> None:
        self.head(status, len(body), headers)
        self.wfile.write(body)

    def head(self, status: int, length: int, headers: dict[str, str]) -> None:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **given}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on the terminal."""


@contextlib.contextmanager
def misbehaving() -> Iterator[MisbehavingServer]:
    """A server while the block runs."""
    server = MisbehavingServer()
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    )
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def write_model(folder: pathlib.Path) -> None:
    """Write what an evaluation reads of a served model: a tokenizer, of bytes, and config.json."""
    tokenizer_file.save(build_vocabulary((), family().dialect), folder)
    (folder / "config.json").write_text(json.dumps(to_hf(family().size("8b"))), encoding="utf-8")


def write_questions(file: pathlib.Path, count: int) -> None:
    """Write a file of generated questions; the right answer is always B."""
    questions = [
        {
            "id": str(number),
            "video": "none.mp4",
            "question": f"Question {number}: which one?",
            "options": ["the first", "the second", "the third"],
            "answer": "B",
        }
        for number in range(count)
    ]
    file.write_text(
        "".join(json.dumps(question) + "\n" for question in questions), encoding="utf-8"
    )


COUNT = 2 * len(FAULTS)


@pytest.fixture
def play(tmp_path, monkeypatch):
    """play(server) evaluates the questions with it; returns the summary."""
    monkeypatch.setenv("NO_PROXY", "*")
    # A request may take minutes otherwise.
    patient = BenchmarkSettings.server
    monkeypatch.setattr(
        BenchmarkSettings,
        "server",
        lambda settings: dataclasses.replace(patient(settings), timeout=REQUEST_SECONDS),
    )
    write_questions(tmp_path / "questions.jsonl", COUNT)
    write_model(tmp_path / "model")

    def run(server):
        settings = BenchmarkSettings(
            str(tmp_path / "model"),
            data=str(tmp_path / "questions.jsonl"),
            out=str(tmp_path / "out"),
            endpoint=(server.endpoint, "m"),
            episodes=COUNT,
            k=0,
            protocol=ProtocolSettings(pin_think=False),
        )
        return evaluate(settings)

    return run


@pytest.mark.slow
def test_every_question_has_an_outcome_and_none_is_asked_after_its_answer(play, tmp_path):
    """Questions are asked until they have an answer, unless the server refuses them."""
    assert len(FAULTS) > 20
    with misbehaving() as server:
        summary = play(server)
        redirected = sum(fault_of(number) == "redirect" for number in range(COUNT))
        refused = sum(bool(FAULTS[fault_of(number)].lasting) for number in range(COUNT))
        failures = [(one["left_out"], one["reason"]) for one in summary["left_out"]]
        assert sum(cause == "failed" and "307" in why for cause, why in failures) == redirected
        assert sum(cause == "refused" for cause, _ in failures) == refused
        assert ("refused", "status 400 (the context is too long)") in failures
        assert summary["n"] == COUNT - redirected - refused
        first = len(server.asked)
        again = play(server)
        asked = server.asked[first:]
    assert len(again["left_out"]) == refused
    assert (again["n"], again["accuracy"]) == (COUNT - refused, 1.0)
    lines = {line["id"]: line for line in latest(read_lines(tmp_path / "out")).values()}
    for number in range(COUNT):
        line = lines[str(number)]
        lasting = FAULTS[fault_of(number)].lasting
        assert line.get("left_out", "") == lasting, fault_of(number)
        assert lasting or line["score"] == 1.0, fault_of(number)
    assert len(asked) == redirected + refused
    answered = [number for number, answers in server.asked if answers]
    assert len(answered) == len(set(answered)), "a question was asked again after its answer"
