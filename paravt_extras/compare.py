"""Compares two evaluations question by question.

A comparison covers the questions that both runs played, each kind apart. Questions of one id are
compared only if they are the same questions about the same videos. A grounding answer counts as
right if its overlap is at least `RIGHT`.
"""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from paravt_jax.method.records import QuestionKind
from rollout.evaluation.benchmarks import title_of
from rollout.evaluation.folder import Line, latest, read_json, read_lines
from rollout.evaluation.statistics import interval_of_difference, mcnemar

RIGHT = 0.5
"""A question with at least this score counts as right."""

FEW_VIDEOS = 10
"""With differences on fewer videos than this, the comparison carries a warning."""

SHOWN = 10
"""Number of question ids that the text of a comparison lists per run."""

KINDS = {
    QuestionKind.MULTIPLE_CHOICE: "multiple-choice",
    QuestionKind.TEMPORAL_GROUNDING: "grounding",
    QuestionKind.OPEN_ENDED: "open-ended",
}
"""Kinds of questions by their names, in the order in which a comparison shows them."""


def compare(first: pathlib.Path, second: pathlib.Path) -> dict[str, Any]:
    """Compare two runs of the same split question by question.

    Args:
        first: the folder of run A.
        second: the folder of run B.

    Returns:
        The content of `--compare --json`: the counts of the four outcomes, the scores on the shared
        questions, their difference B - A with a 95 % interval, the numbers of videos and of videos
        on which scores differ, McNemar's p-value, the settings that differ, and the ids of the
        questions that only one run got right. These figures are of the `kind` that comes first in
        `KINDS`; `other_kinds` has the same figures of every other kind. `unequal_ids` lists the
        ids that are left out because the runs have different questions under them, and
        `scored_otherwise` the number of open-ended questions that are left out because the runs
        score them in different ways.

    Raises:
        ValueError: the runs are one and the same, are of different splits, or share no question.
        FolderError: a folder holds no evaluation, or a damaged one.
    """
    if first.resolve() == second.resolve():
        raise ValueError(f"--compare: {first} is given twice; give the folders of two runs")
    identities = [read_json(folder / "config.json")["identity"] for folder in (first, second)]
    names = [identity["benchmark"] for identity in identities]
    if names[0] != names[1]:
        raise ValueError(
            f"--compare: {first} is {names[0]}, {second} is {names[1]}; compare runs of one split"
        )
    lines_a, lines_b = (latest(read_lines(folder, keep={"question"})) for folder in (first, second))
    played_a, played_b = (_played(lines) for lines in (lines_a, lines_b))
    shared = sorted(played_a.keys() & played_b.keys())
    unequal: list[str] = []
    hashes = [identity.get("questions") for identity in identities]
    if None in hashes or hashes[0] != hashes[1]:
        unequal = [id for id in shared if not _is_same(played_a[id], played_b[id])]
    ids = _by_kind([id for id in shared if id not in set(unequal)], played_a)
    otherwise: list[str] = []
    # F1, exact match and every judge are different measures.
    scorings = [(one.get("open_ended", "f1"), one.get("judge_model", "")) for one in identities]
    if scorings[0] != scorings[1]:
        otherwise = ids.pop(QuestionKind.OPEN_ENDED, [])
    if not ids:
        ids_alone = f" ({len(unequal)} ids stand for different questions)" if unequal else ""
        raise ValueError(
            f"--compare: {first} and {second} have no question in common{ids_alone}; "
            "play the same questions with both, and score them in the same way"
        )
    main, *others = ids
    return {
        "benchmark": names[0],
        "made_with": _differing(*identities),
        "not_shared": len(played_a.keys() ^ played_b.keys()),
        "unequal_ids": unequal,
        "scored_otherwise": len(otherwise),
        "left_out": [_left_out(lines) for lines in (lines_a, lines_b)],
        "kind": main,
        **_paired(ids[main], played_a, played_b),
        "other_kinds": {kind: _paired(ids[kind], played_a, played_b) for kind in others},
    }


def _by_kind(ids: Sequence[str], played: dict[str, Line]) -> dict[str, list[str]]:
    """Return the ids of each kind that there is. A mean over several kinds would be meaningless."""
    found = {str(kind): [id for id in ids if played[id]["kind"] == kind] for kind in KINDS}
    return {kind: ids for kind, ids in found.items() if ids}


def _is_same(first: Line, second: Line) -> bool:
    """Return whether two lines are about the same question, video and answer."""
    fields = ["options", "answer"]
    # Subtitles come before the text, as many as a run has room for.
    if not (first["subtitles"] or second["subtitles"]):
        fields.append("text")
    same_video = (first["video"], first["kind"]) == (second["video"], second["kind"])
    asked = (first["question"], second["question"])
    return same_video and all(asked[0][field] == asked[1][field] for field in fields)


def _paired(
    ids: Sequence[str], played_a: dict[str, Line], played_b: dict[str, Line]
) -> dict[str, Any]:
    """Compare the scores of both runs on the same questions."""
    # In the same order, so that differences are paired.
    scores_a = np.array([played_a[id]["score"] for id in ids])
    scores_b = np.array([played_b[id]["score"] for id in ids])
    videos = [played_a[id]["video"] for id in ids]
    gains = scores_b - scores_a
    differing = {video for video, gain in zip(videos, gains, strict=True) if gain}
    right_a = scores_a >= RIGHT
    right_b = scores_b >= RIGHT
    only_a = [id for id, only in zip(ids, right_a & ~right_b, strict=True) if only]
    only_b = [id for id, only in zip(ids, right_b & ~right_a, strict=True) if only]
    return {
        "questions": len(ids),
        "scores": [float(np.mean(scores)) for scores in (scores_a, scores_b)],
        "difference": float(gains.mean()),
        "interval": list(interval_of_difference(gains.tolist(), videos)),
        "videos": len(set(videos)),
        "differing_videos": len(differing),
        "both_right": int((right_a & right_b).sum()),
        "only_first": len(only_a),
        "only_second": len(only_b),
        "both_wrong": int((~right_a & ~right_b).sum()),
        "mcnemar_p": mcnemar(len(only_a), len(only_b)),
        "only_first_ids": only_a,
        "only_second_ids": only_b,
    }


def _played(lines: dict[str, Line]) -> dict[str, Line]:
    return {id: line for id, line in lines.items() if "left_out" not in line}


def _left_out(lines: dict[str, Line]) -> dict[str, int]:
    """Return the number of questions left out, by cause."""
    causes = [line["left_out"] for line in lines.values() if "left_out" in line]
    return dict(sorted(collections.Counter(causes).items()))


def _differing(first: Line, second: Line) -> dict[str, list[Any]]:
    """Return the fields of two identities that differ, each with both values."""
    pairs = {name: [first.get(name), second.get(name)] for name in first | second}
    return {name: values for name, values in pairs.items() if values[0] != values[1]}


def comparison_text(first: pathlib.Path, second: pathlib.Path, found: dict[str, Any]) -> str:
    """Format the result of `compare` as text."""
    score_a, score_b = found["scores"]
    kind = f"{KINDS[found['kind']]} " if found["other_kinds"] else ""
    lines = [
        f"{title_of(found['benchmark'])}: {found['questions']} {kind}questions played by both "
        f"({found['not_shared']} by only one)",
        f"  A {first}: {100 * score_a:.1f}",
        f"  B {second}: {100 * score_b:.1f}",
        f"  B - A: {_difference(found)}",
        f"  both right {found['both_right']}, only A {found['only_first']}, "
        f"only B {found['only_second']}, neither {found['both_wrong']}; "
        f"McNemar, exact, two-sided: p = {found['mcnemar_p']:.3g}",
    ]
    if found["differing_videos"] < FEW_VIDEOS:
        lines.append(
            f"  warning: scores differ on {found['differing_videos']} of {found['videos']} videos; "
            f"with fewer than {FEW_VIDEOS}, the interval is only a rough guide"
        )
    for name, other in found["other_kinds"].items():
        score_a, score_b = (100 * score for score in other["scores"])
        lines.append(
            f"  {other['questions']} {KINDS[name]} questions apart: A {score_a:.1f}, "
            f"B {score_b:.1f}, B - A: {_difference(other)}"
        )
    if found["scored_otherwise"]:
        lines.append(
            f"  {found['scored_otherwise']} open-ended questions are not compared: the runs score "
            "them in different ways (--open-ended, --judge-model)"
        )
    if found["unequal_ids"]:
        lines.append(
            f"  warning: {len(found['unequal_ids'])} ids stand for different questions in A and B "
            "(video, text, options or answer) and are not compared: "
            f"{_some_of(found['unequal_ids'])}; give every question an id of its own"
        )
    for run, causes in zip("AB", found["left_out"], strict=True):
        if causes:
            counts = ", ".join(f"{count} {cause}" for cause, count in causes.items())
            lines.append(f"  {run} left out: {counts.replace('_', ' ')}")
    if found["made_with"]:
        differing = (f"{name} A {a!r}, B {b!r}" for name, (a, b) in found["made_with"].items())
        lines.append(f"  made with: {'; '.join(differing)}")
    for run, name in (("A", "first"), ("B", "second")):
        lines.append(f"  only {run}: {_some_of(found[f'only_{name}_ids'])}")
    return "\n".join(lines)


def _difference(found: dict[str, Any]) -> str:
    """Return the difference and its interval, in points."""
    low, high = (100 * end for end in found["interval"])
    gain = 100 * found["difference"]
    digits = 2 if high - low < 1 else 1
    interval = f"[{low:+.{digits}f}, {high:+.{digits}f}]"
    return f"{gain:+.{digits}f}, 95 % interval {interval} points (clustered by video)"


def _some_of(ids: Sequence[str]) -> str:
    if not ids:
        return "none"
    more = f" and {len(ids) - SHOWN} more" if len(ids) > SHOWN else ""
    return ", ".join(ids[:SHOWN]) + more
