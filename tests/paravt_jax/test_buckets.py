"""Folders behind addresses: fetched into a cache, and written to, in memory and on S3."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pathlib
import uuid

import fsspec
import pytest

from paravt_jax.data.any_path import require_local
from paravt_jax.data.buckets import appearing_at, fetch_folder

SERVER = ("moto", "s3fs", "flask", "flask_cors")
BUCKET = "models"


@pytest.fixture(scope="module")
def s3():
    """A server of S3 on the loopback interface, with one bucket."""
    lacking = [name for name in SERVER if importlib.util.find_spec(name) is None]
    if lacking:
        pytest.skip(f"not installed: {', '.join(lacking)}; see s3-server in pyproject.toml")
    # By name: types are also checked where it is not installed.
    moto = importlib.import_module("moto.server")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    variables = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
        "NO_PROXY": "127.0.0.1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        system = fsspec.filesystem("s3")
        system.mkdir(BUCKET)
        yield "s3"
        type(system).clear_instance_cache()
    server.stop()


@pytest.fixture(params=["memory", "s3"])
def address(request, tmp_path, monkeypatch) -> str:
    """The address of a new folder in a bucket, which does not exist yet."""
    if request.param == "s3":
        request.getfixturevalue("s3")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return f"{request.param}://{BUCKET}/{uuid.uuid4().hex}"


def write(address: str, files: dict[str, bytes]) -> None:
    system, top = fsspec.core.url_to_fs(address)
    for name, content in files.items():
        system.pipe_file(f"{top}/{name}", content)


MODEL = {
    "config.json": b"{}",
    "model.safetensors": bytes(3000),
    "notes.bin": b"x",
    "a/b.json": b"1",
}


def test_a_folder_is_fetched_once_and_changed_files_again(address):
    write(address, MODEL)
    folder = fetch_folder(address, ["*.json"])
    assert visible(folder) == {"config.json": b"{}"}
    assert fetch_folder(f"{address}/", ["*.json", "*.safetensors"]) == folder
    assert visible(folder) == {name: MODEL[name] for name in ("config.json", "model.safetensors")}
    before = (folder / "model.safetensors").stat().st_mtime_ns
    write(address, {"config.json": b"[]"})  # of the same size
    fetch_folder(address, ["*.json", "*.safetensors"])
    assert (folder / "config.json").read_bytes() == b"[]"
    fetch_folder(address, ["*.json"])
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    system, top = fsspec.core.url_to_fs(address)
    system.rm_file(f"{top}/model.safetensors")
    fetch_folder(address, ["*.json", "*.safetensors"])
    assert visible(folder) == {"config.json": b"[]"}


def visible(folder: pathlib.Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if not p.name.startswith(".")}


def test_a_fetch_that_breaks_off_leaves_no_file_and_is_repeated(address, tmp_path, monkeypatch):
    content = os.urandom(3000)
    write(address, {"a.json": content})
    system, _ = fsspec.core.url_to_fs(address)
    get = system.get_file

    def broken(source, target):
        get(source, target)
        os.truncate(target, 2000)

    monkeypatch.setattr(system, "get_file", broken)
    with pytest.raises(ConnectionError, match=r"a\.json cannot be read .*cut off"):
        fetch_folder(address, ["*.json"])
    assert not list(tmp_path.rglob("a.json"))
    monkeypatch.setattr(system, "get_file", get)
    assert visible(fetch_folder(address, ["*.json"])) == {"a.json": content}


def test_an_address_without_such_files_is_refused(address):
    with pytest.raises(FileNotFoundError, match=rf"^{address}: [^\n]*check the path"):
        fetch_folder(address, ["*.json"])
    write(address, {"notes.bin": b"x"})
    with pytest.raises(FileNotFoundError, match=rf"^{address}: no \*\.json among its 1 files"):
        fetch_folder(address, ["*.json"])


def test_a_folder_is_uploaded_and_what_readers_open_first_comes_last(address, monkeypatch):
    system, top = fsspec.core.url_to_fs(address)
    order = []
    put = system.put_file

    def recorded(source, target):
        order.append(target.removeprefix(f"{top}/"))
        put(source, target)

    # fsspec keeps one instance for each address.
    monkeypatch.setattr(system, "put_file", recorded)
    with appearing_at("--to", address) as folder:
        for name in ("config.json", "sums.json", "z/model.safetensors"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(name.encode())
    assert order == ["sums.json", "z/model.safetensors", "config.json"]
    assert {name: system.cat_file(f"{top}/{name}") for name in order} == {
        name: name.encode() for name in order
    }
    with pytest.raises(FileExistsError, match=f"--to {address}: exists"):
        with appearing_at("--to", address):
            raise AssertionError("the block must not begin")


PATHS = ("", "runs/a", "/mnt/gs/run", "a:b/c", "C:/runs", "runs/gs://x", "./~/a", pathlib.Path("a"))


@pytest.mark.parametrize("path", PATHS)
def test_a_local_path_is_accepted(path):
    require_local("run_dir", path)
