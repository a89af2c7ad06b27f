"""struct(o) for any tokens: each structure is compared with that of `scan`, which reads letters."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.qwen3_vl.dialect import DIALECT
from paravt_jax.data import tokenizer_file
from paravt_jax.method.parsing import find_tags
from paravt_jax.method.protocol import PINNED, system_text
from paravt_jax.method.records import Author
from paravt_jax.method.structure import Kind, find_structure, pad_structures
from paravt_jax.method.tokenizer import Vocabulary
from paravt_jax.method.tools.crop_video import CropVideo

P = Author.PROMPT
N = Author.PINNED
M = Author.MODEL
T = Author.TOOL
BREAK = Kind.VIOLATION

OPENINGS = {"<think>": Kind.THINK_OPEN, "<tool_call>": Kind.CALL_OPEN, "<answer>": Kind.ANSWER_OPEN}
CLOSINGS = {
    "</think>": Kind.THINK_CLOSE,
    "</tool_call>": Kind.CALL_CLOSE,
    "</answer>": Kind.ANSWER_CLOSE,
}
FOREIGN = ["<tool_code>", "</tool_code>", "<tool_response>", "</tool_response>"]
TAGS = [*OPENINGS, *CLOSINGS, *FOREIGN]

Token = tuple[Author, bytes]


def scan(tokens: list[Token]) -> set[tuple[int, Kind]]:
    """The expected structure, read letter by letter: tokens of tags, and violations."""
    expected: set[tuple[int, Kind]] = set()
    responses: list[list[int]] = []
    before = T
    for t, (author, _) in enumerate(tokens):
        if author is N and before is not N or author is M and before not in (N, M):
            responses.append([])
        if author in (N, M):
            responses[-1].append(t)
        before = author
    for response in responses:
        owners = [t for t in response for _ in tokens[t][1]]
        text = b"".join(tokens[t][1] for t in response).decode("latin-1")  # a letter a byte
        opened = None
        for at in range(len(text)):
            tag = next((tag for tag in TAGS if text.startswith(tag, at)), None)
            if tag is None:
                continue
            mine = [t for t in owners[at : at + len(tag)] if tokens[t][0] is M]
            closes = tag.startswith("</")
            if closes and opened == tag.replace("/", ""):
                expected |= {(t, CLOSINGS[tag]) for t in mine}
                opened = None
            if closes:
                continue
            if opened:
                expected |= {(t, BREAK) for t in mine[:1]}
            opened = tag if tag in OPENINGS else None
            if opened:
                expected |= {(t, OPENINGS[tag]) for t in mine}
        if opened and tokens[response[-1]][0] is M:
            expected.add((response[-1], BREAK))
    return expected


def structure(tokens: list[Token]) -> list[tuple[int, Kind]]:
    """What is found in the tokens, as (position, kind); it is what `scan` says, in order."""
    positions, kinds = find_structure(
        lambda i: tokens[i][1], np.arange(len(tokens)), np.array([a for a, _ in tokens], np.int8)
    )
    assert positions.dtype == np.int32
    assert kinds.dtype == np.int8
    found = [(int(p), Kind(k)) for p, k in zip(positions, kinds, strict=True)]
    assert found == sorted(scan(tokens))
    return found


def find(*runs: tuple[Author, str]) -> list[tuple[str, Kind]]:
    """The text and kind of the tokens found in runs of tokens separated by "|"."""
    tokens = [(author, piece.encode()) for author, text in runs for piece in text.split("|")]
    return [(tokens[p][1].decode(), kind) for p, kind in structure(tokens)]


# --- any text, any tokens ---

PARTS = [tag[:n] for tag in TAGS for n in range(1, len(tag))]
LETTERS = st.text("<>/answerthink é\n", max_size=6)
BLOCKS = [
    f"{a}{inside}{b}" for a, b in zip(OPENINGS, CLOSINGS, strict=True) for inside in ("", "B")
]
ANY_TEXT = st.lists(
    st.one_of(st.sampled_from(TAGS), st.sampled_from(BLOCKS), st.sampled_from(PARTS), LETTERS),
    min_size=1,
    max_size=14,
).map("".join)
ANY_BYTES = st.lists(
    st.one_of(
        ANY_TEXT.map(str.encode), st.sampled_from([b"", b"\xff", b"\xc3", b"\xe2\x82", b"<\xff"])
    ),
    min_size=1,
    max_size=4,
).map(b"".join)
ANY_AUTHORS = st.lists(
    st.tuples(st.sampled_from([M, M, M, N, P, T]), st.integers(1, 9)), max_size=8
)


def authors_of(runs: list[tuple[Author, int]], size: int) -> list[Author]:
    """The runs' authors token by token, and the model from there on."""
    return [*(author for author, n in runs for _ in range(n)), *[M] * size][:size]


@given(ANY_BYTES, st.lists(st.integers(0, 150), max_size=40), ANY_AUTHORS)
def test_any_bytes_cut_anywhere_by_any_authors(text, cuts, runs):
    """Tokens that cut tags, hold several, hold nothing (two cuts at one place) or are no UTF-8."""
    cuts = sorted(min(cut, len(text)) for cut in cuts)
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    found = structure(list(zip(authors_of(runs, len(pieces)), pieces, strict=True)))
    assert len(set(found)) == len(found)


@pytest.fixture(scope="module")
def real_vocabulary(assets) -> Vocabulary:
    return tokenizer_file.load(assets / "qwen3_vl", DIALECT)


@pytest.fixture(scope="module", params=["small_vocabulary", "real_vocabulary", "cut_vocabulary"])
def vocabulary(request) -> Vocabulary:
    return request.getfixturevalue(request.param)


def encode(vocabulary: Vocabulary, *runs: tuple[Author, str]) -> list[Token]:
    return [
        (author, vocabulary.token_bytes(int(i)))
        for author, text in runs
        for i in vocabulary.encode(text)
    ]


@given(ANY_TEXT, ANY_AUTHORS)
def test_any_text_in_a_vocabulary(vocabulary, text, runs):
    tokens = encode(vocabulary, (M, text))
    structure(
        [
            (author, piece)
            for author, (_, piece) in zip(authors_of(runs, len(tokens)), tokens, strict=True)
        ]
    )


@given(st.lists(st.tuples(st.sampled_from([P, N, M, M, T]), ANY_TEXT), max_size=6))
def test_any_turns_in_a_vocabulary(vocabulary, runs):
    structure(encode(vocabulary, *runs))


@given(st.lists(st.one_of(st.sampled_from(TAGS), st.text("answer <x", max_size=5)), max_size=12))
def test_marking_and_decoding_gives_back_exactly_the_tags(vocabulary, lines):
    """Tags on separate lines share no tokens: the tokens of a kind are its tags and line breaks."""
    tokens = encode(vocabulary, (M, "\n".join(lines)))
    opened = None
    blocks = []
    for line in lines:
        closes = line.startswith("</")
        if line not in TAGS or closes and opened != line.replace("/", ""):
            continue
        if closes or line in OPENINGS:
            blocks.append(line)
        opened = line if line in OPENINGS else None
    found = structure(tokens)
    marked = {p for p, kind in found if kind is not BREAK}
    assert "".join(tokens[p][1].decode() for p in sorted(marked)).replace("\n", "") == "".join(
        blocks
    )
    for tag, tag_kind in (OPENINGS | CLOSINGS).items():
        same = "".join(tokens[p][1].decode() for p, kind in found if kind is tag_kind)
        assert same.replace("\n", "") == tag * blocks.count(tag)
    assert opened is None or (len(tokens) - 1, BREAK) in found


@given(ANY_BYTES, st.lists(st.integers(0, 150), max_size=12))
def test_invalid_utf8_hides_no_tag_from_the_parser(text, cuts):
    """Structure is found in bytes and rewards in decoded text: both see the same tags."""
    names = [(tag.name, tag.closing) for tag in find_tags(text.decode("utf-8", errors="replace"))]
    letters = text.decode("latin-1")
    seen = [
        next((tag for tag in TAGS if letters.startswith(tag, at)), None)
        for at in range(len(letters))
    ]
    assert names == [(tag.strip("</>"), tag.startswith("</")) for tag in seen if tag]


# --- single rules, in both vocabularies ---


def kinds_in(vocabulary: Vocabulary, *runs: tuple[Author, str]) -> list[Kind]:
    """The kinds found, one for all the tokens of a tag."""
    tokens = encode(vocabulary, *runs)
    found = structure(tokens)
    return [
        kind for n, (p, kind) in enumerate(found) if kind is BREAK or (p - 1, kind) not in found[:n]
    ]


CALL = '<tool_call>\n{"name": "crop_video"}\n</tool_call>'
CALL_KINDS = [Kind.CALL_OPEN, Kind.CALL_CLOSE]
ANSWER_KINDS = [Kind.ANSWER_OPEN, Kind.ANSWER_CLOSE]


def test_one_episode(vocabulary):
    runs = [
        (P, system_text(DIALECT, (CropVideo(),))),
        (N, PINNED),
        (M, f"look</think>\n{CALL}\n{CALL}<|im_end|>"),
    ]
    runs += [
        (T, "<tool_response>\n 7\n</tool_response>"),
        (N, PINNED),
        (M, "so</think>\n<answer>B</answer><|im_end|>"),
    ]
    assert kinds_in(vocabulary, *runs) == [
        Kind.THINK_CLOSE,
        *CALL_KINDS,
        *CALL_KINDS,
        Kind.THINK_CLOSE,
        *ANSWER_KINDS,
    ]


def test_nested_tags(vocabulary):
    """The inner block breaks the outer one, whose closing tag then closes nothing."""
    nested = [Kind.THINK_OPEN, Kind.ANSWER_OPEN, BREAK, Kind.ANSWER_CLOSE]
    assert kinds_in(vocabulary, (M, "<think> a <answer> B </answer> c </think>")) == nested
    assert kinds_in(vocabulary, (N, PINNED), (M, f"a {CALL}</think>")) == [
        Kind.CALL_OPEN,
        BREAK,
        Kind.CALL_CLOSE,
    ]
    assert kinds_in(vocabulary, (N, PINNED), (M, "<think>a</think>")) == [
        Kind.THINK_OPEN,
        BREAK,
        Kind.THINK_CLOSE,
    ]


def test_real_ids(real_vocabulary):
    ids = real_vocabulary.encode("<think>\nhm</think>\n<answer>B</answer>")
    positions, kinds = find_structure(real_vocabulary.token_bytes, ids, np.full(len(ids), M))
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


# --- exact positions, in invented tokens ---


def test_every_token_of_a_tag_and_no_other():
    assert find(
        (P, "<answer>|ask"), (N, "<think>|\n"), (M, "so|</think>|\n|<|answer|>B|</|answer|>|END")
    ) == [
        ("</think>", Kind.THINK_CLOSE),
        ("<", Kind.ANSWER_OPEN),
        ("answer", Kind.ANSWER_OPEN),
        (">B", Kind.ANSWER_OPEN),
        ("</", Kind.ANSWER_CLOSE),
        ("answer", Kind.ANSWER_CLOSE),
        (">", Kind.ANSWER_CLOSE),
    ]


@pytest.mark.parametrize(
    "text, expected",
    [
        (
            "hm|<tool_call>|</tool_call>",
            [
                ("<tool_call>", Kind.CALL_OPEN),
                ("<tool_call>", BREAK),
                ("</tool_call>", Kind.CALL_CLOSE),
            ],
        ),
        ("hm|<tool|_code>|x", [("<tool", BREAK)]),
        (
            "hm|.<|answer>|x",
            [(".<", Kind.ANSWER_OPEN), (".<", BREAK), ("answer>", Kind.ANSWER_OPEN), ("x", BREAK)],
        ),
        ("hm|end", [("end", BREAK)]),
        ("hm|</thi", [("</thi", BREAK)]),
        (
            "</think>|<answer>|B|END",
            [("</think>", Kind.THINK_CLOSE), ("<answer>", Kind.ANSWER_OPEN), ("END", BREAK)],
        ),
        ("</think>|<ans", [("</think>", Kind.THINK_CLOSE)]),
    ],
)
def test_where_a_block_breaks(text, expected):
    assert find((N, "<think>"), (M, text)) == expected


def test_a_tag_begun_in_the_pinned_prefix():
    """The model's part of the tag is marked, also if the tag breaks a block."""
    assert find((N, "<th"), (M, "in|k>|a|</think>")) == [
        ("in", Kind.THINK_OPEN),
        ("k>", Kind.THINK_OPEN),
        ("</think>", Kind.THINK_CLOSE),
    ]
    assert find((N, "<think>|<too"), (M, "l_|code>|a")) == [("l_", BREAK)]
    assert find((N, "<think>|<ans"), (M, "wer|>")) == [
        ("wer", Kind.ANSWER_OPEN),
        ("wer", BREAK),
        (">", Kind.ANSWER_OPEN),
        (">", BREAK),
    ]


def test_tokens_without_bytes():
    """They have no bytes, but a response can end with one: models may have such ids."""
    assert structure(
        [(M, b"<answer"), (M, b""), (M, b">"), (M, b""), (M, b"</answer>"), (M, b"")]
    ) == [
        (0, Kind.ANSWER_OPEN),
        (2, Kind.ANSWER_OPEN),
        (4, Kind.ANSWER_CLOSE),
    ]
    assert structure([(N, b"<think>"), (M, b""), (M, b"")]) == [(2, BREAK)]
    assert structure([(M, b"")]) == []


# --- batches ---


def test_padding():
    three = (np.array([3, 9, 9], np.int32), np.array([1, 2, 6], np.int8))
    none = (np.zeros(0, np.int32), np.zeros(0, np.int8))
    got = pad_structures([three, none], 4)
    assert got.positions.dtype == np.int32
    assert got.kinds.dtype == np.int8
    assert got.valid.dtype == np.bool_
    assert got.positions.tolist() == [[3, 9, 9, 0], [0] * 4]
    assert got.kinds.tolist() == [[1, 2, 6, 0], [0] * 4]
    assert got.valid.tolist() == [[True, True, True, False], [False] * 4]
    assert pad_structures([three], 3).valid.shape == (1, 3)
    assert pad_structures([none, three], 2).valid.shape == (2, 4)
    assert pad_structures([none], 8).valid.shape == (1, 8)
    with pytest.raises(ValueError, match="multiple"):
        pad_structures([none], 0)
