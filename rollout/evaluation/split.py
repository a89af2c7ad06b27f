"""Plays the items of a split and hands out one line per question as it is done.

Around `play_and_score` it finds each item's video, puts the question (options shuffled, subtitles
before it) and writes the outcome down. Questions that are left out have a line with the reason.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Iterator, Sequence

from paravt_jax.method.judge import Judge
from paravt_jax.method.protocol import Protocol, subtitle_line, subtitled_text
from paravt_jax.method.records import Question
from paravt_jax.method.subtitles import Subtitle, read_srt
from rollout.agent.episode import Environment
from rollout.agent.transcript import transcript
from rollout.engine.requests import Sampler
from rollout.evaluation.benchmarks import Item, VideoFolder, shuffled
from rollout.evaluation.folder import Line
from rollout.evaluation.play import LeftOut, Played, Scoring, measures, play_and_score
from rollout.evaluation.settings import BenchmarkSettings


class Player:
    """Plays items with a sampler."""

    def __init__(
        self,
        sampler: Sampler,
        environment: Environment,
        settings: BenchmarkSettings,
        videos: VideoFolder,
        judge: Judge | None = None,
    ):
        self._sampler = sampler
        self._environment = environment
        self._settings = settings
        self._videos = videos
        self._setting = settings.episode_settings()
        self._scoring = Scoring(settings.rewards(), judge, blocks_only=False)

    def lines(self, items: Sequence[Item]) -> Iterator[Line]:
        """One line per question, in the order in which they are done.

        `spent` is the time since the line before it, in seconds.
        """
        left = collections.Counter(item.question.video for item in items)
        subtitles: dict[int, int | None] = {}  # lines of them before a question, by its number

        def questions() -> Iterator[Question | LeftOut]:
            for number, item in enumerate(items):
                question, subtitles[number] = self._put(item)
                yield self._found(question, subtitles[number] is not None)

        clock = time.monotonic()
        for number, outcome in play_and_score(
            self._sampler,
            self._environment,
            questions(),
            self._setting,
            self._scoring,
            self._settings.seed,
            side_by_side=self._settings.episodes,
        ):
            item = items[number]
            line = self._line(item, outcome, subtitles.pop(number))
            now = time.monotonic()
            yield line | {"spent": round(now - clock, 3)}
            clock = now
            video = item.question.video
            left[video] -= 1
            if not left[video]:  # else what is known of thousands of videos adds up
                self._environment.features.forget(self._videos.find(video) or video)

    def _put(self, item: Item) -> tuple[Question, int | None]:
        """The question as asked, and how many subtitle lines its prompt shows.

        The number is None where the video has no subtitles.
        """
        item = shuffled(item, self._settings.seed) if self._settings.shuffle else item
        entries: Sequence[Subtitle] = item.question.subtitles
        path = self._videos.find(item.subtitles) if item.subtitles else None
        if path is not None:
            entries = read_srt((self._videos.root / path).read_bytes())
        elif not entries:
            return item.question, None
        shown = fitting(entries, self._environment.protocol, self._settings.subtitle_tokens)
        text = subtitled_text(shown, item.question.text)
        question = dataclasses.replace(item.question, text=text, subtitles=tuple(entries))
        return question, len(shown)

    def _found(self, question: Question, subtitled: bool) -> Question | LeftOut:
        """`question` with the path of its video's file, or the reason why it cannot be asked."""
        settings = self._settings
        room = settings.question_tokens + (settings.subtitle_tokens if subtitled else 0)
        length = len(self._environment.protocol.question(question).ids)
        if length > room:
            reason = f"the question has {length} tokens, there is room for {room}"
            return LeftOut(question, "too_long", reason)
        if settings.blind:
            return question
        path = self._videos.find(question.video)
        if path is None:
            return LeftOut(question, "missing", f"no file {question.video} below --videos")
        return dataclasses.replace(question, video=path)

    def _line(self, item: Item, outcome: Played | LeftOut, subtitles: int | None) -> Line:
        video = item.question.video
        about: Line = {
            "id": item.question.id,
            "video": video,
            "duration": item.duration,
            "tasks": list(item.tasks),
        }
        if isinstance(outcome, LeftOut):
            return about | {"left_out": outcome.cause, "reason": outcome.reason}
        episode, vocabulary = outcome.episode, self._environment.protocol.vocabulary
        line = transcript(episode, outcome.rewards, self._setting, vocabulary)
        more = {"video": video, "file": episode.question.video, "subtitles": subtitles}
        return about | line | measures(outcome) | more


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
