"""Addresses that are refused, and how long a server asks to be left alone."""

from __future__ import annotations

import pytest

from paravt_jax.remote.servers import check_address, retry_after

SECRET = "sk-17-secret"
DATE = "Wed, 21 Oct 2026 07:28:00 GMT"


@pytest.mark.parametrize(
    "address",
    [
        f"http://user:{SECRET}@host/v1",
        f"http://{SECRET}@host/v1",
        f"http://host/v1?api_key={SECRET}",
        f"http://host/v1#{SECRET}",
        f"user:{SECRET}@host/v1",  # without a scheme it has no user, and is shown by a parser's error
        f"http://user:{SECRET}/x@host:99/v1",
        f"http:/user:{SECRET}@host/v1",
    ],
)
def test_an_address_with_a_secret_is_refused_without_showing_it(address):
    with pytest.raises(ValueError, match="--endpoint: .*put the key in MY_KEY") as error:
        check_address("--endpoint", address, "MY_KEY")
    assert SECRET not in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "address",
    [
        "localhost:8000",
        "http://",
        "ftp://host/v1",
        "http://host:port/v1",
        "http://host/v1/chat/completions/",
    ],
)
def test_an_address_that_cannot_be_asked_is_refused_with_an_example(address):
    with pytest.raises(ValueError, match="--endpoint: .*such as http://localhost:8000/v1"):
        check_address("--endpoint", address, "MY_KEY")


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, 0),
        ("3", 3),
        ("0.25", 0.25),
        ("-1", 0),
        ("nan", 0),
        ("inf", 0),
        ("9" * 400, 0),
        (DATE, 0),  # not without the server's own date
        ("soon", 0),
    ],
)
def test_retry_after_in_seconds(header, seconds):
    assert retry_after(header) == seconds


@pytest.mark.parametrize(
    ("date", "seconds"),
    [
        ("Wed, 21 Oct 2026 07:27:48 GMT", 12),
        ("Wed, 21 Oct 2026 09:27:48 +0200", 12),
        ("Wed, 21 Oct 2026 07:28:01 GMT", 0),
        ("today", 0),
    ],
)
def test_retry_after_as_a_date_counts_from_the_servers_own_date(date, seconds):
    assert retry_after(DATE, date) == seconds
