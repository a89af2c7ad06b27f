"""Prompts and scores of the mode against lmms-eval itself.

The oracle builds lmms-eval's own task objects on the same folders, in a process of its own.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from paravt_extras.lmms_eval.cache import Cache
from paravt_extras.lmms_eval.client import LmmsEval, seed_of
from paravt_extras.lmms_eval.tasks import TASKS
from rollout.evaluation.benchmarks import BENCHMARKS
from rollout.evaluation.benchmarks.tables import Row, read_rows
from tests.paravt_jax.benchmarks import published

pytestmark = pytest.mark.slow

ROWS = 40

ORACLE = """
import json, pathlib, random, sys

from lmms_eval.api.task import ConfigurableTask
from lmms_eval.utils import load_yaml_config
import lmms_eval
import lmms_eval.api.metrics  # registers the mean

given = json.load(open(sys.argv[1]))
folder = pathlib.Path(lmms_eval.__file__).parent / "tasks" / given["folder"]
(file,) = [f for f in folder.glob("*.yaml") if f"task: {given['task']}\\n" in f.read_text()]
config = load_yaml_config(yaml_path=str(file), mode="full")
config["dataset_path"] = given["format"]
config["dataset_kwargs"] = {"data_files": {config["test_split"]: given["table"]}}
config.pop("dataset_name", None)
task = ConfigurableTask(config=config, model_name="qwen3_vl")
prompts, results = [], []
for doc, answer, seed in zip(task.test_docs(), given["answers"], given["seeds"], strict=True):
    if given["columns"]:
        doc = {**doc, **given["columns"].pop(0)}
    prompts.append(task.doc_to_text(doc))
    random.seed(seed)
    results.append(task.process_results(doc, [answer]) if answer is not None else None)
scored = [result for result in results if result is not None]
metrics = {}
for name, function in task.aggregation().items():
    values = [result[name] for result in scored]
    takes_args = "args" in function.__code__.co_varnames
    metrics[name] = function(values, args=None) if takes_args else function(values)
plain = lambda value: value.item() if hasattr(value, "item") else str(value)
json.dump({"prompts": prompts, "results": results, "metrics": metrics}, open(sys.argv[2], "w"),
          default=plain)
"""
"""What lmms-eval makes of a table and of answers, with its own classes."""

LETTERS = "ABCDE"
WRITTEN = (
    "{}",
    "({})",
    "{}.",
    " {} \n",
    "**{}**",
    "The answer is {}.",
    "I would say {} because of the red car",
    "Option {}: the second one",
    "\\boxed{{{}}}",
    "First I thought A, but it is {}",
    "Answer: {}",
    "选{}",
    "the light goes on, nothing else can be seen in any of the many frames",
    "",
    "{} or B",
)
SPANS = (
    "The event happens in the 24.3 - 30.4 seconds.",
    "[20, 31.5]",
    "24.3 to 30.4",
    "0:24 - 0:30",
    "It starts at 24 seconds and ends at 30 seconds.",
    "30 - 20",
    "from second 3 until second 9",
    "I cannot tell",
    "",
    "start time: 25, end time: 29",
)


def real_python() -> str:
    """The interpreter of an environment with lmms-eval; the test is skipped where there is none."""
    python = os.environ.get("PARAVT_TEST_LMMS_EVAL")
    if not python:
        pytest.skip("PARAVT_TEST_LMMS_EVAL is not set: it names an interpreter with lmms-eval 0.7")
    return python


def rows_of(split: str) -> list[Row]:
    """Rows that differ in answers, numbers of options, groups and words."""
    rows: list[Row] = []
    for number in range(ROWS):
        letter = LETTERS[number % 4]
        words = f"What follows {number} steps – “after” the {{red}} car?"
        if split.startswith("videomme"):
            known = {"sub_category": "Astronomy", "domain": "Knowledge", "question": words}
            long = ("short", "medium", "long")[number % 3]
            row = published.videomme(
                f"{number:03}-1", f"v{number % 2}", letter, duration=long, **known
            )
        elif split == "longvideobench":
            options = ["a cat", "a dog", "a hat", "rain", "a car"][: 2 + number % 4]
            group = (15, 60, 600, 3600)[number % 4]
            row = published.longvideobench(
                f"v_{number}", "v.mp4", number % len(options), options, duration_group=group
            )
        elif split == "lvbench":
            row = published.lvbench(str(number), "v.mp4", letter)
        elif split == "mlvu":
            kind = ("plotQA", "needle", "ego", "count", "order")[number % 5]
            text = f"{words}\n(A) a cat\n(B) a dog\n(C) a hat\n(D) rain"
            row = published.mlvu("v.mp4", letter, question=text, task_type=kind)
        elif split == "mmvu":
            subject = ("Art", "Chemistry", "Computer_Science")[number % 3]
            row = published.mmvu(str(number), subject, number, open_ended=number % 8 == 7)
        elif split == "charades":
            row = published.charades("3MSZA.mp4", (number / 2, 25.0 + number), caption=words)
        else:
            row = published.cgbench(number, "v", LETTERS[number % 5])
        rows.append(row)
    return rows


def answers_to(split: str, rows: Sequence[Row]) -> list[str]:
    """One recorded answer per row; some are right, some wrong, some cannot be read."""
    if split == "charades":
        return [SPANS[number % len(SPANS)] for number in range(len(rows))]
    return [
        WRITTEN[number % len(WRITTEN)].format(LETTERS[(number // 2) % 4])
        for number in range(len(rows))
    ]


@pytest.fixture(scope="session")
def subtitled(small_world, tmp_path_factory) -> pathlib.Path:
    """The folder of Video-MME's videos, one of two with subtitles."""
    root = tmp_path_factory.mktemp("hub") / "videomme"
    for folder in ("data", "subtitle"):
        (root / folder).mkdir(parents=True)
    for number in (0, 1):
        source = small_world.folder / small_world.videos[number].path
        shutil.copy(source, root / "data" / f"v{number}.mp4")
    entries = (
        f"{i}\n00:00:{i:02},000 --> 00:00:{i + 1:02},500\n"
        f'<font color="white" size=".72c">line {i}, “quoted”</font>\n'
        for i in range(1, 30)
    )
    (root / "subtitle" / "v0.srt").write_text("\n".join(entries), encoding="utf-8")
    return root


def files_of(row: Row, root: pathlib.Path) -> dict[str, pathlib.Path]:
    names = (f"data/{row['videoID']}.mp4", f"subtitle/{row['videoID']}.srt")
    return {name: root / name for name in names if (root / name).exists()}


def oracle(split: str, table: pathlib.Path, hub: pathlib.Path, **given: Any) -> dict[str, Any]:
    """What lmms-eval's own classes make of the table."""
    python = real_python()
    task = TASKS[split]
    asked = table.parent / "asked.json"
    said = table.parent / "said.json"
    kind = "parquet" if table.suffix == ".parquet" else "json"
    given |= {"folder": task.folder, "task": task.name, "format": kind, "table": str(table)}
    asked.write_text(json.dumps(given))
    environment = {"HF_HOME": str(hub), "HF_HUB_OFFLINE": "1", "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [python, "-c", ORACLE, asked, said],
        env=environment | {"PYTHONUTF8": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(said.read_text())


@pytest.mark.parametrize("split", list(TASKS))
def test_prompts_scores_and_figures_are_those_of_lmms_eval(
    split, subtitled, tmp_path, capsys
) -> None:
    task = TASKS[split]
    published.write_split(split, tmp_path / "table", rows_of(split))
    table = tmp_path / "table" / published.FILES[split]
    benchmark = BENCHMARKS[split]
    rows = read_rows(str(tmp_path / "table"), benchmark.patterns, benchmark.fields)
    answers = answers_to(split, rows)

    with LmmsEval(real_python(), split, Cache(tmp_path / "cache")) as client:
        files = [files_of(row, subtitled) for row in rows] if task.subtitles else None
        prompts = client.prompts(rows, files)
        scored = [client.score(row, answer) for row, answer in zip(rows, answers, strict=True)]
        figures = client.aggregate([one.result for one in scored if one.result is not None])

    judged = [task.judged(row) for row in rows]
    theirs = oracle(
        split,
        table,
        subtitled.parent,
        answers=[None if skip else answer for skip, answer in zip(judged, answers, strict=True)],
        seeds=[
            seed_of(task.name, answer, task.row(row))
            for row, answer in zip(rows, answers, strict=True)
        ],
        columns=[
            {name: value for name, value in task.row(row).items() if name not in row}
            for row in rows
        ],
    )
    assert prompts == theirs["prompts"]
    if task.subtitles:
        assert ["line 3, “quoted”" in prompt for prompt in prompts[:2]] == [True, False]
    for one, result in zip(scored, theirs["results"], strict=True):
        if result is None:
            assert one.result is None
        else:
            assert one.result == {name: result[name] for name in figures}
    assert figures == theirs["metrics"]

    # The scores of questions average to the figure, except that some are means of groups.
    points = [one.score for one in scored if one.score is not None]
    assert 0 < sum(points) < len(points)
    if split not in ("mlvu", "longvideobench"):
        mean = sum(points) / len(points)
        assert mean == pytest.approx(figures[task.metric] / task.whole)
    with capsys.disabled():
        print(
            f"\n{split}: {len(prompts)} of {len(prompts)} prompts and {len(points)} of "
            f"{len(points)} scores equal; {task.metric} {figures[task.metric]:.4f} on both sides",
            file=sys.stderr,
        )
