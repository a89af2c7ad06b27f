"""Plays episodes for the plug-in (`model`), which runs in lmms-eval's environment.

`python -m paravt_extras.lmms_eval.serve` reads JSON lines from stdin and writes them to
stdout. People do not start it; the plug-in does.

    {"do": "start", "model": FOLDER, "settings": {...}}    -> {"ready": true}
    {"do": "play", "requests": [{"id", "name", "video", "text"}, ...]}
        -> one line per request as soon as it is done: {"id", "answer"}, or {"id", "name", "error"}
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from models.weights.folder import local_folder
from paravt_extras.lmms_eval.answers import answer_text
from paravt_extras.lmms_eval.worker import own_stdout
from paravt_jax.method.records import Question, QuestionKind
from rollout.evaluation.benchmarks import VideoFolder
from rollout.evaluation.play import LeftOut
from rollout.evaluation.players import load_player, open_reader
from rollout.evaluation.settings import BenchmarkSettings
from rollout.evaluation.split import Player

Message = dict[str, Any]

# Settings that say what is played or how it is scored, which lmms-eval decides.
_NOT_TAKEN = (
    "model",
    "benchmark",
    "data",
    "videos",
    "out",
    "name",
    "questions",
    "limit",
    "blind",
    "shuffle",
    "subtitle_tokens",
    "open_ended",
    "judge",
    "judge_model",
    "pack",
    "release",
    "lmms_eval_python",
    "hosts",
)


def settings_of(model: str, given: Message) -> BenchmarkSettings:
    """The settings of the episodes.

    Args:
        model: folder or hub id; "" with an endpoint.
        given: options of `rollout.evaluate`. Tools are separated by "+".

    Raises:
        ValueError: an option is unknown, is not for the plug-in, or has a wrong value.
    """
    fields = {
        field.name: field.default
        for field in dataclasses.fields(BenchmarkSettings)
        if field.name not in _NOT_TAKEN
    }
    taken: Message = {}
    for name, value in given.items():
        if name not in fields:
            raise ValueError(f"{name}: no option of paravt_jax; give one of {', '.join(fields)}")
        default = fields[name]
        if isinstance(default, tuple):
            value = tuple(str(value).split("+"))
        elif isinstance(default, str):
            value = str(value)
        elif isinstance(default, float):
            value = float(value)
        elif default is not None and type(value) is not type(default):
            raise ValueError(f"{name} = {value!r}: not of the kind of {default!r}, its default")
        taken[name] = value
    return BenchmarkSettings(model, **taken)


def play(player: Player, requests: Sequence[Message]) -> Iterator[Message]:
    """Play requests side by side.

    Args:
        player: the player.
        requests: the requests. A bad one gets an error, and the others are played.

    Yields:
        One reply per request, in the order in which they are done.
    """

    def questions() -> Iterator[Question | LeftOut]:
        for request in requests:
            question = Question(
                request["name"], request["video"], request["text"], QuestionKind.OPEN_ENDED, ""
            )
            if not pathlib.Path(question.video).is_file():
                yield LeftOut(question, "missing", f"no file {question.video}")
            else:
                yield player.too_long(question) or question

    remaining = collections.Counter(request["video"] for request in requests)
    for number, outcome in player.outcomes(questions()):
        request = requests[number]
        remaining[request["video"]] -= 1
        if not remaining[request["video"]]:
            player.environment.features.forget(request["video"])  # memory is bounded
        if isinstance(outcome, LeftOut):
            yield {"id": request["id"], "name": request["name"], "error": outcome.reason}
        else:
            yield {"id": request["id"], "answer": answer_text(outcome.episode.turns)}


def main() -> int:
    """Answer until stdin ends."""
    out = own_stdout()

    def reply(message: Message) -> None:
        out.write(json.dumps(message).encode() + b"\n")
        out.flush()

    first = sys.stdin.buffer.readline()
    if not first:
        return 0
    start = json.loads(first)
    with contextlib.ExitStack() as stack:
        try:
            settings = settings_of(start["model"], start["settings"])
            folder = None
            if settings.model:
                folder = local_folder(settings.model, weights=not settings.endpoint)
            reader = stack.enter_context(open_reader(settings, folder))
            player = load_player(settings, folder, VideoFolder("/"), reader, False, stack)
        except (FileNotFoundError, ValueError) as error:
            reply({"error": str(error)})
            return 2
        reply({"ready": True})
        try:
            for line in sys.stdin.buffer:
                for answer in play(player, json.loads(line)["requests"]):
                    reply(answer)
        except KeyboardInterrupt:  # Ctrl-C reaches lmms-eval and this process
            return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
