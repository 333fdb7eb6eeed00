"""Figure 11: a prompt's KV between two processes, aggregated and discrete; bandwidth by the size of pieces.

Piece ``i`` of another process's memory goes to place ``perm[i]`` of ours, so that pieces cannot be merged. All movers
take turns within a round, each with the same pieces. Our links checksum what they copy; ``memcpy`` stays within one
process and thread and does not.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import numpy as np

from memserve import _core
from memserve.base.errors import UserError
from memserve.base.types import KVGeometry, Role, Tier
from memserve.base.units import KIB, MIB
from memserve.kv.transfer.events import PagesPulled, PagesSealed, SealPages
from memserve.protocol import codec as wire
from memserve.protocol.messages import Join
from memserve.protocol.peers import Peer, PeerInfo
from memserve.transport.data_port import open_data_port
from memserve.transport.links.nixl import NixlLink
from memserve.transport.links.shared_memory import ShmLink
from memserve.transport.ports import PageLink
from memserve.transport.ranges import Ranges
from memserve_lab.workloads.statistics import Spread, spread_of

PROMPT_TOKENS = 2048
"""Tokens of the paper's prompt."""
SIZES = (8 * KIB, 32 * KIB, 128 * KIB, 512 * KIB, 1 * MIB, 4 * MIB)
MEMCPY = "memcpy"
_OWNER, _TAKER = Peer("owner", 1), Peer("taker", 1)
Mover = Callable[["Work"], int]
"""Does the work, and returns the ns that it took."""
ONE_CALL, CALL_EACH = "one call", "a call a piece"
START_S, ANSWER_S = 60.0, 60.0
STOP_S = 5.0
Side = Callable[..., None]
"""The main function of a process: ``(pipe to the other one, ...)``; the taker gets the pipe to the parent first."""


class Pair:
    """``own`` in one process and ``take`` in another, until :meth:`close`. Both must be importable by name."""

    def __init__(self, name: str, own_side: Side, take: Side, environment: dict[str, str], *arguments: Any) -> None:
        """Raises :class:`UserError` if the taker does not become ready."""
        self.name = name
        context = multiprocessing.get_context("spawn")
        owner_side, taker_side = context.Pipe()
        self._told, telling = context.Pipe()
        self._processes = [
            context.Process(target=_run, args=(environment, own_side, owner_side, *arguments), daemon=True),
            context.Process(target=_run, args=(environment, take, telling, taker_side, *arguments), daemon=True),
        ]
        for process in self._processes:
            process.start()
        for end in (owner_side, taker_side, telling):
            end.close()
        try:
            self._read_answer(START_S)
        except UserError:
            self.close()
            raise

    def ask_taker(self, question: Any) -> Any:
        """The taker's answer. Raises :class:`UserError` if it fails or does not answer."""
        self._told.send(question)
        return self._read_answer(ANSWER_S)

    def close(self) -> None:
        """End both processes."""
        self._told.close()
        for process in reversed(self._processes):  # the taker ends by itself, then the owner
            process.join(STOP_S)
            if process.is_alive():
                process.kill()
                process.join()

    def _read_answer(self, within_s: float) -> Any:
        try:
            answer = self._told.recv() if self._told.poll(within_s) else Failed("no answer in time")
        except (EOFError, OSError):
            answer = Failed("a process died")
        if isinstance(answer, Failed):
            raise UserError(f"{self.name} does not work here: {answer.why}")
        return answer


class Failed:
    """A taker's answer when the link fails."""

    def __init__(self, why: str) -> None:
        self.why = why


def serve(commands: Connection, answer: Callable[[Any], Any]) -> None:
    """The taker's loop: report ready, then answer each question, until the parent has gone."""
    commands.send("ready")
    while True:
        try:
            question = commands.recv()
        except EOFError:
            return
        try:
            commands.send(answer(question))
        except Exception as error:  # told to the parent, which decides
            commands.send(Failed(f"{type(error).__name__}: {error}"))


def _run(environment: dict[str, str], work: Side, *arguments: Any) -> None:
    os.environ.update(environment)
    try:
        work(*arguments)
    except (EOFError, KeyboardInterrupt, BrokenPipeError):
        return  # the other side, or Ctrl-C, has ended it
    except Exception as error:
        if isinstance(arguments[0], Connection):
            arguments[0].send(Failed(f"{type(error).__name__}: {error}"))


@dataclass(frozen=True, slots=True)
class Move:
    """Times of moving KV between two processes in ``pieces`` pieces (figure 11)."""

    mover: str
    calls: str
    """``one call`` or ``a call a piece``."""
    layout: str
    """Layout of the prompt's KV. Empty: pieces of one size without a layout."""
    piece_bytes: int
    pieces: int
    spent_ns: Spread

    @property
    def total_bytes(self) -> int:
        return self.piece_bytes * self.pieces

    @property
    def gb_per_s(self) -> float:
        """Bandwidth at the median time."""
        return self.total_bytes / self.spent_ns.p50


@dataclass(frozen=True, slots=True)
class Work:
    """One transfer to time."""

    layout: str
    piece_bytes: int
    pieces: int
    calls: str

    @property
    def ranges(self) -> Ranges:
        """Ranges that cover every piece once."""
        return shuffled(self.pieces, self.piece_bytes)


def shuffled(count: int, piece_bytes: int) -> Ranges:
    """``count`` adjacent pieces, in random order at their destination."""
    src = np.arange(count, dtype=np.int64) * piece_bytes
    return Ranges(src, np.random.default_rng(count).permutation(src), piece_bytes)


def works_of(geometry: KVGeometry, sweep_bytes: int) -> list[Work]:
    """The KV of the paper's prompt in three layouts, in one call and in a call per piece; then pieces of every size."""
    prompt_blocks, layers = PROMPT_TOKENS // geometry.block_tokens, geometry.num_layers
    layouts = {
        "aggregated: a block": (geometry.block_bytes, prompt_blocks),
        "a layer of a block": (geometry.page_bytes, prompt_blocks * layers),
        "its K and V apart": (geometry.page_bytes // 2, prompt_blocks * layers * 2),
    }
    works = [Work(name, *size, calls) for calls in (ONE_CALL, CALL_EACH) for name, size in layouts.items()]
    return works + [Work("", size, sweep_bytes // size, ONE_CALL) for size in SIZES if size <= sweep_bytes]


def bytes_needed(works: Sequence[Work]) -> int:
    """Bytes of memory at each end."""
    return max(work.piece_bytes * work.pieces for work in works)


def open_mover(geometry: KVGeometry, link: str, arena_bytes: int, environment: dict[str, str]) -> Pair:
    """An owner of pages and a taker, over ``link``. Raises :class:`UserError` if the link does not work here."""
    return Pair(link, _own, _take, environment, geometry, link, arena_bytes)


def measure_moves(pairs: Mapping[str, Pair], works: Sequence[Work], rounds: int) -> Iterator[Move]:
    """Time every work with ``memcpy`` and with every pair (by name of the link), work by work."""
    copy = _memcpy(bytes_needed(works))
    movers: dict[str, Mover] = {MEMCPY: copy, **{name: pair.ask_taker for name, pair in pairs.items()}}
    for work in works:
        spent: dict[str, list[int]] = {name: [] for name in movers}
        for turn in range(rounds + 1):  # the first one warms up
            for name, move in movers.items():
                if name == MEMCPY and work.calls == CALL_EACH:
                    continue  # numpy's row assignment has no calls to save
                spent_ns = move(work)
                if turn:
                    spent[name].append(spent_ns)
        for name, times in spent.items():
            if times:
                yield Move(name, work.calls, work.layout, work.piece_bytes, work.pieces, spread_of(times))


def _memcpy(nbytes: int) -> Mover:
    """Inside this process, one thread, piece by piece (numpy's row assignment)."""
    source, target = (np.frombuffer(memoryview(_core.Arena(nbytes)), np.uint8) for _ in range(2))
    source[:] = 3
    target[:] = 4

    def copy(work: Work) -> int:
        ranges = work.ranges
        rows, count = ranges.dst_offsets // work.piece_bytes, ranges.total_bytes
        begin_ns = time.perf_counter_ns()
        target[:count].reshape(-1, work.piece_bytes)[rows] = source[:count].reshape(-1, work.piece_bytes)
        return time.perf_counter_ns() - begin_ns

    return copy


def _arena(nbytes: int) -> _core.SharedArena:
    """Memory like an instance's: touched, and on huge pages if the kernel has any."""
    arena = _core.SharedArena(nbytes)
    np.frombuffer(memoryview(arena), np.uint8)[:] = np.arange(nbytes, dtype=np.uint8)
    arena.collapse(0, nbytes)
    return arena


def _own(taker: Connection, geometry: KVGeometry, link: str, arena_bytes: int) -> None:
    """The owner's process: any message makes it seal a page, as before real reads."""
    sealed: SimpleQueue[PagesSealed | PagesPulled] = SimpleQueue()
    port = open_data_port(link, geometry, {Tier.HBM: _arena(arena_bytes)}, sealed.put)
    try:
        taker.send(wire.encode(Join(port.describe(_info(_OWNER, Role.PREFILL, geometry)))))
        port.add_peer(_info(_TAKER, Role.DECODE, geometry, nixl_agent=b"-"))  # a reader, so that pages are sealed
        while True:
            taker.recv()
            port.start(SealPages(1, Tier.HBM, (0,), 0, 1))
            sealed.get()
            taker.send("sealed")
    finally:
        port.close()


def _take(commands: Connection, owner: Connection, geometry: KVGeometry, link: str, arena_bytes: int) -> None:
    """The taker's process: reads the requested ranges."""
    arenas = {Tier.HBM: _arena(arena_bytes)}
    reader: PageLink = ShmLink(arenas) if link == "shm" else NixlLink(arenas, geometry.block_bytes)
    join = wire.decode(owner.recv())
    assert isinstance(join, Join)
    reader.add_peer(join.info)

    def move(work: Work) -> int:
        ranges = work.ranges
        parts = (
            [ranges]
            if work.calls == ONE_CALL
            else [ranges.slice_ranges(index, index + 1) for index in range(len(ranges))]
        )
        owner.send("seal")
        owner.recv()
        begin_ns = time.perf_counter_ns()
        for part in parts:
            reader.read(join.info.peer, Tier.HBM, Tier.HBM, part)
        return time.perf_counter_ns() - begin_ns

    try:
        serve(commands, move)
    finally:
        reader.close()


def _info(peer: Peer, role: Role, geometry: KVGeometry, nixl_agent: bytes = b"") -> PeerInfo:
    return PeerInfo(peer, role, "", "", geometry, 0, 0, 0, True, nixl_agent=nixl_agent)
