"""The command line: recipes, overrides, and what each mistake is answered with."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from train import cli


@dataclasses.dataclass(frozen=True)
class Rl:
    group_size: int = 8
    """Rollouts of one prompt."""
    frames: tuple[int, ...] = (4, 8)
    kl: float | None = None

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise ValueError(
                f"rl.group_size is {self.group_size}; advantages compare rollouts of a group: give at least 2."
            )


@dataclasses.dataclass(frozen=True)
class Run:
    """A toy run."""

    rl: Rl = Rl()
    reference: Rl | None = None
    run_dir: str = "runs/toy"
    resume: bool = True


def tiny() -> Run:
    """The laptop's recipe.

    With more to say.
    """
    return Run(rl=Rl(group_size=4))


def large() -> Run:
    """The pod's recipe."""
    return Run()


RECIPES = {"tiny_recipe": tiny, "large_recipe": large}


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What is printed on stderr for a command line that is refused."""
    with pytest.raises(SystemExit) as stop:
        cli.parse(argv, RECIPES)
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    # tyro frames its messages with lines and wraps them: the words are what counts.
    return " ".join(err.replace("│", " ").split())


@pytest.mark.parametrize("config", [("--config=tiny_recipe",), ("--config", "tiny_recipe")])
def test_a_recipe_without_overrides_is_itself(config: tuple[str, ...]) -> None:
    assert cli.parse(config, RECIPES) == tiny()


def test_overrides_reach_nested_fields_and_leave_the_rest() -> None:
    argv = [
        "--rl.frames",
        "4",
        "16",
        "--config=tiny_recipe",
        "--rl.kl",
        "0.01",
        "--run-dir",
        "elsewhere",
        "--no-resume",
    ]
    assert cli.parse(argv, RECIPES) == Run(
        rl=Rl(group_size=4, frames=(4, 16), kl=0.01), run_dir="elsewhere", resume=False
    )


def test_an_unknown_recipe_gets_one_line_with_the_list_and_the_nearest_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.parse(["--config=tiny_recipee"], RECIPES)
    err = capsys.readouterr().err
    assert stop.value.code == 2
    assert err.count("\n") == 1
    assert (
        "--config=tiny_recipee" in err
        and "Did you mean tiny_recipe?" in err
        and "large_recipe" in err
    )


def test_without_a_recipe_the_recipes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, "--rl.group-size", "4")
    assert "--config is missing" in message
    assert (
        "tiny_recipe The laptop's recipe." in message
        and "large_recipe The pod's recipe." in message
    )
    assert "With more to say" not in message


@pytest.mark.parametrize("argv", [("--config",), ("--config", "--help")])
def test_config_needs_a_value(capsys: pytest.CaptureFixture[str], argv: tuple[str, ...]) -> None:
    assert "--config needs a value" in refused(capsys, *argv)


def test_two_recipes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "tiny_recipe and large_recipe" in refused(
        capsys, "--config=tiny_recipe", "--config=large_recipe"
    )


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--rl.grop-size", "4"), ("--rl.grop-size", "Perhaps you meant", "--rl.group-size INT")),
        (("--rl.group-size", "four"), ("--rl.group-size", "four", "INT")),
        (("--rl.group-size",), ("--rl.group-size", "Missing value")),
        (("--rl.kl", "small"), ("--rl.kl", "small", "FLOAT")),
        (("--rl.group-size", "1"), ("rl.group_size is 1", "give at least 2")),
    ],
)
def test_a_wrong_field_or_value_is_named_with_the_rule(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], words: tuple[str, ...]
) -> None:
    message = refused(capsys, "--config=tiny_recipe", *argv)
    for word in words:
        assert word in message


def test_help_shows_the_recipes_values(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.parse(["--config=tiny_recipe", "--help"], RECIPES)
    assert stop.value.code == 0
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "--rl.group-size INT Rollouts of one prompt. (default: 4)" in out


def test_help_without_a_recipe_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.parse(["--help"], RECIPES)
    assert stop.value.code == 0
    assert "large_recipe" in capsys.readouterr().out


def test_parsing_starts_no_accelerator_runtime() -> None:
    """A mistake must cost milliseconds: the command line is read before JAX is even imported."""
    code = "import sys; from train import cli; sys.exit('jax' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=cli.__file__.rsplit("/", 2)[0]).returncode
        == 0
    )
