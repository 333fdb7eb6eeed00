"""A literal device whose memory others can read: two layers, checksums, pulls, layers that finish one by one.

Layer 0 of a cell is the number that :class:`LiteralDevice` computes with, layer 1 a function of it. A row that reads a
cell with layers that do not belong together has read a block that was moved by halves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from memserve.instance.events import StepFailed, StepFinished, StepPlan
from memserve.kv_transfer.events import PagesSealed, PullPages, SealPages
from memserve.sim.fuzz.literal_device import Cells, LiteralDevice, Slot
from memserve.sim.fuzz.truth import Violation, mix
from memserve.types import Tier, TokenLogprobs

LAYERS = 2


class PageMemory(ABC):
    """Pages, each of one layer of one block, that others of the world may read."""

    @abstractmethod
    def page(self, tier: Tier, block: int, layer: int) -> Sequence[int | None]:
        """The cells of a page. None: never written."""

    @abstractmethod
    def set_page(self, tier: Tier, block: int, layer: int, cells: Sequence[int | None]) -> None:
        """Write a page."""

    def checksum(self, tier: Tier, block: int, first_layer: int, end_layer: int) -> int:
        """Of these layers of a block as they are, unused positions included."""
        state = 11
        for layer in range(first_layer, end_layer):
            for value in self.page(tier, block, layer):
                state = mix(state, -1 if value is None else value)
        return state

    def seal(self, job: SealPages) -> PagesSealed:
        """Checksums of own pages."""
        sums = [self.checksum(job.tier, block, job.first_layer, job.end_layer) for block in job.blocks]
        return PagesSealed(job.job_id, tuple(sums))

    def pull(self, job: PullPages, place: int, source: PageMemory, *, corrupt: bool) -> bool:
        """Copy one block's layers from ``source``; whether what was written has the checksum that was promised."""
        src, dst = job.src_blocks[place], job.dst_blocks[place]
        for layer in range(job.first_layer, job.end_layer):
            cells = list(source.page(job.src_tier, src, layer))
            if corrupt and layer == job.first_layer:
                cells[0] = (cells[0] or 0) ^ 1
            self.set_page(job.dst_tier, dst, layer, cells)
        return self.checksum(job.dst_tier, dst, job.first_layer, job.end_layer) == job.checksums[place]


class TruthDevice(LiteralDevice, PageMemory):
    """Literal KV in two layers."""

    def __init__(self, block_tokens: int, hbm_blocks: int, dram_blocks: int, vocab: int) -> None:
        super().__init__(block_tokens, hbm_blocks, dram_blocks, vocab)
        sizes = {Tier.HBM: hbm_blocks, Tier.DRAM: dram_blocks}
        self.upper: dict[Tier, Cells] = {
            tier: [[None] * block_tokens for _ in range(count)] for tier, count in sizes.items()
        }
        self._begun: dict[int, StepFinished | StepFailed] = {}  # plans with a first layer that is done
        self._late: list[tuple[int, int]] | None = None  # cells with an upper layer still to be written

    # -- plans

    def run(self, plan: StepPlan) -> StepFinished | StepFailed:
        """All layers, or those that are not done yet."""
        if plan.step_id in self._begun:
            self._write_upper()
            return self._begun.pop(plan.step_id)
        return super().run(plan)

    def finish_layer(self, plan: StepPlan, layer: int) -> None:
        """One layer of a plan with ``report_layers``."""
        if layer == 0:
            self._late = []
            self._begun[plan.step_id] = super().run(plan)
        else:
            self._write_upper()

    def abandon_layers(self, plan: StepPlan) -> None:
        """The plan under way fails, perhaps after half of its layers."""
        self._begun.pop(plan.step_id, None)
        self._late = None

    def _write_upper(self) -> None:
        for block, inside in self._late or ():
            self._derive(block, inside)
        self._late = None

    def _derive(self, block: int, inside: int) -> None:
        self.upper[Tier.HBM][block][inside] = mix(self.tiers[Tier.HBM][block][inside] or 0, 99)

    def _prepare(self, plan: StepPlan) -> None:
        super()._prepare(plan)
        for copy in plan.copies:
            for src, dst in zip(copy.src, copy.dst, strict=True):
                self.upper[copy.dst_tier][dst] = list(self.upper[copy.src_tier][src])

    def _row(
        self, row: int, slot: Slot, start: int, count: int, writer: dict[tuple[int, int], int]
    ) -> tuple[int, list[TokenLogprobs | None]]:
        for position in range(start):
            block, inside = slot.table[position // self.block_tokens], position % self.block_tokens
            if (block, inside) in writer:
                continue
            lower, upper = self.tiers[Tier.HBM][block][inside], self.upper[Tier.HBM][block][inside]
            if lower is None:
                raise Violation(f"position {position} (block {block}) was never written")
            if upper != mix(lower, 99):
                raise Violation(f"position {position} (block {block}): the layers do not belong together")
        result = super()._row(row, slot, start, count, writer)
        for position in range(start, start + count):
            block, inside = slot.table[position // self.block_tokens], position % self.block_tokens
            if self._late is not None:
                self._late.append((block, inside))
            else:
                self._derive(block, inside)
        return result

    # -- pages

    def page(self, tier: Tier, block: int, layer: int) -> list[int | None]:
        return (self.tiers, self.upper)[layer][tier][block]

    def set_page(self, tier: Tier, block: int, layer: int, cells: Sequence[int | None]) -> None:
        (self.tiers, self.upper)[layer][tier][block] = list(cells)
