"""What the device knows of slots without the host: the tokens, so that a step reads what the one before it has drawn,
and the block tables."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from memserve.model.gpu import Gpu
from memserve.model.slots import Int32s, Int64s, SlotTable


class SlotMirror:
    """``tokens [slots + 1, max_tokens]`` and ``tables [slots + 1, entries]`` int32 on the device. The last row is of
    no slot: rows that pad a batch are computed with it."""

    def __init__(self, gpu: Gpu, slots: SlotTable, scratch_block: int) -> None:
        """``scratch_block``: what padding writes to."""
        self._gpu, self._slots = gpu, slots
        count, width = slots.tokens.shape
        self.padding = count
        self.tokens = gpu.zeros(count + 1, width, dtype=torch.int32)
        self.tables = gpu.zeros(count + 1, slots.tables.shape[1], dtype=torch.int32)
        self.tables[count, 0] = scratch_block
        self._stale_tokens: list[tuple[int, int, int]] = []  # (slot, first, end)
        self._stale_tables: list[tuple[int, int, int]] = []

    def tokens_changed(self, slot: int, first: int, end: int) -> None:
        """The host has put tokens ``[first, end)`` into ``slot``."""
        self._stale_tokens.append((slot, first, end))

    def table_changed(self, slot: int, first: int, end: int) -> None:
        """The host has put entries ``[first, end)`` into the table of ``slot``."""
        self._stale_tables.append((slot, first, end))

    def update(self) -> None:
        """Send what the host has changed, in the stream in use."""
        for stale, device, host in (
            (self._stale_tokens, self.tokens, self._slots.tokens),
            (self._stale_tables, self.tables, self._slots.tables),
        ):
            if stale:
                self._send(list(dict.fromkeys(stale)), device, host)
                stale.clear()

    def _send(self, stale: list[tuple[int, int, int]], device: Tensor, host: Int32s) -> None:
        width = host.shape[1]
        places = np.concatenate([np.arange(slot * width + first, slot * width + end) for slot, first, end in stale])
        places = np.unique(places)  # an entry that is named twice has one value: the host's of now
        both = self._gpu.send(torch.from_numpy(np.stack((places, host.reshape(-1)[places]))))
        device.view(-1)[both[0]] = both[1].int()

    def write_drawn(self, slots: Tensor, positions: Tensor, drawn: Tensor) -> None:
        """Put ``drawn [n]`` at ``positions [n]`` of ``slots [n]``, all int64 on the device."""
        self.tokens[slots, positions] = drawn.int()

    def given_positions(self, slots: Int64s, positions: Int64s) -> Int64s:
        """See :meth:`SlotTable.given_positions`."""
        return self._slots.given_positions(slots, positions)

    def inputs(self, owners: Int64s, positions: Int64s) -> tuple[Tensor, Tensor]:
        """Token ids and positions of a batch as the forward takes them, both ``[T]`` int64 on the device."""
        given = self._slots.given_positions(owners, positions)
        rows = self._gpu.send(torch.from_numpy(np.stack((owners, positions, given))))
        return self.tokens[rows[0], rows[1]].long(), rows[2]
