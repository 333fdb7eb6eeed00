"""LoRA adapters that an instance has: those of its start, and those that come and go while it serves.

::

    wanted -- LoadAdapter --> loading --+--> held        until it is wanted no more, and no request runs with it
                                        +--> failed      tried again when it is wanted anew

What is wanted is told as a whole (``HoldAdapters``), so that it may be repeated, and come late.
"""

from __future__ import annotations

from collections.abc import Iterable

from memserve.instance.events import AdapterLoaded, DropAdapter, LoadAdapter
from memserve.protocol.messages import AdapterFiles, AdaptersHeld


class AdapterShelf:
    """Which adapters requests may name here, by digest."""

    def __init__(self, fixed: frozenset[str]) -> None:
        """``fixed``: those of the start, which stay."""
        self._fixed = fixed
        self._held: set[str] = set()
        self._loading: set[str] = set()
        #: why those that are wanted could not be loaded
        self._failed: dict[str, str] = {}
        self._wanted: dict[str, AdapterFiles] = {}
        self._orders: list[LoadAdapter | DropAdapter] = []
        self._report_due = self._reports_all = False

    def __contains__(self, digest: str) -> bool:
        return digest in self._fixed or digest in self._held

    def update_wanted(self, adapters: Iterable[AdapterFiles]) -> None:
        """These are to be here, and no others beside those of the start."""
        self._wanted = {files.digest: files for files in adapters}
        self._failed = {digest: why for digest, why in self._failed.items() if digest in self._wanted}
        self._report_due = True
        for digest, files in self._wanted.items():
            if digest not in self and digest not in self._loading and digest not in self._failed:
                self._loading.add(digest)
                self._orders.append(LoadAdapter(files))

    def on_router_joined(self) -> None:
        """This router may not know what an earlier one wanted."""
        if self._held:
            self._report_due = self._reports_all = True

    def on_loaded(self, event: AdapterLoaded) -> None:
        """The device has an adapter, or cannot have it."""
        self._loading.discard(event.digest)
        if not event.error:
            self._held.add(event.digest)
        elif event.digest in self._wanted:
            self._failed[event.digest] = event.error
        self._report_due = True

    def take_orders(self, used: Iterable[str]) -> list[LoadAdapter | DropAdapter]:
        """What the device is to load and to drop; ``used``: digests of all requests that run."""
        orders, self._orders = self._orders, []
        if self._held - self._wanted.keys():
            for digest in sorted(self._held - self._wanted.keys() - set(used)):
                self._held.discard(digest)
                orders.append(DropAdapter(digest))
        return orders

    def take_report(self) -> AdaptersHeld | None:
        """What is here, where it was asked for since the last call, and all that is wanted is here or has failed."""
        if not self._report_due or self._loading & self._wanted.keys():
            return None
        digests = {digest for digest in self._wanted if digest in self}
        if self._reports_all:
            digests |= self._held
        report = AdaptersHeld(tuple(sorted(digests)), tuple(sorted(self._failed.items())))
        self._report_due = self._reports_all = False
        self._failed.clear()
        return report
