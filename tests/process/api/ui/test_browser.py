"""The dashboard in Chromium: figures as in ``/metrics``, no error in the console, keys, keyboard, a narrow screen."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from api_world import MODEL, SCRIPT_TEXT, World, says, serve
from browser import Browser, Opener, browsers
from fake_engine import FakeEngine
from front_world import running_front
from memserve.api.ui import feed
from waiting import eventually

VIEWS = ("cluster", "cache", "requests", "trees", "chat")
SHOWN = """
return [...document.querySelectorAll('[data-metric][data-value]')].map(
  (element) => [element.dataset.metric, JSON.parse(element.dataset.labels), Number(element.dataset.value)])
"""
SLOWNESS = 3
"""On a machine that does other things as well, a page may take so many times its second."""
HARD_TO_READ = """
const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
const light = ([r, g, b]) => [r, g, b].map((part) => part / 255).map(
  (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
).reduce((sum, part, at) => sum + part * [0.2126, 0.7152, 0.0722][at], 0);
const ground = (element) => {
  for (let at = element; at; at = at.parentElement) {
    const color = numbers(getComputedStyle(at).backgroundColor);
    if (color[3] !== 0) return color;
  }
  return [255, 255, 255];
};
const bad = [];
for (const element of document.querySelectorAll('body *')) {
  const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
  if (own && !element.disabled && element.checkVisibility()) {
    const [a, b] = [light(numbers(getComputedStyle(element).color)), light(ground(element))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) bad.push(`contrast ${contrast.toFixed(2)}: ${element.outerHTML.slice(0, 120)}`);
  }
  const named = element.getAttribute('aria-label') || element.textContent.trim() || element.labels?.length;
  const isControl = ['BUTTON', 'A', 'INPUT', 'TEXTAREA', 'SUMMARY'].includes(element.tagName);
  if ((isControl || element.getAttribute('role') === 'img') && !named) bad.push(`no name: ${element.outerHTML}`);
}
const ids = [...document.querySelectorAll('[id]')].map((element) => element.id);
if (new Set(ids).size !== ids.length) bad.push('an id is used twice');
return bad;
"""
"""Texts with a contrast below 4.5 to 1 (WCAG 2.2, AA), controls and pictures without a name, ids used twice."""
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


def metrics_page(world: World, key: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """The samples of ``/metrics`` by name."""
    page = httpx.get(f"{world.url}/metrics", headers={"authorization": f"Bearer {key}"}, timeout=30).text
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_every_figure_is_that_of_metrics(open_browser: Opener) -> None:
    keys = {"ada": "sk-ada", "bob": "sk-bob"}
    listed = [f"{name}={key}" for name, key in keys.items()]
    with serve(FakeEngine(says(SCRIPT_TEXT)), api_keys=listed, metrics_keys=["sk-op"]) as world:
        browser = open_browser()
        browser.open(f"{world.url}/ui")
        browser.until("return document.getElementById('keys').open")
        browser.errors()  # of the refused call
        browser.run("sessionStorage.setItem('memserve-key', 'sk-op')")
        names = [ask(world, key) for key in (*keys.values(), "sk-ada")]
        browser.run("location.hash = '#requests'; location.reload()")
        browser.until("return arguments[0].every((id) => document.body.textContent.includes(id))", names)
        seen = set()
        for view in ("cluster", "cache"):
            show(browser, view)
            page = metrics_page(world, "sk-op")
            for name, wanted, value in browser.run(SHOWN):
                if name == "memserve_http_connections":  # the browser's own come and go
                    continue
                rows = [amount for labels, amount in page[name] if wanted.items() <= labels.items()]
                assert value == sum(rows), (name, wanted)
                seen.add((name, *(wanted[label] for label in sorted(wanted))))
        assert {
            ("memserve_sequences_running",), ("memserve_requests_waiting",), ("memserve_cached_prompt_tokens_total",),
            ("memserve_generated_tokens_total",), ("memserve_prompt_tokens_total",),
            ("memserve_inter_token_seconds_count",), ("memserve_time_to_first_token_seconds_count",),
            ("memserve_tenant_requests_total", "ada"), ("memserve_tenant_prompt_tokens_total", "bob"),
            *(("memserve_pool_blocks", state, "hbm") for state in ("used", "cached", "free")),
        } <= seen  # fmt: skip
        assert browser.errors() == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_page_loads_within_a_second_and_is_readable(
    world: World, open_browser: Opener, dark: bool, request: pytest.FixtureRequest
) -> None:
    for _ in range(3):
        ask(world)
    browser = open_browser(dark=dark)
    browser.open(f"{world.url}/ui")
    browser.until(IS_LIVE)
    assert browser.run("return performance.getEntriesByType('navigation')[0].loadEventEnd") < 1000 * SLOWNESS
    axe: Path | None = request.config.getoption("--axe")
    for view in VIEWS:
        show(browser, view)
        assert browser.run(HARD_TO_READ) == [], view
        if axe is not None:
            browser.run(axe.read_text() + "; window.axe = axe")
            found = browser.run("return axe.run().then((told) => told.violations)")
            serious = [one for one in found if one["impact"] in ("serious", "critical")]
            told = [(one["id"], [node["html"][:200] for node in one["nodes"][:5]]) for one in serious]
            assert told == [], view
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


def test_chat_shows_its_routing_explanation(world: World, open_browser: Opener) -> None:
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


def test_unresponsive_engine_shows_down_and_page_stays_bounded(world: World, open_browser: Opener) -> None:
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


def test_a_page_opens_with_the_minutes_before_it(open_browser: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "MOMENT_S", 0.02)
    monkeypatch.setattr(feed, "INTERVAL_S", 60.0)  # no further event
    drawn = """
        const chart = [...document.querySelectorAll('svg')].find(
          (svg) => svg.getAttribute('aria-label')?.startsWith('Requests in flight'));
        return chart.querySelector('path.line').getAttribute('d').split('L').length"""
    with serve(FakeEngine(says(SCRIPT_TEXT))) as world:
        ask(world)
        time.sleep(0.5)  # the server has run for a while: nothing else tells
        browser = open_browser()
        browser.open(f"{world.url}/ui")
        browser.until(IS_LIVE)
        assert browser.run(drawn) > 5, "one event came, and the chart has a past"


OF_A_CLUSTER = """
const asked = Promise.all([import('/ui/cluster.js'), import('/ui/cache.js'), import('/ui/figures.js')]);
return asked.then(([{ clusterView }, { cacheView }, { Figures }]) => {
  const rows = (value, labels = {}) => [[labels, value]];
  const figures = new Figures();
  figures.take({
    time_ms: 1, model: 'm', version: 'v', viewer: { sees_cluster: true }, live: [], recent: [],
    members: [{ name: 'c1', role: 'colocated', state: 'live', host: 'h' }],
    metrics: {
      memserve_prompt_tokens_total: rows(1000), memserve_cached_prompt_tokens_total: rows(88),
      memserve_instance_prompt_tokens_total: rows(500, { instance: 'c1' }),
      memserve_instance_cached_tokens_total: rows(96, { instance: 'c1' }),
    },
  });
  return [clusterView(figures), cacheView(figures)].map((parts) => parts.map((part) => part.textContent).join(' '));
});
"""
"""The texts of two views; an instance has begun other prompts than were answered: documents, retries."""


def test_the_hit_rate_is_one_number_everywhere(world: World, open_browser: Opener) -> None:
    browser = open_browser()
    browser.open(f"{world.url}/ui")
    browser.until(IS_LIVE)
    cluster, cache = browser.run(OF_A_CLUSTER)
    assert "began 500 prompt tokens, 96 with KV from its cache" in cluster
    for text in (cluster, cache):
        assert set(re.findall(r"[0-9.]+ %", text)) - {"0 %", "0.0 %"} == {"8.8 %"}


def test_of_several_models_the_page_shows_the_chosen_one(open_browser: Opener) -> None:
    chosen = "return document.querySelector('#model select').value"
    with running_front() as front:
        assert front.ask(model="two") == "I am the second"
        browser = open_browser()
        browser.open(f"{front.url}/ui")
        browser.until(IS_LIVE)
        assert browser.run(chosen) == "one"
        picked = (
            "const s = document.querySelector('#model select'); s.value = 'two'; s.dispatchEvent(new Event('change'))"
        )
        browser.run(picked)
        browser.until("return location.search === '?model=two'")
        browser.until(IS_LIVE)
        assert browser.run(chosen) == "two"
        show(browser, "chat")
        text = "const t = document.querySelector('textarea'); t.value = 'hello'; t.form.requestSubmit()"
        browser.run(text)
        browser.until("return document.querySelector('.log').textContent.includes('I am the second')")
        assert browser.run(HARD_TO_READ) == [] and browser.errors() == []
