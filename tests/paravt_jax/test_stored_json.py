"""JSON files that a run wrote: wrong content is one line that names file, field and remedy."""

from __future__ import annotations

import json
from typing import Any, NotRequired

import pytest
from typing_extensions import TypedDict

from paravt_jax.data.stored import (
    DamagedFileError,
    parse_json,
    read_checked_json,
    write_checked_json,
)
from tests.damaged import damaged_versions


class Inner(TypedDict):
    x: float


class Kind(TypedDict):
    n: int
    rows: list[Inner]
    counts: NotRequired[dict[str, int]]
    name: NotRequired[str | None]


SOUND = {"n": 1, "rows": [{"x": 1}, {"x": 0.5, "more": []}], "counts": {"a": 1}, "name": None}


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ([], "the file: "),
        (None, "the file: "),
        (SOUND | {"n": 1.0}, "n: "),
        (SOUND | {"n": True}, "n: "),
        (SOUND | {"rows": [{"x": 1.0}, {}]}, "rows.1.x: "),
        (SOUND | {"counts": {"a": None}}, "counts.a: "),
        (SOUND | {"name": 3}, "name: "),
    ],
)
def test_the_first_wrong_place_is_named(value: Any, place: str) -> None:
    with pytest.raises(DamagedFileError, match=f"^a.json: damaged: {place}.*; delete it$"):
        parse_json(json.dumps(value).encode(), "a.json", Kind, "delete it")


@pytest.mark.parametrize(
    "content", [b'{"x"', b"", b"\xff", b"[" * 100_000], ids=["cut", "empty", "bytes", "deep"]
)
def test_a_damaged_file_is_one_line(content: bytes) -> None:
    with pytest.raises(DamagedFileError, match="^a.json: damaged: not JSON .*; delete it$"):
        parse_json(content, "a.json", float, "delete it")


OBJECTS = [SOUND, {"n": 1, "rows": []}, {"n": 0, "rows": [{"x": 1.0}], "name": "caf\u00e9 \n,\n"}]


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("content", OBJECTS)
def test_a_checked_file_reads_back_equal_and_is_json(tmp_path, content, indent) -> None:
    file = tmp_path / "history.json"
    write_checked_json(file, content, indent)
    assert read_checked_json(file, Kind, "restore it") == content
    whole = json.loads(file.read_text())
    assert whole.pop("checksum") and whole == content


@pytest.mark.parametrize("indent", [None, 1])
def test_every_flipped_bit_and_every_cut_of_a_checked_file_is_one_line(tmp_path, indent) -> None:
    """Also one in the name of a field that need not be there, or of the checksum."""
    file = tmp_path / "history.json"
    write_checked_json(file, SOUND, indent)
    for damaged in damaged_versions(file.read_bytes()):
        file.write_bytes(damaged)
        with pytest.raises(DamagedFileError) as error:
            read_checked_json(file, dict[str, Any], "restore it")
        assert str(error.value).startswith(f"{file}: damaged: ")
        assert str(error.value).endswith("; restore it")
        assert "\n" not in str(error.value)
