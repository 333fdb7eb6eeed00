"""A literal device whose memory others can read: checksums, pulls, layers that finish one by one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from memserve.instance.events import StepFailed, StepFinished, StepPlan
from memserve.kv_transfer.events import PagesSealed, PullPages, SealPages
from memserve.sim.fuzz.literal_device import LiteralDevice
from memserve.sim.fuzz.literal_pages import in_layer
from memserve.sim.fuzz.truth import mix
from memserve.types import Tier

LAYERS = 2
"""Of a device on which nothing lies by layer."""


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
    """Literal KV in several layers."""

    def __init__(
        self, block_tokens: int, hbm_blocks: int, dram_blocks: int, vocab: int, *, layers: int = LAYERS
    ) -> None:
        super().__init__(block_tokens, hbm_blocks, dram_blocks, vocab, layers=layers)
        self._results: dict[int, StepFinished] = {}  # of plans with a first layer that is done
        #: block, position in it, cell; upper layers are still to be written
        self._late: list[tuple[int, int, int]] | None = None
        self.written: set[tuple[int, int]] = set()
        """Blocks of HBM and positions in them that the present plan writes."""
        self.behind: set[tuple[int, int]] = set()
        """Where a worker has still to write its part: others than its own rows find something else there."""

    # -- plans

    def begin(self, plan: StepPlan) -> None:
        if self._step_id != plan.step_id:
            self.written.clear()
        super().begin(plan)

    def run(self, plan: StepPlan) -> StepFinished | StepFailed:
        """All layers, or those that are not done yet."""
        result = self._results.pop(plan.step_id, None)
        if result is None:
            return super().run(plan)
        for layer in range(1, self.layers):
            self._write_layer(layer)
        self._late = None
        self._end()
        return result

    def finish_layer(self, plan: StepPlan, layer: int) -> None:
        """One layer of a plan with ``report_layers``."""
        if layer == 0:
            self._late = []
            self.begin(plan)
            self._results[plan.step_id] = self._compute(plan)
        else:
            self._write_layer(layer)

    def abandon_layers(self, plan: StepPlan) -> None:
        """The plan under way fails, perhaps after half of its layers."""
        self._results.pop(plan.step_id, None)
        self._late = None

    def _write_layer(self, layer: int) -> None:
        for block, inside, value in self._late or ():
            self.kv.of_block(Tier.HBM, block)[layer][inside] = in_layer(value, layer)

    def _write(self, block: int, inside: int, value: int) -> None:
        self.written.add((block, inside))
        if self._late is None:
            super()._write(block, inside, value)
        else:
            self.kv.of_block(Tier.HBM, block)[0][inside] = value
            self._late.append((block, inside, value))

    # -- pages

    def page(self, tier: Tier, block: int, layer: int) -> list[int | None]:
        cells = self.kv.tiers[tier][block * self.layers + layer]
        if not self.behind or tier is not Tier.HBM:
            return cells
        return [mix(value or 0, 1) if (block, inside) in self.behind else value for inside, value in enumerate(cells)]

    def set_page(self, tier: Tier, block: int, layer: int, cells: Sequence[int | None]) -> None:
        self.kv.tiers[tier][block * self.layers + layer] = list(cells)
        if self.behind and tier is Tier.HBM:
            self.behind -= {(block, inside) for inside in range(len(cells))}
