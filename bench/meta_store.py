"""The cost of durable metadata: our journal beside SQLite (WAL), at 100 to 1,000,000 cache entries (row C9).

    python bench/meta_store.py [--entries 100,1000,5000,1000000] [--folder DIR] [--json FILE]

For each size, records are written as the router writes them, in events of 64 stored blocks (1 to 1,000 instances),
synced at the end. Then all state is dropped and read again:

* *write*: until all entries are durable;
* *one more*: a single synced record: the wait of a pin, or of a new member (median of 50);
* *restart*: from opening the files to the first routing decision from the recovered entries: read, fold, fill the
  directory, members asked to rejoin and answering, one request placed. SQLite gives the same rows to the same machine;
* *kept*: share of a sample of cached prompts that the new router routes to their holders.

The last line cuts a journal off at 500 random points, on a simulated disk that loses and tears what was not synced,
and counts acknowledged records that were lost.
"""

from __future__ import annotations

import random
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from harness.flags import Commas, options, save
from harness.rounds import median, seconds
from harness.tables import Table

from memserve.base.config import ClusterConfig
from memserve.base.types import KVGeometry, Request, Role, SamplingParams, StopParams, Tier
from memserve.journal.folder import FileMedium
from memserve.journal.store import Store
from memserve.protocol.events import RequestArrived
from memserve.protocol.messages import Dispatch, Join, KvChange
from memserve.protocol.peers import Peer, PeerInfo
from memserve.protocol.records import (
    AnyRecord,
    EntriesChanged,
    MemberEntered,
    RecoveredMember,
    RecoveredState,
    RouterStarted,
    SessionRouted,
)
from memserve.router.events import MessageArrived, Send, StateRecovered
from memserve.router.machine import Cluster
from memserve_lab.sim.faulty_medium import FaultyMedium

SIZES = (100, 1_000, 5_000, 1_000_000)
GEOMETRY = KVGeometry(30, 3, 64, 64, "bfloat16", 32)
EVENT_BLOCKS = 64
"""Blocks of one prompt, and of one event."""
SAMPLE = 200
ROUTER = Peer("router", 1)


class World:
    """Instances, and the prompts that each has cached: one prompt of 64 blocks an event."""

    def __init__(self, entries: int) -> None:
        self.instances = max(1, min(1000, entries // 1000))
        self.prompts = [min(EVENT_BLOCKS, entries - place) for place in range(0, entries, EVENT_BLOCKS)]
        self._seeds = np.random.default_rng(entries)
        self.tokens = [self._seeds.integers(1, 32_000, blocks * 32, dtype=np.int32) for blocks in self.prompts]
        trees = Cluster(ClusterConfig())._trees
        self.identities = [trees.prompt_identities("", "weights", tokens, 32) for tokens in self.tokens]

    def peer(self, prompt: int) -> Peer:
        """The instance that holds ``prompt``."""
        return Peer(f"i{prompt % self.instances}", 7)

    def infos(self) -> list[PeerInfo]:
        names = [Peer(f"i{number}", 7) for number in range(self.instances)]
        return [PeerInfo(p, Role.COLOCATED, "tcp://h:1", "weights", GEOMETRY, 4096, 0, 8192, True) for p in names]

    def records(self) -> list[list[AnyRecord]]:
        """The records as a router writes them, by event."""
        first: dict[Peer, int] = {}
        batches: list[list[AnyRecord]] = [[RouterStarted(ROUTER, "tcp://h:2")]]
        batches += [[MemberEntered(info, 0)] for info in self.infos()]
        for prompt, identities in enumerate(self.identities):
            peer = self.peer(prompt)
            change = KvChange("stored", Tier.HBM, identities)
            batches.append([EntriesChanged(peer, first.setdefault(peer, 0), (change,), prompt)])
            first[peer] += 1
        return batches


class Journal:
    """Ours: ``memserve.journal`` on a file."""

    name = "journal"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = Store(FileMedium(folder))

    def write(self, batches: list[list[AnyRecord]]) -> None:
        """Write all of them, durably."""
        for batch in batches:
            self.store.write_records(batch)
        self.store.sync()

    def one_more(self, number: int) -> None:
        """Write one more record, durably."""
        self.store.write_records([SessionRouted("", f"s{number}", (ROUTER,))])
        self.store.sync()

    def close(self) -> None:
        self.store.close()

    def read(self) -> RecoveredState:
        """Read everything from the files."""
        self.store = Store(FileMedium(self.folder))
        return self.store.state.recovered_state(0)

    def disk_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.folder.iterdir())


class Sqlite:
    """The rival: rows in WAL mode, a transaction a batch, ``synchronous=NORMAL`` while nothing waits, then a
    checkpoint of the WAL; one row is written with ``synchronous=FULL``."""

    name = "sqlite"

    def __init__(self, folder: Path) -> None:
        self.path = folder / "meta.db"
        self.base = sqlite3.connect(self.path, isolation_level=None)
        self.base.executescript(
            "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; PRAGMA wal_autocheckpoint=100000;"
            "CREATE TABLE IF NOT EXISTS members (name TEXT PRIMARY KEY, generation INT, next_event INT);"
            "CREATE TABLE IF NOT EXISTS entries (name TEXT, identity BLOB, tier INT, created INT, used INT,"
            " PRIMARY KEY (name, identity)) WITHOUT ROWID;"
            "CREATE TABLE IF NOT EXISTS sessions (session TEXT PRIMARY KEY, peers TEXT);"
        )

    def write(self, batches: list[list[AnyRecord]]) -> None:
        """Write all of them, durably."""
        for batch in batches:
            self.base.execute("BEGIN")
            for record in batch:
                self._write(record)
            self.base.execute("COMMIT")
        self.base.execute("PRAGMA wal_checkpoint(FULL)")
        self.base.execute("PRAGMA synchronous=FULL")

    def _write(self, record: AnyRecord) -> None:
        if isinstance(record, MemberEntered):
            peer = record.info.peer
            self.base.execute("INSERT OR REPLACE INTO members VALUES (?, ?, 0)", (peer.name, peer.generation))
        elif isinstance(record, EntriesChanged):
            data, name = record.changes[0].identities, record.peer.name
            rows = (
                (name, data[place : place + 16], 0, record.at_ns, record.at_ns) for place in range(0, len(data), 16)
            )
            self.base.executemany("INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?)", rows)
            self.base.execute("UPDATE members SET next_event = ? WHERE name = ?", (record.first + 1, name))

    def one_more(self, number: int) -> None:
        """Write one more row, durably."""
        self.base.execute("INSERT OR REPLACE INTO sessions VALUES (?, ?)", (f"s{number}", "router"))

    def close(self) -> None:
        self.base.close()

    def read(self) -> RecoveredState:
        """Read everything from the files."""
        self.base = sqlite3.connect(self.path, isolation_level=None)
        bytes_held: dict[str, list[bytes]] = {}
        for name, identity in self.base.execute("SELECT name, identity FROM entries WHERE tier = 0"):
            bytes_held.setdefault(name, []).append(identity)
        members = []
        for name, generation, next_event in self.base.execute("SELECT * FROM members"):
            info = PeerInfo(
                Peer(name, generation), Role.COLOCATED, "tcp://h:1", "weights", GEOMETRY, 4096, 0, 8192, True
            )
            members.append(RecoveredMember(info, False, next_event, b"".join(bytes_held.get(name, [])), b""))
        return RecoveredState(ROUTER, "tcp://h:2", tuple(members))

    def disk_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.path.parent.iterdir())


def restart(store: Journal | Sqlite, world: World) -> tuple[Cluster, float]:
    """A new router after its first decision, and the seconds until then."""
    prompt = len(world.prompts) // 2
    started = time.perf_counter()
    recovered = store.read()
    router = Cluster(ClusterConfig(), remembers=True)
    router.handle(StateRecovered(recovered, Peer("router", 2), "tcp://h:3"), 0)
    info = next(m.info for m in recovered.members if m.info.peer == world.peer(prompt))
    router.handle(MessageArrived(info.peer, Join(info)), 1)
    decision = decide(router, world, prompt)
    seconds = time.perf_counter() - started
    if decision != world.peer(prompt):
        raise SystemExit(f"{store.name}: prompt {prompt} was routed to {decision}, it lies at {world.peer(prompt)}")
    return router, seconds


def decide(router: Cluster, world: World, prompt: int) -> Peer | None:
    """The instance that computes a request that begins with ``prompt``."""
    tokens = np.append(world.tokens[prompt], np.int32(5))
    request = Request(f"r{prompt}", tokens, SamplingParams(), StopParams(max_tokens=1))
    messages = [a for a in router.handle(RequestArrived(request), 2) if isinstance(a, Send)]
    return next((a.to for a in messages if isinstance(a.message, Dispatch)), None)


def share_kept(router: Cluster, world: World, recovered: RecoveredState) -> float:
    """Share of a sample of prompts that the router finds whole at their holders."""
    for member in recovered.members:
        router.handle(MessageArrived(member.info.peer, Join(member.info)), 3)
    sample = random.Random(1).sample(range(len(world.prompts)), min(SAMPLE, len(world.prompts)))
    trees, results = router._trees, 0
    for prompt in sample:
        member = router._registry.member_by_name(world.peer(prompt).name)
        matches = trees.match_prompt(world.identities[prompt], len(router._loads))
        results += member is not None and int(matches.blocks[member.number]) == world.prompts[prompt]
    return results / len(sample)


def measure(make: Callable[[Path], Journal | Sqlite], world: World, folder: Path) -> dict[str, Any]:
    """All figures of one store at one size."""
    folder.mkdir()
    store, batches = make(folder), world.records()
    write_s = seconds(lambda: store.write(batches))
    times = [seconds(partial(store.one_more, number)) for number in range(50)]
    store.close()
    restarts = []
    for _ in range(5 if len(world.prompts) < 1000 else 1):
        router, spent_s = restart(store, world)
        restarts.append(spent_s)
        store.close()
    kept_share = share_kept(router, world, store.read())
    figures = {
        "entries": sum(world.prompts), "store": store.name, "write_ms": write_s * 1e3,
        "one_more_ms": median(times) * 1e3, "restart_ms": median(restarts) * 1e3,
        "kept": kept_share, "disk_mb": store.disk_bytes() / 1e6,
    }  # fmt: skip
    store.close()
    return figures


def lost_at_kill_points(points: int) -> int:
    """Number of acknowledged sessions missing after ``points`` power failures."""
    lost = 0
    for seed in range(points):
        rng, medium = random.Random(seed), FaultyMedium()
        store, acknowledged, written = Store(medium, checkpoint_bytes_min=rng.choice([300, 1 << 20])), 0, 0
        for written in range(1, rng.randrange(2, 80)):
            store.write_records([SessionRouted("", f"s{written}", (ROUTER,))])
            if rng.random() < 0.3:
                store.sync()
                acknowledged = written
        tail = medium.unsafe_bytes
        hole = rng.randint(0, tail)
        medium.lose_power(rng.randint(0, tail), [(hole, hole + rng.randrange(40))])
        results = {name for _, name in Store(medium).state.sessions}
        lost += sum(f"s{number}" not in results for number in range(1, acknowledged + 1))
    return lost


COLUMNS = {
    "entries": "{entries:,}", "store": "{store}", "write": "{write_ms:.1f} ms", "one more": "{one_more_ms:.2f} ms",
    "restart": "{restart_ms:.1f} ms", "kept": "{kept:.1%}", "disk": "{disk_mb:.2f} MB",
}  # fmt: skip


def main() -> None:
    args = options(__doc__, entries=Commas(*SIZES), folder=(Path, "a folder on the disk to be measured"))
    rows, table = [], Table(COLUMNS)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for entries in args.entries:
            world = World(entries)
            for make in (Journal, Sqlite):
                rows.append(measure(make, world, Path(folder) / f"{make.name}-{entries}"))
                table.show(rows[-1])
    lost = lost_at_kill_points(500)
    print(f"500 kill points, torn last writes: {lost} acknowledged records lost; the source's recovery: 9 ms at 5,000")
    save(args, {"rows": rows, "lost": lost})
    sys.exit(lost > 0)


if __name__ == "__main__":
    main()
