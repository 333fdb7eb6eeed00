"""A device that takes exactly as long as a planted cost model says."""

from __future__ import annotations

import numpy as np

from memserve.base.config import InstanceConfig, PoolConfig, SchedulerConfig
from memserve.base.types import KVGeometry, Tier
from memserve.instance.events import StepFinished, StepPlan
from memserve.kv.costs import CopyCurve, CostModel, DecodeCurve, PrefillCurve
from memserve.transport.ports import Device
from tiny_models import VOCAB

GEOMETRY = KVGeometry(4, 2, 16, 16, "float32", block_tokens=16)
CONFIG = InstanceConfig(
    max_model_tokens=2048,
    pool=PoolConfig(hbm_blocks=400, dram_blocks=40),
    scheduler=SchedulerConfig(max_running=16, max_step_tokens=1024),
)
PLANTED = CostModel(
    prefill=PrefillCurve(8e6, 6e5, 250.0),
    decode=DecodeCurve(1e7, 5e5, 600.0),
    swap_in=CopyCurve(6e4, 3e4, 0.0),
    swap_out=CopyCurve(5e4, 2e4, 0.0),
)


class PlantedDevice(Device):
    """Checks each plan as a real device would have to, and takes as long as the planted model says."""

    def __init__(self, config: InstanceConfig) -> None:
        self.config = config
        self.open: set[int] = set()
        self.steps: list[int] = []
        self.closed = False
        self.noise = np.random.default_rng(1)

    def execute(self, plan: StepPlan) -> StepFinished:
        self.steps.append(plan.step_id)
        spent_ns = sum(self._copy(order) for order in plan.copies)
        self.open -= set(plan.close)
        used: set[int] = set()
        for sequence in plan.open:
            assert sequence.slot not in self.open and sequence.slot < self.config.scheduler.max_running
            self.open.add(sequence.slot)
            assert sequence.tokens.min() >= 0 and sequence.tokens.max() < VOCAB
            assert len(sequence.blocks) * GEOMETRY.block_tokens > len(sequence.tokens)  # the drawn token has room too
            assert used.isdisjoint(sequence.blocks) and max(sequence.blocks) < self.config.pool.hbm_blocks
            used |= set(sequence.blocks)
        rows = list(zip(plan.open, plan.slots, plan.starts, plan.counts, plan.sample_slots, strict=True))
        for sequence, slot, start, count, drawing in rows:
            assert (slot, (slot,)) == (sequence.slot, drawing)
            assert start + count == len(sequence.tokens) <= self.config.max_model_tokens and count > 0
        if len(rows) == 1 and plan.counts[0] > 1:
            spent_ns += PLANTED.prefill_ns(plan.counts[0], plan.starts[0])
        elif rows:
            spent_ns += PLANTED.decode_step_ns(len(rows), sum(len(sequence.tokens) for sequence in plan.open))
        return StepFinished(plan.step_id, [], round(spent_ns * self.noise.uniform(0.98, 1.02)))

    def _copy(self, order) -> int:
        limit = min(self.config.pool.hbm_blocks, self.config.pool.dram_blocks)
        for side in (order.src, order.dst):
            assert len(set(side)) == len(side) and min(side) >= 0 and max(side) < limit
        inward = order.dst_tier is Tier.HBM
        cost = (PLANTED.swap_in if inward else PLANTED.swap_out).ns
        return cost(len(order.src) * GEOMETRY.block_bytes, len(order.src))

    def close(self) -> None:
        self.closed = True
