"""Begins what chat completions ask for: an episode, or a completion of the model alone."""

from __future__ import annotations

import asyncio
import pathlib
import re
import secrets
from collections.abc import Sequence

from rollout.agent.episode import EpisodeSettings
from rollout.ask import question_about
from rollout.engine.requests import Sampling
from rollout.serve.chat_reply import EpisodeExchange, Exchange, KeptEpisodes, PlainExchange
from rollout.serve.chat_request import ChatRequest, Message, Part, for_template, picture_rules
from rollout.serve.errors import ApiError
from rollout.serve.files import Files
from rollout.serve.service import Service, Visual

PLAIN = "/plain"
"""Ends the name of the model alone."""

# Settings that would change a sample, and are not supported.
_UNSUPPORTED = (
    *("top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("logit_bias", "tool_choice", "response_format", "top_logprobs"),
)
_PICTURES = ("mm_processor_kwargs", "media_io_kwargs")
# Settings of a reply that an episode does not have.
_NOT_OF_EPISODES = ("n", "stop", "logprobs", "tools", "top_p", *_PICTURES, *_UNSUPPORTED)


class Chat:
    """Answers chat completions.

    Args:
        service: The model.
        files: Videos and pictures of clients.
        name: The name of the model.
    """

    def __init__(self, service: Service, files: Files, name: str):
        self.service = service
        self.files = files
        self.name = name
        self.episodes = KeptEpisodes()

    async def begin(self, request: ChatRequest, client: str) -> Exchange:
        """Enqueue what a request asks for. Cancel the exchange in any case.

        Raises:
            ApiError: The request is refused.
        """
        if request.model == self.name:
            return await self._begin_episode(request, client)
        if request.model == self.name + PLAIN:
            return await self._begin_completion(request, client)
        known = f"{self.name} (episodes) or {self.name}{PLAIN} (the model alone)"
        raise ApiError(404, f"model: {request.model!r}; give {known}", "model_not_found")

    async def _begin_episode(self, request: ChatRequest, client: str) -> EpisodeExchange:
        request.require_usual(_NOT_OF_EPISODES, f"leave it out, or ask {self.name}{PLAIN}")
        if any(message.role in ("system", "tool") for message in request.messages):
            remedy = f"leave out those of system and tool, or ask {self.name}{PLAIN}"
            raise ApiError(400, f"messages: an episode has its own system turn and tools; {remedy}")
        last = request.messages[-1]
        if last.role != "user":
            raise ApiError(400, f"messages: the last is of {last.role}; end with the question")
        text = "\n".join(part.text for part in last.parts() if part.type == "text")
        path = await self._video(request.messages, client)
        options = request.paravt
        most_frames = self.service.settings.frames
        frames = most_frames if options.frames is None else options.frames
        if frames > most_frames:
            raise ApiError(400, f"paravt.frames: {frames}; at most {most_frames}")
        try:
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
        return EpisodeExchange(self.service, request, job, settings, self.episodes, client)

    async def _video(self, messages: Sequence[Message], client: str) -> pathlib.Path:
        """Return the video of the last message that has one, or one that its pictures make up."""
        for message in reversed(messages):
            parts = message.parts()
            videos = [part.video_url.url for part in parts if part.video_url]
            pictures = [part.image_url.url for part in parts if part.image_url]
            if len(videos) > 1 or (videos and pictures):
                raise ApiError(400, "messages: give one video, or pictures, in a message")
            if videos:
                return await self.files.video(videos[0], client)
            most = self.service.settings.frames
            if len(pictures) > most:
                raise ApiError(400, f"messages: {len(pictures)} pictures; at most {most}")
            if pictures:
                return await self.files.film(pictures, self.service.features.picture_rules)
        raise ApiError(400, "messages: no video; give a part video_url, or pictures")

    async def _begin_completion(self, request: ChatRequest, client: str) -> PlainExchange:
        service = self.service
        # Greedy samples do not depend on it.
        top_p = () if request.temperature == 0 else ("top_p",)
        request.require_usual((*_UNSUPPORTED, *top_p), "leave it out")
        stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
        messages, media = for_template(request.messages)
        visuals = await self._visuals(media, request, client)
        text = await asyncio.to_thread(service.render, messages, request.tools)
        ids = await asyncio.to_thread(service.prompt, text, visuals)
        room = service.context - len(ids)
        least = request.most_tokens or 1
        if room < least:
            message = f"messages: {len(ids)} tokens and {least} of the reply; --context is"
            remedy = f"{service.context}: shorten, or shrink the pictures"
            raise ApiError(400, f"{message} {remedy}", "context_length_exceeded")
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
        return PlainExchange(service, request, job, len(ids))

    async def _visuals(
        self, media: Sequence[Part], request: ChatRequest, client: str
    ) -> list[Visual]:
        """Return pictures and videos at the size at which the model alone sees them."""
        rules = picture_rules(request.mm_processor_kwargs, self.service.features.picture_rules)
        count = request.media_io_kwargs.video.num_frames

        async def visual(part: Part) -> Visual:
            if part.image_url is not None:
                return Visual((await self.files.picture(part.image_url.url, rules),))
            assert part.video_url is not None
            path = await self.files.video(part.video_url.url, client)
            pairs = await self.files.pairs(path, count, self.service.video_rules)
            return Visual(pairs, video=True)

        return await asyncio.gather(*[visual(part) for part in media])


def _seed(request: ChatRequest) -> int:
    """Return the seed of a request. Without one, samples differ from request to request."""
    return secrets.randbits(31) if request.seed is None else request.seed
