"""What routers hear of an instance without asking: what has changed in its index, and how busy it is.

One router hears of changes at once. Of several, each is told of what all of them do here, and others' requests would
cost it as many letters as its own. It hears at once if it has heard nothing for ``BUNDLE_NS``; else what there is comes
in one letter when that time is over. Its own requests it knows meanwhile: it has counted their work, and expects their
prompts to be cached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from msgspec import structs

from memserve.errors import check
from memserve.instance.kv_feed import KvFeed
from memserve.instance.routers import Routers
from memserve.messages import Heartbeat, KvEvents, KvSnapshot, Load, Peer
from memserve.serving import Send
from memserve.units import NS_PER_MS

BUNDLE_NS = 5 * NS_PER_MS
"""How old news may get. Short beside the steps whose load they tell of."""


@dataclass(slots=True)
class Told:
    """What one router has heard."""

    next_event: int
    """The changes of the index before this one."""
    is_stale: bool = False
    """Another router has placed something since it heard how busy the instance is."""
    again_ns: int = 0
    """It hears no news before that, if there are other routers."""

    def may_wait(self, now: int) -> bool:
        """Whether news for it wait until ``again_ns``. A wait longer than a bundle's: the clock was set back."""
        return 0 < self.again_ns - now <= BUNDLE_NS


class RouterNews:
    """Tells every router, and remembers what each has heard."""

    __slots__ = ("_feed", "_load", "_routers", "_told", "next_deadline_ns")

    def __init__(self, routers: Routers, feed: KvFeed | None, load: Callable[[], Load]) -> None:
        """``feed`` None: this instance publishes no KV events. ``load``: how busy the instance is."""
        self._routers, self._feed, self._load = routers, feed, load
        #: by router; those that are gone are forgotten at the next event
        self._told: dict[Peer, Told] = {}
        #: when a router is told what waits for it. None: nothing does
        self.next_deadline_ns: int | None = None

    @property
    def next_event(self) -> int:
        """Number of the next change of the index. 0: none are told."""
        return self._feed.next_event if self._feed is not None else 0

    def for_heartbeat(self, router: Peer | None, now: int) -> int:
        """A change before this one that ``router`` has not heard of was lost. What waits for it is not."""
        told = self._told.get(router) if router is not None else None
        return told.next_event if told is not None and told.may_wait(now) else self.next_event

    # -- what has happened in the event under way

    def placed(self, by: Peer) -> None:
        """The router ``by`` has placed something here. Until they know, all others would choose the instance that was
        idle."""
        for router in self._routers.all:
            if router != by:
                self._of(router).is_stale = True

    def catch_up(self, router: Peer, first: int | None) -> KvEvents | KvSnapshot | None:
        """All changes from number ``first`` on, None: everything, for ``router``, which has asked for it."""
        if self._feed is None:
            return None
        self._feed.news()
        self._of(router).next_event = self._feed.next_event
        return self._feed.answer(first)

    # -- and what is said of it

    def take(self, now: int) -> list[Send]:
        """What routers are told now."""
        news = self._feed.news() if self._feed is not None else None
        routers, said = self._routers.all, list[Send]()
        self.next_deadline_ns = None
        for router in routers:
            told = self._of(router)
            if told.next_event == self.next_event and not told.is_stale:
                continue
            if not told.may_wait(now) or len(routers) == 1:
                said += self._bundle(router, told, news)
                told.again_ns = now + BUNDLE_NS
            else:
                self.next_deadline_ns = min(told.again_ns, self.next_deadline_ns or told.again_ns)
        if len(self._told) > len(routers):
            self._told = {router: self._told[router] for router in routers}
        return said

    def _bundle(self, router: Peer, told: Told, news: KvEvents | None) -> Iterable[Send]:
        if self._feed is not None and told.next_event != self.next_event:
            is_all = news is not None and news.first == told.next_event
            changes = news if is_all else self._feed.replay(told.next_event)
            told.next_event = self.next_event
            if isinstance(changes, KvEvents) and told.is_stale:
                changes, told.is_stale = structs.replace(changes, load=self._load_told()), False
            if changes is not None:
                yield Send(router, changes)
        if told.is_stale:
            told.is_stale = False
            yield Send(router, Heartbeat(self._load_told(), self.next_event))

    def _load_told(self) -> Load:
        """Totals of a router's link are for the heartbeats of that router."""
        return structs.replace(self._load(), dispatches_heard=None)

    def _of(self, router: Peer) -> Told:
        """A router that has heard nothing asks for all that it misses."""
        told = self._told.get(router)
        if told is None:
            told = self._told[router] = Told(self.next_event)
        return told

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` unless whatever a router has not heard will be told. Between two events."""
        waits = [told for told in self._told.values() if told.is_stale or told.next_event != self.next_event]
        due_ns = min((told.again_ns for told in waits), default=None)
        check(self.next_deadline_ns == due_ns, "routers hear news at {}, not {}", self.next_deadline_ns, due_ns)
