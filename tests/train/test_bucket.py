"""The files of a run in a bucket: order of writes, exclusive use, and refusals in one line."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pathlib
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import pytest

from configs.paravt_tiny import paravt_tiny
from paravt_jax.data.stored import DamagedFileError
from paravt_jax.processes.exit_codes import FAILED, TEMPORARY, exit_code
from train.durable import lease as leases
from train.durable.bucket import (
    MANIFEST,
    BucketError,
    BucketFiles,
    OutageError,
    named_errors,
)
from train.durable.checkpoint import Checkpoints
from train.durable.lease import Lease, LeaseError
from train.durable.run_folder import RunFolder, RunFolderError
from train.run import main
from train.settings import change

ROOT = pathlib.Path(__file__).parents[2]


def fill(folder: pathlib.Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)


def content(folder: pathlib.Path) -> dict[str, str]:
    return {
        file.relative_to(folder).as_posix(): file.read_text()
        for file in folder.rglob("*")
        if file.is_file()
    }


def test_a_missing_bucket_is_one_line(store, tmp_path):
    (tmp_path / "a").touch()
    push = BucketFiles("gs://no-such/run", tmp_path).push
    for use in (push, lambda: Lease("gs://no-such/run")):
        with pytest.raises(
            BucketError, match="gs://no-such/run.*: refused .*check the name"
        ) as error:
            use()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(("code", "refused"), [(401, True), (403, True), (503, False)])
def test_an_error_of_the_store_is_judged_by_its_code(code, refused):
    """Its text may quote a path with another number."""
    retry = pytest.importorskip("gcsfs.retry")
    with pytest.raises(BucketError) as error, named_errors("gs://bucket/rl/403"):
        raise retry.HttpError({"code": code, "message": "b/bucket/o/rl%2F403"})
    assert isinstance(error.value, OutageError) != refused
    assert exit_code(error.value) == (FAILED if refused else TEMPORARY)


def test_a_list_of_files_that_leads_out_of_the_folder_is_refused(store, tmp_path):
    store.write(f"out/{MANIFEST}", b'["../a"]')
    with pytest.raises(DamagedFileError, match=rf"{MANIFEST}: \.\./a would be written outside"):
        BucketFiles("gs://bucket/out", tmp_path / "folder").pull()


@pytest.mark.slow
def test_an_outage_is_waited_for_and_a_long_one_is_one_line(store, tmp_path):
    (tmp_path / "a").write_text("one")
    files = BucketFiles("gs://bucket/away", tmp_path)
    store.close_for(5.0)
    files.push()
    assert store.read("away/a") == b"one"
    (tmp_path / "a").write_text("other")
    with pytest.raises(OutageError) as error, store.outage():
        files.push()
    assert "gs://bucket/away: the store cannot be reached" in str(error.value)
    assert "the same command continues" in str(error.value) and "\n" not in str(error.value)
    files.push()
    assert store.read("away/a") == b"other"


@pytest.fixture
def quick(monkeypatch) -> None:
    monkeypatch.setattr(leases, "LENGTH", 1.5)
    monkeypatch.setattr(leases, "EVERY", 0.3)
    monkeypatch.setattr(leases, "_LOOK", 0.1)


def test_only_one_process_holds_a_lease(store, quick, capsys):
    address = "gs://bucket/held"
    with contextlib.closing(Lease(address)):
        with pytest.raises(LeaseError, match=r"gs://bucket/held is in use by process \d+ on "):
            Lease(address)
        assert "waiting up to" in capsys.readouterr().err
    assert not store.names("held/")
    Lease(address).close()


def test_of_several_that_begin_together_one_gets_the_lease(store, quick):
    def begin(_: int) -> Lease | None:
        with contextlib.suppress(LeaseError):
            return Lease("gs://bucket/together")

    with ThreadPoolExecutor(4) as pool:
        (holder,) = [lease for lease in pool.map(begin, range(4)) if lease is not None]
    holder.require()
    holder.close()


def test_the_lease_of_a_dead_process_is_taken_over(store, quick):
    store.write(f"dead/{leases.NAME}", b"process 1 on a host, 1")
    start = time.monotonic()
    Lease("gs://bucket/dead").close()
    assert time.monotonic() - start > leases.LENGTH


def test_a_frozen_process_learns_it_before_it_pushes(store, quick, monkeypatch):
    """Its thread did not run either."""
    monkeypatch.setattr(leases, "EVERY", 60.0)
    with contextlib.closing(Lease("gs://bucket/frozen")) as lease:
        store.write(f"frozen/{leases.NAME}", b"process 2 on a host, 2")
        monkeypatch.setattr(leases, "EVERY", 0.3)
        time.sleep(leases.LENGTH)
        with pytest.raises(LeaseError, match="taken over by process 2"):
            lease.require()


def test_a_lease_outlives_a_short_outage(store, quick):
    with contextlib.closing(Lease("gs://bucket/short-outage")) as lease:
        with store.outage():
            time.sleep(2 * leases.EVERY)
        # gcsfs waits for one to two seconds between its attempts.
        time.sleep(3.0)
        lease.require()
        with pytest.raises(LeaseError):
            Lease("gs://bucket/short-outage")


def test_a_pull_makes_a_folder_equal_to_what_was_pushed(store, tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    files_here = BucketFiles("gs://bucket/equal", here)
    files = {"config.json": "{}", "empty": "", "records/a/b": "x", "metrics.jsonl": "1\n"}
    fill(here, files)
    # Not for other machines, or not complete.
    local = [".lock", "a.json.tmp", ".model.x.partial/b"]
    fill(here, dict.fromkeys(local, "x"))
    files_here.push()
    fill(here, {"metrics.jsonl": "1\n2\n"})
    (here / "records/a/b").unlink()
    files_here.push()
    fill(there, {"old/file": "x"})
    BucketFiles("gs://bucket/equal", there).pull()
    del files["records/a/b"]
    assert content(there) == files | {"metrics.jsonl": "1\n2\n"}
    assert not (there / "old").exists()
    assert not store.names("equal/records")
    BucketFiles("gs://bucket/equal", there).pull(lambda name: name == "empty")
    assert content(there) == {"empty": ""}


class _Killed(Exception):
    pass


def test_a_push_may_be_killed_between_any_two_writes(store, tmp_path, monkeypatch):
    """A folder is there as a whole or not at all."""
    before = {"config.json": "{}", "a.json": "1"}
    after = {"config.json": "{}", "b.json": "1", "model/one": "1", "model/two": "2"}
    left = 100
    kept = BucketFiles("gs://bucket/killed", tmp_path)._store

    def dying(method):
        def call(*arguments):
            nonlocal left
            # One object after another.
            many = isinstance(arguments[0], list)
            for each in zip(*arguments, strict=True) if many else [arguments]:
                left -= 1
                if left < 0:
                    raise _Killed
                method(*([one] if many else one for one in each))

        return call

    for name in ("put", "pipe_file", "rm"):
        monkeypatch.setattr(kept, name, dying(getattr(kept, name)))
    outcomes = []
    for number in range(8):
        address = f"gs://bucket/killed-{number}"
        here = tmp_path / str(number)
        files_here = BucketFiles(address, here)
        assert files_here._store is kept
        fill(here, before)
        left = 100
        files_here.push()
        (here / "a.json").unlink()
        fill(here, after)
        left = number
        with contextlib.suppress(BucketError):
            files_here.push()
        left = 100
        there = tmp_path / f"{number}-pulled"
        BucketFiles(address, there).pull()
        pulled = content(there)
        assert sum(name.startswith("model/") for name in pulled) in (0, 2)
        outcomes.append(pulled == after)
    assert outcomes[0] is False and outcomes[-1] is True


def test_a_deleted_object_is_like_a_deleted_file_and_a_damaged_list_is_named(store, tmp_path):
    files = {"config.json": "{}", "records/x": "1"}
    fill(tmp_path / "a", files)
    BucketFiles("gs://bucket/lost-object", tmp_path / "a").push()
    store.delete("lost-object/records/x")
    again = BucketFiles("gs://bucket/lost-object", tmp_path / "a")
    again.pull()
    assert content(tmp_path / "a") == {"config.json": "{}"}
    fill(tmp_path / "a", files)
    again.push()
    assert store.read("lost-object/records/x") == b"1"
    store.write(f"lost-object/{MANIFEST}", b"[3]")
    with pytest.raises(DamagedFileError, match=f"gs://bucket/lost-object/{MANIFEST}: damaged"):
        BucketFiles("gs://bucket/lost-object", tmp_path / "b").pull()


def test_a_run_is_claimed_with_its_settings_on_any_machine(store, machine, quick):
    settings = {"name": "x", "sft": {"steps": 3}}
    run_folder = RunFolder("gs://bucket/claims/x/")
    with contextlib.ExitStack() as stack:
        run_folder.claim(settings, stack)
        fill(run_folder.folder, {"metrics.jsonl": "1\n"})
        checkpoints = Checkpoints(run_folder.checkpoints / "sft", {"settings": settings})
        checkpoints.save(3, {"w": jnp.zeros(2)}, {})
        checkpoints.close()
        with pytest.raises(BlockingIOError, match=f"^{run_folder.folder}.lock: in use"):
            RunFolder("gs://bucket/claims/x").claim(settings, contextlib.ExitStack())
    # A run that ends pushes what it wrote last.
    assert store.read("claims/x/metrics.jsonl") == b"1\n"
    config = store.read("claims/x/config.json")
    # The checkpoint has the settings, too.
    store.delete("claims/x/config.json")
    machine("second")
    again = RunFolder("gs://bucket/claims/x")
    assert again.require_usable(settings)
    assert again.folder != run_folder.folder
    with contextlib.ExitStack() as stack:
        again.claim(settings, stack)
        assert content(again.folder)["metrics.jsonl"] == "1\n"
        assert store.read("claims/x/config.json") == config
    other = settings | {"name": "y"}
    for use in (again.require_usable, lambda x: again.claim(x, contextlib.ExitStack())):
        with pytest.raises(RunFolderError) as error:
            use(other)
        assert "--run-dir gs://bucket/claims/x holds a run of another config" in str(error.value)
        assert str(again.folder) not in str(error.value)


@pytest.mark.parametrize(
    ("field", "path", "message"),
    [
        ("run_dir", "s3://bucket/run", "run_dir: s3://bucket/run is an address that runs cannot"),
        ("run_dir", "az://bucket/run", "give a local folder, one that is mounted, or gs://"),
        ("run_dir", "gs://bucket", "run_dir: gs://bucket; give gs://BUCKET/FOLDER"),
        ("run_dir", "gs://x/y", "BUCKET has three or more"),
        ("run_dir", "gs://bucket//run", "gs://BUCKET/FOLDER"),
    ],
)
def test_other_addresses_are_refused_in_one_line(field, path, message):
    with pytest.raises(ValueError) as error:
        change(paravt_tiny(), "x", {field: path})
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"gs://bucket/x needs .* '\.\[gcs\]'"):
        RunFolder("gs://bucket/x")


def test_a_run_without_the_package_ends_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["--config=paravt_tiny", "--run-dir", "gs://bucket/x", "--check"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: gs://bucket/x needs ")


def test_compiled_programs_are_kept_in_the_bucket(store):
    program = """
import jax
from models.compilation import use_cache
from paravt_jax.data.any_path import any_path
from paravt_jax.processes import hosts

hosts.process_count = lambda: 2
use_cache(any_path("gs://bucket/programs"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
jax.jit(lambda x: x + 1)(1.0)
"""
    environment = dict(os.environ, **store.variables)
    del environment["JAX_COMPILATION_CACHE_DIR"]
    subprocess.run([sys.executable, "-c", program], env=environment, cwd=ROOT, check=True)
    assert store.names("programs/compiled/")
