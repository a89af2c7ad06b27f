"""JSON files that a run wrote: wrong content is one line that names file, field and remedy."""

from __future__ import annotations

import json
from typing import Any, NotRequired

import pytest
from typing_extensions import TypedDict

from paravt_jax.data.stored import (
    DamagedFileError,
    has_checksum,
    mismatch,
    read_checked_json,
    read_json,
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
        (SOUND, ""),
        ({"n": 1, "rows": []}, ""),
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
    wrong = mismatch(value, Kind)
    assert wrong.startswith(place) and bool(wrong) == bool(place)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[]", "valid number"),
        (b'{"x"', "not JSON"),
        (b"", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path, content: bytes, words: str) -> None:
    file = tmp_path / "seconds.json"
    file.write_bytes(content)
    with pytest.raises(DamagedFileError) as error:
        read_json(file, float, "delete it")
    message = str(error.value)
    assert message.startswith(f"{file}: damaged: ") and message.endswith("; delete it")
    assert words in message and "\n" not in message


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


@pytest.mark.parametrize("indent", [None, 1])
def test_a_file_of_an_earlier_version_has_no_checksum(tmp_path, indent) -> None:
    file = tmp_path / "history.json"
    file.write_text(json.dumps(SOUND, indent=indent) + "\n")
    assert not has_checksum(file.read_bytes())
    assert read_checked_json(file, Kind, "restore it") == SOUND
