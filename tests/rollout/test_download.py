"""The download command, against a stand-in of the hub and archives that the tests make."""

from __future__ import annotations

import io
import os
import pathlib
import random
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Mapping
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects

from benchmarks.hub import Hub
from paravt_extras import download as command
from rollout.evaluation.benchmarks import BENCHMARKS, load
from rollout.evaluation.files import VideoFolder
from tests.rollout.evaluation import published

ROOT = pathlib.Path(__file__).parents[2]
VIDEOS = {f"v{n}.mp4": random.Random(n).randbytes(40_000) for n in range(6)}


def zipped(members: Mapping[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        for name, content in members.items():
            file.writestr(name, content)
    return stream.getvalue()


def tarred(members: Mapping[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as file:
        for name, content in members.items():
            about = tarfile.TarInfo(name)
            about.size = len(content)
            file.addfile(about, io.BytesIO(content))
    return stream.getvalue()


def write(folder: pathlib.Path, files: Mapping[str, bytes]) -> pathlib.Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def sliced(name: str, content: bytes, numbers: list[str]) -> dict[str, bytes]:
    step = -(-len(content) // len(numbers))
    return {
        name.format(number): content[n * step : (n + 1) * step] for n, number in enumerate(numbers)
    }


@pytest.fixture(scope="module")
def data_sets(tmp_path_factory) -> dict[str, pathlib.Path]:
    """A small data set in the layout of each split, by split."""
    root = tmp_path_factory.mktemp("hub")
    names = list(VIDEOS)
    made = {
        "videomme": {
            "videos_chunked_01.zip": zipped({f"data/{n}": VIDEOS[n] for n in names[:3]}),
            "videos_chunked_02.zip": zipped({f"data/{n}": VIDEOS[n] for n in names[3:]}),
            "subtitle.zip": zipped({"subtitle/v0.srt": b"1\n"}),
            "README.md": b"not asked for",
        },
        "longvideobench": {
            **sliced(
                "videos.tar.part.{}",
                tarred({f"videos/{n}": VIDEOS[n] for n in names}),
                ["aa", "ab", "ac"],
            ),
            "subtitles.tar": b"not asked for",
        },
        "mlvu": {
            "video_part_1.zip": zipped({n: VIDEOS[n] for n in names[:3]}),
            "video_part_2.zip": zipped({n: VIDEOS[n] for n in names[3:]}),
        },
        "lvbench": {
            "video_chunks/1.zip": zipped({f"all/{n}": VIDEOS[n] for n in names[:3]}),
            "more/1.zip": zipped({f"all/{n}": VIDEOS[n] for n in names[3:]}),
        },
        "mmvu": {f"videos/Art/{n}.mp4": VIDEOS[f"v{n}.mp4"] for n in range(6)},
        "charades": {},
    }
    records = {
        "videomme": [published.videomme("1-1", "v0"), published.videomme("2-1", "v5")],
        "longvideobench": [published.longvideobench("v3_0", "v3.mp4", 1, ["a", "b"])],
        "mlvu": [published.mlvu("v2.mp4")],
        "lvbench": [published.lvbench("1", "v1.mp4"), published.lvbench("2", "v4.mp4")],
        "mmvu": [published.mmvu("1", "Art", 1)],
        "charades": [published.charades("v1.mp4")],
    }
    for split, files in made.items():
        (root / split).mkdir()
        published.write_split(split, write(root / split, files), records[split])
    return {split: root / split for split in made}


@pytest.fixture
def fetched(monkeypatch, data_sets) -> list[str]:
    """The names of downloaded files. The hub is replaced by folders."""
    names: list[str] = []
    folders = {BENCHMARKS[split].source: folder for split, folder in data_sets.items()}

    def download(id, repo_type, allow_patterns, local_dir):
        files = [file for file in folders[id].rglob("*") if file.is_file()]
        listed = [file.relative_to(folders[id]).as_posix() for file in files]
        for name in filter_repo_objects(listed, allow_patterns=allow_patterns):
            if not (local_dir / name).exists():
                names.append(name)
                write(local_dir, {name: (folders[id] / name).read_bytes()})
        return local_dir

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)

    def info(api, id, repo_type, **options):
        files = (file for file in folders[id].rglob("*") if file.is_file())
        names = (file.relative_to(folders[id]).as_posix() for file in files)
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name, size=1) for name in names])

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", info)
    return names


def videos_of(split: str, folder: pathlib.Path) -> list[bytes | None]:
    """The videos of the split's questions, as the evaluation finds them."""
    videos = VideoFolder(folder)
    paths = [videos.find(item.question.video) for item in load(split, str(folder)).items]
    return [None if path is None else (folder / path).read_bytes() for path in paths]


@pytest.mark.parametrize("split", ["videomme", "longvideobench", "lvbench", "mlvu", "mmvu"])
def test_a_split_can_be_evaluated_in_the_folder_of_its_download(split, fetched, tmp_path):
    assert command.main([split, "--to", str(tmp_path / "to")]) == 0
    videos = videos_of(split, tmp_path / "to")
    assert videos and all(content in VIDEOS.values() for content in videos)
    assert not [name for name in fetched if name in ("README.md", "subtitles.tar")]
    left = [p for p in (tmp_path / "to").iterdir() if ".zip" in p.name or ".tar" in p.name]
    assert left == [], "archives are deleted"


def test_a_second_download_fetches_no_archive_again(fetched, tmp_path):
    own = tmp_path / "to" / "mine" / "videos_chunked_99.zip"
    own.parent.mkdir(parents=True)
    own.write_bytes(b"the user's")
    for _ in range(2):
        assert command.main(["videomme", "--to", str(tmp_path / "to")]) == 0
    assert own.exists()
    assert fetched.count("videos_chunked_01.zip") == 1
    # The same files with subtitles shown.
    assert command.main(["videomme_wsub", "--to", str(tmp_path / "to")]) == 0
    assert fetched.count("videos_chunked_01.zip") == 1


def test_a_kill_while_archives_are_deleted_fetches_none_again(fetched, tmp_path, monkeypatch):
    unlink = pathlib.Path.unlink

    def stop_at_the_second(path, *arguments, **options):
        if path.name == "videos_chunked_02.zip":
            raise KeyboardInterrupt
        unlink(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "unlink", stop_at_the_second)
        assert command.main(["videomme", "--to", str(tmp_path)]) == 130
    before = list(fetched)
    assert command.main(["videomme", "--to", str(tmp_path)]) == 0
    assert fetched == before
    assert not list(tmp_path.glob("*.zip"))


def test_a_damaged_archive_is_kept_and_named_in_one_line(fetched, tmp_path, monkeypatch, capsys):
    download = huggingface_hub.snapshot_download

    def damaging(id, local_dir, **arguments):
        download(id, local_dir=local_dir, **arguments)
        file = local_dir / "videos_chunked_02.zip"
        file.write_bytes(file.read_bytes()[:-30])
        return local_dir

    monkeypatch.setattr(huggingface_hub, "snapshot_download", damaging)
    assert command.main(["videomme", "--to", str(tmp_path)]) == 1
    assert "videos_chunked_02.zip: cannot be unpacked" in capsys.readouterr().err.splitlines()[-1]
    assert (tmp_path / "videos_chunked_02.zip").exists()
    (tmp_path / "videos_chunked_02.zip").unlink()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert command.main(["videomme", "--to", str(tmp_path)]) == 0
    assert None not in videos_of("videomme", tmp_path)


def test_videos_that_are_not_on_the_hub_are_named(fetched, tmp_path, capsys):
    assert command.main(["charades", "--to", str(tmp_path)]) == 0
    assert "Charades_v1_480.zip of https://" in capsys.readouterr().err


def environment(hub: Hub, home: pathlib.Path) -> dict[str, str]:
    return os.environ | hub.variables(home) | {"PYTHONPATH": str(ROOT)}


@pytest.mark.slow
def test_a_download_killed_anywhere_is_completed_by_the_same_command(data_sets, tmp_path):
    repositories = {f"datasets/{BENCHMARKS[s].source}": f for s, f in data_sets.items()}
    target = tmp_path / "to"
    line = [sys.executable, "-m", "paravt_extras.download", "videomme", "--to", str(target)]
    milestones = ("videomme", "videos_chunked_01.zip", "data/v0.mp4", "data/v3.mp4")
    with Hub(repositories, cuts=3) as hub:
        env = environment(hub, tmp_path / "home")
        for milestone in milestones:
            process = subprocess.Popen(line, cwd=tmp_path, env=env, stderr=subprocess.DEVNULL)
            deadline = time.monotonic() + 60
            while not (target / milestone).exists() and process.poll() is None:
                assert time.monotonic() < deadline
                time.sleep(0.002)
            process.send_signal(signal.SIGKILL)
            process.wait()
        done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {p.name: p.read_bytes() for p in (target / "data").glob("*.mp4")} == VIDEOS
    assert (target / "subtitle/v0.srt").exists()
    assert not list(target.rglob("*.zip"))
