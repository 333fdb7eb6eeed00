"""Prometheus metrics of a cluster: what its router counts, and each instance's gauges.

Prometheus metrics of the stores in a cluster: what their last heartbeats with statistics said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric

from memserve.api.metrics.families import (
    COUNTER,
    GAUGE,
    Table,
    admission_families,
    block_bytes_family,
    by_label,
    counted_family,
    declared,
    families,
    layer_families,
    objective_families,
    preemption_family,
    scaling_families,
    with_old_names,
)
from memserve.base.types import Role
from memserve.base.units import NS_PER_S
from memserve.router.placement.reuse_ceiling import PromptTokens
from memserve.router.report import ClusterStats, Counters
from memserve.store.disks.events import DiskCounters
from memserve.store.machine.events import StoreCounters

#: from ``MemberStats``
MEMBER_METRICS: Table = [
    ("store_up", GAUGE, "1 while the store takes KV, 0 while it drains", lambda m: m.view.state == "live"),
    ("store_tree_blocks", GAUGE, "KV blocks of the store that the router knows of", "view.tree_blocks"),
]

#: numbers of a store's statistics, by name
STORE_METRICS: Table = [
    ("store_memory_bytes", GAUGE, "Bytes of the memory in which the store keeps values", "dram_bytes"),
    ("store_memory_used_bytes", GAUGE, "Bytes of the memory of the store that hold values", "dram_bytes_used"),
    ("store_memory_values", GAUGE, "Values in the memory of the store, KV blocks included", "dram_values"),
    ("store_kv_blocks", GAUGE, "KV blocks of the store, in memory or on disks", "kv_blocks"),
    ("store_disks", GAUGE, "Disks of the store that work", "disk_disks"),
    ("store_disks_full", GAUGE, "Disks of the store without room: read and not written", "disk_disks_full"),
    ("store_disk_bytes", GAUGE, "Bytes of the files on the disks of the store", "disk_bytes"),
    ("store_disk_values", GAUGE, "Values on the disks of the store, KV blocks included", "disk_records"),
    ("store_clients", GAUGE, "Clients that the store knows, instances not counted", "clients"),
    ("store_memory_evicted", COUNTER, "Values that left the memory of the store to make room", "dram_evicted"),
    ("store_disk_evicted", COUNTER, "Values that left the disks of the store to make room", "disk_records_evicted"),
    *declared(StoreCounters),
    *declared(DiskCounters, "disk_"),
]


def store_families(stores: Sequence[Any]) -> Iterator[Metric]:
    """The families of some :class:`memserve.host.stats.MemberStats` with the role of a store."""
    yield from families(MEMBER_METRICS, [((member.view.peer.name,), member) for member in stores], ("store",))
    yield from families(STORE_METRICS, [((member.view.peer.name,), member.store) for member in stores], ("store",))


#: from ``RouterStats``: messages and metadata
ROUTER_HOST_METRICS: Table = [
    (
        "router_handshakes_failed",
        COUNTER,
        "Connections to the cluster port that failed to prove the cluster's secret",
        "mailbox.handshakes_failed",
    ),
    (
        "router_messages_malformed",
        COUNTER,
        "Messages to the router that were malformed, or of another version",
        lambda s: s.mailbox.malformed + s.mailbox.other_version,
    ),
    (
        "router_messages_lost",
        COUNTER,
        "Messages of the router that could not be queued for an instance",
        lambda s: s.mailbox.lost_unknown + s.mailbox.lost_full + s.mailbox.lost_too_long,
    ),
    (
        "router_metadata_durable",
        GAUGE,
        "1 while the router's records reach its metadata store, 0 while they do not or there is none",
        "metadata.is_kept",
    ),
    (
        "router_metadata_lag_seconds",
        GAUGE,
        "Age in seconds of the oldest record of the router that is not durable yet, 0 if all are",
        lambda s: s.metadata.lag_ns / NS_PER_S,
    ),
    (
        "router_metadata_failures",
        COUNTER,
        "Writes of the router to its metadata store that failed",
        "metadata.failures",
    ),
    (
        "router_seconds",
        COUNTER,
        "Seconds that the router's cluster machine has computed",
        lambda s: s.router_ns / NS_PER_S,
    ),
]

#: from ``ChildStats``, one sample for each instance that this host runs
CHILD_METRICS: Table = [
    ("instance_process_up", GAUGE, "1 while the process of the instance runs, 0 while there is none", "is_running"),
    ("instance_process_deaths", COUNTER, "Times that the process of the instance ended unexpectedly", "deaths"),
    ("instance_restarts", COUNTER, "Times that the process of the instance was started again", "restarts"),
    ("instance_spawn_failures", COUNTER, "Failed attempts to start the process of the instance", "spawn_failures"),
]

#: from ``MemberStats``, one sample an instance
INSTANCE_GAUGES: Table = [
    ("instance_up", GAUGE, "1 while the instance takes requests, 0 while it drains", lambda m: m.view.state == "live"),
    ("instance_requests", GAUGE, "Requests that the instance is involved in", "view.requests"),
    ("instance_requests_waiting", GAUGE, "Requests in the queue of the instance", "view.load.requests_waiting"),
    ("instance_sequences_running", GAUGE, "Sequences that the instance computes", "view.load.sequences_running"),
    (
        "instance_blocks_available",
        GAUGE,
        "KV blocks of HBM that the instance could hand out",
        "view.load.hbm_blocks_available",
    ),
    ("instance_transfers_open", GAUGE, "KV transfers of the instance that are under way", "view.load.transfers_open"),
    ("instance_tree_blocks", GAUGE, "Cached KV blocks of the instance that the router knows of", "view.tree_blocks"),
    (
        "instance_resident_bytes",
        GAUGE,
        "Bytes that the process of the instance has resident, shared maps included",
        lambda m: m.engine.resident_bytes if m.engine else 0,
    ),
    (
        "instance_resident_bound_bytes",
        GAUGE,
        "Bytes that the process of the instance should have resident at most, 0 if unknown",
        lambda m: m.engine.bound_bytes if m.engine else 0,
    ),
    (
        "instance_device_seconds",
        GAUGE,
        "Seconds that the device of the instance has worked",
        lambda m: m.engine.device_ns / NS_PER_S if m.engine else 0,
    ),
    (
        "instance_read_timestamp_seconds",
        GAUGE,
        "Unix time in seconds at which the instance last read its counters, 0 if it has told none yet",
        lambda m: m.engine.read_at_ns / NS_PER_S if m.engine else 0,
    ),
]


def cluster_families(stats: Any, names_tenants: bool) -> Iterator[Metric]:
    """The families of one :class:`memserve.host.stats.RouterStats`, under their old names, too."""
    return with_old_names(_cluster_families(stats, names_tenants))


def _cluster_families(stats: Any, names_tenants: bool) -> Iterator[Metric]:
    yield from families(declared(ClusterStats), [((), stats.cluster)])
    yield from families(declared(Counters), [((), stats.cluster.counters)])
    yield from families(ROUTER_HOST_METRICS, [((), stats)])
    yield from families(CHILD_METRICS, [((name,), child) for name, child in stats.children.items()], ("instance",))
    yield from scaling_families(stats.scaling)
    yield from _by_label(stats.cluster.counters)
    yield from admission_families(stats.cluster.admission, names_tenants=names_tenants)
    yield from families(declared(PromptTokens), [((), stats.cluster.prompt_tokens)])
    if names_tenants:
        yield from tenant_ceiling_families(stats.cluster)
        yield _retained(stats.cluster)
    instances = [member for member in stats.members if member.view.role.has_model]
    members = [((member.view.peer.name, member.view.role.value), member) for member in instances]
    yield from families(INSTANCE_GAUGES, members, ("instance", "role"))
    yield from _counters(instances)
    yield from store_families([member for member in stats.members if member.view.role is Role.STORE])


def tenant_ceiling_families(cluster: Any) -> Iterator[Metric]:
    """Prompt tokens of each tenant with a count of its own, from ``ClusterStats``."""
    table: Table = [
        (name.replace("router_", "tenant_"), kind, f"{about}, by tenant", read)
        for name, kind, about, read in declared(PromptTokens)
    ]
    tenants = [((tenant,), count) for tenant, count in cluster.tenant_prompt_tokens.items()]
    yield from families(table, tenants, ("tenant",))


def _retained(cluster: Any) -> Metric:
    about = "Tokens of named prefixes that instances retain, by tenant"
    retained = GaugeMetricFamily("memserve_tenant_retained_tokens", about, labels=["tenant"])
    for tenant, tokens in cluster.tenant_retained_tokens.items():
        retained.add_metric([tenant], float(tokens))
    return retained


def _by_label(counters: Any) -> Iterator[Metric]:
    about = "Attempts sent to instances, by policy and by how the KV of the prompt comes about"
    yield counted_family("router_decisions", about, counters.decisions, "policy", "way")
    about = "Handoffs whose transfer mode --transfer auto has chosen, by mode"
    yield counted_family("router_transfers_chosen", about, by_label(counters.transfers_chosen), "mode")
    about = "Attempts to run a request that failed, by cause"
    yield counted_family("router_attempts_failed", about, by_label(counters.attempts_failed), "cause")
    about = "Sequences of answers that ended, by finish reason"
    yield counted_family("router_sequences", about, by_label(counters.finished), "reason")


def _counters(members: Sequence[Any]) -> Iterator[Metric]:
    from memserve.instance.stats import InstanceStats  # not before: it loads the scheduler, which a fleet has not

    reports = [(member.view, member.engine.instance) for member in members if member.engine and member.engine.instance]
    sources = [((view.peer.name, view.role.value), instance) for view, instance in reports]
    yield from families(declared(InstanceStats), sources, ("instance", "role"))
    blocks = GaugeMetricFamily(
        "memserve_instance_blocks",
        "KV blocks of the instance by tier and state",
        labels=["instance", "role", "tier", "state"],
    )
    for view, instance in reports:
        for tier, report in (("hbm", instance.hbm), ("dram", instance.dram)):
            blocks_used = report.blocks_total - report.blocks_free - report.blocks_cached
            states = {"free": report.blocks_free, "cached": report.blocks_cached, "held": blocks_used}
            for state, count in states.items():
                blocks.add_metric([view.peer.name, view.role.value, tier, state], float(count))
    yield blocks
    yield block_bytes_family("instance_", "the instance", ("instance", "role"), sources)
    yield preemption_family("instance_", "the instance", ("instance", "role"), sources)
    yield from objective_families("instance_", "the instance", ("instance", "role"), sources)
    yield from layer_families("instance_", "the instance", ("instance", "role"), sources)
    rate = GaugeMetricFamily(
        "memserve_instance_hit_rate",
        "Share of prompt tokens (0 to 1) with KV that the instance had or fetched",
        labels=["instance", "role"],
    )
    for view, instance in reports:
        if instance.prompt_tokens:
            rate.add_metric([view.peer.name, view.role.value], instance.cached_tokens / instance.prompt_tokens)
    yield rate
