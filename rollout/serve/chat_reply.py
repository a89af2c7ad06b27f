"""Replies to chat completions, whole and as streams, in the words of OpenAI's API.

What an episode has and OpenAI's API has no field for is in the field `paravt` (docs/serving.md).
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

from paravt_jax.data.frames import VideoError
from paravt_jax.method.parsing import find_calls
from paravt_jax.method.records import CropCall, Episode, StopReason
from rollout.agent.episode import EpisodeSettings
from rollout.ask import Answer
from rollout.engine.requests import SampleStop
from rollout.serve.chat_request import ChatRequest
from rollout.serve.errors import ApiError
from rollout.serve.files import KEPT
from rollout.serve.owner import Event, Job, Result
from rollout.serve.service import Reply, Service, thought_of

_MOST_EPISODES = 256
# Why an episode or a reply ended before it was whole.
_CUT = {
    *(StopReason.TRUNCATED, StopReason.TOKEN_LIMIT, StopReason.TURN_LIMIT, StopReason.TIME_LIMIT),
    *(SampleStop.LENGTH, SampleStop.DEADLINE),
}


class KeptEpisode(NamedTuple):
    """An episode that its client may look at again."""

    client: str
    answer: Answer
    settings: EpisodeSettings
    ended: float
    """When it ended, in seconds since the epoch."""


class KeptEpisodes:
    """The newest episodes of every client."""

    def __init__(self):
        self._episodes: dict[str, KeptEpisode] = {}

    def keep(self, client: str, settings: EpisodeSettings, answer: Answer) -> str:
        """Keep an episode for a while, and return its id."""
        id = f"ep-{secrets.token_hex(12)}"
        self._episodes[id] = KeptEpisode(client, answer, settings, time.time())
        theirs = [id for id, kept in self._episodes.items() if kept.client == client]
        for old in theirs[:-_MOST_EPISODES]:
            del self._episodes[old]
        return id

    def find(self, id: str, client: str) -> KeptEpisode:
        """Return an episode of this client.

        Raises:
            ApiError: It is unknown or no longer kept.
        """
        kept = self._episodes.get(id)
        if kept is None or kept.client != client or kept.ended < time.time() - KEPT:
            raise ApiError(404, f"episode: {id!r} is unknown or no longer kept; ask again")
        return kept


class Choice(NamedTuple):
    """One of the texts of a reply."""

    message: dict[str, Any]
    finish: str
    rest: dict[str, Any]
    """The part of the message that a stream has not told before its end."""
    logprobs: dict[str, Any] | None = None


class Read(NamedTuple):
    """The value of a job, as a client reads it."""

    choices: list[Choice]
    usage: dict[str, Any]
    paravt: dict[str, Any]
    """The field of this name; empty: there is none."""


@dataclasses.dataclass
class Exchange:
    """A request that was enqueued, and its reply. Subclasses know what its job returns.

    Args:
        service: The model that answers.
        request: The request.
        job: The work for it.
    """

    service: Service
    request: ChatRequest
    job: Job

    def __post_init__(self):
        self._head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": self.request.model,
        }

    def cancel(self) -> None:
        """Give up the work. If it has ended, nothing happens."""
        self.service.owner.cancel(self.job)

    async def reply(self) -> dict[str, Any]:
        """Wait for the end, and return the whole reply.

        Raises:
            ApiError: It failed.
        """
        read = self._read(value_of([event async for event in self.job.events()][-1]))
        choices = [
            {
                "index": index,
                "message": {"role": "assistant"} | choice.message,
                "finish_reason": choice.finish,
                "logprobs": choice.logprobs,
            }
            for index, choice in enumerate(read.choices)
        ]
        reply = {"object": "chat.completion", "choices": choices, "usage": read.usage}
        return self._head | reply | ({"paravt": read.paravt} if read.paravt else {})

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
            read = self._read(value_of(event))
            if read.paravt:
                yield self._chunk({}) | {"paravt": {"event": "answer"} | read.paravt}
            for index, choice in enumerate(read.choices):
                yield self._chunk(choice.rest, index, choice.finish, choice.logprobs)
            if self.request.stream_options.include_usage:
                yield self._chunk({}) | {"choices": [], "usage": read.usage}

    def _chunk(
        self, delta: dict[str, Any], index: int = 0, finish: str | None = None, logprobs: Any = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        return self._head | {"object": "chat.completion.chunk", "choices": [choice]}

    def _event(self, event: dict[str, Any]) -> dict[str, Any]:
        """Return an event of the job as a chunk."""
        raise NotImplementedError

    def _read(self, value: Any) -> Read:
        """Read the job's value."""
        raise NotImplementedError


@dataclasses.dataclass
class EpisodeExchange(Exchange):
    """An episode: `paravt` has its events and its record.

    Args:
        service: The model that answers.
        request: The request.
        job: The work for it.
        settings: Those of the episode.
        episodes: Where the episode is kept.
        client: Who may look at it.
    """

    settings: EpisodeSettings
    episodes: KeptEpisodes
    client: str
    thinking: int = 0  # the turn whose thought was told last

    def _event(self, event: dict[str, Any]) -> dict[str, Any]:
        if event["event"] == "thought":
            # Thoughts of turns are paragraphs.
            further = self.thinking not in (0, event["turn"])
            self.thinking = event["turn"]
            return self._chunk({"reasoning_content": "\n\n" * further + event["text"]})
        return self._chunk({}) | {"paravt": event}

    def _read(self, value: Episode) -> Read:
        calls = sum(len(turn.calls) for turn in value.turns)
        counts = {"turns": len(value.turns), "calls": calls}
        usage = _usage(*_token_counts(value)) | {"paravt": counts}
        thoughts = [thought_of(turn.text) for turn in value.turns]
        thought = "\n\n".join(filter(None, thoughts))
        told = {"content": value.answer or ""}
        choice = Choice(told | {"reasoning_content": thought}, _finish(value.stop), told)
        answer = Answer(**vars(value))
        return Read([choice], usage, self.paravt(answer, self.keep(answer)))

    def keep(self, answer: Answer) -> str:
        """Keep the episode for its client, and return its id."""
        return self.episodes.keep(self.client, self.settings, answer)

    def paravt(self, answer: Answer, id: str) -> dict[str, Any]:
        """Return what the field `paravt` says of an episode that has an id."""
        said = {
            "episode": id,
            "stop": str(answer.stop),
            "answer": answer.answer,
            "option": answer.option,
            "evidence": _evidence(answer),
        }
        if self.request.paravt.trace:
            said["trace"] = self.service.record(answer, self.settings)
        return said


@dataclasses.dataclass
class PlainExchange(Exchange):
    """A completion of the model alone."""

    prompt_tokens: int

    def _event(self, event: dict[str, Any]) -> dict[str, Any]:
        # With tools, text is told at the end: what was a call is known then only.
        told = event["event"] == "delta" and not self.request.tools
        return self._chunk({"content": event["text"]} if told else {}, event.get("index", 0))

    def _read(self, value: Sequence[Reply]) -> Read:
        usage = _usage(self.prompt_tokens, sum(reply.sampled for reply in value))
        return Read([self._choice(reply) for reply in value], usage, {})

    def _choice(self, reply: Reply) -> Choice:
        """Return a text. Calls are structured if the request offers tools."""
        calls = self._calls(reply.text) if self.request.tools else []
        message: dict[str, Any] = {"content": reply.text}
        if calls:
            text = reply.text.partition("<tool_call>")[0].strip()
            message = {"content": text, "tool_calls": calls}
        finish = "tool_calls" if calls else _finish(reply.stop)
        logprobs = self._logprobs(reply) if self.request.logprobs else None
        return Choice(message, finish, message if self.request.tools else {}, logprobs)

    def _calls(self, text: str) -> list[dict[str, Any]]:
        """Return the calls in a text; none if one of them cannot be read."""
        calls = []
        for index, (_, body) in enumerate(find_calls(text)):
            try:
                name, arguments = self.service.vocabulary.dialect.calls.read(body or "")
            except ValueError:
                return []
            function = {"name": name, "arguments": json.dumps(arguments or {})}
            id = f"call-{secrets.token_hex(8)}"
            calls.append({"index": index, "id": id, "type": "function", "function": function})
        return calls

    def _logprobs(self, reply: Reply) -> dict[str, Any]:
        table = self.service.vocabulary.token_bytes
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


def value_of(result: Event) -> Any:
    """Return the value of a result, the last event of a job.

    Raises:
        ApiError: There is none.
    """
    assert isinstance(result, Result)
    error = result.error
    if isinstance(error, ApiError):
        raise error
    if isinstance(error, VideoError):
        raise ApiError(422, f"file: it can no longer be read ({error.reason})", "unreadable")
    if error is not None:
        raise ApiError(500, f"the answer failed ({type(error).__name__}: {error})") from error
    for answer in result.value if isinstance(result.value, list) else [result.value]:
        if getattr(answer, "stop", None) in (StopReason.UNREADABLE, SampleStop.UNREADABLE):
            raise ApiError(422, "video: it cannot be read; convert it", "unreadable")
    return result.value


def _token_counts(episode: Episode) -> tuple[int, int]:
    """Return the tokens that all agents of an episode read, and those that they wrote."""
    calls = [outcome.subagent for turn in episode.turns for outcome in turn.calls]
    trajectories = [episode.trajectory, *filter(None, calls)]
    written = sum(
        len(segment.ids)
        for trajectory in trajectories
        for segment in trajectory.segments
        if segment.logprobs is not None
    )
    return sum(len(trajectory.ids) for trajectory in trajectories) - written, written


def _evidence(episode: Episode) -> list[dict[str, Any]]:
    """Return what the answer rests on: the windows that were looked at, and their reports."""
    return [
        {"start": outcome.call.start, "end": outcome.call.end, "report": outcome.response.strip()}
        for turn in episode.turns
        for outcome in turn.calls
        if outcome.subagent is not None and isinstance(outcome.call, CropCall)
    ]


def _finish(stop: StopReason | SampleStop) -> str:
    return "length" if stop in _CUT else "stop"


def _usage(read: int, written: int) -> dict[str, Any]:
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
