"""Named prefixes that stay in the cache until their time is over."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from memserve.mempool.pool import BlockPool, Lease
from memserve.policy.quotas import TenantStore
from memserve.types import NamedPrefix, TokenArray

PINNED_TOKENS_MAX = 4 << 20
"""Tokens of all pins whose tenants are known here. Beyond, the tenant with most tokens loses its oldest pin."""


@dataclass(slots=True, eq=False)
class _Pin:
    handle: str
    lease: Lease  # the pin alone: the references on its blocks were released at once
    until_ns: int
    tenant: str | None


class Pins:
    """Keeps cached paths from eviction, by name.

    Pins are best effort: when nothing else can make room, all are given up.
    """

    __slots__ = ("_made", "_pins", "_pool", "_quota", "_times", "lost")

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        #: in the order in which they were made or renewed
        self._pins: dict[str, _Pin] = {}
        #: heap of (end of its time, order of making, pin); some pins may have ended
        self._times: list[tuple[int, int, _Pin]] = []
        self._made = 0
        #: pins of tenants known here
        self._quota: TenantStore[str] = TenantStore(PINNED_TOKENS_MAX)
        #: names that were given up for memory, or because their KV was lost; the machine empties the list
        self.lost: list[str] = []

    def pin(self, handle: str, isolation: str, tokens: TokenArray, until_ns: int, *, tenant: str | None = None) -> int:
        """Keep the cached prefix of ``tokens``, brought up from DRAM as far as HBM has room. Returns its tokens.

        An earlier pin of this name ends: it is renewed, extended or shortened. ``tenant``: the pin counts in its share
        of all pins, of which the oldest go. None: a router has counted it.
        """
        lease = self._pool.acquire(isolation, tokens)
        self._pool.release(lease.blocks)
        self.unpin(handle)
        if lease.tokens:
            pin = self._pins[handle] = _Pin(handle, lease, until_ns, tenant)
            heapq.heappush(self._times, (until_ns, self._made, pin))
            self._made += 1
            if tenant is not None:
                for gone in self._quota.put(tenant, handle, handle, len(tokens)):
                    self.unpin(gone)
        else:
            self._pool.unpin(lease)
        return lease.tokens

    def unpin(self, handle: str) -> None:
        """Give up a name; unknown ones are ignored."""
        pin = self._pins.pop(handle, None)
        if pin is not None:
            self._pool.unpin(pin.lease)
            if pin.tenant is not None:
                self._quota.pop(pin.tenant, handle)
            self._forget_times()

    def tokens(self, handle: str) -> int:
        """Tokens kept under the name. 0: the name is unknown."""
        pin = self._pins.get(handle)
        return pin.lease.tokens if pin is not None else 0

    def of(self, tenant: str) -> list[NamedPrefix]:
        """The prefixes of a tenant that is known here, under the names that :meth:`pin` was given."""
        pins = [self._pins[handle] for handle in self._quota.of(tenant)]
        return [NamedPrefix(pin.handle, pin.lease.tokens, pin.until_ns) for pin in pins]

    def expire(self, now: int) -> None:
        """End the pins with no time left."""
        while self._times and self._times[0][0] <= now:
            self.unpin(self._times[0][2].handle)

    def release_all(self) -> bool:
        """Give up every pin. False: there was none."""
        names = list(self._pins)
        for handle in names:
            self.unpin(handle)
        self.lost += names
        return bool(names)

    @property
    def next_deadline_ns(self) -> int | None:
        """When :meth:`expire` is worth calling. None: there is no pin."""
        return self._times[0][0] if self._times else None

    def _forget_times(self) -> None:
        """Keep the first of the heap, and most of the rest, live pins."""
        if len(self._times) > 2 * len(self._pins) + 8:
            self._times = [entry for entry in self._times if self._pins.get(entry[2].handle) is entry[2]]
            heapq.heapify(self._times)
        while self._times and self._pins.get(self._times[0][2].handle) is not self._times[0][2]:
            heapq.heappop(self._times)

    def __len__(self) -> int:
        return len(self._pins)
