"""A stand-in of the Hugging Face hub on this machine: serves folders as repositories.

A repository may be gated, and downloads may be broken off in the middle of a file. It listens on
the loopback interface only.
"""

from __future__ import annotations

import dataclasses
import hashlib
import http.server
import json
import pathlib
import re
import threading
import urllib.parse
from collections.abc import Collection, Mapping
from typing import Any

MEMBER = "hf_member"
"""The token of a user who has accepted the terms of all gated repositories."""

_API = re.compile(r"/api/(?P<kind>models|datasets)/(?P<id>[^/]+/[^/]+)(?:/(?P<rest>.*))?")
_FILE = re.compile(r"/(?P<kind>datasets/)?(?P<id>[^/]+/[^/]+)/resolve/(?P<rev>[^/]+)/(?P<path>.+)")
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
_DATASETS = "datasets/"
_BLOCK = 2**20


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A file of a repository. `digest` stands for its content: large files are not read for it."""

    path: pathlib.Path
    size: int
    digest: str


class Hub:
    """A hub that serves until the block is left.

    Args:
        repositories: Folders by id. The ids of data sets start with "datasets/", as in the hub's
            addresses.
        gated: Ids of repositories whose files need a token and consent.
        cuts: Number of downloads to break off in the middle of a file.

    Attributes:
        url: The address, for HF_ENDPOINT.
        requests: The requests so far: method, path, and the range if one was asked for.
        cuts: Number of downloads that are still to be broken off.
    """

    def __init__(
        self,
        repositories: Mapping[str, pathlib.Path],
        gated: Collection[str] = (),
        cuts: int = 0,
    ):
        self.repositories = dict(repositories)
        self.gated = frozenset(gated)
        self.cuts = cuts
        self.requests: list[str] = []
        self._lock = threading.Lock()
        self._server = _Server(self)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Hub:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def variables(self, home: pathlib.Path) -> dict[str, str]:
        """Environment variables under which huggingface_hub uses this hub.

        They have to be set before Python starts.

        Args:
            home: Where the client keeps its cache and its token.
        """
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_OFFLINE": "0",
            # A proxy cannot reach this machine's loopback interface.
            "NO_PROXY": "127.0.0.1",
        }

    def files(self, id: str) -> dict[str, _Entry]:
        """Return the files of a repository, by path. Hidden files are left out."""
        root = self.repositories[id]
        entries = {}
        for path in sorted(root.rglob("*")):
            name = path.relative_to(root).as_posix()
            if not path.is_file() or any(part.startswith(".") for part in name.split("/")):
                continue
            status = path.stat()
            version = f"{name}:{status.st_size}:{status.st_mtime_ns}"
            entries[name] = _Entry(path, status.st_size, hashlib.sha1(version.encode()).hexdigest())
        return entries

    def cuts_now(self) -> bool:
        """Return whether to break off this download, and count it."""
        with self._lock:
            if self.cuts == 0:
                return False
            self.cuts -= 1
            return True


class _Server(http.server.ThreadingHTTPServer):
    """The server of a hub, with one thread per connection."""

    daemon_threads = True

    def __init__(self, hub: Hub):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub = hub


def _tree(files: Mapping[str, _Entry], folder: str, recursive: bool) -> list[dict[str, Any]]:
    """Return the files below a folder, or only the files and the folders in it."""
    prefix = f"{folder}/" if folder else ""
    listed: dict[str, dict[str, Any]] = {}
    for name, entry in files.items():
        if not name.startswith(prefix):
            continue
        first, _, rest = name.removeprefix(prefix).partition("/")
        if rest and not recursive:
            path = prefix + first
            listed[path] = {"type": "directory", "path": path, "size": 0, "oid": path}
        else:
            listed[name] = {"type": "file", "path": name, "size": entry.size, "oid": entry.digest}
    return list(listed.values())


def _commit(files: Mapping[str, _Entry]) -> str:
    text = "".join(f"{name}:{entry.digest}\n" for name, entry in files.items())
    return hashlib.sha1(text.encode()).hexdigest()


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers the requests of huggingface_hub."""

    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> Hub:
        assert isinstance(self.server, _Server)
        return self.server.hub

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: `Hub.requests` has the requests."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        wanted = self.headers.get("Range")
        request = f"{self.command} {self.path}"
        self.hub.requests.append(f"{request} {wanted}" if wanted else request)
        address = urllib.parse.urlsplit(self.path)
        path = urllib.parse.unquote(address.path)
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token not in ("", MEMBER):
            self._refuse(401, "", "Invalid credentials in Authorization header")
        elif path == "/api/whoami-v2":
            self._whoami(token)
        elif match := _API.fullmatch(path):
            prefix = _DATASETS if match["kind"] == "datasets" else ""
            self._describe(prefix + match["id"], match["rest"] or "", token, address.query)
        elif match := _FILE.fullmatch(path):
            id = (match["kind"] or "") + match["id"]
            self._send_file(id, match["rev"], match["path"], token)
        else:
            self._refuse(404, "", "Not found")

    def _whoami(self, token: str) -> None:
        if token:
            self._send_json({"type": "user", "name": token.removeprefix("hf_")})
        else:
            self._refuse(401, "", "Invalid username or password.")

    def _describe(self, id: str, rest: str, token: str, query: str) -> None:
        """Answer questions about a repository. Those about a gated one need no token."""
        files = self._find(id, token)
        if files is None:
            return
        verb, _, argument = rest.partition("/")
        revision = argument.partition("/")[0]
        if verb in ("revision", "tree") and revision not in ("main", _commit(files)):
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        elif verb in ("", "revision"):
            self._send_json(self._information(id, files, "blobs" in query))
        elif verb == "tree":
            folder = argument.partition("/")[2]
            self._send_json(_tree(files, folder, "recursive=true" in query.lower()))
        elif verb == "auth-check":
            if self._may_read(id, token):
                self._send_json({})
        else:
            self._refuse(404, "", f"{verb}: not served by this stand-in")

    def _information(self, id: str, files: Mapping[str, _Entry], sizes: bool) -> dict[str, Any]:
        siblings: list[dict[str, Any]] = [{"rfilename": name} for name in files]
        if sizes:
            for sibling, entry in zip(siblings, files.values(), strict=True):
                sibling |= {"size": entry.size, "blobId": entry.digest}
        return {
            "id": id.removeprefix(_DATASETS),
            "sha": _commit(files),
            "private": False,
            "gated": "manual" if id in self.hub.gated else False,
            "siblings": siblings,
        }

    def _send_file(self, id: str, revision: str, name: str, token: str) -> None:
        files = self._find(id, token)
        if files is None or not self._may_read(id, token):
            return
        commit = _commit(files)
        if revision not in ("main", commit):
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return
        if name not in files:
            self._refuse(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": commit})
            return
        entry = files[name]
        first, last = self._range(entry.size)
        if first >= entry.size > 0:
            self._refuse(416, "", "The range is outside the file")
            return
        headers = {
            "Content-Type": "application/octet-stream",
            "Accept-Ranges": "bytes",
            "ETag": f'"{entry.digest}"',
            "X-Repo-Commit": commit,
        }
        partial = self.headers.get("Range") is not None
        if partial:
            headers["Content-Range"] = f"bytes {first}-{last}/{entry.size}"
        self._send_head(206 if partial else 200, headers, last + 1 - first)
        if self.command == "GET":
            self._send_bytes(entry.path, first, last + 1 - first)

    def _range(self, size: int) -> tuple[int, int]:
        """Return the first and the last byte that are asked for."""
        match = _RANGE.fullmatch(self.headers.get("Range") or "")
        if match is None:
            return 0, size - 1
        last = int(match[2]) if match[2] else size - 1
        return int(match[1]), min(last, size - 1)

    def _send_bytes(self, path: pathlib.Path, first: int, count: int) -> None:
        if count > 1 and self.hub.cuts_now():
            count //= 2
            # The client notices, because fewer bytes come than the head announces.
            self.close_connection = True
        with path.open("rb") as file:
            file.seek(first)
            while count > 0:
                block = file.read(min(_BLOCK, count))
                self.wfile.write(block)
                count -= len(block)

    def _find(self, id: str, token: str) -> dict[str, _Entry] | None:
        """The files of a repository. If there is none, answers that, and returns None."""
        if id in self.hub.repositories:
            return self.hub.files(id)
        # Without a token the hub does not tell missing repositories from private ones.
        if token:
            self._refuse(404, "RepoNotFound", "Repository not found")
        else:
            self._refuse(401, "RepoNotFound", "Invalid username or password.")
        return None

    def _may_read(self, id: str, token: str) -> bool:
        """Whether the user may download files. If not, answers that."""
        if id not in self.hub.gated or token == MEMBER:
            return True
        self._refuse(401, "GatedRepo", f"Access to {id} is restricted. Please log in.")
        return False

    def _refuse(
        self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None
    ) -> None:
        named = {"X-Error-Message": message, **(headers or {})}
        if code:
            named["X-Error-Code"] = code
        self._send_json({"error": message}, status, named)

    def _send_json(
        self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        body = json.dumps(value).encode()
        self._send_head(status, {"Content-Type": "application/json", **(headers or {})}, len(body))
        if self.command == "GET":
            self.wfile.write(body)

    def _send_head(self, status: int, headers: Mapping[str, str], length: int) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()
