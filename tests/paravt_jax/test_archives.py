"""Archives of videos: whole, interrupted, damaged and hostile."""

from __future__ import annotations

import errno
import io
import os
import pathlib
import random
import signal
import stat
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping

import pytest

from paravt_jax.data.archives import ArchiveError, unpack
from paravt_jax.processes.exit_codes import TEMPORARY, exit_code

ROOT = pathlib.Path(__file__).parents[2]
VIDEOS = {
    "data/a.mp4": random.Random(0).randbytes(70_000),
    "data/b.mp4": random.Random(1).randbytes(512),
    "subtitle/a.srt": b"1\n00:00:01,000 --> 00:00:02,000\nhello\n" * 30,
}


def packed(members: Mapping[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as file:
        file.mkdir("empty")
        for member, content in members.items():
            file.writestr(member, content)
    return stream.getvalue()


def unpack_all(source: pathlib.Path, root: pathlib.Path) -> None:
    for file in source.rglob("*"):
        if file.is_file():
            unpack(file.relative_to(source).as_posix(), source, root)


def contents(root: pathlib.Path) -> dict[str, bytes]:
    """All files below a folder, except for the marks."""
    return {
        file.relative_to(root).as_posix(): file.read_bytes()
        for file in root.rglob("*")
        if file.is_file() and ".unpacked" not in file.parts
    }


@pytest.fixture
def source(tmp_path) -> pathlib.Path:
    folder = tmp_path / "source"
    folder.mkdir()
    return folder


def test_an_archive_is_unpacked_once(source, tmp_path):
    (source / "v.zip").write_bytes(packed(VIDEOS))
    unpack_all(source, tmp_path / "root")
    assert contents(tmp_path / "root") == VIDEOS
    (tmp_path / "root/data/a.mp4").write_bytes(b"changed since")
    unpack_all(source, tmp_path / "root")
    assert (tmp_path / "root/data/a.mp4").read_bytes() == b"changed since"


def test_an_archive_cut_off_anywhere_is_refused_and_not_marked(source, tmp_path):
    whole = packed(VIDEOS)
    for cut in {*random.Random(2).sample(range(len(whole)), 30), len(whole) - 1}:
        root = tmp_path / f"root{cut}"
        (source / "v.zip").write_bytes(whole[:cut])
        with pytest.raises(ArchiveError, match=r"v\.zip"):
            unpack_all(source, root)
        assert not list(root.rglob(".unpacked/*")), cut
        (source / "v.zip").write_bytes(whole)
        unpack_all(source, root)
        assert contents(root) == VIDEOS, "the whole archive mends what the broken one left"


@pytest.mark.parametrize(
    "member", ["../out.mp4", "/tmp/out.mp4", "x\\..\\out.mp4", "a/../../out.mp4"]
)
def test_nothing_is_written_outside_the_root(source, tmp_path, member):
    (source / "v.zip").write_bytes(packed({"in.mp4": b"y", member: b"x"}))
    with pytest.raises(ArchiveError, match=r"out\.mp4 would be written outside .* it is kept"):
        unpack_all(source, tmp_path / "root")
    assert not list(tmp_path.rglob("*out.mp4"))


def test_links_are_refused(source, tmp_path):
    with zipfile.ZipFile(source / "v.zip", "w") as file:
        link = zipfile.ZipInfo("data")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        file.writestr(link, "/etc")
    with pytest.raises(ArchiveError, match="data is a link"):
        unpack_all(source, tmp_path / "root")
    assert not (tmp_path / "root/data").exists()


def test_an_encrypted_zip_is_refused(source, tmp_path):
    content = bytearray(packed({"a.mp4": b"x"}))
    for magic, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        for place in range(len(content)):
            if content[place : place + 4] == magic:
                content[place + offset] |= 1
    (source / "v.zip").write_bytes(content)
    with pytest.raises(ArchiveError, match=r"v\.zip: .*encrypted.*unpack it yourself"):
        unpack_all(source, tmp_path / "root")


def test_an_archive_that_explodes_is_refused(source, tmp_path):
    (source / "v.zip").write_bytes(packed({"zeros": bytes(30_000_000)}))
    with pytest.raises(ArchiveError, match="more than 50 times its size"):
        unpack_all(source, tmp_path / "root")
    assert not contents(tmp_path / "root")


@pytest.mark.parametrize("members", [("x", "x/y"), ("x" * 300,), (".",)])
def test_names_that_no_disk_takes_are_errors_of_the_archive(source, tmp_path, members):
    (source / "v.zip").write_bytes(packed(dict.fromkeys(members, b"x")))
    with pytest.raises(ArchiveError, match=r"v\.zip: cannot be unpacked .* it is kept"):
        unpack_all(source, tmp_path / "root")


def test_a_full_disk_may_recover(source, tmp_path, monkeypatch):
    (source / "v.zip").write_bytes(packed(VIDEOS))

    def full(*_arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(zipfile.ZipFile, "extractall", full)
    with pytest.raises(ArchiveError, match="No space left") as error:
        unpack_all(source, tmp_path / "root")
    assert exit_code(error.value) == TEMPORARY


SLOWLY = """
import os, pathlib, sys, time
from paravt_jax.data import archives
source, root = map(pathlib.Path, sys.argv[1:])
replace = archives.os.replace
def slow(*paths):
    time.sleep(0.02)
    replace(*paths)
archives.os.replace = slow
archives.unpack(*[file.name for file in source.iterdir()], source, root)
"""


def test_unpacking_is_repeated_after_a_kill(source, tmp_path):
    members = {f"{n}.mp4": random.Random(n).randbytes(3000) for n in range(40)}
    (source / "v.zip").write_bytes(packed(members))
    root = tmp_path / "root"
    process = subprocess.Popen(
        [sys.executable, "-c", SLOWLY, str(source), str(root)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    deadline = time.monotonic() + 60
    while len(list(root.glob("*.mp4"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not list(root.glob(".unpacked/*"))
    for file in root.glob("*.mp4"):
        assert file.read_bytes() == members[file.name], "a file is complete or not there"
    unpack_all(source, root)
    assert contents(root) == members


def test_an_archive_that_is_a_link_out_of_the_folder_is_not_opened(tmp_path):
    outside = tmp_path / "outside.zip"
    outside.write_bytes(packed(VIDEOS))
    source = tmp_path / "source"
    source.mkdir()
    (source / "v.zip").symlink_to(outside)
    with pytest.raises(ArchiveError, match=f"v.zip: a link to {outside}, outside the folder"):
        unpack("v.zip", source, tmp_path / "root")
