"""Settings of a client of an OpenAI-compatible server.

They belong to the method because the reward settings contain those of a judge. The client itself
is `paravt_jax.remote.client`.
"""

from __future__ import annotations

import dataclasses
import math
import re
import urllib.parse
from typing import ClassVar

_RULE = "give an address such as http://localhost:8000/v1"


def check_address(field: str, address: str, key_place: str) -> None:
    """Check that an address is the base address of an API, without a secret in it.

    Args:
        field: Name of the setting, for the message.
        address: The address.
        key_place: Where a key belongs instead, for the message.

    Raises:
        ValueError: The address is not of this form. The message does not show an address that may
            contain a secret, because messages are logged.
    """
    if any(mark in address for mark in "@?#"):
        raise ValueError(
            f"{field}: the address (not shown here) has a user, a query or a fragment. These may "
            "be secret, and settings are logged; leave them out and put the key in "
            f"{key_place}"
        )
    if any(mark.isspace() or not mark.isprintable() for mark in address):
        raise ValueError(f"{field}: {address!r} has spaces or control characters; {_RULE}")
    try:
        url = urllib.parse.urlsplit(address)
        host = url.hostname or ""
        host.encode("idna")  # otherwise this fails only when the name is looked up
        _ = url.port  # raises if it is not a number
    except ValueError:  # UnicodeError is a ValueError
        raise ValueError(f"{field}: this is not an address; {_RULE}") from None
    if url.scheme not in ("http", "https") or not host:
        raise ValueError(f"{field}: {address!r} is not an http or https address; {_RULE}")
    if url.path.rstrip("/").endswith("/chat/completions"):
        raise ValueError(
            f"{field}: {address!r} ends in /chat/completions, which the client adds; {_RULE}",
        )


@dataclasses.dataclass(frozen=True)
class ServerSettings:
    """Address, key, retries and concurrency of a client. Times are in seconds."""

    name: ClassVar[str] = "ServerSettings"
    """Name of these settings in error messages."""
    endpoint: str
    """Address of an OpenAI-compatible API without /chat/completions: "http://localhost:8000/v1"."""
    key_variable: str = "OPENAI_API_KEY"
    """Environment variable with the key, which is sent to `endpoint` only. Empty: no key."""
    timeout: float = 600.0
    """Time limit of one request, from connecting to the last byte."""
    attempts: int = 5
    """Upper bound on requests per answer, the first included."""
    wait: float = 1.0
    """Upper bound on the wait before the second attempt, which is drawn at random below it. The
    bound doubles with each further attempt. A Retry-After of the server is added to the wait."""
    wait_limit: float = 600.0
    """Upper bound on the wait between two attempts. If the server asks for more (Retry-After),
    there is no further attempt."""
    concurrency: int = 16
    """Upper bound on open requests, including those that wait for their next attempt."""

    def __post_init__(self):
        key_place = f"the environment variable that {self.name}.key_variable names"
        check_address(f"{self.name}.endpoint", self.endpoint, key_place)
        if not re.fullmatch("(?:[A-Z_][A-Z0-9_]*)?", self.key_variable):
            # The value is not shown: it may be a key.
            raise ValueError(
                f"{self.name}.key_variable: not a name of capitals, digits and _; "
                "give the name of the environment variable that holds the key, not the key"
            )
        self._require_time("timeout", zero=False)
        self._require_time("wait", "wait_limit", zero=True)
        self._require_count("attempts", "concurrency")

    def _require_time(self, *fields: str, zero: bool) -> None:
        for field in fields:
            seconds = getattr(self, field)
            if not (0 < seconds < math.inf or (zero and seconds == 0)):
                rule = "of at least 0" if zero else "above 0"
                raise ValueError(f"{self.name}.{field}: {seconds}; give finite seconds {rule}")

    def _require_count(self, *fields: str) -> None:
        for field in fields:
            if getattr(self, field) < 1:
                raise ValueError(f"{self.name}.{field}: {getattr(self, field)}; give 1 or more")
