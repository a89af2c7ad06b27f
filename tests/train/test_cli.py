"""The command line: recipes, overrides, and the answer to each mistake."""

from __future__ import annotations

import dataclasses
import pathlib
import subprocess
import sys

import pytest

from train import cli


@dataclasses.dataclass(frozen=True)
class Rl:
    group_size: int = 8
    """Rollouts per prompt."""
    frames: tuple[int, ...] = (4, 8)
    kl: float | None = None

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise ValueError(f"rl.group_size is {self.group_size}; give at least 2")


@dataclasses.dataclass(frozen=True)
class Run:
    """A toy run."""

    rl: Rl = Rl()
    reference: Rl | None = None
    run_dir: str = "runs/toy"
    resume: bool = True


def tiny() -> Run:
    """The laptop's recipe.

    More details.
    """
    return Run(rl=Rl(group_size=4))


def large() -> Run:
    """The pod's recipe."""
    return Run()


RECIPES = {"tiny_recipe": tiny, "large_recipe": large}


def words(text: str) -> str:
    """Text without tyro's frames and line breaks."""
    return " ".join(text.replace("│", " ").split())


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Parses a wrong command line; returns the message on stderr."""
    with pytest.raises(SystemExit) as stop:
        cli.parse(argv, RECIPES)
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    return words(err)


@pytest.mark.parametrize("config", [("--config=tiny_recipe",), ("--config", "tiny_recipe")])
def test_a_recipe_without_overrides_is_itself(config: tuple[str, ...]) -> None:
    assert cli.parse(config, RECIPES) == tiny()


def test_overrides_reach_nested_fields_and_leave_the_rest() -> None:
    line = "--rl.frames 4 16 --config=tiny_recipe --rl.kl 0.01 --run-dir elsewhere --no-resume"
    assert cli.parse(line.split(), RECIPES) == Run(
        rl=Rl(group_size=4, frames=(4, 16), kl=0.01), run_dir="elsewhere", resume=False
    )


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (("--rl.grop-size", "4"), ("--rl.grop-size", "Perhaps you meant", "--rl.group-size INT")),
        (("--rl.group-size", "four"), ("--rl.group-size", "four", "INT")),
        (("--rl.group-size",), ("--rl.group-size", "Missing value")),
        (("--rl.kl", "small"), ("--rl.kl", "small", "FLOAT")),
        (("--rl.group-size", "1"), ("rl.group_size is 1", "give at least 2")),
    ],
)
def test_a_wrong_field_or_value_is_named_with_the_rule(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    message = refused(capsys, "--config=tiny_recipe", *argv)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (
            ["--config=tiny_recipe", "--help"],
            "--rl.group-size INT Rollouts per prompt. (default: 4)",
        ),
        (["--help"], "tiny_recipe The laptop's recipe. large_recipe The pod's recipe."),
    ],
    ids=["of a recipe, with its values", "without a recipe, the list of recipes"],
)
def test_help(capsys: pytest.CaptureFixture[str], argv: list[str], part: str) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.parse(argv, RECIPES)
    assert part in words(capsys.readouterr().out)


def test_parsing_starts_no_accelerator_runtime() -> None:
    """The module that reads the command line does not import JAX."""
    code = "import sys; from train import cli; sys.exit('jax' in sys.modules)"
    root = pathlib.Path(cli.__file__).parents[1]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True)
