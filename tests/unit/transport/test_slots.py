"""The slots of the NIXL link, with an agent that does as it is told."""

from __future__ import annotations

import numpy as np
import pytest

from memserve import _core
from memserve.base.types import KVGeometry
from memserve.transport.links.nixl import SLOTS_MAX, SlotReader, SlotSource
from memserve.transport.ports import LinkError
from memserve.transport.ranges import Ranges
from shard_plans import shards

NOTHING = np.zeros(1, np.int64)
THERE = SlotSource(("peer",), (0,), on_gpu=False)


class Agent:
    """Registers memory, or does not; posts no READ."""

    registers = False

    def register_memory(self, address: int, nbytes: int, *, on_gpu: bool) -> None:
        if not self.registers:
            raise LinkError("NIXL registers no memory")

    def announce_read(self, name: str) -> None:
        """That a READ comes."""

    def post_read(self, name: str, src: int, dst: int, ranges: Ranges, on_gpu: tuple[bool, bool]) -> None:
        raise LinkError("no READ is posted")

    def close(self) -> None:
        """Nothing is held."""


def test_unregistrable_slot_is_none() -> None:
    """As when the connections of NIXL break: afterwards there are as many slots as before."""
    agent, arena = Agent(), _core.SharedArena(64)
    reader = SlotReader(agent, 4096, stall_ns=1)
    for _ in range(SLOTS_MAX + 1):
        with pytest.raises(LinkError, match="registers no memory"):
            reader.read(THERE, arena, Ranges(NOTHING, NOTHING, 64), lambda: True)
    agent.registers = True
    with pytest.raises(LinkError, match="no READ is posted"):
        reader.read(THERE, arena, Ranges(NOTHING, NOTHING, 64), lambda: True)
    reader.close()


class Reading:
    """A READ that is over when it is told to be."""

    has_succeeded = True

    def __init__(self) -> None:
        self.over, self.released = False, 0

    def is_over(self) -> bool:
        return self.over

    def release_handle(self) -> None:
        self.released += 1


class Copying(Agent):
    """READs that are over at once, out of this process's memory; those of agents in ``held`` stay under way, and those
    of ``broken`` are not posted."""

    registers = True

    def __init__(self) -> None:
        self.held: set[str] = set()
        self.broken: set[str] = set()
        self.posted: list[Reading] = []
        self.announced: list[str] = []

    def announce_read(self, name: str) -> None:
        self.announced.append(name)

    def post_read(self, name: str, src: int, dst: int, ranges: Ranges, on_gpu: tuple[bool, bool]) -> Reading:
        if name in self.broken:
            raise LinkError("no READ is posted")
        _core.copy_ranges_sealed(dst, ranges.dst_offsets, src, ranges.src_offsets, ranges.range_bytes)
        self.posted.append(Reading())
        self.posted[-1].over = name not in self.held
        return self.posted[-1]


MODEL = KVGeometry(num_layers=3, num_kv_heads=3, head_dim_k=8, head_dim_v=8, dtype="float32", block_tokens=8)
BLOCKS = 4


def divided() -> tuple[np.ndarray, list[np.ndarray], SlotSource]:
    """Whole blocks, what two workers of an instance have of them, and how that is read."""
    whole = np.random.default_rng(1).integers(0, 256, (BLOCKS, 3, 3, MODEL.page_bytes // 3), dtype=np.uint8)
    found = tuple(shards(MODEL, 3, 1))
    held = [np.ascontiguousarray(whole[:, :, shard.first_head : shard.end_head]) for shard in found]
    names = tuple(f"worker {rank}" for rank in range(len(found)))
    return whole, held, SlotSource(names, tuple(part.ctypes.data for part in held), False, found)


def test_shards_of_several_agents_land_as_whole_blocks() -> None:
    whole, _held, source = divided()
    agent, arena = Copying(), _core.SharedArena(BLOCKS * MODEL.block_bytes)
    reader = SlotReader(agent, 2 * MODEL.block_bytes, stall_ns=10**9)
    order = np.array([3, 0, 2], np.int64) * MODEL.block_bytes, np.array([0, 1, 3], np.int64) * MODEL.block_bytes
    seals = reader.read(source, arena, Ranges(*order, MODEL.block_bytes), lambda: True)
    assert seals.tolist() == _core.seal_ranges(whole.ctypes.data, order[0], MODEL.block_bytes).tolist()
    landed = np.frombuffer(arena, np.uint8).reshape(whole.shape)
    np.testing.assert_array_equal(landed[[0, 1, 3]], whole[[3, 0, 2]])
    assert not landed[2].any() and agent.announced == list(source.agent_names)
    assert len(agent.posted) == 6 and all(one.released == 1 for one in agent.posted)
    reader.close()


def test_a_slot_is_held_while_one_shard_may_write_it() -> None:
    """The READ of the first worker is under way when that of the second cannot be posted, or stalls."""
    _whole, _held, source = divided()
    agent, arena = Copying(), _core.SharedArena(BLOCKS * MODEL.block_bytes)
    reader = SlotReader(agent, MODEL.block_bytes, stall_ns=1)
    one = Ranges(np.zeros(1, np.int64), np.zeros(1, np.int64), MODEL.block_bytes)
    agent.held, agent.broken = {"worker 0"}, {"worker 1"}
    with pytest.raises(LinkError, match="no READ is posted"):
        reader.read(source, arena, one, lambda: True)
    assert reader.sweep_abandoned() == {"worker 0"} and not reader._free
    agent.broken = set()
    with pytest.raises(LinkError, match="sent nothing"):
        reader.read(source, arena, one, lambda: True)
    assert reader.sweep_abandoned() == {"worker 0", "worker 1", "worker 2"} and reader._made == 2
    for posted in agent.posted:
        posted.over = True
    assert reader.sweep_abandoned() == set() and len(reader._free) == 2
    assert not np.frombuffer(arena, np.uint8).any(), "nothing lands that did not come whole"
    reader.close()
