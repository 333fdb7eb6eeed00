"""What a store's machine is set to, and what it counts."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from memserve.config import ExchangeConfig
from memserve.units import NS_PER_S


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Settings of a store's machine."""

    exchange: ExchangeConfig = field(default_factory=lambda: ExchangeConfig(pulls_in_flight=8))
    """How KV blocks are taken and lent."""
    fetch_deadline_ns: int = 2 * NS_PER_S
    """How long a fetch waits for reads from disks; then what has come is lent. A fetch may ask for less."""
    fetch_read_share: float = 0.75
    """How much of the time that an instance waits may pass with reads; the rest is for moving what has come."""
    loads_max: int = 128
    """Reads and comparisons that are given to the host at once; others wait."""
    silent_ns: int = 10 * NS_PER_S
    """A client that says nothing for this long is dropped."""
    forget_ns: int = 10 * NS_PER_S
    """How long a call that deletes may take until a restart knows of it."""
    clients_max: int = 1024
    calls_max: int = 256
    """Calls of one client that are under way; another one is answered with ``NO_ROOM``."""
    fetches_max: int = 4096
    """Fetches that wait for reads; another one gets what is in memory."""
    value_bytes_max: int = 1 << 30
    """Longest value of a client. A quarter of the memory, if that is less."""
    sweep_keys: int = 2048
    """Keys that a purge or a verification looks at between two other events."""


@dataclass(slots=True)
class StoreCounters:
    """Totals since the start."""

    kv_stored: int = 0
    """KV blocks taken from instances."""
    kv_known: int = 0
    """KV blocks that were offered, and were here."""
    kv_lent: int = 0
    """KV blocks lent to instances."""
    fetches: int = 0
    fetches_cut: int = 0
    """Fetches that got less than was here: a disk failed or was late, or memory had no room."""
    puts: int = 0
    put_bytes: int = 0
    gets: int = 0
    get_bytes: int = 0
    deleted: int = 0
    loads: int = 0
    """Values that were read from a disk into memory."""
    loads_failed: int = 0
    loads_joined: int = 0
    """Askers that waited for a read which another one had begun."""
    compared: int = 0
    """Values adopted from an earlier life, or verified, with the right checksum."""
    damaged: int = 0
    """Values in memory with another checksum than they should have: dropped."""
    no_room: int = 0
    clients_dropped: int = 0
    refused: int = 0
    """Messages of strangers, and of members with another namespace."""

    def numbers(self) -> dict[str, int]:
        """By name."""
        return asdict(self)
