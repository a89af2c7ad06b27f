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
import io
import itertools
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from models.features import FrameFeatures, FrameSettings
from models.qwen3_vl.config import Qwen3VLConfig
from paravt_jax.data.frames import FrameSource, VideoError
from paravt_jax.method.records import Frame, digest
from paravt_jax.method.server import ServerSettings
from paravt_jax.method.tokenizer import Vocabulary
from paravt_jax.remote.client import Choice, Client, Failure, UnusableReply
from rollout.engine.requests import Completion, Request, Sample, SampleStop, Sampling

# With these statuses a server refuses one request for its content; it may answer the next one.
_REFUSALS = (400, 413, 422, 451)
REFUSAL_REMEDY = (
    "check that the model takes images, and that its context is long enough (vllm --max-model-len)"
)
_REMEDIES: dict[int | str, str] = {
    401: "check the key in OPENAI_API_KEY",
    403: "check the key in OPENAI_API_KEY",
    404: "check --endpoint (up to and with /v1) and --endpoint-model",
    "timed_out": "look into the log of its server, or lower --concurrency",
    "unreachable": "check --endpoint, and that its server runs",
    "http_errors": "look into the log of its server",
    "nonsense": (
        "check that no proxy answers in place of the server, and that --endpoint ends with /v1"
    ),
}
_SURROGATE = re.compile("[\ud800-\udfff]")

_Completion = tuple[str, SampleStop, str]  # text, how it ended, and why where it was refused


class EndpointError(RuntimeError):
    """The endpoint cannot be used; the message says why."""


class FrameImages(FrameFeatures):
    """Frames as pictures instead of vectors, read, sized and kept as `FrameFeatures` does it."""

    def __init__(
        self, config: Qwen3VLConfig, settings: FrameSettings, root: Path, source: FrameSource
    ):
        super().__init__(None, config, settings, root, source)

    def image(self, frame: Frame) -> UInt8[np.ndarray, "h w 3"]:
        """One frame's pixels. VideoError where it cannot be read."""
        height, width = (size * self.config.vision.patch_size for size in self.grid(frame.video))
        return self((frame,)).reshape(height, width, 3)

    def _vectors(self, pixels: Sequence[np.ndarray], grid: tuple[int, int]) -> list[np.ndarray]:
        tokens = grid[0] * grid[1] // self.config.vision.spatial_merge_size**2
        return [np.ascontiguousarray(image).reshape(tokens, -1) for image in pixels]


class EndpointSampler:
    """Implements `rollout.engine.requests.Sampler` over HTTP. For one thread at a time."""

    def __init__(
        self, settings: ServerSettings, model: str, vocabulary: Vocabulary, images: FrameImages
    ):
        self._settings, self._model = settings, model
        self._vocabulary, self._images = vocabulary, images
        self._client = Client(settings)
        self._tickets = itertools.count()
        self._asked: dict[int, tuple[Request, list[Future[_Completion | Failure]]]] = {}
        self._done: list[Completion] = []

    def close(self) -> None:
        self._client.close()

    def submit(self, request: Request) -> int:
        """Takes a request in and returns its ticket."""
        ticket = next(self._tickets)
        try:
            chat = messages(request, self._vocabulary, self._images)
        except VideoError as error:
            self._images.unreadable[error.path] = error.reason
            sample = self._sample(request, "", SampleStop.UNREADABLE)
            self._done.append((ticket, (sample,) * len(request.seeds)))
            return ticket
        futures = [
            self._client.ask(
                body(chat, request.sampling, seed, self._model, self._vocabulary),
                self._read,
                request.sampling.deadline,
            )
            for seed in request.seeds
        ]
        self._asked[ticket] = request, futures
        return ticket

    def step(self) -> list[Completion]:
        """Waits until a reply is there, and returns the requests that are answered.

        Raises EndpointError where the server cannot be used.
        """
        if not self._done and self._asked and not self._finished():
            open_ = [f for _, futures in self._asked.values() for f in futures if not f.done()]
            wait(open_, return_when=FIRST_COMPLETED)
        done, self._done = self._done, []
        for ticket in self._finished():
            request, futures = self._asked.pop(ticket)
            done.append((ticket, tuple(self._outcome(request, f.result()) for f in futures)))
        return done

    def _finished(self) -> list[int]:
        """Tickets of the requests whose samples are all there."""
        return [
            ticket
            for ticket, (_, futures) in self._asked.items()
            if all(future.done() for future in futures)
        ]

    def cancel(self, ticket: int) -> None:
        """Gives a request up; one that is on its way is not waited for."""
        _, futures = self._asked.pop(ticket, (None, []))
        for future in futures:
            future.cancel()

    def _outcome(self, request: Request, found: _Completion | Failure) -> Sample:
        if not isinstance(found, Failure):
            return self._sample(request, *found)
        if found.kind == "deadline":
            return self._sample(request, "", SampleStop.DEADLINE)
        what = found.what + found.server_message
        if found.status in _REFUSALS:
            return self._sample(request, "", SampleStop.REFUSED, what)
        remedy = _REMEDIES.get(found.status, _REMEDIES[found.kind])
        raise EndpointError(f"--endpoint {self._settings.endpoint}: {what}; {remedy}")

    def _read(self, choice: Choice) -> _Completion:
        """What became of a request by a successful reply."""
        text, reason, stopped = choice.text, choice.finish_reason, choice.stop_reason
        if reason is None:
            raise UnusableReply("the reply is not a complete chat completion")
        if reason == "content_filter":
            return "", SampleStop.REFUSED, "finish_reason 'content_filter'"
        if not isinstance(text, str) or reason not in ("stop", "length"):
            raise EndpointError(
                f"--endpoint {self._settings.endpoint}: the reply has no text "
                f"(finish_reason {reason!r}); serve the model without a parser of tool calls or "
                "reasoning, which takes them out of it"
            )
        said, end, _ = text.partition("<|im_end|>")  # nothing after the end of a turn belongs to it
        if end or (reason == "stop" and not isinstance(stopped, str)):
            return said + "<|im_end|>", SampleStop.STOP_ID, ""
        if reason == "length":
            return said, SampleStop.LENGTH, ""
        # A stop string ends the response; some servers leave it out of the text.
        return said.removesuffix(stopped) + stopped, SampleStop.STOP_ID, ""

    def _sample(self, request: Request, text: str, stop: SampleStop, reason: str = "") -> Sample:
        whole = _SURROGATE.sub("\ufffd", text)  # half a character has no tokens
        ids = self._vocabulary.encode(whole)[: request.sampling.max_new_tokens + 1]
        unknown = np.full(len(ids), np.nan, np.float32)
        fed = digest(np.concatenate([request.ids, ids]))
        return Sample(ids, unknown, stop, 0, fed, reason)


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
) -> dict[str, Any]:
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
    return content


def _data_uri(image: UInt8[np.ndarray, "h w 3"]) -> str:
    """A picture without loss, of the size in which the model sees it."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
