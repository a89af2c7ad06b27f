"""The check before a run: every item with its good and its bad case, and the table."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import http.server
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator

import jax
import pytest
from flax import nnx

import train.run
from configs import RECIPES
from configs.paravt_8b import paravt_8b
from configs.paravt_tiny import paravt_tiny
from configs.sft import sft_8b
from models.model import VisionLanguageModel
from models.qwen3_vl.sizes import tiny
from models.weights.hf import save
from paravt_extras.check import (
    asking,
    data,
    disk,
    items,
    loggers,
    machine,
    run_folder,
    sizes,
    weights,
)
from paravt_extras.check.asking import Asked, NoAccess, NoAnswer, Repository
from paravt_extras.check.finding import Finding, table
from paravt_extras.check.subject import Subject
from paravt_extras.slices import Devices
from paravt_jax.data import video
from paravt_jax.data.archives import Archive, mark_of
from paravt_jax.data.stored_settings import lock
from paravt_jax.method.judge import JudgeSettings
from paravt_jax.method.rewards import RewardSettings
from paravt_jax.processes.exit_codes import FAILED, TEMPORARY, exit_code
from paravt_jax.world.vocabulary import save_tokenizer
from tests.paravt_jax.published_files import answered, rl_row, write_rl, write_sft
from train.cli import parse
from train.durable.run_directory import RunDirectory
from train.learn.optimizer import OptimizerSettings
from train.prepare import prepare
from train.published_data import DataSettings
from train.run import resolved
from train.settings import LogSettings, ModelSettings, Run, change

HOSTS_PROGRAM = str(pathlib.Path(__file__).with_name("hosts_program.py"))
MODEL = "Qwen/Qwen3-VL-8B-Instruct"
GB = 10**9


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> pathlib.Path:
    """An empty cache of the hub."""
    folder = tmp_path / "hub"
    monkeypatch.setattr(asking.constants, "HF_HUB_CACHE", str(folder))
    return folder


@pytest.fixture(scope="module")
def tiny_model(small_vocabulary, tmp_path_factory) -> pathlib.Path:
    """A folder of tiny weights with their tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    save_tokenizer(small_vocabulary.tokenizer, folder / "tokenizer")
    model = nnx.jit(lambda: VisionLanguageModel(tiny(small_vocabulary.size), rngs=nnx.Rngs(0)))()
    files = sorted((folder / "tokenizer").iterdir())
    save(model, folder / "model", files=files, max_shard_bytes=10**6)
    return folder / "model"


def subject(run: Run, folder: pathlib.Path, limit: float = 5.0) -> Subject:
    return Subject(run, resolved(run), folder, Asked(limit))


def with_model(path: str | pathlib.Path, size: str = "8b") -> Run:
    return change(paravt_8b(), "paravt_8b", {"model.path": str(path), "model.size": size})


def answers(monkeypatch, files: dict[str, int] | Exception) -> None:
    """Lets the hub list these files for every repository, or fail."""

    def ask(name: str, kind: str) -> Repository:
        if isinstance(files, Exception):
            raise files
        return Repository("main1", files, {file: f"blob-{file}" for file in files})

    monkeypatch.setattr(asking, "ask_hub", ask)


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    return finding


# --- versions, devices, memory, videos ---


def test_installed_versions_are_those_that_the_project_requires(tmp_path):
    finding = only(machine.versions(subject(paravt_tiny(), tmp_path)))
    assert finding.problem == ""
    assert f"jax {jax.__version__}" in finding.found


def test_another_version_of_jax_is_an_error_with_the_command(tmp_path, monkeypatch):
    installed = machine.installed
    monkeypatch.setattr(
        machine, "installed", lambda name: "0.9.1" if name == "jax" else installed(name)
    )
    finding = only(machine.versions(subject(paravt_tiny(), tmp_path)))
    assert finding.problem == "error"
    assert "jax 0.9.1" in finding.found and finding.needed.startswith("jax<0.12,>=0.10")
    assert finding.remedy.startswith("pip install 'jax<")


@pytest.mark.parametrize(("version", "problem"), [("", "error"), ("0.0.42", "warning")])
def test_a_tpu_host_needs_the_libtpu_of_the_plan(version, problem, tmp_path, monkeypatch):
    installed = machine.installed
    monkeypatch.setattr(
        machine, "installed", lambda name: version if name == "libtpu" else installed(name)
    )
    assert only(machine.versions(subject(paravt_tiny(), tmp_path))).problem == ""
    monkeypatch.setattr(machine, "has_tpu_chips", lambda: True)
    # Only libtpu is looked at: `requests` belongs to the same extra.
    required = [each for each in machine.requirements() if each.name == "libtpu"]
    monkeypatch.setattr(machine, "requirements", lambda: required)
    finding = only(machine.versions(subject(paravt_tiny(), tmp_path)))
    assert finding.problem == problem
    assert finding.needed == "libtpu==0.0.51" and finding.remedy == "pip install -e '.[tpu]'"


def test_devices_are_named_and_too_few_are_an_error(tmp_path):
    finding = only(machine.devices(subject(paravt_tiny(), tmp_path)))
    assert finding.problem == ""
    assert finding.found.startswith(f"{len(jax.devices())} x cpu")
    large = change(paravt_tiny(), "large", {"mesh.fsdp": 4096})
    finding = only(machine.devices(subject(large, tmp_path)))
    assert finding.problem == "error"
    assert finding.needed.startswith("mesh: 1 x 4096 x 1 ")
    assert "takes 4096 devices, but there" in finding.needed
    assert "--config=large" not in finding.remedy, "the name of a run is no recipe"


def test_a_gpu_without_bfloat16_is_an_error_of_recipes_that_compute_in_it(tmp_path, monkeypatch):
    t4 = types.SimpleNamespace(platform="gpu", device_kind="Tesla T4", compute_capability="7.5")
    monkeypatch.setattr(jax, "local_devices", lambda: [t4])
    monkeypatch.setattr(machine, "found_devices", lambda: Devices("1 x Tesla T4", 1, 1, 14 * GB))
    assert only(machine.devices(subject(paravt_tiny(), tmp_path))).problem == ""
    finding = only(machine.devices(subject(paravt_8b(), tmp_path)))
    assert finding.problem == "error"
    assert "Tesla T4" in finding.found and "tiny recipes" in finding.found


def test_sizes_are_chosen_for_the_memory_of_a_gpu(tmp_path):
    def check(name: str, gib: float) -> list[Finding]:
        gpu = Devices("1 x NVIDIA L4", 1, 1, gib * 2.0**30)
        run = RECIPES[name]()
        return machine.devices(dataclasses.replace(subject(run, tmp_path), devices=gpu))

    sizes, plan = check("paravt_2b_lora", 20.2)
    assert sizes.found == "1 x NVIDIA L4, 20.20 GiB each"
    assert "engine.slots 16" in sizes.needed
    assert plan.found.startswith("estimates in GiB: cold start ")
    assert plan.needed == "at most 20.20 GiB per device"
    refused = only(check("paravt_8b_lora", 20.2))
    assert refused.problem == "error" and "v5e:2x2" in refused.remedy


def test_host_memory_is_compared_with_the_arrays_of_a_host(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "host_memory", lambda: 400e9)
    assert only(machine.memory(subject(paravt_8b(), tmp_path))).problem == ""
    monkeypatch.setattr(machine, "host_memory", lambda: 16e9)
    finding = only(machine.memory(subject(paravt_8b(), tmp_path)))
    assert finding.problem == "error"
    assert (
        finding.found == "16.0 GB of memory" and "weights and optimizer 98.3 GB" in finding.needed
    )


def test_a_device_of_unknown_memory_serves_a_recipe_that_leaves_nothing_open(tmp_path):
    unknown = Devices("1 x NPU 3000", 1, 1, None)
    tiny = dataclasses.replace(subject(paravt_tiny(), tmp_path), devices=unknown)
    finding = only(machine.devices(tiny))
    assert (finding.problem, finding.found) == ("", "1 x NPU 3000, memory unknown")
    large = dataclasses.replace(subject(paravt_8b(), tmp_path), devices=unknown)
    finding = only(machine.devices(large))
    assert finding.problem == "error" and "1 x NPU 3000" in finding.needed
    assert finding.remedy.startswith("set --mesh.fsdp, ")


def test_host_memory_equals_that_of_the_plan():
    """The parts that need no compiler, on v5e:4x4 with its four hosts."""
    plans = json.loads((pathlib.Path(__file__).parents[2] / "docs/plan-paravt_8b.json").read_text())
    (plan,) = [plan for plan in plans if plan["topology"] == "v5e:4x4"]
    planned = plan["host_memory"]
    found = sizes.host_memory(paravt_8b(), hosts=4, on_cpu=False)
    names = {
        "frames.cache_mib": "store of frames' features (frames.cache_mib)",
        "a checkpoint in flight": "its share of a checkpoint in flight",
        "the reference": "its share of the reference",
        "the vision tower": "the frozen tower",
    }
    for mine, other in names.items():
        assert found[mine] == pytest.approx(planned[other], rel=1e-3)
    # The update pads the batch.
    assert 0.3 < found["the batch"] / planned["its share of the batch"] <= 1


def test_the_decoders_of_videos_are_listed(tmp_path, monkeypatch):
    monkeypatch.setattr(video, "decord", None)
    finding = only(machine.videos(subject(paravt_tiny(), tmp_path)))
    assert finding.problem == "" and finding.found.startswith("PyAV") and "," not in finding.found


# --- weights ---


def test_random_weights_are_no_item(tmp_path):
    assert weights.weights(subject(paravt_tiny(), tmp_path)) == []


def test_a_folder_of_weights_is_found(tiny_model, tmp_path):
    finding = only(weights.weights(subject(with_model(tiny_model, "tiny"), tmp_path)))
    assert finding.problem == "" and finding.found.endswith("MB in the folder")


def test_weights_of_another_size_are_an_error(tiny_model, tmp_path):
    finding = only(weights.weights(subject(with_model(tiny_model, "8b"), tmp_path)))
    assert finding.problem == "error" and "model.size 8b" in finding.found
    assert "text.hidden_size" in finding.remedy


def copied(model: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    target.mkdir(parents=True)
    for file in model.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_missing_and_cut_off_files_of_weights_are_errors(tiny_model, tmp_path):
    folder = copied(tiny_model, tmp_path / "model")
    run = subject(with_model(folder, "tiny"), tmp_path)
    (folder / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    assert "no tokenizer.json" in only(weights.weights(run)).found
    (tmp_path / "tokenizer.json").rename(folder / "tokenizer.json")
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-5])
    finding = only(weights.weights(run))
    assert finding.problem == "error" and shard.name in finding.found
    shard.unlink()
    finding = only(weights.weights(run))
    assert finding.problem == "error" and f"lacks {shard.name}" in finding.found
    shard.write_bytes(content)
    assert only(weights.weights(run)).problem == ""


def test_a_path_that_is_neither_a_folder_nor_an_id_is_an_error(tmp_path):
    finding = only(weights.weights(subject(with_model("no/such/model"), tmp_path)))
    assert finding.problem == "error" and "no/such/model" in finding.found


def test_weights_in_the_cache_need_no_hub(tiny_model, cache, tmp_path, monkeypatch):
    repository = cache / "models--owner--tiny"
    copied(tiny_model, repository / "snapshots" / "main1")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("main1")
    answers(monkeypatch, NoAnswer("the hub was asked"))
    finding = only(weights.weights(subject(with_model("owner/tiny", "tiny"), tmp_path)))
    assert finding.problem == "" and finding.found.endswith("in the hub's cache")


def test_half_downloaded_weights_say_what_is_left(cache, tmp_path, monkeypatch):
    sizes = {"a.safetensors": 8000, "b.safetensors": 8000, "config.json": 1000, "video.mp4": 10**12}
    answers(monkeypatch, sizes)
    blobs = cache / "models--Qwen--Qwen3-VL-8B-Instruct" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "blob-a.safetensors").write_bytes(b"a" * 8000)
    (blobs / "blob-b.safetensors.incomplete").write_bytes(b"b" * 1000)
    finding = only(weights.weights(subject(paravt_8b(), tmp_path)))
    assert finding == Finding(
        "weights",
        f"{MODEL}: half downloaded, 9 kB of 17 kB in the hub's cache",
        "8 kB, which the run downloads",
        f"hf download {MODEL}",
        "warning",
    )


@pytest.mark.parametrize(
    ("error", "words", "command"),
    [
        (NoAccess("gated: it asks"), "gated", "hf auth login"),
        (NoAnswer("no answer from the hub"), "no answer", f"hf download {MODEL}"),
    ],
)
def test_weights_that_cannot_be_downloaded_are_an_error(
    error, words, command, tmp_path, monkeypatch
):
    answers(monkeypatch, error)
    monkeypatch.setattr(asking.constants, "ENDPOINT", "https://mirror")
    finding = only(weights.weights(subject(paravt_8b(), tmp_path)))
    assert finding.problem == "error" and words in finding.found
    assert command in finding.remedy.splitlines()
    if isinstance(error, NoAccess):
        assert finding.remedy.splitlines()[0] == f"check that there is https://mirror/{MODEL}"


def test_a_repository_without_weights_is_an_error(cache, tmp_path, monkeypatch):
    answers(monkeypatch, {"config.json": 1000, "tokenizer.json": 7000})
    finding = only(weights.weights(subject(paravt_8b(), tmp_path)))
    assert finding.problem == "error" and "*.safetensors" in finding.needed


def test_the_hub_is_not_asked_offline():
    # The tests set HF_HUB_OFFLINE.
    with pytest.raises(NoAnswer, match="HF_HUB_OFFLINE"):
        asking.ask_hub(MODEL, "model")


class Hub(http.server.BaseHTTPRequestHandler):
    """Lists one open repository and one gated one, has two that fail, and no other."""

    def do_GET(self) -> None:
        found = {"id": "o/r", "sha": "1" * 40, "siblings": [], "gated": False}
        file = {"rfilename": "a.safetensors", "size": 7, "blobId": "b" * 40}
        status, code, message = 200, "", ""
        if self.path.startswith("/api/models/owner/gated/auth-check"):
            status, code = 403, "GatedRepo"
        elif self.path.startswith("/api/models/owner/gated"):
            found["gated"] = "manual"
        elif self.path.startswith("/api/models/owner/open"):
            lfs = {"sha256": "c" * 64, "size": 9, "pointerSize": 1}
            found["siblings"] = [file, {**file, "rfilename": "b.safetensors", "lfs": lfs}]
        elif self.path.startswith("/api/models/owner/busy"):
            status = 500
        elif self.path.startswith("/api/models/owner/expired"):
            status, message = 401, "Invalid credentials in Authorization header"
        else:
            status, code = 404, "RepoNotFound"
        body = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if code:
            self.send_header("X-Error-Code", code)
        if message:
            self.send_header("X-Error-Message", message)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    """The address of a loopback hub."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{found.server_port}"
        found.shutdown()


def test_the_hub_is_asked_for_files_and_access(server):
    program = """
import sys
from paravt_extras.check import asking
for name in ("owner/open", "owner/gated", "owner/none", "owner/expired", "owner/busy"):
    try:
        print(asking.ask_hub(name, "model"))
    except (asking.NoAccess, asking.NoAnswer) as error:
        print(type(error).__name__, error)
"""
    environment = {**os.environ, "HF_ENDPOINT": server, "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    open_repository, gated, none, expired, busy = done.stdout.splitlines()
    assert "'a.safetensors': 7" in open_repository and "c" * 64 in open_repository
    assert gated.startswith("NoAccess gated")
    assert none.startswith("NoAccess not on the hub")
    assert expired.startswith("NoAccess") and "token" in expired
    assert busy.startswith("NoAnswer status 500")


# --- data ---


@pytest.fixture(scope="module")
def published(small_world, small_vocabulary, tmp_path_factory) -> Run:
    """A run on a small set in the published layout, which is not prepared yet."""
    folder = tmp_path_factory.mktemp("published")
    paths = [each.path for each in small_world.videos]
    write_rl(folder / "annotations", [rl_row(path) for path in paths] + [rl_row("gone.mp4")])
    conversations = [answered(paths[0], "What is it?")]
    write_sft(folder / "annotations", conversations, "paravt_sft_charades_12k4.parquet")
    save_tokenizer(small_vocabulary.tokenizer, folder / "tokenizer")
    settings = DataSettings(
        annotations=str(folder / "annotations"),
        media=str(small_world.folder),
        folder=str(folder / "set"),
        frames=4,
        heldout=1,
        workers=1,
    )
    model = ModelSettings(path=str(folder / "tokenizer"), size="8b")
    return dataclasses.replace(sft_8b(), data=settings, model=model, unreadable_share=0.2)


def test_a_set_is_found_before_and_after_its_preparation(published, tmp_path):
    fresh = subject(published, tmp_path)
    prepared, annotations, media = data.data(fresh)
    assert prepared.problem == "warning" and "not prepared" in prepared.found
    assert f"--data.folder {published.data.folder}" in prepared.remedy
    renamed = change(published, "my-run", {})
    assert "my-run" not in data.data(subject(renamed, tmp_path))[0].remedy
    assert (annotations.problem, media.problem) == ("", "")
    assert not data.is_prepared(fresh)
    rehearsed = change(published, "sft_8b-rehearsal", {"rehearse": True})
    finding = data.data(subject(rehearsed, tmp_path))[0]
    assert "minutes" in finding.needed and not finding.remedy
    prepare(published, tmp_path)
    assert only(data.data(fresh)).found.endswith("prepared, 5 rows")
    assert data.is_prepared(fresh)
    strict = change(published, "sft_8b", {"data.max_left_out": 0.1})
    finding = only(data.data(subject(strict, tmp_path)))
    assert finding.problem == "error" and "1 of 5 rows: 1 missing video" in finding.found

    other = change(published, "sft_8b", {"data.frames": 5})
    finding = only(data.data(subject(other, tmp_path)))
    assert finding.problem == "error" and "frames: 4 -> 5" in finding.remedy

    moved = change(published, "sft_8b", {"data.media": str(tmp_path)})
    finding = data.data(subject(moved, tmp_path))[0]
    assert finding.problem == "warning" and "other sources" in finding.found

    plan = pathlib.Path(published.data.folder) / "plan.json"
    content = plan.read_text()
    plan.write_text(json.dumps(json.loads(content) | {"root": str(tmp_path / "gone")}))
    finding = only(data.data(fresh))
    assert finding.problem == "error" and str(tmp_path / "gone") in finding.found
    plan.write_text(content)


def test_sources_without_files_are_errors(tmp_path):
    (tmp_path / "empty").mkdir()
    changes = {
        "data.annotations": str(tmp_path / "empty"),
        "data.media": "no/such/folder",
        "data.folder": str(tmp_path / "set"),
    }
    run = change(sft_8b(), "sft_8b", changes)
    _, annotations, media = data.data(subject(run, tmp_path))
    assert annotations.problem == "error" and "*.parquet" in annotations.found
    assert media.problem == "error" and "no/such/folder" in media.found


def test_sources_on_the_hub_are_counted_in_bytes(tmp_path, monkeypatch):
    files = {"a.parquet": 2 * GB, "videos.zip": 300 * GB, "README.md": 5}
    answers(monkeypatch, files)
    run = change(sft_8b(), "sft_8b", {"data.folder": str(tmp_path / "set")})
    _, annotations, media = data.data(subject(run, tmp_path))
    assert annotations.needed == "2.0 GB, which the run downloads"
    assert annotations.remedy == "hf download --repo-type dataset ParaVT/ParaVT-Parquet"
    assert media.needed == ("300 GB, which the run downloads; about 300 GB unpacked (an estimate)")
    archive = Archive("videos.zip", ("videos.zip",), 300 * GB)
    mark = mark_of(archive, tmp_path / "set" / "media")
    mark.parent.mkdir(parents=True)
    mark.touch()
    assert data.data(subject(run, tmp_path))[2].needed == "300 GB, which the run downloads"


@pytest.mark.parametrize("error", [NoAnswer("no answer"), NoAccess("gated")])
def test_sources_that_cannot_be_reached_are_errors(error, tmp_path, monkeypatch):
    answers(monkeypatch, error)
    monkeypatch.setattr(asking.constants, "ENDPOINT", "https://mirror")
    run = change(sft_8b(), "sft_8b", {"data.folder": str(tmp_path / "set")})
    for finding in data.data(subject(run, tmp_path))[1:]:
        assert finding.problem == "error" and str(error) in finding.found
        assert "hf download --repo-type dataset ParaVT/" in finding.remedy
        if isinstance(error, NoAccess):
            assert "https://mirror/datasets/ParaVT/" in finding.remedy


def test_a_bucket_is_listed_or_names_its_package(tmp_path, monkeypatch):
    import fsspec
    import fsspec.core

    system = fsspec.filesystem("memory")
    system.pipe_file("/bucket/annotations/a.parquet", b"x" * 4000)
    changes = {
        "data.annotations": "memory://bucket/annotations",
        "data.media": "gs://bucket/media",
        "data.folder": str(tmp_path / "set"),
    }
    run = change(sft_8b(), "sft_8b", changes)
    found = fsspec.core.url_to_fs

    def without_gcsfs(address):
        if address.startswith("gs://"):
            raise ImportError("no gcsfs")
        return found(address)

    monkeypatch.setattr(fsspec.core, "url_to_fs", without_gcsfs)
    _, annotations, media = data.data(subject(run, tmp_path))
    system.rm("/bucket", recursive=True)
    assert annotations.needed == "4 kB, which the run downloads"
    assert media.problem == "error" and media.remedy == "pip install -e '.[gcs]'"


def test_own_questions_are_read_and_their_videos_looked_for(small_world, tmp_path):
    lines = [
        {"id": str(n), "video": path, "question": "What?", "answer": "it"}
        for n, path in enumerate((small_world.videos[0].path, "gone.mp4"))
    ]
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def found(questions: pathlib.Path, media: pathlib.Path) -> Finding:
        changes = {"data.questions": str(questions), "data.media": str(media)}
        changes |= {"data.heldout": 0, "sft": None}
        return only(data.data(subject(change(paravt_8b(), "own", changes), tmp_path)))

    finding = found(file, small_world.folder)
    assert finding.problem == "warning" and "2 questions" in finding.found
    assert "1 without their video" in finding.found
    assert found(file, tmp_path / "none").problem == "error"
    assert "none.jsonl" in found(tmp_path / "none.jsonl", small_world.folder).found
    file.write_text(json.dumps(lines[0]) + "\n")
    assert found(file, small_world.folder).problem == ""


def test_a_recipe_without_data_is_an_error(tmp_path):
    run = dataclasses.replace(paravt_tiny(), world=None, text=None)
    assert only(data.data(subject(run, tmp_path))).problem == "error"


# --- disk ---


def free_space(monkeypatch, count: float) -> None:
    usage = type(disk.shutil.disk_usage("/"))
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: usage(10**15, 0, int(count)))


def test_checkpoints_take_the_bytes_of_weights_and_moments():
    for optimizer, count in (
        (OptimizerSettings(moment_dtype="bfloat16"), 81.9e9),
        (OptimizerSettings(moment_dtype="float32"), 98.3e9),
    ):
        assert sizes.state_bytes(paravt_8b(), optimizer) == pytest.approx(count, rel=1e-3)
    assert sizes.published_bytes(paravt_8b()) == pytest.approx(17.5e9, rel=1e-2)
    saved = sizes.checkpoints(paravt_8b())["rl"]
    # The tower is stored too. Two checkpoints are kept, and the best.
    assert saved.bytes == pytest.approx(81.9e9 + 2.3e9, rel=1e-3)
    assert saved.keep == 3
    assert (saved.saves_after(0), saved.saves_after(12), saved.saves_after(50)) == (6, 5, 1)


def checkpoint(folder: pathlib.Path, phase: str, step: int, count: int = 10**6) -> None:
    place = folder / "checkpoints" / phase / str(step)
    place.mkdir(parents=True)
    (place / "state").write_bytes(b"x" * count)


def saving(folder: pathlib.Path, **fields: object) -> dict[str, float]:
    """What the tiny run needs for checkpoints, in checkpoints."""
    run = change(paravt_tiny(), "saving", {"sft.save_every": 10, "rl.save_every": 10, **fields})
    one = sizes.checkpoints(run)["rl"].bytes
    return {
        need.step: round((need.bytes or 0.0) / one, 2)
        for need in disk.needs(subject(run, folder))
        if need.step.startswith("checkpoint")
    }


def test_checkpoints_that_stay_are_counted_and_one_that_is_being_written(tmp_path):
    run = paravt_tiny()
    assert run.sft is not None and run.rl is not None
    fresh = saving(tmp_path, **{"rl.control": False})
    assert fresh == {
        "checkpoints of sft": 2,
        "checkpoints of rl": 3,
        "checkpoint being written": 1,
    }
    # With a single save, there is no older one that is removed afterwards.
    rare = {"sft.save_every": 10**6, "rl.save_every": 10**6, "rl.control": False}
    assert saving(tmp_path, **rare) == {
        "checkpoints of sft": 1,
        "checkpoints of rl": 1,
        "checkpoint being written": 0,
    }
    # An interrupted run saves once more.
    checkpoint(tmp_path, "sft", 7, int(sizes.checkpoints(run)["sft"].bytes))
    assert saving(tmp_path, **rare)["checkpoints of sft"] == 1


def test_a_finished_phase_needs_no_room(tmp_path):
    run = paravt_tiny()
    assert run.sft is not None and run.rl is not None
    checkpoint(tmp_path, "sft", run.sft.steps)
    assert "checkpoints of sft" not in saving(tmp_path)
    for phase in ("rl", "control"):
        checkpoint(tmp_path, phase, run.rl.steps)
    assert saving(tmp_path) == {"checkpoint being written": 0}


def test_a_cold_start_from_another_disk_is_copied(tmp_path, monkeypatch):
    checkpoint(tmp_path / "first", "sft", 3, 16 * 10**6)
    fields = {"start": str(tmp_path / "first"), "rl.control": False}
    assert saving(tmp_path / "run", **fields)["checkpoints of sft (copied)"] == 0
    # Every path counts as a disk of its own.
    stat = pathlib.Path.stat

    def elsewhere(path: pathlib.Path, **options: bool) -> os.stat_result:
        found = list(stat(path, **options))
        found[2] = hash(path)
        return os.stat_result(found)

    monkeypatch.setattr(pathlib.Path, "stat", elsewhere)
    assert saving(tmp_path / "run", **fields)["checkpoints of sft (copied)"] == 1
    checkpoint(tmp_path / "run", "sft", 3)
    assert saving(tmp_path / "run", **fields)["checkpoints of sft (copied)"] == 0


def test_the_disk_has_room_for_every_later_step_or_the_lack_is_named(tmp_path, monkeypatch):
    answers(monkeypatch, {"a.safetensors": 17 * GB, "a.parquet": GB, "media.zip": 300 * GB})
    run = change(paravt_8b(), "paravt_8b", {"data.folder": str(tmp_path / "set")})
    free_space(monkeypatch, 2e12)
    finding = only(disk.disk(subject(run, tmp_path / "run")))
    assert finding.problem == "" and finding.found.startswith("2,000 GB free on /")
    for step in (
        "weights 17.0 GB",
        "media 300 GB",
        "media unpacked (estimate) 300 GB",
        "checkpoints of rl 253 GB",
        "checkpoint being written 101 GB",
        "export 35.1 GB",
    ):
        assert step in finding.needed
    free_space(monkeypatch, 500e9)
    finding = only(disk.disk(subject(run, tmp_path / "run")))
    assert finding.problem == "error"
    assert "HF_HOME" in finding.remedy and "--checkpoints.keep" in finding.remedy
    of_a_slice = dataclasses.replace(subject(run, tmp_path / "run"), topology="v5e:4x4")
    assert only(disk.disk(of_a_slice)).problem == "warning"


def test_what_is_on_the_disk_already_needs_no_room(tmp_path, monkeypatch):
    run = paravt_tiny()

    def needed() -> dict[str, float | None]:
        return {need.step: need.bytes for need in disk.needs(subject(run, tmp_path))}

    before = needed()["checkpoints of rl"]
    assert before is not None
    checkpoint(tmp_path, "rl", 14)
    assert needed()["checkpoints of rl"] == before - 1e6
    assert "export" in needed()
    (tmp_path / "model").mkdir()
    assert "export" not in needed()


def test_sizes_that_the_hub_does_not_tell_are_named_as_unknown(tmp_path, monkeypatch):
    answers(monkeypatch, NoAnswer("no answer"))
    run = change(paravt_8b(), "paravt_8b", {"data.folder": str(tmp_path / "set")})
    finding = only(disk.disk(subject(run, tmp_path / "run")))
    assert "weights 17.5 GB" in finding.needed and "media unknown" in finding.needed


# --- the run's folder ---


def test_a_folder_is_new_or_holds_this_run(tmp_path):
    run = paravt_tiny()
    mine = subject(run, tmp_path / "run")
    assert only(run_folder.run_directory(mine)).found == f"{tmp_path / 'run'}: new"
    assert not (tmp_path / "run").exists()
    with RunDirectory(tmp_path / "run", resolved(run)):
        pass
    (tmp_path / "run" / "metrics.jsonl").touch()
    before = sorted(tmp_path.rglob("*"))
    finding = only(run_folder.run_directory(mine))
    assert finding.problem == "" and "continues" in finding.found
    assert sorted(tmp_path.rglob("*")) == before

    other = subject(change(run, "paravt_tiny", {"rl.steps": 7}), tmp_path / "run")
    finding = only(run_folder.run_directory(other))
    assert finding.problem == "error" and "another configuration" in finding.found
    assert "rl.steps: 56 -> 7" in finding.remedy

    with lock(tmp_path / "run" / ".lock"):
        finding = only(run_folder.run_directory(mine))
    assert finding.problem == "error" and f"process (id {os.getpid()})" in finding.found
    assert only(run_folder.run_directory(mine)).problem == ""


def test_a_folder_that_cannot_be_used_is_an_error(tmp_path):
    run = paravt_tiny()
    (tmp_path / "file").touch()
    finding = only(run_folder.run_directory(subject(run, tmp_path / "file" / "run")))
    assert finding.problem == "error" and "not a writable folder" in finding.found
    finding = only(run_folder.run_directory(subject(run, tmp_path)))
    assert finding.problem == "error" and "holds file" in finding.found


def test_a_run_whose_frames_join_on_arrival_resumes_up_to_rounding(tmp_path, capsys):
    argv = ["--config=paravt_tiny", "--run-dir", str(tmp_path / "run"), "--check"]
    train.run.main([*argv, "--frames.admission=arrival"])
    assert "resuming        ok       equals" in capsys.readouterr().out
    finding = only(run_folder.resuming(subject(paravt_8b(), tmp_path)))
    assert finding.problem == "" and finding.needed.endswith("--frames.admission=counted")

    train.run.main(argv)
    assert "resuming" not in capsys.readouterr().out
    # Nothing is played, so frames join no episode.
    assert run_folder.resuming(subject(sft_8b(), tmp_path)) == []


def test_the_run_to_start_from_has_to_have_a_cold_start(tmp_path):
    first = tmp_path / "first"

    def found(**fields: object) -> Finding:
        run = change(paravt_tiny(), "second", {"start": str(first), **fields})
        _, finding = run_folder.run_directory(subject(run, tmp_path / "run"))
        return finding

    assert found().problem == "error" and "checkpoints/sft" in found().found
    run = paravt_tiny()
    assert run.sft is not None
    with RunDirectory(first, resolved(run)):
        for name in ("videos", "records", "tokenizer", "checkpoints/align", "checkpoints/sft"):
            (first / name).mkdir(parents=True)
    assert found().problem == "error" and f"last step, {run.sft.steps}" in found().found
    (first / "checkpoints" / "sft" / str(run.sft.steps)).mkdir()
    assert found().problem == ""
    other = found(**{"sft.rows": run.sft.rows + 1})
    assert other.problem == "error" and "sft.rows" in other.remedy


# --- loggers and the judge ---


def test_loggers_are_installed_and_logged_in(tmp_path, monkeypatch):
    def found(tensorboard: bool, wandb: bool) -> list[tuple[str, str]]:
        run = dataclasses.replace(paravt_tiny(), log=LogSettings(tensorboard, wandb))
        return [(f.problem, f.found) for f in loggers.loggers(subject(run, tmp_path))]

    assert found(False, False) == []
    assert found(True, False) == [("", "tensorboardX")]
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    here = {"tensorboardX", "wandb"}
    monkeypatch.setattr(
        loggers.importlib.util, "find_spec", lambda name: object() if name in here else None
    )
    assert found(False, True) == [("error", "wandb, not logged in")]
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert found(False, True) == [("", "wandb, offline (WANDB_MODE)")]
    monkeypatch.delenv("WANDB_MODE")
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password key\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert found(False, True) == [("", "wandb, logged in")]
    here.clear()
    assert [problem for problem, _ in found(True, True)] == ["error", "error"]
    run = dataclasses.replace(paravt_tiny(), log=LogSettings(True, True))
    for finding in loggers.loggers(subject(run, tmp_path)):
        (flag,) = re.findall(r"--\S+", finding.remedy.replace("-e '.[wandb]'", ""))
        without = parse(["--config=paravt_tiny", flag], {"paravt_tiny": lambda: run})
        assert without.log in (LogSettings(False, True), LogSettings(True, False))


@pytest.mark.parametrize(("status", "problem"), [(200, ""), (401, "error"), (503, "warning")])
def test_the_judge_is_asked(status, problem, tmp_path, monkeypatch):
    monkeypatch.setattr(loggers, "ask_judge", lambda settings: status)
    assert loggers.judge(subject(paravt_tiny(), tmp_path)) == []
    assert (
        only(loggers.judge(subject(judged("http://localhost:1/v1"), tmp_path))).problem == problem
    )


def judged(address: str) -> Run:
    rewards = RewardSettings(
        open_ended="judge",
        judge=JudgeSettings(address, model="a-judge"),
    )
    return change(paravt_tiny(), "judged", {"rl.rewards": rewards})


def test_a_judge_that_does_not_answer_is_a_warning(server, tmp_path):
    assert "status 404" in only(loggers.judge(subject(judged(f"{server}/v1"), tmp_path))).found
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    finding = only(loggers.judge(subject(judged(f"http://127.0.0.1:{port}/v1"), tmp_path)))
    assert finding.problem == "warning" and "no answer" in finding.found


# --- all items ---


def test_an_exception_and_a_slow_item_hide_no_other(tmp_path, monkeypatch):
    def fails(subject: Subject) -> list[Finding]:
        raise RuntimeError("a\nbad surprise")

    def hangs(subject: Subject) -> list[Finding]:
        time.sleep(30)
        return []

    def works(subject: Subject) -> list[Finding]:
        return [Finding("works", "well")]

    monkeypatch.setattr(items, "LIMIT", 0.5)
    looked = {"fails": fails, "hangs": hangs, "works": works}
    start = time.monotonic()
    failed, hanging, working = items.check(paravt_tiny(), {}, tmp_path, looked)
    assert time.monotonic() - start < 5
    assert (failed.item, failed.problem) == ("fails", "warning")
    assert failed.found == "could not be checked (RuntimeError: a bad surprise)"
    assert (hanging.item, hanging.problem) == ("hangs", "warning")
    assert working.problem == ""


def test_a_question_without_an_answer_ends_at_the_deadline():
    asked = Asked(0.3)
    start = time.monotonic()
    for _ in range(3):
        with pytest.raises(NoAnswer, match="no answer within"):
            asked.answer(time.sleep, 20)
    assert time.monotonic() - start < 2
    with pytest.raises(concurrent.futures.TimeoutError):
        Asked(5.0).answer(times_out)


def times_out() -> None:
    raise concurrent.futures.TimeoutError("of the question itself")


def test_hosts_that_differ_are_named():
    jax_10, jax_9 = (Finding("versions", f"jax {n}", must_agree=True) for n in (10, 9))
    disks = [Finding("disk", "9 GB"), Finding("disk", "9 GB"), Finding("disk", "1 GB")]
    full = Finding("disk", "0 GB", "2 GB", "free it", "error")
    found = items.merged(
        [[jax_10, disks[0]], [jax_10, disks[1]], [jax_9, disks[2]], [jax_10, full]]
    )
    assert [(finding.item, finding.found, finding.problem) for finding in found] == [
        ("versions", "hosts 0-1, 3: jax 10", ""),
        ("versions", "host 2: jax 9", "error"),
        ("disk", "hosts 0-1: 9 GB", ""),
        ("disk", "host 2: 1 GB", ""),
        ("disk", "host 3: 0 GB", "error"),
    ]
    assert items.merged([[jax_10], [jax_10]]) == [jax_10]


def test_hosts_with_the_same_settings_are_one_line():
    assert only(items.same_settings([{"seed": 1}, {"seed": 1}])).problem == ""
    assert len(items.same_settings([{"seed": 1}, {"seed": 2}, {"seed": 1}, {"seed": 3}])) == 2


def test_the_table_fits_100_columns_and_lists_the_commands_below():
    long = "word " * 30 + "/a/very/long/path" * 6
    findings = [
        Finding("disk", long, long, "first command\nsecond command", "error"),
        Finding("weights", "here"),
        Finding("disk", "another", "more", "first command\nsecond command", "error"),
        Finding("data", "half", "all", "fetch " + "x" * 120, "warning"),
    ]
    lines = table(findings).splitlines()
    remedies = lines.index("disk (error):")
    assert all(len(line) <= 100 for line in lines[:remedies])
    assert "".join(lines[:remedies]).count("word") == 60, "no word is lost"
    assert lines[remedies + 1 : remedies + 3] == ["  first command", "  second command"]
    assert lines.count("disk (error):") == 1
    assert "  fetch " + "x" * 120 in lines
    assert "weights (" not in table(findings)


def test_a_small_run_prints_nothing_and_its_check_is_cheap(tmp_path, capsys):
    run = paravt_tiny()
    settings = resolved(run)
    jax.devices()
    before = time.process_time()
    items.require_ready(run, settings, tmp_path / "run")
    assert time.process_time() - before < 0.3
    assert capsys.readouterr().out == ""


def test_a_large_run_prints_one_line_and_its_warnings(tmp_path, monkeypatch, capsys):
    found = [
        Finding("devices", "16 x TPU v5 lite on 4 hosts"),
        Finding("versions", "jax 0.10.2"),
        Finding("weights", "in the cache"),
        Finding("judge", "no answer", "a server", "start it", "warning"),
    ]
    monkeypatch.setattr(items, "check", lambda run, settings, folder: found)
    items.require_ready(paravt_8b(), {}, tmp_path)
    assert capsys.readouterr().out.splitlines() == [
        "checked: 16 x TPU v5 lite on 4 hosts; in the cache",
        "warning: judge: no answer; needed: a server",
    ]


def test_a_run_that_would_stop_prints_the_table_and_makes_nothing(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    argv = ["--config=paravt_tiny", "--mesh.fsdp", "512", "--run-dir", str(tmp_path)]
    assert train.run.main(argv) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "512 devices" in shown.err and "notes.txt" in shown.err, "no item hides another"
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("also", [[], [Finding("weights", "none", "all", "get them", "error")]])
def test_only_a_lack_of_room_may_pass_by_itself(tmp_path, monkeypatch, capsys, also):
    full = Finding("disk", "1 MB free on /", "2 MB", "free 1 MB on /", "error")
    monkeypatch.setattr(items, "check", lambda run, settings, folder: [full, *also])
    with pytest.raises(items.NotReadyError) as error:
        items.require_ready(paravt_8b(), {}, tmp_path)
    assert exit_code(error.value) == (FAILED if also else TEMPORARY)
    others = " (and 1 more in the table)" if also else ""
    wanted = f"nothing was started: disk: 1 MB free on /; free 1 MB on /{others}"
    assert str(error.value) == wanted
    assert "disk (error):" in capsys.readouterr().err


def test_the_check_alone_makes_nothing(tmp_path, capsys):
    folder = tmp_path / "run"
    assert train.run.main(["--config=paravt_tiny", "--run-dir", str(folder), "--check"]) == 0
    shown = capsys.readouterr().out
    assert "run directory   ok" in shown and "error" not in shown
    assert not folder.exists()


@pytest.mark.slow
def test_a_laptop_without_anything_gets_the_whole_table_within_30_seconds(tmp_path):
    """The hub accepts connections and never answers, as behind a network that drops packets."""
    with socket.create_server(("127.0.0.1", 0), backlog=16) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        environment = {
            **os.environ,
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_OFFLINE": "0",
            "PYTHONPATH": str(pathlib.Path(__file__).parents[2]),
        }
        start = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "train.run", "--config=paravt_8b", "--check"],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        seconds = time.monotonic() - start
    assert done.returncode == 1, done.stderr[-3000:]
    assert seconds < 30
    shown = [line.split()[0] for line in done.stdout.splitlines() if line and line[0].isalpha()]
    for item in ("devices", "host", "versions", "weights", "data", "annotations", "media", "disk"):
        assert item in shown
    assert "no answer" in " ".join(done.stdout.split())
    assert not list(tmp_path.glob("runs")), "nothing was made"


# --- several hosts ---


@pytest.mark.slow
def test_two_processes_that_differ_are_named(together, tmp_path):
    ended = together([HOSTS_PROGRAM, "look", str(tmp_path)], 2, devices=1)
    first, second = (json.loads(process.out.splitlines()[-1]) for process in ended)
    assert first == second
    by_item: dict[str, list[dict]] = {}
    for finding in first["findings"]:
        by_item.setdefault(finding["item"], []).append(finding)
    ours, theirs = by_item["versions"]
    assert ours["found"].startswith("host 0: ") and not ours["problem"]
    assert theirs["found"].startswith("host 1: ") and "jax 0.10.99" in theirs["found"]
    assert theirs["problem"] == "error"
    # The hosts differ in their memory. All of them use the least.
    (devices,) = by_item["devices"]
    assert "7.00 GiB each" in devices["found"]
    (code,) = by_item["code"]
    (settings,) = by_item["settings"]
    assert not code["problem"]
    assert settings["problem"] == "error" and settings["found"].startswith("host 1 ")
    assert "rl.steps: 0 -> 1" in settings["remedy"]
    (shared,) = by_item["shared disk"]
    assert shared["problem"] == "error" and "process 1" in shared["found"]


@pytest.mark.slow
def test_a_process_whose_others_do_not_come_still_prints_its_table(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[2])}
    command = "--config=paravt_tiny --check --hosts.count 2 --hosts.index 1 --hosts.coordinator"
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "train.run", *command.split(), f"127.0.0.1:{port}"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    # It waits for 24 s in all; on a busy machine, imports add several seconds.
    assert time.monotonic() - start < 45
    assert done.returncode == TEMPORARY, done.stderr[-3000:]
    assert "not all processes joined" in " ".join(done.stdout.split())
    for item in ("versions", "disk", "devices", "host memory"):
        assert item in done.stdout
