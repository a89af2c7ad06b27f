"""Communication between the processes of a run: two real ones, and one alone."""

import errno
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import pytest

from paravt_jax.processes import cluster, hosts
from paravt_jax.processes.exit_codes import TEMPORARY, exit_code
from tests.processes import ROOT, free_port, lost_others
from train.durable.checkpoint import SaveError

PROGRAM = str(pathlib.Path(__file__).parents[1] / "train/hosts_program.py")


@pytest.mark.slow
def test_two_processes_communicate(together, tmp_path):
    ended = together([PROGRAM, "talk", str(tmp_path)], 2, devices=1)
    first, second = (json.loads(process.out.splitlines()[-1]) for process in ended)
    assert (first["first"], second["first"]) == (True, False)
    assert (first["found"], second["found"]) == (False, True), "the second finds the first's file"
    values = [{"index": i, "long": "x" * (10 + 1000 * i)} for i in (0, 1)]
    assert first["gathered"] == second["gathered"] == values
    # Both stop, but the other's signal is not recorded as one's own, which may still come.
    assert first["agreed"] == [signal.SIGTERM, None]
    assert second["agreed"] == [signal.SIGTERM, signal.SIGTERM]
    assert first["different"] == second["different"]
    assert first["different"].startswith("seed: 0 on process 0 and 1 on process 1; ")
    assert first["apart"] == second["apart"]
    assert first["apart"].startswith(f"run_dir: {tmp_path / '1'} on process 1 ")
    assert first["stopped"] == second["stopped"] == "143 kept"
    assert first["left"] == second["left"] == []
    assert first["share"] == [[0, 3], [0, 4], [0, 1]]
    assert second["share"] == [[3, 6], [4, 7], [1, 1]]


@pytest.mark.slow
def test_when_the_first_process_fails_the_others_do_not_wait(together, tmp_path):
    first, second = together([PROGRAM, "fail", str(tmp_path)], 2, devices=1)
    assert first.code != 0
    assert first.err.strip().splitlines()[-1] == "OSError: disk full"
    assert second.code != 0
    assert "process 0 failed first: OSError: disk full" in second.err


@pytest.mark.slow
def test_the_sources_of_a_rehearsal_are_made_together(assets, together, tmp_path):
    ended = together([PROGRAM, "rehearse", str(tmp_path)], 2, devices=1)
    first, second = (json.loads(process.out.splitlines()[-1]) for process in ended)
    assert first == second
    assert first["complete"]


@pytest.mark.slow
def test_when_a_process_dies_the_others_end_with_a_message(together, tmp_path):
    start = time.monotonic()
    command = [PROGRAM, "die", str(tmp_path)]
    survivor, killed = together(command, 2, devices=1, heartbeat=10)
    assert killed.code == -signal.SIGKILL
    assert lost_others(survivor), survivor
    assert time.monotonic() - start < 60


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("field: 3; give 4"), 1),
        (FileNotFoundError(errno.ENOENT, "no such file"), 1),
        (OSError(errno.ENOSPC, "disk full"), TEMPORARY),
        (ConnectionResetError("gone"), TEMPORARY),
        (hosts.HostsError("process 0 failed first: OSError: disk full", TEMPORARY), TEMPORARY),
        (SaveError("saving failed"), TEMPORARY),
    ],
)
def test_the_exit_code_of_an_error_says_whether_a_restart_may_help(error, code):
    assert exit_code(error) == code
    wrapped = RuntimeError("a step failed")
    wrapped.__cause__ = error
    assert exit_code(wrapped) == code


def test_a_single_process_is_a_whole_run():
    assert hosts.is_first()
    assert hosts.gather(3) == [3]
    assert hosts.from_first(lambda: 4) == 4
    assert hosts.share_of(7) == slice(0, 7)
    hosts.require_same("seed", 1)
    with pytest.raises(OSError, match="disk full"), hosts.one_after_another():
        raise OSError("disk full")


ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({ADDRESS: "here:1"}, "give all three on every host"),
        ({COUNT: "2", INDEX: "0"}, "give all three on every host"),
        ({ADDRESS: "here", COUNT: "2", INDEX: "0"}, f"{ADDRESS}: 'here'; give address:port"),
        ({ADDRESS: "here:1", COUNT: "0", INDEX: "0"}, f"{COUNT}: '0'; give .* 1 or more"),
        ({ADDRESS: "here:1", COUNT: "2", INDEX: "-1"}, f"{INDEX}: '-1'; give .* 0 or more"),
    ],
)
def test_variables_that_name_no_process_are_refused(monkeypatch, variables, message):
    monkeypatch.setattr(jax.config, "update", lambda *setting: None)
    for name in (ADDRESS, COUNT, INDEX):
        monkeypatch.setenv(name, variables.get(name, ""))
    with pytest.raises(ValueError, match=message):
        cluster.connect()


SLURM = {"SLURM_STEP_NODELIST": "n[1-4]", "SLURM_NTASKS": "4"}
TPU = ("MEGASCALE_NUM_SLICES", "TPU_SKIP_MDS_QUERY")
PCI = "sys/bus/pci/devices"


@pytest.mark.parametrize(
    ("environment", "looks"),
    [
        ({}, False),
        (SLURM, True),
        (SLURM | {"SLURM_NTASKS": "1"}, False),
        # A batch script outside of srun.
        ({"SLURM_NTASKS": "4"}, False),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "JAX_PLATFORMS": ""}, True),
        ({"TPU_WORKER_HOSTNAMES": "localhost", "JAX_PLATFORMS": ""}, False),
        (
            {
                "TPU_WORKER_HOSTNAMES": "localhost",
                "MEGASCALE_NUM_SLICES": "2",
                "JAX_PLATFORMS": "tpu",
            },
            True,
        ),
        # Preparing data on one host of a slice.
        ({"TPU_WORKER_HOSTNAMES": "a,b", "JAX_PLATFORMS": "cpu"}, False),
    ],
)
def test_other_hosts_are_looked_for_only_in_a_cluster(monkeypatch, environment, looks):
    assert looks_for_others(monkeypatch, environment) == looks


@pytest.mark.parametrize(
    ("files", "looks"),
    [
        ({"dev/accel0": ""}, True),
        # A laptop with another accelerator.
        ({"dev/accel/accel0": ""}, False),
        # A workstation that passes its graphics card through.
        ({"dev/vfio/12": "", f"{PCI}/0000:01:00.0/vendor": "0x10de\n"}, False),
        ({"dev/vfio/0": "", f"{PCI}/0000:00:04.0/vendor": "0x1ae0\n"}, True),
        # A virtual machine of the same cloud, without chips.
        ({"dev/vfio/vfio": "", f"{PCI}/0000:00:04.0/vendor": "0x1ae0\n"}, False),
    ],
)
def test_only_a_tpu_vm_asks_for_the_hosts_of_its_slice(monkeypatch, tmp_path, files, looks):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(
        cluster, "has_tpu_chips", functools.partial(cluster.has_tpu_chips, tmp_path)
    )
    monkeypatch.setattr(cluster.importlib.util, "find_spec", lambda name: object())
    assert looks_for_others(monkeypatch, {"JAX_PLATFORMS": "tpu"}) == looks


def looks_for_others(monkeypatch, environment: dict[str, str]) -> bool:
    """Whether connecting looks for other processes in this environment."""
    for name in ("TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES", *SLURM, *TPU):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    asked = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *a, **k: asked.append(a))
    monkeypatch.setattr(jax.config, "update", lambda *setting: None)
    cluster.connect()
    assert asked in ([], [(None, None, None)])
    found = bool(asked)
    monkeypatch.setenv("JAX_NUM_PROCESSES", "1")
    cluster.connect()
    assert len(asked) == found
    return found


def test_a_cluster_that_does_not_answer_is_one_line_with_the_remedy(monkeypatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)

    def silent(*_, **__):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", silent)
    monkeypatch.setattr(jax.config, "update", lambda *setting: None)
    with pytest.raises(ValueError, match="JAX_NUM_PROCESSES=1 for a process that runs alone"):
        cluster.connect()


@pytest.mark.slow
def test_a_process_whose_others_do_not_come_says_that_it_waits_and_ends():
    program = (
        "from paravt_jax.processes import cluster; cluster._SAY = 0.5; cluster.connect(patience=2)"
    )
    named = {
        "JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": "0",
    }
    environment = dict(os.environ, **named, JAX_PLATFORMS="cpu", PYTHONPATH=str(ROOT))
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.returncode == TEMPORARY
    remedy = "start the same command on every host; see JAX_COORDINATOR_ADDRESS in docs/tpu.md"
    lines = [line for line in done.stderr.splitlines() if remedy in line]
    assert lines == [
        f"waiting up to 2 s for the other processes; {remedy}",
        f"error: hosts: not all processes joined within 2 s; {remedy}",
    ]
