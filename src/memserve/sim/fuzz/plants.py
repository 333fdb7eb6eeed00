"""Planted faults: the product with one of its safeguards taken out, to show which checker notices, and how soon.

Only a simulation does this, and only while :func:`planted` lasts. No line of the product knows of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from memserve.cluster.events import ClusterAction
from memserve.cluster.outbox import DurabilityGate, Write
from memserve.cluster.registry import Member, Registry
from memserve.cluster.trees import Feed, Trees
from memserve.errors import UserError
from memserve.instance.member import MemberMachine, RouterAddresses
from memserve.kv_transfer.context import Deadlines, Expiring
from memserve.kv_transfer.events import PagesPulled
from memserve.kv_transfer.receiver import Receiver
from memserve.mempool import pool as pool_module
from memserve.mempool.identity import DEFAULT_KEY, namespace_id
from memserve.messages import AskEvents, Expelled, Peer
from memserve.meta.store import Store

Swap = tuple[Any, str, Any]
"""An object, the name of its attribute, and what it is to be instead."""


def _any_generation(self: Registry, peer: Peer) -> Member | None:
    return self.named(peer.name)


def _generation_check() -> list[Swap]:
    """Any process with the name of a member is taken for it."""
    return [(Registry, "get", _any_generation)]


def _never_due(self: Deadlines, now: int) -> Expiring | None:
    return None


def _lease_sweep() -> list[Swap]:
    """Offers, imports and fetches that are not ended live for ever."""
    return [(Deadlines, "pop_due", _never_due)]


def _one_namespace(tenant: str, fingerprint: str, key: bytes = DEFAULT_KEY) -> bytes:
    return namespace_id("", fingerprint, key)


def _namespace_check() -> list[Swap]:
    """All tenants find each other's KV."""
    return [(pool_module, "namespace_id", _one_namespace)]


def _never_asks(self: Trees, feed: Feed, now: int) -> AskEvents | None:
    return None


def _event_replay() -> list[Swap]:
    """The router does not ask for the KV events that it has missed."""
    return [(Trees, "_ask", _never_asks)]


def _lies(self: Store) -> None:
    return


def _fsync() -> list[Swap]:
    """The router's journal says that all is safe, and never syncs."""
    return [(Store, "sync", _lies)]


def _believes(self: Receiver, event: PagesPulled) -> None:
    _pulled(self, replace(event, error=""))


_pulled = Receiver.pulled


def _checksum() -> list[Swap]:
    """Pages are taken as they come, whatever was wrong with them."""
    return [(Receiver, "pulled", _believes)]


def _goes_through(self: DurabilityGate, actions: Iterable[ClusterAction]) -> list[ClusterAction | Write]:
    """Everything at once; what is to be written is written all the same."""
    held = _admit(self, actions)
    return [*held, *self.release(self._asked)]


_admit = DurabilityGate.admit


def _durability_gate() -> list[Swap]:
    """Messages leave before what they depend on is durable."""
    return [(DurabilityGate, "admit", _goes_through)]


def _stays_the_same(self: MemberMachine, sender: Peer, message: Expelled) -> None:
    return


def _expulsion() -> list[Swap]:
    """An instance that was taken to be dead goes on as if nothing had happened."""
    return [(MemberMachine, "_leave_incarnation", _stays_the_same)]


def _never_leaves(self: MemberMachine, refused: str = "") -> None:
    return


def _leaving() -> list[Swap]:
    """An instance that drains never leaves."""
    return [(MemberMachine, "_leave", _never_leaves)]


def _never_turns(self: RouterAddresses, now: int) -> bool:
    return False


def _router_addresses() -> list[Swap]:
    """Instances look for a router at their first address alone."""
    return [(RouterAddresses, "turn", _never_turns), (RouterAddresses, "lead_to", _stays)]


def _stays(self: RouterAddresses, address: str, now: int) -> None:
    self.heard(now)


PLANTS: dict[str, Callable[[], list[Swap]]] = {
    "generation-check": _generation_check,
    "lease-sweep": _lease_sweep,
    "namespace-check": _namespace_check,
    "event-replay": _event_replay,
    "fsync": _fsync,
    "checksum": _checksum,
    "durability-gate": _durability_gate,
    "expulsion": _expulsion,
    "leaving": _leaving,
    "router-addresses": _router_addresses,
}


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Everything that is built and run inside lacks the safeguard ``name``; ``None``: nothing is missing. Raises
    :class:`UserError` for an unknown name."""
    if name is not None and name not in PLANTS:
        raise UserError(f"unknown planted fault {name!r}", hint=f"use one of {', '.join(PLANTS)}")
    swaps = PLANTS[name]() if name is not None else []
    kept = [(thing, attribute, thing.__dict__[attribute]) for thing, attribute, _ in swaps]
    try:
        for thing, attribute, other in swaps:
            setattr(thing, attribute, other)
        yield
    finally:
        for thing, attribute, before in kept:
            setattr(thing, attribute, before)
