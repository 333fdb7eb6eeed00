"""The stores of a simulated cluster: their options, and what is told of them after a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from memserve.base.deployment import DRAM_BYTES, StoreOptions
from memserve.base.errors import UserError
from memserve.base.options import FOLDER_BYTES_MIN, SIZE, Form, option, option_of
from memserve.base.units import flag_bytes, human_bytes, parse_bytes
from memserve.cli.cluster.store import disks_config

if TYPE_CHECKING:
    from memserve_lab.sim.replay.setup import StoreSetup
    from memserve_lab.sim.replay.stores import HitTokens, StoreUsage


def _read_sizes(texts: list[str]) -> tuple[int, ...]:
    sizes = tuple(parse_bytes(text) for text in texts)
    if small := [text for text, size in zip(texts, sizes, strict=True) if size < FOLDER_BYTES_MIN]:
        hint = f"at least {flag_bytes(FOLDER_BYTES_MIN)}: --ssd {flag_bytes(FOLDER_BYTES_MIN)}"
        raise UserError(f"--ssd {small[0]} is too small to keep anything", hint=hint, param="ssd")
    return sizes


_SIZES = Form(list[str], _read_sizes, lambda sizes: [flag_bytes(size) for size in sizes] or None)


@dataclasses.dataclass(frozen=True, slots=True)
class SimulatedStores:
    """Stores of a simulated cluster, and their disks."""

    store_bytes: int | None = option(None, "--store", form=SIZE)
    """Memory of a store, for example 64GiB. None: 1GiB, where --ssd asks for a store."""
    ssd_bytes: tuple[int, ...] = option((), "--ssd", form=_SIZES)
    """Size of a disk of a store, for example 2TiB. Repeatable, once for each disk."""
    store_count: int = option(1, "--stores", least=1)
    """Stores, which are as one: number n on the host of instance n, or, of more than there are hosts, on the first
    again."""
    ssd_device: str = option("nvme", "--ssd-device")
    """Kind of the disks: nvme, sata, virtual; or READ/WRITE in GB/s, for example 6.5/3.5."""
    ssd_sync: str = option_of(StoreOptions, "sync")
    ssd_writes_per_day_bytes: int = option_of(StoreOptions, "writes_per_day_bytes")
    ssd_admission: str = option_of(StoreOptions, "admission")

    @property
    def is_wanted(self) -> bool:
        """Whether there is to be a store."""
        return self.store_bytes is not None or bool(self.ssd_bytes)

    @property
    def count_wanted(self) -> int:
        """Stores that there are from the start."""
        return self.store_count if self.is_wanted else 0

    def make_setup(self) -> StoreSetup | None:
        """The stores to simulate. None: there are none. Raises :class:`UserError` for impossible ones."""
        from memserve_lab.sim.replay.setup import StoreSetup
        from memserve_lab.sim.timed_disk import disk_model

        folders = tuple((f"disk-{number}", nbytes) for number, nbytes in enumerate(self.ssd_bytes))
        store_options = StoreOptions(
            folders, self.store_bytes, None, self.ssd_sync, self.ssd_writes_per_day_bytes, self.ssd_admission
        )  # fmt: skip
        model = disk_model(self.ssd_device)
        if not self.is_wanted:
            if self.store_count > 1:
                raise UserError("--stores does nothing without a store", hint="add --store 64GiB", param="stores")
            return None
        memory_bytes = DRAM_BYTES if self.store_bytes is None else self.store_bytes
        return StoreSetup(memory_bytes, self.ssd_bytes, disks_config(store_options), model, self.store_count)

    def name(self) -> str:
        """The stores in short. Empty: there are none."""
        if not self.is_wanted:
            return ""
        memory = flag_bytes(DRAM_BYTES if self.store_bytes is None else self.store_bytes)
        count = f"{self.store_count} stores" if self.store_count > 1 else "store"
        return "+".join([f"{count} {memory}", *map(flag_bytes, self.ssd_bytes)])


def tell_hits(hits: HitTokens, prompt_tokens: int) -> str:
    """One line: where the KV of cached tokens came from."""
    parts = {
        "HBM": hits.hbm, "DRAM": hits.dram, "other instances": hits.instances, "store": hits.store, "SSD": hits.ssd,
    }  # fmt: skip
    share = [f"{name} {tokens:,} ({tokens / max(1, prompt_tokens):.1%})" for name, tokens in parts.items() if tokens]
    return f"hit tokens by tier: {', '.join(share) or 'none'}"


def tell_stores(used: StoreUsage) -> Iterator[str]:
    """Lines about all stores."""
    yield (
        f"store: {used.blocks_stored:,} blocks taken, {used.blocks_lent:,} lent, {used.fetches_cut:,} fetches cut short"
    )
    if not used.capacity_bytes:
        return
    yield (
        f"SSD: {human_bytes(used.written_bytes)} written, write amplification {used.write_amplification:.3f} "
        f"({used.moved_blocks:,} blocks moved), {human_bytes(used.read_bytes)} read in {used.reads:,} reads, "
        f"{used.reads_late:,} late, {used.reads_refused:,} refused, {used.busy_share:.0%} busy"
    )
    if used.writes_per_day_bytes:
        yield (
            f"SSD budget: at most {human_bytes(used.busiest_day_bytes)} of {human_bytes(used.writes_per_day_bytes)} "
            f"in 24 hours on the disks of one store; {used.refused_budget:,} writes not made for it"
        )
