"""The content of an episode's card: question, frames, tokens with their credit, crops and reports.

A card is made from one line of episodes.jsonl and the video's frames; `episode_card.html.jinja`
lays it out. If the video cannot be read, the card says so.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import io
import itertools
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from paravt_jax.data.frames import FrameSource, ReadTask, VideoError, VideoInfo
from paravt_jax.method.accuracy import chosen_option, read_range
from rollout.report.templates import environment, number, plural, seconds

THUMBNAIL = 160
"""Longer side of a frame on the page, in pixels. A page holds hundreds of frames."""

PIXEL_ART = 64
"""Frames up to this size are enlarged in sharp squares instead of being blurred."""

EXECUTED = ("executed", "clamped")
"""Statuses of calls that were executed."""

_SMALLEST_BAR = 0.6  # per cent of the time axis; narrower bars would be invisible


def episode_page(run_dir: pathlib.Path, episode: dict[str, Any]) -> str:
    """Render a page with the answer, the moments that were looked at, and a card, see
    `episode_card`."""
    video = run_dir / episode["video"]
    card = episode_card(video, episode, unfolded=True)
    moments = _moments(video, card)
    return environment().get_template("episode.html.jinja").render(card=card, moments=moments)


def episode_card(
    video: pathlib.Path | None, episode: dict[str, Any], unfolded: bool
) -> dict[str, Any]:
    """Collect the values that the template needs for one episode.

    Args:
        video: the video's file; None if no picture of it may be shown.
        episode: a line of episodes.jsonl.
        unfolded: whether the card is open when the page loads.
    """
    turns = episode["turns"]
    calls = [call for turn in turns for call in turn["calls"]]
    tokens = [token for turn in turns for token in turn["tokens"]]
    strongest = max((abs(token["credit"] or 0.0) for token in tokens), default=0.0)
    call_numbers = itertools.count(1)  # numbered through all turns, as on the time axis
    return {
        **episode,
        "unfolded": unfolded,
        "facts": _facts(episode, len(turns), calls),
        "ended": episode["stop"].replace("_", " "),
        "rewards": episode.get("rewards", {}),
        "overview": _frames(video, episode["overview"]),
        "timeline": _timeline(_duration(video, episode["overview"]), calls, episode),
        "options": _options(episode["question"], episode["answer"]),
        "turns": [
            {
                "tokens": [_token(token, strongest) for token in turn["tokens"]],
                "calls": [_call(video, next(call_numbers), call) for call in turn["calls"]],
            }
            for turn in turns
        ],
    }


def _moments(path: pathlib.Path, card: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the moments to show beside the answer: its own, and those that reports are about.

    Each has a picture, of the time that its text names or of its middle.
    """
    moments = []

    def add(target: str, window: tuple[float, float], text: str) -> None:
        start, end = read_range(text) or window
        if not window[0] <= start <= end <= window[1]:
            start, end = window  # the text counts something else than seconds
        picture = _frames(path, [(start + end) / 2])
        moments.append({"target": target, "window": window, "text": text, "frames": picture})

    answered = read_range(card["answer"] or "") if card["question"]["kind"] == "tvg" else None
    if answered:
        add("time-axis", answered, "the answer")
    for call in (call for turn in card["turns"] for call in turn["calls"]):
        if call["done"] and call["start"] is not None:
            add(f"call-{call['index']}", (call["start"], call["end"]), call["response"])
    return moments


def _facts(episode: dict[str, Any], turns: int, calls: list[dict[str, Any]]) -> list[str]:
    """Return the short facts in the card's first line."""
    facts = []
    if episode.get("step"):
        facts.append(f"step {episode['step']}")
    facts.append(f"K = {episode['k']}")
    facts.append(episode["dispatch"])
    facts.append(plural(turns, "turn"))
    only_crops = not any("tool" in call for call in calls)
    facts.append(plural(len(calls), "crop" if only_crops else "call"))
    facts.append(f"temperature {number(episode['temperature'])}")
    if not episode["compliant"]:
        facts.append("format broken")
    return facts


def _options(question: dict[str, Any], answer: str | None) -> list[dict[str, Any]]:
    """Return each option, whether it is right and whether it was chosen.

    `right` is None for all of them if the right answer is unknown, as in `rollout.ask`.
    """
    options = question["options"]
    right = chosen_option(question["answer"] or "", options)
    chosen = chosen_option(answer or "", options)
    shown = []
    for index, option in enumerate(options):
        letter = chr(ord("A") + index)
        is_right = None if right is None else letter == right
        shown.append({"text": option, "right": is_right, "chosen": letter == chosen})
    return shown


def _token(token: dict[str, Any], strongest: float) -> dict[str, Any]:
    """Return a token's CSS classes and tooltip, and its credit as a shade.

    The shade is relative to the strongest credit in the episode.
    """
    kind = token["kind"]
    credit = token["credit"]
    logprob = token["logprob"]
    classes = [f"by-{token['author']}"]
    notes = [token["author"]]
    shade = None
    if kind:
        classes += ["kind", f"k-{kind.split('-')[0]}"]  # call-open and call-close look alike
        notes.append(kind)
    if credit is not None:
        notes.append(f"credit {number(credit)}")
    if credit:
        classes.append("up" if credit > 0 else "down")
        # Opacity of the background: the weakest credit is still visible, the strongest readable.
        shade = 0.08 + 0.47 * abs(credit) / strongest
    if logprob is not None:
        notes.append(f"log-prob {number(logprob)}")
    return {"text": token["text"], "classes": classes, "notes": notes, "shade": shade}


def _call(video: pathlib.Path | None, index: int, call: dict[str, Any]) -> dict[str, Any]:
    """Return a call with its request, outcome, frames and response.

    Transcripts give tool and arguments for every tool except crop_video, which has a window.
    """
    return {
        **call,
        "name": call.get("tool", "crop").replace("_", " ").capitalize(),
        "asked": ", ".join(map(str, call.get("arguments", {}).values())),
        "index": index,
        "done": call["status"] in EXECUTED,
        "frames": _frames(video, call["times"]),
    }


def _timeline(
    duration: float, calls: list[dict[str, Any]], episode: dict[str, Any]
) -> dict[str, Any]:
    """Return the lanes of the time axis, with positions in per cent of the duration.

    Overview frames are ticks, crops are numbered bars. A grounding question also has a lane for its
    true and for its answered window.
    """
    crops = []
    for index, call in enumerate(calls, 1):
        if call["start"] is None:  # the call had no readable window
            continue
        class_ = "ran" if call["status"] in EXECUTED else "not"
        window = (call["start"], call["end"])
        crops.append(_bar(class_, window, duration, name=f"crop {index}", label=str(index)))
    lanes = [("crops", crops)] if crops else []
    question = episode["question"]
    if question["kind"] == "tvg":
        for name, text in (("truth", question["answer"]), ("answer", episode["answer"])):
            window = read_range(text or "")
            if window is not None:
                lanes.append((name, [_bar(name, window, duration, name=name)]))
    ticks = [(100 * min(time / duration, 1), time) for time in episode["overview"]]
    return {"duration": duration, "ticks": ticks, "lanes": lanes}


def _bar(
    class_: str, window: tuple[float, float], duration: float, name: str, label: str = ""
) -> dict[str, Any]:
    """Return a bar on the time axis. A window may reach outside the video: the bar ends at its
    edges."""
    left, right = (100 * min(max(time / duration, 0.0), 1.0) for time in window)
    begin, end = window
    return {
        "class": class_,
        "left": min(left, 100 - _SMALLEST_BAR),
        "width": max(right - left, _SMALLEST_BAR),
        "label": label,
        "note": f"{name}: {seconds(begin)} – {seconds(end)} s",
    }


def _duration(video: pathlib.Path | None, overview: Sequence[float]) -> float:
    """Return the length of the time axis in seconds. A video that is not read ends at its last
    frame."""
    with contextlib.suppress(VideoError):
        if video is not None:
            return max(_probe(video).duration, 1.0)
    return max([*overview, 1.0])


def _frames(video: pathlib.Path | None, times: Sequence[float]) -> dict[str, Any]:
    """Return the pictures at `times`, or the reason why they cannot be shown.

    The page may be published, so it shows the name of the file without its folders.
    """
    frames = {"file": "the video", "times": times, "pictures": (), "unreadable": None}
    if video is None:
        return frames | {"unreadable": "it is in none of the named folders"}
    frames["file"] = video.name
    if not times:
        return frames
    try:
        frame_times = _probe(video).times
        indices = tuple(int(np.abs(frame_times - time).argmin()) for time in times)
        return frames | {"pictures": _pictures(video, indices)}
    except VideoError as error:
        return frames | {"unreadable": error.reason.replace(str(video), video.name)}


# One process for all pages that this one makes. It ends with this one.
@functools.cache
def _reader() -> FrameSource:
    # The decoders are imported when the first video is shown.
    from paravt_jax.data.frame_reader import FrameReader

    return FrameReader(workers=1)


@functools.lru_cache(maxsize=64)
def _probe(path: pathlib.Path) -> VideoInfo:
    return _reader().request(ReadTask(str(path), (), None)).result().info


# Cached, because evaluations before and after RL show the same overviews.
@functools.lru_cache(maxsize=256)
def _pictures(path: pathlib.Path, indices: tuple[int, ...]) -> list[dict[str, Any]]:
    read = _reader().request(ReadTask(str(path), indices, None)).result()
    return [_picture(frame) for frame in read.frames]


def _picture(frame: UInt8[np.ndarray, "h w 3"]) -> dict[str, Any]:
    """Return a frame as a data URI, and whether the page enlarges it in squares."""
    image = Image.fromarray(frame)
    buffer = io.BytesIO()
    small = max(image.size) <= PIXEL_ART
    if small:
        image.save(buffer, "PNG", optimize=True)
    else:
        image.thumbnail((THUMBNAIL, THUMBNAIL))
        image.save(buffer, "JPEG", quality=80)
    data = base64.b64encode(buffer.getvalue()).decode()
    format_ = "png" if small else "jpeg"
    return {"uri": f"data:image/{format_};base64,{data}", "small": small}
