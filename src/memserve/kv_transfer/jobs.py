"""Work on pages that a machine asks its host for, and the answers (level 1)."""

from __future__ import annotations

from dataclasses import dataclass

from memserve.messages import Peer
from memserve.types import Tier


@dataclass(frozen=True, slots=True)
class SealPages:
    """Compute the checksum of layers ``[first_layer, end_layer)`` of each of these own blocks; ``PagesSealed``."""

    job_id: int
    tier: Tier
    blocks: tuple[int, ...]
    first_layer: int
    end_layer: int


@dataclass(frozen=True, slots=True)
class PagesSealed:
    """Checksums in the order of ``SealPages.blocks``: of those bytes as they are, unused positions included."""

    job_id: int
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PullPages:
    """Copy layers ``[first_layer, end_layer)`` of a peer's blocks into own ones, compare checksums; ``PagesPulled``.

    ``src_blocks[i] -> dst_blocks[i]``. Nobody else reads or writes the destination meanwhile. ``by_page`` moves every
    page on its own, as a layout without aggregation has to (the discrete transfer modes).
    """

    job_id: int
    peer: Peer
    src_tier: Tier
    src_blocks: tuple[int, ...]
    dst_tier: Tier
    dst_blocks: tuple[int, ...]
    first_layer: int
    end_layer: int
    checksums: tuple[int, ...]
    by_page: bool = False


@dataclass(frozen=True, slots=True)
class CancelPulls:
    """A peer is gone: pulls from it that have not begun need not begin. Each is answered by ``PagesPulled`` all the
    same: until then its destination may be written."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class PagesPulled:
    """A pull has ended; nobody writes its destination any more. No ``error``: each page came with its checksum."""

    job_id: int
    error: str = ""
    pulled_bytes: int = 0
    link: str = ""  # "shm" or "nixl"
    spent_ns: int = 0
    mismatches: int = 0
    """Blocks whose checksum differed (then there is an ``error``)."""


PageJob = SealPages | PullPages | CancelPulls
