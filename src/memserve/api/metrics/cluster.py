"""Prometheus metrics of a cluster: what its router counts, and each instance's gauges.

Prometheus metrics of the stores in a cluster: what their last heartbeats with statistics said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from memserve.api.metrics.families import (
    COUNTER,
    GAUGE,
    Table,
    block_bytes_family,
    families,
    layer_families,
    objective_families,
    preemption_family,
    scaling_families,
    with_old_names,
)
from memserve.base.types import Role
from memserve.base.units import NS_PER_S

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
    ("store_kv_blocks_stored", COUNTER, "KV blocks that the store took from instances", "kv_stored"),
    ("store_kv_blocks_known", COUNTER, "KV blocks that instances offered and the store had already", "kv_known"),
    ("store_kv_blocks_lent", COUNTER, "KV blocks that the store gave to instances", "kv_lent"),
    ("store_fetches", COUNTER, "Prefixes that instances asked the store for", "fetches"),
    (
        "store_fetches_cut",
        COUNTER,
        "Prefixes of which instances got less than the store has: a disk failed or was late, or memory was short",
        "fetches_cut",
    ),
    ("store_puts", COUNTER, "Values that clients put into the store", "puts"),
    ("store_gets", COUNTER, "Values that clients asked the store for", "gets"),
    ("store_memory_evicted", COUNTER, "Values that left the memory of the store to make room", "dram_evicted"),
    ("store_loads", COUNTER, "Values that were read from a disk into the memory of the store", "loads"),
    (
        "store_loads_failed",
        COUNTER,
        "Values on a disk of the store that could not be read in time and intact",
        "loads_failed",
    ),
    (
        "store_damaged",
        COUNTER,
        "Values in the memory of the store with a wrong checksum, which were dropped",
        "damaged",
    ),
    ("store_disk_reads_damaged", COUNTER, "Values on a disk of the store with a wrong checksum", "disk_reads_damaged"),
    ("store_disk_reads_late", COUNTER, "Reads from a disk of the store that missed their deadline", "disk_reads_late"),
    ("store_disk_errors", COUNTER, "Reads and writes that a disk of the store failed", "disk_device_errors"),
    (
        "store_disk_written_bytes",
        COUNTER,
        "Bytes written to the disks of the store, all overhead included",
        "disk_disk_bytes_written",
    ),
    (
        "store_disk_payload_bytes",
        COUNTER,
        "Bytes of values written to the disks of the store",
        "disk_payload_bytes_written",
    ),
    ("store_disk_evicted", COUNTER, "Values that left the disks of the store to make room", "disk_records_evicted"),
    (
        "store_disk_refused_budget",
        COUNTER,
        "Values not written to a disk of the store since the budget of the day was used up",
        "disk_refused_budget",
    ),
]


def store_families(stores: Sequence[Any]) -> Iterator[Metric]:
    """The families of some :class:`memserve.host.stats.MemberStats` with the role of a store."""
    yield from families(MEMBER_METRICS, [((member.view.peer.name,), member) for member in stores], ("store",))
    yield from families(STORE_METRICS, [((member.view.peer.name,), member.store) for member in stores], ("store",))


#: from ``ClusterStats``
ROUTER_GAUGES: Table = [
    ("router_requests_live", GAUGE, "Requests that the router has and that have not ended", "requests_live"),
    ("router_requests_unplaced", GAUGE, "Requests admitted that no instance could take so far", "requests_unplaced"),
    ("router_instances", GAUGE, "Instances that are members of the cluster", "instances"),
    (
        "router_instances_draining",
        GAUGE,
        "Instances that finish what they have and take nothing new",
        "instances_draining",
    ),
    ("router_tree_blocks", GAUGE, "Cached KV blocks that the router knows of, over all instances", "tree_blocks"),
    ("router_tree_bytes", GAUGE, "Host memory of the router's prefix trees in bytes", "tree_bytes"),
    ("router_handles", GAUGE, "Named prefixes (documents and sessions) that the router keeps pinned", "handles"),
]

#: from its counters
ROUTER_COUNTERS: Table = [
    ("router_requests", COUNTER, "Requests that reached the router", "requests"),
    ("router_requests_failed", COUNTER, "Requests that ended with an error after the last attempt", "requests_failed"),
    ("router_dispatches", COUNTER, "Attempts to run a request that were sent to instances", "dispatches"),
    (
        "router_resumptions",
        COUNTER,
        "Attempts sent to instances after an earlier attempt of the same request had failed",
        "resumptions",
    ),
    ("router_sequences_split", COUNTER, "Attempts with a sequence that several instances share", "sequences_split"),
    (
        "router_late_outputs",
        COUNTER,
        "Outputs of instances that were dropped because their request had ended or had them already",
        "outputs_late",
    ),
    ("router_members_joined", COUNTER, "Incarnations of instances that joined as new members", "members_joined"),
    (
        "router_members_readopted",
        COUNTER,
        "Instances of an earlier router that came back with their cache",
        "members_readopted",
    ),
    ("router_members_left", COUNTER, "Members that left gracefully", "members_left"),
    ("router_members_refused", COUNTER, "Times that a join was refused, for the reason in the log", "members_refused"),
    ("router_members_expelled", COUNTER, "Messages of processes that are not members, but behaved as such", "expelled"),
    (
        "router_members_died",
        COUNTER,
        "Members that died: their process ended, they fell silent, or were replaced",
        "members_died",
    ),
    (
        "router_kv_changes",
        COUNTER,
        "KV events of instances that were applied to the router's prefix trees",
        "kv_changes",
    ),
    ("router_kv_gaps", COUNTER, "Times that KV events of an instance were missing and were requested", "kv_gaps"),
    (
        "router_matched_tokens",
        COUNTER,
        "Prompt tokens dispatched to an instance that was believed to have their KV",
        "matched_tokens",
    ),
    ("router_prompt_tokens", COUNTER, "Prompt tokens of all attempts sent to instances", "prompt_tokens"),
]

#: from ``AdmissionStats``
ADMISSION_METRICS: Table = [
    ("admission_active", GAUGE, "Admitted requests that have not ended", "active"),
    ("admission_admitted", COUNTER, "Requests that were admitted before placement", "admitted"),
    ("admission_queued", COUNTER, "Requests that waited for admission, including requests rejected later", "queued"),
    (
        "admission_waited_seconds",
        COUNTER,
        "Seconds that requests waited before they were admitted, added up",
        lambda g: g.waited_ns / NS_PER_S,
    ),
    (
        "admission_evictions",
        COUNTER,
        "Finished requests whose counted memory went to newly admitted requests",
        "evictions",
    ),
]

#: from ``PromptTokens``
CEILING: Table = [
    ("router_seen_prompt_tokens", COUNTER, "Prompt tokens of placed requests, each request once", "total"),
    (
        "router_new_prompt_tokens",
        COUNTER,
        "Prompt tokens, estimated, whose KV not even an unlimited cache would have had",
        "new",
    ),
]

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
]

#: counters of an instance's machine (``InstanceStats``), as its last heartbeat with statistics said
INSTANCE_COUNTERS: Table = [
    ("instance_prompt_tokens", COUNTER, "Prompt tokens of requests that the instance admitted", "prompt_tokens"),
    (
        "instance_cached_tokens",
        COUNTER,
        "Prompt tokens of requests admitted with KV that the instance had or fetched",
        "cached_tokens",
    ),
    (
        "instance_computed_tokens",
        COUNTER,
        "Tokens that the device of the instance computed, in prefill and decode",
        "computed_tokens",
    ),
    ("instance_generated_tokens", COUNTER, "Tokens that the instance generated", "generated_tokens"),
    ("instance_drafts_computed", COUNTER, "Tokens that the instance computed as drafts", "drafts_computed"),
    ("instance_drafts_kept", COUNTER, "Drafts of the instance that were drawn as well", "drafts_kept"),
    ("instance_steps_failed", COUNTER, "Steps that failed on the device of the instance", "steps_failed"),
    ("instance_rows_failed", COUNTER, "Sequences of the instance whose own row of a step failed", "rows_failed"),
    (
        "instance_fetched_tokens",
        COUNTER,
        "Prompt tokens with KV from other instances before admission",
        "fetched_tokens",
    ),
    ("instance_received_bytes", COUNTER, "Bytes of KV pulled from other instances", "bytes_received"),
    ("instance_store_tokens", COUNTER, "Prompt tokens with KV out of a store", "store_tokens"),
    (
        "instance_store_ssd_tokens",
        COUNTER,
        "Prompt tokens with KV out of a store that had some of the prefix on its disks alone",
        "store_ssd_tokens",
    ),
    (
        "instance_store_fetches_failed",
        COUNTER,
        "Fetches from a store that brought nothing in time; their tokens are computed instead",
        "store_fetches_failed",
    ),
    (
        "instance_store_blocks_offered",
        COUNTER,
        "KV blocks that the instance offered to a store",
        "store_blocks_offered",
    ),
    ("instance_store_blocks_taken", COUNTER, "KV blocks of the instance that a store has got", "store_blocks_taken"),
    (
        "instance_store_blocks_failed",
        COUNTER,
        "KV blocks offered to a store that were refused, too late, or taken back for a request",
        "store_blocks_failed",
    ),
    (
        "instance_store_blocks_dropped",
        COUNTER,
        "KV blocks that were not offered, since the store was slower than the instance",
        "store_blocks_dropped",
    ),
    (
        "instance_received_dram_bytes",
        COUNTER,
        "Bytes of KV pulled out of the DRAM tier of other instances",
        "dram_bytes_received",
    ),
    ("instance_received_blocks", COUNTER, "KV blocks pulled from other instances", "blocks_received"),
    (
        "instance_reused_blocks",
        COUNTER,
        "KV blocks that other instances offered and the instance had already",
        "blocks_reused",
    ),
    (
        "instance_returned_blocks",
        COUNTER,
        "KV blocks of answers that came back to the prefill instance (PD-Caching-3)",
        "blocks_come_home",
    ),
    (
        "instance_handed_over",
        COUNTER,
        "Requests handed over to another instance after their first token",
        "handed_over",
    ),
    (
        "instance_taken_over",
        COUNTER,
        "Requests decoded by the instance after another one computed the prompt",
        "taken_over",
    ),
    (
        "instance_transfers_failed",
        COUNTER,
        "KV transfers to the instance that failed; their tokens are computed instead",
        "transfers_failed",
    ),
    (
        "instance_checksum_mismatches",
        COUNTER,
        "Pieces of KV with another checksum than the sender's; they are not used",
        "checksum_mismatches",
    ),
    ("instance_pulls_failed", COUNTER, "Reads of peers' KV that failed or stalled; its log says why", "pulls_failed"),
]


def cluster_families(stats: Any, names_tenants: bool) -> Iterator[Metric]:
    """The families of one :class:`memserve.host.stats.RouterStats`, under their old names, too."""
    return with_old_names(_cluster_families(stats, names_tenants))


def _cluster_families(stats: Any, names_tenants: bool) -> Iterator[Metric]:
    yield from families(ROUTER_GAUGES, [((), stats.cluster)])
    yield from families(ROUTER_COUNTERS, [((), stats.cluster.counters)])
    yield from families(ROUTER_HOST_METRICS, [((), stats)])
    yield from families(CHILD_METRICS, [((name,), child) for name, child in stats.children.items()], ("instance",))
    yield from scaling_families(stats.scaling)
    yield from _by_label(stats.cluster.counters)
    yield from _admission(stats.cluster.admission, names_tenants)
    yield from families(CEILING, [((), stats.cluster.prompt_tokens)])
    if names_tenants:
        yield from tenant_ceiling_families(stats.cluster)
    instances = [member for member in stats.members if member.view.role.has_model]
    members = [((member.view.peer.name, member.view.role.value), member) for member in instances]
    yield from families(INSTANCE_GAUGES, members, ("instance", "role"))
    yield from _counters(instances)
    yield from store_families([member for member in stats.members if member.view.role is Role.STORE])


def tenant_ceiling_families(cluster: Any) -> Iterator[Metric]:
    """Prompt tokens of each tenant with a count of its own, from ``ClusterStats``."""
    table: Table = [
        (name.replace("router_", "tenant_"), kind, f"{about}, by tenant", read) for name, kind, about, read in CEILING
    ]
    tenants = [((tenant,), count) for tenant, count in cluster.tenant_prompt_tokens.items()]
    yield from families(table, tenants, ("tenant",))


def _by_label(counters: Any) -> Iterator[Metric]:
    about = "Attempts sent to instances, by policy and by how the KV of the prompt comes about"
    yield _counted("router_decisions", about, counters.decisions, "policy", "way")
    about = "Attempts to run a request that failed, by cause"
    yield _counted("router_attempts_failed", about, _single(counters.attempts_failed), "cause")
    about = "Sequences of answers that ended, by finish reason"
    yield _counted("router_sequences", about, _single(counters.finished), "reason")


def _counted(name: str, text: str, counts: Mapping[tuple[str, ...], int], *labels: str) -> Metric:
    family = CounterMetricFamily(f"memserve_{name}", text, labels=list(labels))
    for values, count in counts.items():
        family.add_metric(list(values), float(count))
    return family


def _single(counts: Mapping[str, int]) -> dict[tuple[str, ...], int]:
    return {(value,): count for value, count in counts.items()}


def _admission(admission: Any, names_tenants: bool) -> Iterator[Metric]:
    yield from families(ADMISSION_METRICS, [((), admission)])
    waiting = GaugeMetricFamily(
        "memserve_admission_waiting", "Requests that wait for admission", labels=["tenant"] if names_tenants else []
    )
    if names_tenants:
        for tenant, count in admission.waiting.items():
            waiting.add_metric([tenant], float(count))
    else:
        waiting.add_metric([], float(sum(admission.waiting.values())))
    rejected = _single(admission.rejected)
    yield from (
        waiting,
        _counted("admission_rejected", "Requests rejected before placement, by cause", rejected, "cause"),
    )


def _counters(members: Sequence[Any]) -> Iterator[Metric]:
    reports = [(member.view, member.engine.instance) for member in members if member.engine and member.engine.instance]
    sources = [((view.peer.name, view.role.value), instance) for view, instance in reports]
    yield from families(INSTANCE_COUNTERS, sources, ("instance", "role"))
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
