"""Paths that cannot be meant are refused before anything else is done."""

from __future__ import annotations

import pytest

from rollout import ask, evaluate
from train import export, prepare, run

LARGE = "--config=paravt_8b"
LOCAL = [
    (run.main, (LARGE, "--data.folder")),
    (ask.main, ("--model", "m", "Who?", "--video")),
    (evaluate.main, ("--model", "m", "--benchmark", "mmvu", "--out")),
]
OTHERS = [
    (run.main, (LARGE, "--check", "--run-dir")),
    (prepare.main, (LARGE, "--model.path")),
    (export.main, ("--run-dir", "r", "--to")),
]
# A shell expands no ~ behind an =.
BUCKET, HOME = ("gs://bucket/a", "or a mounted one"), ("~/a", "give /home/me/a, or ./~/a")


@pytest.mark.parametrize(
    ("main", "argv", "path", "remedy"),
    [(*case, *BUCKET) for case in LOCAL] + [(*case, *HOME) for case in LOCAL + OTHERS],
)
def test_a_path_that_cannot_be_used_is_refused(
    main, argv, path, remedy, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    try:
        code = main([*argv[:-1], f"{argv[-1]}={path}"])
    except SystemExit as stop:
        code = stop.code
    message = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert code in (1, 2)
    assert f": {path} " in message and remedy in message
    assert not list(tmp_path.iterdir())
