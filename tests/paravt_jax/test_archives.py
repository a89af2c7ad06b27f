"""Archives of videos: whole, in parts, interrupted, damaged and hostile."""

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
import tarfile
import time
import tracemalloc
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
FORMATS = ("v.zip", "v.tar", "v.tar.gz", "v.tgz")


def packed(name: str, members: Mapping[str, bytes]) -> bytes:
    """An archive of the format that its name says."""
    stream = io.BytesIO()
    if name.endswith(".zip"):
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as file:
            file.mkdir("empty")
            for member, content in members.items():
                file.writestr(member, content)
    else:
        with tarfile.open(fileobj=stream, mode="w:gz" if name.endswith("gz") else "w") as file:
            folder = tarfile.TarInfo("empty")
            folder.type = tarfile.DIRTYPE
            file.addfile(folder)
            for member, content in members.items():
                about = tarfile.TarInfo(member)
                about.size = len(content)
                file.addfile(about, io.BytesIO(content))
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


@pytest.mark.parametrize("name", FORMATS)
def test_an_archive_is_unpacked_once(source, tmp_path, name):
    (source / name).write_bytes(packed(name, VIDEOS))
    unpack_all(source, tmp_path / "root")
    assert contents(tmp_path / "root") == VIDEOS
    (tmp_path / "root/data/a.mp4").write_bytes(b"changed since")
    unpack_all(source, tmp_path / "root")
    assert (tmp_path / "root/data/a.mp4").read_bytes() == b"changed since"


@pytest.mark.parametrize("name", FORMATS)
def test_an_archive_cut_off_anywhere_is_refused_and_not_marked(source, tmp_path, name):
    whole = packed(name, VIDEOS)
    minimum = whole.rstrip(b"\0") if name == "v.tar" else whole
    # A tar may be cut within the zeros behind its end marker, which it does not need.
    last = len(minimum) // 512 * 512 + 1535 if name == "v.tar" else len(whole) - 1
    cuts = {*random.Random(2).sample(range(last), 30), last}
    if name == "v.tar":  # tarfile itself does not notice a cut between two files
        with tarfile.open(fileobj=io.BytesIO(whole)) as file:
            cuts |= {member.offset for member in file}
    for cut in cuts:
        root = tmp_path / f"root{cut}"
        (source / name).write_bytes(whole[:cut])
        with pytest.raises(ArchiveError, match=name):
            unpack_all(source, root)
        assert not list(root.rglob(".unpacked/*")), cut
        (source / name).write_bytes(whole)
        unpack_all(source, root)
        assert contents(root) == VIDEOS, "the whole archive mends what the broken one left"


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "member", ["../out.mp4", "/tmp/out.mp4", "x\\..\\out.mp4", "a/../../out.mp4"]
)
def test_nothing_is_written_outside_the_root(source, tmp_path, name, member):
    (source / name).write_bytes(packed(name, {"in.mp4": b"y", member: b"x"}))
    with pytest.raises(ArchiveError, match=r"out\.mp4 would be written outside .* it is kept"):
        unpack_all(source, tmp_path / "root")
    assert not list(tmp_path.rglob("*out.mp4"))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_in_a_tar_are_refused(source, tmp_path, kind):
    with tarfile.open(source / "v.tar", "w") as file:
        link = tarfile.TarInfo("data")
        link.type = kind
        link.linkname = "/etc"
        file.addfile(link)
    with pytest.raises(ArchiveError, match="data is a link, a device or"):
        unpack_all(source, tmp_path / "root")


def test_links_in_a_zip_are_refused(source, tmp_path):
    with zipfile.ZipFile(source / "v.zip", "w") as file:
        link = zipfile.ZipInfo("data")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        file.writestr(link, "/etc")
    with pytest.raises(ArchiveError, match="data is a link"):
        unpack_all(source, tmp_path / "root")
    assert not (tmp_path / "root/data").exists()


def test_an_encrypted_zip_is_refused(source, tmp_path):
    content = bytearray(packed("v.zip", {"a.mp4": b"x"}))
    for magic, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        for place in range(len(content)):
            if content[place : place + 4] == magic:
                content[place + offset] |= 1
    (source / "v.zip").write_bytes(content)
    with pytest.raises(ArchiveError, match=r"v\.zip: .*encrypted.*unpack it yourself"):
        unpack_all(source, tmp_path / "root")


@pytest.mark.parametrize(
    ("name", "members"),
    [
        ("v.zip", {"zeros": bytes(30_000_000)}),
        ("v.tar.gz", {"zeros": bytes(30_000_000)}),
        # Headers take room, too.
        ("v.tar.gz", {f"{n}": b"" for n in range(6000)}),
    ],
)
def test_an_archive_that_explodes_is_refused(source, tmp_path, name, members):
    (source / name).write_bytes(packed(name, members))
    with pytest.raises(ArchiveError, match="more than 50 times its size"):
        unpack_all(source, tmp_path / "root")
    assert sum(map(len, contents(tmp_path / "root").values())) < 5_000_000


def test_a_huge_header_is_refused_before_it_is_read(source, tmp_path):
    """tarfile reads it whole, so 12 kB would take 120 MB of memory and more."""
    huge = {"comment": "x" * 30_000_000}
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz", pax_headers=huge) as file:
        file.addfile(tarfile.TarInfo("a.mp4"))
    (source / "v.tar.gz").write_bytes(stream.getvalue())
    tracemalloc.start()
    with pytest.raises(ArchiveError, match="a header in it has more than"):
        unpack_all(source, tmp_path / "root")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5_000_000


@pytest.mark.parametrize("name", ["v.zip", "v.tar.gz"])
@pytest.mark.parametrize("members", [("x", "x/y"), ("x" * 300,), (".",)])
def test_names_that_no_disk_takes_are_errors_of_the_archive(source, tmp_path, name, members):
    (source / name).write_bytes(packed(name, dict.fromkeys(members, b"x")))
    with pytest.raises(ArchiveError, match=rf"{name}: cannot be unpacked .* it is kept"):
        unpack_all(source, tmp_path / "root")


def test_a_full_disk_may_recover(source, tmp_path, monkeypatch):
    (source / "v.zip").write_bytes(packed("v.zip", VIDEOS))

    def full(*_arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(zipfile.ZipFile, "extractall", full)
    with pytest.raises(ArchiveError, match="No space left") as error:
        unpack_all(source, tmp_path / "root")
    assert exit_code(error.value) == TEMPORARY


@pytest.mark.parametrize("zeros", [10_240, 4_000_000])
def test_an_archive_of_zeros_is_refused(source, tmp_path, zeros):
    """What an interrupted download leaves where its file was reserved in advance."""
    (source / "v.tar").write_bytes(bytes(zeros))
    with pytest.raises(ArchiveError, match=r"v\.tar"):
        unpack_all(source, tmp_path / "root")


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


@pytest.mark.parametrize("name", ["v.zip", "v.tar"])
def test_unpacking_is_repeated_after_a_kill(source, tmp_path, name):
    members = {f"{n}.mp4": random.Random(n).randbytes(3000) for n in range(40)}
    (source / name).write_bytes(packed(name, members))
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
    outside.write_bytes(packed("v.zip", VIDEOS))
    source = tmp_path / "source"
    source.mkdir()
    (source / "v.zip").symlink_to(outside)
    with pytest.raises(ArchiveError, match=f"v.zip: a link to {outside}, outside the folder"):
        unpack("v.zip", source, tmp_path / "root")
