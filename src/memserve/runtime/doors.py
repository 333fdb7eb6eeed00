"""Where a router may be found: addresses that an instance tries in turn (level 3).

An instance that was given one address stays with it, and with what a ``Recall`` names. With several it notices that
its router is silent (it asks for a word when it has heard none for a while) and knocks at the next, with heartbeats as
before: the router there remembers it (``Recall``), or tells it that it is no member (``Expelled``), and either way it
joins. A router of its own that was only cut off is found again when its turn comes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from memserve.errors import check

ASK_S = 1.0
"""After so long without a word of the router it is asked for one."""
SILENT_S = 6.0
"""After so long it is taken to be gone. By then it takes the same of us."""
TURN_S = 2.0
"""How long each other address has to answer."""


class Doors:
    """The addresses, which of them is tried, and since when nobody has spoken."""

    def __init__(self, addresses: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        check(addresses, "an instance needs at least one address of a router")
        self._addresses, self._clock = list(addresses), clock
        self._heard_s = clock()
        self.address = self._addresses[0]
        """The one that is tried, or where the router is."""
        self.home: str | None = None
        """Where the router is that welcomed us; ``None``: none has."""

    def __str__(self) -> str:
        return ", ".join(self._addresses)

    @property
    def asks(self) -> bool:
        """Whether the router should be asked for a word."""
        return len(self._addresses) > 1 and self._clock() - self._heard_s >= ASK_S

    def heard(self) -> None:
        """A router has spoken."""
        self._heard_s = self._clock()

    def turn(self) -> bool:
        """Go on to the next address if it is time; whether it was."""
        patience_s = SILENT_S if self.address == self.home else TURN_S
        if len(self._addresses) == 1 or self._clock() - self._heard_s < patience_s:
            return False
        self._heard_s = self._clock()
        self.address = self._addresses[(self._addresses.index(self.address) + 1) % len(self._addresses)]
        return True

    def lead_to(self, address: str) -> None:
        """A router calls from there: it stands in the place of the one that is tried, unless it is known."""
        if address not in self._addresses:
            self._addresses[self._addresses.index(self.address)] = address
        self.address, self.home = address, None
        self.heard()

    def settle(self, joined_at: str) -> None:
        """The router at ``joined_at`` has welcomed us, perhaps after the next address was tried."""
        if joined_at in self._addresses:  # a router of an older version does not say where
            self.address = joined_at
        self.home = self.address
