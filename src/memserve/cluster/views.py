"""Snapshots of the cluster's state (level 2)."""

from __future__ import annotations

from dataclasses import replace

from memserve.cluster.handles import Handles
from memserve.cluster.jobs import Jobs
from memserve.cluster.loads import LoadTable
from memserve.cluster.registry import Member, MemberState, Registry
from memserve.cluster.report import ClusterStats, Counters, GateStats, InstanceView
from memserve.cluster.trees import Trees


def instance_view(member: Member, trees: Trees, loads: LoadTable) -> InstanceView:
    """One member."""
    feed, work = trees.feed(member.number), loads.work_of(member.number)
    info = member.info
    return InstanceView(
        peer=member.peer,
        role=info.role,
        state=member.state.value,
        address=info.address,
        host_id=info.host_id,
        load=member.load,
        stats=member.stats,
        heard_ns=member.heard_ns,
        joined_ns=member.joined_ns,
        requests=len(member.attempts),
        prefill_tokens=work.prefill_tokens,
        context_tokens=work.context_tokens,
        hbm_blocks=info.hbm_blocks,
        dram_blocks=info.dram_blocks,
        tree_blocks=trees.blocks(member.number),
        next_event=feed.next_event,
        events_aside=len(feed.aside),
    )


def cluster_stats(
    registry: Registry, trees: Trees, jobs: Jobs, handles: Handles, counters: Counters, gate: GateStats
) -> ClusterStats:
    """Gauges, and a copy of the totals."""
    copied = replace(
        counters,
        decisions=dict(counters.decisions),
        attempts_failed=dict(counters.attempts_failed),
        finished=dict(counters.finished),
    )
    return ClusterStats(
        requests_live=len(jobs.by_id),
        requests_unplaced=len(jobs.unplaced) - sum(gate.waiting.values()),
        instances=len(registry),
        instances_draining=sum(member.state is MemberState.DRAINING for member in registry),
        tree_blocks=sum(trees.blocks(member.number) for member in registry),
        tree_bytes=trees.directory.nbytes,
        handles=len(handles),
        counters=copied,
        gate=gate,
    )
