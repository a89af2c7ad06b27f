"""Serves a model: `python -m rollout.serve --model FOLDER`.

Programs ask it in the words of OpenAI's API, agents by MCP, and people on its page. docs/serving.md
has all of it.
"""

from __future__ import annotations

import os
import signal

from paravt_jax.processes.exit_codes import stop_at_once

if __name__ == "__main__":
    # Importing the modules below takes seconds.
    signal.signal(signal.SIGINT, stop_at_once)
    # transformers fills in the chat template. It would warn that it finds no PyTorch.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

import dataclasses
import functools
import pathlib
import socket
import sys
from collections.abc import Sequence
from typing import Literal

import tyro

from models.compilation import use_cache
from models.devices import require_type, reserve_memory
from models.peft_folder import base_folder, load
from models.weights.folder import local_folder
from paravt_jax.data.any_path import require_local
from paravt_jax.method.protocol import ProtocolSettings
from paravt_jax.processes.cluster import run_command
from rollout.ask import load_vocabulary
from rollout.serve.service import Service, ServiceSettings

PROG = "python -m rollout.serve"


@dataclasses.dataclass(frozen=True)
class ServeSettings:
    """Options of `python -m rollout.serve`."""

    model: str
    """Folder or hub id of a model with its tokenizer, or of adapters."""
    name: str = ""
    """Name of the model for clients; empty: that of its folder."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every address of this machine, and needs --api-key-file."""
    port: int = 8000
    """Port to listen on."""
    hosts: tuple[str, ...] = ()
    """Further names under which clients reach this server."""
    api_key_file: str = ""
    """File with a key per line; clients send one of them. Empty: none is needed."""
    videos: str = ""
    """Folder of videos that clients may name; empty: they can only upload."""
    max_video: int = 2048
    """Size limit of a video, in MiB."""
    max_uploads: int = 20_480
    """Size limit of all uploads that are kept, in MiB."""
    max_minutes: float = 120.0
    """Length limit of a video, in minutes."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and activations; bfloat16 for published checkpoints."""
    service: tyro.conf.OmitArgPrefixes[ServiceSettings] = ServiceSettings()
    protocol: ProtocolSettings = ProtocolSettings()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code. A user's mistake prints one line."""
    reserve_memory()
    settings = tyro.cli(ServeSettings, args=argv, prog=PROG, description=__doc__)
    return run_command(lambda: serve(settings))


def serve(settings: ServeSettings) -> None:
    """Load the model, and serve it until a signal comes."""
    try:
        import uvicorn

        from rollout.serve.app import Server
        from rollout.serve.chat import Chat
        from rollout.serve.files import FileLimits, Files
        from rollout.serve.guard import LOOPBACK, listen
    except ImportError as error:
        raise ImportError(f"{error}; pip install 'paravt-jax[serve]'") from error
    if not settings.api_key_file and settings.host not in LOOPBACK:
        raise ValueError(
            f"--host {settings.host}: others could ask without a key; give --api-key-file"
        )
    keys = _keys(settings.api_key_file) if settings.api_key_file else []
    listen(settings.host, settings.port).close()  # fails before the weights are read
    require_local("--videos", settings.videos)
    videos = pathlib.Path(settings.videos) if settings.videos else None
    if videos is not None and not videos.is_dir():
        raise FileNotFoundError(f"--videos {videos}: no such folder; give one that exists")
    require_type("--dtype", settings.dtype)
    use_cache()
    folder = local_folder(settings.model)
    vocabulary = load_vocabulary(folder)
    model = load(folder, dtype=settings.dtype, param_dtype=settings.dtype)
    service = Service(model, vocabulary, base_folder(folder), settings.service, settings.protocol)
    mib = 2**20
    limits = FileLimits(settings.max_video * mib, settings.max_minutes, settings.max_uploads * mib)
    files = Files(service.reader, limits, videos)
    name = settings.name or _name(settings.model)
    server = Server(Chat(service, files, name), keys)
    app = server.app(
        [settings.host, *settings.hosts], body=256 * mib, upload=(settings.max_video + 1) * mib
    )
    address = f"http://{settings.host}:{settings.port}"
    print(f"{name} at {address}; /ready says when programs are compiled", file=sys.stderr)
    stop = functools.partial(stop_at_once, line="stopped; uploads are deleted")
    signal.signal(signal.SIGINT, stop)  # uvicorn ends its work before
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_level="warning",
        timeout_graceful_shutdown=3,
        limit_concurrency=512,
    )

    class HttpServer(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            # All clients get an answer before their connections end.
            service.owner.end()
            await super().shutdown(sockets)
            files.close()  # a second signal skips the end of the application

    HttpServer(config).run()


def _name(model: str) -> str:
    """Return the name of a model: that of its folder, or of the run that wrote it."""
    path = pathlib.Path(model).resolve()
    return path.parent.name if path.name == "model" else path.name


def _keys(file: str) -> list[str]:
    """Return the keys in a file, one per line. Errors do not show what is in it."""
    text = pathlib.Path(file).read_text(encoding="utf-8")
    lines = [line.strip() for line in text.splitlines()]
    for number, line in enumerate(lines, 1):
        if line.startswith("#") or len(line.split()) > 1:
            raise ValueError(
                f"--api-key-file {file}: line {number} has a space or begins with #; give a key "
                "per line and nothing else"
            )
    keys = [line for line in lines if line]
    if not keys:
        raise ValueError(f"--api-key-file {file}: empty; give a key per line")
    return keys


if __name__ == "__main__":
    raise SystemExit(main())
