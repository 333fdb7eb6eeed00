"""Decode steps as CUDA graphs: one for each of a few numbers of rows, captured at the start.

A step of one token a row launches some thousand kernels, each of microseconds: launched one by one, a small batch waits
for the host most of the time. A graph enqueues all of them at once. What changes from step to step is read from memory
at fixed places: which slots, which positions. Tokens and tables are on the device already (:mod:`gpu_slots`); rows that
are missing up to the graph's number are computed for no slot, into a block that no sequence has.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from memserve.model.attention.context import StepAttention, attending
from memserve.model.forward import Forward
from memserve.model.gpu.sampling import SlotMirror
from memserve.model.gpu.streams import Gpu, Graph
from memserve.model.slots import Int64s
from memserve.model.workers.gpu_group import GpuWorkerGroup
from memserve.model.workers.group import exchanging

log = logging.getLogger(__name__)

Decodes = Callable[[Tensor, Tensor], StepAttention]
"""``(slots [n], contexts [n])``, int32 on the device -> the attention of one token of each."""


def graph_sizes(rows_max: int) -> list[int]:
    """Numbers of rows with a graph of their own: 1, 2, 4, then multiples of 8 up to 64, then of 32."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(96, rows_max + 32, 32)]
    return [size for size in sizes if size < rows_max] + [rows_max]


@dataclass(frozen=True, slots=True)
class _Captured:
    rows: Tensor
    """``[3, n]`` int64: slots, positions, positions as the forward takes them."""
    numbers: Tensor
    """``[n]`` int64, which the graph reads at each replay: a graph keeps no tensor alive."""
    graph: Graph
    logits: Tensor


class DecodeGraphs:
    """The graphs of one model."""

    def __init__(
        self, gpu: Gpu, forward: Forward, mirror: SlotMirror, attention: Decodes, crew: GpuWorkerGroup | None = None
    ) -> None:
        """``crew``: the workers of the instance, all of which capture the same."""
        self._gpu, self._forward, self._mirror, self._attention = gpu, forward, mirror, attention
        self._crew = crew
        self._captured: dict[int, _Captured] = {}
        #: why there are none; empty: there are
        self.refused = ""

    @property
    def sizes(self) -> list[int]:
        """Numbers of rows that have a graph."""
        return sorted(self._captured)

    def capture(self, rows_max: int, progress: Callable[[int, int], None] = lambda done, of: None) -> None:
        """Capture all, the largest first, whose memory the others share. A model that computes on the host in the
        middle of its forward has none: it runs kernel by kernel. Of several workers all have graphs, or none has."""
        sizes, began_s = graph_sizes(rows_max)[::-1], time.monotonic()
        for done, size in enumerate(sizes):
            progress(done, len(sizes))
            try:
                self._captured[size] = self._capture(size)
            except torch.OutOfMemoryError as error:
                self.refused = f"no memory is left for them: {error}"
            except Exception as error:  # whatever the model does that a graph cannot hold
                self.refused = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            if self._crew is not None and not self._crew.agree(0 if self.refused else 1):
                self.refused = self.refused or "another worker of this instance cannot hold a step in a graph"
            if self.refused:
                log.warning("decode steps run without CUDA graphs: %s", self.refused)
                self._captured.clear()
                return
        progress(len(sizes), len(sizes))
        log.info("%d CUDA graphs of decode steps captured in %.1f s", len(sizes), time.monotonic() - began_s)

    def _capture(self, size: int) -> _Captured:
        gpu, mirror = self._gpu, self._mirror
        rows = gpu.zeros(3, size, dtype=torch.int64)
        with gpu.compute.use():
            rows[0] = mirror.padding
            numbers = torch.arange(size, device=rows.device)

        def run() -> Tensor:
            slots, positions, given = rows[0], rows[1], rows[2]
            attention = self._attention(slots.int(), positions.int() + 1)
            with torch.inference_mode(), attending(attention), exchanging(self._crew):
                logits = self._forward(mirror.tokens[slots, positions].long(), given, numbers)
                return logits if self._crew is None else self._crew.gather(logits)

        graph, logits = gpu.capture(run)
        return _Captured(rows, numbers, graph, logits)

    def run(self, slots: Int64s, positions: Int64s) -> Tensor | None:
        """Logits ``[n, vocab]`` of the tokens at ``positions [n]`` of ``slots [n]``, in the stream in use; valid until
        the next call. None: there is no graph for so many."""
        size = next((size for size in self.sizes if size >= len(slots)), 0)
        if not size:
            return None
        captured = self._captured[size]
        padded = np.zeros((3, size), np.int64)
        padded[0] = self._mirror.padding
        padded[:, : len(slots)] = slots, positions, self._mirror.given_positions(slots, positions)
        captured.rows.copy_(self._gpu.send(torch.from_numpy(padded)))
        captured.graph.replay()
        return captured.logits[: len(slots)]
