"""Read-only views on the roster (level 2)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from memserve.instance.report import MemoryReport, RequestStory
from memserve.instance.roster import Roster
from memserve.instance.sequence import Group
from memserve.instance.stats import InstanceStats, TierReport
from memserve.mempool.events import PoolReport
from memserve.types import Tier

if TYPE_CHECKING:
    from memserve.instance.cluster_link import ClusterLink


def instance_stats(roster: Roster, plans_in_flight: int, link: ClusterLink | None) -> InstanceStats:
    """State now, and totals since the start."""
    stats = _local_stats(roster, plans_in_flight)
    return stats if link is None else _with_cluster(stats, link)


def _with_cluster(stats: InstanceStats, link: ClusterLink) -> InstanceStats:
    counters = link.exchange.counters
    return replace(
        stats,
        handed_over=link.handoffs.handed_over,
        taken_over=link.takeovers.taken_over,
        takeovers_failed=link.takeovers.failed,
        fetched_tokens=link.fetches.fetched_tokens,
        blocks_sent_home=link.blocks_sent_home,
        blocks_come_home=link.blocks_come_home,
        blocks_received=counters.pulled_blocks,
        blocks_reused=counters.reused_blocks,
        bytes_received=counters.pulled_bytes,
        dram_bytes_received=counters.pulled_dram_bytes,
        transfers_open=link.exchange.transfers_open,
        transfers_failed=counters.imports_failed,
        checksum_mismatches=counters.mismatches,
        pins=link.pins_held,
        messages_ignored=link.ignored_orders,
    )


def _local_stats(roster: Roster, plans_in_flight: int) -> InstanceStats:
    counters, pool = roster.counters, roster.memory.pool.report()
    sequences = [s for group in roster.groups.values() for s in group.sequences.values()]
    memory = memory_report(roster)
    return InstanceStats(
        requests_waiting=sum(s.slot is None for s in sequences),
        sequences_running=sum(s.slot is not None for s in sequences),
        sequences_swapped=sum(bool(s.dram_blocks) for s in sequences),
        requests_arrived=counters.requests,
        requests_finished=counters.requests_finished,
        requests_rejected=counters.requests_rejected,
        requests_cancelled=counters.requests_cancelled,
        prompt_tokens=counters.prompt_tokens,
        cached_tokens=counters.cached_tokens,
        computed_tokens=counters.prefill_tokens + counters.decode_tokens,
        generated_tokens=counters.generated_tokens,
        preemptions_swap=counters.preempted_by_swap,
        preemptions_recompute=counters.preempted_by_recompute,
        steps_failed=counters.steps_failed,
        rows_failed=counters.rows_failed,
        hbm=_tier(pool, Tier.HBM),
        dram=_tier(pool, Tier.DRAM),
        running_slots_tokens=memory.blocks_held * memory.block_tokens,
        running_tokens=memory.tokens_held,
        plans_in_flight=plans_in_flight,
        steps=counters.steps,
        dropped_tokens=counters.dropped_tokens,
        copied_on_write=roster.memory.copied_on_write,
        dram_tokens_reused=roster.memory.dram_tokens_reused,
        prefill_ns_per_token=roster.costs.prefill_ns_per_token,
        finished=dict(counters.finished),
    )


def _tier(pool: PoolReport, tier: Tier) -> TierReport:
    report = pool.by_tier[tier]
    return TierReport(
        blocks_total=report.blocks_total,
        blocks_free=report.blocks_free,
        blocks_cached=report.blocks_evictable,
        pages_free=report.pages_free,
        pages_stranded=report.pages_stranded,
    )


def memory_report(roster: Roster) -> MemoryReport:
    """Who holds what. Blocks shared by several sequences count once, by their fullest holder."""
    block_tokens = roster.memory.block_tokens
    filled: dict[int, int] = {}
    fragments: list[int] = []
    for group in roster.groups.values():
        for sequence in group.sequences.values():
            if not sequence.blocks:
                continue
            tokens = max(sequence.known, sequence.computed)
            capacity = len(sequence.blocks) * block_tokens
            held = min(tokens, capacity)
            fragments.append(capacity - held)
            for place, block in enumerate(sequence.blocks):
                inside = min(block_tokens, max(0, held - place * block_tokens))
                filled[block] = max(inside, filled.get(block, 0))
    return MemoryReport(
        pool=roster.memory.pool.report(),
        sequences=len(fragments),
        block_tokens=block_tokens,
        blocks_held=len(filled),
        tokens_held=sum(filled.values()),
        fragmentation_tokens_total=sum(fragments),
        fragmentation_tokens_max=max(fragments, default=0),
    )


def request_story(group: Group) -> RequestStory:
    """The life of one request so far."""
    return RequestStory(
        request_id=group.request.request_id,
        arrived_ns=group.arrived_ns,
        admitted_ns=group.admitted_ns,
        prompt_tokens=len(group.request.prompt),
        cached_tokens=group.cached_tokens,
        preemptions=group.preemptions,
        held_steps=group.held_steps,
        sequences=tuple(repr(sequence) for sequence in group.sequences.values()),
    )
