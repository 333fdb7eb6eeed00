"""The dashboard in Chromium: figures as in ``/metrics``, no error in the console, keys, keyboard, a narrow screen."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from api_world import MODEL, SCRIPT_TEXT, World, says, serve
from browser import Browser, Opener, browsers
from fake_engine import FakeEngine
from memserve.api.ui import feed
from waiting import eventually

VIEWS = ("cluster", "cache", "requests", "trees", "chat")
SHOWN = """
return [...document.querySelectorAll('[data-metric][data-value]')].map(
  (element) => [element.dataset.metric, element.dataset.tenant ?? null, Number(element.dataset.value)])
"""
IS_LIVE = """
return document.getElementById('state').textContent === 'live'
  && !document.body.textContent.includes('Waiting for the first figures')
"""


@pytest.fixture(scope="module")
def open_browser() -> Iterator[Opener]:
    with browsers() as opener:
        yield opener


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "INTERVAL_S", 0.1)


@pytest.fixture
def world() -> Iterator[World]:
    with serve(FakeEngine(says(SCRIPT_TEXT))) as world:
        yield world


def ask(world: World, key: str = "none") -> str:
    body = {"model": MODEL, "prompt": "hello hello", "max_tokens": 4}
    headers = {"authorization": f"Bearer {key}"}
    told = httpx.post(f"{world.url}/v1/completions", json=body, headers=headers, timeout=30).json()
    return str(told["id"])


def show(browser: Browser, name: str) -> None:
    browser.run("location.hash = arguments[0]", name)
    browser.until("return document.querySelector('nav a[aria-current]')?.hash === arguments[0]", f"#{name}")


def metric(world: World, name: str, tenant: str | None) -> float:
    """The sum of the samples of ``name`` on ``/metrics``, by the page itself for what only a tenant sees."""
    snapshot = httpx.get(f"{world.url}/ui/snapshot", timeout=30).json()["metrics"]
    lines = httpx.get(f"{world.url}/metrics", timeout=30).text.splitlines()
    if tenant is not None:
        return sum(value for labels, value in snapshot[name] if labels["tenant"] == tenant)
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


def test_every_figure_is_that_of_metrics(world: World, open_browser: Opener) -> None:
    browser = open_browser()
    browser.open(f"{world.url}/ui")
    browser.until(IS_LIVE)
    names = [ask(world) for _ in range(3)]
    show(browser, "requests")
    browser.until("return arguments[0].every((id) => document.body.textContent.includes(id))", names)
    seen = set()
    for view in ("cluster", "cache"):
        show(browser, view)
        for name, tenant, value in browser.run(SHOWN):
            if name != "memserve_http_connections":  # the browser's own come and go
                assert value == metric(world, name, tenant), name
                seen.add(name)
    assert {"memserve_sequences_running", "memserve_cached_prompt_tokens_total", "memserve_inter_token_seconds_count",
            "memserve_tenant_prompt_tokens_total"} <= seen  # fmt: skip
    assert browser.errors() == []


def test_a_request_opens_its_story_and_stays_open(world: World, open_browser: Opener) -> None:
    browser = open_browser()
    name = ask(world)
    browser.open(f"{world.url}/ui#requests")
    browser.until("return document.querySelector('details summary')")
    browser.run("document.querySelector('details summary').focus()")
    browser.press("\ue007")  # Enter
    browser.until("return document.querySelector('details[open] .story')")
    ask(world)
    browser.until("return document.querySelectorAll('details').length === 2")
    still = "return document.querySelector('details[open] summary code').textContent"
    assert browser.run(still) == name
    assert browser.run("return document.activeElement.dataset.key") == f"request {name}", "the focus stays"
    assert browser.errors() == []


def test_the_keyboard_changes_views_and_the_theme_is_kept(world: World, open_browser: Opener) -> None:
    browser = open_browser()
    browser.open(f"{world.url}/ui")
    browser.until(IS_LIVE)
    for number, view in enumerate(VIEWS, 1):
        browser.press(str(number))
        browser.until("return document.querySelector('nav a[aria-current]').hash === arguments[0]", f"#{view}")
    theme = browser.run("return document.documentElement.dataset.theme")
    browser.run("document.getElementById('theme').click()")
    browser.open(f"{world.url}/ui#cache")
    assert browser.run("return document.documentElement.dataset.theme") != theme
    assert browser.errors() == []


@pytest.mark.parametrize("view", VIEWS)
def test_a_narrow_screen_needs_no_scrolling_sideways(world: World, open_browser: Opener, view: str) -> None:
    ask(world)
    browser = open_browser(400, 800)
    browser.open(f"{world.url}/ui#{view}")
    browser.until(IS_LIVE)
    assert browser.run("return innerWidth") == 400
    assert browser.run("return document.documentElement.scrollWidth") <= 400


def test_the_page_asks_for_a_key_and_then_shows_this_tenant(open_browser: Opener) -> None:
    with serve(FakeEngine(says(SCRIPT_TEXT)), api_keys=["ada=sk-ada", "bob=sk-bob"]) as world:
        mine, theirs = ask(world, "sk-ada"), ask(world, "sk-bob")
        browser = open_browser()
        browser.open(f"{world.url}/ui#requests")
        browser.until("return document.getElementById('keys').open")
        browser.run("document.getElementById('key-text').value = 'sk-ada'")
        browser.run("document.querySelector('#keys button[value=use]').click()")
        browser.until("return document.body.textContent.includes(arguments[0])", mine)
        assert theirs not in browser.run("return document.body.textContent")
        assert all("401" in line for line in browser.errors()), "a refused key is all that the console has"


def test_a_chat_has_its_explanation_beside_it(world: World, open_browser: Opener) -> None:
    browser = open_browser()
    browser.open(f"{world.url}/ui#chat")
    browser.until("return document.querySelector('textarea')")
    browser.run("document.querySelector('textarea').focus()")
    browser.press("hello\ue007")
    browser.until("return document.querySelectorAll('.said')[1]?.textContent.includes(arguments[0])", "Paris")
    browser.until("return document.querySelector('.story')?.textContent.includes('prompt tokens computed')")
    assert browser.errors() == []


def test_a_page_comes_back_after_a_restart(open_browser: Opener) -> None:
    browser, state = open_browser(), "return document.getElementById('state').textContent"
    with serve(FakeEngine(says(SCRIPT_TEXT))) as world:
        browser.open(f"{world.url}/ui#requests")
        browser.until(IS_LIVE)
        ask(world)
        port = int(world.url.rsplit(":", 1)[1])
    eventually(lambda: browser.run(state) == "reconnecting")
    with serve(FakeEngine(says(SCRIPT_TEXT)), port=port) as world:
        name = ask(world)
        browser.until("return document.body.textContent.includes(arguments[0])", name)
        assert browser.run(state) == "live"
        assert browser.run("return document.querySelectorAll('details').length") == 1, "the old server's are gone"


def test_an_engine_that_does_not_answer_is_drawn_as_down_and_the_page_does_not_grow(
    world: World, open_browser: Opener
) -> None:
    browser = open_browser()
    browser.open(f"{world.url}/ui")
    browser.until(IS_LIVE)
    world.engine.stats_error = TimeoutError()
    browser.until("return document.querySelector('.dot.down') !== null")
    world.engine.stats_error = None
    browser.until("return document.querySelector('.dot.down') === null")
    elements = "return document.querySelectorAll('*').length"
    before = browser.run(elements)
    for _ in range(20):
        ask(world)
    show(browser, "requests")
    show(browser, "cluster")
    assert browser.run(elements) <= before + 5
    assert browser.errors() == []
