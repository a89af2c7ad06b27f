"""The client of OpenAI-compatible servers, against a real HTTP server on this machine.

The server answers, refuses, stalls, hangs up, and replies with nonsense.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
import time
from concurrent.futures import wait
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paravt_jax.method.judge import ServerSettings
from paravt_jax.remote import client as remote
from paravt_jax.remote.client import Choice, Client, Failure
from tests.paravt_jax.judge_server import Reply, says, serving

SECRET = "sk-17-secret"
# Seconds; longer than any pause of a busy machine.
STALL = 60.0


@pytest.fixture(autouse=True)
def surroundings(monkeypatch):
    """Set a key, short waits, and no proxy between the test and its server."""
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.001)


def quick(address: str = "http://127.0.0.1:9/v1", **fields) -> ServerSettings:
    values: dict[str, Any] = {"timeout": 20.0, "attempts": 3, **fields}
    return ServerSettings(address, **values)


def text(choice: Choice) -> str | Failure:
    """Read the text of a completion; "no" cannot be used."""
    return Failure("it says no") if choice.text == "no" else choice.text or ""


@dataclasses.dataclass
class Asked:
    """The outcome of a request, and the times at which the server got its attempts."""

    answer: str | Failure
    times: list[float]

    @property
    def failure(self) -> Failure:
        assert isinstance(self.answer, Failure)
        return self.answer


def ask(replies: list[Reply], deadline: float | None = None, **fields) -> Asked:
    """Ask a server that gives these replies in turn and then repeats the last one."""
    with serving(lambda n, _: replies[min(n, len(replies) - 1)]) as server:
        client = Client(quick(server.endpoint, **fields))
        future = client.ask({"model": "m"}, text, deadline)
        asked = Asked(future.result(STALL), server.times)
        client.close()
        return asked


# What is sent.


def test_the_request_is_one_that_any_compatible_server_takes(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", f"{SECRET}\n")
    body = {"model": "m", "messages": [], "half of a surrogate pair": "caf\ud800"}
    with serving(lambda *_: says("1")) as server:
        client = Client(quick(server.endpoint + "/"))
        assert client.ask(body, text).result(STALL) == "1"
        (received,) = server.received
    assert received.path == "/v1/chat/completions"
    assert received.headers["Authorization"] == f"Bearer {SECRET}"
    assert received.headers["Content-Type"] == "application/json"
    assert received.body == body


@pytest.mark.parametrize("variable, value", [("OPENAI_API_KEY", None), ("", SECRET)])
def test_a_server_without_keys_gets_none(monkeypatch, variable, value):
    if value is None:
        monkeypatch.delenv("OPENAI_API_KEY")
    with serving(lambda *_: says("1")) as server:
        client = Client(quick(server.endpoint, key_variable=variable))
        assert client.ask({}, text).result(STALL) == "1"
        assert "Authorization" not in server.received[0].headers


def test_a_redirect_is_not_followed():
    with (
        serving(lambda *_: says("1")) as other,
        serving(lambda *_: Reply(status=307, headers=(("Location", other.endpoint),))) as server,
    ):
        failure = Client(quick(server.endpoint)).ask({}, text).result(STALL)
        assert isinstance(failure, Failure) and failure.status == 307
        assert f"({other.endpoint}); check the address" in failure.text
        assert len(server.received) == 1 and not other.received


# What comes back.


@pytest.mark.parametrize("kind", ["text", "output_text", ""])
def test_a_content_in_parts_is_the_text_of_its_text_parts(kind):
    thoughts = [{"type": "thinking", "thinking": "no"}, {"type": "reasoning", "text": "no"}]
    assert ask([says([*thoughts, {"type": kind, "text": "1"} if kind else "1"])]).answer == "1"


@pytest.mark.parametrize(
    "words",
    [
        "Unsupported parameter: '{}' is not supported with this model. Use something instead.",
        "Unsupported value: '{}' does not support 0.7 with this model.",
        '[{{"type": "extra_forbidden", "loc": ["body", "{}"], "msg": "not permitted"}}]',
        'Invalid JSON payload received. Unknown name \\"{}\\": Cannot find field.',
        "Argument not supported on this model: {}",
        "invalid {}: only 1 is allowed for this model",
    ],
)
def test_fields_that_a_server_refuses_are_left_out_or_renamed_once(words, caplog):
    accepted = {"model": "m", "max_completion_tokens": 5}

    def answer(_, received):
        refused = [name for name in received.body if name not in accepted]
        return Reply(words.format(refused[0]).encode(), 400) if refused else says("1")

    with serving(answer) as server:
        client = Client(quick(server.endpoint, attempts=1))
        body = {"model": "m", "max_tokens": 5, "temperature": 0.7, "seed": 1, "stop": ["x"]}
        assert [client.ask(body, text).result(STALL) for _ in range(2)] == ["1", "1"]
        assert len(server.received) == 4 + 2
        assert server.received[-1].body == accepted
    changes = {f"endpoint {name}: left out" for name in ("temperature", "seed", "stop")}
    changes |= {"endpoint max_tokens: max_completion_tokens"}
    assert client.report().keys() == changes
    assert len(caplog.records) == 4


@pytest.mark.parametrize(
    "words",
    [
        "'max_tokens' is too large: 5. This model's maximum context length is 3 tokens",
        "max_tokens is not allowed to exceed 3",
        "unsupported picture in the request that asks 'Which sign shows the temperature?'",
        "continue_final_message: Extra inputs are not permitted",
        "Unsupported image format. Please stop sending webp.",
        "'max_tokens' must be at most 4096; this model supports at most 4096",
        '{"msg": "images are not supported", "input": {"temperature": 1, "stop": ["x"]}}',
    ],
)
def test_other_refusals_take_no_field_away(words):
    body = {"stop": ["x"], "max_tokens": 5, "continue_final_message": True, "temperature": 1}
    with serving(lambda *_: Reply(words.encode(), 400)) as server:
        failure = Client(quick(server.endpoint)).ask(body, text).result(STALL)
        assert [received.body for received in server.received] == [body]
    assert failure == Failure(f"status 400 ({words})", 400, again=False)


def test_a_field_is_sent_again_if_the_request_without_it_is_refused_too():
    with serving(lambda *_: Reply(b"unsupported: 'seed', or a picture", 400)) as server:
        client = Client(quick(server.endpoint))
        assert all(client.ask({"seed": 1}, text).result(STALL) != "1" for _ in range(2))
        assert [received.body for received in server.received] == [{"seed": 1}, {}] * 2
    assert not client.report()


def test_tokens_and_models_are_counted_but_no_nonsense_in_their_place():
    usages = [{"prompt_tokens": 5, "completion_tokens": 2}, None, [], {"prompt_tokens": "3"}]
    reply = json.loads(says("1").body) | {"model": "a"}
    bodies = [json.dumps(reply | {"usage": usage}).encode() for usage in usages]
    with serving(lambda n, _: Reply(bodies[n % 4])) as server:
        client = Client(quick(server.endpoint))
        for _ in range(2):
            assert [client.ask({}, text).result(STALL) for _ in usages] == ["1"] * 4
            tokens = {"endpoint prompt_tokens": 5, "endpoint completion_tokens": 2}
            assert client.report() == {"endpoint model a": 4} | tokens


def test_any_body_fails_as_a_value():
    body = b""
    with serving(lambda *_: Reply(body)) as server:
        client = Client(quick(server.endpoint, attempts=1))

        @settings(max_examples=30, deadline=None)
        @given(
            st.binary()
            | st.recursive(
                st.none() | st.text() | st.integers(),
                lambda x: st.lists(x) | st.dictionaries(st.text(), x),
            )
        )
        def check(content):
            nonlocal body
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            failure = client.ask({}, text).result(STALL)
            assert isinstance(failure, Failure)
            assert "not a complete chat completion" in failure.text

        check()


# How it fails.


BROKEN = [Reply(b"[" * 60_000), Reply(b'{"choices": null, "error": "overloaded"}'), says("no")]
BUSY = [Reply(status=status) for status in (408, 409, 425, 429, 503)]


@pytest.mark.parametrize("reply", BROKEN + BUSY)
def test_what_may_pass_is_asked_again(reply):
    assert ask([reply, says("1")]).answer == "1"
    asked = ask([reply])
    assert asked.failure.status == (reply.status if reply in BUSY else 0)
    assert len(asked.times) == 3


@pytest.mark.parametrize(
    ("name", "value", "seconds"),
    [("Retry-After", "0.3", 0.3), ("Retry-After", "500", 0.5), ("Retry-After-Ms", "300", 0.3)],
)
def test_a_busy_server_gets_the_pause_that_it_asks_for(monkeypatch, name, value, seconds):
    monkeypatch.setattr(remote, "LONGEST_WAIT", 0.5)
    asked = ask([Reply(status=429, headers=((name, value),)), says("1")])
    assert asked.answer == "1"
    first, second = asked.times
    assert seconds <= second - first < STALL


@pytest.mark.parametrize("header", ["Fri, 31 Dec 1999 23:59:59 GMT", "-1", "nan", "\u0661"])
def test_a_pause_that_is_no_number_of_seconds_is_ignored(header):
    busy = Reply(status=429, headers=(("Retry-After", header.encode().decode("latin-1")),))
    assert ask([busy, says("1")]).answer == "1"


@pytest.mark.parametrize(
    "stall",
    [Reply(delay=STALL), says("1" + " " * 1000, drip=STALL / 1000)],
    ids=["silent", "drop by drop"],
)
def test_a_stalled_request_is_given_up_and_asked_again(stall):
    start = time.monotonic()
    asked = ask([stall, says("1")], timeout=0.5, attempts=9)
    assert time.monotonic() - start < STALL
    # More than one failure on a machine that is itself as slow as a stalled server.
    assert asked.answer == "1" and len(asked.times) > 1


@pytest.mark.parametrize("reply", [Reply(delay=STALL), Reply(status=503)], ids=["stalled", "503"])
def test_a_deadline_ends_all_attempts(reply):
    start = time.monotonic()
    asked = ask([reply], deadline=0.3, attempts=1000)
    assert 0.3 <= time.monotonic() - start < STALL
    assert asked.failure.late and "no answer within 0.3 s" in asked.failure.text


def test_a_cancelled_request_frees_its_place():
    with serving(lambda n, _: says("1") if n else Reply(delay=STALL)) as server:
        client = Client(quick(server.endpoint, concurrency=1))
        first = client.ask({}, text)
        while not server.received:
            time.sleep(0.001)
        start = time.monotonic()
        assert first.cancel()
        assert client.ask({}, text).result(STALL) == "1"
        assert time.monotonic() - start < STALL / 2


# How long it waits.


def test_waits_are_drawn_below_a_bound_that_doubles(monkeypatch):
    """Requests that failed together would otherwise come back together."""
    bounds: list[float] = []

    def draw(low: float, high: float) -> float:
        bounds.append(high)
        return low

    monkeypatch.setattr(remote.random, "uniform", draw)
    monkeypatch.setattr(remote, "FIRST_WAIT", 1.0)
    monkeypatch.setattr(remote, "LONGEST_WAIT", 0.01)
    with serving(lambda *_: Reply(status=500)) as server:
        client = Client(quick(server.endpoint, attempts=6))
        client.ask({}, text).result(STALL)
        assert len(server.received) == 6
    assert bounds == [1.0, 2.0, 4.0, 8.0, 16.0]


# Many at once.


def test_requests_go_side_by_side_up_to_the_limit():
    six = threading.Barrier(6)

    def answer(*_):
        # Answers none before six have come. A seventh would then be counted before their answers.
        six.wait(STALL)
        return says("1", delay=0.2)

    with serving(answer) as server:
        client = Client(quick(server.endpoint, concurrency=6))
        futures = [client.ask({}, text) for _ in range(12)]
        assert not wait(futures, STALL).not_done
        assert server.most == 6


# The key, and addresses that are refused.


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (Reply(b"", 404), "; check the address"),
        (Reply(b"", 400), "; look into the server's log"),
        (Reply(b"out of\n memory\x1b[2J", 500), " (out of memory [2J); look"),
        (Reply(b"x" * 9999, 500), f" ({'x' * 300});"),
        (Reply(f"Incorrect key: {SECRET}".encode(), 401), " (Incorrect key: [the key]); check"),
        (Reply(b'{"error": {"message": "a\\nb", "code": null}}', 500), " (a b);"),
        (Reply(b'{"detail": "a"}', 500), " (a);"),
        (Reply(b'{"error": {"message": "a", "metadata": ["b"]}}', 500), " (a; ['b']);"),
    ],
)  # fmt: skip
def test_a_servers_own_message_is_kept_on_one_line_and_without_the_key(reply, said):
    assert ask([reply]).failure.text.startswith(f"status {reply.status}{said}")


@pytest.mark.parametrize("field", ["finish_reason", "refusal"])
def test_what_a_reply_says_of_its_end_is_short_and_without_the_key(field):
    reply = json.loads(says("1").body)
    choice = reply["choices"][0]
    choice["message"][field] = choice[field] = f"no {SECRET}" + "x" * 9999
    with serving(lambda *_: Reply(json.dumps(reply).encode())) as server:
        client = Client(quick(server.endpoint))
        ended = client.ask({}, lambda choice: choice.finish_reason).result(STALL)
    assert isinstance(ended, str) and "no [the key]" in ended and len(ended) == 300


@pytest.mark.parametrize(
    "key", [f"{SECRET} {SECRET}", f"{SECRET}\n{SECRET}", f"{SECRET}é", f"{SECRET}\x7f"]
)
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
        "",
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
        ServerSettings(address)
    message = str(error.value)
    assert "\n" not in message and (repr(address) in message) == (SECRET not in address)


def test_the_key_is_seen_nowhere(caplog, capfd):
    caplog.set_level(logging.DEBUG)
    quoting = Reply(f"Incorrect key: {SECRET}".encode(), 401, (("WWW-Authenticate", "Bearer"),))
    replies = [Reply(status=500), says(SECRET), Reply(close=True), quoting]
    with serving(lambda n, _: replies[n]) as server:
        client = Client(quick(server.endpoint, attempts=4))

        def refuse(choice):
            return Failure("not this")

        failure = client.ask({}, refuse).result(STALL)
        sent = [received.headers["Authorization"] for received in server.received]
    assert sent == [f"Bearer {SECRET}"] * 4
    shown = [caplog.text, *capfd.readouterr(), repr(vars(client)), repr(failure)]
    assert not any(SECRET in text for text in shown)
