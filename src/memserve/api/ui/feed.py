"""The events of ``/ui/events``: one reading of the engine for all open pages, and none while no page is open, but for a
few figures of every fifth second: a page begins with the last ten minutes."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from memserve.api.http.errors import ApiError, engine_silent
from memserve.api.metrics.http import ApiMetrics
from memserve.api.openai.interfaces import MappedEngine
from memserve.api.openai.streams import Hub
from memserve.api.ui.snapshot import EngineReading, SnapshotBuilder, SnapshotReading, Viewer
from memserve.api.ui.timelines import Timelines
from memserve.base.units import NS_PER_S
from memserve.router.placement.prefix_directory import PROMPTS_MAX, PrefixNode
from memserve.system.loop import EngineStopped

INTERVAL_S = 1.0
SHARE = 0.01
"""Largest share of the time that reading and encoding may take: where they take longer, events come less often."""
PAGES_MAX = 64
"""Pages that may be open at once."""
MOMENT_S = 5.0
MOMENTS_MAX = 120
"""Of ten minutes: about a kilobyte each."""
LOOK_S = 0.2
"""How often a waiting page looks whether the server ends."""


def too_many_pages() -> ApiError:
    """429: as many pages are open as may be."""
    message = f"{PAGES_MAX} pages of the dashboard are open: close one of them"
    return ApiError(429, message, kind="rate_limit_error", code="rate_limit_exceeded", headers={"retry-after": "5"})


class FeedSource(Protocol):
    """What the pages show, besides the HTTP edge."""

    @property
    def draining(self) -> bool:
        """Whether the server ends."""

    @property
    def model(self) -> str:
        """The served name of the model; of several the first."""

    async def read_snapshot(self) -> SnapshotReading:
        """How it is now."""

    async def prefix_trees(self, tenant: str | None) -> Mapping[str, Sequence[PrefixNode]]:
        """The prefixes of the last prompts by tenant, ``None``: of all. Raises :class:`ApiError` 503 for no answer."""


class EngineSource:
    """An engine of this process, or a cluster."""

    def __init__(self, hub: Hub, model: str) -> None:
        """``model``: its served name."""
        self._hub, self.model = hub, model

    @property
    def draining(self) -> bool:
        """Whether the server ends."""
        return self._hub.draining

    async def read_snapshot(self) -> SnapshotReading:
        """One reading of the statistics."""
        try:
            return EngineReading(await asyncio.to_thread(self._hub.engine.stats))
        except (TimeoutError, EngineStopped):
            return EngineReading(None)

    async def prefix_trees(self, tenant: str | None) -> Mapping[str, Sequence[PrefixNode]]:
        """Empty without a router. Raises :class:`ApiError` 503 when the router does not answer."""
        engine = self._hub.engine
        if not isinstance(engine, MappedEngine):
            return {}
        try:
            return await asyncio.to_thread(engine.prefix_trees, tenant)
        except (TimeoutError, EngineStopped):
            raise engine_silent() from None


class PageFeed:
    """All open pages of one server."""

    def __init__(self, source: FeedSource, metrics: ApiMetrics, timelines: Timelines) -> None:
        self._source, self._metrics, self._timelines = source, metrics, timelines
        self.list_models: Callable[[], Sequence[str]] = tuple
        """The names of all models, where the server has several."""
        self._pages = 0
        self._reader: asyncio.Task[None] | None = None
        self._builder: SnapshotBuilder | None = None
        self._encoded: dict[Viewer, bytes] = {}
        self._turned = asyncio.Condition()
        self._spent_ns = 0
        self._moments: deque[msgspec.Raw] = deque(maxlen=MOMENTS_MAX)
        self.readings = 0
        """Readings of the engine so far."""

    @property
    def pages_open(self) -> int:
        return self._pages

    def check_room(self) -> None:
        """Raises :class:`ApiError` 429 while :data:`PAGES_MAX` pages are open."""
        if self._pages >= PAGES_MAX:
            raise too_many_pages()

    async def stream_events(self, viewer: Viewer) -> AsyncIterator[bytes]:
        """The stream of one page. It ends with the server. A page that reads slowly skips events."""
        self._pages += 1
        try:
            last_builder: SnapshotBuilder | None = None
            while not self._source.draining:
                if self._reader is None or self._reader.done():
                    self._reader = asyncio.create_task(self._read_repeatedly())
                if self._builder is None or self._builder is last_builder:
                    await self._next_turn()
                    continue
                is_first, last_builder = last_builder is None, self._builder
                yield self._encode_first(viewer, last_builder) if is_first else self._encoded_event(viewer)
        finally:
            self._pages -= 1
            if self._pages == 0:
                self._stop_reading()

    async def keep_moments(self) -> None:
        """Keep the last ten minutes, until this task is cancelled."""
        while True:
            builder = self._builder if self._pages else None
            moment = (builder or await self._new_builder()).build_moment()
            if moment is not None:
                self._moments.append(msgspec.Raw(msgspec.json.encode(moment)))
            await asyncio.sleep(MOMENT_S)

    async def snapshot_for(self, viewer: Viewer) -> dict[str, Any]:
        """A snapshot of this moment, for a viewer without a stream."""
        return (await self._new_builder()).build_event(viewer)

    async def trees_for(self, viewer: Viewer) -> dict[str, Any]:
        """The prefixes of the last prompts that ``viewer`` may see, by tenant. Raises :class:`ApiError` 503 when the
        router does not answer."""
        trees_by_tenant = await self._source.prefix_trees(viewer.tenant)
        now_ns = time.monotonic_ns()
        return {
            "prompts_max": PROMPTS_MAX,
            "tenants": [
                {"tenant": tenant, "prefixes": [_prefix_card(node, now_ns) for node in nodes]}
                for tenant, nodes in trees_by_tenant.items()
            ],
        }

    async def _next_turn(self) -> None:
        """Wait for the next reading, or for a moment to look whether the server ends."""
        try:
            async with asyncio.timeout(LOOK_S), self._turned:
                await self._turned.wait()
        except TimeoutError:
            return

    def _encoded_event(self, viewer: Viewer) -> bytes:
        """Built and encoded once for all pages with one key."""
        event = self._encoded.get(viewer)
        if event is None and self._builder is not None:
            started_ns = time.perf_counter_ns()
            event = b"data: " + msgspec.json.encode(self._builder.build_event(viewer)) + b"\n\n"
            self._encoded[viewer] = event
            self._spent_ns += time.perf_counter_ns() - started_ns
        return event or b": nothing yet\n\n"

    def _encode_first(self, viewer: Viewer, builder: SnapshotBuilder) -> bytes:
        """The first event of a page, with what was before it, where the viewer may see it."""
        moments = list(self._moments) if viewer.sees_cluster else []
        return b"data: " + msgspec.json.encode({**builder.build_event(viewer), "history": moments}) + b"\n\n"

    async def _read_repeatedly(self) -> None:
        while True:
            builder = await self._new_builder()
            self.readings += 1
            async with self._turned:
                self._builder = builder
                self._encoded = {}
                self._turned.notify_all()
            await asyncio.sleep(INTERVAL_S)
            spent_ns, self._spent_ns = self._spent_ns, 0
            owed_s = spent_ns / NS_PER_S / SHARE - INTERVAL_S
            if owed_s > 0:
                await asyncio.sleep(owed_s)

    async def _new_builder(self) -> SnapshotBuilder:
        reading = await self._source.read_snapshot()
        return SnapshotBuilder(self._metrics, self._timelines, self._source.model, reading, self.list_models())

    def _stop_reading(self) -> None:
        """The last page has closed: keep nothing."""
        if self._reader is not None:
            self._reader.cancel()
        self._reader, self._builder, self._encoded = None, None, {}


def _prefix_card(node: PrefixNode, now_ns: int) -> dict[str, Any]:
    return {
        "prefix": node.name,
        "blocks": node.blocks,
        "uses": node.uses,
        "used_s_ago": round(max(0, now_ns - node.used_ns) / NS_PER_S, 1),
        "holders": [holder._asdict() for holder in node.holders],
        "children": [_prefix_card(child, now_ns) for child in node.children],
    }
