"""Opens the address of a server on this machine, and keeps pages of other sites away from it.

A page that somebody visits can send requests to their loopback address, and can point its own name
at that address to read the replies (DNS rebinding).
"""

from __future__ import annotations

import socket
import urllib.parse
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from rollout.serve.errors import ApiError

LOOPBACK = frozenset(("localhost", "127.0.0.1", "::1"))


def listen(host: str, port: int) -> socket.socket:
    """Open the socket of a server. Raise ValueError if its address is in use or does not exist."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"--host {host} --port {port}: {error}; give another port or address"
        ) from error


class Guard:
    """Refuse requests to foreign host names, and those that a page of another origin sends.

    The reply is 403 with an error in the form of OpenAI's.

    Args:
        app: Gets all other requests.
        hosts: Names and addresses of the server, beside those of loopback.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str] = ()):
        self.app = app
        self.hosts = LOOPBACK | {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app
        if scope["type"] != "lifespan" and (reason := self._refusal(scope)):
            app = ApiError(403, reason, "forbidden").response()
        await app(scope, receive, send)

    def _refusal(self, scope: Scope) -> str | None:
        """Return why a request is refused; None if it is not."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if _name(host) not in self.hosts:
            known = ", ".join(sorted(self.hosts))
            return f"Host {host!r} is not a name of this server; use {known}"
        origin = headers.get("origin")
        # The scheme may differ behind a proxy that ends TLS.
        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            return f"Origin {origin!r} is another site; send requests from {host}"
        # Browsers name no origin in requests for pictures and scripts. A link may lead here.
        followed = scope.get("method") == "GET" and headers.get("sec-fetch-dest") == "document"
        site = headers.get("sec-fetch-site", "none")
        if site not in ("none", "same-origin") and not followed:
            return f"Sec-Fetch-Site is {site}: a page of another site asks; open {host} itself"
        return None


def _name(host: str) -> str | None:
    """Return the name or address in a Host header, without its port; None if there is none."""
    try:
        return urllib.parse.urlsplit(f"//{host}").hostname
    except ValueError:  # an address with an open bracket
        return None
