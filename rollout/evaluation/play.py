"""Plays the questions of a split, scores what is said, and hands out one line a question as it is done.

Failures are values. Where a video is missing or unreadable, where a question is too long, and where
a server refuses it, the question is left out with a reason and the run goes on. Invariant:
a line depends on its question, the settings and the weights, not on what else is played.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from typing import Any

from paravt_jax.data.video import VideoError
from paravt_jax.method.accuracy import accuracy, is_read
from paravt_jax.method.protocol import Protocol, subtitle_line, subtitled_text
from paravt_jax.method.records import CallStatus, Episode, Question, StopReason
from paravt_jax.method.rewards import RewardSettings, score
from paravt_jax.method.subtitles import Subtitle, read_srt
from paravt_jax.remote.judge import RemoteJudge
from rollout.agent.episode import Scene, play
from rollout.agent.transcript import transcript
from rollout.engine.requests import Sampler, as_done
from rollout.evaluate import executed_calls, seed_of
from rollout.evaluation.benchmarks import Item, VideoFolder, shuffled
from rollout.evaluation.benchmarks.scoring import said
from rollout.evaluation.folder import Line
from rollout.evaluation.settings import BenchmarkSettings


@dataclasses.dataclass(frozen=True)
class Left:
    """A question that is not played, and why: `missing` (no such file), `unreadable`, `too_long`,
    `refused` (by the server that samples)."""

    cause: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Played:
    """A question as it was asked, the episode on it, and how many of its video's subtitles stood before it (None: it has none)."""

    question: Question
    episode: Episode
    subtitles: int | None


class Player:
    """Plays items with a sampler."""

    def __init__(
        self, sampler: Sampler, scene: Scene, settings: BenchmarkSettings, videos: VideoFolder
    ):
        self._sampler, self._scene, self._settings, self._videos = sampler, scene, settings, videos
        self._setting = settings.setting()
        self._rewards = settings.rewards()
        self._judge = RemoteJudge(self._rewards.judge) if self._rewards.judge else None

    def lines(self, items: Sequence[Item]) -> Iterator[Line]:
        """One line a question, in the order in which they are done. `spent` is the time since the line before it, in seconds."""
        left = collections.Counter(item.question.video for item in items)
        clock = time.monotonic()
        for batch in as_done(self._sampler, self._agents(items), self._settings.episodes):
            for number, outcome in batch:
                item = items[number]
                line = self._line(item, outcome)
                now = time.monotonic()
                yield line | {"spent": round(now - clock, 3)}
                clock = now
                left[item.question.video] -= 1
                if not left[
                    item.question.video
                ]:  # else what is known of thousands of videos adds up
                    self._scene.features.forget(
                        self._videos.find(item.question.video) or item.question.video
                    )

    def _agents(self, items: Iterable[Item]) -> Iterator[Coroutine[Any, Any, Played | Left]]:
        return (self._play(item) for item in items)

    async def _play(self, item: Item) -> Played | Left:
        settings, features = self._settings, self._scene.features
        question, subtitles = self._asked(item)
        room = settings.question_tokens + (settings.subtitle_tokens if subtitles is not None else 0)
        length = len(self._scene.protocol.question(question).ids)
        if length > room:
            return Left("too_long", f"the question has {length} tokens, there is room for {room}")
        if not settings.blind:
            path = self._videos.find(item.question.video)
            if path is None:
                return Left("missing", f"no file {item.question.video} below --videos")
            question = dataclasses.replace(question, video=path)
            try:
                features.tokens(path)
            except VideoError as error:
                return Left("unreadable", error.reason)
        seed = seed_of(settings.seed, item.question.id, 0)
        episode = await play(self._scene, question, self._setting, seed)
        if episode.stop is StopReason.UNREADABLE:
            return Left(
                "unreadable", features.unreadable.get(question.video, "it cannot be read any more")
            )
        if episode.stop is StopReason.REFUSED:
            return Left("refused", episode.reason)
        return Played(question, episode, subtitles)

    def _asked(self, item: Item) -> tuple[Question, int | None]:
        """The question as it is put: shuffled, with subtitles; and how many lines of these."""
        item = shuffled(item, self._settings.seed) if self._settings.shuffle else item
        path = self._videos.find(item.subtitles) if item.subtitles else None
        if path is None:
            return item.question, None
        entries = fitting(
            read_srt((self._videos.root / path).read_bytes()),
            self._scene.protocol,
            self._settings.subtitle_tokens,
        )
        return dataclasses.replace(
            item.question, text=subtitled_text(entries, item.question.text)
        ), len(entries)

    def _line(self, item: Item, outcome: Played | Left) -> Line:
        about: Line = {
            "id": item.question.id,
            "video": item.question.video,
            "duration": item.duration,
            "tasks": list(item.tasks),
        }
        if isinstance(outcome, Left):
            return about | {"left_out": outcome.cause, "reason": outcome.reason}
        question, episode = outcome.question, outcome.episode
        read = said(episode.turns)
        rewards = score(question, episode.turns, RewardSettings())
        line = transcript(episode, rewards, self._setting, self._scene.protocol.vocabulary)
        return about | line | {
            "video": item.question.video,
            "file": question.video,
            "kind": str(question.kind),
            "score": self._score(question, read),
            "read": read,
            "unread": read is not None and not is_read(question, read),
            "calls": executed_calls(episode),
            "refused_reports": sum(
                outcome.status is CallStatus.REFUSED for turn in episode.turns for outcome in turn.calls
            ),
            "subtitles": outcome.subtitles,
        }  # fmt: skip

    def _score(self, question: Question, read: str | None) -> float:
        if self._judge:
            return self._judge.scores([(question, read)])[0]
        return accuracy(question, read, "exact" if self._settings.open_ended == "exact" else "f1")


def fitting(entries: Sequence[Subtitle], protocol: Protocol, tokens: int) -> list[Subtitle]:
    """As many entries as fit into so many tokens, evenly spread over all of them where they do not all fit."""
    sizes = [
        len(protocol.vocabulary.encode(protocol.plain(subtitle_line(entry)))) + 2
        for entry in entries
    ]
    count = len(entries)
    while count and sum(sizes[i] for i in _spread(len(entries), count)) > tokens - _HEAD:
        count = min(
            count - 1,
            int(count * (tokens - _HEAD) / sum(sizes[i] for i in _spread(len(entries), count))),
        )
    return [entries[i] for i in _spread(len(entries), count)]


_HEAD = 16  # tokens of the line above the subtitles


def _spread(total: int, count: int) -> list[int]:
    return [i * total // count for i in range(count)]
