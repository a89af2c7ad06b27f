"""A remote server as the sampler: any OpenAI-compatible endpoint, such as vLLM on an export.

A request is sent as chat messages that the published template renders to the request's own text.
The text of the reply is converted to ids. The server does its own tokenization and log-probs are
unknown (NaN), so this is for evaluation, not for training. Reasoning and tool calls that a server
took out of the text are put back, as the model itself writes them.

Failures are values. If the server refuses a request for its content, the sample has
`SampleStop.REFUSED`. If it cannot be reached, or sends no usable reply in all attempts, the sample
has `SampleStop.FAILED`. `ServerWatch` decides when a server is hopeless (`EndpointError`).
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from models.config import ModelConfig
from models.features import FrameFeatures, FrameSettings
from models.features.cache import Encoded
from models.features.encoder import FrameEncoder
from paravt_jax.data.frames import FrameSource, VideoError
from paravt_jax.method.judge import ServerSettings
from paravt_jax.method.parsing import find_calls, rewrite_calls
from paravt_jax.method.protocol import PINNED
from paravt_jax.method.records import Frame, digest
from paravt_jax.method.tokenizer import Vocabulary
from paravt_jax.processes.exit_codes import UserError
from paravt_jax.remote.client import REFUSALS, Choice, Client, Failure
from rollout.engine.requests import Completion, Request, Sample, SampleStop

# How servers say that they withhold a reply, and that it was cut at its token limit. Anything else
# is a turn's end.
_WITHHELD = re.compile("(?i)filter|refusal|safety|prohibited|recitation|block|spii")
_CUT = re.compile("(?i)length|max_tokens|max_output_tokens|exceeded")
# How servers say that they do not go on with a response that the request begins.
_BEGUN = re.compile("assistant|continue_final_message|add_generation_prompt")
HOPELESS = 20
"""A run ends after this many questions in a row without an answer. Each has had all its attempts,
and the next command asks them again."""
_MOMENT = 0.05  # seconds that a step waits at most


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
                f"({line['reason']}); the same command asks them again"
            )


class FrameImages(FrameFeatures):
    """Pictures of frames instead of features. The base class reads, resizes and caches them."""

    def __init__(
        self, config: ModelConfig, settings: FrameSettings, root: Path, source: FrameSource
    ):
        super().__init__(None, config, settings, root, source)
        self.encoder = PictureEncoder()

    def address(self, frame: Frame) -> str:
        """Return a frame as a data URI. Raises VideoError if it cannot be read."""
        picture = self((frame,)).tobytes()
        return f"data:image/png;base64,{base64.b64encode(picture).decode()}"


class PictureEncoder(FrameEncoder):
    """Caches frames as lossless pictures, at the size at which the model sees them."""

    def __init__(self):
        """Needs no vision tower."""

    def encode(self, pixels: np.ndarray, grid: tuple[int, int]) -> Iterator[Encoded]:
        for frame in pixels:
            buffer = io.BytesIO()
            Image.fromarray(frame).save(buffer, "PNG", compress_level=1)
            yield Encoded(np.frombuffer(buffer.getvalue(), np.uint8)[None], 0)


class _Unreadable(Failure):
    """A frame of the request cannot be read."""


class EndpointSampler:
    """A `rollout.engine.requests.Sampler` over HTTP. Use it from one thread at a time.

    Args:
        settings: Address, key, retries and concurrency.
        model: Name of the model at the endpoint.
        vocabulary: Tokenizer of the model, for the ids of replies.
        images: Frames as pictures.

    Attributes:
        client: Sends the requests.
    """

    def __init__(
        self, settings: ServerSettings, model: str, vocabulary: Vocabulary, images: FrameImages
    ):
        self._model = model
        self._vocabulary = vocabulary
        self._images = images
        self.client = Client(settings)
        self._tickets = itertools.count()
        # Requests in flight, by ticket, with what was sent.
        self._pending: dict[int, tuple[Request, dict[str, Any], Future[Choice | Failure]]] = {}

    def submit(self, request: Request) -> int:
        """Send a request and return its ticket."""
        if request.begun is not None:
            raise ValueError("Request.begun: a server cannot go on with a response; ask it anew")
        body: dict[str, Any] = {}
        try:
            body = self._body(request)
            reply = self.client.ask(body, request.sampling.deadline)
        except VideoError as error:
            reply = Future()
            reply.set_result(_Unreadable(error.reason))
        ticket = next(self._tickets)
        self._pending[ticket] = (request, body, reply)
        return ticket

    def _body(self, request: Request) -> dict[str, Any]:
        """Return the JSON of a chat completion request. Raises VideoError as `messages` does."""
        sampling, vocabulary = request.sampling, self._vocabulary
        chat = messages(request, vocabulary, self._images)
        begun = bool(chat[-1]["content"])
        content: dict[str, Any] = {
            "model": self._model,
            "messages": chat if begun else chat[:-1],
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_new_tokens,
            "seed": request.seed % 2**31,
        }
        if begun:  # extensions of vLLM and SGLang
            content |= {"continue_final_message": True, "add_generation_prompt": False}
        stops = [vocabulary.decode([id]) for id in sampling.stop_ids if id != vocabulary.eos]
        return content | {"stop": stops} if stops else content

    def step(self) -> list[Completion]:
        """Wait a moment for a reply, and return the requests that are complete."""
        # Only a moment: frames may arrive meanwhile.
        replies = [reply for *_, reply in self._pending.values()]
        wait(replies, _MOMENT, return_when=FIRST_COMPLETED)
        completions = []
        for ticket, (request, body, reply) in list(self._pending.items()):
            if reply.done():
                del self._pending[ticket]
                completions.append((ticket, self._sample(request, body, reply.result())))
        return completions

    def cancel(self, ticket: int) -> None:
        """Drop a request, and end its HTTP request."""
        if ticket in self._pending:
            *_, reply = self._pending.pop(ticket)
            reply.cancel()

    def _read(self, body: dict[str, Any], outcome: Choice | Failure) -> tuple[str, SampleStop, str]:
        """Return the text of a response, why it ended, and the reason of a failure or ""."""
        if isinstance(outcome, _Unreadable):
            return "", SampleStop.UNREADABLE, outcome.text
        if isinstance(outcome, Failure):
            failed = SampleStop.REFUSED if outcome.status in REFUSALS else SampleStop.FAILED
            is_begun = failed is SampleStop.REFUSED and _BEGUN.search(outcome.text)
            why = outcome.text + ("; ask with --protocol.no-pin-think" if is_begun else "")
            return "", SampleStop.DEADLINE if outcome.late else failed, why
        message, dialect = outcome.message, self._vocabulary.dialect
        reason = f"refusal: {message.refusal}" if message.refusal else outcome.finish_reason or ""
        shown = self.client.shown(f"finish_reason {reason}")
        if _WITHHELD.search(reason):
            return "", SampleStop.REFUSED, shown
        is_cut = _CUT.search(reason)
        thought = message.reasoning_content or message.reasoning
        # Some servers also return text that the model wrote after the end of its turn.
        text, ended, _ = (message.content or "").partition(dialect.end)
        # Some servers leave in the text what they give beside it.
        calls = [] if any(call for _, call in find_calls(text)) else message.tool_calls or []
        is_empty = not (text.strip() or calls or is_cut)
        # A parser may have taken the answer out of the text. Without one, a model may end its turn
        # at once.
        if is_empty and (thought or "call" in reason or message.content is None):
            remedy = "serve the model with the parsers that were made for it, or with none"
            return "", SampleStop.FAILED, f"the reply has no text ({shown}); {remedy}"
        if thought and "</think>" not in text:
            # Its opening may belong to the request; a thought that was cut has no end.
            opening = "" if "continue_final_message" in body else PINNED
            closing = "" if is_cut and not (text.strip() or calls) else "\n</think>\n"
            text = f"{opening}{thought}{closing}{text}"
        for call in calls:
            written = json.dumps(call.get("function", call) if isinstance(call, dict) else call)
            text += rewrite_calls(f"\n<tool_call>\n{written}\n</tool_call>", dialect.calls)
        # A thought or a call may also hold the end.
        response = text.partition(dialect.end)[0]
        if not ended and is_cut:
            return response, SampleStop.LENGTH, ""
        # A stop string is part of the response, but servers leave it out of the text.
        if "stop" in body and not ended and any(call is None for _, call in find_calls(response)):
            return response + body["stop"][0], SampleStop.STOP_ID, ""
        return response + dialect.end, SampleStop.STOP_ID, ""

    def _sample(self, request: Request, body: dict[str, Any], outcome: Choice | Failure) -> Sample:
        text, stop, reason = self._read(body, outcome)
        ids = self._vocabulary.encode(text)
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
    marks = (dialect.start, dialect.end, dialect.vision_start, dialect.image, dialect.vision_end)
    opening, end, vision_start, pad, vision_end = map(re.escape, marks)
    # A message ends with its first end: an opening in between is text that the model wrote.
    message = re.compile(rf"{opening}(\w+)\n(.*?)(?:{end}|\Z)", re.DOTALL)
    picture = re.compile(rf"{vision_start}(?:{pad})+{vision_end}")
    for role, text in message.findall(vocabulary.decode(request.ids)):
        first, *rest = picture.split(text, len(frames)) if frames else [text]
        content = [{"type": "text", "text": first}]
        for text_after in rest:
            url = images.address(frames.pop(0))
            content.append({"type": "image_url", "image_url": {"url": url}})
            content.append({"type": "text", "text": text_after})
        shown = [entry for entry in content if entry.get("text") != ""]
        chat.append({"role": role, "content": shown if rest else text})
    return chat
