"""The model `paravt_jax` of lmms-eval: episodes of this project's agent, in lmms-eval's harness.

Runs in lmms-eval's environment and imports only the standard library and lmms_eval. The episodes
are played by `serve`, in a subprocess under the interpreter of this project's environment.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

from lmms_eval.api.model import lmms  # pyright: ignore[reportMissingImports]

from paravt_extras.lmms_eval.pipe import Message, Pipe, PipeError

_log = logging.getLogger("paravt_jax")

# Characters of requests per message. Prompts with subtitles may have 100,000.
_CHARACTERS = 8_000_000
# Arguments that the harness adds by itself and that have no meaning here.
_OF_THE_HARNESS = ("device", "max_batch_size")


class ParaVT(lmms):
    """An agent that answers by episodes: it looks at crops of the video before it answers."""

    is_simple = False  # the harness hands over chat messages

    def __init__(
        self, python: str = "", pretrained: str = "", batch_size: Any = None, **settings: Any
    ):
        """Start the engine.

        Args:
            python: path of the interpreter in whose environment paravt-jax is installed.
            pretrained: folder or hub id of the model. It may be left out with an endpoint.
            batch_size: `--batch_size`; above 1, the number of concurrent episodes.
            settings: options of `python -m rollout.evaluate` with "_" for "-", such as frames.

        Raises:
            ValueError: an argument is missing or wrong, or the engine cannot start.
        """
        super().__init__()
        if not python or not (pretrained or settings.get("endpoint")):
            raise ValueError(
                "--model_args: python and pretrained are needed; give "
                "python=PATH (an interpreter with paravt-jax) and pretrained=FOLDER"
            )
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError(
                "paravt_jax: started in several processes; start one, and give tensor=N in "
                "--model_args to use N devices"
            )
        for name in _OF_THE_HARNESS:
            settings.pop(name, None)
        if str(batch_size).isdigit() and int(batch_size) > 1:
            settings.setdefault("episodes", int(batch_size))
        self._python = python
        command = [python, "-m", "paravt_extras.lmms_eval.serve"]
        try:
            self._pipe = Pipe(command, os.environ, forward=True)
            self._pipe.send({"do": "start", "model": pretrained, "settings": settings})
            reply = self._pipe.receive()
        except PipeError as error:
            raise ValueError(f"--model_args python={python}: {error}") from error
        if "error" in reply:
            self._pipe.close()
            raise ValueError(f"--model_args: {reply['error']}")

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Answer requests, several at once.

        Returns:
            One text per request, in order, as the model wrote it. A request that cannot be
            answered gets "", and its reason is logged.

        Raises:
            SystemExit: the engine has ended. The harness would print a traceback of other errors,
                and end as if all were well.
        """
        answers = [""] * len(requests)
        answered = 0
        try:
            for reply in self._replies(list(self._readable(requests))):
                if "error" in reply:
                    _log.warning("%s: no answer, %s", reply["name"], reply["error"])
                else:
                    answered += 1
                    answers[reply["id"]] = reply["answer"]
        except PipeError as error:
            self._pipe.close()
            raise SystemExit(
                f"paravt_jax, {answered} of {len(requests)} requests answered: the engine stopped, "
                f"{error}; see its log above"
            ) from None
        for request, answer in zip(requests, answers, strict=True):
            context, _, settings = request.args[:3]
            self.cache_hook.add_partial("generate_until", (context, settings), answer)
        if answered < len(requests):
            failed = len(requests) - answered
            _log.warning("%d of %d requests have no answer", failed, len(requests))
        return answers

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        raise NotImplementedError("paravt_jax: tasks that compare likelihoods are not supported")

    def generate_until_multi_round(self, requests: Sequence[Any]) -> list[str]:
        raise NotImplementedError("paravt_jax: tasks of several rounds are not supported")

    def clean(self) -> None:
        """End the engine; the harness calls this after the last request."""
        self._pipe.close()
        super().clean()

    def _replies(self, requests: Sequence[Message]) -> Iterator[Message]:
        """One reply per request, in the order in which they are done."""
        for chunk in _chunks(requests):
            self._pipe.send({"do": "play", "requests": chunk})
            for _ in chunk:
                yield self._pipe.receive()

    def _readable(self, requests: Sequence[Any]) -> Iterator[Message]:
        """The requests as `serve` takes them. One that cannot be read is logged and left out."""
        for number, request in enumerate(requests):
            _, doc_to_messages, _, doc_id, task, split = request.args
            name = f"{task}/{doc_id}"
            try:
                messages = doc_to_messages(self.task_dict[task][split][doc_id])
                video, text = _parts(messages)
            except (Exception, SystemExit) as error:  # tasks call sys.exit for missing videos
                _log.warning("%s: no answer, %s: %s", name, type(error).__name__, error)
                continue
            yield {"id": number, "name": name, "video": video, "text": text}


def _parts(messages: Sequence[Message]) -> tuple[str, str]:
    """The path of the video and the text of a request. Raises ValueError for other requests."""
    if [message["role"] for message in messages] != ["user"]:
        raise ValueError("not one message of a user")
    videos: list[str] = []
    texts: list[str] = []
    for part in messages[0]["content"]:
        if part["type"] == "text":
            texts.append(part["text"])
        elif part["type"] == "video" and isinstance(part["url"], str):
            if part.get("start_time") is not None or part.get("end_time") is not None:
                raise ValueError("a part of a video; only whole videos can be shown")
            videos.append(os.path.abspath(part["url"]))
        else:
            raise ValueError(f"a part of type {part['type']}, which is no path of a video")
    if len(videos) != 1:
        raise ValueError(f"{len(videos)} videos; one can be shown")
    return videos[0], "\n".join(texts)


def _chunks(requests: Sequence[Message]) -> Iterator[list[Message]]:
    """Requests in lists with a bounded number of characters."""
    chunk: list[Message] = []
    size = 0
    for request in requests:
        if chunk and size + len(request["text"]) > _CHARACTERS:
            yield chunk
            chunk, size = [], 0
        chunk.append(request)
        size += len(request["text"])
    if chunk:
        yield chunk
