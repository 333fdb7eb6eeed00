"""Times transfers between two processes: one owns pages and seals them, the other pulls (level 3, row M11).

Both are children of their own, started afresh: a link's library reads its environment once, and the one that measures
shall not carry what the other has mapped. A sample lasts from asking for the pages until their checksums were compared,
as a fetch does.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from memserve import _core
from memserve.errors import UserError
from memserve.kv_transfer.events import PagesPulled, PagesSealed, PullPages, SealPages
from memserve.messages import Peer, PeerInfo
from memserve.policy.fit import Sample
from memserve.runtime.links.data import PagePort, open_data_port
from memserve.runtime.profile import COPY_BLOCKS, Measured, Tell, timed_rounds
from memserve.types import KVGeometry, Role, Tier
from memserve.units import MIB

ARENA_BYTES_MAX = 128 * MIB
_START_S = 30.0
_PULL_S = 20.0
_OWNER, _TAKER = Peer("profile-owner", 1), Peer("profile-taker", 1)

NETWORK_ENVIRONMENT = {"UCX_TLS": "tcp,self"}
"""Another host cannot be asked: NIXL over this one's own TCP stands for the network."""


LINKS: dict[str, tuple[str, dict[str, str]]] = {"same_host": ("shm", {}), "network": ("nixl", NETWORK_ENVIRONMENT)}
"""Curve -> link and environment."""


def with_transfers(measured: Measured, geometry: KVGeometry, seconds: float, tell: Tell) -> Measured:
    """``measured`` and what moving pages between two processes costs, in about ``seconds``."""
    samples, missing = dict(measured.samples), dict(measured.missing)
    for curve, (link, environment) in LINKS.items():
        tell(f"transfer: between two processes over {link}")
        try:
            samples[curve] = measure_transfer(geometry, link, seconds / 2, environment)
        except UserError as error:
            missing[curve] = str(error)
    return replace(measured, samples=samples, missing=missing)


def measure_transfer(
    geometry: KVGeometry,
    link: str,
    seconds: float,
    environment: dict[str, str] | None = None,
    block_counts: Sequence[int] = COPY_BLOCKS,
) -> list[Sample]:
    """Samples of ``(bytes, pieces)`` over ``link`` (``shm`` or ``nixl``): in whole blocks, and page by page.

    Raises :class:`UserError` when the link does not work here.
    """
    blocks = min(max(block_counts), ARENA_BYTES_MAX // geometry.block_bytes)
    if blocks < 2:
        raise UserError("the model's blocks are too large to be moved for a test")
    settings = (geometry, link, blocks, environment or {})
    context = multiprocessing.get_context("spawn")
    owner_side, taker_side = context.Pipe()
    ours, theirs = context.Pipe()
    owner = context.Process(target=_own, args=(owner_side, *settings), daemon=True)
    asked = (theirs, taker_side, seconds, tuple(block_counts))
    taker = context.Process(target=_take, args=(*asked, *settings), daemon=True)
    for process in (owner, taker):
        process.start()
    for end in (owner_side, taker_side, theirs):
        end.close()
    try:
        answer: Any = ours.recv() if ours.poll(_START_S + 3 * seconds + _PULL_S) else "no answer in time"
    except EOFError:
        answer = "the measuring process died"
    finally:
        for process in (taker, owner):
            process.terminate()
            process.join()
    if isinstance(answer, str):
        raise UserError(f"cannot move pages over {link}: {answer}")
    return [Sample(*sample) for sample in answer]


def _own(asked: Connection, geometry: KVGeometry, link: str, blocks: int, environment: dict[str, str]) -> None:
    """The owner's process: seals the first ``n`` blocks as often as ``n`` is asked for."""
    with _port(geometry, link, blocks, environment) as (port, answers):
        asked.send(port.describe(_info(_OWNER, geometry, blocks)))
        port.add_peer(asked.recv())  # members know each other
        while True:
            try:
                count = asked.recv()
            except EOFError:
                return
            port.start(SealPages(0, Tier.HBM, tuple(range(count)), 0, geometry.num_layers))
            sealed = answers.get()
            asked.send(sealed.checksums)


def _take(
    told: Connection, owner: Connection, seconds: float, block_counts: Sequence[int],
    geometry: KVGeometry, link: str, blocks: int, environment: dict[str, str],
) -> None:  # fmt: skip
    """The taker's process: measures, and tells the samples or what went wrong."""
    with _port(geometry, link, blocks, environment) as (port, answers):
        if not owner.poll(_START_S):
            told.send("the other process does not start")
            return
        port.add_peer(owner.recv())
        owner.send(port.describe(_info(_TAKER, geometry, blocks)))

        def pull(point: tuple[int, bool]) -> int:
            count, by_page = point
            started_ns = time.perf_counter_ns()
            owner.send(count)
            ids, layers = tuple(range(count)), geometry.num_layers
            pages = PullPages(1, _OWNER, Tier.HBM, ids, Tier.HBM, ids, 0, layers, owner.recv(), by_page)
            port.start(pages)
            pulled = answers.get(timeout=_PULL_S)
            if pulled.error:
                raise UserError(pulled.error)
            return time.perf_counter_ns() - started_ns

        points = [(count, by_page) for count in block_counts if count <= blocks for by_page in (False, True)]
        try:
            times = timed_rounds(points, pull, seconds)
        except (UserError, queue.Empty, EOFError) as error:
            told.send(str(error) or "a pull did not end")
            return
        pieces = {False: 1, True: geometry.num_layers}
        told.send([(n * geometry.block_bytes, n * pieces[paged], ns) for (n, paged), ns in times.items()])


@contextmanager
def _port(
    geometry: KVGeometry, link: str, blocks: int, environment: dict[str, str]
) -> Iterator[tuple[PagePort, queue.SimpleQueue[Any]]]:
    os.environ.update(environment)
    arena = _core.SharedArena(blocks * geometry.block_bytes)
    np.frombuffer(memoryview(arena), dtype=np.uint8)[:] = (
        1  # pages that exist: the kernel's zeros are no memory to read
    )
    answers: queue.SimpleQueue[PagesSealed | PagesPulled] = queue.SimpleQueue()
    port = open_data_port(link, geometry, {Tier.HBM: arena}, answers.put)
    try:
        yield port, answers
    finally:
        port.close()


def _info(peer: Peer, geometry: KVGeometry, blocks: int) -> PeerInfo:
    return PeerInfo(peer, Role.COLOCATED, "", "profile", geometry, blocks, 0, 0, False)
