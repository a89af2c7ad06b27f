"""A remote server as the sampler: any OpenAI-compatible endpoint, such as vLLM on an export.

A request is sent as chat messages that the published template renders to the request's own text.
The text of the reply is converted to ids. The server does its own tokenization and log-probs are
unknown (NaN), so this is for evaluation, not for training. A server must return the text as the
model wrote it, without a parser for tool calls or reasoning.

Failures are values. If the server refuses a request for its content, the sample has
`SampleStop.REFUSED`. If it cannot be reached, or sends no usable reply in all attempts, the sample
has `SampleStop.FAILED`. `ServerWatch` decides when a server is hopeless (`EndpointError`).
"""

from __future__ import annotations

import base64
import functools
import io
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from models.config import ModelConfig
from models.features import FrameFeatures, FrameSettings
from models.features.cache import Encoded
from models.features.encoder import FrameEncoder
from paravt_jax.data.frames import FrameSource, VideoError
from paravt_jax.method.judge import ServerSettings
from paravt_jax.method.records import Frame, digest
from paravt_jax.method.tokenizer import Vocabulary
from paravt_jax.processes.exit_codes import UserError
from paravt_jax.remote.client import Choice, Client, Failure
from rollout.engine.requests import Completion, Request, Sample, SampleStop, Sampling

# HTTP statuses that refuse one request for its content. The server may accept the next one.
_REFUSALS = (400, 413, 422, 451)
_PARSER_REMEDY = (
    "ask another model if this one refuses, or serve it without a parser for tool calls or "
    "reasoning, because a parser removes them from the text"
)
# How servers say that a reply was cut at its token limit, and that they did not finish a reply.
_CUT = (
    "length max_length max_tokens max_output_tokens model_length model_context_window_exceeded"
).split()
# "none": they gave no reason.
_BROKEN = (
    "none error abort aborted cancelled canceled failed timeout insufficient_system_resource"
).split()
HOPELESS = 20
"""A run ends after this many questions in a row without an answer. Each has had all its attempts,
and the next command asks them again."""
_MOMENT = 0.05  # seconds that a step waits at most

# The text, why it ended, and the reason of a refusal or "".
_Completion = tuple[str, SampleStop, str]


class EndpointError(UserError):
    """The endpoint cannot be used for a run; the message says why."""


class ServerWatch:
    """Ends a run whose server answers nothing, instead of leaving out one question after another.

    A refusal of one question is no fault of a server that has answered others.

    Args:
        endpoint: Address of the server, for messages.
        proven: Whether it answered questions of this evaluation in an earlier start.
    """

    def __init__(self, endpoint: str, proven: bool):
        self._endpoint = endpoint
        self._proven = proven
        self._in_a_row = 0

    def add(self, line: Mapping[str, Any]) -> None:
        """Count the line of a finished question. Raises EndpointError if the server is hopeless."""
        cause = line.get("left_out")
        if cause is None:
            self._proven = True
            self._in_a_row = 0
        elif cause == "failed" or (cause == "refused" and not self._proven):
            self._in_a_row += 1
        if self._in_a_row == HOPELESS:
            raise EndpointError(
                f"--endpoint {self._endpoint}: {HOPELESS} questions in a row have no answer "
                f"({line['reason']}); check that the model takes images, and that its context is "
                "long enough (vllm --max-model-len); the same command asks them again"
            )


class FrameImages(FrameFeatures):
    """Pixels of frames instead of features. The base class reads, resizes and caches them."""

    def __init__(
        self, config: ModelConfig, settings: FrameSettings, root: Path, source: FrameSource
    ):
        super().__init__(None, config, settings, root, source)
        self.encoder = PixelEncoder()

    def image(self, frame: Frame) -> UInt8[np.ndarray, "h w 3"]:
        """Return the pixels of a frame. Raises VideoError if it cannot be read."""
        return self((frame,))


class PixelEncoder(FrameEncoder):
    """Caches the pixels of frames, [h, w, 3] each, as they are."""

    def __init__(self):
        """Needs no vision tower."""

    def encode(self, pixels: np.ndarray, grid: tuple[int, int]) -> Iterator[Encoded]:
        return (Encoded(pixels, index) for index in range(len(pixels)))


class EndpointSampler:
    """A `rollout.engine.requests.Sampler` over HTTP. Use it from one thread at a time.

    Args:
        settings: Address, key, retries and concurrency.
        model: Name of the model at the endpoint.
        vocabulary: Tokenizer of the model, for the ids of replies.
        images: Frames as pictures.
    """

    def __init__(
        self,
        settings: ServerSettings,
        model: str,
        vocabulary: Vocabulary,
        images: FrameImages,
    ):
        self._settings = settings
        self._model = model
        self._vocabulary = vocabulary
        self._images = images
        self._client = Client(settings)
        self._tickets = itertools.count()
        # Requests in flight, by ticket.
        self._pending: dict[int, tuple[Request, Future[_Completion | Failure]]] = {}

    def close(self) -> None:
        self._client.close()

    def submit(self, request: Request) -> int:
        """Send a request and return its ticket."""
        if request.begun is not None:
            raise ValueError("Request.begun: a server cannot go on with a response; ask it anew")
        ticket = next(self._tickets)
        try:
            chat = messages(request, self._vocabulary, self._images)
        except VideoError as error:
            unread: Future[_Completion | Failure] = Future()
            unread.set_result(("", SampleStop.UNREADABLE, error.reason))
            self._pending[ticket] = (request, unread)
            return ticket
        read = functools.partial(_read, end=self._vocabulary.dialect.end)
        reply = self._client.ask(
            body(chat, request.sampling, request.seed, self._model, self._vocabulary),
            read,
            request.sampling.deadline,
        )
        self._pending[ticket] = (request, reply)
        return ticket

    def step(self) -> list[Completion]:
        """Wait a moment for a reply, and return the requests that are complete."""
        # Only a moment: frames may arrive meanwhile.
        if self._pending:
            replies = [reply for _, reply in self._pending.values()]
            wait(replies, _MOMENT, return_when=FIRST_COMPLETED)
        completions = []
        for ticket, (request, reply) in list(self._pending.items()):
            if reply.done():
                del self._pending[ticket]
                completions.append((ticket, self._to_sample(request, reply.result())))
        return completions

    def cancel(self, ticket: int) -> None:
        """Drop a request, and end its HTTP request."""
        if ticket in self._pending:
            _, reply = self._pending.pop(ticket)
            reply.cancel()

    def _to_sample(self, request: Request, result: _Completion | Failure) -> Sample:
        if not isinstance(result, Failure):
            return self._sample(request, *result)
        if result.late:
            return self._sample(request, "", SampleStop.DEADLINE)
        if result.status in _REFUSALS:
            return self._sample(request, "", SampleStop.REFUSED, result.text)
        return self._sample(request, "", SampleStop.FAILED, result.text)

    def _sample(self, request: Request, text: str, stop: SampleStop, reason: str = "") -> Sample:
        # A lone surrogate, half a character in JSON, becomes "?".
        ids = self._vocabulary.encode(text.encode(errors="replace").decode())
        # One more than the limit, because `_read` adds the end of the turn to the text.
        limit = request.sampling.max_new_tokens + 1
        if len(ids) > limit and stop is SampleStop.STOP_ID:
            # The cut removes the end of the response, such as a `</tool_call>`.
            stop = SampleStop.LENGTH
        ids = ids[:limit]
        return Sample(
            ids,
            logprobs=np.full(len(ids), np.nan, np.float32),
            stop=stop,
            versions=np.zeros(len(ids), np.int32),
            digest=digest(np.concatenate([request.ids, ids])),
            reason=reason,
        )


def _read(choice: Choice, end: str) -> _Completion | Failure:
    """Return the completion in a successful reply.

    A failure says that the text is missing or incomplete, or that the server broke it off.

    Args:
        choice: The reply.
        end: The mark of a turn's end.
    """
    reason = str(choice.finish_reason).lower()
    shown = f"(finish_reason {choice.finish_reason!r})"
    if reason == "content_filter":
        return "", SampleStop.REFUSED, "finish_reason 'content_filter'"
    if reason in _BROKEN:
        return Failure(f"the server did not finish the reply {shown}; look into the server's log")
    text = choice.text or ""
    # A model may end its turn at once ("").
    may_be_empty = choice.text is not None and reason in ("stop", *_CUT)
    if choice.parsed or not (text.strip() or may_be_empty):
        return Failure(f"the reply's text is missing or incomplete {shown}; {_PARSER_REMEDY}")
    # Some servers also return text that the model wrote after the end of its turn.
    response, ended, _ = text.partition(end)
    stop_string = choice.stop_reason
    if not ended and reason in _CUT:
        return response, SampleStop.LENGTH, ""
    if ended or reason != "stop" or not isinstance(stop_string, str):
        return response + end, SampleStop.STOP_ID, ""
    # A stop string is part of the response, but some servers leave it out of the text.
    return response.removesuffix(stop_string) + stop_string, SampleStop.STOP_ID, ""


def messages(request: Request, vocabulary: Vocabulary, images: FrameImages) -> list[dict[str, Any]]:
    """Convert a request's ids to chat messages, with its frames as pictures.

        START user\\n <0.0 seconds> VISION_START pads VISION_END What ...? END
        role: user    text          picture                      text

    Args:
        request: The prompt and its frames.
        vocabulary: Decodes the ids.
        images: Reads the frames.

    Returns:
        The messages. The last one is the beginning of the response, possibly empty.

    Raises:
        VideoError: A frame cannot be read.
    """
    frames = list(request.frames)
    chat: list[dict[str, Any]] = []
    dialect = vocabulary.dialect
    opening, end, vision_start, pad, vision_end = map(
        re.escape,
        (dialect.start, dialect.end, dialect.vision_start, dialect.image, dialect.vision_end),
    )
    # A message ends with its first end: an opening in between is text that the model wrote.
    message = re.compile(rf"{opening}(\w+)\n(.*?)(?:{end}|\Z)", re.DOTALL)
    picture = re.compile(rf"{vision_start}(?:{pad})+{vision_end}")
    for role, text in message.findall(vocabulary.decode(request.ids)):
        first, *rest = picture.split(text, len(frames)) if frames else [text]
        content = [{"type": "text", "text": first}]
        for text_after in rest:
            url = _data_uri(images.image(frames.pop(0)))
            content.append({"type": "image_url", "image_url": {"url": url}})
            content.append({"type": "text", "text": text_after})
        shown = [entry for entry in content if entry.get("text") != ""]
        chat.append({"role": role, "content": shown if rest else text})
    return chat


def body(
    chat: Sequence[Mapping[str, Any]],
    sampling: Sampling,
    seed: int,
    model: str,
    vocabulary: Vocabulary,
) -> dict[str, Any]:
    """Return the JSON of a chat completion request.

    Args:
        chat: Messages; the last one is the beginning of the response.
        sampling: Temperature, limits and stop ids.
        seed: Seed of the sample.
        model: Name of the model at the endpoint.
        vocabulary: Decodes the stop ids.
    """
    begun = bool(chat[-1]["content"])
    content: dict[str, Any] = {
        "model": model,
        "messages": list(chat) if begun else list(chat[:-1]),
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_new_tokens,
        "seed": seed % 2**31,
    }
    # The fields below are extensions of vLLM and SGLang.
    if begun:
        content |= {"continue_final_message": True, "add_generation_prompt": False}
    stops = [vocabulary.decode([id]) for id in sampling.stop_ids if id != vocabulary.eos]
    if stops:
        content |= {"stop": stops, "include_stop_str_in_output": True}
    return content


def _data_uri(image: UInt8[np.ndarray, "h w 3"]) -> str:
    """Return a lossless picture, at the size at which the model sees the frame."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
