"""Plays the items of a split and yields one line per finished question.

`Player` wraps `play_and_score`: it finds the video of each item, prepares the question (its
subtitles) and turns the outcome into a line. A question that is left out gets a line with
the reason.
"""

from __future__ import annotations

import collections
import dataclasses
import re
import time
from collections.abc import Iterable, Iterator, Sequence

from paravt_jax.data.foreign import ForeignFileError, read_srt
from paravt_jax.data.frames import VideoError, join
from paravt_jax.data.published import Refused, require_in_video
from paravt_jax.method.judge import Judge
from paravt_jax.method.parsing import BLOCKS, extract_answer, find_calls, first_think
from paravt_jax.method.protocol import Protocol, subtitled_text
from paravt_jax.method.records import Question, QuestionKind, Subtitle, Turn
from rollout.agent.episode import Environment
from rollout.agent.transcript import transcript
from rollout.engine.requests import Sampler
from rollout.evaluation.benchmarks import BrokenRow, Item, VideoFolder
from rollout.evaluation.folder import Line
from rollout.evaluation.play import LeftOut, Played, Scoring, episodes, measures, play_and_score
from rollout.evaluation.settings import BenchmarkSettings

_SUBTITLE_HEADING = 16  # tokens allowed for the line above the subtitles
_LINE_BREAK = 2  # tokens allowed for the end of a line: joined text may split differently there


# Models that were not trained on the tags also write <ANSWER> or < answer >.
_LOOSE_TAG = re.compile(rf"<\s*/?\s*(?:{'|'.join(BLOCKS)})\s*>", re.IGNORECASE)


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
        """Prepare to play.

        Args:
            sampler: the engine or an endpoint.
            environment: the protocol and the frame features.
            settings: the settings of the evaluation.
            videos: the folder with videos and subtitles.
            judge: scores open-ended answers if `settings.open_ended` is "judge".
        """
        self.environment = environment
        self._sampler = sampler
        self._settings = settings
        self._videos = videos
        self._setting = settings.episode_settings()
        self._scoring = Scoring(settings.rewards(), judge, read=final_text)

    def lines(self, items: Iterable[Item]) -> Iterator[Line]:
        """Play the items and yield one line per question, in the order in which they finish.

        A line's `spent` is the time since the previous line, in seconds.

        Args:
            items: the items. Each is taken when there is room to play it. Those on one video should
                follow each other: its frames are forgotten when the next video begins.
        """
        taken: dict[int, tuple[Item, int | None]] = {}  # with the number of shown subtitle lines
        open_questions: collections.Counter[str] = collections.Counter()  # by video
        video = ""

        def questions() -> Iterator[Question | LeftOut]:
            nonlocal video
            for number, item in enumerate(items):
                video = item.question.video
                open_questions[video] += 1
                taken[number] = (item, None)
                try:
                    question, shown = self._prepared(item)
                except BrokenRow as error:
                    yield LeftOut(item.question, "broken", str(error))
                    continue
                taken[number] = (item, shown)
                yield self._with_file(question, shown is not None)
            video = ""

        agents = episodes(self.environment, questions(), self._setting, self._settings.seed)
        last = time.monotonic()
        side_by_side = self._settings.episodes
        for number, outcome in play_and_score(self._sampler, agents, self._scoring, side_by_side):
            item, shown = taken.pop(number)
            line = self._line(item, outcome, shown)
            now = time.monotonic()
            yield line | {"spent": round(now - last, 3)}
            last = now
            open_questions[item.question.video] -= 1
            # A split has thousands of videos: keeping them all would fill the memory.
            for name in [name for name, count in open_questions.items() if not count]:
                if name != video:
                    del open_questions[name]
                    self.environment.features.forget(self._videos.find(name) or name)

    def _prepared(self, item: Item) -> tuple[Question, int | None]:
        """The question as it is asked, and the number of subtitle lines that its prompt shows.

        The number is None if the video has no subtitles.
        """
        entries: Sequence[Subtitle] = item.question.subtitles
        path = self._videos.find(item.subtitles) if item.subtitles else None
        if path is not None:
            entries = self._read_subtitles(path)
        subtitled = path is not None or bool(entries)
        protocol = self.environment.protocol
        shown = fitting(entries, protocol, self._settings.subtitle_tokens) if subtitled else []
        text = subtitled_text(shown, item.question.text, protocol.wording)
        question = dataclasses.replace(item.question, subtitles=tuple(entries), text=text)
        return question, len(shown) if subtitled else None

    def _read_subtitles(self, path: str) -> list[Subtitle]:
        try:
            return read_srt(join(self._videos.root, path))
        except (OSError, VideoError, ForeignFileError) as error:
            raise BrokenRow(f"its subtitles: {error}") from error

    def _too_long(self, question: Question, subtitled: bool) -> LeftOut | None:
        """Why a question is left out, if it has more tokens than there is room for."""
        protocol = self.environment.protocol
        room = protocol.settings.text_tokens
        if subtitled:
            room += self._settings.subtitle_tokens
        system = protocol.system(self._setting.dispatch != "none")
        length = len(protocol.encode(system)) + len(protocol.question(question).ids)
        if length <= room:
            return None
        reason = f"system turn and question have {length} tokens, and there is room for {room}"
        return LeftOut(question, "too_long", reason)

    def _with_file(self, question: Question, subtitled: bool) -> Question | LeftOut:
        """The question with the path of its video's file, or the reason why it cannot be asked."""
        long = self._too_long(question, subtitled)
        if long:
            return long
        if not self._settings.k:
            return question
        path = self._videos.find(question.video)
        if path is None:
            return LeftOut(question, "missing", f"no file {question.video} below --videos")
        question = dataclasses.replace(question, video=path)
        # Published spans are scored as they are.
        return question if self._settings.benchmark else self._with_span(question)

    def _with_span(self, question: Question) -> Question | LeftOut:
        """The question, or the reason why no answer about its video can be right."""
        if question.kind is not QuestionKind.TEMPORAL_GROUNDING:
            return question
        try:
            require_in_video(question, self.environment.features.info(question.video).duration)
        except Refused as error:
            return LeftOut(question, "broken", f"{error.detail}; correct its answer")
        except VideoError:
            pass  # its episode will say why
        return question

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
        episode = outcome.episode
        vocabulary = self.environment.protocol.vocabulary
        line = transcript(episode, outcome.rewards, self._setting, vocabulary)
        # `video` is the benchmark's path of the video, `file` the path at which it was found.
        places = {"video": video, "file": episode.question.video, "subtitles": subtitles}
        return about | line | measures(outcome) | places


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
    total = len(entries)
    count = total
    while count:
        size = sum(sizes[i] for i in _spread(total, count))
        if size <= room:
            break
        # Shrink in proportion, and by at least one so that the loop ends.
        count = min(count - 1, int(count * room / size))
    return [entries[i] for i in _spread(total, count)]


def _spread(total: int, count: int) -> list[int]:
    """`count` indices below `total` at even distances."""
    return [i * total // count for i in range(count)]


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
