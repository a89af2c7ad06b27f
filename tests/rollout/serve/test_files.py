"""Files and who may reach the server: nothing of this machine but what it is told to show."""

from __future__ import annotations

import asyncio
import base64
import collections
import contextlib
import dataclasses
import errno
import io
import json
import os
import pathlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import httpx2
import pytest
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from rollout.serve import files as files_module
from rollout.serve.__main__ import _keys
from rollout.serve.app import BodyLimit
from rollout.serve.service import ServiceSettings
from tests.rollout.serve.conftest import NAME


def picture(color: tuple[int, int, int] = (255, 0, 0), size: tuple[int, int] = (64, 48)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, color).save(buffer, "PNG")
    return buffer.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def upload(http: httpx2.Client, data: bytes, name: str = "clip.mp4") -> httpx2.Response:
    return http.post("/v1/files", files={"file": (name, data)}, data={"purpose": "user_data"})


@pytest.fixture
def clip(small_world) -> bytes:
    return (small_world.folder / small_world.videos[0].path).read_bytes()


def test_an_upload_is_used_shown_and_deleted_by_its_owner_only(server, clip):
    with server.http() as http, server.http("bob") as other:
        about = upload(http, clip, "../../x.mp4").json()
        assert about["bytes"] == len(clip) and about["paravt"]["duration"] == 128
        place = f"/v1/files/{about['id']}"
        for path in (place, f"{place}/content"):
            assert other.get(path).status_code == 404
        assert other.delete(place).status_code == 404
        assert http.get(f"{place}/content").content == clip
        part = http.get(f"{place}/content", headers={"Range": "bytes=10-19"})
        assert (part.status_code, part.content) == (206, clip[10:20])
        for asker, status in ((other, 404), (http, 200)):
            assert ask(asker, about["id"]).status_code == status
        assert http.delete(place).json()["deleted"]
        assert http.get(place).status_code == 404
    assert not [*server.files._folder.glob(about["id"] + "*")]


def ask(http: httpx2.Client, video: str) -> httpx2.Response:
    content = [
        {"type": "video_url", "video_url": {"url": video}},
        {"type": "text", "text": "Which digit?"},
    ]
    body = {"model": NAME, "messages": [{"role": "user", "content": content}]}
    return http.post("/v1/chat/completions", json=body)


def test_only_files_of_the_folder_can_be_named(server, small_world, clip, tmp_path):
    inside, name = small_world.folder, small_world.videos[0].path
    outside = tmp_path / "secret.mp4"
    outside.write_bytes(clip)
    (inside / "link.mp4").symlink_to(outside)
    (inside / "alias.mp4").symlink_to(inside / name)
    up = os.path.relpath(outside, inside)
    with server.http() as http:
        for path in (name, "alias.mp4", f"file://{inside / name}", f"./{name}"):
            assert ask(http, path).status_code == 200
        for path in (
            *(up, up.replace("..", "%2e%2e"), up.replace("/", "%2F"), str(outside), "link.mp4"),
            *(f"file://{outside}", f"file:///{inside}/../{up}", f"{name}\0", f"{name}%00"),
            *(".", "", "x" * 5000, "/etc/passwd", "/dev/zero", "/proc/self/environ", "~"),
        ):
            reply = ask(http, path)
            assert reply.status_code == 404, path
            assert str(tmp_path) not in reply.text.replace(path, "")


def test_what_is_too_large_too_long_or_broken_is_refused_and_deleted(server, clip, monkeypatch):
    before = sorted(server.files._folder.iterdir())
    limits = server.files.limits
    with server.http() as http:
        # Its client sends all of it, and then reads the refusal.
        assert upload(http, clip + bytes(8 * 2**20)).status_code == 413
        declared = {
            "Content-Length": str(10**12),
            "Content-Type": "multipart/form-data; boundary=x",
        }
        assert raw(server.url, "POST /v1/files", declared).startswith(b"HTTP/1.1 413")
        for body in (b" " * 1_000_001, iter([b" " * 600_000] * 2)):  # the second has no size
            assert http.post("/v1/chat/completions", content=body).status_code == 413
        for data in (b"", b"no video", clip[: len(clip) // 2], picture()):
            reply = upload(http, data)
            assert reply.status_code in (200, 422), reply.text
            assert str(server.files._folder) not in reply.text
            if reply.status_code == 200:
                http.delete(f"/v1/files/{reply.json()['id']}")
        monkeypatch.setattr(server.files, "limits", dataclasses.replace(limits, minutes=1.0))
        reply = upload(http, clip)
        assert reply.json()["error"]["code"] == "video_too_long"
        assert http.post("/v1/files", data={"purpose": "x"}).status_code == 400
    assert sorted(server.files._folder.iterdir()) == before


def test_uploads_share_a_limit_and_expire(server, clip, monkeypatch):
    with server.http() as http:
        limits = dataclasses.replace(server.files.limits, uploads=3 * len(clip))
        monkeypatch.setattr(server.files, "limits", limits)
        assert ask(http, data_url(clip, "video/mp4")).status_code == 200
        first, *rest = [upload(http, clip) for _ in range(3)]
        # What a request brought is not given up while it may be answered.
        assert first.status_code == 200 and rest[-1].status_code == 429
        id = first.json()["id"]
        server.files._uploads[id].used = 0.0
        assert ask(http, id).status_code == 200
        server.files.expire()
        assert ask(http, id).status_code == 200
        with monkeypatch.context() as later:
            later.setattr(files_module, "KEPT", -1.0)
            server.files.expire()
        assert not [*server.files._folder.iterdir()]
        assert upload(http, clip).status_code == 200


@contextlib.contextmanager
def sent(
    url: str, line: str, headers: dict[str, str] | None = None, body: Any = b""
) -> Iterator[socket.socket]:
    """A connection over which a request was sent as it is, with the key."""
    host, port = url.removeprefix("http://").split(":")
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    sizes = {"Content-Length": str(len(data))} if data else {}
    every = {"Host": f"{host}:{port}", "Authorization": "Bearer alice"} | sizes | (headers or {})
    with socket.create_connection((host, int(port)), 20) as connection:
        lines = [f"{line} HTTP/1.1", *(f"{name}: {value}" for name, value in every.items())]
        connection.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
        yield connection


def raw(*arguments: Any) -> bytes:
    """Send a request as `sent` does, and return the beginning of the reply."""
    with sent(*arguments) as connection:
        return connection.recv(4096)


def test_a_slow_body_is_given_up(server, monkeypatch):
    monkeypatch.setattr("rollout.serve.app._PATIENCE", 0.3)
    monkeypatch.setattr("rollout.serve.app._SLOWEST", 4e6)
    line = "POST /v1/chat/completions"
    with sent(server.url, line, {"Content-Length": "100"}, b"{") as connection:
        assert whole(connection).startswith(b"HTTP/1.1 408")
    with sent(server.url, line, {"Content-Length": "1000"}, b"{") as connection:
        # Something comes all the time, but not enough. What comes later finds no connection.
        with pytest.raises(OSError):
            for _ in range(100):
                connection.sendall(b" ")
                time.sleep(0.05)
        assert connection.recv(4096).startswith(b"HTTP/1.1 408")


def whole(connection: socket.socket) -> bytes:
    """Return what comes until the server closes a connection."""
    return b"".join(iter(lambda: connection.recv(4096), b""))


@pytest.mark.anyio
async def test_a_picture_leaves_no_file_if_its_client_goes_or_the_disk_is_full(server, monkeypatch):
    files, rules = server.files, server.service.features.picture_rules
    before = {*files._folder.iterdir()}
    begun, gone = threading.Event(), threading.Event()

    def write(path: pathlib.Path, data: bytes) -> None:
        full = begun.is_set()
        begun.set()
        gone.wait(10)
        path.open("wb").write(data[:10])
        if full:
            raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "write_bytes", write)
        asked = asyncio.create_task(files.picture(data_url(picture()), rules))
        await asyncio.to_thread(begun.wait, 10)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        gone.set()
        with pytest.raises(OSError, match="full"):
            await files.picture(data_url(picture()), rules)
        with pytest.raises(OSError, match="full"):
            files._keep(b"another", ".mp4")
        await asyncio.sleep(0.05)
    assert {*files._folder.iterdir()} == before


@pytest.mark.anyio
async def test_a_video_may_be_called_as_uploads_are(server, small_world, clip):
    (small_world.folder / "file-1.mp4").write_bytes(clip)
    assert (await server.files.video("file-1.mp4", "")).name == "file-1.mp4"


def test_uploads_bound_all_bodies_together():
    limit = BodyLimit(mock.Mock(), body=2, upload=9)
    assert limit.most == 18


KEY_FILES = [("", "empty"), ("\n \n", "empty"), ("a\n# b", "line 2"), ("a b\n", "line 1")]


@pytest.mark.parametrize(("text", "named"), KEY_FILES)
def test_a_file_of_keys_has_a_key_per_line(tmp_path, text, named):
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ValueError, match=named):
        _keys(str(file))
    file.write_text(" alice \n\nbob\r\n")
    assert _keys(str(file)) == ["alice", "bob"]


@pytest.mark.parametrize(
    "wrong", [{"frames": 0}, {"episodes": 0}, {"seconds": 0}, {"seconds": 901}]
)
def test_sizes_that_cannot_serve_are_refused(wrong):
    with pytest.raises(ValueError, match=f"serve.{[*wrong][0]}"):
        ServiceSettings(**wrong)


@pytest.mark.parametrize("key", ["Bearer eve", "Bearer alic", "", "Basic alice", "Bearer é"])
def test_every_route_of_the_api_but_its_models_needs_a_key(server, key):
    # Evaluators poll the models without a key until the server is ready.
    open_to_all = raw(server.url, "GET /v1/models", {"Authorization": key})
    assert open_to_all.startswith(b"HTTP/1.1 200")
    routes = [
        *("POST /v1/chat/completions", "POST /v1/files", "GET /v1/files/x"),
        *("DELETE /v1/files/x", "GET /v1/files/x/content", "GET /v1/episodes/x.html"),
        *("POST /mcp", "GET /mcp", "DELETE /mcp"),
    ]
    for route in routes:
        reply = raw(server.url, route, {"Authorization": key})
        assert reply.startswith(b"HTTP/1.1 401"), (route, reply)


def test_every_request_is_counted_once(server, small_world):
    def counts() -> collections.Counter[tuple[str, str]]:
        with server.http() as http:
            families = text_string_to_metric_families(http.get("/metrics").text)
        samples = [sample for family in families for sample in family.samples]
        return collections.Counter(
            {
                (sample.labels["route"], sample.labels["status"]): int(sample.value)
                for sample in samples
                if sample.name == "paravt_request_seconds_count"
            }
        )

    before = counts()
    raw(server.url, "GET /health", {"Host": "site.example"})
    raw(server.url, "GET /mcp", {"Authorization": ""})
    raw(server.url, "GET /v1/files/x", {"Authorization": ""})
    with server.http() as http:
        assert ask(http, "file-x").status_code == 404
        assert ask(http, small_world.videos[0].path).status_code == 200
    assert counts() - before == {
        ("other", "403"): 1,
        ("/mcp", "401"): 1,
        ("/v1/files/{id}", "401"): 1,
        ("/v1/chat/completions", "404"): 1,
        ("/v1/chat/completions", "200"): 1,
        ("/metrics", "200"): 1,
    }


def test_unknown_routes_and_methods_have_the_apis_errors(server):
    with server.http() as http:
        for method, path, status in (
            ("GET", "/v1/nothing", 404),
            ("GET", "/v1/chat/completions", 405),
            ("GET", "/../../etc/passwd", 404),
            ("GET", "/page.js/..%2f..%2fapp.py", 404),
        ):
            reply = http.request(method, path)
            assert reply.status_code == status and reply.json()["error"]["message"], path
