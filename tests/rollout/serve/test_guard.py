"""Pages of other sites get nothing from a server on this machine."""

import pytest

pytest.importorskip("starlette", reason="needs the extra serve")

from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from rollout.serve.guard import Guard

IMAGE = {"sec-fetch-site": "cross-site", "sec-fetch-dest": "image"}
LINK = {"sec-fetch-site": "cross-site", "sec-fetch-dest": "document"}


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        ("GET", {"host": "localhost:8000"}, 200),
        ("GET", {"host": "[::1]:8000"}, 200),
        ("GET", {"host": "GPU-7:8000"}, 200),
        ("GET", {"host": "site.example"}, 403),
        ("GET", {"host": "localhost.site.example"}, 403),
        ("GET", {"host": "[::1"}, 403),
        ("GET", {"host": "localhost@site.example"}, 403),
        ("POST", {"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8000"}, 200),
        ("POST", {"host": "gpu-7", "origin": "https://gpu-7"}, 200),
        ("POST", {"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:3000"}, 403),
        ("POST", {"host": "127.0.0.1:8000", "origin": "https://site.example"}, 403),
        ("POST", {"host": "127.0.0.1:8000", "origin": "null"}, 403),
        ("GET", {"host": "127.0.0.1:8000", **IMAGE}, 403),
        ("GET", {"host": "127.0.0.1:8000", **LINK}, 200),
        ("POST", {"host": "127.0.0.1:8000", **LINK}, 403),
    ],
)
def test_only_the_servers_own_pages_and_programs_get_an_answer(method, headers, status):
    client = TestClient(Guard(PlainTextResponse("yes"), ["gpu-7"]))
    reply = client.request(method, "/", headers=headers)
    assert reply.status_code == status
    assert (reply.text == "yes") == (status == 200)


def test_it_holds_for_web_sockets():
    reached = []

    async def app(scope, receive, send):
        reached.append(scope["type"])
        await send({"type": "websocket.close"})

    client = TestClient(Guard(app))
    for host in ("site.example", "localhost"):
        with (
            pytest.raises(WebSocketDisconnect),
            client.websocket_connect("/", headers={"host": host}),
        ):
            pass
    assert reached == ["websocket"]
