"""Plays the items of a split and yields one line per finished question.

`SplitPlayer` wraps `play_and_score`: it finds the video of each item, prepares the question (its
subtitles) and turns the outcome into a line. A question that is left out gets a line with
the reason.
"""

from __future__ import annotations

import bisect
import dataclasses
import re
import time
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from typing import Any

from paravt_jax.data.foreign import ForeignFileError, read_srt
from paravt_jax.data.frames import VideoError, join
from paravt_jax.method.accuracy import Rules, read_range
from paravt_jax.method.judge import Judge
from paravt_jax.method.parsing import BLOCKS, extract_answer, find_calls, first_think
from paravt_jax.method.protocol import Protocol
from paravt_jax.method.records import Episode, Question, QuestionKind, Subtitle, Turn
from paravt_jax.method.wording import SUBTITLED, fill
from rollout.agent.episode import Environment
from rollout.agent.transcript import transcript
from rollout.engine.requests import Sampler
from rollout.evaluation.benchmarks import Item
from rollout.evaluation.files import VideoFolder
from rollout.evaluation.folder import Line
from rollout.evaluation.play import (
    LeftOut,
    Played,
    Scoring,
    measures,
    play_and_score,
    play_question,
)
from rollout.evaluation.settings import SUBTITLE_TOKENS, BenchmarkSettings

_SUBTITLE_HEADING = 16  # tokens allowed for the line above the subtitles
_LINE_BREAK = 2  # tokens allowed for the end of a line: joined text may split differently there


# Models that were not trained on the tags also write <ANSWER> or < answer >.
_LOOSE_TAG = re.compile(rf"<\s*/?\s*(?:{'|'.join(BLOCKS)})\s*>", re.IGNORECASE)


class SplitPlayer:
    """Plays items with a sampler."""

    def __init__(
        self,
        sampler: Sampler,
        environment: Environment,
        settings: BenchmarkSettings,
        videos: VideoFolder,
        judge: Judge | None = None,
    ):
        """Prepare to play.

        Args:
            sampler: the engine.
            environment: the protocol and the frame features.
            settings: the settings of the evaluation.
            videos: the folder with videos and subtitles.
            judge: scores open-ended answers if `settings.judge` names one.
        """
        self.environment = environment
        self.sampler = sampler
        self._settings = settings
        self._videos = videos
        self._setting = settings.episode_settings()
        self._shown: dict[str, int] = {}  # numbers of subtitle lines in prompts, by question
        self._scoring = Scoring(settings.rewards(), judge or Rules(), read=final_text)

    def lines(self, items: Iterable[Item]) -> Iterator[Line]:
        """Play the items and yield one line per question, in the order in which they finish.

        A line's `spent` is the time since the previous line, in seconds.

        Args:
            items: the items. Each is taken when there is room to play it.
        """
        taken: list[Item] = []

        def agents() -> Iterator[Coroutine[Any, Any, Episode | LeftOut]]:
            for item in items:
                taken.append(item)
                yield self._play(item)

        last = time.monotonic()
        side_by_side = self._settings.episodes
        for number, outcome in play_and_score(self.sampler, agents(), self._scoring, side_by_side):
            line = self._line(taken[number], outcome)
            now = time.monotonic()
            yield line | {"spent": round(now - last, 3)}
            last = now

    async def _play(self, item: Item) -> Episode | LeftOut:
        question = await self._prepared(item)
        if isinstance(question, LeftOut):
            return question
        return await play_question(self.environment, question, self._setting, self._settings.seed)

    async def _prepared(self, item: Item) -> Question | LeftOut:
        """Return the question with subtitles in its text, and with the path of its video's file.

        Benchmarks are scored as they are published. A question of your own is left out if no answer
        can find its span, because it is outside the video.
        """
        try:
            question = self._with_subtitles(item)
        except (OSError, VideoError, ForeignFileError) as error:
            return LeftOut(item.question, "broken", f"its subtitles: {error}")
        protocol = self.environment.protocol
        system = protocol.encode(protocol.system(self._setting.dispatch != "none"))
        length = len(system) + len(protocol.question(question).ids)
        room = protocol.settings.text_tokens
        if question.id in self._shown:
            room += SUBTITLE_TOKENS
        if length > room:
            reason = f"system turn and question have {length} tokens, and there is room for {room}"
            return LeftOut(question, "too_long", reason)
        if not self._settings.k:
            return question
        path = self._videos.find(question.video)
        if path is None:
            return LeftOut(question, "missing", f"no file {question.video} below --data")
        question = dataclasses.replace(question, video=path)
        if self._settings.benchmark or question.kind is not QuestionKind.TEMPORAL_GROUNDING:
            return question
        features = self.environment.features
        try:
            await features.request_overview(path, self._settings.k)
            duration = features.info(path).duration
        except VideoError as error:
            return LeftOut(question, "unreadable", error.reason)
        start, end = read_range(question.answer) or (0.0, 0.0)
        # Players show whole seconds.
        if start < duration and end <= duration + 1:
            return question
        reason = f"its answer is {question.answer}, and its video ends at {duration:.1f} s"
        return LeftOut(question, "broken", reason)

    def _with_subtitles(self, item: Item) -> Question:
        """Return the question with as many subtitles in its text as there is room for.

        Their number is kept for the question's line. Raises an error if the file cannot be read.
        """
        question = item.question
        entries: Sequence[Subtitle] = question.subtitles
        path = self._videos.find(item.subtitles) if item.subtitles else None
        if path is not None:
            entries = read_srt(join(self._videos.root, path))
        if not entries:
            return question
        protocol = self.environment.protocol
        shown = fitting(entries, protocol, SUBTITLE_TOKENS)
        self._shown[question.id] = len(shown)
        text = subtitled_text(shown, question.text)
        return dataclasses.replace(question, subtitles=tuple(entries), text=text)

    def _line(self, item: Item, outcome: Played | LeftOut) -> Line:
        video = item.question.video
        subtitles = self._shown.pop(item.question.id, None)
        about: Line = {
            "id": item.question.id,
            "content": item.content,
            "video": video,
            "kind": str(item.question.kind),
            "duration": item.duration,
            "tasks": list(item.tasks),
        }
        if isinstance(outcome, LeftOut):
            return about | {"left_out": outcome.cause, "reason": outcome.reason}
        episode = outcome.episode
        vocabulary = self.environment.protocol.vocabulary
        line = transcript(episode, outcome.rewards, self._setting, vocabulary)
        # `video` is the benchmark's path of the video, `file` the path at which it was found.
        files = {"video": video, "file": episode.question.video, "subtitles": subtitles}
        return about | line | measures(outcome) | files


def fitting(entries: Sequence[Subtitle], protocol: Protocol, tokens: int) -> list[Subtitle]:
    """Choose the subtitles that a prompt shows.

    Args:
        entries: the subtitles of the video.
        protocol: tokenizes their lines.
        tokens: upper bound on their tokens, including the line above them.

    Returns:
        All entries if they fit; otherwise as many as fit, evenly spread over the video.
    """
    sizes = []
    for entry in entries:
        line = protocol.plain(entry.line)
        sizes.append(len(protocol.vocabulary.encode(line)) + _LINE_BREAK)
    room = max(tokens - _SUBTITLE_HEADING, 0)

    def spread(count: int) -> list[int]:
        """Return the indices of `count` entries at even distances."""
        return [i * len(entries) // count for i in range(count)]

    counts = range(len(entries) + 1)
    above = bisect.bisect(counts, room, key=lambda count: sum(sizes[i] for i in spread(count)))
    return [entries[i] for i in spread(above - 1)]


def final_text(turns: Sequence[Turn]) -> str | None:
    """Read the answer of a model that may not have learned to write answer blocks.

    Returns:
        The answer block of the last turn. Without a block, the text after the turn's thought. None
        if there is neither, if the turn was cut off or contains a call, or if the thought was never
        closed.
    """
    if not turns or turns[-1].truncated:
        return None
    text = turns[-1].text
    block = extract_answer(text)
    if block is not None:
        return block
    # The opening of a thought may belong to the prompt.
    rest = first_think(text)[1] if "<think>" in text else text.rpartition("</think>")[2]
    if rest is None or find_calls(text):
        return None
    return _LOOSE_TAG.sub("", rest).strip() or None


def subtitled_text(entries: Sequence[Subtitle], text: str) -> str:
    """Put the video's subtitles before a question's text, one line per entry with its timestamp."""
    if not entries:
        return text
    lines = "".join(f"{entry.line}\n" for entry in entries)
    return fill(SUBTITLED, subtitles=lines, question=text)
