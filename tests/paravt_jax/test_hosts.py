"""Communication between the processes of a run: two real ones, and one alone."""

import errno
import json
import os
import pathlib
import signal
import subprocess
import sys

import jax
import pytest

from paravt_jax.processes import cluster, hosts
from paravt_jax.processes.exit_codes import FAILED, TEMPORARY, exit_code
from tests.processes import ROOT, free_port, lost_others
from train.durable.checkpoint import SaveError

PROGRAM = str(pathlib.Path(__file__).parents[1] / "train/hosts_program.py")


@pytest.mark.slow
def test_two_processes_communicate(together, tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nothing listens there
    ended = together([PROGRAM, "talk", str(tmp_path)], 2, devices=1)
    first, second = (json.loads(process.out.splitlines()[-1]) for process in ended)
    assert (first["first"], second["first"]) == (True, False)
    assert first["made"] == second["made"] == "by 0"
    values = [{"index": i, "long": "x" * (10 + 1000 * i)} for i in (0, 1)]
    assert first["gathered"] == second["gathered"] == values
    # Both stop, but the other's signal is not recorded as one's own, which may still come.
    assert first["agreed"] == [signal.SIGTERM, None]
    assert second["agreed"] == [signal.SIGTERM, signal.SIGTERM]
    assert first["different"] == second["different"]
    assert first["different"].startswith("seed: 0 on process 0 and 1 on process 1; ")
    for process in (first, second):
        assert "on process 1 is another directory than on process 0" in process["apart"]
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
def test_a_command_that_is_interrupted_does_not_wait_for_the_other_hosts(together, tmp_path):
    first, second = together([PROGRAM, "interrupt", str(tmp_path)], 2, devices=1, timeout=120)
    assert (first.code, first.err.strip().splitlines()[-1]) == (
        130,
        "stopped; give the same command again",
    )
    assert lost_others(second), second


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("UNAVAILABLE: the connection was closed", True),
        ("INTERNAL: a message was cut off", True),
        ("INTERNAL: RESOURCE_EXHAUSTED: no memory", False),
        ("OPENAI_API_KEY: its value has spaces", False),
        ("field: 3; give 4", False),
    ],
)
def test_a_mistake_is_not_taken_for_a_lost_process(text, lost, monkeypatch):
    monkeypatch.setattr(hosts, "process_count", lambda: 2)
    assert cluster.is_lost(ValueError(text)) is lost


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("field: 3; give 4"), 1),
        (FileNotFoundError(errno.ENOENT, "no such file"), 1),
        (OSError(errno.ENOSPC, "disk full"), TEMPORARY),
        (OSError(errno.ENETUNREACH, "no network"), TEMPORARY),
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


FULL = OSError(errno.ENOSPC, "No space left on device", "a.txt")
AND_THEN = "; make room, and give the same command again"


@pytest.mark.parametrize(
    ("error", "code", "more"), [(FULL, TEMPORARY, AND_THEN), (ImportError("get x"), FAILED, "")]
)
def test_an_error_that_a_user_can_mend_is_one_line(error, code, more, capsys):
    def fail() -> None:
        raise error

    assert cluster.run_command(fail) == code
    assert capsys.readouterr().err == f"error: {error}{more}\n"


COMMAND = """
import sys
import jax
from paravt_jax.processes.cluster import run_command
sys.exit(run_command(lambda: print("é", jax.numpy.ones(()).dtype)))
"""


@pytest.mark.parametrize(
    ("variable", "value", "output", "code", "text"),
    [
        ("PYTHONIOENCODING", "ascii", "| cat", 0, r"\xe9 float32"),
        ("JAX_ENABLE_X64", "1", "| cat", 0, "é float32"),
        ("JAX_PLATFORMS", "cuda", "| cat", 1, "error: JAX_PLATFORMS=cuda: JAX finds no such"),
        ("JAX_PLATFORMS", "cpu", "| true", 141, "error: nothing reads the output any more"),
        ("JAX_PLATFORMS", "cpu", ">&-", 0, ""),
    ],
)
def test_no_variable_and_no_terminal_ends_a_command_in_a_stack(variable, value, output, code, text):
    done = subprocess.run(
        [
            "bash",
            "-c",
            f'{sys.executable} -c "$1" {output}; exit ${{PIPESTATUS[0]}}',
            "",
            COMMAND,
        ],
        env=dict(os.environ, PYTHONPATH=str(ROOT), **{variable: value}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == code and done.stdout.startswith(text), done.stdout
    assert len(done.stdout.splitlines()) == (text != "")


def test_a_single_process_is_a_whole_run():
    assert hosts.is_first()
    assert hosts.gather(3) == [3]
    assert hosts.from_first(lambda: 4) == 4
    assert hosts.share_of(7) == slice(0, 7)
    hosts.require_same("seed", 1)

    def full() -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        hosts.on_all(full)


ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"


WRONG = """
import os
from paravt_jax.processes import cluster
for address, count in (("", "2"), ("here:1", "two"), ("localhost", "2")):
    os.environ |= {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": count}
    try:
        cluster.connect()
    except ValueError as error:
        print(error)
"""


def test_variables_that_name_no_process_are_refused():
    environment = dict(os.environ, **{INDEX: "0"}, JAX_PLATFORMS="cpu", PYTHONPATH=str(ROOT))
    done = subprocess.run(
        [sys.executable, "-c", WRONG], env=environment, capture_output=True, text=True
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 3, done.stderr
    for line in lines:
        assert line.startswith(f"{ADDRESS}=")
        assert f"{COUNT}=1 for a process that runs alone" in line


@pytest.mark.parametrize("size", ["SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"])
def test_a_single_task_keeps_all_its_devices(size, monkeypatch):
    """JAX would restrict it to one GPU, or wait for the other tasks of an interactive job."""
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv(size, "1")
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: pytest.fail("joined"))
    cluster.connect()


def test_a_process_runs_alone_where_jax_finds_no_others():
    jax.devices()
    cluster.connect()
    assert hosts.process_count() == 1


@pytest.mark.slow
def test_a_process_whose_others_do_not_come_ends():
    program = "from paravt_jax.processes import cluster; cluster.connect(patience=2)"
    named = {ADDRESS: f"localhost:{free_port()}", COUNT: "2", INDEX: "0"}
    environment = dict(os.environ, **named, JAX_PLATFORMS="cpu", PYTHONPATH=str(ROOT))
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.returncode == TEMPORARY
    waiting, *_, last = done.stderr.splitlines()
    assert waiting.startswith("waiting up to 2 s for the other processes; ")
    assert last.startswith("error: hosts: not all processes joined within 2 s; ")
    assert f"{COUNT}=1" in waiting and f"{COUNT}=1" in last
