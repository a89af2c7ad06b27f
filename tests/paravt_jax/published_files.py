"""Files in the published schema (docs/reference.md, 5), with clips of the assets behind them."""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import pyarrow
import pyarrow.parquet

from paravt_extras.published_format import write_questions

CLIPS = (
    "person_139s_h264_bframes_cc-by.mp4",
    "car_30s_h264_12.5fps_cc-by.mp4",
    "bottle_40s_h264_bframes_cc-by.mp4",
    "bigbuckbunny_5s_720p.mp4",
)
THOUGHT = "<think>\nThe overview shows a road at dusk and a car that turns.\n</think>\n"


def write_rl(
    folder: pathlib.Path, rows: list[dict[str, Any]], name: str = "paravt_rl_diverse_4k4.parquet"
) -> pathlib.Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_questions(folder / name, rows)
    return folder / name


def write_sft(folder: pathlib.Path, rows: list[Any], name: str) -> pathlib.Path:
    """`rows` are lists of messages; a text is written as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    pyarrow.parquet.write_table(pyarrow.table({"messages": texts}), folder / name)
    return folder / name


def write_bytes(folder: pathlib.Path, rows: list[bytes], name: str) -> pathlib.Path:
    """A column of text with any bytes: Arrow does not check that they are UTF-8."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = pyarrow.Array.from_buffers(pyarrow.string(), len(rows), pyarrow.array(rows).buffers())
    pyarrow.parquet.write_table(pyarrow.table({"messages": texts}), folder / name)
    return folder / name


def rl_row(
    path: str,
    text: str = "<video>What turns?\nA. a car\nB. a boat",
    answer: Any = "A",
    kind: str = "mcq",
) -> dict[str, Any]:
    prompt = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": text},
    ]
    return {
        "prompt": prompt,
        "videos": [{"video": path}],
        "extra_info": json.dumps({"answer": answer, "question_type": kind}),
    }


def say(role: str, *content: Any) -> dict[str, Any]:
    """A message of texts and of files, such as `video("a.mp4")` and `image("a.png")`."""
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    return {"role": role, "content": parts}


def video(path: str) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": path}}


def image(path: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": path}}


def call(start: float, end: float, path: str = "longvt_source/selftrace_0/a.mp4") -> str:
    arguments = {"video_path": path, "start_time": start, "end_time": end}
    return f"<tool_call>{json.dumps({'name': 'crop_video', 'arguments': arguments})}</tool_call>"


def answered(
    path: str, question: str = "What turns?", answer: str = "a car"
) -> list[dict[str, Any]]:
    """A demonstration without a call."""
    return [
        say("user", video(path), question),
        say("assistant", f"{THOUGHT}<answer>{answer}</answer>"),
    ]


def called(
    path: str, windows: list[tuple[float, float]], *responses: dict[str, Any], answer: str = "a car"
) -> list[dict[str, Any]]:
    """A demonstration with one turn of calls. Each gets a response in words, or `responses`."""
    calls = "\n".join(call(*window, path) for window in windows)
    if not responses:
        responses = tuple(say("tool", f"From {a} to {b} s a car turns.") for a, b in windows)
    return [
        say("system", 'You may call <tools>{"name": "crop_video"}</tools>.'),
        say("user", video(path), f"What turns? The video is {path}."),
        say("assistant", THOUGHT + calls),
        *responses,
        say("assistant", f"{THOUGHT}<answer>{answer}</answer>"),
    ]


def lay_out_media(root: pathlib.Path, assets: pathlib.Path, paths: dict[str, str]) -> None:
    """Copy clips of the assets to the paths that rows use."""
    for name, clip in paths.items():
        target = root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(assets / "videos" / clip, target)
