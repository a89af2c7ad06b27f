"""What README.md and docs/*.md show runs as it stands, on a tiny model and two small videos.

Blocks are executed from the pages' own text. A page's Python blocks share one namespace, like the
cells of a notebook. Training is not started here; commands are parsed and go no further.
"""

from __future__ import annotations

import argparse
import importlib.util
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tyro
from flax import nnx

from models.features import FrameSettings
from models.model import VisionLanguageModel
from paravt_jax.data import tokenizer_file
from paravt_jax.method.tokenizer import Vocabulary
from train.model_folder import write_model
from train.settings import Run

ROOT = pathlib.Path(__file__).parents[1]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}
# What shell blocks leave to the reader, or to the shell.
VARIABLES = {
    "$seed": "0",
    "$i": "0",
    "$*": "",
    "$DATA": "--data.folder data/paravt",
}


def blocks(page: str, language: str) -> list[str]:
    """The page's fenced blocks of a language.

    Empty lines stand for the text before a block, so that an error names the page's line.
    """
    found = re.finditer(rf"^```{language}\n(.*?)^```$", PAGES[page], re.DOTALL | re.MULTILINE)
    return ["\n" * PAGES[page].count("\n", 0, match.start(1)) + match[1] for match in found]


def python_blocks(page: str) -> list[str]:
    return [block for block in blocks(page, "python") if not block.lstrip().startswith("!")]


def shell_blocks(page: str) -> list[str]:
    """The page's blocks for a shell, and for one called from a notebook."""
    cells = [block.lstrip() for block in blocks(page, "python")]
    return [*blocks(page, "bash"), *(cell[1:] for cell in cells if cell.startswith("!"))]


def commands() -> list[str]:
    """The arguments of every `python -m` in a shell block, as one line of text that starts with the
    module."""
    found = []
    for page in PAGES:
        for block in shell_blocks(page):
            for command in re.findall(r"python -m ([^\n#;&|>]+)", block.replace("\\\n", " ")):
                for name, value in VARIABLES.items():
                    command = command.replace(name, value)
                if command.count('"') % 2:  # the command stands in quotes
                    command = command.rpartition('"')[0]
                found.append(command.strip())
    return sorted(set(found))


@pytest.fixture(scope="module")
def model_folder(
    small_model: VisionLanguageModel,
    small_vocabulary: Vocabulary,
    tmp_path_factory: pytest.TempPathFactory,
) -> pathlib.Path:
    """A model that ends every response at once, with its tokenizer and processor files."""
    folder = tmp_path_factory.mktemp("quiet")
    tokenizer_file.save(small_vocabulary, folder / "tokenizer")
    model = nnx.clone(small_model)
    # All tokens agree in one direction of the residual stream, and the end has the most of it.
    embedding = np.array(model.text.embedding[...])
    embedding[:, 0] = 20.0
    embedding[small_vocabulary.eos, 0] = 2000.0
    model.text.embedding[...] = jnp.asarray(embedding)
    write_model(model, folder / "tokenizer", FrameSettings(), folder / "model")
    return folder / "model"


@pytest.fixture
def workspace(model_folder, small_world, tmp_path, monkeypatch) -> pathlib.Path:
    """A working directory with every file that the pages speak of."""
    for place in ("runs/paravt_tiny/model", "runs/mine/model", "Qwen/Qwen3-VL-8B-Instruct"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).symlink_to(model_folder)
    (tmp_path / "runs/paravt_tiny/videos").symlink_to(small_world.folder)
    (tmp_path / "videos").mkdir()
    for name, video in zip(("match.mp4", "talk.mp4"), small_world.videos, strict=False):
        shutil.copy(small_world.folder / video.path, tmp_path / "videos" / name)
    (tmp_path / "videos/talk.srt").write_text("1\n00:00:01,000 --> 00:00:02,000\nGood morning\n")
    (questions,) = blocks("docs/evaluation.md", "jsonl")
    (tmp_path / "my.jsonl").write_text(questions.lstrip())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run_page(workspace, monkeypatch) -> Callable[[str], tuple[dict[str, Any], list[Any]]]:
    """run_page(page) executes its Python blocks; gives their names, and the arguments with which
    training would have been started."""

    def execute(page: str) -> tuple[dict[str, Any], list[Any]]:
        started: list[Any] = []
        monkeypatch.setattr(
            "train.run.execute", lambda run, questions=None: started.append((run, questions))
        )
        namespace: dict[str, Any] = {"__name__": "page"}
        for block in python_blocks(page):
            exec(compile(block, page, "exec"), namespace)
        return namespace, started

    return execute


def test_the_readme_asks_about_a_video(run_page):
    names, _ = run_page("README.md")
    assert names["episode"].question.text == names["question"]


def test_model_and_engine_are_used_as_docs_model_says(run_page, workspace):
    names, _ = run_page("docs/model.md")
    assert (workspace / "exported/model.safetensors").is_file()
    assert not names["first"].versions.any() and len(names["others"]) == 3
    assert len(names["request"].frames) == 4


def test_a_recipe_of_your_own_is_made_as_docs_training_says(run_page):
    names, started = run_page("docs/training.md")
    (run, _), (adapted, _) = started
    assert isinstance(run, Run) and run.name == "mine"
    assert run.rl is not None and run.rl.rewards.judge == names["judge"]
    assert adapted.lora is not None and adapted.lora.rank == 16


def test_own_questions_reach_training_as_docs_data_says(run_page):
    names, started = run_page("docs/data.md")
    ((laptop, questions),) = started
    assert questions == names["questions"] and {q.video for q in questions} > {"match.mp4"}
    assert laptop.model.path == "runs/paravt_tiny/model" and laptop.model.size == "tiny"
    assert laptop.data.media == "videos" and laptop.sft is None


def test_own_questions_are_evaluated_as_docs_evaluation_says(run_page, workspace):
    names, _ = run_page("docs/evaluation.md")
    assert names["summary"]["n"] == 1
    assert (workspace / "evaluations/goal/summary.json").is_file()


def anchors(page: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", PAGES[page], re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page):
    folder = (ROOT / page).parent
    for link in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (folder / path).resolve() if path else ROOT / page
        assert target.exists(), link
        assert not anchor or anchor in anchors(str(target.relative_to(ROOT))), link


def test_source_files_that_the_pages_name_exist():
    tops = "paravt_jax|models|rollout|train|configs|paravt_extras|examples|benchmarks|tests"
    for page, text in PAGES.items():
        named = re.findall(rf"`((?:{tops})/[\w/.-]+)`", text)
        assert not [path for path in named if not (ROOT / path).exists()], page


def test_the_pages_stay_short():
    assert sum(len(text.split()) for text in PAGES.values()) <= 20_000
    assert PAGES["README.md"].count("\n") <= 120


@pytest.mark.parametrize("page", [page for page in PAGES if shell_blocks(page)])
def test_shell_blocks_are_shell(page):
    for block in shell_blocks(page):
        checked = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True)
        assert checked.returncode == 0, checked.stderr


def test_modules_that_the_pages_run_exist():
    named = {name for text in PAGES.values() for name in re.findall(r"python -m ([\w.]+\w)", text)}
    assert len(named) > 10
    assert not [name for name in named if importlib.util.find_spec(name) is None]


# Rows of README's result table, and the rows of docs/results.md with their cells; None: not there.
RESULT_ROWS = {
    "accuracy": ("accuracy before", "accuracy after"),
    "crops per question, no overview frame shows the answer": (
        None,
        "calls after, answer not shown",
    ),
    "crops per multiple-choice question, a frame shows the answer": (
        None,
        "calls after, choice, answer shown",
    ),
    "accuracy, sampled at temperature 0.7": ("accuracy before, sampled", "accuracy after, sampled"),
    "rollouts in the correct format, sampled": (
        "compliance before, sampled",
        "compliance after, sampled",
    ),
}


def result_table(page: str, heading: str, columns: int) -> dict[str, list[str]]:
    """The cells of a section's tables with so many columns, by their first one."""
    _, _, section = PAGES[page].partition(f"\n## {heading}\n")
    section, _, _ = section.partition("\n## ")
    lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    tables = [[cell.strip(" *") for cell in cells] for cells in lines if len(cells) == columns]
    return {name: cells for name, *cells in tables if "---" not in name and name}


def test_the_readme_shows_the_figures_of_docs_results():
    shown = result_table("README.md", "Result", 3)
    measured = result_table("docs/results.md", "The tiny run", 5)
    assert shown.keys() == RESULT_ROWS.keys()
    for row, names in RESULT_ROWS.items():
        for cell, name in zip(shown[row], names, strict=True):
            assert name is None or cell == measured[name][-1], (row, name)


class Parsed(BaseException):
    """A command has understood its arguments."""


@pytest.mark.parametrize("command", [command for command in commands() if " --" in command])
def test_a_command_knows_its_flags(command, monkeypatch):
    def then_stop(parse: Callable[..., Any]) -> Callable[..., Any]:
        def parse_and_stop(*args: Any, **fields: Any) -> None:
            parse(*args, **fields)
            raise Parsed

        return parse_and_stop

    module, *arguments = shlex.split(command)
    monkeypatch.setattr(tyro, "cli", then_stop(tyro.cli))
    monkeypatch.setattr(
        argparse.ArgumentParser, "parse_args", then_stop(argparse.ArgumentParser.parse_args)
    )
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    imported = importlib.import_module(module)
    if hasattr(imported, "__path__"):  # a package, whose command is its __main__
        imported = importlib.import_module(f"{module}.__main__")
    with pytest.raises(Parsed):
        imported.main()
