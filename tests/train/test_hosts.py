"""What the processes of one run tell each other: two real ones, and one alone."""

import json
import pathlib
import signal
import time

import pytest

from train.durable import cluster, hosts
from train.durable.cluster import HostSettings

PROGRAM = str(pathlib.Path(__file__).with_name("hosts_program.py"))


def test_two_processes_speak(together, tmp_path):
    first, second = (
        json.loads(ended.out.splitlines()[-1])
        for ended in together([PROGRAM, "talk", str(tmp_path)], 2, devices=1)
    )
    assert (first["first"], second["first"]) == (True, False)
    assert (first["found"], second["found"]) == (False, True), (
        "the second found what the first had made"
    )
    assert (
        first["gathered"]
        == second["gathered"]
        == [{"index": i, "long": "x" * (10 + 1000 * i)} for i in (0, 1)]
    )
    assert first["agreed"] == [signal.SIGTERM, None], (
        "all stop; another's signal is not this one's own, which may still come"
    )
    assert second["agreed"] == [signal.SIGTERM, signal.SIGTERM]
    assert first["different"] == second["different"] and first["different"].startswith(
        "seed: 0 on process 0 and 1 on process 1; "
    )
    apart = f"run_dir: {tmp_path / '1'} on process 1 is another directory than {tmp_path / '0'} on process 0; name one that all of them see"
    assert first["apart"] == second["apart"] and first["apart"].startswith(apart)
    assert (
        first["stopped"] == second["stopped"] == "143 kept"
        and first["left"] == second["left"] == []
    )
    assert first["share"] == [[0, 3], [0, 4], [0, 1]] and second["share"] == [
        [3, 6],
        [4, 7],
        [1, 1],
    ]


def test_where_the_first_fails_nobody_waits(together, tmp_path):
    first, second = together([PROGRAM, "fail", str(tmp_path)], 2, devices=1)
    assert first.code != 0 and first.err.strip().splitlines()[-1] == "OSError: disk full"
    assert second.code != 0 and "process 0 failed first: OSError: disk full" in second.err


@pytest.mark.slow
def test_a_process_that_dies_takes_the_others_with_it_and_they_say_so(together, tmp_path):
    start = time.monotonic()
    survivor, killed = together(
        [PROGRAM, "die", str(tmp_path), "--hosts.heartbeat", "10"], 2, devices=1
    )
    assert killed.code == -9
    # Which of the two comes first, the broken connection or the missing heartbeat, is not ours to say.
    if survivor.code == cluster.LOST:
        assert (
            survivor.err.strip()
            .splitlines()[-1]
            .startswith("error: another process of this run ended")
        )
    else:
        assert (
            survivor.code == -signal.SIGABRT and "indicates that another task died" in survivor.err
        )
    assert time.monotonic() - start < 60


def test_one_process_is_a_run_by_itself():
    assert hosts.is_first() and hosts.gather(3) == [3] and hosts.from_first(lambda: 4) == 4
    assert hosts.share_of(7) == slice(0, 7)
    hosts.require_same("seed", 1)
    with pytest.raises(OSError, match="disk full"), hosts.one_after_another():
        raise OSError("disk full")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"count": 2},
            r"hosts.count, hosts.index: 2, 0 with hosts.coordinator ''; .* give process 0's address:port",
        ),
        (
            {"coordinator": "auto", "index": 1, "count": 2},
            r"hosts.count, hosts.index: 2, 1 with hosts.coordinator 'auto'",
        ),
        ({"coordinator": "here"}, r"hosts.coordinator: 'here'; give address:port"),
        (
            {"coordinator": "here:1", "index": 2, "count": 2},
            r"hosts.index: 2 of hosts.count = 2; give a number from 0 to 1",
        ),
        ({"coordinator": "here:1", "heartbeat": 0}, r"hosts.heartbeat: 0; give at least 1 second"),
    ],
)
def test_what_cannot_be_meant_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        HostSettings(**settings)
