"""SubRip files: times, lines, markup, and whatever else is found in such files."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paravt_jax.data.srt import read_srt
from paravt_jax.method.subtitles import Subtitle

HELLO = "1\n00:00:01,500 --> 00:01:02,000\nHello\n"


def test_entries_have_times_and_text():
    text = HELLO + "\n2\n01:00:05,250 --> 01:00:06,000\n<i>Second</i> line\nthird line\n"
    assert read_srt(text) == [
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
        HELLO + "\n2\n00:00:03,000 --> 00:00:04,000\n\n3\nno times\nat all\n",
    ],
)
def test_one_entry_in_many_forms(text):
    assert read_srt(text) == read_srt(text.encode()) == [Subtitle(1.5, 62.0, "Hello")]


def test_invalid_utf8_is_dropped():
    assert read_srt(b"1\n00:00:01,500 --> 00:01:02,000\nHe\xffllo\xc3\n") == [
        Subtitle(1.5, 62.0, "Hello")
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n\n",
        "a\nb\nc\n",
        "1\n00:00:01,000\nHello\n",
        "1\nx 00:00:01,000 --> 00:00:02,000\nHello",
    ],
)
def test_a_block_without_times_is_skipped(text):
    assert read_srt(text) == []


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
        st.binary(),
        st.text(),
        st.lists(_PIECES).map("".join),
        st.lists(_PIECES).map(lambda pieces: "".join(pieces).encode()),
    )
)
def test_no_input_raises_and_every_entry_has_words(data):
    for entry in read_srt(data):
        assert entry.start >= 0
        assert entry.end >= 0
        assert entry.text.strip() == entry.text != ""
