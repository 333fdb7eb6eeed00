"""KV of instances on several GPUs, which are made up: seals of whole blocks, pulls between instances of any degrees.

Whether Triton's kernels are interpreted is decided once: the scenarios run in one child process."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest

from interpreted import results_of, run_scenarios
from memserve.base.kv_layout import Parallel, shares
from memserve.base.types import KVGeometry, Role, Tier

BLOCKS = 5
GEOMETRIES = {
    "two heads": KVGeometry(3, 2, 16, 16, "float32", 8),
    "three heads": KVGeometry(3, 3, 8, 16, "bfloat16", 8),
    "runs of 24 bytes": KVGeometry(3, 4, 4, 2, "bfloat16", 2),
    "seven layers": KVGeometry(7, 2, 8, 8, "bfloat16", 8),
}
DEGREES = [
    ((1, 1), (2, 1)), ((2, 1), (1, 1)), ((2, 1), (2, 1)), ((2, 1), (1, 2)), ((1, 3), (2, 1)), ((2, 3), (2, 2)),
    ((3, 1), (2, 1)), ((2, 1), (4, 1)), ((4, 2), (2, 1)),
]  # fmt: skip
"""Tensor and pipeline parallelism of the owner and of the reader."""


def random_bytes(nbytes: int, seed: int) -> Any:
    import torch

    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8))


@dataclass
class Divided:
    """An instance's arena on as many GPUs as it has workers. ``whole``: its bytes as one worker would have them."""

    geometry: KVGeometry
    degree: tuple[int, int]
    seed: int | None = None
    driver: Any = None
    parts: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        import torch

        from fake_driver import FakeDriver, device_zeros
        from memserve.transport.links.gpu_memory import GpuMemory, MappedMemory, WorkerMemory, shard_place
        from memserve.transport.ranges import shard_of

        self.driver = self.driver or FakeDriver()
        found = tuple(shard_of(share, self.geometry) for share in shares(Parallel(*self.degree), self.geometry))
        self.shards = found
        self.parts = [device_zeros(BLOCKS, one.local_geometry.block_bytes, dtype=torch.uint8) for one in found]
        if self.seed is not None:
            self.write(random_bytes(BLOCKS * self.geometry.block_bytes, self.seed))
        others = []
        for shard, part in zip(found[1:], self.parts[1:], strict=True):
            exported = self.driver.export(part.data_ptr())
            place = shard_place(shard, part.data_ptr(), part.numel(), exported)
            others.append(WorkerMemory(place, MappedMemory(self.driver, exported, part.numel())))
        several = {"shards": found, "worker_memories": others} if len(found) > 1 else {}
        self.memory = GpuMemory(self.parts[0], self.driver, **several)
        self.memory.generation = 1

    def _views(self) -> list[tuple[Any, tuple[slice, slice]]]:
        run = self.geometry.page_bytes // self.geometry.num_kv_heads
        return [
            (
                part.view(BLOCKS, one.local_geometry.num_layers, one.local_geometry.num_kv_heads, run),
                (slice(one.first_layer, one.end_layer), slice(one.first_head, one.end_head)),
            )
            for one, part in zip(self.shards, self.parts, strict=True)
        ]

    def _whole(self) -> Any:
        import torch

        run = self.geometry.page_bytes // self.geometry.num_kv_heads
        return torch.zeros((BLOCKS, self.geometry.num_layers, self.geometry.num_kv_heads, run), dtype=torch.uint8)

    def write(self, flat: Any) -> None:
        whole = flat.view(self._whole().shape)
        for part, (layers, heads) in self._views():
            part.copy_(whole[:, layers, heads])

    @property
    def whole(self) -> Any:
        """``[blocks, bytes]``."""
        whole = self._whole()
        for part, (layers, heads) in self._views():
            whole[:, layers, heads] = part
        return whole.view(BLOCKS, -1)

    def info(self, *more: Any) -> Any:
        from memserve.protocol.peers import Peer, PeerInfo
        from memserve.transport.links.shared_memory import this_host

        return PeerInfo(
            Peer("owner", 1), Role.PREFILL, "tcp://127.0.0.1:1", "ns", self.geometry, BLOCKS, BLOCKS, 9, True,
            this_host(), os.getpid(), (self.memory.describe_arena(Tier.HBM), *more),
        )  # fmt: skip


def cases() -> list[tuple[str, KVGeometry, tuple[int, int], tuple[int, int]]]:
    """All geometries with all degrees that their heads and layers allow."""
    return [
        (f"{name}, {owner} to {reader}", geometry, owner, reader)
        for name, geometry in GEOMETRIES.items()
        for owner, reader in DEGREES
        if max(owner[0], reader[0]) <= geometry.num_kv_heads and max(owner[1], reader[1]) <= geometry.num_layers
    ]


def jobs(geometry: KVGeometry) -> list[Any]:
    """Whole blocks; some layers; single pages."""
    from memserve.transport.ranges import block_ranges

    src, dst, layers = (4, 0, 2), (1, 3, 0), geometry.num_layers
    whole = block_ranges(geometry, src, dst, 0, layers)
    some = block_ranges(geometry, src, dst, 1, layers)
    return [whole, some, block_ranges(geometry, src, dst, 0, layers - 1, by_page=True)]


def same_bytes(ranges: Any, source: Any, target: Any) -> bool:
    """Whether ``target`` has what ``ranges`` of ``source`` are, and nothing else is changed (all was zero)."""
    expected = np.zeros_like(target)
    for src, dst in zip(ranges.src_offsets.tolist(), ranges.dst_offsets.tolist(), strict=True):
        expected[dst : dst + ranges.range_bytes] = source[src : src + ranges.range_bytes]
    return bool((expected == target).all())


def seals_are_those_of_whole_blocks() -> bool:
    """Wherever heads and layers lie; and what lands from the host, and goes there, is regrouped."""
    import torch

    from memserve import _core

    for name, geometry, owner in dict.fromkeys((name.split(",")[0], *rest) for name, *rest, _ in cases()):
        here = Divided(geometry, owner, seed=3)
        whole = here.whole.numpy().ravel()
        for ranges in jobs(geometry):
            want = _core.seal_ranges(whole.ctypes.data, ranges.src_offsets, ranges.range_bytes)
            assert (here.memory.seal(ranges.src_offsets, ranges.range_bytes) == want).all(), name
            taken = here.memory.copied_ranges(ranges.src_offsets, ranges.range_bytes)
            target = torch.zeros(len(taken) + 64, dtype=torch.uint8)
            here.memory.copy_ranges_to(ranges.src_offsets, ranges.range_bytes, target)
            expected = [whole[at : at + ranges.range_bytes] for at in ranges.src_offsets.tolist()]
            assert (taken == np.concatenate(expected)).all() and (target[: len(taken)].numpy() == taken).all(), name
            assert not target[len(taken) :].any()
            there = Divided(geometry, owner)
            landed = there.memory.land_host(
                ranges.dst_offsets, whole.ctypes.data, ranges.src_offsets, ranges.range_bytes
            )
            assert (landed == want).all() and same_bytes(ranges, whole, there.whole.numpy().ravel()), name
    return True


def pulls_on_one_host() -> bool:
    """Out of N memories into M, into host memory and out of it; all maps are given back."""
    import torch

    from fake_driver import FakeDriver
    from memserve import _core
    from memserve.protocol.peers import ArenaPlace, Peer
    from memserve.transport.links.cuda_ipc import IpcLink

    for name, geometry, owner, reader in cases():
        source, driver = Divided(geometry, owner, seed=4), FakeDriver()
        size = BLOCKS * geometry.block_bytes
        dram = _core.SharedArena(size)
        dram.generation = 1
        torch.frombuffer(dram, dtype=torch.uint8).copy_(source.whole.view(-1).flip(0))
        info = source.info(ArenaPlace(Tier.DRAM, dram.address, size, dram.fd))
        held = {Tier.HBM: source.whole.numpy().ravel(), Tier.DRAM: np.frombuffer(dram, np.uint8)}
        target, host = Divided(geometry, reader), _core.SharedArena(size)
        link = IpcLink({Tier.HBM: target.memory, Tier.DRAM: host}, driver)
        assert link.reaches(info)
        link.add_peer(info)
        for ranges in jobs(geometry):
            for src_tier, dst_tier in ((Tier.HBM, Tier.HBM), (Tier.HBM, Tier.DRAM), (Tier.DRAM, Tier.HBM)):
                for part in target.parts:
                    part.zero_()
                np.frombuffer(host, np.uint8)[:] = 0
                want = _core.seal_ranges(held[src_tier].ctypes.data, ranges.src_offsets, ranges.range_bytes)
                assert (link.read(Peer("owner", 1), src_tier, dst_tier, ranges) == want).all(), name
                landed = target.whole.numpy().ravel() if dst_tier is Tier.HBM else np.frombuffer(host, np.uint8)
                assert same_bytes(ranges, held[src_tier], landed), (name, src_tier, dst_tier)
        assert driver.mapped == len(source.parts), name
        link.remove_peer(Peer("owner", 1))
        assert driver.mapped == 0, name
        link.close()
    return True


def the_channel_hands_out_whole_blocks() -> bool:
    """To a reader of another degree, and to one of an older release, which knows nothing of shards; what is no whole
    page is refused."""
    from memserve import _core
    from memserve.protocol.peers import Peer
    from memserve.transport.links.encrypted import CurveLink
    from memserve.transport.links.staging import StagedLink
    from memserve.transport.network_devices import ListenAddress
    from memserve.transport.ports import LinkError
    from memserve.transport.ranges import Ranges

    geometry, where = GEOMETRIES["three heads"], ListenAddress("a secret of these tests")
    source, target = Divided(geometry, (3, 1), seed=5), Divided(geometry, (2, 2))
    whole = source.whole.numpy().ravel()
    owner = CurveLink({Tier.HBM: source.memory}, where, geometry.block_bytes)
    host = _core.SharedArena(BLOCKS * geometry.block_bytes)
    reader = CurveLink({Tier.HBM: target.memory, Tier.DRAM: host}, where, geometry.block_bytes)
    staged = StagedLink({Tier.DRAM: host}, reader.read_staged)
    info = owner.describe(source.info())
    place = msgspec.structs.replace(info.arenas[0], shards=())
    older = msgspec.structs.replace(info, peer=Peer("owner", 1), arenas=(place,))
    try:
        for known in (info, older):
            reader.add_peer(known)
            for part in target.parts:
                part.zero_()
            ranges = jobs(geometry)[0]
            want = _core.seal_ranges(whole.ctypes.data, ranges.src_offsets, ranges.range_bytes)
            for tier in (Tier.HBM, Tier.DRAM):
                assert (reader.read(info.peer, Tier.HBM, tier, ranges) == want).all()
            for landed in (target.whole.numpy().ravel(), np.frombuffer(host, np.uint8)):
                assert same_bytes(ranges, whole, landed)
            staged.add_peer(known)
            np.frombuffer(host, np.uint8)[:] = 0
            assert (staged.read(info.peer, Tier.HBM, Tier.DRAM, ranges) == want).all()
            assert staged._staging and same_bytes(ranges, whole, np.frombuffer(host, np.uint8))
        half = np.array([geometry.page_bytes // 2], np.int64)
        try:
            reader.read(info.peer, Tier.HBM, Tier.DRAM, Ranges(half, half * 0, geometry.page_bytes))
        except LinkError as error:
            assert "no such ranges" in str(error), error
        else:
            raise AssertionError("half a page was handed out")
    finally:
        staged.close()
        reader.close()
        owner.close()
    return True


def what_is_no_whole_block_is_not_read() -> bool:
    """Shards of a peer that leave something out, have something twice, or are larger than what it says."""
    from memserve.protocol.peers import Peer
    from memserve.transport.links.cuda_ipc import IpcLink
    from memserve.transport.ports import LinkError, UnreachableError
    from memserve.transport.ranges import Ranges

    geometry = GEOMETRIES["two heads"]
    source, target = Divided(geometry, (2, 1), seed=6), Divided(geometry, (2, 1))
    info, job = source.info(), jobs(geometry)[0]
    place = info.arenas[0]
    first, second = place.shards
    change = msgspec.structs.replace
    for shards in (
        (first,), (first, first), (first, change(second, end_head=3)), (first, change(second, first_head=0)),
        (first, change(second, arena_bytes=second.arena_bytes // BLOCKS * (BLOCKS - 1))),
        (change(first, end_layer=2), second), (change(first, first_layer=3), second),
    ):  # fmt: skip
        link = IpcLink({Tier.HBM: target.memory}, source.driver)
        link.add_peer(change(info, arenas=(change(place, shards=shards),)))
        try:
            link.read(info.peer, Tier.HBM, Tier.HBM, job)
        except UnreachableError as error:
            assert "shard" in str(error), error
        else:
            raise AssertionError(f"read from {shards}")
        link.close()
    link = IpcLink({Tier.HBM: target.memory}, source.driver)
    assert not link.reaches(change(info, arenas=(change(place, shards=(first, change(second, exported=b""))),)))
    link.add_peer(info)
    half = np.array([geometry.page_bytes // 2], np.int64)
    for ranges in (Ranges(half, half * 0, geometry.page_bytes), Ranges(half * 0, half * 0, geometry.page_bytes // 2)):
        try:
            link.read(Peer("owner", 1), Tier.HBM, Tier.HBM, ranges)
        except LinkError as error:
            assert "whole pages" in str(error), error
        else:
            raise AssertionError("half a page was read")
    link.close()
    assert not any(part.any() for part in target.parts)
    return True


def an_owner_that_ends_is_noticed() -> bool:
    """Another worker of it ends in the middle of a pull: the leader gives its generation up, and the pull fails. Where
    the whole process is gone before memory is mapped, the link reaches it no more."""
    from memserve.protocol.peers import Peer
    from memserve.transport.links.cuda_ipc import IpcLink
    from memserve.transport.links.gpu_memory import GpuMemory
    from memserve.transport.ports import LinkError, UnreachableError

    geometry = GEOMETRIES["two heads"]
    source, target = Divided(geometry, (2, 1), seed=7), Divided(geometry, (1, 1))
    link, run = IpcLink({Tier.HBM: target.memory}, source.driver), GpuMemory.copy_and_seal
    link.add_peer(source.info())

    def ends(self: Any, *more: Any) -> Any:
        seals = run(self, *more)
        source.memory.generation = 0
        return seals

    GpuMemory.copy_and_seal = ends
    try:
        link.read(Peer("owner", 1), Tier.HBM, Tier.HBM, jobs(geometry)[0])
    except LinkError as error:
        assert "generation 0" in str(error), error
    else:
        raise AssertionError("what an instance has that has lost a worker was taken")
    finally:
        GpuMemory.copy_and_seal = run
    link.close()
    source.memory.generation = 1
    link = IpcLink({Tier.HBM: target.memory}, source.driver)
    gone = source.info()
    shard = msgspec.structs.replace(gone.arenas[0].shards[1], exported=(1 << 40).to_bytes(8, "little") + bytes(64))
    place = msgspec.structs.replace(gone.arenas[0], shards=(gone.arenas[0].shards[0], shard))
    before = source.driver.mapped
    link.add_peer(msgspec.structs.replace(gone, arenas=(place,)))
    with suppress(UnreachableError):
        link.read(Peer("owner", 1), Tier.HBM, Tier.HBM, jobs(geometry)[0])
        raise AssertionError("memory was mapped that is gone")
    assert source.driver.mapped == before, "what was mapped of it is given back"
    link.close()
    return True


SCENARIOS: dict[str, Callable[[], bool]] = {
    "seals are those of whole blocks": seals_are_those_of_whole_blocks,
    "pulls on one host": pulls_on_one_host,
    "the channel hands out whole blocks": the_channel_hands_out_whole_blocks,
    "what is no whole block is not read": what_is_no_whole_block_is_not_read,
    "an owner that ends is noticed": an_owner_that_ends_is_noticed,
}


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    """Scenario -> "" or what went wrong."""
    return results_of(__file__)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SCENARIOS)
def test_kv_of_several_gpus(results: dict[str, str], name: str) -> None:
    assert results[name] == ""


def main() -> None:
    from lean_imports import interpret_quickly
    from memserve.system import gpu_kernels

    interpret_quickly()
    gpu_kernels._STRIPES, gpu_kernels._TURNS = 32, 1  # each turn takes the interpreter a millisecond, however small
    run_scenarios(SCENARIOS)


if __name__ == "__main__":
    main()
