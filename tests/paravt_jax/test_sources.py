"""Published files from local folders, the hub and buckets; and archives of media."""

from __future__ import annotations

import functools
import http.server
import threading
import zipfile

import fsspec
import fsspec.core
import huggingface_hub
import pytest
from huggingface_hub import constants

from paravt_jax.data import sources
from paravt_jax.processes.exit_codes import FAILED, TEMPORARY, exit_code


@pytest.fixture
def bucket():
    """A bucket in memory."""
    system = fsspec.filesystem("memory")
    for name, content in {"rl.parquet": b"abc", "sft/a.parquet": b"de", "README.md": b"x"}.items():
        system.pipe_file(f"/bucket/data/{name}", content)
    yield "memory://bucket/data"
    system.rm("/bucket", recursive=True)


def archive(path, members):
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as file:
        for name, content in members.items():
            file.writestr(name, content)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("memory://nothing", "memory://nothing: "),
        ("nonsense://a", "nonsense://a: .*fsspec"),
    ],
)
def test_a_source_that_does_not_exist_is_refused_with_a_remedy(source, words, tmp_path):
    with pytest.raises(FileNotFoundError, match=words):
        sources.fetch(source, tmp_path, ["*.parquet"])


def test_a_page_that_lists_files_without_their_sizes_is_a_source(tmp_path):
    pytest.importorskip("aiohttp")
    (tmp_path / "page").mkdir()
    table = tmp_path / "page" / "rl.parquet"
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(table.parent))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for content in ("abc", "abcd"):
            table.write_text(content)
            fetched = sources.fetch(
                f"http://127.0.0.1:{server.server_port}/", tmp_path / "out", ["*.parquet"]
            )
            assert (fetched / "rl.parquet").read_text() == content
        server.shutdown()


def test_a_folder_with_media_is_used_as_it_is(tmp_path):
    archive(tmp_path / "source" / "selfqa.zip", {"selfqa/a.mp4": b"a"})
    (tmp_path / "source" / "selfqa").mkdir()
    (tmp_path / "source" / "selfqa" / "a.mp4").write_bytes(b"mine")
    assert sources.media_root(str(tmp_path / "source"), tmp_path / "out") == tmp_path / "source"
    assert not (tmp_path / "out").exists()


def test_archives_are_unpacked_once_into_one_root(tmp_path):
    source = tmp_path / "source"
    archive(source / "selfqa.zip", {"selfqa/a.mp4": b"a", "selfqa/": b""})
    charades = source / "museg/charades/charades_0.zip"
    archive(charades, {"museg/charades/b.mp4": b"b" * 10_000})
    root = sources.media_root(str(source), tmp_path / "out")
    assert root == tmp_path / "out/media"
    assert (root / "selfqa/a.mp4").read_bytes() == b"a"
    assert (root / "museg/charades/b.mp4").read_bytes() == b"b" * 10_000
    (root / "selfqa/a.mp4").write_bytes(b"another")
    sources.media_root(str(source), tmp_path / "out")
    assert (root / "selfqa/a.mp4").read_bytes() == b"another"


def test_archives_of_a_data_set_on_the_hub_are_unpacked(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    archive(cache / "clips.zip", {"clips/a.mp4": b"a"})
    asked = []

    def snapshot_download(id, repo_type, allow_patterns):
        asked.append((id, repo_type, "*.zip" in allow_patterns))
        return cache

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    root = sources.media_root("owner/set", tmp_path / "out")
    assert asked == [("owner/set", "dataset", True)]
    assert (root / "clips/a.mp4").read_bytes() == b"a"
    assert not (cache / "clips").exists()


# --- what the hub does not give, and whether a supervisor should ask again ---


def test_an_offline_hub_is_not_asked_again(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(OSError, match="owner/none: .*HF_HUB_OFFLINE") as error:
        sources.snapshot("owner/none", ["*.json"])
    assert exit_code(error.value) == FAILED


def test_a_gated_repository_needs_a_token_and_is_not_asked_again(monkeypatch):
    class Gated(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(401)
            self.send_header("X-Error-Code", "GatedRepo")
            self.send_header("Content-Length", "0")
            self.end_headers()

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with http.server.HTTPServer(("127.0.0.1", 0), Gated) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        huggingface_hub.close_session()
        with pytest.raises(OSError, match="owner/gated: .*401.*hf auth login") as error:
            sources.list_files("owner/gated")
        server.shutdown()
    assert exit_code(error.value) == FAILED


@pytest.mark.parametrize("proxy, code", [("", TEMPORARY), ("socks5", FAILED), ("foo", FAILED)])
def test_a_network_that_does_not_answer_is_asked_again_and_a_proxy_is_not(proxy, code, monkeypatch):
    monkeypatch.setenv("ALL_PROXY", f"{proxy}://127.0.0.1:9" if proxy else "")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    huggingface_hub.close_session()
    with pytest.raises(OSError, match="owner/none: .* check .* network and proxies") as error:
        sources.list_files("owner/none")
    assert exit_code(error.value) == code
