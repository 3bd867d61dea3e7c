"""The page in a real browser: Chromium, where there is one.

Would catch a script that the page's own policy stops, an answer that is drawn as markup, a stop that does not stop, a
page that is wider than a phone, a field that a phone does not show while one writes, a question that never arrived
among the turns, a map that shows other experts than are there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from smoe import from_pretrained
from smoe.server.run_page import shown
from smoe.trace.recorder import recording
from tests import oracle
from tests.server.conftest import ENDLESS, Running, eventually, served

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
PATIENCE = 60_000


class Browsing:
    """Pages of one browser, and what they complained about."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser
        self.complaints: list[str] = []

    def open(self, url: str, width: int = 1280, height: int = 900, **options: Any) -> Any:
        page = self._browser.new_context(viewport={"width": width, "height": height}, **options).new_page()
        page.set_default_timeout(PATIENCE)
        page.on(
            "console", lambda said: self.complaints.append(said.text) if said.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.goto(url)
        page.locator("#legend li").first.wait_for()
        return page

    def close(self) -> None:
        for context in self._browser.contexts:
            context.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def browsing(browser: Any) -> Iterator[Browsing]:
    found = Browsing(browser)
    yield found
    found.close()
    assert found.complaints == []


@pytest.fixture(scope="module")
def long_running(demo_tokenizer: Any) -> Iterator[Running]:
    """The embedded model with all the room that it was made for; its end token does not come."""
    model = from_pretrained("demo", memory="30MiB", context_tokens=1024)
    with model.offload, served(model, demo_tokenizer) as running:
        yield running


def say(page: Any, text: str, tokens: int) -> None:
    if not page.locator("#tokens").is_visible():
        page.locator("#settings summary").click()
    page.fill("#tokens", str(tokens))
    page.fill("#temperature", "0")
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


ONCE_SHOWN = """
  var seenStop = false;
  const stop = document.querySelector("#stop");
  const looking = new MutationObserver(() => {{
    if (stop.hidden) return;
    looking.disconnect();
    {do};
  }});
  looking.observe(stop, {{ attributes: true }});
"""
"""Done in the page as soon as an answer can be stopped: whoever looks from outside may come when it is over."""
STOP_AT_WORDS = """const looks = setInterval(() => {
    if (!document.querySelector(".turn.assistant .words")?.textContent.trim()) return;
    clearInterval(looks);
    stop.click();
  }, 20)"""


def test_an_answer_streams_and_the_map_moves(running: Running, browsing: Browsing) -> None:
    page = browsing.open(running.url)
    assert page.title() == "demo – smoe" and page.inner_text("#state") == "idle"
    page.evaluate(ONCE_SHOWN.format(do="seenStop = true"))
    say(page, "Who went to the park?", 60)
    page.locator(".turn.assistant .words:not(:empty)").wait_for()
    page.locator(".turn.assistant .by").wait_for()
    assert page.evaluate("seenStop"), "while the answer came, it could be stopped"
    expected = running.chat("Who went to the park?", max_tokens=60).choices[0].message.content
    assert page.inner_text(".turn.assistant .words").strip() == expected.strip()
    assert page.locator("#send").is_visible() and not page.locator("#stop").is_visible()
    page.locator("#hits:has-text('%')").wait_for()  # figures come by a stream of their own
    page.wait_for_function("Number(document.querySelector('#speed').innerText) > 0")
    assert page.locator("#time-legend li").count() > 1 and page.locator("#memory-legend li").count() > 3
    page.locator("#curve svg polyline").wait_for()


def test_stop_stops(long_running: Running, browsing: Browsing) -> None:
    page = browsing.open(long_running.url)
    page.route("**/v1/chat/completions", lambda route: route.continue_(post_data=_endless(route.request)))
    page.evaluate(ONCE_SHOWN.format(do=STOP_AT_WORDS))
    say(page, "Tell me a story.", 900)
    page.locator(".turn.assistant .by:has-text('stopped')").wait_for()
    assert page.inner_text(".turn.assistant .words").strip()
    eventually(lambda: long_running.serving.running == 0)
    page.locator("#state:has-text('idle')").wait_for()
    say(page, "Go on.", 5)
    page.locator(".turn.assistant .by").nth(1).wait_for()
    assert page.locator(".turn.user").count() == 2


def test_a_text_longer_than_the_window(long_running: Running, browsing: Browsing) -> None:
    """The log scrolls along, and the end is the end of the text."""
    page = browsing.open(long_running.url, height=500)
    page.route("**/v1/chat/completions", lambda route: route.continue_(post_data=_endless(route.request)))
    say(page, "Tell me a long story.", 300)
    page.locator(".turn.assistant .by").wait_for()
    assert "300 tokens" in page.inner_text(".turn.assistant .by")
    log = page.locator("#log")
    assert log.evaluate("log => log.scrollTop") > 200
    assert log.evaluate("log => log.scrollHeight - log.scrollTop - log.clientHeight") < 60
    assert len(page.inner_text(".turn.assistant .words")) > 600


def _endless(request: Any) -> Any:
    return {**request.post_data_json, "logit_bias": ENDLESS}


def test_what_comes_is_text_and_never_markup(running: Running, browsing: Browsing) -> None:
    page = browsing.open(running.url)
    evil = '<img src=x onerror="document.title=1"><b>bold</b>'
    pieces = "".join(f'data: {{"choices":[{{"delta":{{"content":{part}}}}}]}}\n\n' for part in _json_parts(evil))
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=200, body=pieces + "data: [DONE]\n\n"))
    say(page, evil, 5)
    page.locator(".turn.assistant .by").wait_for()
    assert page.inner_text(".turn.assistant .words") == page.inner_text(".turn.user .words") == evil
    assert page.locator("#log img").count() == page.locator("#log b").count() == 0


def _json_parts(text: str) -> list[str]:
    return [json.dumps(text[n : n + 7]) for n in range(0, len(text), 7)]


def test_a_refusal_is_told(running: Running, browsing: Browsing) -> None:
    page = browsing.open(running.url)
    say(page, "word " * 2000, 5)
    told = page.locator(".turn.problem:has-text('384')")
    told.wait_for()
    assert told.get_attribute("role") == "alert"
    assert browsing.complaints and all("400" in each for each in browsing.complaints)
    browsing.complaints.clear()  # the browser notes every refusal


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 768, 1600])
def test_it_fits_and_can_be_read(width: int, scheme: str, running: Running, browsing: Browsing) -> None:
    page = browsing.open(running.url, width=width, height=740, color_scheme=scheme, device_scale_factor=2)
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    light = page.evaluate("() => getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number)[0] > 128")
    assert light is (scheme == "light")
    for name in ("#send", "#prompt", "#open-trace", "#map"):
        box = page.locator(name).bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= width + 0.5, name
        assert box["height"] >= 24, f"{name} can be hit"


def test_the_keyboard_is_enough(running: Running, browsing: Browsing) -> None:
    """From the head to the chat to the map, in the order of the page; on the map arrows go from expert to expert."""
    page = browsing.open(running.url)
    order = []
    for _ in range(12):
        page.keyboard.press("Tab")
        order.append(page.evaluate("() => document.activeElement.id || document.activeElement.tagName"))
        if order[-1] == "map":
            break
    assert [name for name in order if name in ("open-trace", "prompt", "send", "map")] == [
        "open-trace",
        "prompt",
        "send",
        "map",
    ]
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    assert page.inner_text("#tip").startswith("Layer 1, expert 1:")
    page.keyboard.press("Escape")
    assert page.inner_text("#tip") == ""
    unlabelled = page.evaluate(
        "() => [...document.querySelectorAll('input, textarea, button, canvas[tabindex]')]"
        ".filter(e => !(e.labels?.length || e.ariaLabel || e.getAttribute('aria-labelledby') || e.textContent.trim()))"
        ".map(e => e.id)"
    )
    assert unlabelled == []


def test_the_map_names_what_is_under_the_pointer(running: Running, browsing: Browsing) -> None:
    running.chat(max_tokens=4)
    page = browsing.open(running.url)
    table = running.serving.engine.executor.table
    layer, expert, _ = min(key for key in table.ready if key not in table.staged)
    layers = sorted(running.serving.engine.store.layers)
    box = page.locator("#map").bounding_box()
    across = int(box["width"] / 64)
    down = box["height"] / len(layers)
    page.mouse.move(box["x"] + (expert + 0.5) * across, box["y"] + (layers.index(layer) + 0.5) * down)
    page.locator("#tip:not(:empty)").wait_for()
    assert page.inner_text("#tip").startswith(f"Layer {layer}, expert {expert}: in memory.")


def test_a_key_is_asked_for(demo: PreTrainedModel, demo_tokenizer: Any, browser: Any) -> None:
    with served(demo, demo_tokenizer, api_key="a-key") as running:
        page = browser.new_context().new_page()
        page.goto(running.url)
        page.fill("#key", "a-key")
        page.press("#key", "Enter")
        page.locator("#legend li").first.wait_for()
        assert not page.locator("#key-form").is_visible()
        say(page, "Hello", 3)
        page.locator(".turn.assistant .by").wait_for()
        page.context.close()


def test_a_trace_is_replayed(running: Running, browsing: Browsing, demo: PreTrainedModel, tmp_path: Path) -> None:
    """A cache of the size that is chosen: with room for everything, all that was used is there in the end."""
    model = demo
    path = tmp_path / "run.trace"
    with recording(model, path):
        model.generate(oracle.PROMPT, max_new_tokens=20, min_new_tokens=20, do_sample=False)
    page = browsing.open(running.url)
    page.set_input_files("#trace-file", str(path))
    page.locator("#replay").wait_for()
    page.locator("#replay-share").evaluate("e => { e.value = 100; e.dispatchEvent(new Event('input')); }")
    page.locator("#replay-speed").evaluate("e => { e.value = 9; e.dispatchEvent(new Event('input')); }")
    page.locator("#replay-play:has-text('Play')").wait_for()
    assert page.inner_text("#replay-at-said") == "20 of 20"
    assert "all fit in memory" in page.inner_text("#map-sub")
    page.locator("#curve svg polyline").wait_for()
    page.click("#replay-end")
    assert not page.locator("#replay").is_visible() and "fit in memory" in page.inner_text("#map-sub")
    junk = tmp_path / "junk.trace"
    junk.write_bytes(b"no trace at all" * 100)
    page.set_input_files("#trace-file", str(junk))
    page.locator("#tip:has-text('is not a trace')").wait_for()


def test_a_run_of_the_command_line_is_shown(
    toy: Callable[..., Path], open_model: Callable[..., Any], browsing: Browsing
) -> None:
    model = open_model(toy("qwen3_moe"), "half")
    with shown(model.offload, "toy") as run:
        page = browsing.open(run.address)
        run.say("Once upon")
        model.generate(oracle.PROMPT, max_new_tokens=4, min_new_tokens=4, do_sample=False)
        page.locator("#log:has-text('Once upon')").wait_for()
        assert not page.locator("#ask").is_visible()
    page.locator("#state:has-text('the run has ended')").wait_for()


PHONE = {"width": 390, "height": 844}
AT_THE_END = """() => {
    window.scrollTo(0, document.body.scrollHeight);
    const [more, ask] = [".more", "#ask"].map(name => document.querySelector(name).getBoundingClientRect());
    return more.bottom <= ask.top + 1;
}"""
"""Scrolled to the end, nothing lies behind the field."""


def is_in_sight(page: Any, name: str) -> bool:
    """The whole of it, within the window."""
    box = page.locator(name).bounding_box()
    return bool(box["y"] >= 0 and box["y"] + box["height"] <= page.viewport_size["height"])


def test_on_a_phone_the_field_stays_in_sight(running: Running, browsing: Browsing) -> None:
    """When the page opens, while a keyboard takes half of it, wherever one scrolls to, and after a long answer."""
    page = browsing.open(running.url, **PHONE, has_touch=True, is_mobile=True, device_scale_factor=2)
    assert is_in_sight(page, "#prompt") and is_in_sight(page, "#send")
    say(page, "Who went to the park?", 60)
    page.locator(".turn.assistant .by").wait_for()
    assert is_in_sight(page, "#prompt")
    page.set_viewport_size({"width": 390, "height": 400})
    page.locator("#prompt").focus()
    assert is_in_sight(page, "#prompt")
    page.wait_for_function(AT_THE_END)  # the page is laid out anew some time after its size changes
    assert is_in_sight(page, "#prompt") and page.locator("#settings .fields").is_visible()


def test_a_question_that_never_arrived_is_no_turn(running: Running, browsing: Browsing) -> None:
    """It comes back into the field; while the field has another text, a button offers it."""
    page = browsing.open(running.url)
    page.route("**/v1/chat/completions", lambda route: route.abort())
    say(page, "Are you there?", 5)
    page.locator(".turn.problem").wait_for()
    assert page.locator(".turn.user, .turn.assistant").count() == 0
    assert page.input_value("#prompt") == "Are you there?"
    page.unroute("**/v1/chat/completions")
    page.route("**/v1/chat/completions", lambda route: (page.fill("#prompt", "Something else"), route.abort()))
    page.press("#prompt", "Enter")
    again = page.locator("button.again")
    again.wait_for()
    assert again.inner_text() == "Send again: Are you there?" and page.input_value("#prompt") == "Something else"
    page.unroute("**/v1/chat/completions")
    again.click()
    page.locator(".turn.assistant .by").wait_for()
    assert page.locator(".turn.user").inner_text() == "Are you there?" and page.locator("button.again").count() == 0
    assert page.input_value("#prompt") == "Something else"
    browsing.complaints.clear()  # the browser's own, of requests that were cut off
