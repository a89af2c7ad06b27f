"""Output paths that cannot be in a bucket are refused before anything else is done."""

from __future__ import annotations

import pytest

from paravt_extras.studies import paradox
from rollout import ask, evaluate
from train import prepare, run

ADDRESS = "gs://bucket/a"
LARGE = "--config=paravt_8b"
EVALUATE = ("--model", "m", "--benchmark", "mmvu")


@pytest.mark.parametrize(
    ("main", "argv", "field"),
    [
        (run.main, (LARGE, "--data.folder", ADDRESS), "data.folder"),
        (prepare.main, (LARGE, "--data.folder", ADDRESS), "data.folder"),
        (paradox.main, ("--run-dir", ADDRESS), "run_dir"),
        (ask.main, ("--model", "m", "--video", "v.mp4", "Who?", "--html", ADDRESS), "--html"),
        (evaluate.main, (*EVALUATE, "--out", ADDRESS), "--out"),
    ],
)
def test_an_address_as_output_path_is_refused(main, argv, field, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        code = main(list(argv))
    except SystemExit as stop:
        code = stop.code
    message = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert code in (1, 2)
    assert f"{field}: gs:/" in message and "or a mounted one" in message
    assert not list(tmp_path.iterdir())
