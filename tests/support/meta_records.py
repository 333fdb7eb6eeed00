"""Records as a router writes them, drawn at random; and a simple twin of the state that folds them."""

from __future__ import annotations

import random
from typing import Any

from memserve.base.types import KVGeometry, Role, Tier
from memserve.protocol.messages import KvChange
from memserve.protocol.peers import Peer, PeerInfo
from memserve.protocol.records import (
    AdapterDropped,
    AdapterPut,
    AnyRecord,
    DocumentDropped,
    DocumentPut,
    EntriesChanged,
    EntriesReplaced,
    EntryUsed,
    HandleDropped,
    HandlePinned,
    MemberDrained,
    MemberEntered,
    MemberGone,
    RouterStarted,
    SessionRouted,
)

GEOMETRY = KVGeometry(2, 1, 8, 8, "float32", 4)
S = 1_000_000_000


def info(peer: Peer, role: Role = Role.COLOCATED) -> PeerInfo:
    address = f"tcp://127.0.0.1:{5000 + peer.generation}"
    return PeerInfo(peer, role, address, "space", GEOMETRY, 64, 0, 512, True)


def identity(number: int) -> bytes:
    return number.to_bytes(16, "big")


def identities(*numbers: int) -> bytes:
    return b"".join(identity(number) for number in numbers)


class Drawn:
    """An endless story: members come, fill and empty their caches, and go."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0
        self.members: list[Peer] = []
        self.next_event: dict[Peer, int] = {}
        self.routers = 0

    def record(self) -> AnyRecord:
        rng, self.now = self.rng, self.now + self.rng.randrange(3 * S)
        if not self.routers or rng.random() < 0.02:
            self.routers += 1
            return RouterStarted(Peer("router", self.routers), f"tcp://h:{self.routers}", rng.randrange(10**6) * S)
        if not self.members or rng.random() < 0.1:
            peer = Peer(f"i{rng.randrange(5)}", rng.randrange(1, 1000))
            self.members = [member for member in self.members if member.name != peer.name] + [peer]
            return MemberEntered(info(peer), self.now)
        peer = rng.choice(self.members)
        kinds = ["changed"] * 6 + [
            "replaced",
            "used",
            "used",
            "drained",
            "gone",
            "session",
            "pin",
            "unpin",
            "put",
            "del",
            "adapt",
            "unadapt",
        ]
        return getattr(self, "_" + rng.choice(kinds))(peer)

    def _ids(self, most: int) -> bytes:
        return identities(*(self.rng.randrange(40) for _ in range(self.rng.randrange(most))))

    def _changed(self, peer: Peer) -> AnyRecord:
        rng, first = self.rng, max(0, self.next_event.get(peer, 0) + self.rng.choice([0, 0, 0, 0, -1, 2]))
        kinds = ["stored", "stored", "moved", "evicted"] + ["lost"] * (rng.random() < 0.05)
        changes = tuple(
            KvChange(rng.choice(kinds), rng.choice([Tier.HBM, Tier.DRAM]), self._ids(6))
            for _ in range(rng.randrange(4))
        )
        self.next_event[peer] = max(self.next_event.get(peer, 0), first + len(changes))
        return EntriesChanged(peer, first, changes, self.now)

    def _replaced(self, peer: Peer) -> AnyRecord:
        at = max(0, self.next_event.get(peer, 0) + self.rng.choice([0, 0, -3, 5]))
        self.next_event[peer] = max(self.next_event.get(peer, 0), at)
        return EntriesReplaced(peer, at, self._ids(9), self._ids(9), self.now)

    def _used(self, peer: Peer) -> AnyRecord:
        return EntryUsed(peer, identity(self.rng.randrange(40)), self.now)

    def _drained(self, peer: Peer) -> AnyRecord:
        return MemberDrained(peer)

    def _gone(self, peer: Peer) -> AnyRecord:
        return MemberGone(peer)

    def _session(self, peer: Peer) -> AnyRecord:
        return SessionRouted(self.rng.choice("ab"), f"s{self.rng.randrange(9)}", (peer,))

    def _pin(self, peer: Peer) -> AnyRecord:
        tokens = b"\1\0\0\0" * self.rng.randrange(9)
        return HandlePinned(self.rng.choice("ab"), f"h{self.rng.randrange(9)}", tokens, self.now + 60 * S)

    def _unpin(self, peer: Peer) -> AnyRecord:
        return HandleDropped(self.rng.choice("ab"), f"h{self.rng.randrange(9)}")

    def _put(self, peer: Peer) -> AnyRecord:
        return DocumentPut(
            self.rng.choice("ab"), f"d{self.rng.randrange(9)}", b"text" * self.rng.randrange(9), self.now
        )

    def _del(self, peer: Peer) -> AnyRecord:
        return DocumentDropped(self.rng.choice("ab"), f"d{self.rng.randrange(9)}")

    def _adapt(self, peer: Peer) -> AnyRecord:
        return AdapterPut(f"a{self.rng.randrange(9)}", "/adapters/a", f"{self.rng.randrange(99)}")

    def _unadapt(self, peer: Peer) -> AnyRecord:
        return AdapterDropped(f"a{self.rng.randrange(9)}")


class StateTwin:
    """What the records mean, in the plainest way: lists and dicts, one entry a line."""

    def __init__(self) -> None:
        self.router: Any = None
        self.offset = 0
        self.members: dict[str, dict[str, Any]] = {}
        self.gone: list[Peer] = []
        self.kept: dict[str, dict[Any, Any]] = {"session": {}, "handle": {}, "document": {}, "adapter": {}}

    def apply(self, record: AnyRecord) -> None:
        match record:
            case RouterStarted(router, _, offset):
                self.router, self.offset = router, offset
            case MemberEntered(who):
                self._entered(who)
            case MemberDrained(peer) if self._has(peer):
                self.members[peer.name]["draining"] = True
            case MemberGone(peer):
                if self._has(peer):
                    del self.members[peer.name]
                self.gone = [*self.gone, peer] if peer not in self.gone else self.gone
            case EntriesChanged(peer, first, changes, at) if self._has(peer):
                self._changed(self.members[peer.name], first, changes, at + self.offset)
            case EntriesReplaced(peer, at_event, hbm, dram, at) if self._has(peer):
                self._replaced(self.members[peer.name], at_event, hbm, dram, at + self.offset)
            case EntryUsed(peer, block, at) if self._has(peer):
                if block in self.members[peer.name]["entries"]:
                    entry = self.members[peer.name]["entries"][block]
                    entry["used"], entry["hits"] = (at + self.offset) // S, entry["hits"] + 1
            case SessionRouted(tenant, name, peers):
                self.kept["session"].pop((tenant, name), None)
                self.kept["session"][tenant, name] = peers
            case HandlePinned(tenant, name, tokens, until):
                self.kept["handle"][tenant, name] = (tokens, until + self.offset)
            case HandleDropped(tenant, name):
                self.kept["handle"].pop((tenant, name), None)
            case DocumentPut(tenant, name, body, until):
                self.kept["document"][tenant, name] = (body, until)
            case DocumentDropped(tenant, name):
                self.kept["document"].pop((tenant, name), None)
            case AdapterPut(name, folder, digest):
                self.kept["adapter"][name] = (folder, digest)
            case AdapterDropped(name):
                self.kept["adapter"].pop(name, None)

    def _has(self, peer: Peer) -> bool:
        return peer.name in self.members and self.members[peer.name]["info"].peer == peer

    def _entered(self, who: PeerInfo) -> None:
        old = self.members.get(who.peer.name)
        if who.peer in self.gone or (old is not None and old["info"].peer.generation >= who.peer.generation):
            return
        self.members.pop(who.peer.name, None)
        self.members[who.peer.name] = {"info": who, "draining": False, "next": 0, "entries": {}}

    def _changed(self, page: dict[str, Any], first: int, changes: tuple[KvChange, ...], now_ns: int) -> None:
        for number, change in enumerate(changes, first):
            if number > page["next"] or (number == page["next"] and change.kind == "lost"):
                return
            if number < page["next"]:
                continue
            page["next"] += 1
            for at in range(0, len(change.identities), 16):
                block = change.identities[at : at + 16]
                if change.kind == "evicted":
                    page["entries"].pop(block, None)
                else:
                    fresh = {"created": now_ns // S, "used": now_ns // S, "hits": 0}
                    page["entries"].setdefault(block, fresh)["tier"] = change.tier

    def _replaced(self, page: dict[str, Any], at_event: int, hbm: bytes, dram: bytes, now_ns: int) -> None:
        if at_event < page["next"]:
            return
        old, page["entries"], page["next"] = page["entries"], {}, at_event
        for tier, run in ((Tier.DRAM, dram), (Tier.HBM, hbm)):
            for at in range(0, len(run), 16):
                known = old.get(run[at : at + 16], {"created": now_ns // S, "used": now_ns // S, "hits": 0})
                page["entries"][run[at : at + 16]] = {**known, "tier": tier}
