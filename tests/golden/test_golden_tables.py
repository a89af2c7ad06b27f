"""Every file of the golden tables is read by a test, or listed here with the reason why not."""

from __future__ import annotations

import pathlib

LEFT_OUT = {
    # Which rows fit into a micro-batch with a limit of tokens. Here a micro-batch is a number of
    # whole groups of one static shape (tests/train/test_rl.py compares them with the whole batch).
    # test_train_step tests that the losses of parts add up.
    "microbatch_alloc",
}


def test_every_table_is_read_or_named(golden: pathlib.Path):
    tests = "".join(
        file.read_text()
        for file in pathlib.Path(__file__).parent.glob("test_golden_*.py")
        if file != pathlib.Path(__file__)
    )
    tables = {file.stem for file in golden.iterdir() if file.suffix in (".json", ".npz")}
    unread = {name for name in tables if f'"{name}"' not in tests}
    assert tables and unread <= set(LEFT_OUT), f"no test reads {sorted(unread - set(LEFT_OUT))}"
