"""What must hold at the end: nothing is held, nothing is open, every process knows where all blocks lie.

What must hold of a store when all is over: nothing is held, what it has is what its names say, the router knows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from memserve.base.types import Tier
from memserve.kv.pool import BlockPool
from memserve.protocol.peers import Peer
from memserve.router.machine import Cluster
from memserve.store.disks.jobs import place_of
from memserve_lab.sim.engines import EngineNode
from memserve_lab.sim.fuzz.clients import OutputChecker
from memserve_lab.sim.fuzz.stores import FuzzedStore, read_record, seal_of
from memserve_lab.sim.nodes import InstanceNode, MemberNode
from memserve_lab.sim.reference.memory import SymbolicStates, in_layer
from memserve_lab.sim.reference.oracle import cell, mix, require


def check_at_rest(
    router: Cluster, nodes: Sequence[InstanceNode], stores: Sequence[MemberNode], has_events: bool
) -> None:
    """Every block is free or only kept for reuse, and the router knows exactly where each lies."""
    members = [view.peer for view in router.instances()]
    require(sorted(members, key=_name) == sorted((n.peer for n in (*nodes, *stores)), key=_name), f"members: {members}")
    for node in nodes:
        _check_idle(node)
        if has_events:
            _check_tree(router, node)


def check_memory_is_whole(nodes: Sequence[InstanceNode]) -> None:
    """Once the caches are dropped, every block of every tier is free."""
    for node in nodes:
        node.machine.pool.clear_cache()
        for report in node.machine.pool.report().tiers:
            require(report.blocks_free == report.blocks_total, f"{node.peer.name}: {report}")


def achievements(router: Cluster, *, remembers: bool) -> Counter[str]:
    """Counts of what a router has gone through."""
    counters, counts = router.stats().counters, Counter[str]()
    counts.update(resumed=counters.resumptions, gaps=counters.kv_gaps, snapshots=counters.kv_snapshots)
    counts.update(expelled=counters.expelled, died=counters.members_died, left=counters.members_left)
    if counters.answers_continued or counters.attempts_adopted:
        counts.update({"keyed: continued": counters.answers_continued, "keyed: adopted": counters.attempts_adopted})
    if remembers:
        counts.update(readopted=counters.members_readopted)
    return counts


def _name(peer: Peer) -> str:
    return peer.name


def _check_idle(node: InstanceNode) -> None:
    machine, name = node.machine, node.peer.name
    require(not node.plans, f"{name} still computes")
    load = machine.load()
    require((load.requests_waiting, load.sequences_running) == (0, 0), f"{name} is busy: {machine!r}")
    require(load.transfers_open == 0, f"{name}: {load.transfers_open} transfers are open")
    for report in machine.pool.report().tiers:
        blocks_held, tier = report.blocks_used - report.blocks_evictable, report.tier.name
        require(blocks_held == 0, f"{name}: {blocks_held} blocks of {tier} leaked: {report}")
        require(report.blocks_pinned == 0, f"{name}: {report.blocks_pinned} blocks of {tier} pinned")


def _check_tree(router: Cluster, node: InstanceNode) -> None:
    """The router's tree of an instance equals the instance's index, block by block and tier by tier."""
    pool, trees = node.machine.pool, router._trees
    member = router._registry.get(node.peer)
    require(member is not None, f"{node.peer} is no member")
    number = member.number if member is not None else -1
    believed = [(bytes(name), hbm, dram) for name, hbm, dram in trees.directory.dump(number)]
    places: Counter[tuple[bytes, Tier]] = Counter()
    for tier in (Tier.HBM, Tier.DRAM):
        packed = pool.cached_identities(tier)
        places.update((packed[offset : offset + 16], tier) for offset in range(0, len(packed), 16))
    names = sorted({name for name, _ in places})
    truth = [(name, places[name, Tier.HBM], places[name, Tier.DRAM]) for name in names]
    if believed != truth:
        too_much = [(n.hex()[:8], h, d) for n, h, d in believed if (n, h, d) not in truth]
        too_little = [(n.hex()[:8], h, d) for n, h, d in truth if (n, h, d) not in believed]
        counts = f"{len(believed)} blocks believed, {len(truth)} there"
        feed = f"{trees.feed_of(number)}, at {pool.next_event}"
        require(False, f"{node.peer.name}: {counts}; {feed}; too much {too_much}, too little {too_little}")


def check_engine_at_rest(router: Cluster, engine: EngineNode) -> None:
    """It answers nothing, and the router knows what it has published of its cache."""
    name = engine.peer.name
    require(engine.is_idle and engine.machine.heartbeat_load(engine.now).load.sequences_running == 0, f"{name} is busy")
    member = router._registry.get(engine.peer)
    require(member is not None, f"{engine.peer} is no member")
    if member is None or not engine.setup.publishes:
        return
    believed = router._trees.directory.dump(member.number)
    copies: Counter[bytes] = Counter()
    packed = engine.machine.cached_identities()
    copies.update(packed[offset : offset + 16] for offset in range(0, len(packed), 16))
    truth = sorted(copies.items())
    require([(bytes(block), above) for block, above, _ in believed] == truth, f"{name}: {believed}, not {truth}")


def check_stores_at_rest(router: Cluster, store: FuzzedStore) -> None:
    """Nothing is on its way, nothing is referred to, and the router knows where each block lies."""
    machine = store.machine
    machine.check_invariants()
    require(store.alive and not store.paused, "the store does not run")
    references = {extent: count for extent, count in machine.count_references().items() if count}
    require(not references, f"the store holds {references}")
    require(not machine.kv.exchange.transfers_open, f"{machine.kv.exchange.transfers_open} transfers are open")
    require(not machine.loads.open_loads and not machine.values.writes_open, "the store still reads or writes")
    require(machine.values.disks.is_idle, "its disks are busy")
    check_tree(router, store)


def check_store_memory_is_whole(store: FuzzedStore) -> None:
    """Once everything is forgotten, every block is free."""
    store.machine.values.forget_everything(store.now)
    tier = store.machine.values.tier
    require(tier.blocks_free == tier.blocks_total, f"{tier.blocks_total - tier.blocks_free} blocks leaked")


def check_contents(store: FuzzedStore, pool: BlockPool, referee: OutputChecker) -> None:
    """Each block holds the KV that its name stands for, wherever it lies; on disks where nothing was damaged. So does
    the first page of those with a recurrent state: others need not be the state's."""
    for identity, truth in _state_truths(store, pool, referee):
        entry = store.tier.find(identity, counts=False)
        if entry is not None:
            stored = store.memory.read_extent(entry.offset, len(truth))
            store.machine.values.tier.release(entry.offset)
            require(stored == truth or not entry.verified, f"{identity.hex()[:8]} in memory is another state")
    for identity, truth in _truths(store, pool, referee):
        entry = store.tier.find(identity, counts=False)
        if entry is not None:
            stored = store.memory.read_extent(entry.offset, entry.length)
            store.machine.values.tier.release(entry.offset)
            require(stored == truth or not entry.verified, f"{identity.hex()[:8]} in memory is something else")
            require(entry.seal == seal_of(truth), f"{identity.hex()[:8]} in memory was sealed as something else")
        for number, disk in enumerate(store.disks):
            log = store.machine.values.disks._disks[number].log
            record = log.look(identity) if log is not None else None
            if log is None or record is None:
                continue
            offset, inside = place_of(record)
            _, payload = read_record(disk, offset, record.length, inside)
            require(payload == truth or store.has_damage, f"{identity.hex()[:8]} on disk {number} is something else")
            require(
                record.seal == seal_of(truth), f"{identity.hex()[:8]} on disk {number} was sealed as something else"
            )


def _state_truths(store: FuzzedStore, pool: BlockPool, referee: OutputChecker) -> Iterator[tuple[bytes, bytes]]:
    """Identity of every block of a state behind what clients have asked and were answered, and its first page."""
    size = store.host.geometry.block_tokens
    for tokens, identities in _token_runs(pool, referee) if not pool.part_blocks else ():
        for end in range(size, len(tokens) + 1, size):
            behind = SymbolicStates.behind(tokens[:end])
            for place, identity in enumerate(pool.state_identities(identities[end // size - 1])):
                cells = SymbolicStates.cells_of((end, behind, place), size)
                yield identity, _block([cell for cell in cells if cell is not None], range(1))


def _token_runs(pool: BlockPool, referee: OutputChecker) -> Iterator[tuple[list[int], list[bytes]]]:
    """What clients have asked and were answered, with the identities of its whole blocks."""
    for ask in referee.asks.values():
        answers = [] if ask.request.beam_width else list(ask.got.values())
        for answer in answers or [[]]:
            tokens = [*ask.request.prompt.tolist(), *answer]
            packed = pool.identities(ask.request.isolation, np.asarray(tokens, np.int32))
            yield tokens, [bytes(packed[offset : offset + 16]) for offset in range(0, len(packed), 16)]


def _truths(store: FuzzedStore, pool: BlockPool, referee: OutputChecker) -> Iterator[tuple[bytes, bytes]]:
    """Identity and bytes of every block of what clients have asked and were answered, and of its part of a window."""
    layers, seen_identities = store.host.geometry.num_layers, set[bytes]()
    size = store.host.geometry.block_tokens
    for tokens, identities in _token_runs(pool, referee):
        cells = _cells(tokens)
        for index, identity in enumerate(identities):
            if identity not in seen_identities:
                seen_identities.add(identity)
                own_cells = cells[index * size : (index + 1) * size]
                yield identity, _block(own_cells, range(layers))
                for place, name in enumerate(pool.state_identities(identity) if pool.part_blocks else (), 1):
                    yield name, _block(own_cells, range(place * layers, (place + 1) * layers))


def _cells(tokens: list[int]) -> list[int]:
    hash_so_far, cells = 0, []
    for position, token in enumerate(tokens):
        cells.append(cell(token, position, hash_so_far))
        hash_so_far = mix(hash_so_far, cells[-1])
    return cells


def _block(cells: list[int], layers: range) -> bytes:
    """As :class:`StoreMemory` has it: one layer after the other."""
    values = (in_layer(value, layer) for layer in layers for value in cells)
    return b"".join(value.to_bytes(8, "little") for value in values)


def check_tree(router: Cluster, store: FuzzedStore) -> None:
    """The router knows where each block lies, tier by tier."""
    log, trees = store.machine.values.log, router._trees
    member = router._registry.get(store.peer)
    require(member is not None, f"{store.peer} is no member")
    believed = [
        (bytes(name), memory, disk) for name, memory, disk in trees.directory.dump(member.number if member else -1)
    ]
    truth = [
        (name, int(log.tier_of(name) is Tier.DRAM), int(log.tier_of(name) is Tier.SSD)) for name in log.all_identities()
    ]
    truth.sort()
    if believed != truth:
        too_much = [(name.hex()[:8], *rest) for name, *rest in believed if (name, *rest) not in truth]
        too_little = [(name.hex()[:8], *rest) for name, *rest in truth if (name, *rest) not in believed]
        require(False, f"{len(believed)} blocks of the store believed, {len(truth)} there; {too_much}; {too_little}")
