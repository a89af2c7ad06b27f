"""A server of gs:// buckets on this machine, in memory, for tests.

It is gcp-storage-emulator with what that lacks and runs need: preconditions on generations,
several requests at a time, and outages.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import logging
import re
import threading
import urllib.request
from collections.abc import Iterator
from urllib.parse import parse_qs, unquote, urlparse

from gcp_storage_emulator import server
from gcp_storage_emulator.handlers import buckets
from gcp_storage_emulator.storage import Storage

BUCKET = "bucket"

# It reports every object that a client looks for in vain.
logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)


class BucketServer:
    """Serves `gs://bucket` on a port of this machine until `close`.

    Attributes:
        variables: The environment variables that point Google's clients at it.
    """

    def __init__(self) -> None:
        self._storage = _Storage(use_memory_fs=True)
        self._lock = threading.Lock()
        buckets.create_bucket(BUCKET, self._storage)
        # Deleted objects would be kept in memory.
        self._storage.buckets[BUCKET]["softDeletePolicy"] = {"retentionDurationSeconds": 0}
        self._port = 0
        self.start()
        address = f"http://localhost:{self._port}"
        self.variables = {
            "STORAGE_EMULATOR_HOST": address,
            "TENSORSTORE_GCS_HTTP_URL": address,
            # Nobody asks a metadata server for credentials.
            "NO_GCE_CHECK": "true",
            "GOOGLE_CLOUD_PROJECT": "test",
            # gcsfs would ask another service what kind of bucket it is.
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }

    def start(self) -> None:
        """Serve again, on the same port, what was stored before `close`."""
        handler = functools.partial(_Handler, self._storage, self._lock)
        self._server = _Server(("localhost", self._port), handler)
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        """Refuse connections from now on."""
        # Connections that are open would go on.
        self._server.down = True
        self._server.shutdown()
        self._server.server_close()

    @contextlib.contextmanager
    def outage(self) -> Iterator[None]:
        """The store cannot be reached within the block."""
        self.close()
        try:
            yield
        finally:
            self.start()

    def close_for(self, seconds: float) -> None:
        """Begin an outage that ends by itself."""
        self.close()
        threading.Timer(seconds, self.start).start()

    def names(self, prefix: str = "") -> list[str]:
        """Return the names of all objects that begin with `prefix`."""
        with self._lock:
            names = list(self._storage.objects.get(BUCKET, {}))
        return sorted(name for name in names if name.startswith(prefix))

    def read(self, name: str) -> bytes:
        with self._lock:
            return self._storage.get_file(BUCKET, name)

    def newest_step(self, run: str, phase: str) -> int:
        """Return the step of the newest complete checkpoint of a run's phase; 0: there is none."""
        names = self.names(f"{run}/checkpoints/{phase}/")
        steps = [re.fullmatch(r".*/(\d+)/commit_success.txt", name) for name in names]
        return max((int(step[1]) for step in steps if step), default=0)

    def write(self, name: str, content: bytes) -> None:
        address = f"{self.variables['STORAGE_EMULATOR_HOST']}/{BUCKET}/{name}"
        request = urllib.request.Request(address, content, method="PUT")
        urllib.request.urlopen(request).close()

    def delete(self, name: str) -> None:
        with self._lock:
            self._storage.delete_file(BUCKET, name)

    def flip(self, name: str, position: int | None = None, bit: int = 0) -> None:
        """Change one bit of what is stored. The store's own checksum stays as it was.

        Args:
            name: The object.
            position: The byte; by default, the one in the middle.
            bit: Its bit, from 0 to 7.
        """
        with self._lock:
            content = bytearray(self._storage.get_file(BUCKET, name))
            content[len(content) // 2 if position is None else position] ^= 1 << bit
            self._storage._store.write_bytes(f"{BUCKET}/{name}", bytes(content))


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    down = False

    def handle_error(self, request, client_address) -> None:
        """Clients go away while they are answered, if they are killed for example."""


class _Unmet(Exception):
    """An object has another generation than the request wants."""


class _Storage(Storage):
    """Honours the precondition of the request that is being handled."""

    wanted: str | None = None

    def create_file(self, bucket, name, *arguments):
        self._require(bucket, name)
        super().create_file(bucket, name, *arguments)

    def delete_file(self, bucket, name):
        self._require(bucket, name)
        super().delete_file(bucket, name)

    def _require(self, bucket: str, name: str) -> None:
        generation = self.objects.get(bucket, {}).get(name, {"generation": "0"})["generation"]
        if self.wanted not in (None, generation):
            raise _Unmet


class _Handler(server.RequestHandler):
    """One request. The storage takes one at a time."""

    protocol_version = "HTTP/1.1"

    def __init__(self, storage: _Storage, lock: threading.Lock, *args) -> None:
        self._lock = lock
        super().__init__(storage, *args)

    def _handle(self, method: str) -> None:
        assert isinstance(self.server, _Server)
        if self.server.down:
            self.close_connection = True
            return
        address = urlparse(self.path)
        query = parse_qs(address.query)
        name = unquote(address.path.partition("/o/")[2])
        with self._lock:
            # TensorStore writes only if an object has the generation that it has read.
            self._object = self.storage.objects.get(BUCKET, {}).get(name)
            self.storage.wanted = query.get("ifGenerationMatch", [None])[0]
            try:
                server.Router(self).handle(method)
                return
            except _Unmet:
                pass
            finally:
                self.storage.wanted = None
        content = json.dumps({"error": {"code": 412, "message": "conditionNotMet"}}).encode()
        self.send_response(412)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def end_headers(self) -> None:
        if self._object is not None and self.command == server.GET:
            self.send_header("X-Goog-Generation", self._object["generation"])
        super().end_headers()

    def do_GET(self) -> None:
        self._handle(server.GET)

    def do_POST(self) -> None:
        self._handle(server.POST)

    def do_DELETE(self) -> None:
        self._handle(server.DELETE)

    def do_PUT(self) -> None:
        self._handle(server.PUT)

    def do_PATCH(self) -> None:
        self._handle(server.PATCH)
