"""Measures `python -m rollout.serve`: start, load with hostile clients, kill, and throughput; and
how long `python -m rollout.view` takes to list many episodes.

    python -m benchmarks.serving --run runs/paravt_tiny [--seconds 300]
    python -m benchmarks.serving --run runs/paravt_tiny --model FOLDER --seconds 0     # another one

The server answers questions about a run's held-out videos. A tenth of the clients misbehaves: slow
readers, cut connections, wrong keys, huge and broken videos, tricks with paths. All others must get
an answer or a refusal by name. Prints JSON: seconds until the viewer lists 5,000 episodes, until
the server is ready, after `kill -9` too, and until the first token; replies by kind of client and
status; seconds per answer; memory of the server's processes; and seconds for the same questions by
16 clients, and by an `Assistant` in a loop. The exit code is 1 if any reply was neither.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import itertools
import json
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

import httpx2
import numpy as np

from paravt_jax.method.protocol import ProtocolSettings
from rollout.agent.episode import EpisodeSettings
from rollout.ask import Assistant

PORT = 8791
KEY = "measured"
NAMED = {400, 401, 404, 408, 413, 422, 429, 503}
"""Refusals by name."""
FRAMES = 16
LISTED = 5_000
"""Episodes that the viewer lists: those of the run, again and again."""
Questions = list[tuple[str, int]]
"""Videos, and the second about which each question asks."""
TURN = 128
"""Tokens of a turn: more than trained models need, and models with random weights do not end it."""


class Served:
    """The server as a process of its own."""

    def __init__(self, model: pathlib.Path, videos: pathlib.Path, folder: pathlib.Path):
        (folder / "keys").write_text(KEY)
        self.command = [
            *(sys.executable, "-m", "rollout.serve", "--model", str(model)),
            *("--name", "tiny", "--port", str(PORT), "--videos", str(videos)),
            *("--api-key-file", str(folder / "keys"), "--max-video", "8"),
        ]
        self.log = folder / "server.log"

    def start(self) -> float:
        """Start it, and return the seconds until it is ready."""
        begin = time.monotonic()
        with self.log.open("a") as log:
            self.process = subprocess.Popen(self.command, stderr=log, stdout=log)
        while True:
            with contextlib.suppress(httpx2.TransportError):
                if httpx2.get(f"http://127.0.0.1:{PORT}/ready").status_code == 200:
                    return time.monotonic() - begin
            if self.process.poll() is not None:
                raise RuntimeError(self.log.read_text())
            time.sleep(0.1)

    def end(self, number: int) -> None:
        self.process.send_signal(number)
        self.process.wait()

    def memory(self) -> float:
        """Return the memory of the server and of its readers, in MiB."""
        processes = [str(self.process.pid)]
        for pid in processes:
            children = pathlib.Path(f"/proc/{pid}/task/{pid}/children")
            processes += children.read_text().split() if children.exists() else []
        kib = 0
        for pid in processes:
            with contextlib.suppress(OSError):
                text = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text()
                kib += int(text.partition("Pss:")[2].split()[0])
        return kib / 1024


def body(video: str, second: int, stream: bool = False) -> dict[str, Any]:
    """Return a request for an episode."""
    parts = [
        {"type": "video_url", "video_url": {"url": video}},
        {"type": "text", "text": f"Which digit appears in the scene that starts at {second} s?"},
    ]
    return {
        "model": "tiny",
        "stream": stream,
        "temperature": 0,
        "max_completion_tokens": TURN,
        "messages": [{"role": "user", "content": parts}],
        "paravt": {"frames": FRAMES, "trace": False},
    }


async def polite(client: httpx2.AsyncClient, video: str, second: int) -> int | str:
    reply = await client.post("/v1/chat/completions", json=body(video, second))
    if reply.status_code == 200:
        assert reply.json()["paravt"]["stop"], reply.text
    return reply.status_code


async def slow_reader(client: httpx2.AsyncClient, video: str, second: int) -> int | str:
    asked = body(video, second, stream=True)
    async with client.stream("POST", "/v1/chat/completions", json=asked) as reply:
        async for _ in reply.aiter_bytes(64):
            await asyncio.sleep(0.5)
        return reply.status_code


async def cut(client: httpx2.AsyncClient, video: str, second: int) -> int | str:
    asked = body(video, second, stream=True)
    async with client.stream("POST", "/v1/chat/completions", json=asked) as reply:
        async for _ in reply.aiter_bytes():
            return "cut"
        return reply.status_code


async def wrong_key(client: httpx2.AsyncClient, video: str, second: int) -> int | str:
    headers = {"Authorization": "Bearer wrong"}
    asked = body(video, second)
    return (await client.post("/v1/chat/completions", json=asked, headers=headers)).status_code


async def path_trick(client: httpx2.AsyncClient, video: str, second: int) -> int | str:
    trick = random.choice(("../model/config.json", "/etc/passwd", "file:///etc/passwd", "%2e%2e/x"))
    return (await client.post("/v1/chat/completions", json=body(trick, second))).status_code


async def broken_video(client: httpx2.AsyncClient, video: str, second: int) -> int | str:
    files = {"file": ("clip.mp4", random.randbytes(100_000))}
    return (await client.post("/v1/files", files=files)).status_code


async def huge_video(client: httpx2.AsyncClient, video: str, second: int) -> int | str:
    files = {"file": ("clip.mp4", bytes(16 * 2**20))}
    return (await client.post("/v1/files", files=files)).status_code


HOSTILE = (slow_reader, cut, wrong_key, path_trick, broken_video, huge_video)


async def load(served: Served, videos: list[str], seconds: float) -> dict[str, Any]:
    """Let 200 clients ask for a while, and return what they got."""
    replies: collections.Counter[str] = collections.Counter()
    took: list[float] = []
    memory: list[float] = []
    end = time.monotonic() + seconds

    async def ask_on(number: int) -> None:
        chance = random.Random(number)
        ask = HOSTILE[number // 10 % len(HOSTILE)] if number % 10 == 0 else polite
        async with make_client() as client:
            while time.monotonic() < end:
                begin = time.monotonic()
                try:
                    status = await ask(client, chance.choice(videos), chance.randrange(0, 128, 16))
                except (httpx2.TransportError, AssertionError) as error:
                    status = f"lost: {type(error).__name__}"
                replies[f"{ask.__name__} {status}"] += 1
                if status == 200 and ask is polite:
                    took.append(time.monotonic() - begin)
                elif status != 200:
                    await asyncio.sleep(1 + chance.random())

    async def watch() -> None:
        while time.monotonic() < end:
            memory.append(served.memory())
            await asyncio.sleep(5)

    await asyncio.gather(watch(), *[ask_on(number) for number in range(200)])
    third = max(1, len(memory) // 3)
    return {
        "replies": dict(sorted(replies.items())),
        "answers per second": len(took) / seconds,
        "p50 s": float(np.quantile(took, 0.5)),
        "p95 s": float(np.quantile(took, 0.95)),
        "memory MiB, second third": float(np.mean(memory[third : 2 * third])),
        "memory MiB, last third": float(np.mean(memory[2 * third :])),
    }


def make_client() -> httpx2.AsyncClient:
    """Return a client with connections of its own."""
    return httpx2.AsyncClient(
        base_url=f"http://127.0.0.1:{PORT}",
        headers={"Authorization": f"Bearer {KEY}"},
        timeout=httpx2.Timeout(600.0),
        verify=False,  # reading certificates takes longer than an answer, and HTTP has none
    )


async def first_token(video: str) -> float:
    """Return the seconds until the first text of a stream."""
    begin = time.monotonic()
    async with make_client() as client:
        asked = body(video, 64, stream=True)
        async with client.stream("POST", "/v1/chat/completions", json=asked) as reply:
            async for line in reply.aiter_lines():
                if "reasoning_content" in line:
                    return time.monotonic() - begin
    raise AssertionError("the stream has no text")


async def by_clients(questions: Questions, clients: int) -> float:
    """Return the seconds in which clients side by side get all answers."""
    left = iter(questions)

    async def ask_on(client: httpx2.AsyncClient) -> None:
        for video, second in left:
            assert await polite(client, video, second) == 200

    async with make_client() as client:
        begin = time.monotonic()
        await asyncio.gather(*[ask_on(client) for _ in range(clients)])
        return time.monotonic() - begin


def by_assistant(model: pathlib.Path, folder: pathlib.Path, questions: Questions) -> float:
    """Return the seconds in which an `Assistant` answers one question after another."""
    assistant = Assistant.load(model, ProtocolSettings(turn_tokens=TURN))
    settings = EpisodeSettings(FRAMES, 0.0)

    def ask(video: str, second: int) -> None:
        text = f"Which digit appears in the scene that starts at {second} s?"
        assistant.ask(folder / video, text, settings)

    ask(*questions[0])  # compiles
    begin = time.monotonic()
    for video, second in questions[1:]:
        ask(video, second)
    return (time.monotonic() - begin) * len(questions) / (len(questions) - 1)


def view(run: pathlib.Path, folder: pathlib.Path) -> float:
    """Return the seconds from the viewer's command until a client has the rows of all episodes."""
    lines = (run / "episodes.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    many = "".join(itertools.islice(itertools.cycle(lines), LISTED))
    (folder / "episodes.jsonl").write_text(many, encoding="utf-8")
    command = [sys.executable, "-m", "rollout.view", str(folder), "--port", "0"]
    begin = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[0]
        rows = httpx2.get(f"{address}data/rows", timeout=60.0).json()["rows"]
        seconds = time.monotonic() - begin
        process.terminate()
    assert len(rows) == LISTED
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=pathlib.Path, required=True, help="folder of a run")
    parser.add_argument("--model", type=pathlib.Path, help="another model than the run's")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--questions", type=int, default=96)
    asked = parser.parse_args()
    folder = asked.run / "videos"
    model = asked.model or asked.run / "model"
    videos = sorted(str(path.relative_to(folder)) for path in folder.rglob("heldout/*.mp4"))
    # Several questions about each of a few videos, as people ask them.
    few = videos[: max(1, asked.questions // 16)]
    questions = [(video, second) for second in range(0, 128, 8) for video in few]
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        figures["5,000 episodes listed s"] = view(asked.run, pathlib.Path(temporary))
        served = Served(model, folder, pathlib.Path(temporary))
        figures["start s"] = served.start()
        figures["first token s"] = asyncio.run(first_token(videos[0]))
        figures["16 clients s"] = asyncio.run(by_clients(questions, 16))
        if asked.seconds:
            figures |= asyncio.run(load(served, videos, asked.seconds))
        served.end(signal.SIGKILL)
        figures["start after kill -9 s"] = served.start()
        served.end(signal.SIGINT)
    figures["an Assistant s"] = by_assistant(model, folder, questions)
    print(json.dumps(figures, indent=1))
    known = {"200", "cut", *map(str, NAMED)}
    return 1 if any(name.split()[-1] not in known for name in figures.get("replies", ())) else 0


if __name__ == "__main__":
    raise SystemExit(main())
