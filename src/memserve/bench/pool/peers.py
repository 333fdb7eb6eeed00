"""Figure 9, between two processes: ``alloc_mem`` at a peer, ``transfer`` and ``transfer_with_insert``.

A call lasts as long as its caller waits: message, seal, pull, comparison of the checksums, answer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from memserve.bench.pool.calls import RATIOS, Key, Times
from memserve.bench.pool.pair import Pair, serve
from memserve.bench.pool.prompts import Prompts
from memserve.bench.pool.results import CallPoint
from memserve.errors import check
from memserve.mempool.mempool import Addresses
from memserve.runtime.pool_peer import PoolPeer, TransferFlag
from memserve.types import KVGeometry

SECRET = "a secret of this bench alone"
TRANSFER, BY_PAGE, WITH_INSERT = "transfer", "transfer, by page", "transfer_with_insert"
ALLOCATE = "alloc_mem at a peer"
Question = tuple[int, float | None]
"""Blocks; cached ratio at the receiver, or ``None``: raw transfers."""


def open_peers(geometry: KVGeometry, link: str, blocks_max: int, environment: dict[str, str]) -> Pair:
    """A sender and a receiver over ``link``. Raises :class:`UserError` when it does not work here."""
    return Pair(link, _receive, _send, environment, geometry, link, blocks_max)


def measure_peers(pairs: dict[str, Pair], counts: Sequence[int], ratio_blocks: int, rounds: int) -> list[CallPoint]:
    """All calls over every pair, taking turns; ``pairs`` by the name of their link."""
    questions: list[Question] = [(count, None) for count in counts]
    questions += [(count, 0.0) for count in counts if count != ratio_blocks]
    questions += [(ratio_blocks, ratio) for ratio in RATIOS]
    times = {name: Times() for name in pairs}
    for turn in range(rounds + 1):
        for question in questions:
            for name, pair in pairs.items():
                for key, spent_ns in pair.ask(question):
                    times[name].add(key, spent_ns)
        if turn == 0:
            for one in times.values():
                one.forget()
    return [point for name, one in times.items() for point in one.points(name)]


def _peer(name: str, geometry: KVGeometry, link: str, blocks: int) -> PoolPeer:
    return PoolPeer(geometry, name=name, secret=SECRET, hbm_bytes=blocks * geometry.block_bytes, link=link)


def _receive(sender: Connection, geometry: KVGeometry, link: str, blocks_max: int) -> None:
    """The receiver's process: plants and forgets prompts when the sender says so."""
    with _peer("receiver", geometry, link, 2 * blocks_max) as peer:
        sender.send(peer.info())
        while True:
            what, tokens = sender.recv()
            if what == "plant":
                held = peer.alloc_mem(len(tokens) // geometry.block_tokens)
                assert held is not None, "the pool was made for it"
                peer.insert(tokens, held)
                peer.free_mem(held)
            else:
                peer.delete(tokens)
            sender.send("done")


def _send(told: Connection, receiver: Connection, geometry: KVGeometry, link: str, blocks_max: int) -> None:
    """The sender's process: makes the calls."""
    with _peer("sender", geometry, link, blocks_max) as peer:
        caller = _Caller(peer, receiver, geometry)
        peer.connect(receiver.recv())
        serve(told, caller.answer)


class _Caller:
    def __init__(self, peer: PoolPeer, receiver: Connection, geometry: KVGeometry) -> None:
        self._peer, self._receiver, self._block_tokens = peer, receiver, geometry.block_tokens
        self._prompts = Prompts(11)

    def answer(self, question: Question) -> list[tuple[Key, int]]:
        """The calls that ``question`` means, timed."""
        count, ratio = question
        held = self._peer.alloc_mem(count)
        assert held is not None, "the pool was made for it"
        try:
            return self._raw(held) if ratio is None else self._with_insert(held, ratio)
        finally:
            self._peer.free_mem(held)

    def _raw(self, held: Addresses) -> list[tuple[Key, int]]:
        count = len(held)
        found: list[tuple[Key, int]] = []
        for name, flags in ((TRANSFER, TransferFlag.NONE), (BY_PAGE, TransferFlag.BY_PAGE)):
            begin_ns = time.perf_counter_ns()
            there = self._peer.alloc_mem(count, id="receiver")
            found.append(((ALLOCATE, count, None), time.perf_counter_ns() - begin_ns))
            check(there is not None, "the receiver has room for twice as many")
            begin_ns = time.perf_counter_ns()
            done = self._peer.transfer("receiver", held, there, flags)
            found.append(((name, count, None), time.perf_counter_ns() - begin_ns))
            check(done, f"the receiver did not take it: {done.reason}")
            self._peer.free_mem(there or ())
        return found

    def _with_insert(self, held: Addresses, ratio: float) -> list[tuple[Key, int]]:
        tokens = self._prompts.fresh(len(held) * self._block_tokens)
        shared = round(len(held) * ratio)
        if shared:
            self._tell("plant", tokens[: shared * self._block_tokens])
        begin_ns = time.perf_counter_ns()
        done = self._peer.transfer_with_insert("receiver", tokens, held)
        spent_ns = time.perf_counter_ns() - begin_ns
        check(done, f"the receiver did not take it: {done.reason}")
        self._tell("forget", tokens)
        return [((WITH_INSERT, len(held), ratio), spent_ns)]

    def _tell(self, what: str, tokens: Any) -> None:
        self._receiver.send((what, tokens))
        self._receiver.recv()
