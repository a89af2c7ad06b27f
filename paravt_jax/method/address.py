"""Checks the address of an OpenAI-compatible server before anything is sent to it."""

from __future__ import annotations

import urllib.parse

_RULE = "give an address such as http://localhost:8000/v1"


def check_address(field: str, address: str, key_place: str) -> None:
    """Raises ValueError unless `address` is the base address of an API without a secret in it.

    `field` names the setting, `key_place` says where a key belongs instead. The message does not
    show an address that may hold a secret, because settings and errors are logged.
    """
    if any(mark in address for mark in "@?#"):
        raise ValueError(
            f"{field}: the address, not shown here, has a user, a query or a fragment, which may "
            "be secret, and settings are written down; leave them out and put the key in "
            f"{key_place}"
        )
    try:
        url = urllib.parse.urlsplit(address)
        host = url.hostname or ""
        host.encode("idna")  # the lookup of the name does this too, but only later
        _ = url.port
    except ValueError:  # UnicodeError is one
        raise ValueError(f"{field}: it cannot be read as an address; {_RULE}") from None
    if url.scheme not in ("http", "https") or not host:
        raise ValueError(f"{field}: {address!r} is no http or https address; {_RULE}")
    if url.path.rstrip("/").endswith("/chat/completions"):
        raise ValueError(
            f"{field}: {address!r} ends in /chat/completions, which is added; {_RULE}",
        )
