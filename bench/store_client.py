"""memserve.StoreClient beside memcpy, LMDB, Redis and Mooncake's store, on one host (acceptance of its client).

    python bench/store_client.py [--rounds 7] [--keys 1000000] [--only put,get] [--without NAME] [--quick] [--json FILE]

One client, synchronous, beside a `memserve store` that this script starts. Every contender does the same in each round,
one after the other, the first one another each time; a figure is the median over rounds of the time per operation, and
a ratio the median of the rounds' ratios. What each contender does stands in ``store_rivals.py``.

* *put*: 1 MiB from a buffer of the program's to 64 keys in turn. memserve copies into its own memory and lets the store
  pull; `in place` puts what was built there already. LMDB with sync=False, Redis over a Unix socket without
  persistence, Mooncake `put_from` registered memory, protocol tcp, under new keys each time. `one call`: put_many, one
  transaction, MSET. memcpy: from one buffer to 64 places.
* *get*: 1 MiB of 64 keys in turn. `in place` is the look-up and the release alone (LMDB: its own pages, within a
  transaction); `copied` ends in a buffer of the program's. memcpy: from 64 places to one buffer.
* *blocks*: 64 KV blocks of 737,280 bytes (SmolLM2-135M, or of ``--geometry``) into 64 buffers by one call, with one
  thread and with two; LMDB and memcpy one after the other.
* *match*: `match_last_index` over 1,000 keys, all there, anywhere among a million, others each time; LMDB: a look-up
  each until one fails; Redis: 1,000 EXISTS in one pipeline; Mooncake: `batch_is_exist`, among 20,000.

What is not installed is skipped and said: pip install lmdb redis mooncake-transfer-engine-non-cuda, and redis-server.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from harness.flags import Commas, options, save
from harness.rounds import Samples, median, ratio, seconds, turns
from harness.tables import show
from store_rivals import (
    CHAINS,
    KEYS,
    MATCHED,
    MIB,
    MOONCAKE_KEYS,
    RIVALS,
    VALUES,
    WAIT_S,
    Buffers,
    Contender,
    Operation,
    Skipped,
    chains,
    key_of,
)

import geometries
from served_store import ServedStore


class Memserve(Contender):
    name = "memserve"
    can: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "put": {"copied": "put", "in place": "put_staged", "copied, one call": "put_many"},
        "get": {"in place": "get_in_place", "copied": "get"},
        "blocks": {"1 thread": "blocks", "2 threads": "blocks_by_two"}, "match": {"": "match"},
    }  # fmt: skip

    def open(self) -> None:
        self._store = ServedStore(self.folder, dram="8GiB")
        self._client = self._store.client()
        self._staged = self._client.allocate(MIB)
        np.frombuffer(self._staged.data, np.uint8)[:] = self.buffers.one
        names = [key_of(number, "block") for number in range(VALUES)]
        self._targets = list(zip(names, self.buffers.targets, strict=True))
        assert all(self._client.put_many(list(zip(names, self.buffers.blocks, strict=True)), timeout_s=WAIT_S))

    def put(self, key: bytes) -> None:
        assert self._client.put(key, self.buffers.one)

    def put_staged(self, key: bytes) -> None:
        assert self._client.put(key, self._staged)

    def put_many(self) -> None:
        assert all(self._client.put_many([(key, self.buffers.one) for key in KEYS], timeout_s=WAIT_S))

    def get_in_place(self, key: bytes) -> None:
        self._client.get(key).release()

    def get(self, key: bytes) -> None:
        self._client.get_into([(key, self.buffers.out)])

    def blocks(self, threads: int = 1) -> None:
        self._client.get_into(self._targets, threads=threads)

    def blocks_by_two(self) -> None:
        self.blocks(2)

    def match(self, keys: list[bytes]) -> None:
        assert self._client.match_last_index(keys) == MATCHED - 1

    def fill(self, count: int) -> None:
        for first in range(0, count, 65_536):
            numbers = range(first, min(first + 65_536, count))
            pairs = ((key_of(number, "small"), b"8 bytes!") for number in numbers)
            assert all(self._client.put_many(pairs, timeout_s=WAIT_S))

    def close(self) -> None:
        self._staged.release()
        self._client.close()
        self._store.close()


CONTENDERS: tuple[type[Contender], ...] = (RIVALS[0], Memserve, *RIVALS[1:])
DIVISORS = {"put": VALUES, "get": VALUES, "blocks": 1, "match": CHAINS}


def opened(buffers: Buffers, folder: Path, without: Iterable[str]) -> list[Contender]:
    rows_here = []
    for kind in CONTENDERS:
        if kind.name.lower() in without:
            continue
        try:
            rows_here.append(kind(buffers, folder))
        except Skipped as reason:
            print(f"{kind.name}: skipped, {reason}", flush=True)
    return rows_here


def measure(contenders: list[Contender], kinds: list[str], rounds: int) -> Samples:
    """Microseconds an operation, by kind, contender and variant, one figure a round."""
    lines: dict[str, list[tuple[tuple[str, str, str], Operation]]] = {kind: [] for kind in kinds}
    for contender in contenders:
        for kind, variants in contender.operations().items():
            for variant, operation in variants.items() if kind in kinds else ():
                lines[kind].append(((kind, contender.name, variant), operation))
    times = Samples()
    for kind in kinds:
        for number, (key, operation) in turns(rounds, lines[kind], warm=1):
            spent_us = 1e6 * seconds(operation) / DIVISORS[kind]
            times[key] += [spent_us] if number >= 0 else []
    return times


def rows_of(times: Samples, block_bytes: int) -> list[dict[str, Any]]:
    """A row for each contender and variant, with its ratio to memcpy and to each rival that does the same."""
    rows, moved = [], {"put": MIB, "get": MIB, "blocks": VALUES * block_bytes}
    for kind, name, variant in list(times):
        spent, base = times[kind, name, variant], (kind, "memcpy", "")
        rivals = {
            f"{rival} {its_variant}".strip(): round(times.ratio((kind, name, variant), (kind, rival, its_variant)), 3)
            for its_kind, rival, its_variant in list(times)
            if name == Memserve.name and its_kind == kind and rival not in (name, "memcpy")
            # the same variant; of a rival that does not have it, the plain one
            if its_variant in ((variant,) if (kind, rival, variant) in times else ("copied", "1 thread"))
        }
        rows.append({
            "kind": kind, "contender": name, "variant": variant, "median_us": round(median(spent), 2),
            "least_us": round(min(spent), 2), "most_us": round(max(spent), 2), "times_rivals": rivals,
            "gb_per_s": round(moved[kind] / median(spent) / 1e3, 2) if kind in moved else None,
            "times_memcpy": round(ratio(spent, times[base]), 3) if base in times else None,
            "rivals": "; ".join(f"{rival} {times_it:.2f}" for rival, times_it in rivals.items()),
        })  # fmt: skip
    return rows


COLUMNS = {
    "what": "{kind}", "contender": "{contender}", "variant": "{variant}",
    "us, median (least to most)": "{median_us:,} ({least_us:,} to {most_us:,})", "GB/s": "{gb_per_s}",
    "time / memcpy": "{times_memcpy}", "time / rivals": "{rivals}",
}  # fmt: skip


def fill(contenders: list[Contender], keys: int) -> None:
    for item in contenders:
        began = time.monotonic()
        item.fill(keys)
        item.matched = chains(min(keys, MOONCAKE_KEYS) if item.name == "Mooncake" else keys)
        print(f"{item.name}: filled in {time.monotonic() - began:.1f} s", flush=True)


def main() -> None:
    args = options(
        __doc__, rounds=7, keys=1_000_000, only=Commas("put", "get", "blocks", "match"), geometry="smollm2",
        without=("", "contenders to leave out, by name"), quick={"rounds": 3, "keys": 50_000},
    )  # fmt: skip
    block_bytes = geometries.SHAPES[args.geometry].kv.block_bytes
    kinds, buffers = args.only, Buffers(block_bytes)
    kinds_wanted = ["put", *kinds] if "get" in kinds and "put" not in kinds else kinds
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        contenders = opened(buffers, Path(folder), args.without.lower().split(","))
        try:
            if "match" in kinds:
                fill(contenders, args.keys)
            times = measure(contenders, kinds_wanted, args.rounds)
        finally:
            for contender in contenders:
                contender.close()
    rows = rows_of(times, block_bytes)
    show(rows, COLUMNS)
    save(args, rows)


if __name__ == "__main__":
    main()
