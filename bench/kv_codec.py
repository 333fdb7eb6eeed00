"""KV in fewer bytes: what the codec saves of real KV, and how quick it is beside zstd, lz4 and a plain copy.

    python bench/kv_codec.py [--tokens 1024] [--rounds 7] [--dtypes bfloat16,float16,float32]
        [--shapes llama3,moe] [--isas] [--save kv.npy] [--disk DIR] [--disk-gb-s 0,2,1,0.5]

The KV is what prefill leaves: of the bundled model that of two documents, of ``--shapes`` that of small models with
random weights and the KV of real ones (``tests/support/geometries.py``). Whole blocks are encoded and decoded one after
the other by one thread; contenders take turns in every round. A figure is the median of the rounds, by the thread's CPU
time. ``codec`` decodes with checksums, as it is used; ``copy`` is a copy with checksums. zstd and lz4 get the blocks as
they are, and with the two bytes of all floats apart. Every block that is decoded is compared.

``--isas``: the same with each instruction set. ``--save``: the blocks of the bundled model, for ``net_hosts.py --kv``.
``--disk``: then a store's disk there, with each ``--kv-codec`` in turns: all blocks of the bundled model are written,
and read into memory at once, as for one prompt; wall time, and what is on the disk. ``--disk-gb-s``: as it is (0), and
slowed down: so that a byte takes so long at least, in which the disk's thread sleeps.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from harness.flags import Commas, options, save
from harness.rounds import Samples, mean, median, turns
from harness.tables import Table, show
from numpy.typing import NDArray

import geometries
from disk_files import Files
from memserve import _core
from memserve.base.config import EngineOptions
from memserve.base.types import KvCodecMode, SamplingParams
from memserve.base.units import MIB
from memserve.host.build import build_parts
from memserve.instance.events import OpenSequence, StepPlan
from memserve.store.disks.disks import DisksConfig
from memserve_lab.workloads.builtin import documents

COLUMNS = {
    "KV of": "{kv}", "dtype": "{dtype}", "by": "{name}", "smaller by": "{ratio:.3f}x",
    "left of a block": "{least:.1%} to {most:.1%}", "encode GB/s": "{encode:.2f}", "decode GB/s": "{decode:.2f}",
}  # fmt: skip
NO_OFFSET = np.zeros(1, np.int64)
ROOT = Path(__file__).resolve().parent.parent
TEXTS = [ROOT / "README.md", ROOT / "docs" / "ARCHITECTURE.md"]
Bytes = NDArray[np.uint8]


@dataclass
class Contender:
    """``encode(block, room)`` gives bytes of ``room``, ``decode(encoded, block)`` writes ``block``."""

    encode: Callable[[Bytes], Any]
    decode: Callable[[Any, Bytes], None]


def prefilled(model: str, dtype: str, prompts: list[Any], tokens: int, **sizes: Any) -> Bytes:
    """Whole blocks of KV of some prompts, texts or tokens: ``[blocks, block_bytes]``."""
    engine = EngineOptions(model=model, dtype=dtype, kv_memory_bytes=400 * MIB, max_model_tokens=tokens, **sizes)
    parts = build_parts(engine)
    size, blocks_held, first = parts.model.geometry.block_tokens, [], 0
    for number, text in enumerate(prompts):
        tokens_of_text = (
            parts.model.tokenizer(text, add_special_tokens=False)["input_ids"] if isinstance(text, str) else text
        )
        ids = np.array(tokens_of_text[: tokens - 1], np.int32)
        blocks = list(range(first, first + len(ids) // size + 1))
        opened = OpenSequence(number, ids, len(ids), 0, SamplingParams(temperature=0), blocks)
        row = {"slots": [number], "starts": [0], "counts": [len(ids)], "sample_slots": [()]}
        parts.device.execute(StepPlan(number + 1, open=[opened], **row))
        blocks_held += blocks[: len(ids) // size]
        first = blocks[-1] + 1
    arena: Bytes = parts.device._arenas.hbm.numpy()[blocks_held].copy()
    parts.device.close()
    return arena


def bundled(dtype: str, tokens: int) -> Bytes:
    """Of the bundled model, behind prose and behind made-up text."""
    texts = ["".join(path.read_text(encoding="utf-8") for path in TEXTS), documents(1, 1)[0].text]
    return prefilled("smollm2-135m-instruct", dtype, texts, tokens)


def shaped(name: str, dtype: str, tokens: int) -> Bytes:
    """Of a small model with random weights and the KV of a real one."""
    from tiny_models import prompt, save_folder

    shape = geometries.SHAPES[name]
    with tempfile.TemporaryDirectory() as folder:
        model = save_folder(shape.module(), Path(folder))
        prompts = [prompt(min(tokens, 240), seed) for seed in (1, 2)]
        return prefilled(str(model), dtype, prompts, 256, block_tokens=shape.kv.block_tokens)


def contenders(block_bytes: int) -> dict[str, Contender]:
    """The codec, a copy, and what of zstd and lz4 is installed."""
    room = np.empty(_core.kv_encoded_bytes_max(block_bytes), np.uint8)

    def encode(block: Bytes) -> Any:
        nbytes = _core.kv_encode_ranges(block.ctypes.data, NO_OFFSET, block.nbytes, None, room.ctypes.data, room.nbytes)
        return room[:nbytes] if nbytes else block

    def decode(encoded: Any, block: Bytes) -> None:
        if encoded.nbytes == block.nbytes:
            return copy(encoded, block)
        seals = _core.kv_decode_ranges(encoded.ctypes.data, encoded.nbytes, block.ctypes.data, NO_OFFSET, block.nbytes)
        assert seals is not None
        return None

    def copy(source: Any, block: Bytes) -> None:
        _core.copy_ranges_sealed(block.ctypes.data, NO_OFFSET, source.ctypes.data, NO_OFFSET, block.nbytes)

    target = np.empty(block_bytes, np.uint8)

    def copied(block: Bytes) -> Any:
        copy(block, target)
        return target

    return {"codec": Contender(encode, decode), "copy": Contender(copied, copy)} | dict(_rivals())


def _rivals() -> Iterator[tuple[str, Contender]]:
    packers: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {}
    try:
        import zstandard

        packers["zstd -1"] = zstandard.ZstdCompressor(level=1).compress, zstandard.ZstdDecompressor().decompress
    except ImportError:
        print("zstd is left out: pip install zstandard")
    try:
        import lz4.block

        packers["lz4"] = lz4.block.compress, lz4.block.decompress
    except ImportError:
        print("lz4 is left out: pip install lz4")
    for name, (pack, unpack) in packers.items():
        yield name, Contender(lambda block, pack=pack: pack(block.data), _whole(unpack))
        yield (
            f"{name}, bytes apart",
            Contender(lambda block, pack=pack: pack(np.ascontiguousarray(block.reshape(-1, 2).T).data), _apart(unpack)),
        )


def _whole(unpack: Callable[[Any], Any]) -> Callable[[Any, Bytes], None]:
    def decode(encoded: Any, block: Bytes) -> None:
        block[:] = np.frombuffer(unpack(encoded), np.uint8)

    return decode


def _apart(unpack: Callable[[Any], Any]) -> Callable[[Any, Bytes], None]:
    def decode(encoded: Any, block: Bytes) -> None:
        block.reshape(-1, 2)[:] = np.frombuffer(unpack(encoded), np.uint8).reshape(2, -1).T

    return decode


def measure(blocks: Bytes, rounds: int, names: dict[str, Contender]) -> Iterator[dict[str, Any]]:
    """A row a contender."""
    landed, total = np.empty_like(blocks[0]), blocks.nbytes
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    sizes: dict[str, list[int]] = {}
    for number, name in turns(rounds, names, warm=1):
        encode_s = decode_s = 0.0
        sizes[name] = []
        for block in blocks:
            began = time.thread_time()
            encoded = names[name].encode(block)
            between = time.thread_time()
            names[name].decode(encoded, landed)
            decode_s += time.thread_time() - between
            encode_s += between - began
            sizes[name].append(len(encoded))
            assert (landed == block).all(), f"{name} is not lossless"
        if number >= 0:
            spent[name].append((encode_s, decode_s))
    for name, times in spent.items():
        encode_s, decode_s = (median(column) for column in zip(*times, strict=True))
        least, most = (edge(sizes[name]) / blocks.shape[1] for edge in (min, max))
        yield {
            "name": name, "ratio": total / sum(sizes[name]), "least": least, "most": most,
            "encode": total / encode_s / 1e9, "decode": total / decode_s / 1e9,
        }  # fmt: skip


DISK_COLUMNS = {
    "disk": "{disk}", "--kv-codec": "{codec}", "on the disk": "{share:.0%}", "written in": "{write_ms:.1f} ms",
    "read in": "{read_ms:.1f} ms", "least": "{least_ms:.1f} ms", "of none": "{ratio:.2f}",
}  # fmt: skip


class StoreDisk:
    """One disk of a store with blocks, as its process has it."""

    def __init__(self, folder: Path, codec: KvCodecMode, blocks: Bytes, gb_s: float) -> None:
        self._count, self._nbytes = blocks.shape
        places = np.arange(self._count, dtype=np.int64) * self._nbytes
        self._seals = _core.seal_ranges(blocks.ctypes.data, places, self._nbytes).tolist()
        self._blocks, config = blocks, DisksConfig(admission="all", kv_codec=codec)
        arena_bytes = -(-blocks.nbytes // MIB) * MIB
        self._files = Files([(folder, 4 * blocks.nbytes // MIB * MIB)], config, arena_bytes=arena_bytes, faulty=True)
        self._files.queues[0].byte_ns = 1 / gb_s if gb_s else 0.0
        self._lives = 0

    def write(self) -> float:
        """Seconds until all blocks are written under new keys; those of before are forgotten."""
        for key in self._keys():
            self._files.disks.remove_value(key)
        self._lives += 1
        self._files.bytes[: self._blocks.nbytes] = self._blocks.reshape(-1)
        self._files.settle()
        began = time.perf_counter()
        for number, (key, seal) in enumerate(zip(self._keys(), self._seals, strict=True)):
            while not self._files.disks.write_value(key, number * self._nbytes, self._nbytes, 0, seal=seal):
                self._files.step()
        self._files.settle()
        return time.perf_counter() - began

    def read(self) -> float:
        """Seconds until all blocks are in memory, and compared."""
        self._files.bytes[:] = 0
        began = time.perf_counter()
        ids = [
            self._files.disks.read_value(key, number * self._nbytes, 0, 1 << 62)
            for number, key in enumerate(self._keys())
        ]
        self._files.settle()
        spent = time.perf_counter() - began
        assert None not in ids and (self._files.bytes[: self._blocks.nbytes] == self._blocks.reshape(-1)).all()
        return spent

    def share(self) -> float:
        """Of the blocks' bytes, what is on the disk."""
        records = [self._files.host.logs[0].look(key) for key in self._keys()]
        return mean((record.encoded_bytes or record.length) / record.length for record in records if record is not None)

    def close(self) -> None:
        self._files.close()

    def _keys(self) -> list[bytes]:
        return [number.to_bytes(8, "big") + self._lives.to_bytes(8, "big") for number in range(self._count)]


def measure_disk(folder: Path, blocks: Bytes, rounds: int, gb_s: float) -> list[dict[str, Any]]:
    """Rows by ``--kv-codec``."""
    modes: tuple[KvCodecMode, ...] = ("none", "auto", "always")
    disks = {codec: StoreDisk(folder / f"kv-codec-{codec}", codec, blocks, gb_s) for codec in modes}
    name = f"{gb_s:g} GB/s" if gb_s else "as it is"
    writes, reads = Samples(), Samples()
    try:
        for number, codec in turns(rounds, disks, warm=2):
            spent = disks[codec].write(), disks[codec].read()
            if number >= 0:
                writes[codec].append(spent[0])
                reads[codec].append(spent[1])
        return [
            {
                "disk": name, "codec": codec, "share": disk.share(), "write_ms": 1e3 * writes.median(codec),
                "read_ms": 1e3 * reads.median(codec), "least_ms": 1e3 * min(reads[codec]),
                "ratio": reads.ratio(codec, "none"),
            }
            for codec, disk in disks.items()
        ]  # fmt: skip
    finally:
        for codec, disk in disks.items():
            disk.close()
            shutil.rmtree(folder / f"kv-codec-{codec}")


@contextmanager
def isa(name: str) -> Iterator[None]:
    """The codec's code for one instruction set."""
    _core.force_kv_codec_isa(name)
    yield
    _core.force_kv_codec_isa(None)


def measured_isas(blocks: Bytes, rounds: int) -> Iterator[dict[str, Any]]:
    for name in _core.kv_codec_isas():
        with isa(name):
            codec = {"codec": contenders(blocks.shape[1])["codec"]}
            yield from (row | {"name": f"codec, {name}"} for row in measure(blocks, rounds, codec))


def main() -> None:
    args: Namespace = options(
        __doc__, tokens=(1024, "of each prompt"), rounds=7, dtypes=Commas("bfloat16", "float16", "float32"),
        shapes=(Commas("llama3", "moe", "mqa", "windows"), "names of random-weight models"),
        isas=(False, "each instruction set"), save=(Path, "where to put the bundled model's blocks"),
        disk=(Path, "a folder on a disk: measure a store's there"), disk_gb_s=Commas(0.0, 2.0, 1.0, 0.5),
    )  # fmt: skip
    table, rows, first = Table(COLUMNS), [], np.empty((0, 0), np.uint8)
    for dtype in args.dtypes:
        blocks = bundled(dtype, args.tokens)
        first = blocks if dtype == args.dtypes[0] else first
        if args.save is not None and first is blocks:
            np.save(args.save, blocks)
        new_rows = list(measure(blocks, args.rounds, contenders(blocks.shape[1])))
        new_rows += measured_isas(blocks, args.rounds) if args.isas else []
        for row in new_rows:
            rows.append(row | {"kv": "SmolLM2-135M", "dtype": dtype})
            table.show(rows[-1])
    for name in args.shapes:
        blocks = shaped(name, args.dtypes[0], args.tokens)
        for row in measure(blocks, args.rounds, {"codec": contenders(blocks.shape[1])["codec"]}):
            rows.append(row | {"kv": f"{geometries.SHAPES[name].model}'s shape", "dtype": args.dtypes[0]})
            table.show(rows[-1])
    if args.disk is not None:
        new_rows = [row for gb_s in args.disk_gb_s for row in measure_disk(args.disk, first, 3 * args.rounds, gb_s)]
        print(f"\n{len(first)} blocks of {first.shape[1] >> 10:,} KiB, {3 * args.rounds} rounds:")
        show(new_rows, DISK_COLUMNS)
        rows += new_rows
    save(args, rows)


if __name__ == "__main__":
    main()
