"""OpenAI's chat completions: bodies of requests in, replies and streamed chunks out.

What an episode has and OpenAI's API has no field for is in the field `paravt` of requests, replies
and chunks (docs/serving.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import re
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import pydantic

from paravt_jax.data.frames import PixelRules, VideoError
from paravt_jax.method.parsing import find_calls
from paravt_jax.method.records import Episode, StopReason
from rollout.agent.episode import Dispatch, EpisodeSettings
from rollout.ask import Answer, question_about
from rollout.engine.requests import SampleStop, Sampling
from rollout.serve.errors import ApiError
from rollout.serve.files import KEPT, Files
from rollout.serve.owner import Job, Result
from rollout.serve.service import (
    Reply,
    Service,
    Visual,
    evidence,
    thought_of,
    token_counts,
)

PLAIN = "/plain"
"""Ends the name of the model alone."""

# Settings that would change a sample, and are not supported.
_UNSUPPORTED = (
    *("top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("logit_bias", "tool_choice", "response_format", "top_logprobs"),
)
# Settings of a reply that an episode does not have.
_NOT_OF_EPISODES = ("n", "stop", "logprobs", "tools", "top_p", *_UNSUPPORTED)
_MOST_REPLIES = 16
_MOST_EPISODES = 256
_MOST_STOPS = 16
_MOST_MESSAGES = 4096
_VIDEO_FRAMES = 32  # frames of a video that vLLM shows unless told otherwise
_MOST_FRAMES = 768
# Why an episode or a reply ended before it was whole.
_CUT = {
    *(StopReason.TRUNCATED, StopReason.TOKEN_LIMIT, StopReason.TURN_LIMIT, StopReason.TIME_LIMIT),
    *(SampleStop.LENGTH, SampleStop.DEADLINE),
}


def _without_nulls(values: Any) -> Any:
    """Leave out fields that are null: clients send those that are not set."""
    if isinstance(values, dict):
        return {name: value for name, value in values.items() if value is not None}
    return values


class Url(pydantic.BaseModel):
    """Where a picture or a video is."""

    url: str


class Part(pydantic.BaseModel):
    """A part of a message."""

    type: Literal["text", "image_url", "video_url"]
    text: str = ""
    image_url: Url | None = None
    video_url: Url | None = None

    @pydantic.model_validator(mode="after")
    def _has_what_it_names(self) -> Part:
        for name in ("image_url", "video_url"):
            if (getattr(self, name) is not None) != (self.type == name):
                raise ValueError(f"a part of type {self.type}; give it the field of its type only")
        return self

    def for_template(self) -> dict[str, str]:
        """Return the part as chat templates take it."""
        if self.image_url is not None:
            return {"type": "image"}
        if self.video_url is not None:
            return {"type": "video"}
        return {"type": "text", "text": self.text}


class Message(pydantic.BaseModel):
    """A message of a conversation."""

    model_config = pydantic.ConfigDict(extra="allow")  # the template may know more fields
    role: Literal["system", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], pydantic.Field(max_length=_MOST_MESSAGES)] = ""

    _set_fields = pydantic.model_validator(mode="before")(_without_nulls)

    def parts(self) -> list[Part]:
        """Return the content as parts."""
        if isinstance(self.content, str):
            return [Part(type="text", text=self.content)]
        return self.content


class EpisodeOptions(pydantic.BaseModel):
    """The field `paravt` of a request for an episode."""

    model_config = pydantic.ConfigDict(extra="forbid")
    frames: int | None = None
    """Overview frames (K)."""
    options: tuple[str, ...] = ()
    """Answers to choose from."""
    dispatch: Dispatch = "parallel"
    seconds: float = math.inf
    """Time limit of the answer."""
    trace: bool = True
    """Whether the reply has the transcript."""


class StreamOptions(pydantic.BaseModel):
    """What a stream has besides the text."""

    include_usage: bool = False


class ChatRequest(pydantic.BaseModel):
    """The body of a request. Fields that are not here are ignored, as OpenAI's clients expect."""

    model: str
    messages: list[Message] = pydantic.Field(min_length=1, max_length=_MOST_MESSAGES)
    temperature: float | None = pydantic.Field(None, ge=0, le=2)
    seed: int | None = None
    max_tokens: int | None = pydantic.Field(None, ge=1)
    max_completion_tokens: int | None = pydantic.Field(None, ge=1)
    n: int = pydantic.Field(1, ge=1, le=_MOST_REPLIES)
    stop: str | list[str] | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    top_p: float = 1.0
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    tools: list[dict[str, Any]] | None = None
    top_k: int = -1
    min_p: float = 0
    frequency_penalty: float = 0
    presence_penalty: float = 0
    repetition_penalty: float = 1
    logit_bias: dict[str, Any] = {}
    tool_choice: Any = "auto"
    response_format: dict[str, Any] = {"type": "text"}
    mm_processor_kwargs: dict[str, Any] = {}
    media_io_kwargs: dict[str, dict[str, Any]] = {}
    paravt: EpisodeOptions = EpisodeOptions()

    _set_fields = pydantic.model_validator(mode="before")(_without_nulls)

    def require_usual(self, fields: Sequence[str], remedy: str) -> None:
        """Refuse fields that are not what they are if nobody sets them."""
        for field in fields:
            value = getattr(self, field)
            if value not in (type(self).model_fields[field].default, []):
                raise ApiError(400, f"{field}: {value!r} is not supported; {remedy}")

    @property
    def most_tokens(self) -> int | None:
        """The limit of a reply, in tokens."""
        return self.max_completion_tokens or self.max_tokens


def read_request(body: bytes) -> ChatRequest:
    """Parse the body of a request.

    Raises:
        ApiError: It is no request; the first wrong field is named.
    """
    try:
        return ChatRequest.model_validate_json(body)
    except pydantic.ValidationError as error:
        wrong = error.errors()[0]
        param = ".".join(map(str, wrong["loc"])) or "body"
        raise ApiError(400, f"{param}: {wrong['msg']}") from error


@dataclasses.dataclass(frozen=True)
class KeptEpisode:
    """An episode that its client may look at again."""

    owner: str
    answer: Answer
    settings: EpisodeSettings
    ended: float


class Chat:
    """Answers chat completions.

    Args:
        service: The model.
        files: Videos and pictures of clients.
        name: The name of the model.

    Attributes:
        episodes: The newest episodes.
    """

    def __init__(self, service: Service, files: Files, name: str):
        self.service = service
        self.files = files
        self.name = name
        self.episodes: dict[str, KeptEpisode] = {}

    def keep(self, owner: str, answer: Answer, settings: EpisodeSettings) -> str:
        """Keep an episode for a while, and return its id."""
        id = f"ep-{secrets.token_hex(12)}"
        self.episodes[id] = KeptEpisode(owner, answer, settings, time.time())
        if len(self.episodes) > _MOST_EPISODES:
            del self.episodes[next(iter(self.episodes))]
        return id

    def find(self, id: str, owner: str) -> KeptEpisode:
        """Return an episode of this owner.

        Raises:
            ApiError: It is unknown or no longer kept.
        """
        kept = self.episodes.get(id)
        if kept is None or kept.owner != owner or kept.ended < time.time() - KEPT:
            raise ApiError(404, f"episode: {id!r} is unknown or no longer kept; ask again")
        return kept

    async def begin(self, request: ChatRequest, owner: str) -> Exchange:
        """Enqueue what a request asks for. Cancel the exchange in any case.

        Raises:
            ApiError: The request is refused.
        """
        if request.model == self.name:
            return await self._begin_episode(request, owner)
        if request.model == self.name + PLAIN:
            return await self._begin_completion(request, owner)
        raise ApiError(
            404,
            f"model: {request.model!r} is not served here; give {self.name} (episodes) or "
            f"{self.name}{PLAIN} (the model alone)",
            "model_not_found",
        )

    async def _begin_episode(self, request: ChatRequest, owner: str) -> EpisodeExchange:
        request.require_usual(_NOT_OF_EPISODES, f"leave it out, or ask {self.name}{PLAIN}")
        if any(message.role in ("system", "tool") for message in request.messages):
            raise ApiError(
                400,
                "messages: an episode has its own system turn and tools; leave out messages of "
                f"system and tool, or ask {self.name}{PLAIN}",
            )
        last = request.messages[-1]
        if last.role != "user":
            raise ApiError(400, f"messages: the last is of {last.role}; end with the question")
        text = "\n".join(part.text for part in last.parts() if part.type == "text")
        path = await self._video(request.messages, owner)
        options = request.paravt
        frames = self.service.settings.frames if options.frames is None else options.frames
        if frames > self.service.settings.frames:
            most = self.service.settings.frames
            raise ApiError(400, f"paravt.frames: {frames}; at most {most}")
        try:
            # Large texts take long, and others are served meanwhile.
            question = await asyncio.to_thread(
                question_about, self.service.environment.protocol, path, text, options.options
            )
            settings = EpisodeSettings(
                frames,
                request.temperature or 0.0,
                options.dispatch,
                min(options.seconds, self.service.settings.seconds),
            )
        except ValueError as error:
            message = re.sub("^(episode[.])?(?=options|frames|temp|sec)", "paravt.", str(error))
            raise ApiError(400, message) from error
        most = request.most_tokens or self.service.environment.protocol.settings.turn_tokens
        job = self.service.ask(question, settings, _seed(request), most, request.stream)
        return EpisodeExchange(self, request, job, settings, owner)

    async def _video(self, messages: Sequence[Message], owner: str) -> Any:
        """Return the video of the last message that has one, or one that its pictures make up."""
        for message in reversed(messages):
            parts = message.parts()
            videos = [part.video_url.url for part in parts if part.video_url]
            pictures = [part.image_url.url for part in parts if part.image_url]
            if len(videos) > 1 or (videos and pictures):
                raise ApiError(400, "messages: give one video, or pictures, in a message")
            if videos:
                return await self.files.video(videos[0], owner)
            most = self.service.settings.frames
            if len(pictures) > most:
                raise ApiError(400, f"messages: {len(pictures)} pictures; at most {most}")
            if pictures:
                return await self.files.film(pictures, self.service.picture_rules, owner)
        raise ApiError(400, "messages: no video; give a part video_url, or pictures")

    async def _begin_completion(self, request: ChatRequest, owner: str) -> PlainExchange:
        service = self.service
        # Greedy samples do not depend on it.
        top_p = () if request.temperature == 0 else ("top_p",)
        request.require_usual((*_UNSUPPORTED, *top_p), "leave it out")
        stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
        if len(stop) > _MOST_STOPS:
            raise ApiError(400, f"stop: {len(stop)} texts; give at most {_MOST_STOPS}")
        messages, media = _for_template(request.messages)
        visuals = await self._visuals(media, request, owner)
        # Large texts take long, and others are served meanwhile.
        text = await asyncio.to_thread(service.render, messages, request.tools)
        ids = await asyncio.to_thread(service.prompt, text, visuals)
        room = service.context - len(ids)
        if room < (request.most_tokens or 1):
            raise ApiError(
                400,
                f"messages: {len(ids)} tokens, and {request.most_tokens or 1} of the reply; the "
                f"context has {service.context}: shorten, shrink the pictures, or serve with "
                "--context",
                "context_length_exceeded",
            )
        turn = service.environment.protocol.settings.turn_tokens
        sampling = Sampling(
            request.most_tokens or min(room, turn),
            1.0 if request.temperature is None else request.temperature,
            stop_ids=(service.vocabulary.eos,),
            deadline=service.settings.seconds,
        )
        first = _seed(request)
        seeds = [first + number for number in range(request.n)]
        paths = [frame.path for visual in visuals for frame in visual.frames]
        job = service.complete(ids, paths, sampling, seeds, [text for text in stop if text])
        return PlainExchange(self, request, job, len(ids))

    async def _visuals(
        self, media: Sequence[Part], request: ChatRequest, owner: str
    ) -> list[Visual]:
        """Return pictures and videos at the size at which the model alone sees them."""
        if len(media) > _MOST_FRAMES:
            raise ApiError(400, f"messages: {len(media)} pictures; at most {_MOST_FRAMES}")
        rules = _picture_rules(request.mm_processor_kwargs, self.service.picture_rules)
        count = request.media_io_kwargs.get("video", {}).get("num_frames", _VIDEO_FRAMES)
        if not isinstance(count, int) or not 1 <= count <= _MOST_FRAMES:
            raise ApiError(
                400, f"media_io_kwargs: num_frames {count!r}; give a number up to {_MOST_FRAMES}"
            )

        async def visual(part: Part) -> Visual:
            if part.image_url is not None:
                return Visual((await self.files.picture(part.image_url.url, rules, owner),))
            assert part.video_url is not None
            path = await self.files.video(part.video_url.url, owner)
            pairs = await self.files.pairs(path, count, self.service.video_rules, owner)
            return Visual(pairs, video=True)

        return await asyncio.gather(*[visual(part) for part in media])


class Choice(NamedTuple):
    """One of the texts of a reply."""

    message: dict[str, Any]
    finish: str
    rest: dict[str, Any]
    """The part of the message that a stream has not told before its end."""
    logprobs: dict[str, Any] | None = None


class Exchange:
    """A request that was enqueued, and its reply. Subclasses know what its job returns.

    Args:
        chat: Who answers.
        request: The request.
        job: The work for it.

    Attributes:
        usage: The tokens of the reply, once it has ended.
    """

    usage: dict[str, Any]

    def __init__(self, chat: Chat, request: ChatRequest, job: Job):
        self.chat = chat
        self.request = request
        self.job = job
        self.begun = time.monotonic()
        self._head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": request.model,
        }

    def cancel(self) -> None:
        """Give up the work. If it has ended, nothing happens."""
        self.chat.service.owner.cancel(self.job)

    async def reply(self) -> dict[str, Any]:
        """Wait for the end, and return the whole reply.

        Raises:
            ApiError: It failed.
        """
        async for event in self.job.events():
            if isinstance(event, Result):
                choices, about = self._read(value_of(event))
                whole = [
                    {
                        "index": index,
                        "message": {"role": "assistant"} | choice.message,
                        "finish_reason": choice.finish,
                        "logprobs": choice.logprobs,
                    }
                    for index, choice in enumerate(choices)
                ]
                head = self._head | {"object": "chat.completion"}
                return head | {"choices": whole, "usage": self.usage} | about
        raise AssertionError("a job ends with its result")

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the chunks of a stream.

        Raises:
            ApiError: The answer failed.
        """
        for index in range(self.request.n):
            yield self._chunk({"role": "assistant", "content": ""}, index)
        async for event in self.job.events():
            if not isinstance(event, Result):
                yield self._event(event)
                continue
            choices, about = self._read(value_of(event))
            if about:
                yield self._chunk({}) | {"paravt": {"event": "answer"} | about["paravt"]}
            for index, choice in enumerate(choices):
                yield self._chunk(choice.rest, index, choice.finish, choice.logprobs)
            if self.request.stream_options.include_usage:
                yield self._chunk({}) | {"choices": [], "usage": self.usage}

    def _chunk(
        self, delta: dict[str, Any], index: int = 0, finish: str | None = None, logprobs: Any = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        return self._head | {"object": "chat.completion.chunk", "choices": [choice]}

    def _event(self, event: dict[str, Any]) -> dict[str, Any]:
        """Return an event of the job as a chunk."""
        raise NotImplementedError

    def _read(self, value: Any) -> tuple[list[Choice], dict[str, Any]]:
        """Return the texts of the job's value, and further fields of the reply. Sets `usage`."""
        raise NotImplementedError


class EpisodeExchange(Exchange):
    """An episode: `paravt` has its events and its record."""

    def __init__(
        self, chat: Chat, request: ChatRequest, job: Job, settings: EpisodeSettings, owner: str
    ):
        super().__init__(chat, request, job)
        self.settings = settings
        self.owner = owner
        self._thinking = 0  # the turn whose thought was told last

    def _event(self, event: dict[str, Any]) -> dict[str, Any]:
        if event["event"] == "thought":
            # Thoughts of turns are paragraphs.
            further = self._thinking not in (0, event["turn"])
            self._thinking = event["turn"]
            return self._chunk({"reasoning_content": "\n\n" * further + event["text"]})
        return self._chunk({}) | {"paravt": event}

    def _read(self, value: Episode) -> tuple[list[Choice], dict[str, Any]]:
        calls = sum(len(turn.calls) for turn in value.turns)
        about = {"turns": len(value.turns), "calls": calls}
        self.usage = _usage(*token_counts(value)) | {"paravt": about}
        thoughts = [thought_of(turn.text) for turn in value.turns]
        thought = "\n\n".join(filter(None, thoughts))
        told = {"content": value.answer or ""}
        choice = Choice(told | {"reasoning_content": thought}, _finish(value.stop), told)
        return [choice], {"paravt": self.about(value)}

    def about(self, episode: Episode) -> dict[str, Any]:
        """Return what `paravt` says of an episode, and keep its record."""
        answer = Answer(**vars(episode))
        about = {
            "episode": self.chat.keep(self.owner, answer, self.settings),
            "stop": str(episode.stop),
            "answer": episode.answer,
            "option": answer.option,
            "evidence": evidence(episode),
        }
        if self.request.paravt.trace:
            about["trace"] = self.chat.service.record(answer, self.settings)
        return about


class PlainExchange(Exchange):
    """A completion of the model alone."""

    def __init__(self, chat: Chat, request: ChatRequest, job: Job, prompt_tokens: int):
        super().__init__(chat, request, job)
        self.prompt_tokens = prompt_tokens

    def _event(self, event: dict[str, Any]) -> dict[str, Any]:
        # With tools, text is told at the end: what was a call is known then only.
        told = event["event"] == "delta" and not self.request.tools
        return self._chunk({"content": event["text"]} if told else {}, event.get("index", 0))

    def _read(self, value: Sequence[Reply]) -> tuple[list[Choice], dict[str, Any]]:
        self.usage = _usage(self.prompt_tokens, sum(reply.sampled for reply in value))
        return [self._choice(reply) for reply in value], {}

    def _choice(self, reply: Reply) -> Choice:
        """Return a text. Calls are structured if the request offers tools."""
        logprobs = self._logprobs(reply) if self.request.logprobs else None
        if not self.request.tools:
            return Choice({"content": reply.text}, _finish(reply.stop), {}, logprobs)
        message: dict[str, Any] = {"content": reply.text}
        calls = self._calls(reply.text)
        if calls:
            message = {
                "content": reply.text.partition("<tool_call>")[0].strip(),
                "tool_calls": calls,
            }
        finish = "tool_calls" if calls else _finish(reply.stop)
        return Choice(message, finish, message, logprobs)

    def _calls(self, text: str) -> list[dict[str, Any]]:
        """Return the calls in a text; none if one of them cannot be read."""
        calls = []
        for index, (_, body) in enumerate(find_calls(text)):
            try:
                name, arguments = self.chat.service.vocabulary.dialect.calls.read(body or "")
            except ValueError:
                return []
            function = {"name": name, "arguments": json.dumps(arguments or {})}
            id = f"call-{secrets.token_hex(8)}"
            calls.append({"index": index, "id": id, "type": "function", "function": function})
        return calls

    def _logprobs(self, reply: Reply) -> dict[str, Any]:
        table = self.chat.service.vocabulary.token_bytes
        content = [
            {
                "token": table(id).decode(errors="replace"),
                "bytes": list(table(id)),
                "logprob": logprob,
                "top_logprobs": [],
            }
            for id, logprob in zip(reply.ids, reply.logprobs, strict=True)
        ]
        return {"content": content}


def value_of(result: Result) -> Any:
    """Return the value of a result.

    Raises:
        ApiError: There is none.
    """
    error = result.error
    if isinstance(error, TimeoutError):
        raise ApiError(503, f"queue: {error}; try again later", code="busy", retry=5)
    if isinstance(error, VideoError):
        raise ApiError(422, f"image: it cannot be shown ({error.reason})", "unreadable")
    if error is not None:
        raise ApiError(500, f"the answer failed ({type(error).__name__}: {error})") from error
    for answer in result.value if isinstance(result.value, list) else [result.value]:
        if getattr(answer, "stop", None) in (StopReason.UNREADABLE, SampleStop.UNREADABLE):
            raise ApiError(422, "video: it can no longer be read", "unreadable")
    return result.value


def _finish(stop: StopReason | SampleStop) -> str:
    return "length" if stop in _CUT else "stop"


def _usage(read: int, written: int) -> dict[str, Any]:
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
    }


def _seed(request: ChatRequest) -> int:
    """Return the seed of a request. Without one, samples differ from request to request."""
    return secrets.randbits(31) if request.seed is None else request.seed


def _for_template(messages: Sequence[Message]) -> tuple[list[dict[str, Any]], list[Part]]:
    """Return messages as chat templates take them, and their pictures and videos in order."""
    media = []
    written = []
    for message in messages:
        content: Any = message.content
        if isinstance(content, list):
            seen = [part for part in content if part.image_url or part.video_url]
            content = [part.for_template() for part in content]
            media += seen
        fields = message.model_dump(exclude_none=True) | {"content": content}
        # Arguments are JSON in a text, and templates write them as JSON.
        for call in fields.get("tool_calls", ()):
            with contextlib.suppress(TypeError, ValueError, KeyError):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        written.append(fields)
    return written, media


def _picture_rules(asked: dict[str, Any], rules: PixelRules) -> PixelRules:
    """Return how pictures are resized for a request.

    Args:
        asked: min_pixels and max_pixels, as in transformers' processors.
        rules: Those of the server.
    """
    if asked.keys() - {"min_pixels", "max_pixels"}:
        raise ApiError(400, f"mm_processor_kwargs: {asked}; give min_pixels and max_pixels only")
    least = asked.get("min_pixels", rules.min_pixels)
    most = asked.get("max_pixels", rules.max_pixels)
    if not (isinstance(least, int) and isinstance(most, int) and 1 <= least <= most):
        raise ApiError(
            400,
            f"mm_processor_kwargs: {least!r} to {most!r} pixels; give whole numbers in order",
        )
    if most > rules.max_pixels:
        raise ApiError(
            400,
            f"mm_processor_kwargs: max_pixels {most}; this server shows at most "
            f"{rules.max_pixels} pixels, serve with --picture-pixels {most}",
        )
    return dataclasses.replace(rules, min_pixels=least, max_pixels=most)
