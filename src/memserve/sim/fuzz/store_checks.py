"""What must hold of a store when all is over: nothing is held, what it has is what its names say, the router knows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from memserve.cluster.machine import Cluster
from memserve.mempool.pool import BlockPool
from memserve.sim.fuzz.clients import Referee
from memserve.sim.fuzz.literal_pages import in_layer
from memserve.sim.fuzz.store_devices import read_record
from memserve.sim.fuzz.store_memory import seal_of
from memserve.sim.fuzz.stores import FuzzedStore
from memserve.sim.fuzz.truth import cell, mix, require
from memserve.store.disk_steps import place_of
from memserve.types import Tier


def check_at_rest(router: Cluster, store: FuzzedStore) -> None:
    """Nothing is on its way, nothing is referred to, and the router knows where each block lies."""
    machine = store.machine
    machine.check_invariants()
    require(store.alive and not store.paused, "the store does not run")
    held = {extent: count for extent, count in machine.references().items() if count}
    require(not held, f"the store holds {held}")
    require(not machine.kv.exchange.transfers_open, f"{machine.kv.exchange.transfers_open} transfers are open")
    require(not machine.loads.open and not machine.values.writes_open, "the store still reads or writes")
    require(machine.values.disks.idle, "its disks are busy")
    check_tree(router, store)


def check_memory_is_whole(store: FuzzedStore) -> None:
    """Once everything is forgotten, every block is free."""
    store.machine.values.forget_everything(store.now)
    tier = store.machine.values.tier
    require(tier.blocks_free == tier.blocks_total, f"{tier.blocks_total - tier.blocks_free} blocks leaked")


def check_contents(store: FuzzedStore, pool: BlockPool, referee: Referee) -> None:
    """Each block holds the KV that its name stands for, wherever it lies; on disks where nothing was damaged."""
    for identity, truth in _truths(store, pool, referee):
        entry = store.tier.find(identity, counts=False)
        if entry is not None:
            there = store.memory.read(entry.offset, entry.length)
            store.machine.values.tier.release(entry.offset)
            require(there == truth or not entry.verified, f"{identity.hex()[:8]} in memory is something else")
            require(entry.seal == seal_of(truth), f"{identity.hex()[:8]} in memory was sealed as something else")
        for number, disk in enumerate(store.disks):
            log = store.machine.values.disks._disks[number].log
            found = log.look(identity) if log is not None else None
            if log is None or found is None:
                continue
            offset, inside = place_of(found)
            _, payload = read_record(disk, offset, found.length, inside)
            require(payload == truth or store.has_damage, f"{identity.hex()[:8]} on disk {number} is something else")
            require(found.seal == seal_of(truth), f"{identity.hex()[:8]} on disk {number} was sealed as something else")


def _truths(store: FuzzedStore, pool: BlockPool, referee: Referee) -> Iterator[tuple[bytes, bytes]]:
    """Identity and bytes of every block of what clients have asked and were answered."""
    geometry, told = store.host.geometry, set[bytes]()
    size = geometry.block_tokens
    for ask in referee.asks.values():
        answers = [] if ask.request.beam_width else list(ask.got.values())
        for answer in answers or [[]]:
            tokens = [*ask.request.prompt.tolist(), *answer]
            packed = pool.identities(ask.request.isolation, np.asarray(tokens, np.int32))
            cells = _cells(tokens)
            for at in range(len(tokens) // size):
                identity = bytes(packed[16 * at : 16 * at + 16])
                if identity not in told:
                    told.add(identity)
                    yield identity, _block(cells[at * size : (at + 1) * size], geometry.num_layers)


def _cells(tokens: list[int]) -> list[int]:
    seen, cells = 0, []
    for position, token in enumerate(tokens):
        cells.append(cell(token, position, seen))
        seen = mix(seen, cells[-1])
    return cells


def _block(cells: list[int], layers: int) -> bytes:
    """As :class:`StoreMemory` has it: one layer after the other."""
    values = (in_layer(value, layer) for layer in range(layers) for value in cells)
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
        (name, int(log.tier_of(name) is Tier.DRAM), int(log.tier_of(name) is Tier.SSD)) for name in log.identities()
    ]
    truth.sort()
    if believed != truth:
        too_much = [(name.hex()[:8], *rest) for name, *rest in believed if (name, *rest) not in truth]
        too_little = [(name.hex()[:8], *rest) for name, *rest in truth if (name, *rest) not in believed]
        require(False, f"{len(believed)} blocks of the store believed, {len(truth)} there; {too_much}; {too_little}")
