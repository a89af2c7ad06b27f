"""Nothing of the golden tables is left out in silence: every file is read by a test here, or named with the reason why not."""

from __future__ import annotations

import pathlib

LEFT_OUT = {
    "microbatch_alloc": "which rows fit into a micro-batch of so many tokens: here a micro-batch is so many whole groups of one static "
    "shape (tests/train/test_rl.py holds them against the whole); that losses of parts add up is in test_train_step",
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
