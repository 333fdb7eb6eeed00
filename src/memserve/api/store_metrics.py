"""Prometheus metrics of the stores in a cluster: what their last heartbeats with statistics said."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client.core import Metric

from memserve.api.families import COUNTER, GAUGE, Table, families

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
    """The families of some :class:`memserve.runtime.stats.MemberStats` with the role of a store."""
    yield from families(MEMBER_METRICS, [((member.view.peer.name,), member) for member in stores], ("store",))
    yield from families(STORE_METRICS, [((member.view.peer.name,), member.store) for member in stores], ("store",))
