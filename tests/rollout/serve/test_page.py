"""The page in a real browser: asking, watching, stopping, and what goes wrong."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests import clips
from tests.browser import opened, served

expect = pytest.importorskip("playwright.sync_api", reason="needs the extra test").expect
pytest.importorskip("starlette", reason="needs the extra serve")

from tests.rollout.serve.scripted_server import WINDOWS, ScriptedServer  # noqa: E402

pytestmark = pytest.mark.slow
QUESTION = "Which digit appears last?"
DROP = """() => {
  const dataTransfer = new DataTransfer();
  dataTransfer.items.add(new File(["no video"], "broken.mp4"));
  document.body.dispatchEvent(new DragEvent("drop", { dataTransfer, bubbles: true }));
}"""
BOX = "element => element.getBoundingClientRect().toJSON()"
# Contrast of an element's text with the first background behind it, as WCAG defines it.
CONTRAST = """element => {
  const numbers = colour => colour.match(/[0-9.]+/g).map(Number);
  const light = colour => numbers(colour).slice(0, 3)
    .map(c => c <= 10 ? c / 3294.6 : ((c / 255 + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, n) => sum + c * [0.2126, 0.7152, 0.0722][n], 0.05);
  let behind = element;
  while (numbers(getComputedStyle(behind).backgroundColor)[3] === 0) behind = behind.parentElement;
  const ratio = light(getComputedStyle(element).color)
    / light(getComputedStyle(behind).backgroundColor);
  return Math.max(ratio, 1 / ratio);
}"""


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> pathlib.Path:
    """Four seconds of H.264, which Chromium plays."""
    return clips.write(tmp_path_factory.mktemp("clips") / "clip.mp4", range(100))


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    with served(server.app) as server.address:
        yield server
        server.held.clear()


def ask(page: Any, clip: pathlib.Path | None, text: str = QUESTION) -> None:
    if clip:
        page.set_input_files("#file", clip)
    page.get_by_label("Your question").fill(text)
    page.keyboard.press("Enter")


def tab_to(page: Any, selector: str) -> None:
    """Press Tab until an element has the focus. All on the way show that they have it."""
    for _ in range(40):
        page.keyboard.press("Tab")
        focused = page.locator(":focus:not(video)")
        assert not focused.count() or focused.evaluate(
            "e => getComputedStyle(e.id === 'file' ? e.labels[1] : e).outlineStyle === 'solid'"
        )
        if page.locator(f"{selector}:focus").count():
            return
    raise AssertionError(f"Tab does not reach {selector}")


def played(page: Any) -> None:
    """Wait until the video is past two seconds. The page's policy forbids Playwright's own wait."""
    for _ in range(300):
        if page.evaluate("player.currentTime > 2"):
            return
        page.wait_for_timeout(100)
    raise AssertionError("the video was not played")


def test_everything_works_by_keyboard(browser, server, clip) -> None:
    with opened(browser, server.address) as page:
        with page.expect_file_chooser() as chooser:
            tab_to(page, "#file")
            page.keyboard.press("Enter")
        chooser.value.set_files(clip)
        page.keyboard.type(QUESTION)
        for option in "345":
            tab_to(page, "#add")
            page.keyboard.press("Enter")
            page.keyboard.type(option)
        page.keyboard.press("Enter")
        expect(page.locator(".choices [aria-current=true]")).to_have_text("5")
        expect(page.get_by_role("log")).to_contain_text("Answer: 5")
        tab_to(page, ".moment")
        page.keyboard.press("Enter")
        played(page)
    (body,) = server.asked
    assert body["paravt"] == {"frames": 16, "options": ["3", "4", "5"]}
    video = {"type": "video_url", "video_url": {"url": "file-clip.mp4"}}
    assert body["messages"][0]["content"] == [video, {"type": "text", "text": QUESTION}]


def test_crops_light_up_side_by_side(browser, server, clip) -> None:
    server.held.set()
    server.answer = "[2.5, 3]"
    with opened(browser, server.address, reduced_motion="reduce") as page:
        ask(page, clip)
        bars = page.get_by_role("group", name="Timeline").get_by_role("button")
        expect(page.locator(".bar[data-state=looking]")).to_have_count(3)
        expect(page.locator(".report p")).to_have_text(["Well"] * 3)
        expect(page.locator(".lane i")).to_have_count(16)
        assert page.locator(".thought").inner_text() == "The last digit is near the end."
        lane = page.locator(".lane").last.evaluate(BOX)
        boxes = [bar.evaluate(BOX) for bar in bars.all()]
        for (start, end), box in zip(WINDOWS, boxes, strict=True):
            assert box["x"] - lane["x"] == pytest.approx(start / 4 * lane["width"], abs=3)
            assert box["width"] == pytest.approx((end - start) / 4 * lane["width"], abs=3)
        # The second overlaps both others in time, so it stands below them.
        assert boxes[0]["y"] == boxes[2]["y"] <= boxes[1]["y"] - boxes[0]["height"]
        assert bars.first.evaluate("bar => getComputedStyle(bar).animationName") == "none"
        server.held.clear()
        expect(page.locator(".bar[data-state=done]")).to_have_count(3)
        for answered in (bars.last, page.locator(".moment").first):
            expect(answered).to_have_accessible_name(re.compile("0:02.5 – 0:03"))
        # What a model writes is text, never markup.
        expect(page.locator(".report p").first).to_have_text("Only a <b>4</b>.")


def test_history_of_questions_on_two_videos(browser, server, clip, tmp_path) -> None:
    with opened(browser, server.address) as page:
        ask(page, clip)
        expect(page.locator(".moment")).to_have_count(1)
        ask(page, None, "And first?")
        expect(page.locator(".moment")).to_have_count(2)
        expect(page.locator(".moment:visible")).to_have_count(1)
        other = clips.write(tmp_path / "other.avi", range(100), codec="mpeg4")
        ask(page, other, "Which digit here?")
        expect(page.get_by_text("This browser cannot play the video.")).to_be_visible()
        expect(page.locator(".moment")).to_have_count(3)
        urls = [body["messages"][0]["content"][0]["video_url"]["url"] for body in server.asked]
        assert urls == ["file-clip.mp4", "file-clip.mp4", "file-other.avi"]
        page.locator(".head", has_text=QUESTION).click()
        expect(page.locator("#about")).to_contain_text("clip.mp4")
        page.locator(".moment:visible").click()
        played(page)


def test_stop_cancels_the_episode(browser, server, clip) -> None:
    server.held.set()
    with opened(browser, server.address) as page:
        ask(page, clip)
        expect(page.locator(".bar[data-state=looking]")).to_have_count(3)
        assert not server.cancelled.is_set()
        page.get_by_role("button", name="Stop").click()
        expect(page.locator(".state")).to_have_text("Stopped.")
        expect(page.locator(".bar[data-state=looking]")).to_have_count(0)
        assert server.cancelled.wait(60)
        expect(page.get_by_label("Your question")).to_have_value(QUESTION)  # to ask otherwise


def test_a_key_is_asked_for_and_kept(browser, server, clip) -> None:
    def guard(route: Any) -> None:
        if route.request.headers.get("authorization") != "Bearer right":
            route.fulfill(status=401)
        elif route.request.url.endswith("/v1/episodes/ep-1.html"):
            route.fulfill(body="All of it")
        else:
            route.continue_()

    with opened(browser, server.address) as page:
        page.route("**/v1/**", guard)
        page.reload()
        for key in ("wrong", "right"):
            page.get_by_label("API key").fill(key)
            page.keyboard.press("Enter")
        page.reload()
        ask(page, clip)
        with page.expect_download() as saved:
            page.get_by_text("The whole episode").click()
        assert saved.value.path().read_text() == "All of it"


def test_what_goes_wrong_is_said(browser, server, clip) -> None:
    server.compiling.set()
    with opened(browser, server.address) as page:
        expect(page.get_by_text("not ready: compiling")).to_be_visible()
        page.evaluate(DROP)
        expect(page.get_by_role("alert")).to_contain_text("broken.mp4 has no frames.")
        ask(page, clip)
        expect(page.locator(".state")).to_have_text("Waits until the server is ready")
        server.compiling.clear()
        expect(page.locator(".moment")).to_be_visible()
        questions = "**/v1/chat/completions"
        page.route(questions, lambda route: route.fulfill(status=404), times=1)  # expired
        ask(page, None)
        expect(page.locator(".moment")).to_have_count(2)
        page.route(questions, lambda route: route.abort())
        ask(page, None)
        expect(page.locator(".failed .state")).to_contain_text("The server does not answer.")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_phone_and_colours(browser, server, clip, scheme) -> None:
    server.held.set()
    phone = {"width": 360, "height": 740}
    with opened(browser, server.address, color_scheme=scheme, viewport=phone) as page:
        wide = "document.documentElement.scrollWidth"
        ask(page, clip, "W" * 60)
        expect(page.locator(".bar[data-state=looking]")).to_have_count(3)
        assert page.evaluate(wide) == 360
        server.held.clear()
        expect(page.locator(".moment")).to_be_visible()
        assert page.evaluate(wide) == 360
        page.get_by_text("How it got there").click()
        texts = page.locator(":is(p, b, span, button, label, a, summary, h3):visible")
        faint = f"all => all.filter(one => one.innerText.trim() && ({CONTRAST})(one) < 4.5)"
        assert texts.evaluate_all(f"all => ({faint})(all).map(one => one.innerText)") == []
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 19, 22)"
        assert dark == (scheme == "dark")
