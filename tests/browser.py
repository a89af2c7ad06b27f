"""Serves a page and opens it in a real browser, the system's Chromium, for tests of pages."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium without a window. Tests are skipped where it or Playwright is missing."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright (extra test)")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs chromium or google-chrome on the path")
    playwright.expect.set_options(timeout=60_000)  # milliseconds; machines that test may be busy
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        yield browser
        browser.close()


@contextlib.contextmanager
def served(app: Any) -> Iterator[str]:
    """Serve an ASGI application on a free port of loopback; yield its address."""
    uvicorn = pytest.importorskip("uvicorn", reason="needs the extra serve")
    config = uvicorn.Config(app, port=0, log_level="warning")
    server, socket = uvicorn.Server(config), config.bind_socket()
    thread = threading.Thread(target=server.run, args=([socket],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{socket.getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join()


@contextlib.contextmanager
def opened(browser: Browser, address: str, **context: Any) -> Iterator[Page]:
    """Open a page in a context of its own, for instance with `color_scheme="dark"`.

    At the end, check that the page asked nobody but its server, that no script failed, and that
    its content security policy stopped nothing.
    """
    asked, errors = list[str](), list[str]()
    with contextlib.closing(browser.new_context(**context)) as opened_context:
        page = opened_context.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
        page.goto(address)
        yield page
    assert [url for url in asked if not url.startswith((address, "blob:", "data:"))] == []
    # Chromium logs every reply that is no success. Tests look at what the page makes of it.
    assert [text for text in errors if not text.startswith("Failed to load resource")] == []
