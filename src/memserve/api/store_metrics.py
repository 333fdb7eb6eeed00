"""Prometheus metrics of the stores in a cluster: what their last heartbeats with statistics said."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

GAUGES: list[tuple[str, str, str]] = [
    ("store_memory_bytes", "Bytes of the memory in which the store keeps values", "dram_bytes"),
    ("store_memory_used_bytes", "Bytes of the memory of the store that hold values", "dram_bytes_used"),
    ("store_memory_values", "Values in the memory of the store, KV blocks included", "dram_values"),
    ("store_kv_blocks", "KV blocks of the store, in memory or on disks", "kv_blocks"),
    ("store_disks", "Disks of the store that work", "disk_disks"),
    ("store_disk_bytes", "Bytes of the files on the disks of the store", "disk_bytes"),
    ("store_disk_values", "Values on the disks of the store, KV blocks included", "disk_records"),
    ("store_clients", "Clients that the store knows, instances not counted", "clients"),
]
"""Name, help, and the name of the number in the statistics of a store."""

COUNTERS: list[tuple[str, str, str]] = [
    ("store_kv_blocks_stored", "KV blocks that the store took from instances", "kv_stored"),
    ("store_kv_blocks_known", "KV blocks that instances offered and the store had already", "kv_known"),
    ("store_kv_blocks_lent", "KV blocks that the store gave to instances", "kv_lent"),
    ("store_fetches", "Prefixes that instances asked the store for", "fetches"),
    (
        "store_fetches_cut",
        "Prefixes of which instances got less than the store has: a disk failed or was late, or memory was short",
        "fetches_cut",
    ),
    ("store_puts", "Values that clients put into the store", "puts"),
    ("store_gets", "Values that clients asked the store for", "gets"),
    ("store_memory_evicted", "Values that left the memory of the store to make room", "dram_evicted"),
    ("store_loads", "Values that were read from a disk into the memory of the store", "loads"),
    ("store_loads_failed", "Values on a disk of the store that could not be read in time and intact", "loads_failed"),
    ("store_damaged", "Values in the memory of the store with a wrong checksum, which were dropped", "damaged"),
    ("store_disk_reads_damaged", "Values on a disk of the store with a wrong checksum", "disk_reads_damaged"),
    ("store_disk_reads_late", "Reads from a disk of the store that missed their deadline", "disk_reads_late"),
    ("store_disk_errors", "Reads and writes that a disk of the store failed", "disk_device_errors"),
    (
        "store_disk_written_bytes",
        "Bytes written to the disks of the store, all overhead included",
        "disk_disk_bytes_written",
    ),
    (
        "store_disk_payload_bytes",
        "Bytes of values written to the disks of the store",
        "disk_payload_bytes_written",
    ),
    ("store_disk_evicted", "Values that left the disks of the store to make room", "disk_records_evicted"),
    (
        "store_disk_refused_budget",
        "Values not written to a disk of the store since the budget of the day was used up",
        "disk_refused_budget",
    ),
]


def store_families(stores: Sequence[Any]) -> Iterator[Metric]:
    """The families of some :class:`memserve.runtime.stats.MemberStats` with the role of a store."""
    up = GaugeMetricFamily("memserve_store_up", "1 while the store takes KV, 0 while it drains", labels=["store"])
    known = GaugeMetricFamily(
        "memserve_store_tree_blocks", "KV blocks of the store that the router knows of", labels=["store"]
    )
    for member in stores:
        up.add_metric([member.view.peer.name], float(member.view.state == "live"))
        known.add_metric([member.view.peer.name], float(member.view.tree_blocks))
    yield from (up, known)
    kinds = ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS))
    for kind, name, text, key in ((kind, *row) for kind, table in kinds for row in table):
        family = kind(f"memserve_{name}", text, labels=["store"])
        for member in stores:
            if key in member.store:
                family.add_metric([member.view.peer.name], float(member.store[key]))
        yield family
