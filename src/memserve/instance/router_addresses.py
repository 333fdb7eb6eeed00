"""Where a member looks for its router."""

from __future__ import annotations

from collections.abc import Sequence

from memserve.config import MemberConfig


class RouterAddresses:
    """Where an instance looks for its router: all addresses, the one in use, and when a router was last heard.

    With one address the instance stays with it, and with the address that a ``RejoinRequest`` names. With several, an
    instance that has heard no router for a while asks for a ``HeartbeatAck``, and then tries the next address, with
    heartbeats as before: a router there remembers the instance (``RejoinRequest``) or says that it is no member
    (``Expelled``), and either way the instance joins. A router that was only cut off for a while is found again when
    the turn comes to its address.
    """

    __slots__ = ("_addresses", "_config", "_heard_ns", "address", "home", "is_called")

    def __init__(self, addresses: Sequence[str], config: MemberConfig) -> None:
        self._addresses, self._config = list(addresses), config
        #: whether an address is known only while a router has called
        self.is_called = not addresses
        self._heard_ns = 0
        #: the address that is tried, or where the router is. Empty: none is known
        self.address = self._addresses[0] if addresses else ""
        #: the address of the router whose member this instance is. None: it is no member
        self.home: str | None = None

    def __str__(self) -> str:
        return ", ".join(self._addresses)

    def __contains__(self, address: str) -> bool:
        return address in self._addresses

    def wants_ack(self, now: int) -> bool:
        """Whether the router should be asked for a sign of life."""
        return (len(self._addresses) > 1 or self.is_called) and now - self._heard_ns >= self._config.asks_after_ns

    def heard(self, now: int) -> None:
        """A router has spoken, or the instance begins to listen."""
        self._heard_ns = now

    def turn(self, now: int) -> bool:
        """Go on to the next address if it is time. True: it was."""
        patience_ns = self._config.silent_after_ns if self.address == self.home else self._config.turn_ns
        if len(self._addresses) <= 1 or now - self._heard_ns < patience_ns:
            return False
        self._heard_ns = now
        self.address = self._addresses[(self._addresses.index(self.address) + 1) % len(self._addresses)]
        return True

    def lead_to(self, address: str, now: int) -> None:
        """A router calls from ``address``; one that was not known takes the place of the one that is tried."""
        if self.is_called:
            self._addresses = [address]
        elif address not in self._addresses:
            self._addresses[self._addresses.index(self.address)] = address
        self.address, self.home = address, None
        self.heard(now)

    def settle(self, joined_at: str) -> None:
        """The router at ``joined_at`` has accepted this instance, perhaps after the next address was tried."""
        if joined_at in self._addresses:  # a router of an older version does not say where
            self.address = joined_at
        self.home = self.address

    def return_home(self) -> bool:
        """Go back to the router's address. True: another one was tried meanwhile, the router was only cut off."""
        if self.home in (None, self.address):
            return False
        self.address = self.home or ""
        return True

    def is_lost(self, now: int) -> bool:
        """Whether a router that has called is silent for too long."""
        return self.is_called and bool(self.address) and now - self._heard_ns >= self._config.silent_after_ns

    def forget(self) -> None:
        """The router that has called is gone."""
        self._addresses, self.address, self.home = [], "", None
