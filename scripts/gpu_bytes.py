"""Bytes of KV on a CUDA device: seals, copies to and from the host, pages of another process. Parts of
``scripts/gpu_check.py``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
from gpu_attention import milliseconds
from gpu_report import Row, need_device

from memserve.base.types import KVGeometry

if TYPE_CHECKING:
    from memserve.protocol.peers import PeerInfo
    from memserve.transport.ranges import Ranges

JUDGED_BYTES = 1 << 20
"""Smaller blocks are of models that no GPU is bought for."""
SECRET = "of the check alone"
OWN_PAGES = "--own-pages"
"""How ``gpu_check.py`` is told to be the owner of :func:`pull`."""


@cache
def copy_gb_s() -> float:
    """Bytes read and written a second by a copy inside the device."""
    big = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    return (1 << 30) / milliseconds(lambda: big[: 1 << 29].copy_(big[1 << 29 :])) / 1e6


def seals() -> Iterator[Row]:
    """Seals computed on the device: those of the CPU, and how fast."""
    need_device()
    from memserve import _core
    from memserve.transport.links.gpu_memory import GpuMemory

    for range_bytes in (64, 4096, 737_280, 4 << 20):
        host = torch.randint(0, 256, (8 * range_bytes,), dtype=torch.uint8)
        offsets = np.arange(8, dtype=np.int64) * range_bytes
        want = _core.seal_ranges(host.data_ptr(), offsets, range_bytes)
        memory, target = GpuMemory(host.cuda()), GpuMemory(torch.zeros(8 * range_bytes, dtype=torch.uint8).cuda())
        right = (memory.seal(offsets, range_bytes) == want).all()
        landed = (target.land_pinned(offsets, memory.arena_parts, offsets, range_bytes) == want).all()
        same = torch.equal(memory.tensor, target.tensor)
        hosted = (target.land_host(offsets, host.data_ptr(), offsets, range_bytes) == want).all()
        yield {"what": f"seals of {range_bytes} bytes", "ok": bool(right and landed and same and hosted)}
    big = GpuMemory(torch.zeros(1 << 30, dtype=torch.uint8, device="cuda"))
    offsets = np.arange(1 << 8, dtype=np.int64) << 22
    ms = milliseconds(lambda: big.seal(offsets, 1 << 22))
    yield {"what": "sealing 1 GiB", "gb_s": (1 << 30) / ms / 1e6}


def copies() -> Iterator[Row]:
    """Between pinned host memory and the device: by copy engines, whole blocks; by a kernel, pages."""
    need_device()
    from memserve.model.gpu.streams import Cuda

    gpu = Cuda(torch.device("cuda"))
    limits = {}
    for name in ("up", "down"):
        big, far = (torch.empty(1 << 28, dtype=torch.uint8, device=place) for place in ("cuda", "cpu"))
        pair = (big, far.pin_memory()) if name == "up" else (far.pin_memory(), big)
        ms = milliseconds(lambda pair=pair: pair[0].copy_(pair[1], non_blocking=True), 6)
        limits[name] = (1 << 28) / ms / 1e6
        yield {"what": f"one large copy {name}", "gb_s": limits[name]}
    for size in (1 << 17, 1 << 20, 1 << 22):
        count = (1 << 28) // size
        device = gpu.zeros(count, size, dtype=torch.uint8)
        host = torch.randint(0, 256, (count, size), dtype=torch.uint8)
        gpu.pin_memory(host)
        order = torch.randperm(count).int()
        places = torch.arange(count, dtype=torch.int32)
        for name in ("blocks up", "blocks down", "pages up", "pages down"):
            target, source = (device, host) if name.endswith("up") else (host, device)
            source.copy_(torch.randint(0, 256, source.shape, dtype=torch.uint8))
            stream, seconds = gpu.new_stream(), []
            for _ in range(4):
                began = time.perf_counter()
                if name.startswith("blocks"):
                    stream.copy_blocks(target, source, places.tolist(), order.tolist())
                else:
                    stream.copy_pages(target, source, places, order)
                stream.wait()
                seconds.append(time.perf_counter() - began)
            same = torch.equal(target.cpu(), source.cpu()[order.long()])
            rate = (1 << 28) / min(seconds) / 1e9
            share = rate / limits[name.split()[1]]
            yield {"what": f"{name} of {size} bytes are right", "ok": same}
            row: Row = {"what": f"{name} of {size} bytes", "gb_s": rate, "share": share}
            judged = size >= JUDGED_BYTES
            yield row | ({"target": "copies between HBM and DRAM"} if judged else {})
        torch.cuda.cudart().cudaHostUnregister(host.data_ptr())


def pull() -> Iterator[Row]:
    """KV pulled out of another process's memory on this card; and what a reader sees when the owner is killed."""
    need_device()
    command = [sys.executable, str(sys.argv[0]), OWN_PAGES]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        yield from _pull_from(owner, json.loads(owner.stdout.readline()))
    finally:
        owner.kill()
        owner.wait()


def _pull_from(owner: subprocess.Popen[str], owner_facts: dict[str, object]) -> Iterator[Row]:
    from memserve.base.types import Role, Tier
    from memserve.protocol.peers import ArenaPlace, Peer, PeerInfo
    from memserve.system.gpu_kernels import Batch, Sealing
    from memserve.transport.links.cuda_ipc import IpcLink
    from memserve.transport.links.gpu_memory import GpuMemory
    from memserve.transport.links.shared_memory import this_host
    from memserve.transport.ports import LinkError
    from memserve.transport.ranges import Ranges

    peer, geometry, count = Peer("owner", 1), KVGeometry(32, 8, 128, 128, "bfloat16"), 128
    size, exported = geometry.block_bytes, bytes.fromhex(str(owner_facts["exported"]))
    place = ArenaPlace(Tier.HBM, owner_facts["address"], count * size, owner_facts["fd"], True, exported)
    info = PeerInfo(
        peer, Role.PREFILL, "tcp://127.0.0.1:1", "ns", geometry, count, 0, 100, True, this_host(), owner_facts["pid"],
        (place,),
    )  # fmt: skip
    link = IpcLink({Tier.HBM: GpuMemory(torch.zeros(count * size, dtype=torch.uint8, device="cuda"))})
    link.add_peer(info)
    offsets = np.arange(count, dtype=np.int64) * size
    ranges = Ranges(offsets, offsets[::-1].copy(), size)
    pulled = link.read(peer, Tier.HBM, Tier.HBM, ranges)
    yield {"what": "seals of what was pulled", "ok": [str(seal) for seal in pulled] == owner_facts["seals"]}
    target, address = link._arenas[Tier.HBM].tensor, link._map_gpu(peer, Tier.HBM).addresses[0]
    mapped = torch.as_tensor(_Seen(address, count * size))
    ms = milliseconds(lambda: target.copy_(mapped))
    yield {"what": "a plain copy of the same bytes", "gb_s": count * size / ms / 1e6}
    numbers = np.arange(count, dtype=np.int64)
    places = ranges.src_offsets + address, ranges.dst_offsets + target.data_ptr()
    batch = Batch(size, *places, np.zeros_like(numbers), numbers)
    ms = milliseconds(lambda: Sealing([batch], count, size, target.device))
    yield {"what": "the kernel that copies and seals", "gb_s": count * size / ms / 1e6}
    ms = milliseconds(lambda: link.read(peer, Tier.HBM, Tier.HBM, ranges))
    share = 2 * count * size / ms / 1e6 / copy_gb_s()
    yield {"what": f"{count} blocks", "target": "pull between two processes", "share": share,
           "gb_s": count * size / ms / 1e6}  # fmt: skip
    yield from _staged(info, ranges, str(owner_facts["pages_at"]), owner_facts["seals"])
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    try:
        link.read(peer, Tier.HBM, Tier.HBM, ranges)
        outcome = "reads what was there"
    except LinkError as error:
        outcome = str(error)
    yield {"what": "a read after the owner was killed", "said": outcome}
    torch.zeros(1, device="cuda").item()
    yield {"what": "the reader's context lives", "ok": True}


def _staged(info: PeerInfo, ranges: Ranges, pages_at: str, seals: object) -> Iterator[Row]:
    """The same as a store of this host reads it: without a GPU, beside the channel that sends the bytes."""
    from memserve import _core
    from memserve.base.types import Tier
    from memserve.transport.links.encrypted import CurveLink
    from memserve.transport.links.staging import StagedLink
    from memserve.transport.network_devices import ListenAddress

    host = {Tier.DRAM: _core.SharedArena(info.arenas[0].arena_bytes)}
    channel = CurveLink(host, ListenAddress(SECRET), ranges.range_bytes)
    staged = StagedLink(host, channel.read_staged)
    info = msgspec.structs.replace(info, pages_at=pages_at)
    channel.add_peer(info)
    staged.add_peer(info)
    for link, name in ((staged, "staged"), (channel, "through the channel")):
        read = link.read(info.peer, Tier.HBM, Tier.DRAM, ranges)
        yield {"what": f"a store's read, {name}, is right", "ok": [str(seal) for seal in read] == seals}
        began = time.perf_counter()
        link.read(info.peer, Tier.HBM, Tier.DRAM, ranges)
        seconds = time.perf_counter() - began
        yield {"what": f"a store's read, {name}", "gb_s": ranges.total_bytes / seconds / 1e9}
    staged.close()
    channel.close()


class _Seen:
    """Memory at an address, for torch."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 2
        }  # fmt: skip


def own_pages() -> None:
    """The owner of :func:`pull`: exports an arena, says its seals, answers stores, waits for its end."""
    from memserve.base.types import Tier
    from memserve.transport.links.encrypted import CurveLink
    from memserve.transport.links.gpu_memory import GpuMemory
    from memserve.transport.network_devices import ListenAddress

    size = KVGeometry(32, 8, 128, 128, "bfloat16").block_bytes
    arena = GpuMemory(torch.randint(0, 256, (128 * size,), dtype=torch.uint8, device="cuda"))
    arena.generation = 1
    torch.cuda.synchronize()
    sealed = [str(seal) for seal in arena.seal(np.arange(128, dtype=np.int64) * size, size)]
    channel = CurveLink({Tier.HBM: arena}, ListenAddress(SECRET), size)
    description = {
        "address": arena.address,
        "pages_at": channel._answering.address,
        "fd": arena.fd,
        "pid": os.getpid(),
        "exported": arena.export_handle().hex(),
    }
    print(json.dumps(description | {"seals": sealed}), flush=True)
    sys.stdin.read()
