from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.qwen3_vl.dialect import DIALECT
from paravt_jax.data import tokenizer_file
from paravt_jax.method import protocol, tokenizer
from paravt_jax.world.vocabulary import world_vocabulary

# Any text, with parts of the protocol in it, so that added tokens get unusual neighbours.
_PARTS = st.sampled_from(
    [
        "<think>",
        "</think>\n",
        "<answer>",
        "</answer>",
        " seven",
        "128",
        ".0 seconds>",
        "<|im_end|>",
        "\n",
    ]
)
_TEXTS = st.lists(st.one_of(st.text(), _PARTS), max_size=8).map("".join)


@pytest.fixture(scope="module")
def small() -> tokenizer.Vocabulary:
    return world_vocabulary(protocol.ProtocolSettings(), DIALECT)


@pytest.fixture(scope="module")
def real(assets) -> tokenizer.Vocabulary:
    return tokenizer_file.load(assets / "qwen3_vl", DIALECT)


def _pieces(vocabulary: tokenizer.Vocabulary, text: str) -> list[str]:
    return [vocabulary.decode([id]) for id in vocabulary.encode(text)]


@settings(deadline=None)
@given(text=_TEXTS)
def test_small_vocabulary_round_trips_any_text(small, text):
    ids = small.encode(text)
    assert b"".join(small.token_bytes(id) for id in ids) == text.encode()
    assert small.decode(ids) == text


@settings(deadline=None, max_examples=50)
@given(text=_TEXTS)
def test_real_vocabulary_round_trips_normalised_text(real, text):
    text = unicodedata.normalize("NFC", text)  # the published tokenizer normalises, ours does not
    ids = real.encode(text)
    assert b"".join(real.token_bytes(id) for id in ids) == text.encode()
    assert (
        real.decode(ids) == text == real.tokenizer.decode(ids.tolist(), skip_special_tokens=False)
    )


def test_small_vocabulary_is_small_and_agrees_with_its_own_decoder(small):
    assert small.size <= 640
    ids = small.encode(
        "<think>\n0 green seven, 32 purple -\n</think>\n<answer> seven</answer><|im_end|>"
    )
    assert small.tokenizer.decode(ids.tolist(), skip_special_tokens=False) == small.decode(ids)


@pytest.mark.parametrize(
    "number",
    [
        0,
        7,
        128,
    ],
)
def test_a_number_is_one_token_in_all_texts(small, number):
    places = [
        f"<{number}.0 seconds>",
        f"{number} purple -",
        f"[{number}, 99]",
        f" from {number} to 99",
    ]
    places.append(protocol.render_call(protocol.CropCall(number, 99)))
    for text in places:
        assert _pieces(small, text).count(str(number)) == 1, _pieces(small, text)


@pytest.mark.parametrize(
    "text",
    [
        "0 green seven, 32 red -",
        "<answer> seven</answer>",
        "\nA. seven\nB. two",
        " seven from 8 to 10",
    ],
)
def test_a_digit_word_is_one_token_in_all_texts(small, text):
    assert " seven" in _pieces(small, text)


def test_tags_and_times_keep_their_boundaries(small):
    assert _pieces(small, "<16.0 seconds><|vision_start|>") == [
        "<",
        "16",
        ".0 seconds>",
        "<|vision_start|>",
    ]
    assert _pieces(small, "</think>\n<answer>[8, 10]</answer>") == [
        "</think>",
        "\n",
        "<answer>",
        "[",
        "8",
        ", ",
        "10",
        "]",
        "</answer>",
    ]


def test_added_tokens_have_the_real_names_order_and_flags(small, real):
    assert small.special_texts == real.special_texts
    for text in real.special_texts:
        ours, theirs = (v.tokenizer.get_added_tokens_decoder()[v[text]] for v in (small, real))
        assert ours.special == theirs.special
        assert ours.normalized == theirs.normalized
    assert real["<think>"] == 151667
    assert real.eos == 151645
    assert real.pad == 151643
    assert real.size == 151669


def test_a_saved_vocabulary_loads_as_the_same(small, tmp_path):
    path = tokenizer_file.save(small, tmp_path)
    again = tokenizer_file.load(tmp_path, DIALECT)
    text = "0 green seven é\n</think>"
    assert (
        again.encode(text).tolist()
        == tokenizer_file.load(path, DIALECT).encode(text).tolist()
        == small.encode(text).tolist()
    )
    assert not list(tmp_path.glob("*.tmp"))


def test_bad_files_and_unknown_tokens_are_refused(small, tmp_path):
    with pytest.raises(ValueError, match="tokenizer.json .*No such file"):
        tokenizer_file.load(tmp_path, DIALECT)
    (tmp_path / tokenizer_file.FILE).write_text("{}")
    with pytest.raises(ValueError, match="not a readable tokenizer"):
        tokenizer_file.load(tmp_path, DIALECT)
    with pytest.raises(KeyError, match="<thought>"):
        small["<thought>"]
