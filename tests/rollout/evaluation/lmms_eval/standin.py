"""A package laid out like lmms-eval, with texts and scores of its own, in a new environment.

It has one task per split. Its prompts, its scores and its figures are easy to predict.
"""

from __future__ import annotations

import json
import pathlib
import sysconfig
import venv

from paravt_extras.lmms_eval.tasks import TASKS

_UTILS = """
import importlib.util
import os

import yaml


def _function(loader, node):
    module, _, name = loader.construct_scalar(node).partition(".")
    file = os.path.join(os.path.dirname(loader.name), module + ".py")
    spec = importlib.util.spec_from_file_location(module, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def load_yaml_config(yaml_path, mode):
    yaml.add_constructor("!function", _function)
    with open(yaml_path, "rb") as file:
        return yaml.full_load(file)
"""

_REGISTRY = """
REGISTRY = {}


def get_aggregation(name):
    return REGISTRY.get(name)
"""

_METRICS = """
from lmms_eval.api.registry import REGISTRY

REGISTRY["mean"] = lambda values: sum(values) / len(values)
"""

_MODEL = """
raise ImportError("this file is only read")


class Qwen3_VL:
    def __init__(self, pretrained, frames=3, system_prompt="Be quick."):
        pass
"""

_HARNESS_MODEL = """
class Hook:
    def __init__(self):
        self.kept = []

    def add_partial(self, name, request, answer):
        self.kept.append([*request, answer])


class lmms:
    is_simple = True

    def __init__(self):
        self.cache_hook = Hook()
        self.task_dict = {}

    @classmethod
    def create_from_arg_string(cls, text, added):
        given = dict(pair.split("=") for pair in text.split(",") if pair)
        given = {name: int(value) if value.isdigit() else value for name, value in given.items()}
        return cls(**given, **added)

    def clean(self):
        pass
"""

_MANIFEST = """
from dataclasses import dataclass


@dataclass
class ModelManifest:
    model_id: str
    chat_class_path: str
"""

_TASK = """
task: {name}
dataset_path: stand-in/{name}
dataset_kwargs: {{cache_dir: kept}}
test_split: test
doc_to_text: !function utils.text
process_results: !function utils.results
generation_kwargs: {{max_new_tokens: 16}}
metric_list:
  - metric: {metric}
    aggregation: {aggregation}
lmms_eval_specific_kwargs:
  default: {{head: "For all: ", tail: "?"}}
{specific}
"""

_TASK_UTILS = """
import os
import random
import socket

print("a library that prints")
os.write(1, b"and one that writes\\n")


def text(doc, lmms_eval_specific_kwargs):
    kwargs = lmms_eval_specific_kwargs
    words = doc["caption"] if "caption" in doc else doc["question"]
    if kwargs.get("subtitles"):
        folder = os.path.join(os.environ["HF_HOME"], "kept")
        assert os.path.exists(os.path.join(folder, "data", doc["videoID"] + ".mp4"))
        with open(os.path.join(folder, "subtitle", doc["videoID"] + ".srt")) as file:
            words = file.read() + words
    return kwargs["head"] + words + kwargs["tail"]


def results(doc, results):
    answer = str(doc.get("answer", doc.get("right_answer", doc.get("correct_choice", ""))))
    found = results[0]
    if found == "ask a judge":
        try:
            socket.create_connection(("127.0.0.1", 9))
        except OSError:
            pass
    if found == "unreadable":
        found = random.choice("ABCD")
    if found == "leave":
        raise SystemExit("no such file")
    entry = {
        "score": found == answer, "correct": found == answer, "answer": answer,
        "pred_answer": found, "parsed_pred": found,
    }
    return {METRIC: entry["score"] if METRIC == "lvbench_score" else entry, "other": "x"}


def total(results, args):
    return WHOLE * sum(result["score"] for result in results) / len(results)
"""


def install(folder: pathlib.Path, version: str = "0.7.3") -> pathlib.Path:
    """Make an environment with the stand-in. Returns the path of its interpreter."""
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    # The stand-in needs PyYAML, as lmms-eval does.
    (site / "ours.pth").write_text(sysconfig.get_path("purelib"))
    write_package(site, version)
    return folder / "bin" / "python"


def write_package(site: pathlib.Path, version: str = "0.7.3") -> None:
    """Write the package and its metadata."""
    _write(
        site / f"lmms_eval-{version}.dist-info" / "METADATA",
        f"Name: lmms_eval\nVersion: {version}\n",
    )
    root = site / "lmms_eval"
    _write(root / "__init__.py", "")
    _write(root / "utils.py", _UTILS)
    _write(root / "api" / "__init__.py", "")
    _write(root / "api" / "registry.py", _REGISTRY)
    _write(root / "api" / "metrics.py", _METRICS)
    _write(root / "api" / "model.py", _HARNESS_MODEL)
    _write(root / "models" / "registry_v2.py", _MANIFEST)
    _write(root / "models" / "simple" / "qwen3_vl.py", _MODEL)
    for split, task in TASKS.items():
        specific = ""
        if split == "videomme":
            specific = '  qwen3_vl: {head: "For Qwen: ", tail: "!"}'
        if task.subtitles:
            specific = '  qwen3_vl: {head: "", tail: "", subtitles: true}'
        averaged = task.metric == "lvbench_score"
        aggregation = "mean" if averaged else "!function utils.total"
        here = root / "tasks" / task.folder
        _write(
            here / f"{task.name}.yaml",
            _TASK.format(
                name=task.name, metric=task.metric, aggregation=aggregation, specific=specific
            ),
        )
        head = f"METRIC = {json.dumps(task.metric)}\nWHOLE = {task.whole}\n"
        _write(here / "utils.py", head + _TASK_UTILS)


def _write(file: pathlib.Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
