"""Files of a run that are whole JSON with other content, or cut off: one line names each."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable

import pytest

from paravt_extras.report import __main__ as report
from paravt_extras.report.page import write_report
from paravt_extras.summary import main as summarise
from paravt_jax.data.stored import DamagedFileError
from train.durable.metrics import MetricsWriter, read_metrics
from train.result import read_result, result_so_far

Read = Callable[[pathlib.Path], object]

OTHER = ("[]", "{}", "3", "null", '{"rows": 3', '"text"', "")
READERS: list[tuple[str, Read]] = [
    ("evaluation/before-4.json", result_so_far),
    ("evaluation/curve-000020-4.json", result_so_far),
    ("result.json", read_result),
    ("result.json", write_report),
    ("config.json", write_report),
]


@pytest.mark.parametrize(("name", "read"), READERS)
@pytest.mark.parametrize("content", OTHER)
def test_other_content_is_one_line_with_the_file(tmp_path, name, read, content):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(content)
    with pytest.raises(DamagedFileError) as error:
        read(tmp_path)
    message = str(error.value)
    assert message.startswith(f"{file}: damaged: ") and "; " in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "line", ["[]", "3", "{}", '{"phase": "rl"', '{"phase": "rl", "step": "1", "wall": 0.0}']
)
def test_a_damaged_line_of_the_metrics_is_named(tmp_path, line):
    good = json.dumps({"phase": "rl", "step": 1, "wall": 0.5, "loss": 1.0})
    file = tmp_path / "metrics.jsonl"
    file.write_text(f"{good}\n{line}\n")
    writer = MetricsWriter(tmp_path)
    for read in (
        lambda: read_metrics(file),
        lambda: result_so_far(tmp_path),
        lambda: writer.truncate("rl", 1),
    ):
        with pytest.raises(DamagedFileError, match=r"metrics\.jsonl, line 2: damaged: .*restore"):
            read()


def test_commands_print_the_line_and_no_traceback(tmp_path, capsys):
    mains = {"config.json": report.main, "result.json": summarise, "summary.json": report.main}
    for name, main in mains.items():
        (tmp_path / name).write_text("[]")
        assert main([str(tmp_path)]) == 1
    printed = capsys.readouterr().err.splitlines()
    assert [line.count("config.json: damaged") for line in printed] == [1, 1, 0]
