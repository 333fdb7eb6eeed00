"""The slots of the NIXL link, with an agent that does as it is told."""

from __future__ import annotations

import numpy as np
import pytest

from memserve import _core
from memserve.messages import ArenaPlace
from memserve.runtime.links.link import LinkError
from memserve.runtime.links.nixl_slots import SLOTS_MAX, SlotReader
from memserve.runtime.links.ranges import Ranges
from memserve.types import Tier

NOTHING = np.zeros(1, np.int64)
THERE = ArenaPlace(Tier.HBM, 0, 64)


class Agent:
    """Registers memory, or does not; posts no READ."""

    registers = False

    def register(self, address: int, nbytes: int, *, on_gpu: bool) -> None:
        if not self.registers:
            raise LinkError("NIXL registers no memory")

    def announce(self, name: str) -> None:
        """That a READ comes."""

    def read(self, name: str, src: int, dst: int, ranges: Ranges, on_gpu: tuple[bool, bool]) -> None:
        raise LinkError("no READ is posted")

    def close(self) -> None:
        """Nothing is held."""


def test_a_slot_that_cannot_be_registered_is_none() -> None:
    """As when the connections of NIXL break: afterwards there are as many slots as before."""
    agent, arena = Agent(), _core.SharedArena(64)
    reader = SlotReader(agent, 4096, stall_ns=1)
    for _ in range(SLOTS_MAX + 1):
        with pytest.raises(LinkError, match="registers no memory"):
            reader.read("peer", THERE, arena, Ranges(NOTHING, NOTHING, 64), lambda: True)
    agent.registers = True
    with pytest.raises(LinkError, match="no READ is posted"):
        reader.read("peer", THERE, arena, Ranges(NOTHING, NOTHING, 64), lambda: True)
    reader.close()
