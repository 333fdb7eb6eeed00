"""The store of a scenario, for those that have one: its memory, its disks, and what goes wrong with it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from memserve.policy.costs import CopyCurve, CostModel, PrefillCurve
from memserve.store.config import StoreConfig
from memserve.store.disk_config import DisksConfig, Sync
from memserve.units import NS_PER_MS

STORE_FAULTS = (
    "store-kill",
    "store-power",
    "store-drain",
    "store-pause",
    "store-cut",
    "store-corrupt",
    "store-slow-link",
    "store-rot",
    "store-disk-errors",
    "store-disk-full",
    "store-slow-disk",
    "store-disk-hang",
)
"""No request depends on a store: none of these is an excuse for any."""

_WRONG_BYTES = ("store-rot", "store-kill", "store-power")
"""Those behind which a store finds something else than it has written: each scenario with faults has one of them."""
_WANTED = CostModel(
    machine="fetches",
    prefill=PrefillCurve(step_ns=20.0 * NS_PER_MS, token_ns=50.0 * NS_PER_MS),
    network=CopyCurve(40.0 * NS_PER_MS, 0.0, 0.0),
    disk=CopyCurve(40.0 * NS_PER_MS, 0.0, 0.0),
)
_SYNCS: tuple[Sync, ...] = ("none", "segment", "always")


@dataclass(frozen=True)
class StoreSetup:
    """What a seed decides of a store."""

    blocks: int
    """Of its memory."""
    segments: tuple[int, ...]
    """Of each disk."""
    disks: DisksConfig
    config: StoreConfig
    io_ns: tuple[int, int]
    """How long a disk takes for a job."""
    is_wanted: bool
    """Instances take computing to be slow, and their caches make room for something else between two turns: what comes
    again is asked of the store."""
    kinds: tuple[str, ...] = ()
    """Faults that are drawn."""
    dies_at_turns: float = 0.0
    """How likely it is killed when a turn ends, to be back at once: the next turn asks for what its memory has kept."""
    is_called: bool = False
    """It was told of no router, and joins the one that calls it."""

    @property
    def costs(self) -> CostModel | None:
        """Of all members. None: each has its own."""
        return _WANTED if self.is_wanted else None


def draw_store(random: Random) -> StoreSetup:
    """A small store: most of what it is given makes room for something else."""
    disks = DisksConfig(
        sync=random.choice(_SYNCS),
        writes_per_day_bytes=random.choice([0, 0, 0, 1 << 18]),
        move_share=random.choice([0.0, 0.25, 0.5]),
        reads_max=random.choice([2, 256]),
        writes_max=random.choice([2, 32]),
        read_deadline_ns=random.choice([20, 200, 2000]) * NS_PER_MS,
        admission=random.choice(["all", "all", "second-hit"]),
        frequency_keys=1 << 10,
        failures_max=random.choice([3, 8]),
    )
    config = StoreConfig(
        fetch_deadline_ns=random.choice([30, 300, 2000]) * NS_PER_MS,
        loads_max=random.choice([1, 4, 128]),
        fetches_max=random.choice([1, 4096]),
    )
    setup = StoreSetup(
        blocks=random.choice([6, 12, 24, 64]),
        segments=tuple(random.randint(4, 8) for _ in range(random.choice([0, 1, 1, 1, 2]))),
        disks=disks,
        config=config,
        io_ns=random.choice([(20_000, 200_000), (100_000, 4 * NS_PER_MS), (1 * NS_PER_MS, 30 * NS_PER_MS)]),
        is_wanted=random.random() < 0.8,
        kinds=(random.choice(_WRONG_BYTES), *random.sample(STORE_FAULTS, random.choice([0, 1, 2, 6]))),
    )
    return replace(setup, dies_at_turns=random.choice([0.0, 0.0, 0.05, 0.15]))
