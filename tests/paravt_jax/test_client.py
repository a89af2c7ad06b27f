"""The client of OpenAI-compatible servers, against a real HTTP server on this machine.

Requests, pauses and connections are those of the package `openai`. These tests hold what the client
adds to it: failures as values, limits, fields that servers refuse, and a key that nobody sees.
"""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import wait
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paravt_jax.method.judge import JudgeSettings
from paravt_jax.remote.client import Choice, Client, Failure
from tests.paravt_jax.judge_server import JudgeServer, Reply, says, serving

pytest.importorskip("openai")
SECRET = "sk-17-secret"
# Seconds; longer than any pause of a busy machine.
STALL = 60.0


@pytest.fixture(autouse=True)
def surroundings(monkeypatch):
    """Set a key, and no proxy between the test and its server."""
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    monkeypatch.setenv("NO_PROXY", "*")


def quick(address: str = "http://127.0.0.1:9/v1", **fields) -> JudgeSettings:
    values: dict[str, Any] = {"timeout": 20.0, "attempts": 2, **fields}
    return JudgeSettings(address, model="m", **values)


def result(client: Client, body: dict[str, Any]) -> str | Failure:
    """The text of the reply to a request, or the failure."""
    outcome = client.ask(body).result(STALL)
    return outcome.message.content or "" if isinstance(outcome, Choice) else outcome


def ask(replies: list[Reply], **fields) -> tuple[Any, JudgeServer]:
    """The result from a server that gives these replies and repeats the last, and the server."""
    with serving(lambda n, _: replies[min(n, len(replies) - 1)]) as server:
        return result(Client(quick(server.endpoint, **fields)), {"model": "m"}), server


def test_the_request_has_the_body_and_the_key_and_goes_to_the_endpoint(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", f"{SECRET}\n")
    body = {"model": "m", "messages": [], "top_k": 1}
    with serving(lambda *_: says("1")) as server:
        assert result(Client(quick(server.endpoint + "/")), body) == "1"
        assert result(Client(quick(server.endpoint, key_variable="")), body) == "1"
    assert [received.path for received in server.received] == ["/v1/chat/completions"] * 2
    assert [received.body for received in server.received] == [body] * 2
    keys = [received.headers["authorization"] for received in server.received]
    assert keys[0] == f"Bearer {SECRET}" and SECRET not in keys[1]


def test_a_redirect_is_not_followed():
    with serving(lambda *_: says("1")) as other:
        failure, server = ask([Reply(status=307, headers=(("Location", other.endpoint),))])
    assert failure == Failure(f"status 307: {other.endpoint}")
    assert len(server.received) == 1 and not other.received


def unsupported(field: str, code: str) -> Reply:
    error = {"message": f"Unsupported: '{field}'", "param": field, "code": code}
    return Reply(json.dumps({"error": error}).encode(), 400)


def test_fields_that_a_server_does_not_support_are_left_out_or_renamed_once():
    accepted = {"model": "m", "max_completion_tokens": 5}

    def answer(_, received):
        refused = [name for name in received.body if name not in accepted]
        return unsupported(refused[0], "unsupported_value") if refused else says("1")

    with serving(answer) as server:
        client = Client(quick(server.endpoint))
        body = {"model": "m", "max_tokens": 5, "temperature": 0.7}
        assert [result(client, body) for _ in range(2)] == ["1", "1"]
    assert len(server.received) == 2 + 2
    assert server.received[-1].body == accepted


@pytest.mark.parametrize(
    "reply", [unsupported("max_tokens", "too_large"), unsupported("messages", "unsupported_value")]
)
def test_other_refusals_take_no_field_away(reply):
    body = {"max_tokens": 5, "messages": []}
    with serving(lambda *_: reply) as server:
        failure = result(Client(quick(server.endpoint)), body)
    assert [received.body for received in server.received] == [body]
    assert failure == Failure(f"status 400: {reply.body.decode()}")


def test_any_body_fails_as_a_value():
    body = b""
    values = st.none() | st.text() | st.integers()
    trees = st.recursive(values, lambda x: st.lists(x) | st.dictionaries(st.text(), x))
    with serving(lambda n, _: Reply(body, (200, 400)[n % 2])) as server:
        client = Client(quick(server.endpoint, attempts=1))

        @settings(max_examples=30, deadline=None)
        @example({"error": {"param": ["temperature"], "code": ["unsupported"]}})
        @given(st.binary() | trees)
        def check(content):
            nonlocal body
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            failures = [result(client, {}) for _ in range(2)]
            assert [isinstance(failure, Failure) for failure in failures] == [True, True]

        check()


@pytest.mark.parametrize("reply", [Reply(b"[" * 60_000), Reply(status=503), Reply(close=True)])
def test_what_may_pass_is_asked_again(reply):
    assert ask([reply, says("1")])[0] == "1"
    failure, server = ask([reply])
    assert failure.text.startswith("status 503" if reply.status == 503 else "no usable reply")
    assert len(server.received) == 2


def test_a_busy_server_gets_the_pause_that_it_asks_for():
    answer, server = ask([Reply(status=429, headers=(("Retry-After", "1.5"),)), says("1")])
    first, second = server.times
    assert answer == "1" and second - first >= 1.5


@pytest.mark.parametrize(
    "stall",
    [Reply(delay=STALL), says("1" + " " * 1000, drip=STALL / 1000)],
    ids=["silent", "drop by drop"],
)
def test_a_stalled_request_is_given_up_and_asked_again(stall):
    start = time.monotonic()
    answer, server = ask([stall, says("1")], timeout=0.5, attempts=9)
    assert time.monotonic() - start < STALL
    # More than one failure on a machine that is itself as slow as a stalled server.
    assert answer == "1" and len(server.received) > 1


def test_a_cancelled_request_closes_its_connection_and_frees_its_place():
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = Client(quick(f"http://127.0.0.1:{server.getsockname()[1]}/v1", concurrency=1))
        for _ in range(2):
            future = client.ask({})
            connection, _ = server.accept()
            connection.settimeout(STALL)
            assert connection.recv(1 << 16)
            assert future.cancel()
            while connection.recv(1 << 16):
                pass


@pytest.mark.slow
def test_a_process_ends_without_waiting_for_open_requests():
    with serving(lambda *_: Reply(delay=STALL)) as server:
        code = f"""
import time
from paravt_jax.method.judge import JudgeSettings
from paravt_jax.remote.client import Client
Client(JudgeSettings({server.endpoint!r}, model="m")).ask({{}})
time.sleep(1)
"""
        subprocess.run([sys.executable, "-c", code], check=True, timeout=STALL / 2)
        assert len(server.received) == 1


def test_requests_go_side_by_side_up_to_the_limit():
    six = threading.Barrier(6)

    def answer(*_):
        # Answers none before six have come. A seventh would then be counted before their answers.
        six.wait(STALL)
        return says("1", delay=0.2)

    with serving(answer) as server:
        client = Client(quick(server.endpoint, concurrency=6))
        assert not wait([client.ask({}) for _ in range(12)], STALL).not_done
        assert server.most == 6


def test_a_servers_own_message_is_one_short_line_with_what_to_do():
    body = b"out of\n memory\x1b[2J" + b"x" * 9999
    failure, _ = ask([Reply(body, 404)])
    begin = "status 404; check the address, up to /v1, and the model's name: out of memory [2Jx"
    assert failure.text.startswith(begin) and len(failure.text) == 300


@pytest.mark.parametrize("key", [f"{SECRET} {SECRET}", f"{SECRET}\n{SECRET}", f"{SECRET}é"])
def test_a_key_that_no_header_carries_is_refused_unseen(monkeypatch, key):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(ValueError, match="OPENAI_API_KEY") as error:
        Client(quick())
    assert SECRET not in str(error.value) and SECRET not in repr(error.value)


@pytest.mark.parametrize(
    "address",
    [
        f"http://user:{SECRET}@host/v1",
        f"http://host/v1?api_key={SECRET}",
        f"http://host/v1#{SECRET}",
        # Without a scheme this has no user, and the error of a URL parser would show it.
        f"user:{SECRET}@host/v1",
        "localhost:8000",
        "http://",
        "ftp://host/v1",
        "http://host:port/v1",
        " http://localhost:8000/v1",
        "http://host/v1/chat/completions/",
    ],
)
def test_an_address_that_cannot_be_asked_is_refused_without_its_secret(address):
    with pytest.raises(ValueError, match="http://localhost:8000/v1.*OPENAI_API_KEY") as error:
        quick(address)
    message = str(error.value)
    assert "\n" not in message and (repr(address) in message) == (SECRET not in address)


def test_the_key_is_seen_nowhere(caplog, capfd):
    caplog.set_level(logging.DEBUG)
    quoting = Reply(f"Incorrect key: {SECRET}".encode(), 401, (("WWW-Authenticate", "Bearer"),))
    failures = [ask([Reply(status=500), Reply(SECRET.encode()), quoting], attempts=3)[0]]
    failures.append(ask([Reply(SECRET.encode())], attempts=1)[0])
    assert all("[the key]" in failure.text for failure in failures)
    shown = [caplog.text, *capfd.readouterr(), repr(failures)]
    assert not any(SECRET in text for text in shown)


def test_without_the_package_one_line_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ModuleNotFoundError, match=r"^judge: .*'\.\[judge\]'$"):
        Client(quick())
