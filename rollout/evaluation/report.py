"""What an evaluation prints: its progress, and a short report at its end."""

from __future__ import annotations

import collections
import itertools
import pathlib
import statistics
from collections.abc import Iterator, Sequence

from paravt_jax.method.records import QuestionKind
from paravt_jax.processes import hosts
from paravt_jax.progress import Progress
from rollout.evaluation.benchmarks import title_of
from rollout.evaluation.folder import Line
from rollout.evaluation.summary import APART, rows_of, score_of, scored


class PlayProgress(Progress):
    """Shows the finished questions of the first host: score, calls per question, left out."""

    def __init__(self, title: str, total: int):
        super().__init__(title, "question", every=10.0, shown=hosts.is_first())
        self._total = total
        self._done = 0
        self._played: dict[str, list[Line]] = collections.defaultdict(list)  # by kind

    def add(self, line: Line) -> None:
        """Count a finished question."""
        self._done += 1
        if "left_out" not in line:
            self._played[line["kind"]].append({key: line[key] for key in ("score", "calls")})
        figures: dict[str, float] = {}
        # Of one kind, as in the summary.
        choice, grounding = QuestionKind.MULTIPLE_CHOICE, QuestionKind.TEMPORAL_GROUNDING
        if closed := self._played[choice] or self._played[grounding]:
            figures["score"] = 100 * statistics.fmean(line["score"] for line in closed)
        if played := list(itertools.chain.from_iterable(self._played.values())):
            figures["calls"] = statistics.fmean(line["calls"] for line in played)
        if left_out := self._done - len(played):
            figures["left out"] = left_out
        self.update(self._done, self._total, figures)


def report(summary: Line, out: pathlib.Path) -> Iterator[str]:
    """Format the summary as lines of text."""
    title = title_of(summary["benchmark"])
    score = score_of(summary)
    if not summary["n"]:
        yield f"{title}: none of {rows_of(summary)} questions was played"
    elif score is not None:
        interval = _with_interval(score, summary["interval"])
        yield f"{title}: {interval} on {scored(summary)} of {rows_of(summary)} questions"
    for field in filter(summary.__contains__, APART):
        found = summary[field]
        interval = _with_interval(found["score"], found["interval"])
        yield (
            f"{title}, {APART[field]} questions alone: {interval} on {found['n']} questions, "
            f"{found['without_answer']} without an answer"
        )
    if summary["n"]:
        yield (
            f"  {summary['calls']:.2f} calls per question, "
            f"{100 * summary['share_with_calls']:.0f} % with calls, "
            f"{summary['without_answer']} without an answer, "
            f"{summary['unread']} whose answer names no option or span, "
            f"{summary['refused_reports']} refused requests of sub-agents, "
            f"{summary['seconds_per_question']:.2f} s per question"
        )
    for cause, found in summary["left_out"].items():
        example, reason = next(iter(found["videos"].items()))
        counts = f"{found['questions']} questions on {len(found['videos'])} videos"
        yield f"  left out, {cause.replace('_', ' ')}: {counts}, such as {example}: {reason}"
    for number, reason in list(summary["broken_rows"].items())[:1]:
        yield f"  broken rows: {len(summary['broken_rows'])}, such as {number}: {reason}"
    yield f"  {out / 'summary.json'}"


def _with_interval(score: float, interval: Sequence[float]) -> str:
    low, high = interval
    return f"{100 * score:.1f} [{100 * low:.1f}, {100 * high:.1f}]"
