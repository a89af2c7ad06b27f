"""SubRip files: times, lines, markup, and whatever else is found in such files."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paravt_jax.data.foreign import ForeignFileError, parse_srt, read_srt
from paravt_jax.method.records import Subtitle

HELLO = "1\n00:00:01,500 --> 00:01:02,000\nHello\n"


def test_entries_have_times_and_text():
    text = HELLO + "\n2\n01:00:05,250 --> 01:00:06,000\n<i>Second</i> line\nthird line\n"
    assert parse_srt(text) == [
        Subtitle(1.5, 62.0, "Hello"),
        Subtitle(3605.25, 3606.0, "Second line\nthird line"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        HELLO,
        HELLO.replace("\n", "\r\n"),
        HELLO.replace("\n", "\r"),
        "\ufeff" + HELLO,
        "\n\n \t\n" + HELLO + "\n\n\n",
        HELLO.removeprefix("1\n"),  # no number
        HELLO.replace(",", "."),
        HELLO.replace("00:00:01", "00:01").replace("00:01:02", "01:02"),  # no hours
        HELLO.replace("2,000", "2,000 X1:40 Y2:600"),
        HELLO.replace("Hello", '<font color="red"><b>Hello</b></font>\n<i></i>'),
        "no times\nat all\n\n" + HELLO + "\n2\n00:00:03,000 --> 00:00:04,000\n\n",
    ],
)
def test_one_entry_in_many_forms(text, tmp_path):
    (tmp_path / "talk.srt").write_bytes(text.encode())
    assert read_srt(tmp_path / "talk.srt") == [Subtitle(1.5, 62.0, "Hello")]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (r"{\an8}Hello", "Hello"),
        (r"{\an8\pos(10,20)}Hel{\i1}lo{\i0}", "Hello"),
        ("{Hello} there", "{Hello} there"),
        ("five < six and 7 > 3", "five < six and 7 > 3"),
        ("<i>Hello</i > <3", "Hello <3"),
        ("Hello\n\nthere\n\n42\n", "Hello\nthere\n42"),
    ],
)
def test_tags_are_dropped_and_words_stay(line, words):
    (entry,) = parse_srt(HELLO.replace("Hello", line))
    assert entry.text == words


@pytest.mark.parametrize("piece", ["<a", "</a", r"{\a"])
def test_unclosed_tags_take_no_time(piece):
    begin = time.monotonic()
    assert parse_srt(HELLO.replace("Hello", piece * 70_000))
    assert time.monotonic() - begin < 1


@pytest.mark.parametrize("gap", ["", "\n", "2\n", "\n2\n", "\n\n 2 \n"])
def test_a_line_of_times_starts_an_entry(gap):
    text = HELLO + gap + "00:01:03,000 --> 00:01:04,000\n7\n\n8"
    assert parse_srt(text) == [Subtitle(1.5, 62.0, "Hello"), Subtitle(63.0, 64.0, "7\n8")]


WORDS = "今天的密码是 4812, café"


@pytest.mark.parametrize(
    ("words", "encoding"),
    [
        (WORDS, "gb18030"),
        ("Le café est fermé", "cp1252"),
        (WORDS, "utf-16"),
        ("Hello", "utf-16-le"),
        ("Hello", "utf-16-be"),
    ],
)
def test_other_encodings_are_refused(words, encoding, tmp_path):
    file = tmp_path / "talk.srt"
    file.write_bytes(HELLO.replace("Hello", words).encode(encoding))
    with pytest.raises(ForeignFileError, match=r"talk\.srt: .*; save it as UTF-8$"):
        read_srt(file)


@pytest.mark.parametrize("text", ["words\nwithout times\n", "WEBVTT\n\n1 --> 2\nHello\n"])
def test_a_file_without_times_is_refused(text, tmp_path):
    (tmp_path / "talk.srt").write_text(text)
    with pytest.raises(ForeignFileError, match=r"talk\.srt: has no line of times such as 00:01:13"):
        read_srt(tmp_path / "talk.srt")


_PIECES = st.sampled_from(
    [
        "1",
        "\n",
        "\r",
        "\n\n",
        "00:00:01,000",
        " --> ",
        "99999:1:2",
        "<i",
        ">",
        "\ufeff",
        "٣:٣:٣",
        "word",
        " ",
    ]
)


@given(
    st.one_of(
        st.text(),
        st.lists(_PIECES).map("".join),
    )
)
def test_no_input_raises_and_every_entry_has_words(data):
    for entry in parse_srt(data):
        assert entry.start >= 0
        assert entry.end >= 0
        assert entry.text.strip() == entry.text != ""
