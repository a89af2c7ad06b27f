"""The report: one page from the files of a run, with all texts escaped."""

from __future__ import annotations

import base64
import html.parser
import io
import json
import math
import random
import re

import av
import numpy as np
import pytest
from PIL import Image

from paravt_extras.report.chart import line_chart, lines_chart, moving_mean
from paravt_extras.report.page import key_figures, write_report
from paravt_jax.data.stored import write_checked_json
from paravt_jax.method.records import CallStatus
from rollout.report.episode_card import EXECUTED
from rollout.report.templates import number

COLOURS = {
    "red": (196, 52, 52),
    "green": (52, 150, 70),
    "blue": (56, 92, 196),
    "purple": (132, 70, 168),
}
HOSTILE = "<script>alert('x')</script>\"&"


# --- a plausible run ---


def fake_video(path):
    """Writes 128 frames at 1 fps: four scenes of 32 s, each of one colour."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=1)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        for colour in COLOURS.values():
            frame = av.VideoFrame.from_ndarray(np.full((32, 32, 3), colour, np.uint8), "rgb24")
            for _ in range(32):
                container.mux(stream.encode(frame))
        container.mux(stream.encode())


def fake_metrics(rng):
    for phase, steps in (("align", 30), ("sft", 690)):
        for step in range(steps):
            yield {"phase": phase, "step": step, "wall": 0.0, "loss": 1 / (step + 1)}
    for step in range(48):
        yield {
            "phase": "rl",
            "step": step,
            "wall": 0.0,
            "accuracy": 0.36 + step / 100,
            "compliance": 0.26 + step / 100,
            "calls": 1.1 + step / 100,
            "reward/anchor": 0.2 + step / 100,
            "time/rollout": 11.1 + rng.random() / 3,
            "time/update": 1.9 + rng.random() / 4,
            "logprob_gap": 2e-6 + rng.random() * 1e-6,
            "token_mismatches": 0,
            "grad_norm": 1 + rng.random(),
        }


def fake_result():
    def entries(accuracy):
        for dispatch in ("parallel", "sequential", "none"):
            for temperature in (0.7, 0.0):
                for k in (4, 16, 64):
                    yield {
                        "k": k,
                        "dispatch": dispatch,
                        "temperature": temperature,
                        "accuracy": accuracy + k / 1000,
                        "compliance": accuracy,
                        "calls": 0.0 if dispatch == "none" else 1.9,
                        "turns": 2.0,
                        "n": 192,
                    }

    return {
        "before": list(entries(0.4)),
        "after": list(entries(0.8)),
        "token_mismatches": 0,
        "logprob_gap": 2.4e-6,
        "recompilations_after_warmup": 0,
        "seconds": 734.0,
    }


def token(text, author="model", kind=None, credit=None, logprob=None):
    return {"text": text, "author": author, "kind": kind, "credit": credit, "logprob": logprob}


def fake_episode(rng, phase, step, n, video, k):
    """Two crops and an answer. Every third answer is a time."""
    colour = rng.choice(list(COLOURS))
    scene = 32 * list(COLOURS).index(colour)
    grounding = n % 3 == 2
    answer = f"[{scene + 3}, {scene + 6}]" if grounding else "seven"

    def model(text, kind=None):
        return token(text, kind=kind, credit=0.5, logprob=-0.25)

    calls = [
        {
            "start": float(start),
            "end": start + 16.0,
            "status": "executed",
            "times": [float(t) for t in range(start, start + 16)],
            "response": "digit seven" if start == scene else "nothing",
        }
        for start in (scene, scene + 16)
    ]
    first = [token("<think>", "pinned", "think-open"), model(" look"), model("</think>")]
    for call in calls:
        inner = json.dumps({"start_time": call["start"], "end_time": call["end"]})
        first += [model("<tool_call>", "call-open"), model(inner), model("</tool_call>")]
    last = [token(f"<tool_response>{call['response']}</tool_response>", "tool") for call in calls]
    last += [model("<answer>", "answer-open"), model(answer), model("</answer>", "answer-close")]
    return {
        "phase": phase,
        "step": step,
        "video": video,
        "k": k,
        "dispatch": "parallel",
        "temperature": 0.7,
        "question": {
            "id": f"q{n}",
            "kind": "tvg" if grounding else "mcq",
            "answer": answer,
            "text": f"{'When does the' if grounding else 'Which'} digit appear in {colour}?",
            "options": [] if grounding else ["four", "seven", "two", "nine"],
        },
        "overview": [float(i) for i in np.round(np.linspace(0, 127, k))],
        "turns": [{"tokens": first, "calls": calls}, {"tokens": last, "calls": []}],
        "answer": answer,
        "stop": "answered",
        "compliant": True,
        "rewards": {"accuracy": 1.0, "compliance": 1.0, "anchor": 0.35, "total": 3.0},
    }


def write_lines(path, entries):
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def fake_run(folder, seed=0, videos=3):
    """A directory with the files of a finished run."""
    rng = random.Random(seed)
    names = [f"videos/held-{i}.mp4" for i in range(videos)]
    for name in names:
        fake_video(folder / name)
    stages = ["before"] * 8 + ["rl"] * 30 + ["after"] * 8
    episodes = [
        fake_episode(rng, phase, max(0, n - 8), n, rng.choice(names), (4, 16, 64)[n % 3])
        for n, phase in enumerate(stages)
    ]
    write_lines(folder / "metrics.jsonl", fake_metrics(rng))
    write_lines(folder / "episodes.jsonl", episodes)
    (folder / "result.json").write_text(json.dumps(fake_result()))
    config = {"name": "paravt_tiny", "seed": seed, "rl": {"group_size": 8, "temperature": 0.7}}
    write_checked_json(folder / "config.json", config)
    return folder


# --- reading the page ---


class Page(html.parser.HTMLParser):
    """The elements of a page with their attributes and texts; asserts that tags are balanced."""

    def __init__(self, source):
        super().__init__()
        self.elements, self.open, self.source = [], [], source
        self.feed(source)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        element = {"tag": tag, "text": "", **{key.rstrip(): value for key, value in attrs}}
        self.elements.append(element)
        if tag not in {"img", "meta"}:
            self.open.append(element)

    def handle_endtag(self, tag):
        assert self.open.pop()["tag"] == tag

    def handle_data(self, data):
        """Ignores white space of the template; inside <pre> it belongs to the text."""
        if data.strip() or any(element["tag"] == "pre" for element in self.open):
            for element in self.open:
                element["text"] += data

    def all(self, tag=None, class_=None):
        named = [e for e in self.elements if tag in (None, e["tag"])]
        return [e for e in named if class_ is None or class_ in (e.get("class") or "").split()]


def page_of(folder):
    return Page(write_report(folder).read_text())


def pixels(uri):
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.split(",")[1]))).convert("RGB"))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return fake_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def page(run):
    return page_of(run)


def test_the_page_loads_nothing(page):
    assert not page.all("script")
    assert not page.all("link")
    assert "@import" not in page.source
    for element in page.elements:
        for target in (element.get("src"), element.get("href")):
            assert not target or target.startswith(("data:image/", "#"))
    assert not re.search(r"url\(|https?:", page.source)


def test_key_figures_are_means_over_k_and_the_gain_at_the_smallest():
    def entry(k, dispatch, accuracy, temperature=0.7, calls=1.0):
        setting = {"k": k, "dispatch": dispatch, "temperature": temperature}
        return setting | {"accuracy": accuracy, "compliance": accuracy, "calls": calls}

    before = [
        entry(4, "parallel", 0.25, calls=0.5),
        entry(64, "parallel", 0.75),
        entry(4, "none", 0.125),
        entry(64, "none", 0.7),
        entry(4, "parallel", 1.0, 0.0),
    ]
    after = [entry(4, "parallel", 0.75, calls=2.0), entry(64, "parallel", 1.0)]
    figures = {title: (a, b) for title, _, a, b in key_figures({"before": before, "after": after})}
    assert figures["accuracy"] == (0.5, 0.875)
    assert figures["calls per rollout κ"] == (0.5, 2.0)
    assert figures["gain by crops"] == (0.125, None)
    assert key_figures({}) == []


@pytest.mark.parametrize(("dtype", "bad"), [("float32", 2), ("bfloat16", 1)])
def test_a_rule_that_is_not_met_is_marked_and_the_gap_has_one_in_float32_only(dtype, bad, tmp_path):
    write_checked_json(tmp_path / "config.json", {"model": {"dtype": dtype}})
    checks = {"token_mismatches": 3, "logprob_gap": 2e-3, "recompilations_after_warmup": 0}
    (tmp_path / "result.json").write_text(json.dumps({"before": [], "after": []} | checks))
    page = page_of(tmp_path)
    assert [len(page.all("span", kind)) for kind in ("fact", "good", "bad")] == [3, 1, bad]


def test_exactly_the_recorded_metrics_have_charts(page):
    names = [e["text"] for e in page.all("span", "name")]
    assert {
        "accuracy",
        "compliance",
        "calls per rollout κ",
        "reward: anchor",
        "log-prob gap",
        "seconds by phase",
    } <= set(names)
    assert "grad norm" in names, "recorded, and without a curve of its own"
    assert "turns per rollout" not in names, "not recorded"
    assert len(names) == len(page.all("svg", "chart"))


def test_episodes_are_about_twenty_and_from_every_stage(page):
    assert len(page.all("details", "episode")) == 21
    assert [e["text"] for e in page.all("h3")][-3:] == [
        f"{when} reinforcement learning" for when in ("Before", "During", "After")
    ]


def one_episode(folder, **changes):
    fake_video(folder / "videos/v.mp4")
    episode = fake_episode(random.Random(1), "after", 0, 0, "videos/v.mp4", 4) | changes
    write_lines(folder / "episodes.jsonl", [episode])
    return episode


def test_frames_are_shown_for_the_right_times(tmp_path):
    episode = one_episode(tmp_path)
    images = page_of(tmp_path).all("img")
    assert [e["alt"] for e in images][:4] == [f"frame at {t:g} s" for t in episode["overview"]]
    assert len(images) == 4 + 2 * 16
    shown = [pixels(e["src"])[2, 2] for e in images[:4]]
    for pixel, colour in zip(shown, COLOURS.values(), strict=True):
        assert np.abs(pixel.astype(int) - colour).max() < 40


def test_tokens_are_shown_with_kind_credit_and_log_prob(tmp_path):
    tokens = [
        token("<think>", "pinned", "think-open"),
        token(" a\n  b", credit=0.0, logprob=-0.25),
        token("</think>", kind="think-close", credit=0.5, logprob=-0.5),
        token("x", kind="violation", credit=-1.0, logprob=-2.0),
    ]
    one_episode(tmp_path, turns=[{"tokens": tokens, "calls": []}])
    page = page_of(tmp_path)
    [block] = page.all("pre", "tokens")
    assert block["text"] == "<think> a\n  b</think>x"
    spans = {e["text"]: e for e in page.all("span") if e.get("title")}
    assert spans["</think>"]["class"] == "by-model kind k-think up"
    assert spans["</think>"]["title"] == "model · think-close · credit 0.5 · log-prob −0.5"
    assert spans["x"]["class"] == "by-model kind k-violation down"
    assert spans["x"]["style"] == "--c:0.55"
    assert spans[" a\n  b"]["class"] == "by-model"
    assert spans[" a\n  b"].get("style") is None


def test_executed_calls_are_marked():
    assert set(EXECUTED) == {str(s) for s in CallStatus if s.executed}


def test_hostile_texts_are_escaped(tmp_path):
    question = dict.fromkeys(("id", "text", "answer"), HOSTILE) | {"kind": "mcq"}
    call = {"start": None, "end": None, "status": HOSTILE, "times": [], "response": HOSTILE}
    turn = {"tokens": [token(HOSTILE, author=HOSTILE, kind=HOSTILE)], "calls": [call]}
    one_episode(
        tmp_path,
        question=question | {"options": [HOSTILE, "b"]},
        turns=[turn],
        rewards={HOSTILE: 1.0},
        **dict.fromkeys(("answer", "stop", "dispatch"), HOSTILE),
    )
    write_checked_json(tmp_path / "config.json", {"name": HOSTILE, "note": HOSTILE})
    write_lines(tmp_path / "metrics.jsonl", [{"phase": "rl", "step": 0, "wall": 0.0, HOSTILE: 1.0}])
    entry = fake_result()["after"][0] | {"dispatch": HOSTILE}
    (tmp_path / "result.json").write_text(json.dumps({"before": [], "after": [entry]}))
    page = page_of(tmp_path)
    assert not page.all("script")
    assert page.all("h1")[0]["text"] == HOSTILE
    assert page.all("pre", "tokens")[0]["text"] == HOSTILE
    assert page.all("blockquote")[0]["text"] == HOSTILE


@pytest.mark.parametrize("content", [None, b"no video at all"])
def test_an_unreadable_video_is_reported_on_an_otherwise_complete_page(tmp_path, content):
    one_episode(tmp_path)
    video = tmp_path / "videos/v.mp4"
    video.unlink() if content is None else video.write_bytes(content)
    page = page_of(tmp_path)
    assert not page.all("img")
    assert "v.mp4" in page.all("p", "unreadable")[0]["text"]
    assert str(tmp_path) not in page.source
    assert len(page.all("blockquote")) == 2


def test_an_empty_run_has_a_page_with_a_note_in_each_part(tmp_path):
    page = page_of(tmp_path)
    format_ = "Do calls pay, and does the format hold?"
    parts = ["What was learned", format_, "Curves", "Evaluation", "Episodes"]
    assert [e["text"] for e in page.all("h2")] == parts
    assert len(page.all("p", "quiet")) == 6


# --- the page of an unfinished run ---


def unfinished_run(folder, last_step=20):
    """A directory with the files of a run that is at a step of RL; two steps were evaluated."""
    fake_run(folder)
    (folder / "result.json").unlink()
    config = {"name": "paravt_tiny", "align": {"steps": 30}, "rl": {"steps": 48}}
    write_checked_json(folder / "config.json", config)
    entries = [
        entry | {"wall": 1.7e9, "recompilations": 0.0}
        for entry in fake_metrics(random.Random(0))
        if entry["phase"] != "rl" or entry["step"] <= last_step
    ]
    write_lines(folder / "metrics.jsonl", entries)
    (folder / "evaluation").mkdir()
    result = fake_result()
    for k in (4, 16, 64):
        before = [entry for entry in result["before"] if entry["k"] == k]
        greedy = [entry for entry in before if not entry["temperature"]][:1]
        for name, phase, step, rows in (
            ("before", "sft", 1, before),
            ("curve-000008", "rl", 8, greedy),
            ("curve-000016", "rl", 16, greedy),
        ):
            content = {"phase": phase, "step": step, "rows": rows, "episodes": []}
            write_checked_json(folder / "evaluation" / f"{name}-{k}.json", content)
    return folder


def test_the_page_of_an_unfinished_run_shows_how_far_it_is(tmp_path):
    page = page_of(unfinished_run(tmp_path))
    [progress] = page.all("p", "progress")
    assert "PARA-GRPO 20 (2023-11-14 22:13 UTC)" in progress["text"]
    tiles = [e["text"] for e in page.all("div", "tile")]
    assert tiles[0].startswith("accuracy0.428 → –")
    assert not (tmp_path / "result.json").exists()
    charts = [e["text"] for e in page.all("figure") if "K = 16" in e["text"]]
    assert all(re.search(r"0\s*step\s*16", text) for text in charts)


# --- charts and numbers ---


def lines(chart):
    """The strokes of a chart besides its grid, each as points from left to right."""
    drawn = re.findall(r'<path d="([^"]+)"[^>]*stroke: var\(--(?!line)', chart.svg)
    return [
        [tuple(map(float, pair)) for pair in re.findall(r"[ML] (\S+) (\S+)", stroke)]
        for path in drawn
        for stroke in re.split(r"(?=M)", path)
        if stroke
    ]


def test_a_gap_in_the_data_is_a_gap_in_the_line():
    chart = line_chart([(0, 1.0), (1, 2.0), (2, None), (3, 2.0), (4, 3.0), (5, None), (6, 1.0)])
    lengths = [len(set(stroke)) for stroke in lines(chart)]
    assert sorted(length for length in lengths if length > 1) == [2, 2]
    assert 1 in lengths, "a dot"


def test_the_axis_includes_the_data_and_the_given_bounds():
    def labels(chart):
        return re.findall(r">([^<>]+)</text>", chart.svg)

    assert labels(line_chart([(0, 0.2), (1, 0.4)], 0, 1)) == ["0", "step", "1", "0", "0.5", "1"]
    [line] = lines(line_chart([(0, -5.0), (10, 120.0)], 0, 1))
    assert all(0 <= y <= 150 for _, y in line)
    assert line[0][1] > line[1][1]


def test_the_mean_of_a_window_leaves_gaps_and_ignores_them():
    mean = moving_mean(np.array([1.0, 3.0, np.nan, 8.0, 4.0]), 1)
    np.testing.assert_array_equal(mean, [2.0, 2.0, np.nan, 6.0, 6.0])


@pytest.mark.parametrize(
    "values", [[0.0], [5.0], [0.0, 0.0], [-2.0, -2.0], [1e-9, 1e-9, 2e-9], [1e9, 3e9], [1.0] * 999]
)
def test_charts_of_flat_tiny_single_and_long_data(values):
    points, gaps = list(enumerate(values)), [(step, None) for step in range(len(values))]
    for chart in (line_chart(points), lines_chart([("a", points), ("b", gaps)], 0.0, 0.0)):
        assert "ffffff" not in chart.svg, "the background is that of the page, light or dark"
        assert "nan" not in chart.svg and "inf" not in chart.svg
        assert len(chart.svg) < 40_000


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.8126, "0.813"),
        (12.51, "12.5"),
        (1240, "1,240"),
        (3.1e-6, "3.1e−6"),
        (-0.5, "−0.5"),
        (0, "0"),
        (None, "–"),
        (math.nan, "–"),
    ],
)
def test_numbers_are_short(value, text):
    assert number(value) == text
