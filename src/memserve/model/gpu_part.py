"""One worker's part of a device on several GPUs: as :class:`memserve.model.gpu_device.GpuDevice`, in step with the
others.

    leader          begin_part(k)   forward, draw -> hands out what is drawn     finish: what was drawn
    other workers   begin_part(k)   forward, gives its logits, gets the tokens   finish: copies are done

What is enqueued is the same everywhere, because all decide alike: by the plan, by what the leader says beside it
(whether it waits for the host), and by what all agreed on at the start (graphs).

HBM has this worker's heads and layers of every block, under the numbers that the machine knows. DRAM has whole blocks,
in memory that all workers map: what lies there is the instance's, and looks like that of one worker.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from memserve import _core
from memserve.config import InstanceConfig
from memserve.errors import check
from memserve.instance.events import StepFinished, StepPlan
from memserve.model.attention.context import StepAttention
from memserve.model.device import Drawing
from memserve.model.forward import Forward
from memserve.model.gpu import Gpu
from memserve.model.gpu_arena import GpuArenas
from memserve.model.gpu_crew import GpuCrew
from memserve.model.gpu_device import GpuDevice
from memserve.model.gpu_sampling import BegunDraw
from memserve.model.loading.loader import LoadedModel
from memserve.model.slots import Int64s
from memserve.runtime.links.ranges import shard_of


class GpuPart(GpuDevice):
    """See the module."""

    def __init__(
        self,
        model: LoadedModel,
        config: InstanceConfig,
        gpu: Gpu,
        crew: GpuCrew,
        forward: Forward,
        *,
        dram: _core.SharedArena | None = None,
        **options: Any,
    ) -> None:
        """``model``: cut, with the geometry of the whole. ``dram``: the second tier of all workers."""
        self._shard, self._dram = shard_of(crew.share, model.geometry), dram
        self._gpu_crew = crew
        super().__init__(replace(model, geometry=self._shard.local), config, gpu, forward, crew=crew, **options)

    def _make_arenas(
        self,
        sizes: tuple[int, int, int],
        *,
        shared: bool,
        lower: _core.LowerPages | None,
        hbm: _core.SharedArena | None,
    ) -> Any:
        check(lower is None and hbm is None and not shared, "on GPUs KV lies as it was computed, in several memories")
        return GpuArenas(self._gpu, *sizes, part=self._shard, dram=self._dram)

    @property
    def hbm(self) -> Tensor:
        """This worker's heads and layers of every block, ``[blocks, bytes]`` uint8."""
        found: Tensor = self._arenas.hbm
        return found

    @property
    def shared_dram(self) -> _core.SharedArena | None:
        """The second tier of all workers. None: there is none."""
        return self._dram

    def begin_part(self, drawn: Drawing, plan: StepPlan, waits_for_host: bool) -> Callable[[], StepFinished]:
        """Enqueue this worker's part of a step; what is returned waits for its end. ``drawn``: what the leader
        has drawn in plans that waited for the host, since the last step; for itself nothing."""
        with self._lock:
            for slots, tokens in drawn:
                for slot, length in zip(slots.tolist(), self._slots.lengths[slots].tolist(), strict=True):
                    self._mirror.tokens_changed(slot, length, length + 1)
                self._slots.append(slots, tokens)
        return self._begin(plan, waits_for_host=waits_for_host)

    def _compute(self, plan: StepPlan) -> StepFinished:
        if self._leads:
            return super()._compute(plan)
        if plan.slots:
            self._logits(plan)
        return StepFinished(plan.step_id, [], 0)

    def _begin_draw(self, logits: Tensor, rows: Int64s, slots: Int64s) -> BegunDraw:
        positions = self._slots.lengths[slots].copy()
        places = self._gpu.send(torch.stack((torch.from_numpy(slots), torch.from_numpy(positions))))
        if self._leads:
            draw = super()._begin_draw(logits, rows, slots)
            self._gpu_crew.hand_out(self._mirror.tokens[places[0], places[1]])
            return draw
        drawn = torch.empty(len(slots), dtype=torch.int32, device=self._mirror.tokens.device)
        self._gpu_crew.hand_out(drawn)
        self._mirror.write_drawn(places[0], places[1], drawn)
        sound = torch.ones((2, len(slots)), dtype=torch.bool)  # the leader has judged that
        return BegunDraw(slots, positions, self._gpu.fetch(drawn.long()), sound)

    def _reporting(self, plan: StepPlan, attention: StepAttention) -> StepAttention:
        return attention  # no worker sees when all have written a layer
