"""The feed: one reading for all pages, none without a page; what a slow page skips; how the server's end ends it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
from prometheus_client.core import GaugeMetricFamily, Metric

from memserve.api.http.errors import ApiError
from memserve.api.metrics.http import ApiMetrics
from memserve.api.ui import feed as feeds
from memserve.api.ui.feed import EngineSource, PageFeed
from memserve.api.ui.snapshot import CHARTED, EngineReading, SnapshotBuilder, Viewer
from memserve.api.ui.timelines import Timelines
from memserve.host.stats import EngineStats
from memserve.system.loop import EngineStopped

OPERATOR = Viewer(None, sees_cluster=True, names_tenants=True)
ADA = Viewer("ada", sees_cluster=False)


class Engine:
    """Statistics alone: one more step at each reading."""

    def __init__(self) -> None:
        self.readings = 0
        self.error: Exception | None = None

    def stats(self) -> EngineStats:
        if self.error is not None:
            raise self.error
        self.readings += 1
        return EngineStats(steps=self.readings)


class Edge:
    """As much of a hub as a feed needs."""

    def __init__(self) -> None:
        self.engine, self.draining = Engine(), False


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "INTERVAL_S", 0.01)
    monkeypatch.setattr(feeds, "SHARE", 1.0)


@dataclass(frozen=True)
class InstanceBlocks:
    """Blocks of one instance."""

    instance: str
    tier: str
    state: str
    count: int


class Told(EngineReading):
    """A reading with the blocks of instances alone."""

    def __init__(self, blocks: list[InstanceBlocks]) -> None:
        super().__init__(object())
        self._blocks = blocks

    def metric_families(self, names_tenants: bool) -> Iterable[Metric]:
        family = GaugeMetricFamily("memserve_instance_blocks", "", labels=["instance", "tier", "state"])
        for part in self._blocks:
            family.add_metric([part.instance, part.tier, part.state], part.count)
        return [family]


def opened() -> tuple[Edge, PageFeed]:
    hub: Any = Edge()
    return hub, PageFeed(EngineSource(hub, "tiny"), ApiMetrics(), Timelines("tiny"))


def steps(event: bytes) -> float:
    return json.loads(event.removeprefix(b"data: "))["metrics"]["memserve_steps_total"][0][1]


async def within(awaited: Any) -> Any:
    return await asyncio.wait_for(awaited, 20)


def test_all_pages_share_one_reading_and_the_last_one_ends_it() -> None:
    async def run() -> None:
        hub, feed = opened()
        assert feed.pages_open == 0 and hub.engine.readings == 0
        first, second = feed.stream_events(OPERATOR), feed.stream_events(OPERATOR)
        one, other = await within(anext(first)), await within(anext(second))
        assert feed.pages_open == 2 and steps(one) <= steps(other)
        seen = [steps(await within(anext(first))) for _ in range(5)]
        assert seen == sorted(set(seen)), "each event is another reading"
        assert hub.engine.readings - 1 <= seen[-1] <= hub.engine.readings, "two pages, and one reading for both"
        await first.aclose()
        await within(anext(second))
        await second.aclose()
        read = hub.engine.readings
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            await within(asyncio.wait(others))
        assert feed.pages_open == 0 and hub.engine.readings <= read + 1, "no page, no reading"

    asyncio.run(run())


def test_feed_restarts_after_its_last_page() -> None:
    async def run() -> None:
        _, feed = opened()
        for _ in range(3):
            events = feed.stream_events(OPERATOR)
            await within(anext(events))
            await events.aclose()
        assert feed.pages_open == 0

    asyncio.run(run())


def test_a_page_that_reads_slowly_skips_events() -> None:
    async def run() -> None:
        hub, feed = opened()
        events = feed.stream_events(OPERATOR)
        first = steps(await within(anext(events)))
        while hub.engine.readings < first + 5:
            await asyncio.sleep(0.005)
        assert steps(await within(anext(events))) >= first + 4
        await events.aclose()

    asyncio.run(run())


def test_feed_ends_with_the_server() -> None:
    async def run() -> None:
        hub, feed = opened()
        events = feed.stream_events(OPERATOR)
        await within(anext(events))
        hub.draining = True
        with pytest.raises(StopAsyncIteration):
            while True:
                await within(anext(events))
        assert feed.pages_open == 0

    asyncio.run(run())


@pytest.mark.parametrize("error", [TimeoutError(), EngineStopped()])
def test_an_engine_that_does_not_answer_is_shown_as_down(error: Exception) -> None:
    async def run() -> None:
        hub, feed = opened()
        hub.engine.error = error
        events = feed.stream_events(OPERATOR)
        shown = json.loads((await within(anext(events))).removeprefix(b"data: "))
        assert shown["metrics"]["memserve_engine_up"] == [[{}, 0.0]] and "memserve_steps_total" not in shown["metrics"]
        await events.aclose()

    asyncio.run(run())


def test_each_kind_of_viewer_has_its_own_event() -> None:
    async def run() -> None:
        _, feed = opened()
        everything, own = feed.stream_events(OPERATOR), feed.stream_events(ADA)
        one = json.loads((await within(anext(everything))).removeprefix(b"data: "))
        other = json.loads((await within(anext(own))).removeprefix(b"data: "))
        assert "memserve_engine_up" in one["metrics"] and other["metrics"] == {} and other["members"] == []
        await everything.aclose()
        await own.aclose()

    asyncio.run(run())


def test_more_pages_than_may_be_open_are_refused() -> None:
    async def run() -> None:
        _, feed = opened()
        pages = [feed.stream_events(OPERATOR) for _ in range(feeds.PAGES_MAX)]
        for page in pages:
            await within(anext(page))
        with pytest.raises(ApiError, match="close one"):
            feed.check_room()
        await pages.pop().aclose()
        feed.check_room()
        for page in pages:
            await page.aclose()

    asyncio.run(run())


def test_readings_that_take_long_come_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event that takes a share of the time larger than it may is followed by a longer pause."""
    monkeypatch.setattr(feeds, "SHARE", 1e-9)

    async def run() -> None:
        _, feed = opened()
        events = feed.stream_events(OPERATOR)
        with pytest.raises(TimeoutError):
            for _ in range(20):  # one, unless this process stood still
                await asyncio.wait_for(anext(events), 0.5)

    asyncio.run(run())


def test_a_page_begins_with_the_moments_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "MOMENT_S", 0.001)

    async def run() -> None:
        hub, feed = opened()
        keeping = asyncio.create_task(feed.keep_moments())
        while hub.engine.readings < feeds.MOMENTS_MAX + 9:
            await asyncio.sleep(0.001)
        for viewer, count in ((OPERATOR, feeds.MOMENTS_MAX), (ADA, 0)):
            events = feed.stream_events(viewer)
            first, second = [json.loads((await within(anext(events))).removeprefix(b"data: ")) for _ in range(2)]
            assert len(first["history"]) == count and "history" not in second
            await events.aclose()
            times = [moment["time_ms"] for moment in first["history"]]
            assert times == sorted(times)
        keeping.cancel()

    asyncio.run(run())


def test_a_moment_has_what_charts_show_and_no_more() -> None:
    blocks = [
        InstanceBlocks(name, "hbm", state, count)
        for name, count in (("p1", 3), ("d1", 4)) for state in ("used", "cached", "free")
    ]  # fmt: skip
    builder = SnapshotBuilder(ApiMetrics(), Timelines("tiny"), "tiny", Told(blocks))
    moment = builder.build_moment()
    assert moment is not None and moment["metrics"].keys() <= CHARTED
    assert moment["metrics"]["memserve_instance_blocks"] == [
        ({"tier": "hbm", "state": state}, 7.0) for state in ("used", "cached", "free")
    ]
    assert "memserve_prompt_tokens_total" in moment["metrics"]


def test_no_moment_is_kept_of_an_engine_that_is_down() -> None:
    assert SnapshotBuilder(ApiMetrics(), Timelines("tiny"), "tiny", EngineReading(None)).build_moment() is None
