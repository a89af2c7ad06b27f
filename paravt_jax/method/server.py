"""Settings of a client of an OpenAI-compatible server.

They stand beside the rewards, whose settings hold a judge's; the client is
`paravt_jax.remote.client`.
"""

from __future__ import annotations

import dataclasses
import math
import re
import urllib.parse
from typing import ClassVar

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
    if any(mark.isspace() or not mark.isprintable() for mark in address):
        raise ValueError(f"{field}: {address!r} has spaces or control characters; {_RULE}")
    try:
        url = urllib.parse.urlsplit(address)
        host = url.hostname or ""
        host.encode("idna")  # the lookup of the name does this too, but only later
        _ = url.port  # raises for one that is no number
    except ValueError:  # UnicodeError is one
        raise ValueError(f"{field}: it cannot be read as an address; {_RULE}") from None
    if url.scheme not in ("http", "https") or not host:
        raise ValueError(f"{field}: {address!r} is no http or https address; {_RULE}")
    if url.path.rstrip("/").endswith("/chat/completions"):
        raise ValueError(
            f"{field}: {address!r} ends in /chat/completions, which is added; {_RULE}",
        )


@dataclasses.dataclass(frozen=True)
class ServerSettings:
    """Which server is asked, and how patiently. Times are in seconds."""

    name: ClassVar[str] = "ServerSettings"
    """Their name in error messages."""
    endpoint: str
    """Address of an OpenAI-compatible API without /chat/completions: "http://localhost:8000/v1"."""
    key_variable: str = "OPENAI_API_KEY"
    """Environment variable with the key, which goes to `endpoint` only. Empty: no key is sent."""
    timeout: float = 600.0
    """For one request, from connecting to the last byte."""
    attempts: int = 5
    """Requests per answer, the first included."""
    wait: float = 1.0
    """Before the second attempt; it doubles with each further one."""
    wait_limit: float = 600.0
    """The longest wait between two attempts, also where the server asks for more (Retry-After)."""
    concurrency: int = 16
    """Answers requested at once; one that waits for its next attempt keeps its place."""

    def __post_init__(self):
        key_place = f"the environment variable that {self.name}.key_variable names"
        check_address(f"{self.name}.endpoint", self.endpoint, key_place)
        if not re.fullmatch("(?:[A-Z_][A-Z0-9_]*)?", self.key_variable):
            raise ValueError(  # the value is not shown: it may be a key
                f"{self.name}.key_variable: its value is no name of capitals, digits and _; "
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
                raise ValueError(
                    f"{self.name}.{field}: {seconds} is no time to wait; give seconds {rule}"
                )

    def _require_count(self, *fields: str) -> None:
        for field in fields:
            if getattr(self, field) < 1:
                raise ValueError(f"{self.name}.{field}: {getattr(self, field)}; give 1 or more")
