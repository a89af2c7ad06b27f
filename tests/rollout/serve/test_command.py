"""The real command as a process."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import httpx2
import openai
import pytest

from tests.processes import ROOT, free_port
from tests.rollout.serve.conftest import eventually
from tests.rollout.serve.test_episodes import asking

pytestmark = pytest.mark.slow
PLAIN = {"model": "small/plain", "messages": [{"role": "user", "content": "seven"}]}


@contextlib.contextmanager
def command(
    folder: pathlib.Path, videos: pathlib.Path, cache: pathlib.Path, errors: pathlib.Path
) -> Iterator[tuple[subprocess.Popen, str]]:
    """The command, as soon as it is ready."""
    port = free_port()
    arguments = ["--model", str(folder), "--name", "small", "--port", str(port), "--frames", "4"]
    arguments += ["--videos", str(videos), "--episodes", "2"]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_LOG_COMPILES": "1",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    url = f"http://127.0.0.1:{port}"
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "rollout.serve", *arguments], stderr=stderr, env=environment
        )

    def answers(path: str) -> bool:
        assert process.poll() is None, errors.read_text()
        with contextlib.suppress(httpx2.TransportError):
            return httpx2.get(url + path).status_code == 200
        return False

    try:
        eventually(lambda: answers("/health"), 240)
        eventually(lambda: answers("/ready"), 240)
        yield process, url
    finally:
        process.kill()
        process.wait()


def test_the_command_serves_again_after_a_kill_and_stops(served_folder, small_world, tmp_path):
    errors = tmp_path / "stderr"
    for end in (signal.SIGKILL, signal.SIGINT):
        with command(served_folder, small_world.folder, tmp_path / "cache", errors) as running:
            process, url = running
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
            before = errors.read_text()
            assert "Compiling" in before
            for fields in (asking(small_world.videos[0].path), PLAIN):
                assert client.chat.completions.create(**fields, max_tokens=8).choices
            after = errors.read_text().removeprefix(before)
            assert "Compiling" not in after, after
            statuses = []

            def ask_long(url: str = url, statuses: list[int] = statuses) -> None:
                body = PLAIN | {"n": 16, "max_tokens": 4000}
                statuses.append(httpx2.post(f"{url}/v1/chat/completions", json=body).status_code)

            asking_on = threading.Thread(target=ask_long)
            if end == signal.SIGINT:
                asking_on.start()
                time.sleep(0.5)
            process.send_signal(end)
            assert process.wait(10) in (0, -signal.SIGKILL, 130)
            last = errors.read_text().removeprefix(before + after)
            if end == signal.SIGINT:
                asking_on.join()
                assert statuses[0] in (200, 503), "it ends with an answer"
            assert "Traceback" not in last and "rror" not in last, last
