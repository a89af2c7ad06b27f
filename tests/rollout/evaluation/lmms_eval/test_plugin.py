"""The model `paravt_jax` in lmms-eval's harness."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import pytest

from models.weights.hf import save
from paravt_jax.world.vocabulary import save_tokenizer as save_vocabulary
from tests.rollout.evaluation.lmms_eval import standin
from tests.rollout.evaluation.lmms_eval.test_real import real_python

ROOT = pathlib.Path(__file__).parents[4]

SERVER = """
import json, os, sys
for line in sys.stdin:
    asked = json.loads(line)
    if asked["do"] == "start":
        print("the engine's log", file=sys.stderr)
        wrong = asked["settings"].get("frames") == 0
        reply = {"error": "frames = 0: give 1 or more"} if wrong else {"ready": True}
        with open("started.json", "w") as file:
            json.dump(asked, file)
        print(json.dumps(reply), flush=True)
        continue
    for request in reversed(asked["requests"]):
        if request["text"] == "die":
            sys.exit("out of memory")
        reply = {"id": request["id"], "answer": " as written: " + request["text"]}
        if request["text"] == "bad":
            reply = {"id": request["id"], "name": request["name"], "error": "the video is noise"}
        print(json.dumps(reply), flush=True)
"""
"""Speaks like `serve`, without a model."""

HARNESS = """
import importlib.metadata, json, sys
from types import SimpleNamespace

(entry,) = importlib.metadata.entry_points(group="lmms_eval.models")
before = set(sys.modules)
manifest = entry.load()()
module, _, name = manifest.chat_class_path.rpartition(".")
ParaVT = getattr(__import__(module, fromlist=[name]), name)
loaded = set(sys.modules) - before

given = json.loads(sys.argv[1])
try:
    model = ParaVT.create_from_arg_string(given["arguments"], given["added"])
except ValueError as error:
    print(json.dumps({"error": str(error)}))
    sys.exit()

def messages(doc):
    if doc == "exit":
        sys.exit("there is no such video")
    if doc == "two":
        return [{"role": "user", "content": [{"type": "video", "url": "a"}] * 2}]
    if doc == "image":
        return [{"role": "user", "content": [{"type": "image", "url": "a"}]}]
    content = [{"type": "video", "url": "folder/v.mp4"}, {"type": "text", "text": doc}]
    return [{"role": "user", "content": content}]

docs = given["docs"]
model.task_dict = {"films": {"test": docs}}
requests = [
    SimpleNamespace(args=(doc, messages, {"max_new_tokens": 16}, number, "films", "test"))
    for number, doc in enumerate(docs)
]
answers = model.generate_until(requests)
model.clean()
print(json.dumps({
    "id": manifest.model_id, "simple": model.is_simple, "answers": answers,
    "cached": model.cache_hook.kept, "loaded": sorted(loaded),
}))
"""
"""Does what lmms-eval does with a model."""


def write_metadata(site: pathlib.Path) -> None:
    """What `pip install --no-deps` of this project leaves in an environment."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    folder = site / "paravt_jax-0.0.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Name: paravt-jax\nVersion: 0.0.0\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {place}" for name, place in points.items())]
    (folder / "entry_points.txt").write_text("\n".join(lines))
    (site / "paravt.pth").write_text(str(ROOT))


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> pathlib.Path:
    """An interpreter with the stand-in and this project, but without its dependencies."""
    folder = tmp_path_factory.mktemp("environment")
    python = standin.install(folder)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "ours.pth").unlink()
    write_metadata(site)
    return python


@pytest.fixture
def harness(environment, tmp_path):
    """harness(docs, **arguments) plays docs; returns what the harness saw, and its stderr."""
    server = tmp_path / "server.py"
    server.write_text(SERVER)
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{server}"\n')
    program.chmod(0o755)

    def play(docs, added=None, **arguments):
        arguments = {"python": program, "pretrained": "folder"} | arguments
        given = {
            "docs": docs,
            "arguments": ",".join(f"{name}={value}" for name, value in arguments.items()),
            "added": added or {},
        }
        done = subprocess.run(
            [environment, "-c", HARNESS, json.dumps(given)],
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], "PYTHONWARNINGS": "error"},
            capture_output=True,
            text=True,
            check=False,
        )
        found = json.loads(done.stdout) if done.stdout else None
        return found, done.stderr

    return play


def test_answers_come_back_in_order_and_unchanged(harness) -> None:
    found, _ = harness(["first", "second", "third"])
    assert found["id"] == "paravt_jax"
    assert not found["simple"]
    assert found["answers"] == [f" as written: {doc}" for doc in ("first", "second", "third")]
    assert found["cached"] == [
        [doc, {"max_new_tokens": 16}, answer]
        for doc, answer in zip(("first", "second", "third"), found["answers"], strict=True)
    ]


def test_the_plug_in_imports_nothing_but_the_standard_library_and_lmms_eval(harness) -> None:
    found, _ = harness(["first"])
    tops = {name.partition(".")[0] for name in found["loaded"]}
    assert "paravt_extras" in tops
    assert not tops - set(sys.stdlib_module_names) - {"paravt_extras", "lmms_eval"}


def test_a_bad_request_becomes_an_empty_answer_with_its_reason_in_the_log(harness) -> None:
    found, log = harness(["first", "bad", "exit", "two", "image", "last"])
    assert found["answers"] == [" as written: first", "", "", "", "", " as written: last"]
    assert "films/1: no answer, the video is noise" in log
    assert "films/2: no answer, SystemExit: there is no such video" in log
    assert "films/3: no answer, ValueError: 2 videos; one can be shown" in log
    assert "films/4: no answer, ValueError: a part of type image" in log
    assert "4 of 6 requests have no answer" in log


def test_options_reach_the_engine_and_its_log_is_shown(harness, tmp_path) -> None:
    _, log = harness(["first"], {"batch_size": 8, "device": "cuda:0"}, frames=32)
    started = json.loads((tmp_path / "started.json").read_text())
    assert started["model"] == "folder"
    assert started["settings"] == {"frames": 32, "episodes": 8}
    assert "the engine's log" in log


def test_wrong_options_and_interpreters_are_one_line(harness) -> None:
    assert harness([], frames=0)[0] == {"error": "--model_args: frames = 0: give 1 or more"}
    assert "python and pretrained are needed" in harness([], pretrained="")[0]["error"]
    assert re.match(
        "--model_args python=/no/python: .*No such file",
        harness([], python="/no/python")[0]["error"],
    )


def test_an_engine_that_dies_ends_the_run_with_its_last_words(harness) -> None:
    found, log = harness(["first", "die"])
    assert found is None
    last = log.strip().splitlines()[-1]
    assert last.startswith("paravt_jax, 0 of 2 requests answered: the engine stopped, ")
    assert "it ended with status 1: out of memory" in last
    assert "Traceback" not in log


# --- the real thing ---


TASK = """
task: apples
dataset_path: json
dataset_kwargs:
  data_files: {{test: {rows}}}
test_split: test
output_type: generate_until
doc_to_visual: !function utils.film
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
generation_kwargs: {{max_new_tokens: 16}}
process_results: !function utils.score
metric_list:
  - metric: apples_answered
    aggregation: mean
    higher_is_better: true
"""
TASK_UTILS = """
def film(doc):
    return [doc["film"]]


def score(doc, results):
    return {"apples_answered": float(bool(results[0]))}
"""


@pytest.mark.slow
def test_lmms_eval_plays_episodes_of_a_small_model(
    small_model, small_vocabulary, videos, tmp_path, capsys
) -> None:
    python = real_python()
    save_vocabulary(small_vocabulary.tokenizer, tmp_path / "tokenizer")
    save(small_model, tmp_path / "model", files=sorted((tmp_path / "tokenizer").iterdir()))
    shutil.copytree(videos / "data", tmp_path / "films")
    rows = [
        {"question": f"How many apples are there in {film.name}?", "answer": "", "film": str(film)}
        for film in [
            *sorted((tmp_path / "films").glob("w*.mp4")) * 2,
            tmp_path / "films" / "noise.mp4",
        ]
    ]
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "rows.json").write_text(json.dumps(rows))
    (tasks / "apples.yaml").write_text(TASK.format(rows=tasks / "rows.json"))
    (tasks / "utils.py").write_text(TASK_UTILS)
    write_metadata(tmp_path / "site")

    arguments = {
        "python": sys.executable,
        "pretrained": tmp_path / "model",
        "frames": 4,
        "turn_tokens": 16,
        "pin_think": False,  # noise would not close a thought, and so never answer
        "summary_tokens": 8,
        "trajectory_tokens": 128,
        "question_tokens": 64,
    }
    done = subprocess.run(
        [
            *(python, "-m", "lmms_eval", "--model", "paravt_jax", "--tasks", "apples"),
            *("--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())),
            *("--include_path", str(tasks), "--output_path", str(tmp_path / "results")),
            *("--log_samples", "--batch_size", "3"),
        ],
        cwd=tmp_path,
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), str(ROOT)]),
            "HF_HOME": str(tmp_path / "cache"),
            "HF_HUB_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    printed = done.stdout + done.stderr
    with capsys.disabled():
        print("\n" + "\n".join(line for line in done.stdout.splitlines() if "|" in line))
    assert done.returncode == 0, printed[-3000:]
    assert re.search(r"\|\s*apples\s*\|.*\|\s*apples_answered\s*\|.*\|\s*0\.8\s*\|", printed)
    (samples,) = (tmp_path / "results").rglob("*samples*.jsonl")
    answers = [json.loads(line)["filtered_resps"] for line in samples.read_text().splitlines()]
    assert len(answers) == 5
    assert all(answers[:4])
    assert answers[:2] == answers[2:4]  # the same films
    assert answers[4] == ""
    assert "apples/4: no answer" in printed
    assert "1 of 5 requests have no answer" in printed
