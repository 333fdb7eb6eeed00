"""One client of a store."""

from __future__ import annotations

from dataclasses import dataclass, field

from memserve.messages import Peer
from memserve.store_messages import StoreHello, StoreWelcome


@dataclass(slots=True, eq=False)
class Client:
    """One client."""

    peer: Peer
    number: int
    hello: StoreHello
    scope: int
    welcome: StoreWelcome
    heard_ns: int
    calls: set[int] = field(default_factory=set)
    """Under way."""
    listing: list[bytes] = field(default_factory=list)
    is_gone: bool = False
