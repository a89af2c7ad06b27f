"""One episode as a card: the question, what was shown, what was written and with what credit, each crop and its sub-agent.

Owns the reading of one line of episodes.jsonl and the decoding of its frames at the times it names. Refuses nothing: a
video that cannot be read is said in the card's words. Invariant: the tokens stand on the page in the order and the characters in which
the model wrote them.
"""

from __future__ import annotations

import base64
import functools
import io
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from paravt_jax.data import video
from rollout.report.markup import Html, el, join, number

THUMB = 160  # pixels of the longer side at most; the page holds hundreds of frames
PIXEL_ART = 64  # a frame this small is enlarged in squares rather than blurred
FEW = 16  # up to that many frames are drawn large
STOPS = {
    "answered": "answered",
    "no_answer": "ended with neither a call nor an answer",
    "truncated": "a turn ran into its token limit",
    "turn_limit": "still calling in the last turn",
    "token_limit": "the trajectory was full",
    "time_limit": "its time was up",
    "unreadable": "the video could not be read",
    "refused": "the server refused a request",
}
EXECUTED = ("executed", "clamped")


def episode_card(run_dir: pathlib.Path, episode: dict[str, Any], open_: bool) -> Html:
    """The card of one line of episodes.jsonl; its `video` is a path relative to `run_dir`. `open_` unfolds it."""
    question = episode["question"]
    path = run_dir / episode["video"]
    turns = episode.get("turns", [])
    calls = [call for turn in turns for call in turn.get("calls", [])]
    overview = episode.get("overview", [])
    left = [
        _section(
            f"Overview: {_plural(len(overview), 'frame')}, times in seconds",
            _frames(path, overview),
        ),
        _section(
            "On the time axis", _timeline(_duration(path, overview), overview, calls, episode)
        ),
        _section(
            "Options", _options(question["options"], question["answer"], episode.get("answer"))
        )
        if question.get("options")
        else "",
        _section("Outcome", _outcome(episode)),
    ]
    strongest = max(
        (abs(t["credit"]) for turn in turns for t in turn["tokens"] if t.get("credit") is not None),
        default=0.0,
    )
    right, first = [], 1
    for i, turn in enumerate(turns, 1):
        crops = turn.get("calls", [])
        tokens = el("pre", [_token(token, strongest) for token in turn["tokens"]], class_="tokens")
        right.append(
            _section(
                f"Turn {i}", tokens, [_crop(path, n, call) for n, call in enumerate(crops, first)]
            )
        )
        first += len(crops)
    head = _head(episode, len(turns), len(calls))
    return el(
        "details",
        head,
        el("div", el("div", left), el("div", right), class_="panes"),
        class_="episode",
        open=open_,
    )


def _head(episode: dict[str, Any], turns: int, calls: int) -> Html:
    accuracy = episode.get("rewards", {}).get("accuracy")
    others = any(
        "tool" in call for turn in episode.get("turns", []) for call in turn.get("calls", [])
    )
    noun = "call" if others else "crop"
    facts = [
        f"K = {episode.get('k', '?')}",
        str(episode.get("dispatch", "")),
        _plural(turns, "turn"),
        _plural(calls, noun),
    ]
    if episode.get("temperature") is not None:
        facts.append(f"temperature {number(episode['temperature'])}")
    if episode.get("compliant") is False:
        facts.append("format broken")
    if episode.get("phase") == "rl":
        facts.insert(0, f"step {episode.get('step', '?')}")
    return el(
        "summary",
        _verdict(accuracy, episode.get("answer")),
        el("span", episode["question"]["text"], class_="title"),
        el("span", " · ".join(facts), class_="facts"),
    )


def _verdict(accuracy: float | None, answer: str | None) -> Html:
    if answer is None:
        return el("span", "no answer", class_="verdict bad")
    if accuracy is None:
        return el("span", "answered", class_="verdict")
    if accuracy >= 1:
        return el("span", "✓ right", class_="verdict good")
    return (
        el("span", "✗ wrong", class_="verdict bad")
        if accuracy <= 0
        else el("span", f"≈ {number(accuracy)}", class_="verdict part")
    )


def _section(title: str, *content: Any) -> Html:
    return el("section", el("h4", title), *content)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


# The options and the outcome


def _options(options: Sequence[str], right: str, answer: str | None) -> Html:
    items = []
    for option in options:
        truth, chosen = _same(option, right), answer is not None and _same(option, answer)
        classes = " ".join(
            name for name, on in (("option", True), ("truth", truth), ("chosen", chosen)) if on
        )
        mark = (" ✓" if truth else " ✗") if chosen else " ○" if truth else ""
        items.append(el("li", option + mark, class_=classes))
    return el("ul", items, class_="options")


def _same(option: str, answer: str) -> bool:
    """An answer may be an option's words or its letter ("B" of "B. seven")."""
    option, answer = option.strip().casefold(), answer.strip().casefold()
    return option == answer or re.split(r"[.):]\s", option)[0] == answer


def _outcome(episode: dict[str, Any]) -> Html:
    answer = episode.get("answer")
    stop = str(episode.get("stop", ""))
    rows = [
        ("answer", "none" if answer is None else answer),
        *([("truth", truth)] if (truth := episode["question"]["answer"]) else []),
        ("ended", STOPS.get(stop, stop)),
    ]
    if "compliant" in episode:
        rows.append(("format", "every turn parses" if episode["compliant"] else "broken"))
    rewards = [
        el("span", name, el("b", number(value)), class_="fact")
        for name, value in episode.get("rewards", {}).items()
    ]
    return join(
        el("dl", [join(el("dt", name), el("dd", value)) for name, value in rows]),
        el("div", el("span", "rewards", class_="lead"), rewards, class_="facts-row")
        if rewards
        else "",
    )


# What was written


def _token(token: dict[str, Any], strongest: float) -> Html:
    """Its author as a class, its kind as a mark, its credit as a shade relative to the strongest of the episode."""
    author, kind, credit = str(token.get("author", "model")), token.get("kind"), token.get("credit")
    classes, style, notes = [f"by-{_word(author)}"], None, [author]
    if kind:
        classes.append(
            f"kind {'k-violation' if kind == 'violation' else 'k-' + _word(kind.split('-')[0])}"
        )
        notes.append(kind)
    if credit is not None:
        notes.append(f"credit {number(credit)}")
        if credit:
            classes.append("up" if credit > 0 else "down")
            style = f"--c:{0.08 + 0.47 * abs(credit) / strongest:.2f}"
    if token.get("logprob") is not None:
        notes.append(f"log-prob {number(token['logprob'])}")
    return el("span", token["text"], class_=" ".join(classes), style=style, title=" · ".join(notes))


def _word(text: str) -> str:
    return re.sub(r"[^a-z]", "", text)


def _crop(path: pathlib.Path, n: int, call: dict[str, Any]) -> Html:
    status = str(call.get("status", ""))
    done = status in EXECUTED
    name = str(call.get("tool", "crop")).replace("_", " ").capitalize()
    if "tool" in call:
        asked = ", ".join(map(str, call["arguments"].values()))
    elif call.get("start") is None:
        asked = "no window that could be read"
    else:
        asked = f"{_time(call['start'])} – {_time(call['end'])} s"
    outcome = el("span", status.replace("_", " "), class_="good" if done else "bad")
    return el(
        "div",
        el("div", el("b", f"{name} {n}"), el("span", asked), outcome, class_="crop-head"),
        _frames(path, call.get("times", [])) if call.get("times") else "",
        el("blockquote", _response(call)),
        class_="crop" if done else "crop refused",
    )


def _response(call: dict[str, Any]) -> Any:
    """A report as it stands; the answer of another tool line by line."""
    response = call.get("response", "")
    return [el("div", line) for line in response.split("\n")] if "tool" in call else response


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    return (
        f"{seconds:.1f}".removesuffix(".0") if abs(seconds) < 1e6 else f"{seconds:.0e}"
    )  # a call may name any number


# What was seen


def _timeline(
    duration: float, overview: Sequence[float], calls: list[dict[str, Any]], episode: dict[str, Any]
) -> Html:
    """Over [0, duration]: overview frames as ticks, crops as numbered bars, and a grounding question's true and answered windows."""

    def bar(class_: str, start: float, end: float, name: str, label: str = "") -> Html:
        a, b = (100 * min(max(t / duration, 0.0), 1.0) for t in (start, end))
        style = f"left:{min(a, 99.4):.2f}%;width:{max(b - a, 0.6):.2f}%"
        return el(
            "b", label, class_=class_, style=style, title=f"{name}: {_time(start)} – {_time(end)} s"
        )

    ticks = [
        el("i", style=f"left:{100 * min(t / duration, 1):.2f}%", title=f"{_time(t)} s")
        for t in overview
    ]
    lanes = [("overview", ticks)]
    bars = [
        bar(
            "ran" if call.get("status") in EXECUTED else "not",
            call["start"],
            call["end"],
            f"crop {n}",
            str(n),
        )
        for n, call in enumerate(calls, 1)
        if call.get("start") is not None and call.get("end") is not None
    ]
    if bars:
        lanes.append(("crops", bars))
    if episode["question"].get("kind") == "tvg":
        for name, text in (
            ("truth", episode["question"]["answer"]),
            ("answer", episode.get("answer")),
        ):
            if (window := _window(text)) is not None:
                lanes.append((name, [bar(name, *window, name)]))
    rows = [join(el("span", name), el("div", marks, class_="lane")) for name, marks in lanes]
    ends = join(
        el("span"), el("div", el("span", "0 s"), el("span", f"{_time(duration)} s"), class_="ends")
    )
    return el("div", rows, ends, class_="timeline")


def _window(text: str | None) -> tuple[float, float] | None:
    found = re.findall(r"\d+(?:\.\d+)?", text or "")
    return (float(found[0]), float(found[1])) if len(found) == 2 else None


def _duration(path: pathlib.Path, overview: Sequence[float]) -> float:
    try:
        return max(_probe(path).duration, 1.0)
    except video.VideoError:
        return max([*overview, 1.0])


def _frames(path: pathlib.Path, times: Sequence[float]) -> Html:
    if not times:
        return el("p", "No frames.", class_="quiet")
    try:
        known = _probe(path).times
        pictures = _pictures(path, tuple(int(np.abs(known - t).argmin()) for t in times))
    except video.VideoError as error:
        return join(
            el(
                "p",
                f"The frames of {path.name} cannot be shown: {error.reason.replace(str(path), path.name)}.",
                class_="bad unreadable",
            ),
            el("p", f"Their times: {', '.join(_time(t) for t in times)} s", class_="quiet"),
        )
    shown = [
        el(
            "figure",
            el("img", src=uri, alt=f"frame at {_time(t)} s", class_=class_),
            el("figcaption", _time(t)),
        )
        for t, (uri, class_) in zip(times, pictures, strict=True)
    ]
    return el("div", shown, class_="strip" if len(times) <= FEW else "strip many", tabindex=0)


@functools.lru_cache(maxsize=64)
def _probe(path: pathlib.Path) -> video.VideoInfo:
    return video.probe(path)


@functools.lru_cache(maxsize=256)  # an overview recurs before and after RL
def _pictures(path: pathlib.Path, indices: tuple[int, ...]) -> list[tuple[str, str | None]]:
    """A data URI for each frame, and the class of those that are enlarged in squares."""
    return [_picture(frame) for frame in video.read(path, np.array(indices))]


def _picture(frame: np.ndarray) -> tuple[str, str | None]:
    image, buffer = Image.fromarray(frame), io.BytesIO()
    small = max(image.size) <= PIXEL_ART
    if small:
        image.save(buffer, "PNG", optimize=True)
    else:
        image.thumbnail((THUMB, THUMB))
        image.save(buffer, "JPEG", quality=80)
    return (
        f"data:image/{'png' if small else 'jpeg'};base64,{base64.b64encode(buffer.getvalue()).decode()}",
        "pixels" if small else None,
    )
