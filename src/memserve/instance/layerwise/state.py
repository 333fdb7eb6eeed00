"""What one sequence holds by layer, and the copies that are on their way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from memserve.base.types import Tier
from memserve.instance.events import LinkUse, MovePages, StepPlan


@dataclass(frozen=True, slots=True)
class LayerReport:
    """KV that lies by layer: what there is of it now, and totals since the instance was made."""

    sequences: int = 0
    """Sequences that lie by layer now."""
    parked: int = 0
    """Sequences that are parked now."""
    dram_pages: int = 0
    """Pages in DRAM of those that lie by layer: all their layers."""
    kept_pages: int = 0
    """Pages in HBM of layers that stay there."""
    staging_pages: int = 0
    """Pages in HBM that layers pass through."""
    moving_pages: int = 0
    """Pages in HBM and DRAM that copies under way fill."""
    begun: int = 0
    """Sequences that began by layer."""
    converted: int = 0
    """Running sequences that went over to it so that a prompt had room."""
    parkings: int = 0
    """Times that a sequence was parked because steps would have waited for it."""
    resumed: int = 0
    """Parked sequences that went on by layer."""
    handed_over: int = 0
    """Requests that left for another instance out of DRAM, computed by layer."""
    taken_over: int = 0
    """Requests whose KV came from another instance into DRAM, since HBM had no room: they began parked."""
    link: LinkUse = field(default_factory=LinkUse)


@dataclass(slots=True)
class Moving:
    """Copies that one plan makes, and what they fill."""

    plan: StepPlan
    order: MovePages
    kept_order: MovePages | None = None
    """Pages of layers that are kept, into ``frames``."""
    blocks: list[int] = field(default_factory=list)
    """Whole blocks that leave. Empty: a layer comes to be kept."""
    dram_blocks: list[int] = field(default_factory=list)
    frames: dict[int, list[int]] = field(default_factory=dict)
    """More frames of kept layers, or all of one that comes."""
    staging: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))

    @property
    def hbm_frames(self) -> list[int]:
        return [*(frame for frames in self.frames.values() for frame in frames), *self.staging[0], *self.staging[1]]


@dataclass(slots=True)
class LayeredKV:
    """What a sequence holds by layer."""

    first: int
    """Entries before: cached blocks, whole."""
    cached: int
    """Entries that came out of the prefix cache, on either tier."""
    chunk_tokens: int = 0
    """The most that one plan computes behind what lies by layer: blocks are whole there until they have moved. 0: as
    much as of any prompt."""
    dram_blocks: list[int] = field(default_factory=list)
    resident_layers: dict[int, list[int]] = field(default_factory=dict)
    staging: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    moving: Moving | None = None
    changed: bool = True
    """The device knows another placement."""
    waited_ns: int = 0
    """How long its steps have waited for the link."""
    streams: bool = False
    """It has no room whole, even alone: its layers pass in each of its steps, for as long as it runs."""

    @property
    def hbm_frames(self) -> list[int]:
        """All HBM blocks that it holds, also those that are being filled."""
        resident = [frame for frames in self.resident_layers.values() for frame in frames]
        return [*resident, *self.staging[0], *self.staging[1], *(self.moving.hbm_frames if self.moving else ())]

    def passing_pages(self, num_layers: int) -> int:
        """Pages that a step reads back: of the layers that are not kept."""
        return len(self.dram_blocks) * (num_layers - len(self.resident_layers))


def whole_blocks(layers: int, src_tier: Tier, src: Sequence[int], dst_tier: Tier, dst: Sequence[int]) -> MovePages:
    """The pages of all layers of the blocks ``src``, to the blocks ``dst``."""
    pages = [[block * layers + layer for block in blocks for layer in range(layers)] for blocks in (src, dst)]
    return MovePages(src_tier, dst_tier, *pages)
