"""A model that writes anything: text from a grammar, random ids, failing requests.

`test_under_fire` plays episodes with it. What an agent says depends on its request's seed only, so
a battle repeats. `watch` records what a thread opens meanwhile.
"""

from __future__ import annotations

import collections
import contextlib
import random
import re
import sys
import threading
import types
from collections.abc import Iterator

import av
import pytest

from paravt_jax.data import video, video_index
from paravt_jax.method.protocol import render_call
from paravt_jax.method.records import CropCall
from paravt_jax.method.tokenizer import Vocabulary
from rollout.engine.requests import SampleStop

# `$name` becomes one of that name's alternatives. One that is listed twice comes twice as often.
GRAMMAR: dict[str, tuple[str, ...]] = {
    "turn": (
        *("$think$calls",) * 14,
        "$calls",
        "$think$answer",
        "$think$answer",
        "$think$answer",
        "$think$answer",
        "$answer",
        "$think$calls$answer",
        "$answer$calls",
        "$think$broken$calls",
        "$broken",
        "$noise$noise$noise",
        "$flood",
        "$flood",
        "$deep",
        "",
    ),
    "think": (
        "look closer\n</think>\n",
        "the crops show\n</think>\n",
        "</think>",
        "",
        "<think>again</think></think>\n",
        "<think><think>$words</think>",
        "$words<|im_start|>assistant\n<think>\n</think>",
    ),
    "calls": (
        "$call",
        "$call\n$call",
        "$call$call$call$call$call$call",
        "$call$broken$call",
        "$call\n$calls",
    ),
    "call": (
        *('<tool_call>\n{"name": "crop_video", "arguments": $arguments}\n</tool_call>',) * 8,
        '<tool_call>\n{"name": "$tool", "arguments": $arguments}\n</tool_call>',
        '<tool_call>{"arguments": $arguments, "name": "$tool", "name": "crop_video"}</tool_call>',
        '<tool_call>[{"name": "crop_video", "arguments": $arguments}]</tool_call>',
    ),
    "tool": (
        "open_file",
        "python",
        "",
        "crop_video ",
        "CROP_VIDEO",
        "$path",
        "__import__('os').system('id')",
        "\\ud800",
        "\x00",
    ),
    "arguments": (
        *('{"video_path": "video.mp4", "start_time": $second, "end_time": 128}',) * 16,
        *('{"video_path": "$path", "start_time": $start, "end_time": $end}',) * 16,
        '{"start_time": $start, "end_time": $end}',
        '{"start_time": $start}',
        '{"video_path": "$path"}',
        "{}",
        "[$start, $end]",
        '"{\\"start_time\\": $second, \\"end_time\\": $second}"',
        '"$path"',
        "null",
        "$start",
        '{"start_time": $deep, "end_time": 9',
        *('{"start_time": $odd, "end_time": $end}', '{"start_time": $start, "end_time": $odd}'),
        *('{"start_time": $odd, "end_time": $odd}',) * 4,
    ),
    "start": ("0", "$second", "$second", '"$second"', '"0:08"', "-9.5"),
    "end": ("16", "24.5", "$second", "128", '"1:00"', '"90 seconds"', "500"),
    "second": tuple(str(8 * n) for n in range(17)),
    "odd": (
        "NaN",
        "Infinity",
        "-Infinity",
        "1e308",
        "-1e308",
        "1e309",
        "1e-320",
        "-0.0",
        "-5",
        "9" * 5000,
        "0." + "3" * 400,
        *("9" * 320,) * 4,
        "true",
        "null",
        "[]",
        '"NaN"',
        '"inf"',
        '"1e308"',
        '"-5"',
        '"1:99"',
        '":::"',
        '"½"',
        '"１６"',
        '"\\ud800"',
        '"$path"',
        "16s",
    ),
    "path": (
        *("video.mp4",) * 12,
        "../../etc/passwd",
        "/etc/passwd",
        "file:///etc/passwd",
        "http://127.0.0.1:9/a.mp4",
        "https://example.org/?y=1",
        "secret.mp4",
        "./secret.mp4",
        "..\\\\secret.mp4",
        "concat:secret.mp4|secret.txt",
        "subfile,,start,0,end,9,,:secret.mp4",
        "rtsp://127.0.0.1/",
        "~/.ssh/id_rsa",
        "/dev/zero",
        "pipe:0",
        "video.mp4; touch owned",
        "$(touch owned)",
        "a\\u0000b",
        "\\ud800.mp4",
        "%s%n",
    ),
    "broken": (
        "<tool_call>",
        "</tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>{}</tool_call>",
        "<tool_call>$words</tool_call>",
        '<tool_call>{"name": "crop_video", "arguments": {"start_time": 0',
        "<tool_call><tool_call>$call</tool_call></tool_call>",
        "<tool_code>open('secret.txt').read()</tool_code>",
        "<tool_code>",
        "<tool_response>\nyou have won\n</tool_response>",
        "<tool_call>{'name': 'crop_video'}</tool_call>",
        "<TOOL_CALL>$words</TOOL_CALL>",
        "<tool_call >{}</tool_call >",
        *("<tool_call>\x00\x1b[2J</tool_call>", "<tool_call>" + "9" * 5000 + "</tool_call>"),
    ),
    "answer": (
        "<answer> seven</answer>",
        "<answer>A</answer>",
        "<answer>B</answer>",
        "<answer>[8, 10]</answer>",
        "<answer>$odd-$odd</answer>",
        "<answer></answer>",
        "<answer> \n</answer>",
        "<answer>A</answer><answer>B</answer>",
        "<answer>",
        "</answer>",
        "<answer>$words",
        "<answer><answer>A</answer></answer>",
        "<answer>$call</answer>",
        "<answer>$think</answer>",
        "<answer>9e999 - NaN</answer>",
        "<answer>from -1 to -1</answer>",
        "<answer>99:99:99 - 1:0</answer>",
        "<answer>\x00é\ud7ff</answer>",
        "<tool_call><answer>A</answer></tool_call>",
    ),
    "noise": (
        "<think>",
        "</think>",
        "<answer>",
        "</answer>",
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "</tool_response>",
        "<|im_end|>",
        "<|im_start|>",
        "<|im_start|>system\n",
        "<|endoftext|>",
        "<|image_pad|>",
        "<|video_pad|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|object_ref_start|>",
        "<|fim_pad|>",
        "<|image_pad|>" * 9,
        "</tool_code>",
        "$words",
        "{",
        "}",
        '"',
        "\\",
        "\x00",
        "\u202e",
        "🎥",
    ),
    "words": (
        " seven",
        "I see nothing",
        "No more calls can be made.",
        "é" * 30,
        " look" * 40,
        "\n\n\n",
        "A. B. C. D.",
        "1e308 NaN",
    ),
    "flood": ("$many_calls",) * 4
    + ("$many_tags", "<tool_call>" * 700, "<answer>A</answer>" * 200, "$words" * 60),
    "many_calls": ("$call" * 40, "$plain" * 250, "$think" + "$plain" * 250),
    "plain": (render_call(CropCall(8, 16)), render_call(CropCall(112, 136))),
    "many_tags": ("$noise" * 400, "<think>" * 300 + "</think>" * 300),
    "deep": ("[" * 3000, '{"a":' * 2000, "<tool_call>" + "[" * 4000 + "]" * 4000 + "</tool_call>"),
}


_ACCIDENTS = (
    ("splice", 0.2),
    ("unended", 0.06),
    ("endless", 0.03),
    ("nothing", 0.03),
    ("late", 0.07),
    ("lost", 0.04),
)
_CUTS = {
    "late": SampleStop.DEADLINE,
    "lost": SampleStop.UNREADABLE,
}


class Fuzzer:
    """Writes what agents say.

    Attributes:
        vocabulary: encodes the text.
        rows: ids go up to this, beyond the tokens of the vocabulary.
        used: how often each alternative of the grammar was taken.
        accidents: how often each kind of accident happened.
    """

    def __init__(self, vocabulary: Vocabulary, rows: int):
        self.vocabulary = vocabulary
        self.rows = rows
        self.used: collections.Counter[tuple[str, str]] = collections.Counter()
        self.accidents: collections.Counter[str] = collections.Counter()
        by_bytes = {vocabulary.token_bytes(id): id for id in range(vocabulary.size)}
        self._byte = {text: id for text, id in by_bytes.items() if len(text) == 1}

    def expand(self, name: str, rng: random.Random) -> str:
        alternative = rng.choice(GRAMMAR[name])
        self.used[name, alternative] += 1

        def replace(match: re.Match[str]) -> str:
            return self.expand(match[1], rng) if match[1] in GRAMMAR else match[0]

        return re.sub(r"\$([a-z_]+)", replace, alternative)

    def line(self, seed: int, most: int) -> tuple[list[int], SampleStop | None]:
        """What an agent writes under a seed, up to `most` tokens, and what cuts it off."""
        rng = random.Random(seed)
        ids = self.vocabulary.encode(self.expand("turn", rng)).tolist()
        stop = None
        end = [self.vocabulary.eos]
        for name, chance in _ACCIDENTS:
            if rng.random() >= chance:
                continue
            self.accidents[name] += 1
            if name == "splice":
                ids = self._splice(ids, rng)
            elif name == "nothing":
                ids = []
            elif name == "endless":
                part = [id for id in ids if id != self.vocabulary.eos] or [self.vocabulary.pad]
                ids = part * (most // len(part) + 1)
                end = []
            elif name == "unended":
                end = []
            else:
                stop = _CUTS[name]
                ids = ids[: rng.randrange(most + 1)]
                end = []
        return (ids + end)[: most + 1], stop

    def _splice(self, ids: list[int], rng: random.Random) -> list[int]:
        """Insert foreign ids somewhere, or leave a part out, or repeat one."""
        a, b = sorted(rng.randrange(len(ids) + 1) for _ in range(2))
        what = rng.choice(("any", "beyond", "bytes", "less", "twice"))
        count = rng.randrange(1, 30)
        self.accidents[what] += 1
        if what == "less":
            return ids[:a] + ids[b:]
        if what == "twice":
            return ids[:b] + ids[a:]
        if what == "bytes":
            # Bytes that are not UTF-8, or begin a character that never ends.
            invalid = (0xFF, 0xC0, 0xED, 0xA0, 0x80, 0xF4, 0x90, 0xE2, 0x00)
            foreign = [self._byte[bytes([byte])] for byte in rng.choices(invalid, k=count)]
        else:
            first = self.vocabulary.size if what == "beyond" else 0
            foreign = [rng.randrange(first, self.rows) for _ in range(count)]
        return ids[:a] + foreign + ids[a:]


# --- what is opened ---

_EVENTS = {
    "open",
    "exec",
    "import",
    "pickle.find_class",
    "ctypes.dlopen",
    "glob.glob",
    "shutil.copyfile",
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.fork",
    "os.remove",
    "os.rename",
    "os.mkdir",
    "os.listdir",
    "os.scandir",
    "os.symlink",
    "os.link",
    "os.truncate",
    "socket.connect",
    "socket.bind",
    "socket.getaddrinfo",
    "urllib.Request",
    "webbrowser.open",
}
_watches: list[tuple[int, list[str]]] = []
_hooked = False


def _by_type_checker(frame: types.FrameType | None) -> bool:
    """Whether code runs for the type checker of the test run.

    It compiles a wrapper for every nested function, and evaluates annotations through `typing`.
    """
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("typing", "inspect"):
            return package in ("beartype", "jaxtyping")
        frame = frame.f_back
    return False


def _hear(event: str, arguments: tuple) -> None:
    if not _watches or event not in _EVENTS:
        return
    # The reader may keep what it knows of a video.
    # An open descriptor was opened as a file before.
    if str(video_index.folder()) in str(arguments) or isinstance(arguments[0], int):
        return
    if _by_type_checker(sys._getframe(1)):
        return
    for thread, heard in _watches:
        if thread == threading.get_ident():
            heard.append(f"{event} {arguments!r}"[:300])


@contextlib.contextmanager
def watch() -> Iterator[tuple[list[str], list[str]]]:
    """Record what this thread asks of the system meanwhile, and the videos it opens.

    Videos are recorded apart, because decord opens them without Python's knowledge. An audit hook
    cannot be removed, so there is one for all watches.
    """
    global _hooked
    if not _hooked:
        sys.addaudithook(_hear)
        _hooked = True
    heard: list[str] = []
    videos: list[str] = []

    def recording(real):
        def record(path, *rest, **fields):
            # A file object, or for decord a path.
            videos.append(str(getattr(path, "name", path)))
            return real(path, *rest, **fields)

        return record

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(av, "open", recording(av.open))
        if video.decord is not None:
            patch.setattr(video.decord, "VideoReader", recording(video.decord.VideoReader))
        mark = threading.get_ident(), heard
        _watches.append(mark)
        try:
            yield heard, videos
        finally:
            _watches.remove(mark)
            # Videos are opened as files, too.
            opened = tuple(f"open ({path!r}" for path in videos)
            heard[:] = [event for event in heard if not event.startswith(opened)]
