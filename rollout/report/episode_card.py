"""The values of one episode's card: the question, what was shown, what was written and with what
credit, each crop and its sub-agent. `episode_card.html.jinja` lays them out.

A card is made from one line of episodes.jsonl and the frames that it names. A video that cannot be
read is reported on the card.
"""

from __future__ import annotations

import base64
import functools
import io
import itertools
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from paravt_jax.data import video
from paravt_jax.data.frames import VideoError, VideoInfo
from paravt_jax.method.accuracy import chosen_option
from rollout.report.templates import environment, number, plural, seconds

THUMB = 160  # pixels of the longer side at most; the page holds hundreds of frames
PIXEL_ART = 64  # a frame this small is enlarged in squares rather than blurred
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


def episode_page(run_dir: pathlib.Path, episode: dict[str, Any]) -> str:
    """A page with one card, see `episode_card`."""
    card = episode_card(run_dir, episode, unfolded=True)
    return environment().get_template("episode.html.jinja").render(card=card)


def episode_card(run_dir: pathlib.Path, episode: dict[str, Any], unfolded: bool) -> dict[str, Any]:
    """What the template needs to draw one line of episodes.jsonl.

    The episode's `video` is a path relative to `run_dir`.
    """
    path = run_dir / episode["video"]
    turns = episode["turns"]
    calls = [call for turn in turns for call in turn["calls"]]
    credits = [abs(token["credit"] or 0.0) for turn in turns for token in turn["tokens"]]
    strongest = max(credits, default=0.0)
    counter = itertools.count(1)
    return {
        **episode,
        "unfolded": unfolded,
        "facts": _facts(episode, len(turns), calls),
        "ended": STOPS.get(episode["stop"], episode["stop"]),
        "rewards": episode.get("rewards", {}),
        "overview": _frames(path, episode["overview"]),
        "timeline": _timeline(_duration(path, episode["overview"]), calls, episode),
        "options": _options(episode["question"], episode["answer"]),
        "turns": [
            {
                "tokens": [_token(token, strongest) for token in turn["tokens"]],
                "calls": [_call(path, next(counter), call) for call in turn["calls"]],
            }
            for turn in turns
        ],
    }


def _facts(episode: dict[str, Any], turns: int, calls: list[dict[str, Any]]) -> list[str]:
    noun = "call" if any("tool" in call for call in calls) else "crop"
    facts = [f"step {episode['step']}"] if episode.get("phase") == "rl" else []
    facts += [f"K = {episode['k']}", episode["dispatch"]]
    facts += [plural(turns, "turn"), plural(len(calls), noun)]
    facts.append(f"temperature {number(episode['temperature'])}")
    return facts if episode["compliant"] else [*facts, "format broken"]


def _options(question: dict[str, Any], answer: str | None) -> list[dict[str, Any]]:
    """Each option, and whether it is the right one and the one that was chosen."""
    options = question["options"]
    right, chosen = (chosen_option(text or "", options) for text in (question["answer"], answer))
    return [
        {"text": option, "right": letter == right, "chosen": letter == chosen}
        for letter, option in ((chr(ord("A") + i), option) for i, option in enumerate(options))
    ]


def _token(token: dict[str, Any], strongest: float) -> dict[str, Any]:
    """A token's classes by author and kind, and its credit as a shade.

    The shade is relative to the strongest credit of the episode.
    """
    kind, credit, logprob = token["kind"], token["credit"], token["logprob"]
    classes, notes, shade = [f"by-{token['author']}"], [token["author"]], None
    if kind:
        classes += ["kind", f"k-{kind.split('-')[0]}"]
        notes.append(kind)
    if credit is not None:
        notes.append(f"credit {number(credit)}")
    if credit:
        classes.append("up" if credit > 0 else "down")
        shade = 0.08 + 0.47 * abs(credit) / strongest
    if logprob is not None:
        notes.append(f"log-prob {number(logprob)}")
    return {"text": token["text"], "classes": classes, "notes": notes, "shade": shade}


def _call(path: pathlib.Path, index: int, call: dict[str, Any]) -> dict[str, Any]:
    """One call of a turn: what it asked for, what became of it, the frames and the response.

    A transcript names the tool and the arguments of every call but those of crop_video.
    """
    return {
        **call,
        "name": call.get("tool", "crop").replace("_", " ").capitalize(),
        "asked": ", ".join(map(str, call.get("arguments", {}).values())),
        "index": index,
        "done": call["status"] in EXECUTED,
        "frames": _frames(path, call["times"]),
    }


def _timeline(
    duration: float, calls: list[dict[str, Any]], episode: dict[str, Any]
) -> dict[str, Any]:
    """Lanes over [0, duration], places in percent: overview frames as ticks, crops as numbered
    bars, and a grounding question's true and answered windows."""

    def bar(class_: str, start: float, end: float, name: str, label: str = "") -> dict[str, Any]:
        left, right = (100 * min(max(t / duration, 0.0), 1.0) for t in (start, end))
        return {
            "class": class_,
            "left": min(left, 99.4),
            "width": max(right - left, 0.6),
            "label": label,
            "note": f"{name}: {seconds(start)} – {seconds(end)} s",
        }

    crops = [
        bar(
            "ran" if call["status"] in EXECUTED else "not",
            call["start"],
            call["end"],
            f"crop {n}",
            str(n),
        )
        for n, call in enumerate(calls, 1)
        if call["start"] is not None
    ]
    lanes = [("crops", crops)] if crops else []
    question = episode["question"]
    if question["kind"] == "tvg":
        for name, text in (("truth", question["answer"]), ("answer", episode["answer"])):
            if (window := _window(text)) is not None:
                lanes.append((name, [bar(name, *window, name)]))
    ticks = [(100 * min(time / duration, 1), time) for time in episode["overview"]]
    return {"duration": duration, "ticks": ticks, "lanes": lanes}


def _window(text: str | None) -> tuple[float, float] | None:
    found = re.findall(r"\d+(?:\.\d+)?", text or "")
    return (float(found[0]), float(found[1])) if len(found) == 2 else None


def _duration(path: pathlib.Path, overview: Sequence[float]) -> float:
    try:
        return max(_probe(path).duration, 1.0)
    except VideoError:
        return max([*overview, 1.0])


def _frames(path: pathlib.Path, times: Sequence[float]) -> dict[str, Any]:
    """The pictures at `times`, or why they cannot be shown. Of a path, the page tells the name."""
    frames = {"file": path.name, "times": times, "pictures": (), "unreadable": None}
    if not times:
        return frames
    try:
        known = _probe(path).times
        indices = tuple(int(np.abs(known - time).argmin()) for time in times)
        return frames | {"pictures": _pictures(path, indices)}
    except VideoError as error:
        return frames | {"unreadable": error.reason.replace(str(path), path.name)}


@functools.lru_cache(maxsize=64)
def _probe(path: pathlib.Path) -> VideoInfo:
    return video.probe(path)


@functools.lru_cache(maxsize=256)  # an overview recurs before and after RL
def _pictures(path: pathlib.Path, indices: tuple[int, ...]) -> list[dict[str, Any]]:
    return [_picture(frame) for frame in video.read(path, np.array(indices))]


def _picture(frame: np.ndarray) -> dict[str, Any]:
    """A frame as a data URI, and whether the page enlarges it in squares."""
    image, buffer = Image.fromarray(frame), io.BytesIO()
    small = max(image.size) <= PIXEL_ART
    if small:
        image.save(buffer, "PNG", optimize=True)
    else:
        image.thumbnail((THUMB, THUMB))
        image.save(buffer, "JPEG", quality=80)
    data = base64.b64encode(buffer.getvalue()).decode()
    return {"uri": f"data:image/{'png' if small else 'jpeg'};base64,{data}", "small": small}
