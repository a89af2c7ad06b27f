"""Shared by the clients of OpenAI-compatible servers: checked addresses and Retry-After.

No error message shows an address that may hold a secret, because settings and errors are logged.
"""

from __future__ import annotations

import datetime
import email.utils
import re

import httpx2

_RULE = "give an address such as http://localhost:8000/v1"


def check_address(field: str, address: str, key_place: str) -> None:
    """Raises ValueError unless `address` is the base address of an API without a secret in it.

    `field` names the setting, `key_place` says where a key belongs instead.
    """
    if any(mark in address for mark in "@?#"):
        raise ValueError(
            f"{field}: the address, not shown here, has a user, a query or a fragment, which may "
            f"be secret, and settings are written down; leave them out and put the key in {key_place}"
        )
    try:
        url = httpx2.URL(address)
        url.host.encode("idna")  # the lookup of the name does this too, but only later
    except (httpx2.InvalidURL, UnicodeError):
        raise ValueError(f"{field}: it cannot be read as an address; {_RULE}") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"{field}: {address!r} is no http or https address; {_RULE}")
    if url.path.rstrip("/").endswith("/chat/completions"):
        raise ValueError(
            f"{field}: {address!r} ends in /chat/completions, which is added; {_RULE}",
        )


def retry_after(header: str | None, date: str | None = None) -> float:
    """Seconds to wait by a server's Retry-After header; 0 where it is missing or unreadable.

    A Retry-After may be a date. It is compared with `date`, the Date header of the same reply, so
    that only the server's clock matters; without a Date header the wait is 0.
    """
    if not header:
        return 0.0
    if re.fullmatch(r"\d{1,9}(?:\.\d{1,9})?", header, re.ASCII):
        return float(header)
    until, now = _date(header), _date(date or "")
    return max(0.0, (until - now).total_seconds()) if until and now else 0.0


def _date(text: str) -> datetime.datetime | None:
    try:
        found = email.utils.parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return None
    return found if found.tzinfo else found.replace(tzinfo=datetime.UTC)
