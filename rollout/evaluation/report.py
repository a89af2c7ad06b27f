"""What an evaluation prints: its progress, and a short report at its end."""

from __future__ import annotations

import collections
import pathlib
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
        self._left_out = 0
        self._played = 0
        self._calls = 0
        self._scores: dict[str, list[float]] = collections.defaultdict(list)

    def add(self, line: Line) -> None:
        """Count a finished question."""
        if "left_out" in line:
            self._left_out += 1
        else:
            self._played += 1
            self._scores[line["kind"]].append(line["score"])
            self._calls += line["calls"]
        figures: dict[str, float] = {}
        # Of one kind, as in the summary.
        choice, grounding = QuestionKind.MULTIPLE_CHOICE, QuestionKind.TEMPORAL_GROUNDING
        if scores := self._scores[choice] or self._scores[grounding]:
            figures["score"] = 100 * sum(scores) / len(scores)
        if self._played:
            figures["calls"] = self._calls / self._played
        if self._left_out:
            figures["left out"] = self._left_out
        self.update(self._left_out + self._played, self._total, figures)


def report(summary: Line, out: pathlib.Path) -> Iterator[str]:
    """Format the summary as lines of text."""
    title = title_of(summary["benchmark"])
    rows = rows_of(summary)
    score = score_of(summary)
    if not summary["n"]:
        yield f"{title}: none of {rows} questions was played"
    elif score is not None:
        interval = _with_interval(score, summary["interval"])
        yield f"{title}: {interval} on {scored(summary)} of {rows} questions"
    for field in filter(summary.__contains__, APART):
        found = summary[field]
        interval = _with_interval(found["score"], found["interval"])
        yield (
            f"{title}, {APART[field]} questions alone: {interval} on {found['n']} questions, "
            f"{found['without_answer']} without an answer"
        )
    if summary["n"]:
        if summary["refused_reports"]:
            yield f"  {summary['refused_reports']} requests of sub-agents were refused"
        yield (
            f"  {summary['calls']:.2f} calls per question, "
            f"{100 * summary['share_with_calls']:.0f} % with calls, "
            f"{summary['without_answer']} without an answer, "
            f"{summary['unread']} whose answer names no option or span, "
            f"{summary['seconds_per_question']:.2f} s per question"
        )
    for cause, found in summary["left_out"].items():
        example, reason = next(iter(found["videos"].items()))
        counts = f"{found['questions']} questions on {len(found['videos'])} videos"
        yield f"  left out, {cause.replace('_', ' ')}: {counts}, such as {example}: {reason}"
    if summary["broken_rows"]:
        number, reason = next(iter(summary["broken_rows"].items()))
        yield f"  broken rows: {len(summary['broken_rows'])}, such as {number}: {reason}"
    yield f"  {out / 'summary.json'}"


def _with_interval(score: float, interval: Sequence[float]) -> str:
    low, high = interval
    return f"{100 * score:.1f} [{100 * low:.1f}, {100 * high:.1f}]"
