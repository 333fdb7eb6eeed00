"""Microbenchmarks of routing: the router's work for every request before it sends it on. Single thread.

``directory``: all prompt trees of a cluster matched in one call, for prompts of 8,192 tokens (256 blocks of 32). 1,000
instances hold about a million distinct blocks: a system prompt of 64 blocks that all of them have, 200 documents of 64
blocks behind it that are held by 8 to 500 (the popular ones by many), 7,000 conversations of 128 blocks behind those,
each on one to three instances, every fourth in DRAM. One prompt lies on all instances in full, partly in DRAM: the
most holders that a match can have. A Python dict of sets with the same contents runs beside it, and its
answers are compared. ``match_tokens`` computes the blocks' identities too; ``match`` gets them.

``decision``: the whole decision, in a ``Cluster`` of as many instances with the same contents, a third of them prefill,
a third decode, a third colocated, all of them busy. ``choose`` is the part with a limit of 200 us (issue 3):
identities, match of all trees, policy. ``arrive`` is all of the machine's work for a request up to its dispatch.

    python bench/routing_micro.py [directory] [decision] [--conversations 7000] [--holders 1000] [--reps 2000]
"""

from __future__ import annotations

import gc
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from harness.flags import options, parts_of, save
from harness.rounds import Timer
from harness.tables import Table
from numpy.typing import NDArray

from memserve import _core
from memserve.base.config import ClusterConfig
from memserve.base.plugins import ROUTING_POLICIES
from memserve.base.types import KVGeometry, Request, Role, StopParams, Tier
from memserve.kv.identity import DEFAULT_KEY, namespace_id
from memserve.protocol.messages import Heartbeat, Join
from memserve.protocol.peers import Load, Peer, PeerInfo
from memserve.router.events import MessageArrived, RequestArrived, RequestCancelled
from memserve.router.machine import Cluster
from memserve.router.requests.requests import RequestState

Tokens = NDArray[np.int32]
Record = dict[str, Any]
BLOCK_TOKENS, VOCABULARY = 32, 49_152
SYSTEM, DOCUMENT, CONVERSATION = 64, 64, 128  # blocks
DOCUMENTS = 200
NAME = namespace_id("", "bench")


class World(NamedTuple):
    """The directory, and a Python twin with the holders of each identity."""

    directory: _core.PrefixDirectory
    twin: dict[bytes, set[int]]
    holders: int
    conversations: int


def run_of(blocks: int, *seed: int) -> Tokens:
    """Tokens of ``blocks`` blocks, the same for the same seed."""
    return np.random.default_rng(seed).integers(1, VOCABULARY, blocks * BLOCK_TOKENS, dtype=np.int32)


def prompt(document: int, conversation: int) -> Tokens:
    """System prompt, document and conversation: 256 blocks."""
    parts = (run_of(SYSTEM, 0), run_of(DOCUMENT, 1, document), run_of(CONVERSATION, 2, conversation))
    return np.concatenate(parts)


def identities(tokens: Tokens) -> bytes:
    """Identities of the whole blocks, 16 bytes each."""
    return _core.block_identities(DEFAULT_KEY, NAME, tokens, BLOCK_TOKENS)


def store(world: World, path: bytes, holders: NDArray[np.int64], dram_from: int) -> None:
    """Give each holder ``path``, with blocks from ``dram_from`` on in DRAM."""
    for holder in holders.tolist():
        world.directory.store(holder, Tier.HBM, path[: 16 * dram_from])
        world.directory.store(holder, Tier.DRAM, path[16 * dram_from :])
    for place in range(0, len(path), 16):
        world.twin.setdefault(path[place : place + 16], set()).update(holders.tolist())


def build(holders: int, conversations: int, directory: _core.PrefixDirectory | None = None) -> World:
    world = World(directory or _core.PrefixDirectory(), {}, holders, conversations)
    rng, everybody = np.random.default_rng(5), np.arange(holders)
    store(world, identities(run_of(SYSTEM, 0)), everybody, SYSTEM)
    having: list[NDArray[np.int64]] = []
    for document in range(DOCUMENTS):
        count = max(min(8, holders), holders // 2 // (1 + document))  # Zipf
        having.append(rng.permutation(holders)[:count])
        path = identities(prompt(document, 0)[: (SYSTEM + DOCUMENT) * BLOCK_TOKENS])[16 * SYSTEM :]
        store(world, path, having[-1], DOCUMENT - document % 3)
    for conversation in range(1, conversations + 1):
        owners = rng.permutation(having[conversation % DOCUMENTS])[: 1 + conversation % 3]
        path = identities(prompt(conversation % DOCUMENTS, conversation))[16 * (SYSTEM + DOCUMENT) :]
        store(world, path, owners, CONVERSATION if conversation % 4 else 0)
    store(world, identities(run_of(256, 9)), everybody, 200)
    return world


def twin_match(twin: dict[bytes, set[int]], path: bytes) -> dict[int, int]:
    """Blocks from the first one without a gap, by holder."""
    results: dict[int, int] = {}
    alive = set(twin.get(path[:16], ()))
    depth = 0
    while alive:
        depth += 1
        holders = twin.get(path[16 * depth : 16 * depth + 16], set())
        results.update(dict.fromkeys(alive - holders, depth))
        alive &= holders
    return results


def prompts(world: World, kind: str, reps: int) -> Iterator[Tokens]:
    """Different prompts of one kind, in random order."""
    for i in np.random.default_rng(6).permutation(max(reps, world.conversations))[:reps].tolist():
        conversation = 1 + i % world.conversations
        if kind == "known conversation":
            yield prompt(conversation % DOCUMENTS, conversation)
        elif kind == "new conversation":
            yield prompt(conversation % DOCUMENTS, 10_000_000 + i)
        elif kind == "held by all in full":
            yield run_of(256, 9)
        else:
            yield run_of(256, 10, i)


def bench_match(world: World, kind: str, reps: int) -> Iterator[Record]:
    """Time one kind of prompts by every call."""
    directory = world.directory
    calls = {name: Timer() for name in ("match_tokens", "match_tokens_array", "match", "match_array", "dict of sets")}
    results = 0
    for tokens in prompts(world, kind, reps):
        path = identities(tokens)
        rows = calls["match_tokens"](directory.match_tokens, DEFAULT_KEY, NAME, tokens, BLOCK_TOKENS)
        array = calls["match_tokens_array"](
            directory.match_tokens_array, DEFAULT_KEY, NAME, tokens, BLOCK_TOKENS
        )  # warmed up by the call before, as are the others
        calls["match"](directory.match, path)
        calls["match_array"](directory.match_array, path)
        simple = calls["dict of sets"](twin_match, world.twin, path)
        assert simple == {holder: blocks for holder, blocks, _ in rows} and array.tolist() == [list(r) for r in rows]
        results = len(rows)
    for name, timer in calls.items():
        yield timer.record(name, prompt=kind, holders_found=results)


def bench_cold(world: World, kind: str, reps: int) -> Iterator[Record]:
    """One call per prompt and nothing in between: each finds its blocks cold."""
    all_tokens = list(prompts(world, kind, reps))
    for name in ("match_tokens", "match_tokens_array"):
        call, timer = getattr(world.directory, name), Timer()
        for tokens in all_tokens:
            timer(call, DEFAULT_KEY, NAME, tokens, BLOCK_TOKENS)
        yield timer.record(f"{name}, one a prompt", prompt=kind)


def bench_changes(world: World, reps: int) -> Iterator[Record]:
    """Time an instance's events and the router's own dispatches, 256 blocks each."""
    store_, move, evict, speculate, expire = (Timer() for _ in range(5))
    for i in range(reps):
        path, holder = identities(run_of(256, 11, i)), i % world.holders
        store_(world.directory.store, holder, Tier.HBM, path)
        move(world.directory.move, holder, Tier.DRAM, path)
        evict(world.directory.evict, holder, path)
        speculate(world.directory.speculate, holder, path, i)
        expire(world.directory.expire, i)
    for name, timer in (("store", store_), ("move", move), ("evict", evict), ("speculate", speculate)):
        yield timer.record(f"{name} 256 blocks")
    yield expire.record("expire 256 blocks")
    identity = Timer()
    for i in range(reps):
        identity(identities, run_of(256, 11, i))
    yield identity.record("limit: identities of 256 blocks alone")


def bench_clear(world: World) -> Iterator[Record]:
    """Time ``clear``: one instance after the other dies, and its blocks leave the directory."""
    timer, blocks = Timer(), []
    for holder in range(world.holders):
        blocks.append(world.directory.blocks(holder))
        timer(world.directory.clear, holder)
    assert world.directory.entries == 0
    us_per_block = sum(timer.us) / sum(blocks)
    yield timer.record(
        "clear(holder)", blocks_median=float(np.median(blocks)), blocks_max=max(blocks), us_a_block=us_per_block
    )


def bench_directory(options: Namespace) -> Iterator[Record]:
    """All measurements of the directory."""
    begin = time.perf_counter()
    world = build(options.holders, options.conversations)
    gc.freeze()  # else the collector scans the twin's million sets during timed calls
    directory = world.directory
    pairs = sum(directory.blocks(holder) for holder in directory.holders())
    yield {
        "op": "contents",
        "holders": options.holders,
        "blocks": directory.entries,
        "pairs": pairs,
        "bytes_a_pair": round(directory.nbytes / pairs, 1),
        "bytes_a_block": round(directory.nbytes / directory.entries, 1),
        "built_s": round(time.perf_counter() - begin, 1),
    }
    kinds = ("known conversation", "new conversation", "held by all in full", "unknown prompt")
    for kind in kinds:
        yield from bench_cold(world, kind, options.reps)
    for kind in kinds:
        yield from bench_match(world, kind, min(options.reps, 300))
    yield from bench_changes(world, min(options.reps, 1000))
    yield from bench_clear(world)


def busy_cluster(options: Namespace, policy: str) -> tuple[Cluster, World]:
    """A router whose instances hold the contents described above, each with its own work."""
    cluster = Cluster(ClusterConfig(policy=policy))
    geometry = KVGeometry(30, 3, 64, 64, "bfloat16", BLOCK_TOKENS)
    roles = (Role.PREFILL, Role.DECODE, Role.COLOCATED)
    rng = np.random.default_rng(7)
    for number in range(options.holders):
        peer = Peer(f"i{number}", 1)
        info = PeerInfo(
            peer, roles[number % 3], "tcp://x", "bench", geometry, 4096, 4096, 1 << 17, True, f"host{number // 8}"
        )
        cluster.handle(MessageArrived(peer, Join(info)), 0)
        prefill, sequences, context = rng.integers(0, (100_000, 64, 500_000)).tolist()
        cluster.handle(MessageArrived(peer, Heartbeat(Load(0, sequences, prefill, context, 2048))), 0)
    return cluster, build(options.holders, options.conversations, cluster._trees.directory)


def bench_decision(options: Namespace) -> Iterator[Record]:
    """Time a request's way through the router's machine."""
    for policy in ROUTING_POLICIES.built_in:
        cluster, world = busy_cluster(options, policy)
        gc.freeze()
        yield from bench_policy(cluster, world, policy, options.reps)


def bench_policy(cluster: Cluster, world: World, policy: str, reps: int) -> Iterator[Record]:
    """Time each kind of prompts under one policy."""
    now = 0
    for kind in ("known conversation", "new conversation", "held by all in full", "unknown prompt"):
        choose, arrive = Timer(), Timer()
        for i, tokens in enumerate(prompts(world, kind, reps)):
            request = Request(f"{kind} {i}", tokens, stop=StopParams(max_tokens=256), session=f"s{i % 100}")
            if i % 2:
                choose(cluster._lifecycle._placer.choose_placement, RequestState(request, now))
                continue
            now += 1000
            arrive(cluster.handle, RequestArrived(request), now)
            cluster.handle(RequestCancelled(request.request_id), now)
            cluster._trees.directory.expire(1 << 62)
        yield choose.record(f"choose: {policy}", prompt=kind)
        yield arrive.record(f"arrive: {policy}", prompt=kind)


SECTIONS: dict[str, Callable[[Namespace], Iterator[Record]]] = {
    "directory": bench_directory,
    "decision": bench_decision,
}


COLUMNS = {
    "what": "{op}", "prompt": "{prompt}", "median, us": "{median_us:.2f}", "p99": "{p99_us:.2f}", "max": "{max_us:.2f}",
    "CPU p99": "{cpu_p99_us:.2f}", "more": "{more}",
}  # fmt: skip


def row_of(record: Record) -> Record:
    """Beside what the table shows: the other fields."""
    shown = ("op", "prompt", "median_us", "p99_us", "max_us", "cpu_p99_us", "n", "section")
    more = ", ".join(f"{name} {value:.4g}" for name, value in record.items() if name not in shown)
    return {"prompt": "", **record, "more": more}


def main() -> None:
    args = options(__doc__, rest="section", conversations=7000, holders=1000, reps=2000)
    table, records = Table(COLUMNS), list[Record]()
    for section, bench in parts_of(args.section or list(SECTIONS), SECTIONS).items():
        for record in bench(args):
            records.append({"section": section, **record})
            table.show(row_of(record))
    save(args, records)
    gc.unfreeze()  # the clusters may be collected


if __name__ == "__main__":
    main()
