"""The recipes in examples/supervise: valid shell, and what they do when a slice is taken away."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import subprocess
import time

import pytest

from tests.processes import ROOT

FOLDER = ROOT / "examples" / "supervise"
SCRIPTS = sorted(FOLDER.iterdir())

# A stand-in for gcloud. `states` has what `describe` says, one line per call; a run that has begun
# ends with what is in `code`.
GCLOUD = """#!/bin/bash
cd "{folder}"
words="$*"
case $words in
*queued-resources\\ describe*)
    state=$(head -n 1 states)
    sed -i 1d states
    [ "$state" != none ] || exit 1
    echo "$state"
    ;;
*queued-resources\\ create*) echo "create $(grep -o -- --spot <<<"$words")" >>calls ;;
*queued-resources\\ delete*) echo delete >>calls; rm -f begun ;;
*"test -e paravt-jax/started"*) [ -e begun ] ;;
*"make this host ready"*) echo "set up" >>calls ;;
*"restart.sh"*)
    echo "begin: $(grep -o "restart.sh [^']*" <<<"$words")" >>calls
    grep -o "export HF_HOME=.*" <<<"$words" >exports
    touch begun
    ;;
*"cat paravt-jax/code"*) cat code 2>/dev/null ;;
*) echo "unknown: $words" >>calls; exit 1 ;;
esac
"""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_recipes_are_valid_shell(script):
    subprocess.run(["bash", "-n", str(script)], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(script)], check=True)


class Cloud:
    """What `queued_resource.sh` did with the stand-in."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        program = folder / "gcloud"
        program.write_text(GCLOUD.format(folder=folder))
        program.chmod(0o755)
        (folder / "setup.sh").write_text("make this host ready\n")

    def watch(self, *states: str, code: str) -> int:
        (self.folder / "states").write_text("".join(f"{state}\n" for state in states))
        (self.folder / "code").write_text(code)
        names = {"NAME": "n", "ZONE": "z", "TYPE": "t", "IMAGE": "i", "EVERY": "0.01"}
        environment = dict(
            os.environ,
            PATH=f"{self.folder}:{os.environ['PATH']}",
            SETUP=str(self.folder / "setup.sh"),
            **names,
        )
        done = subprocess.run(
            ["bash", str(FOLDER / "queued_resource.sh"), "paravt", "run", "--config=x"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        self.said = done.stderr
        return done.returncode

    @property
    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()


def test_a_slice_that_is_taken_away_is_created_again(tmp_path):
    cloud = Cloud(tmp_path)
    once = ["none", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"]
    # The run has no code before the slice is suspended: the file of the first life is empty.
    assert cloud.watch(*once[:3], "SUSPENDED", *once, code="0") == 0
    begin = "begin: restart.sh paravt run --config=x"
    assert cloud.calls == ["create --spot", "delete", "create --spot", "set up", begin]
    assert "n is SUSPENDED" in cloud.said
    # The host expands it. Downloads go to the share, not to the boot disk.
    assert (tmp_path / "exports").read_text() == "export HF_HOME=$HOME/share/hub\n"


def test_the_code_of_the_run_ends_the_script(tmp_path):
    cloud = Cloud(tmp_path)
    assert cloud.watch("ACTIVE", code="1") == 1
    assert "the run has ended with code 1; n still exists" in cloud.said


def test_a_second_start_watches_the_same_run(tmp_path):
    cloud = Cloud(tmp_path)
    (tmp_path / "begun").touch()
    (tmp_path / "calls").touch()
    assert cloud.watch("ACTIVE", code="0") == 0
    assert cloud.calls == []


@pytest.mark.parametrize(
    ("codes", "code", "starts"), [("75 70 134 0", 0, 4), ("75 1", 1, 2), ("137 143", 143, 2)]
)
def test_a_command_is_started_again_after_the_codes_that_deserve_it(codes, code, starts, tmp_path):
    (tmp_path / "codes").write_text(codes.replace(" ", "\n") + "\n")
    command = "code=$(head -n 1 codes); sed -i 1d codes; echo start >>starts; exit $code"
    ended = subprocess.run(
        [FOLDER / "restart.sh", "bash", "-c", command],
        cwd=tmp_path,
        env={**os.environ, "PAUSE": "0"},
    )
    assert ended.returncode == code
    assert (tmp_path / "starts").read_text().count("start") == starts


def test_a_command_that_was_stopped_is_not_started_again(tmp_path):
    script = "trap 'echo saved >>said; exit 143' TERM; echo begun >>said; sleep 60 & wait"
    with subprocess.Popen([FOLDER / "restart.sh", "bash", "-c", script], cwd=tmp_path) as running:
        while not (tmp_path / "said").exists():
            time.sleep(0.05)
        running.terminate()
        assert running.wait(20) == 143
    assert (tmp_path / "said").read_text().split() == ["begun", "saved"]


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_in_the_pause_starts_nothing(sent, tmp_path):
    script = "echo start >>starts; exit 75"
    with subprocess.Popen(
        ["python3", "-c", _WITH_SIGNALS, str(FOLDER / "restart.sh"), "bash", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PAUSE": "2"},
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as running:
        assert running.stderr is not None
        running.stderr.readline()  # it pauses
        os.killpg(running.pid, sent)
        assert running.wait(20) == 75
    assert (tmp_path / "starts").read_text() == "start\n"


# A shell cannot handle a signal that was ignored when it began.
_WITH_SIGNALS = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""


# Stand-ins for the commands of setup.sh. Each notes its call; `home` is what a host keeps.
COMMANDS = {
    "sudo": 'case $1 in mount) touch "$HOME/mounted" ;; esac',
    "mountpoint": '[ -e "$HOME/mounted" ]',
    "mount.nfs": "true",
    "git": 'mkdir -p "$3/.git"',
    "python3.11": """
        [ "$1" = -c ] && exit
        mkdir -p .venv/bin
        printf '#!/bin/bash\\necho "pip" >>"$HOME/calls"\\n' >.venv/bin/pip
        touch .venv/bin/python
        chmod +x .venv/bin/pip .venv/bin/python
    """,
}


def test_a_host_may_be_set_up_twice(tmp_path):
    home, programs = tmp_path / "home", tmp_path / "bin"
    home.mkdir()
    programs.mkdir()
    for name, does in COMMANDS.items():
        program = programs / name
        program.write_text(f'#!/bin/bash\necho "{name} $1" >>"$HOME/calls"\n{does}\n')
        program.chmod(0o755)
    environment = {"HOME": str(home), "USER": "me", "PATH": f"{programs}:{os.environ['PATH']}"}
    text = (FOLDER / "setup.sh").read_text()
    calls = []
    for _ in range(2):
        (home / "calls").write_text("")
        subprocess.run(["bash", "-c", text], env=environment, cwd=home, check=True)
        calls.append((home / "calls").read_text().splitlines())
        for link in ("runs", "data"):
            assert (home / "paravt-jax" / link).readlink() == home / "share"
    first, second = calls
    assert {"sudo mount", "git clone", "python3.11 -m", "pip"} <= set(first)
    assert second == ["python3.11 -c", "mountpoint -q", "pip"]
    assert list((home / "share").iterdir()) == []
