"""The bodies of chat completions: what a client may ask, in the words of OpenAI's API.

What an episode needs and OpenAI's API has no field for is in the field `paravt` (docs/serving.md).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import reprlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import pydantic

from paravt_jax.data.frames import PixelRules
from rollout.agent.episode import Dispatch
from rollout.serve.errors import ApiError

_MOST_REPLIES = 16
_MOST_MESSAGES = 4096
_MOST_FRAMES = 768
_MOST_STOPS = 16


def _without_nulls(values: Any) -> Any:
    """Leave out fields that are null: clients send those that are not set."""
    if isinstance(values, dict):
        return {name: value for name, value in values.items() if value is not None}
    return values


class Body(pydantic.BaseModel):
    """A part of a body, whose nulls are like fields that are left out."""

    _set_fields = pydantic.model_validator(mode="before")(_without_nulls)


class Url(Body):
    """Where a picture or a video is."""

    url: str


class Part(Body):
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
        if self.type == "text":
            return {"type": "text", "text": self.text}
        return {"type": self.type.removesuffix("_url")}


class Message(Body):
    """A message of a conversation."""

    model_config = pydantic.ConfigDict(extra="allow")  # the template may know more fields
    role: Literal["system", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], pydantic.Field(max_length=_MOST_MESSAGES)] = ""
    tool_calls: list[Any] = []

    def parts(self) -> list[Part]:
        """Return the content as parts."""
        if isinstance(self.content, str):
            return [Part(type="text", text=self.content)]
        return self.content


class EpisodeOptions(Body):
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


class StreamOptions(Body):
    """What a stream has besides the text."""

    include_usage: bool = False


class VideoIo(Body):
    """How many frames of a native video are shown, as vLLM names it."""

    model_config = pydantic.ConfigDict(extra="forbid")
    num_frames: int = pydantic.Field(default=32, ge=1, le=_MOST_FRAMES)


class MediaIo(Body):
    """How native videos are read."""

    model_config = pydantic.ConfigDict(extra="forbid")
    video: VideoIo = VideoIo()


class ChatRequest(Body):
    """The body of a request. Other fields are ignored, as OpenAI's clients expect."""

    model: str
    messages: list[Message] = pydantic.Field(min_length=1, max_length=_MOST_MESSAGES)
    temperature: float | None = pydantic.Field(None, ge=0, le=2)
    seed: int | None = None
    most_tokens: int | None = pydantic.Field(
        None, ge=1, validation_alias=pydantic.AliasChoices("max_completion_tokens", "max_tokens")
    )
    n: int = pydantic.Field(1, ge=1, le=_MOST_REPLIES)
    stop: Annotated[list[str], pydantic.Field(max_length=_MOST_STOPS)] | str | None = None
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
    mm_processor_kwargs: dict[str, int] = {}
    media_io_kwargs: MediaIo = MediaIo()
    paravt: EpisodeOptions = EpisodeOptions()

    def require_usual(self, fields: Sequence[str], remedy: str) -> None:
        """Refuse fields that are not what they are if nobody sets them."""
        for field in fields:
            value = getattr(self, field)
            if value not in (type(self).model_fields[field].default, []):
                raise ApiError(400, f"{field}: {value!r} is not supported; {remedy}")


def refusal(error: pydantic.ValidationError) -> ApiError:
    """Return the refusal of values that are not as they should be. It names one of them."""
    # Where a text or parts may stand, the error within a part says more than "no text".
    wrong = max(error.errors(), key=lambda each: len(each["loc"]))
    field = ".".join(str(each) for each in wrong["loc"] if "[" not in str(each)) or "body"
    return ApiError(400, f"{field}: {reprlib.repr(wrong['input'])}; {wrong['msg']}")


def for_template(messages: Sequence[Message]) -> tuple[list[dict[str, Any]], list[Part]]:
    """Return messages as chat templates take them, and their pictures and videos in order."""
    media = []
    written = []
    for message in messages:
        content: Any = message.content
        if isinstance(content, list):
            media += [part for part in content if part.type != "text"]
            content = [part.for_template() for part in content]
        fields = message.model_dump(exclude_unset=True) | {"content": content}
        # Arguments are JSON in a text, and templates write them as JSON.
        for call in fields.get("tool_calls", ()):
            with contextlib.suppress(TypeError, ValueError, KeyError):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        written.append(fields)
    if len(media) > _MOST_FRAMES:
        raise ApiError(400, f"messages: {len(media)} pictures; at most {_MOST_FRAMES}")
    return written, media


def picture_rules(asked: dict[str, int], rules: PixelRules) -> PixelRules:
    """Return how pictures are resized for a request.

    Args:
        asked: min_pixels and max_pixels, as in transformers' processors.
        rules: Those of the server.
    """
    if asked.keys() - {"min_pixels", "max_pixels"}:
        raise ApiError(400, f"mm_processor_kwargs: {asked}; give min_pixels and max_pixels only")
    least = asked.get("min_pixels", rules.min_pixels)
    most = asked.get("max_pixels", rules.max_pixels)
    if not 1 <= least <= most <= rules.max_pixels:
        message = f"mm_processor_kwargs: {least} to {most} pixels; give them in order, at most"
        raise ApiError(400, f"{message} {rules.max_pixels} (--picture-pixels)")
    return dataclasses.replace(rules, min_pixels=least, max_pixels=most)
