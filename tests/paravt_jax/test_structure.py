"""struct(o): tags found by bytes, whatever the tokens are."""

import itertools
import os
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paravt_jax.parsing import BLOCKS
from paravt_jax.records import Author
from paravt_jax.structure import Kind, find_structure, pad_structures

P, N, M, T = Author.PROMPT, Author.PINNED, Author.MODEL, Author.TOOL


def find(*runs: tuple[Author, str]) -> list[tuple[str, Kind]]:
    """Structure of a trajectory given as runs of tokens separated by "|": the marked tokens' text and kinds."""
    tokens = [(piece, author) for author, text in runs for piece in text.split("|")]
    vocabulary = [piece.encode() for piece, _ in tokens]
    positions, kinds = find_structure(lambda i: vocabulary[i], np.arange(len(tokens)), np.array([a for _, a in tokens]))
    assert all(tokens[p][1] is M for p in positions)
    return [(tokens[p][0], Kind(k)) for p, k in zip(positions, kinds, strict=True)]


def test_one_whole_turn():
    assert find((P, "<answer>|ask"), (N, "<think>|\n"), (M, "so|</think>|\n|<|answer|>B|</|answer|>|<|im_end|>")) == [
        ("</think>", Kind.THINK_CLOSE),
        ("<", Kind.ANSWER_OPEN),
        ("answer", Kind.ANSWER_OPEN),
        (">B", Kind.ANSWER_OPEN),
        ("</", Kind.ANSWER_CLOSE),
        ("answer", Kind.ANSWER_CLOSE),
        (">", Kind.ANSWER_CLOSE),
    ]


def test_calls_and_tool_text():
    found = find(
        (N, "<think>"), (M, "x|</think>|<tool_call>|{}|</tool_call>"), (T, "<answer>|no|</answer>"), (N, "<think>"), (M, "y|</think>")
    )
    assert [k for _, k in found] == [Kind.THINK_CLOSE, Kind.CALL_OPEN, Kind.CALL_CLOSE, Kind.THINK_CLOSE]


def test_a_tag_does_not_reach_across_responses():
    assert find((M, "<ans"), (T, "x"), (M, "wer>|B")) == []


@pytest.mark.parametrize(
    "text, expected",
    [
        (
            "hm|<tool_call>|{}|</tool_call>",
            [("<tool_call>", Kind.CALL_OPEN), ("<tool_call>", Kind.VIOLATION), ("</tool_call>", Kind.CALL_CLOSE)],
        ),
        ("hm|<tool|_code>|x", [("<tool", Kind.VIOLATION)]),
        ("hm|end", [("end", Kind.VIOLATION)]),
        ("</think>|<answer>|B|<|im_end|>", [("</think>", Kind.THINK_CLOSE), ("<answer>", Kind.ANSWER_OPEN), ("im_end", Kind.VIOLATION)]),
        ("</think>|</think>|x", [("</think>", Kind.THINK_CLOSE)]),
        (
            "</think>|<answer>|B|</answer>|</answer>",
            [("</think>", Kind.THINK_CLOSE), ("<answer>", Kind.ANSWER_OPEN), ("</answer>", Kind.ANSWER_CLOSE)],
        ),
    ],
)
def test_violations(text, expected):
    text = text.replace("<|im_end|>", "im_end")
    assert find((N, "<think>"), (M, text)) == expected


def test_only_the_pinned_opening_was_written():
    assert find((P, "x"), (N, "<think>|\n")) == []


def test_one_token_may_hold_two_tags():
    kinds = [k for piece, k in find((M, "<answer|>B</answer|><answer|>B</|answer>")) if piece == "><answer"]
    assert kinds == [Kind.ANSWER_OPEN, Kind.ANSWER_CLOSE]


def test_empty_tokens_hold_nothing():
    vocabulary = [b"<answer", b"", b">", b"B", b"</answer>"]
    positions, _ = find_structure(vocabulary.__getitem__, np.arange(5), np.full(5, M))
    assert positions.tolist() == [0, 2, 4]


def test_nothing_at_all():
    positions, kinds = find_structure(lambda i: b"", np.zeros(0, np.int32), np.zeros(0, np.int8))
    assert positions.shape == kinds.shape == (0,)


def test_padding():
    one = (np.array([3, 9], np.int32), np.array([1, 6], np.int8))
    none = (np.zeros(0, np.int32), np.zeros(0, np.int8))
    got = pad_structures([one, none], 4)
    assert got.positions.shape == (2, 4) and got.positions.dtype == np.int32 and got.kinds.dtype == np.int8
    assert got.valid.tolist() == [[True, True, False, False], [False] * 4]
    assert got.positions[0, :2].tolist() == [3, 9]
    assert pad_structures([none], 8).valid.shape == (1, 8)
    with pytest.raises(ValueError, match="multiple"):
        pad_structures([none], 0)


TAGS = [f"<{slash}{name}>" for name in BLOCKS for slash in ("", "/")]
TEXT = st.lists(st.one_of(st.sampled_from(TAGS), st.text("<>/answerthink é\n", max_size=6)), max_size=10).map("".join)


def covers_exactly_the_tags(vocabulary, ids: list[int]) -> None:
    """The marked tokens, violations apart, are those that hold a byte of a tag that opens a block or closes the open one."""
    pieces = [vocabulary(i) for i in ids]
    blob = b"".join(pieces)
    owner = [t for t, piece in enumerate(pieces) for _ in piece]
    positions, kinds = find_structure(vocabulary, np.array(ids, np.int32), np.full(len(ids), M))
    expected, opened, at = set(), None, 0
    while at < len(blob):
        tag = next((tag for tag in TAGS if blob.startswith(tag.encode(), at)), None)
        if tag is None:
            at += 1
            continue
        name = tag.strip("</>")
        counts = opened == name if tag.startswith("</") else name in ("think", "tool_call", "answer")
        if counts:
            expected |= set(owner[at : at + len(tag)])
        opened = (None if counts else opened) if tag.startswith("</") else (name if counts else None)
        at += len(tag)
    assert {int(p) for p, k in zip(positions, kinds, strict=True) if k != Kind.VIOLATION} == expected
    if opened:
        assert Kind.VIOLATION in kinds[positions == positions.max()]


@given(TEXT, st.data())
def test_marked_tokens_cover_exactly_the_tags(text, data):
    blob = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(blob)), max_size=12)))
    pieces = [blob[a:b] for a, b in itertools.pairwise([0, *cuts, len(blob)])]
    covers_exactly_the_tags(pieces.__getitem__, list(range(len(pieces))))


def real_vocabulary():
    folder = os.environ.get("PARAVT_TEST_ASSETS")
    if not folder:
        pytest.skip("PARAVT_TEST_ASSETS is not set: the real tokenizer is needed")
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(Path(folder, "qwen3_vl", "tokenizer.json")))
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    byte_of = {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values()}

    def vocabulary(i: int) -> bytes:
        piece = tokenizer.id_to_token(i)
        return piece.encode() if piece in special else bytes(byte_of[c] for c in piece)

    return tokenizer, vocabulary


def test_real_tokenizer():
    tokenizer, vocabulary = real_vocabulary()
    ids = tokenizer.encode("<think>\nhm</think>\n<answer>B</answer>", add_special_tokens=False).ids
    positions, kinds = find_structure(vocabulary, np.array(ids), np.full(len(ids), M))
    assert [(ids[p], Kind(k)) for p, k in zip(positions, kinds, strict=True)] == [
        (151667, Kind.THINK_OPEN),
        (151668, Kind.THINK_CLOSE),
        (27, Kind.ANSWER_OPEN),
        (9217, Kind.ANSWER_OPEN),
        (36721, Kind.ANSWER_OPEN),  # ">B"
        (522, Kind.ANSWER_CLOSE),
        (9217, Kind.ANSWER_CLOSE),
        (29, Kind.ANSWER_CLOSE),
    ]

    @settings(max_examples=60, deadline=None)
    @given(TEXT)
    def check(text):
        covers_exactly_the_tags(vocabulary, tokenizer.encode(text, add_special_tokens=False).ids)

    check()


def test_a_large_batch_takes_well_under_a_second():
    vocabulary = [b"<think>", b"</think>", b"<tool_call>", b"</tool_call>", *[b"word%d " % i for i in range(60)]]
    rng = np.random.default_rng(0)
    batch = rng.integers(0, len(vocabulary), (64, 8192))
    authors = np.where(np.arange(8192) < 2048, P, M)
    start = time.process_time()
    pad_structures([find_structure(vocabulary.__getitem__, ids, authors) for ids in batch])
    assert time.process_time() - start < 3  # about 0.5 s; room for a busy machine
