"""Prometheus metrics of a cluster: what its router counts, and each instance's gauges (level 4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from memserve.units import NS_PER_S

Read = Callable[[Any], float]

#: name, help, how to read it from ``ClusterStats``
ROUTER_GAUGES: list[tuple[str, str, Read]] = [
    ("router_requests_live", "Requests that have not ended", lambda s: s.requests_live),
    ("router_requests_unplaced", "Of them: no instance could take them so far", lambda s: s.requests_unplaced),
    ("router_instances", "Members of the cluster", lambda s: s.instances),
    ("router_instances_draining", "Of them: they finish what they have", lambda s: s.instances_draining),
    ("router_tree_blocks", "Cached blocks that the router knows of", lambda s: s.tree_blocks),
    ("router_tree_bytes", "Memory of the router's prefix trees", lambda s: s.tree_bytes),
    ("router_handles", "Named prefixes", lambda s: s.handles),
]

#: the same for its counters
ROUTER_COUNTERS: list[tuple[str, str, Read]] = [
    ("router_requests", "Requests that reached the router", lambda c: c.requests),
    ("router_requests_failed", "Of them ended with an error after the last attempt", lambda c: c.requests_failed),
    ("router_dispatches", "Attempts sent to instances", lambda c: c.dispatches),
    ("router_resumptions", "Of them: not the request's first", lambda c: c.resumptions),
    ("router_late_outputs", "Outputs that nobody waited for any more", lambda c: c.outputs_late),
    ("router_members_joined", "Instances that joined", lambda c: c.members_joined),
    (
        "router_members_readopted",
        "Instances of the last router that came back",
        lambda c: c.members_readopted,
    ),
    ("router_members_died", "Instances taken to be dead", lambda c: c.members_died),
    ("router_kv_changes", "KV events applied to the trees", lambda c: c.kv_changes),
    ("router_kv_gaps", "Times that KV events were missing", lambda c: c.kv_gaps),
    ("router_matched_tokens", "Prompt tokens that an instance was believed to have", lambda c: c.matched_tokens),
    ("router_prompt_tokens", "Prompt tokens dispatched", lambda c: c.prompt_tokens),
]

#: the same for ``GateStats``
GATE_METRICS: list[tuple[str, type[CounterMetricFamily] | type[GaugeMetricFamily], str, Read]] = [
    ("gate_active", GaugeMetricFamily, "Requests that were let in and have not ended", lambda g: g.active),
    ("gate_admitted", CounterMetricFamily, "Requests that were let in", lambda g: g.admitted),
    ("gate_queued", CounterMetricFamily, "Requests that had to wait for that", lambda g: g.queued),
    ("gate_waited_seconds", CounterMetricFamily, "Time that those waited that were let in",
     lambda g: g.waited_ns / NS_PER_S),
    ("gate_evictions", CounterMetricFamily, "Ended requests whose memory newcomers took", lambda g: g.evictions),
]  # fmt: skip

#: the same for ``MemberStats``, one sample an instance
INSTANCE_GAUGES: list[tuple[str, str, Read]] = [
    ("instance_up", "1 while the instance takes requests, 0 while it drains", lambda m: m.view.state == "live"),
    ("instance_requests", "Requests that it is involved in", lambda m: m.view.requests),
    ("instance_requests_waiting", "Requests in its queue", lambda m: m.view.load.requests_waiting),
    ("instance_sequences_running", "Sequences that it computes", lambda m: m.view.load.sequences_running),
    ("instance_blocks_available", "Blocks that it could hand out", lambda m: m.view.load.hbm_blocks_available),
    ("instance_transfers_open", "Transfers under way", lambda m: m.view.load.transfers_open),
    ("instance_tree_blocks", "Cached blocks that the router knows of", lambda m: m.view.tree_blocks),
    (
        "instance_resident_bytes",
        "Memory that the instance's process has resident, shared maps included",
        lambda m: m.engine.resident_bytes if m.engine else 0,
    ),
    (
        "instance_resident_bound_bytes",
        "Memory that the instance's process should have resident at most; 0: unknown",
        lambda m: m.engine.bound_bytes if m.engine else 0,
    ),
    ("instance_device_seconds", "Time its device worked", lambda m: m.engine.device_ns / NS_PER_S if m.engine else 0),
]

#: counters of an instance's machine (``InstanceStats``), as its last heartbeat with statistics said: name, help, field
INSTANCE_COUNTERS: list[tuple[str, str, str]] = [
    ("instance_prompt_tokens", "Prompt tokens of requests admitted here", "prompt_tokens"),
    ("instance_cached_tokens", "Of them: KV was here or was fetched", "cached_tokens"),
    ("instance_computed_tokens", "Tokens given to the device, prefill and decode", "computed_tokens"),
    ("instance_generated_tokens", "Tokens drawn here", "generated_tokens"),
    ("instance_fetched_tokens", "Prompt tokens whose KV came from other instances before admission", "fetched_tokens"),
    ("instance_received_bytes", "Bytes of KV pulled from other instances", "bytes_received"),
    ("instance_received_dram_bytes", "Of them: out of the owner's DRAM", "dram_bytes_received"),
    ("instance_received_blocks", "Blocks pulled from other instances", "blocks_received"),
    ("instance_reused_blocks", "Blocks that others offered and that were here already", "blocks_reused"),
    ("instance_returned_blocks", "Blocks of generated KV that came home (PD-Caching-3)", "blocks_come_home"),
    ("instance_handed_over", "Requests that left after their first token", "handed_over"),
    ("instance_taken_over", "Requests decoded here whose prompt was computed elsewhere", "taken_over"),
    ("instance_transfers_failed", "Imports that came to nothing", "transfers_failed"),
    ("instance_checksum_mismatches", "Pieces of KV that did not arrive as they had left", "checksum_mismatches"),
]


def cluster_families(stats: Any, names_tenants: bool) -> Iterator[Metric]:
    """The families of one :class:`memserve.runtime.stats.RouterStats`."""
    for name, text, read in ROUTER_GAUGES:
        yield _one(GaugeMetricFamily(f"memserve_{name}", text), read(stats.cluster))
    for name, text, read in ROUTER_COUNTERS:
        yield _one(CounterMetricFamily(f"memserve_{name}", text), read(stats.cluster.counters))
    yield from _by_label(stats.cluster.counters)
    yield from _gate(stats.cluster.gate, names_tenants)
    thought_s = stats.router_ns / NS_PER_S
    yield _one(CounterMetricFamily("memserve_router_seconds", "Time the cluster machine thought"), thought_s)
    for name, text, read in INSTANCE_GAUGES:
        family = GaugeMetricFamily(f"memserve_{name}", text, labels=["instance", "role"])
        for member in stats.members:
            family.add_metric([member.view.peer.name, member.view.role.value], float(read(member)))
        yield family
    yield from _counters(stats.members)


def _by_label(counters: Any) -> Iterator[Metric]:
    decisions = CounterMetricFamily(
        "memserve_router_decisions",
        "Attempts by policy and by how the prompt's KV comes about",
        labels=["policy", "way"],
    )
    for (policy, way), count in counters.decisions.items():
        decisions.add_metric([policy, way], float(count))
    failed = CounterMetricFamily(
        "memserve_router_attempts_failed", "Attempts that came to nothing, by cause", labels=["cause"]
    )
    for cause, count in counters.attempts_failed.items():
        failed.add_metric([cause], float(count))
    finished = CounterMetricFamily("memserve_router_sequences", "Sequences that ended, by reason", labels=["reason"])
    for reason, count in counters.finished.items():
        finished.add_metric([reason], float(count))
    yield from (decisions, failed, finished)


def _gate(gate: Any, names_tenants: bool) -> Iterator[Metric]:
    for name, kind, text, read in GATE_METRICS:
        yield _one(kind(f"memserve_{name}", text), read(gate))
    waiting = GaugeMetricFamily(
        "memserve_gate_waiting", "Requests that wait to be let in", labels=["tenant"] if names_tenants else []
    )
    if names_tenants:
        for tenant, count in gate.waiting.items():
            waiting.add_metric([tenant], float(count))
    else:
        waiting.add_metric([], float(sum(gate.waiting.values())))
    rejected = CounterMetricFamily("memserve_gate_rejected", "Requests turned away, by cause", labels=["cause"])
    for cause, count in gate.rejected.items():
        rejected.add_metric([cause], float(count))
    yield from (waiting, rejected)


def _counters(members: Sequence[Any]) -> Iterator[Metric]:
    told = [(member.view, member.engine.instance) for member in members if member.engine and member.engine.instance]
    for name, text, field in INSTANCE_COUNTERS:
        counter = CounterMetricFamily(f"memserve_{name}", text, labels=["instance", "role"])
        for view, instance in told:
            counter.add_metric([view.peer.name, view.role.value], float(getattr(instance, field)))
        yield counter
    blocks = GaugeMetricFamily(
        "memserve_instance_blocks", "Blocks by tier and state", labels=["instance", "role", "tier", "state"]
    )
    for view, instance in told:
        for tier, report in (("hbm", instance.hbm), ("dram", instance.dram)):
            held = report.blocks_total - report.blocks_free - report.blocks_cached
            states = {"free": report.blocks_free, "cached": report.blocks_cached, "held": held}
            for state, count in states.items():
                blocks.add_metric([view.peer.name, view.role.value, tier, state], float(count))
    yield blocks
    rate = GaugeMetricFamily(
        "memserve_instance_hit_rate",
        "Share of prompt tokens whose KV was here or was fetched",
        labels=["instance", "role"],
    )
    for view, instance in told:
        if instance.prompt_tokens:
            rate.add_metric([view.peer.name, view.role.value], instance.cached_tokens / instance.prompt_tokens)
    yield rate


def _one(family: CounterMetricFamily | GaugeMetricFamily, value: float) -> Metric:
    family.add_metric([], value)
    return family
