"""Figure 9: the calls of MemServe's Table 1 by number of blocks and by cached ratio, within a process and between two.

Calls that only do accounting are timed on a pool of many small blocks, because they touch no block's bytes; calls that
copy (``swap_out``, ``swap_in``) on blocks of the model's own size. Between processes (``alloc_mem`` at a peer,
``transfer``, ``transfer_with_insert``) a call lasts as long as its caller waits: message, seal, pull, comparison of the
checksums, answer. All points take turns within a round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from memserve.base.errors import InvariantError, check
from memserve.base.types import KVGeometry, Tier, TokenArray
from memserve.base.units import NS_PER_S
from memserve.host.pool_peer import PoolPeer, TransferFlag
from memserve.kv.mempool import Addresses, MemPool
from memserve.kv.pool import BlockPool
from memserve_lab.experiments.pool_moves import Pair, serve
from memserve_lab.workloads.statistics import Spread, spread_of

VOCABULARY = 49_152
TREE_PROMPT_TOKENS = 4096
RATIOS = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
Key = tuple[str, int, float | None]
"""Call, blocks, cached ratio."""
SECRET = "a secret of this bench alone"
TRANSFER, BY_PAGE, WITH_INSERT = "transfer", "transfer, by page", "transfer_with_insert"
ALLOCATE = "alloc_mem at a peer"
ANSWER_S = 60.0
"""For a peer to give blocks: a busy machine delays one of its processes by seconds, and a call that waits is timed."""
Question = tuple[int, float | None]
"""Blocks; cached ratio at the receiver. None: raw transfers."""


class Prompts:
    """Random prompts, equal for equal seeds; no two share a prefix except those of :meth:`sharing_prompt`."""

    def __init__(self, seed: int = 5) -> None:
        self._rng = np.random.default_rng(seed)

    def fresh_prompt(self, tokens: int) -> TokenArray:
        """``tokens`` ids, int32, never given before."""
        return self._rng.integers(1, VOCABULARY, tokens, dtype=np.int32)

    def sharing_prompt(self, tokens: TokenArray, shared: int) -> TokenArray:
        """A prompt as long as ``tokens`` that shares exactly its first ``shared`` tokens."""
        other_tokens = self.fresh_prompt(len(tokens))
        other_tokens[:shared] = tokens[:shared]
        if shared < len(tokens):
            other_tokens[shared] = tokens[shared] % (VOCABULARY - 1) + 1
        return other_tokens


def plant_tree(pool: BlockPool, prompts: Prompts, count: int, tokens: int = TREE_PROMPT_TOKENS) -> list[TokenArray]:
    """Put ``count`` other prompts into the index, as in a cache that is in use; returns them."""
    planted = [prompts.fresh_prompt(tokens) for _ in range(count)]
    for prompt in planted:
        blocks = pool.allocate_ids(tokens // pool.block_tokens)
        assert blocks is not None, "the pool was made for them"
        pool.insert("", prompt, blocks, len(blocks))
        pool.release(blocks)
    return planted


@dataclass(frozen=True, slots=True)
class CallPoint:
    """Times of one call of MemServe's Table 1 with ``blocks`` blocks (figure 9)."""

    call: str
    blocks: int
    cached_ratio: float | None
    """Share of the blocks that the index has already. None: the call uses no index."""
    spent_ns: Spread
    link: str = ""
    """The link between two processes. Empty: a call within one process."""


class Times:
    """Times of calls, by call and arguments."""

    def __init__(self) -> None:
        self._ns: dict[Key, list[int]] = {}

    def __call__(self, key: Key, call: Callable[..., Any], *arguments: Any) -> Any:
        """Run ``call`` and return its result; record its duration under ``key``."""
        begin_ns = time.perf_counter_ns()
        result = call(*arguments)
        self.add_time(key, time.perf_counter_ns() - begin_ns)
        return result

    def add_time(self, key: Key, spent_ns: int) -> None:
        """Record a time that was measured elsewhere."""
        self._ns.setdefault(key, []).append(spent_ns)

    def forget_times(self) -> None:
        """Drop all times: they were a warm-up."""
        self._ns.clear()

    def points_in_order(self, link: str = "") -> list[CallPoint]:
        """All points, in the order of their first times."""
        return [CallPoint(call, blocks, ratio, spread_of(ns), link) for (call, blocks, ratio), ns in self._ns.items()]


def measure_accounts(
    block_tokens: int, counts: Sequence[int], ratio_blocks: int, tree_prompts: int, rounds: int
) -> list[CallPoint]:
    """Time ``alloc_mem``, ``free_mem``, ``insert``, ``match`` and ``delete``; over cached ratios at
    ``ratio_blocks``."""
    per_prompt = TREE_PROMPT_TOKENS // block_tokens
    blocks = tree_prompts * per_prompt + 4 * max(*counts, ratio_blocks, per_prompt)
    geometry = KVGeometry(1, 1, 1, 1, "bfloat16", block_tokens)
    pool, prompts, times = MemPool(geometry, hbm_bytes=blocks * geometry.block_bytes), Prompts(), Times()
    plant_tree(pool.pool, prompts, tree_prompts)
    for turn in range(rounds + 1):
        for count in counts:
            _account_by_blocks(pool, prompts, times, count)
        for ratio in RATIOS:
            _account_by_ratio(pool, prompts, times, ratio_blocks, ratio)
        if turn == 0:
            times.forget_times()
    pool.check_invariants()
    return times.points_in_order()


def _account_by_blocks(pool: MemPool, prompts: Prompts, times: Times, count: int) -> None:
    tokens = prompts.fresh_prompt(count * pool.geometry.block_tokens)
    times(("free_mem", count, None), pool.free_mem, times(("alloc_mem", count, None), pool.alloc_mem, count))
    addresses = _allocated(pool, count)
    times(("insert", count, 0.0), pool.insert, tokens, addresses)
    pool.free_mem(addresses)
    match = times(("match", count, 1.0), pool.match, tokens)
    check(len(match) == count, "all of it was inserted")
    pool.free_mem(match)
    removed = times(("delete", count, 0.0), pool.delete, tokens)
    check(removed == count, "all of it goes")


def _account_by_ratio(pool: MemPool, prompts: Prompts, times: Times, count: int, ratio: float) -> None:
    """The index has ``ratio`` of a prompt; the prompt is looked up, inserted whole, and deleted again."""
    block_tokens = pool.geometry.block_tokens
    shared = round(count * ratio)
    first = prompts.fresh_prompt(count * block_tokens)
    _insert(pool, first[: shared * block_tokens])
    tokens = prompts.sharing_prompt(first, shared * block_tokens)
    match = times(("match", count, ratio), pool.match, tokens)
    check(len(match) == shared, "what was planted is found, and no more")
    pool.free_mem(match)
    addresses = _allocated(pool, count)
    added = times(("insert", count, ratio), pool.insert, tokens, addresses)
    check(added == count - shared, "what was there is kept")
    pool.free_mem(addresses)
    if shared < count:  # deleting a prompt that extends to another one deletes that as well
        _insert(pool, first)
        removed = times(("delete", count, ratio), pool.delete, tokens)
        check(removed == count - shared, "what the other prompt needs stays")
    pool.delete(first)


def _allocated(pool: MemPool, count: int) -> Addresses:
    addresses = pool.alloc_mem(count)
    assert addresses is not None, "the pool was made for it"
    return addresses


def _insert(pool: MemPool, tokens: TokenArray) -> None:
    addresses = _allocated(pool, len(tokens) // pool.geometry.block_tokens)
    pool.insert(tokens, addresses)
    pool.free_mem(addresses)


def measure_swaps(geometry: KVGeometry, counts: Sequence[int], rounds: int) -> list[CallPoint]:
    """Time ``swap_out`` and ``swap_in`` of blocks that the caller holds, including the copy."""
    size_bytes = max(counts) * geometry.block_bytes
    pool, times = MemPool(geometry, hbm_bytes=size_bytes, dram_bytes=size_bytes), Times()
    for turn in range(rounds + 1):
        for count in reversed(counts):  # the first round touches all of the memory
            addresses = _allocated(pool, count)
            below = times(("swap_out", count, None), pool.swap_out_blocks, addresses)
            above = times(("swap_in", count, None), pool.swap_in, below)
            check(above is not None and above.tier is Tier.HBM, "there is room for all blocks")
            pool.free_mem(above)
        if turn == 0:
            times.forget_times()
    pool.check_invariants()
    return sorted(times.points_in_order(), key=lambda point: (point.call, point.blocks))


# -- between two processes


def open_peers(geometry: KVGeometry, link: str, blocks_max: int, environment: dict[str, str]) -> Pair:
    """A sender and a receiver over ``link``. Raises :class:`UserError` if the link does not work here."""
    return Pair(link, _receive, _send, environment, geometry, link, blocks_max)


def measure_peers(pairs: dict[str, Pair], counts: Sequence[int], ratio_blocks: int, rounds: int) -> list[CallPoint]:
    """Time all calls over every pair, taking turns; ``pairs``: by name of the link."""
    questions: list[Question] = [(count, None) for count in counts]
    questions += [(count, 0.0) for count in counts if count != ratio_blocks]
    questions += [(ratio_blocks, ratio) for ratio in RATIOS]
    times = {name: Times() for name in pairs}
    for turn in range(rounds + 1):
        for question in questions:
            for name, pair in pairs.items():
                for key, spent_ns in pair.ask_taker(question):
                    times[name].add_time(key, spent_ns)
        if turn == 0:
            for samples in times.values():
                samples.forget_times()
    return [point for name, samples in times.items() for point in samples.points_in_order(name)]


def _peer(name: str, geometry: KVGeometry, link: str, blocks: int) -> PoolPeer:
    return PoolPeer(geometry, name=name, secret=SECRET, hbm_bytes=blocks * geometry.block_bytes, link=link)


def _receive(sender: Connection, geometry: KVGeometry, link: str, blocks_max: int) -> None:
    """The receiver's process: plants and forgets prompts on the sender's request."""
    with _peer("receiver", geometry, link, 2 * blocks_max) as peer:
        sender.send(peer.info())
        while True:
            command, tokens = sender.recv()
            if command == "plant":
                addresses = peer.alloc_mem(len(tokens) // geometry.block_tokens)
                assert addresses is not None, "the pool was made for it"
                peer.insert(tokens, addresses)
                peer.free_mem(addresses)
            else:
                peer.delete(tokens)
            sender.send("done")


def _send(commands: Connection, receiver: Connection, geometry: KVGeometry, link: str, blocks_max: int) -> None:
    """The sender's process: makes the calls."""
    with _peer("sender", geometry, link, blocks_max) as peer:
        caller = _Caller(peer, receiver, geometry)
        peer.connect(receiver.recv())
        serve(commands, caller.answer_question)


class _Caller:
    def __init__(self, peer: PoolPeer, receiver: Connection, geometry: KVGeometry) -> None:
        self._peer, self._receiver, self._block_tokens = peer, receiver, geometry.block_tokens
        self._prompts = Prompts(11)

    def answer_question(self, question: Question) -> list[tuple[Key, int]]:
        """Make the calls that ``question`` describes, timed."""
        count, ratio = question
        addresses = self._peer.alloc_mem(count)
        assert addresses is not None, "the pool was made for it"
        try:
            return self._time_moves(addresses) if ratio is None else self._with_insert(addresses, ratio)
        finally:
            self._peer.free_mem(addresses)

    def _time_moves(self, addresses: Addresses) -> list[tuple[Key, int]]:
        count = len(addresses)
        samples: list[tuple[Key, int]] = []
        for name, flags in ((TRANSFER, TransferFlag.NONE), (BY_PAGE, TransferFlag.BY_PAGE)):
            remote_addresses, spent_ns = self._allocate_remotely(count)
            samples.append(((ALLOCATE, count, None), spent_ns))
            begin_ns = time.perf_counter_ns()
            outcome = self._peer.transfer("receiver", addresses, remote_addresses, flags)
            samples.append(((name, count, None), time.perf_counter_ns() - begin_ns))
            check(outcome, f"the receiver did not take it: {outcome.reason}")
            self._peer.free_mem(remote_addresses)
        return samples

    def _allocate_remotely(self, count: int) -> tuple[Addresses, int]:
        """Blocks of the receiver, and what the call took. On a busy machine it may take this process to be silent, and
        refuse at once: then it is asked again."""
        deadline_ns = time.monotonic_ns() + int(ANSWER_S * NS_PER_S)
        while time.monotonic_ns() < deadline_ns:
            begin_ns = time.perf_counter_ns()
            addresses = self._peer.alloc_mem(count, id="receiver", timeout_s=ANSWER_S)
            if addresses is not None:
                return addresses, time.perf_counter_ns() - begin_ns
        raise InvariantError(f"the receiver, which has room, gave no blocks in {ANSWER_S:.0f} s")

    def _with_insert(self, addresses: Addresses, ratio: float) -> list[tuple[Key, int]]:
        tokens = self._prompts.fresh_prompt(len(addresses) * self._block_tokens)
        shared = round(len(addresses) * ratio)
        if shared:
            self._tell_receiver("plant", tokens[: shared * self._block_tokens])
        begin_ns = time.perf_counter_ns()
        outcome = self._peer.transfer_with_insert("receiver", tokens, addresses)
        spent_ns = time.perf_counter_ns() - begin_ns
        check(outcome, f"the receiver did not take it: {outcome.reason}")
        self._tell_receiver("forget", tokens)
        return [((WITH_INSERT, len(addresses), ratio), spent_ns)]

    def _tell_receiver(self, command: str, tokens: Any) -> None:
        self._receiver.send((command, tokens))
        self._receiver.recv()
