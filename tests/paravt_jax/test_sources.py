"""Published files from where they are: folders, buckets, archives."""

from __future__ import annotations

import zipfile

import fsspec
import pytest

from paravt_jax.data import sources


@pytest.fixture
def bucket():
    """A bucket that lives in memory."""
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


def test_a_local_folder_is_itself(tmp_path):
    assert sources.fetch(str(tmp_path), tmp_path / "copy", ["*.parquet"]) == tmp_path


def test_a_buckets_files_are_copied_once(bucket, tmp_path):
    copy = sources.fetch(bucket, tmp_path / "copy", ["*.parquet"])
    files = {
        str(path.relative_to(copy)): path.read_bytes() for path in copy.rglob("*") if path.is_file()
    }
    assert files == {"rl.parquet": b"abc", "sft/a.parquet": b"de"}
    (copy / "rl.parquet").write_bytes(b"xyz")  # of the right length: it is taken for what it is
    (copy / "sft" / "a.parquet").write_bytes(b"cut off before")
    sources.fetch(bucket, tmp_path / "copy", ["*.parquet"])
    assert (copy / "rl.parquet").read_bytes() == b"xyz" and (
        copy / "sft" / "a.parquet"
    ).read_bytes() == b"de"


@pytest.mark.parametrize(
    ("source", "error", "words"),
    [
        ("no/such/folder", FileNotFoundError, "no such file or folder, and no hub id .owner/name."),
        ("owner/no-such-set", FileNotFoundError, "the hub did not give it"),
        ("memory://nothing", FileNotFoundError, "memory://nothing: (holds no|cannot be listed)"),
        ("nonsense://a", FileNotFoundError, "that fsspec knows"),
        (
            "gs://bucket/a",
            ModuleNotFoundError,
            "gs:// paths need gcsfs: pip install gcsfs, or copy the files",
        ),
    ],
)
def test_other_sources_are_refused_with_a_remedy(source, error, words, tmp_path):
    if error is ModuleNotFoundError:
        try:
            import gcsfs  # noqa: F401  # pyright: ignore[reportMissingImports]
        except ImportError:
            pass
        else:
            pytest.skip("gcsfs is installed")
    with pytest.raises(error, match=words):
        sources.fetch(source, tmp_path, ["*.parquet"])


def test_a_hub_id_is_asked_for_as_a_data_set(tmp_path, monkeypatch):
    asked = []

    def download(*args, **kwargs):
        asked.append((args, kwargs))
        return str(tmp_path)

    monkeypatch.setattr(sources.huggingface_hub, "snapshot_download", download)
    assert sources.fetch("ParaVT/ParaVT-Parquet", tmp_path / "unused", ["*.parquet"]) == tmp_path
    assert asked == [
        (("ParaVT/ParaVT-Parquet",), {"repo_type": "dataset", "allow_patterns": ["*.parquet"]})
    ]


def test_a_folder_with_media_is_the_root_as_it_is(tmp_path):
    archive(tmp_path / "source" / "selfqa.zip", {"selfqa/a.mp4": b"a"})
    (tmp_path / "source" / "selfqa").mkdir()
    (tmp_path / "source" / "selfqa" / "a.mp4").write_bytes(b"mine")
    assert sources.media_root(str(tmp_path / "source"), tmp_path / "out") == tmp_path / "source"
    assert not (tmp_path / "out").exists()


def test_archives_are_unpacked_into_one_root(tmp_path):
    archive(tmp_path / "source" / "selfqa.zip", {"selfqa/a.mp4": b"a", "selfqa/": b""})
    archive(
        tmp_path / "source" / "museg" / "charades" / "charades_0.zip",
        {"museg/charades/b.mp4": b"b" * 10_000},
    )
    told = []
    root = sources.media_root(
        str(tmp_path / "source"), tmp_path / "out", lambda *step: told.append(step)
    )
    assert root == tmp_path / "out" / "media" and told == [(1, 2), (2, 2)]
    assert (root / "selfqa/a.mp4").read_bytes() == b"a" and len(
        (root / "museg/charades/b.mp4").read_bytes()
    ) == 10_000
    (root / "selfqa/a.mp4").write_bytes(b"another")
    sources.media_root(str(tmp_path / "source"), tmp_path / "out")
    assert (root / "selfqa/a.mp4").read_bytes() == b"another"  # unpacked before, and not again


def test_unpacking_goes_on_where_it_was_cut_off(tmp_path):
    archive(tmp_path / "a.zip", {"x/1.mp4": b"one", "x/2.mp4": b"two"})
    (tmp_path / "root" / "x").mkdir(parents=True)
    (tmp_path / "root" / "x" / "1.mp4").write_bytes(b"ONE")
    (tmp_path / "root" / "x" / "2.mp4").write_bytes(b"t")
    sources.unpack([tmp_path / "a.zip"], tmp_path / "root")
    assert (tmp_path / "root" / "x" / "1.mp4").read_bytes() == b"ONE" and (
        tmp_path / "root" / "x" / "2.mp4"
    ).read_bytes() == b"two"


@pytest.mark.parametrize("name", ["../out.mp4", "/etc/out.mp4", "x\\..\\out.mp4"])
def test_nothing_is_written_outside_the_root(tmp_path, name):
    archive(tmp_path / "a.zip", {name: b"x"})
    with pytest.raises(ValueError, match="would lie outside"):
        sources.unpack([tmp_path / "a.zip"], tmp_path / "root")
    assert not list(tmp_path.rglob("out.mp4"))


def test_a_broken_archive_is_named(tmp_path):
    (tmp_path / "a.zip").write_bytes(b"PK no zip")
    with pytest.raises(ValueError, match="a.zip: cannot be unpacked .*download it again"):
        sources.unpack([tmp_path / "a.zip"], tmp_path / "root")
