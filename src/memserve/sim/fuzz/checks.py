"""What must hold at the end: nothing is held, nothing is open, every process knows where all blocks lie."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from memserve.cluster.machine import Cluster
from memserve.messages import Peer
from memserve.sim.fuzz.truth import require
from memserve.sim.member_node import MemberNode
from memserve.sim.nodes import InstanceNode
from memserve.types import Tier


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
    counters, done = router.stats().counters, Counter[str]()
    done.update(resumed=counters.resumptions, gaps=counters.kv_gaps, snapshots=counters.kv_snapshots)
    done.update(expelled=counters.expelled, died=counters.members_died, left=counters.members_left)
    if counters.answers_continued or counters.attempts_adopted:
        done.update({"keyed: continued": counters.answers_continued, "keyed: adopted": counters.attempts_adopted})
    if remembers:
        done.update(readopted=counters.members_readopted)
    return done


def _name(peer: Peer) -> str:
    return peer.name


def _check_idle(node: InstanceNode) -> None:
    machine, name = node.machine, node.peer.name
    require(not node.plans, f"{name} still computes")
    load = machine.load()
    require((load.requests_waiting, load.sequences_running) == (0, 0), f"{name} is busy: {machine!r}")
    require(load.transfers_open == 0, f"{name}: {load.transfers_open} transfers are open")
    for report in machine.pool.report().tiers:
        held, tier = report.blocks_used - report.blocks_evictable, report.tier.name
        require(held == 0, f"{name}: {held} blocks of {tier} leaked: {report}")
        require(report.blocks_pinned == 0, f"{name}: {report.blocks_pinned} blocks of {tier} pinned")


def _check_tree(router: Cluster, node: InstanceNode) -> None:
    """The router's tree of an instance equals the instance's index, block by block and tier by tier."""
    pool, trees = node.machine.pool, router._trees
    member = router._registry.get(node.peer)
    require(member is not None, f"{node.peer} is no member")
    number = member.number if member is not None else -1
    believed = [(bytes(name), hbm, dram) for name, hbm, dram in trees.directory.dump(number)]
    there: Counter[tuple[bytes, Tier]] = Counter()
    for tier in (Tier.HBM, Tier.DRAM):
        packed = pool.cached_identities(tier)
        there.update((packed[at : at + 16], tier) for at in range(0, len(packed), 16))
    names = sorted({name for name, _ in there})
    truth = [(name, there[name, Tier.HBM], there[name, Tier.DRAM]) for name in names]
    if believed != truth:
        too_much = [(n.hex()[:8], h, d) for n, h, d in believed if (n, h, d) not in truth]
        too_little = [(n.hex()[:8], h, d) for n, h, d in truth if (n, h, d) not in believed]
        counts = f"{len(believed)} blocks believed, {len(truth)} there"
        feed = f"{trees.feed(number)}, at {pool.next_event}"
        require(False, f"{node.peer.name}: {counts}; {feed}; too much {too_much}, too little {too_little}")
