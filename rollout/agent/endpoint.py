"""A remote server as the sampler: any OpenAI-compatible endpoint, such as vLLM on an export.

A request becomes a chat, and a reply becomes tokens. The server tokenizes by itself: the ids here
are those of the text that came back, and log-probs are unknown (NaN). That is good for evaluation,
not for training. A request that the server refuses because of its content becomes a sample that
says so (`SampleStop.REFUSED`). Where the server cannot be reached or sends an unusable reply,
`EndpointError` ends the run in one line, and the questions already played are kept. Invariant:
rendered by the published template, the messages are the request's own text.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import itertools
import json
import os
import queue
import re
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
from jaxtyping import UInt8
from PIL import Image

from models.features import FrameFeatures, FrameSettings
from models.qwen3_vl.config import Qwen3VLConfig
from paravt_jax.data.video import VideoError
from paravt_jax.method.records import Frame, digest
from paravt_jax.method.tokenizer import Vocabulary
from paravt_jax.remote.servers import check_address, retry_after
from rollout.engine.requests import Answer, Request, Sample, SampleStop, Sampling

_KEY = "OPENAI_API_KEY"
_SHOWN = 300  # characters of what a server says
# With these statuses a server refuses one request for its content; it may answer the next one.
_REFUSALS = (400, 413, 422, 451)
REFUSAL_REMEDY = (
    "check that the model takes images, and that its context is long enough (vllm --max-model-len)"
)
_REMEDIES = {
    401: f"check the key in {_KEY}",
    403: f"check the key in {_KEY}",
    404: "check --endpoint (up to and with /v1) and --endpoint-model",
}
_SURROGATE = re.compile("[\ud800-\udfff]")
_TAG = re.compile("<[^<>]*>")


class EndpointError(RuntimeError):
    """The endpoint cannot be used; the message says why."""


def check_endpoint(address: str) -> None:
    """Raises ValueError for an address that is unusable or may hold a secret."""
    check_address("--endpoint", address, f"the environment variable {_KEY}")


@dataclasses.dataclass(frozen=True)
class EndpointSettings:
    """Which server is asked, and how patiently. Times in seconds."""

    address: str
    """Up to and without /chat/completions: "http://localhost:8000/v1"."""
    model: str
    concurrency: int = 16
    timeout: float = 600.0
    """For one request."""
    attempts: int = 5
    wait: float = 1.0
    """Before the second attempt; it doubles with each further one."""

    def __post_init__(self):
        check_endpoint(self.address)


class FrameImages(FrameFeatures):
    """Frames as pictures instead of vectors, read, sized and kept as `FrameFeatures` does it."""

    def __init__(self, config: Qwen3VLConfig, settings: FrameSettings, root: Path):
        super().__init__(None, config, settings, root)

    def image(self, frame: Frame) -> UInt8[np.ndarray, "h w 3"]:
        """One frame's pixels. VideoError where it cannot be read."""
        height, width = (size * self.config.vision.patch_size for size in self.grid(frame.video))
        return self((frame,)).reshape(height, width, 3)

    def _vectors(self, pixels: Sequence[np.ndarray], grid: tuple[int, int]) -> list[np.ndarray]:
        tokens = grid[0] * grid[1] // self.config.vision.spatial_merge_size**2
        return [np.ascontiguousarray(image).reshape(tokens, -1) for image in pixels]


@dataclasses.dataclass(frozen=True)
class _Failure:
    """A failed attempt that is worth repeating.

    `what` names the error and a remedy; `wait` is the pause in seconds that the server asks for.
    """

    what: str
    wait: float = 0.0


class EndpointSampler:
    """Implements `rollout.engine.requests.Sampler` over HTTP. For one thread at a time; `close` ends its threads."""

    def __init__(self, settings: EndpointSettings, vocabulary: Vocabulary, images: FrameImages):
        self._settings, self._vocabulary, self._images = settings, vocabulary, images
        self._key = os.environ.get(_KEY, "").strip()
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._client = httpx2.Client(headers=headers, timeout=settings.timeout)
        self._work: queue.SimpleQueue[tuple[Future[Sample], Request, bytes] | None] = (
            queue.SimpleQueue()
        )
        # Daemons: the end of a run does not wait for open replies.
        for _ in range(settings.concurrency):
            threading.Thread(target=self._serve, name="endpoint", daemon=True).start()
        self._tickets = itertools.count()
        self._asked: dict[int, list[Future[Sample]]] = {}
        self._done: list[Answer] = []

    def close(self) -> None:
        for _ in range(self._settings.concurrency):
            self._work.put(None)

    def submit(self, request: Request) -> int:
        """Takes a request in and returns its ticket."""
        ticket = next(self._tickets)
        try:
            chat = messages(request, self._vocabulary, self._images)
        except VideoError as error:
            self._images.unreadable[error.path] = error.reason
            self._done.append(
                (ticket, (self._sample(request, "", SampleStop.UNREADABLE),) * len(request.seeds))
            )
            return ticket
        self._asked[ticket] = [Future() for _ in request.seeds]
        for seed, future in zip(request.seeds, self._asked[ticket], strict=True):
            self._work.put(
                (
                    future,
                    request,
                    body(chat, request.sampling, seed, self._settings.model, self._vocabulary),
                )
            )
        return ticket

    def _serve(self) -> None:
        """A thread's work: one request after the other, until it is told to end."""
        while (work := self._work.get()) is not None:
            future, request, content = work
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(self._ask(request, content))
                except BaseException as error:
                    future.set_exception(error)

    def step(self) -> list[Answer]:
        """Waits until a reply is there, and returns the requests that are answered. EndpointError where the server fails."""
        if not self._done and self._asked:
            open_ = [
                future
                for futures in self._asked.values()
                for future in futures
                if not future.done()
            ]
            if all(
                any(not future.done() for future in futures) for futures in self._asked.values()
            ):
                wait(open_, return_when=FIRST_COMPLETED)
        finished = [
            ticket
            for ticket, futures in self._asked.items()
            if all(future.done() for future in futures)
        ]
        done, self._done = self._done, []
        return done + [
            (ticket, tuple(future.result() for future in self._asked.pop(ticket)))
            for ticket in finished
        ]

    def cancel(self, ticket: int) -> None:
        """Gives a request up; one that is on its way is not waited for."""
        for future in self._asked.pop(ticket, []):
            future.cancel()

    def _ask(self, request: Request, content: bytes) -> Sample:
        settings = self._settings
        until, pause = time.monotonic() + request.sampling.deadline, settings.wait
        for left in reversed(range(settings.attempts)):
            limit = min(settings.timeout, until - time.monotonic())
            if limit <= 0:
                return self._sample(request, "", SampleStop.DEADLINE)
            found = self._attempt(request, content, limit)
            if isinstance(found, Sample):
                return found
            if not left:
                raise self._error(found.what)
            asked = min(max(pause, found.wait), settings.timeout)
            time.sleep(max(0.0, min(asked, until - time.monotonic())))
            pause *= 2
        raise AssertionError("unreachable")

    def _attempt(self, request: Request, content: bytes, limit: float) -> Sample | _Failure:
        """The sample, or a failure that may pass. EndpointError for one that stays."""
        try:
            reply = self._client.post(
                f"{self._settings.address.rstrip('/')}/chat/completions",
                content=content,
                headers={"Content-Type": "application/json"},
                timeout=limit,
            )
        except httpx2.HTTPError as error:
            kind = type(error).__name__
            return _Failure(
                f"the connection failed ({kind}); check --endpoint, and that its server runs"
            )
        if reply.is_success:
            return self._read(request, reply.content)
        status = f"status {reply.status_code}{self._said(reply.content)}"
        if reply.status_code in _REFUSALS:
            return self._sample(request, "", SampleStop.REFUSED, status)
        what = f"{status}; {_REMEDIES.get(reply.status_code, 'look into the log of its server')}"
        if reply.status_code in (408, 429) or reply.status_code >= 500:
            headers = reply.headers
            return _Failure(what, retry_after(headers.get("Retry-After"), headers.get("Date")))
        raise self._error(what)

    def _read(self, request: Request, content: bytes) -> Sample | _Failure:
        """The sample in the body of a successful reply."""
        try:
            choice = json.loads(content)["choices"][0]
            text, reason = choice["message"]["content"], choice["finish_reason"]
        except (ValueError, LookupError, TypeError, RecursionError):
            return _Failure(
                f"the reply is not a complete chat completion{self._said(content)}; check that no "
                "proxy answers in place of the server, and that --endpoint ends with /v1"
            )
        if reason == "content_filter":
            return self._sample(request, "", SampleStop.REFUSED, "finish_reason 'content_filter'")
        if not isinstance(text, str) or reason not in ("stop", "length"):
            raise self._error(
                f"the reply has no text (finish_reason {reason!r}); serve the model without a parser "
                "of tool calls or reasoning, which takes them out of it"
            )
        said, end, _ = text.partition("<|im_end|>")  # nothing after the end of a turn belongs to it
        stopped = choice.get("stop_reason")
        if end or (reason == "stop" and not isinstance(stopped, str)):
            return self._sample(request, said + "<|im_end|>", SampleStop.STOP_ID)
        if reason == "length":
            return self._sample(request, said, SampleStop.LENGTH)
        # A stop string ends the response; some servers leave it out of the text.
        return self._sample(request, said.removesuffix(stopped) + stopped, SampleStop.STOP_ID)

    def _error(self, what: str) -> EndpointError:
        return EndpointError(f"--endpoint {self._settings.address}: {what}")

    def _said(self, content: bytes) -> str:
        """The server's own message in brackets, on one line and without the key; "" where there is none."""
        message = _message(content)
        if self._key:
            message = message.replace(self._key, "[the key]")
        return f" ({message[:_SHOWN]})" if message else ""

    def _sample(self, request: Request, text: str, stop: SampleStop, reason: str = "") -> Sample:
        whole = _SURROGATE.sub("\ufffd", text)  # half a character has no tokens
        ids = self._vocabulary.encode(whole)[: request.sampling.max_new_tokens + 1]
        unknown = np.full(len(ids), np.nan, np.float32)
        fed = digest(np.concatenate([request.ids, ids]))
        return Sample(ids, unknown, stop, 0, fed, reason)


def _message(content: bytes) -> str:
    """The message in the body of an error, on one line: a JSON field, or the text of a page."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        found = None
    for field in ("error", "message", "detail"):
        if isinstance(found, dict) and field in found:
            found = found[field]
    text = found
    if not isinstance(text, str):
        text = _TAG.sub(" ", content[: 10 * _SHOWN].decode("utf-8", errors="replace"))
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def messages(request: Request, vocabulary: Vocabulary, images: FrameImages) -> list[dict[str, Any]]:
    """A request's ids as chat messages, its frames as pictures in them; the last is the response that was begun, perhaps empty."""
    start, end, opening = (
        vocabulary["<|im_start|>"],
        vocabulary["<|im_end|>"],
        vocabulary["<|vision_start|>"],
    )
    ids, frames = np.asarray(request.ids).tolist(), list(request.frames)
    chat: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    text: list[int] = []

    def flush() -> None:
        if text:
            parts.append({"type": "text", "text": vocabulary.decode(text)})
            text.clear()

    def close() -> None:
        flush()
        role, _, rest = parts[0]["text"].partition("\n")
        content = [{"type": "text", "text": rest}, *parts[1:]] if rest else parts[1:]
        plain = all(part["type"] == "text" for part in content)
        chat.append(
            {
                "role": role,
                "content": "".join(part["text"] for part in content) if plain else content,
            }
        )
        parts.clear()

    at, inside = 0, False
    while at < len(ids):
        if ids[at] == start and not inside:  # inside, it is something that the model wrote
            text.clear()  # the line end between two messages
            inside = True
        elif ids[at] == end and inside:
            close()
            inside = False
        elif ids[at] == opening and frames:
            flush()
            frame = frames.pop(0)
            parts.append(
                {"type": "image_url", "image_url": {"url": _data_uri(images.image(frame))}}
            )
            at += images.tokens(frame.video) + 1
        else:
            text.append(ids[at])
        at += 1
    close()
    return chat


def body(
    chat: Sequence[Mapping[str, Any]],
    sampling: Sampling,
    seed: int,
    model: str,
    vocabulary: Vocabulary,
) -> bytes:
    """A chat completion that goes on with the last message. `continue_final_message` and what stands after it are vLLM's and SGLang's."""
    content: dict[str, Any] = {
        "model": model,
        "messages": list(chat) if chat[-1]["content"] else list(chat[:-1]),
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_new_tokens,
        "seed": seed % 2**31,
    }
    if chat[-1]["content"]:
        content |= {"continue_final_message": True, "add_generation_prompt": False}
    stops = [vocabulary.decode([id]) for id in sampling.stop_ids if id != vocabulary.eos]
    if stops:
        content |= {"stop": stops, "include_stop_str_in_output": True}
    return json.dumps(content).encode()


def _data_uri(image: UInt8[np.ndarray, "h w 3"]) -> str:
    """A picture without loss, of the size in which the model sees it."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
