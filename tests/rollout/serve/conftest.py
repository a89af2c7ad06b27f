"""A server in a thread, over HTTP, whose engine has a script and waits for the test."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import httpx2
import openai
import pytest
import uvicorn

from models.features import FrameSettings
from paravt_jax.data import tokenizer_file
from paravt_jax.method.tokenizer import Vocabulary
from rollout.engine.requests import Completion, Request
from rollout.serve import service as service_module
from rollout.serve.app import Server
from rollout.serve.chat import Chat
from rollout.serve.files import FileLimits, Files
from rollout.serve.service import Service, ServiceSettings
from tests.rollout.conftest import Scripted
from train.model_folder import write_model

KEYS = ("alice", "bob")
NAME = "small"


class Held(Scripted):
    """A scripted engine that keeps back the answers to some requests, and tells progress.

    Args:
        vocabulary: See `Scripted`.
        settings: Stands for the sizes of an engine.

    Attributes:
        held: Says whether the answer to a request has to wait.
        broken: An error that the next step raises.
    """

    def __init__(self, vocabulary: Vocabulary, settings: Any = None):
        super().__init__(vocabulary, ["yes"])
        self.settings = settings
        self.prefilled_tokens = self.reused_tokens = self.sampled_tokens = 0
        self.held: Callable[[Request], bool] = lambda request: False
        self.broken: Exception | None = None

    def step(self) -> list[Completion]:
        if self.broken is not None:
            error, self.broken = self.broken, None
            raise error
        held = {ticket: asked for ticket, asked in self.waiting.items() if self.held(asked)}
        if len(held) == len(self.waiting):
            time.sleep(0.002)
            return []
        for ticket in held:
            del self.waiting[ticket]
        done = super().step()
        self.waiting |= held
        for request, (_, sample) in zip(self.waves[-1], done, strict=True):
            for end in range(1, len(sample.ids) + 1):
                if request.progress is not None:
                    request.progress(sample.ids[:end].tolist())
        return done

    def lowerings(self) -> Sequence[Any]:
        return ()

    def warm_up(self) -> None:
        pass


@dataclasses.dataclass
class Running:
    """A server that listens."""

    url: str
    service: Service
    files: Files

    def client(self, key: str = KEYS[0]) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=20)

    def http(self, key: str = KEYS[0]) -> httpx2.Client:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx2.Client(base_url=self.url, headers=headers, timeout=20)


def eventually(condition: Callable[[], Any], seconds: float = 10) -> None:
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.005)


@contextlib.contextmanager
def listening(
    service: Service, videos: pathlib.Path, limits: FileLimits, body: int, upload: int
) -> Iterator[Running]:
    """Serve on a free port, until every program is compiled and then as long as the caller."""
    files = Files(service.reader, limits, videos)
    app = Server(Chat(service, files, NAME), KEYS).app(["served.example"], body, upload)
    server = uvicorn.Server(
        uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run)
    assert not service.is_ready
    thread.start()
    try:
        eventually(lambda: server.started and service.ready.is_set(), 120)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield Running(f"http://127.0.0.1:{port}", service, files)
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="session")
def served_folder(small_model, small_vocabulary, tmp_path_factory) -> pathlib.Path:
    """The small model's folder, with its tokenizer and chat template."""
    folder = tmp_path_factory.mktemp("served")
    tokenizer_file.save(small_vocabulary, folder / "tokenizer")
    write_model(small_model, folder / "tokenizer", FrameSettings(), folder / "model")
    return folder / "model"


@pytest.fixture(scope="session")
def scripted_server(
    small_model, small_vocabulary, served_folder, small_world, limits, compiled
) -> Iterator[Running]:
    """A server whose engine is a `Held`. It plays two jobs side by side; one more waits."""
    settings = ServiceSettings(frames=8, episodes=2, queue=1)
    with mock.patch.object(
        service_module, "Engine", lambda model, features, sizes: Held(small_vocabulary, sizes)
    ):
        service = Service(small_model, small_vocabulary, served_folder, settings, limits)
    sizes = FileLimits(video=400_000, minutes=3, uploads=4_000_000)
    with listening(service, small_world.folder, sizes, 1_000_000, 500_000) as running:
        yield running


@pytest.fixture
def server(scripted_server) -> Iterator[Running]:
    """The scripted server. Nothing is left of a test."""
    engine = scripted_server.service.engine
    engine.turns, engine.spoken, engine.held = ["look</think>\n<answer>seven</answer>"], 0, no_one
    yield scripted_server
    engine.held = no_one
    owner = scripted_server.service.owner
    eventually(lambda: not (owner.playing or owner.waiting or engine.waiting))


def no_one(request: Request) -> bool:
    """Hold nothing back."""
    return False


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Coroutines run in asyncio."""
    return "asyncio"


@pytest.fixture(scope="session")
def real_server(
    small_model, small_vocabulary, served_folder, small_world, limits, compiled
) -> Iterator[Running]:
    """A server with the small model in a real engine."""
    settings = ServiceSettings(frames=4, episodes=2, queue=9)
    service = Service(small_model, small_vocabulary, served_folder, settings, limits)
    sizes = FileLimits(video=10**6, minutes=3, uploads=10**7)
    with listening(service, small_world.folder, sizes, 10**6, 10**6) as running:
        yield running
