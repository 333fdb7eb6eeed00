"""vLLM's KV on a device: bytes come back, and events order every copy against what vLLM enqueues."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from fake_gpu import FakeGpu, RaceError
from memserve import UserError
from memserve.integrations.block_cache import CacheJobs
from memserve.integrations.vllm.device_memory import DeviceMemory
from memserve.integrations.vllm.device_mover import DeviceMover
from memserve.integrations.vllm.lookups import RankNames
from memserve.integrations.vllm.scheduler import KvLoad, Orders, Save
from memserve.integrations.vllm.worker import WorkerSide

BLOCKS, LAYERS, HEADS, TOKENS, CONTENT = 12, 3, 2, 4, 8
LAYOUTS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]


def caches_of(layout: str) -> dict[str, torch.Tensor]:
    sizes = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": CONTENT}
    whole = torch.zeros([sizes[one] for one in layout])
    ordered = whole.permute([layout.index(one) for one in "LBHNC"])
    return {f"layers.{at}": ordered[at] for at in range(LAYERS)}


class Pool:
    """What a store keeps, by name; reads through the host, as the real one does."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu, self.is_up = gpu, True
        self.kept: dict[bytes, list[bytes]] = {}
        self.damaged: set[bytes] = set()
        self.counts = {"refused": 0}
        self.options = type("Options", (), {"timeout_s": 20.0})()

    def collect_copies(self, values: Sequence[Any]) -> list[Any]:
        return [(value.name, [bytes(self.host(piece)) for piece in value.pieces]) for value in values]

    def put_collected(self, collected: Sequence[Any]) -> None:
        self.kept.update(collected)

    def get_values(self, values: Sequence[Any]) -> list[bool]:
        for value in values:
            for piece, data in zip(value.pieces, self.kept.get(value.name, []), strict=False):
                self.host(piece)[:] = torch.frombuffer(bytearray(data), dtype=torch.uint8).numpy()
        return [value.name in self.kept and value.name not in self.damaged for value in values]

    def host(self, piece: tuple[int, int]) -> Any:
        import ctypes

        import numpy as np

        at, nbytes = piece
        found = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(at))
        self.gpu.host_reads(torch.from_numpy(found))
        return found

    def close(self) -> None:
        pass


class Device:
    """A worker whose vLLM computes in the fake device's computing stream, and touches what it is told to."""

    def __init__(self, layout: str = "LBHNC", staging_blocks: int = 16, by_layer: bool = True) -> None:
        self.gpu = FakeGpu()
        self.pool = Pool(self.gpu)
        self.caches = caches_of(layout)
        nbytes = LAYERS * HEADS * TOKENS * CONTENT * 4
        self.memory = DeviceMemory(self.caches, BLOCKS, self.gpu, staging_blocks * nbytes)
        names = RankNames(b"vllm/test/", self.memory.layout)
        pool: Any = self.pool
        self.mover = DeviceMover(pool, [self.memory], [names], by_layer=by_layer)
        self.worker = WorkerSide(pool, self.mover)

    def compute(self, layer: str, block_ids: Sequence[int], values: float | None) -> None:
        """vLLM writes ``values`` into these blocks; None: it reads them."""
        for block_id in block_ids:
            for row in self.rows(layer, block_id):
                self.gpu.access(self.gpu.compute, row, writes=values is not None)
            if values is not None:
                self.caches[layer][block_id] = values

    def rows(self, layer: str, block_id: int) -> list[torch.Tensor]:
        return [self.memory._rows[number][block_id] for number in self.memory.layers[layer]]

    def forward(
        self,
        orders: Orders,
        writes: Callable[[int], dict[int, float]] | None = None,
        reads: Sequence[int] = (),
        hooks: bool = True,
    ) -> None:
        """A step as vLLM 0.32 runs it."""
        self.worker.begin_step(orders)
        for at, layer in enumerate(self.caches):
            for block_id, value in (writes(at) if writes else {}).items():
                self.compute(layer, [block_id], value)
            if hooks:
                self.worker.wait_for_layer(layer)
            self.compute(layer, reads, None)
            if hooks:
                self.worker.save_layer(layer)
        self.worker.start_loads(orders)
        self.worker.finish_step()

    def received(self) -> set[str]:
        found, end_s = set[str](), time.monotonic() + 20
        while not found:
            found = self.worker.take_received()
            assert time.monotonic() < end_s
            threading.Event().wait(0.001)
        return found


def saved(device: Device, block_ids: tuple[int, ...], first: float, hooks: bool = True) -> Orders:
    """A step that fills blocks with numbers by block and layer, and saves them."""
    hashes = tuple(b"h%d" % block_id for block_id in block_ids)
    orders = Orders(saves=(Save(hashes, block_ids),))
    device.forward(orders, lambda layer: {at: first + at + 100 * layer for at in block_ids}, hooks=hooks)
    return orders


def load_of(request_id: str, names: Sequence[int], block_ids: tuple[int, ...]) -> Orders:
    return Orders(loads=(KvLoad(request_id, tuple(b"h%d" % name for name in names), block_ids),))


@pytest.mark.parametrize("hooks", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_come_back_in_every_layout(layout: str, hooks: bool) -> None:
    device = Device(layout)
    saved(device, (1, 2, 5), 7.0, hooks)
    device.worker._savers.wait_until_idle()
    assert len(device.pool.kept) == 3
    device.forward(Orders(), lambda layer: dict.fromkeys((1, 2, 5), -1.0), hooks=hooks)
    device.forward(load_of("r", (1, 2, 5), (8, 9, 3)), hooks=hooks)
    assert device.received() == {"r"} and not device.worker.take_failed()
    device.forward(Orders(begun=("r",)), reads=(8, 9, 3), hooks=True)
    for at, cache in enumerate(device.caches.values()):
        for name, block_id in ((1, 8), (2, 9), (5, 3)):
            assert (cache[block_id] == 7.0 + name + 100 * at).all()
    device.worker.close()


@pytest.mark.parametrize("removed", ["stage", "staged", "land"])
def test_each_event_is_needed(removed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any one of the orders the model of the device finds a race."""
    device = Device()
    stream = {"stage": device.memory._save_stream, "land": device.memory._load_stream, "staged": device.gpu.compute}
    monkeypatch.setattr(stream[removed], "wait_for", lambda mark: None)
    with pytest.raises((RaceError, AssertionError)):
        saved(device, (1, 2), 1.0)
        device.forward(Orders(), lambda layer: {1: 3.0, 2: 3.0})
        device.worker._savers.wait_until_idle()
        device.forward(load_of("r", (1, 2), (1, 2)))
        device.received()
        assert not device.worker.take_failed(), "its copies raced"
        device.forward(Orders(begun=("r",)), reads=(1, 2))
    device.worker.close()


def test_a_layer_is_copied_before_the_next_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    order: list[str] = []
    stage, compute = device.memory.stage_pieces, device.compute

    def noted_stage(numbers: Sequence[int], slots: Sequence[int], block_ids: Sequence[int]) -> None:
        order.append(f"copy {min(numbers)}")
        stage(numbers, slots, block_ids)

    def noted_compute(layer: str, block_ids: Sequence[int], values: float | None) -> None:
        if values is not None:
            order.append(layer)
        compute(layer, block_ids, values)

    monkeypatch.setattr(device.memory, "stage_pieces", noted_stage)
    monkeypatch.setattr(device, "compute", noted_compute)
    device.forward(Orders(saves=(Save((b"h1",), (1,)),)), lambda layer: {1: 1.0})
    assert order == ["layers.0", "copy 0", "layers.1", "copy 1", "layers.2", "copy 2"]
    device.worker.close()


def test_a_layer_waits_for_its_own_copies_alone() -> None:
    device = Device()
    saved(device, (1,), 1.0)
    device.worker._savers.wait_until_idle()
    device.forward(load_of("r", (1,), (4,)))
    device.received()
    device.worker.begin_step(Orders(begun=("r",)))
    device.worker.wait_for_layer("layers.0")
    device.compute("layers.0", (4,), None)
    with pytest.raises(RaceError):
        device.compute("layers.2", (4,), None)
    device.worker.wait_for_layer("layers.2")
    device.compute("layers.2", (4,), None)
    device.worker.finish_step()
    device.worker.close()


@pytest.mark.parametrize("by_layer", [True, False])
def test_blocks_of_another_owner_wait_for_all_layers(by_layer: bool) -> None:
    """The request was given up: its blocks are another's, which writes before any hook."""
    device = Device(by_layer=by_layer)
    saved(device, (1,), 1.0)
    device.worker._savers.wait_until_idle()
    device.forward(load_of("r", (1,), (4,)))
    device.received()
    device.forward(Orders(begun=() if by_layer else ("r",)), lambda layer: {4: 9.0})
    assert all((cache[4] == 9.0).all() for cache in device.caches.values())
    device.worker.close()


def test_more_blocks_than_slots() -> None:
    """Saves beyond them are left out and counted; loads wait for one another."""
    device = Device(staging_blocks=4)
    saved(device, (1, 2, 3), 1.0)
    device.worker._savers.wait_until_idle()
    assert len(device.pool.kept) == 2 and device.pool.counts["refused"] == 1
    saved(device, (3,), 1.0)
    device.worker._savers.wait_until_idle()
    device.forward(load_of("r", (1, 2, 3), (7, 8, 9)))
    assert device.received() == {"r"} and not device.worker.take_failed()
    device.forward(Orders(begun=("r",)), reads=(7, 8, 9))
    assert all((cache[9] == 4.0 + 100 * at).all() for at, cache in enumerate(device.caches.values()))
    device.worker.close()
    assert len(device.memory.loading._free) == len(device.memory.saving._free) == 2


def test_missing_or_damaged_block_is_a_failed_load() -> None:
    device = Device()
    saved(device, (1, 2), 1.0)
    device.worker._savers.wait_until_idle()
    device.pool.damaged.add(b"vllm/test/=h2")
    device.forward(load_of("r", (1, 2, 6), (4, 5, 6)))
    assert device.received() == {"r"} and device.worker.take_failed() == {5, 6}
    device.worker.close()
    assert len(device.memory.loading._free) == 8


def test_a_full_queue_gives_its_slots_back(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr(CacheJobs, "start", lambda self, job: False)
    saved(device, (1, 2), 1.0)
    assert len(device.memory.saving._free) == 8 and not device.pool.kept
    device.worker.close()


def test_staging_for_less_than_two_blocks_is_refused() -> None:
    with pytest.raises(UserError, match="two blocks have no room"):
        Device(staging_blocks=1)


def test_layers_that_share_their_kv_wait_for_it_as_a_whole() -> None:
    gpu, cache = FakeGpu(), torch.zeros(BLOCKS, 64)
    memory = DeviceMemory({"a": cache, "b": cache, "c": torch.zeros(BLOCKS, 64)}, BLOCKS, gpu, 1 << 20)
    assert list(memory.layers) == ["c"] and len(memory.layout.piece_bytes) == 2
    landing = memory.load_blocks([0], [3], gpu.compute.record_mark())
    gpu.compute.wait_for(landing.shared)
    gpu.access(gpu.compute, cache[3], writes=True)


def test_a_layer_that_runs_twice_is_copied_twice() -> None:
    """Micro-batches: the first call of the hook comes before the second half of the tokens is written."""
    device = Device()
    device.worker.begin_step(Orders(saves=(Save((b"h1",), (1,)),)))
    for value in (1.0, 2.0):
        for layer in device.caches:
            if value == 2.0:
                device.gpu.compute.wait_for(device.memory._save_stream.record_mark())  # another order would be a race
            device.compute(layer, (1,), value)
            device.worker.save_layer(layer)
    device.worker.finish_step()
    device.worker._savers.wait_until_idle()
    kept = torch.frombuffer(bytearray(b"".join(device.pool.kept[b"vllm/test/=h1"])), dtype=torch.float32)
    assert (kept == 2.0).all()
    device.worker.close()


def test_unfinished_step_saves_nothing() -> None:
    device = Device()
    device.worker.begin_step(Orders(saves=(Save((b"h1",), (1,)),)))
    device.worker.save_layer("layers.0")
    saved(device, (2,), 1.0)
    device.worker._savers.wait_until_idle()
    assert list(device.pool.kept) == [b"vllm/test/=h2"]
    device.worker.close()
    assert len(device.memory.saving._free) == 8
