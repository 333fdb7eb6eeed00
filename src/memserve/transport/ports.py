"""The ports through which a host reaches the world.

One way to read a peer's memory.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from memserve.base.errors import InvariantError, MemserveError, UserError
from memserve.base.types import Tier
from memserve.instance.events import StepFinished, StepPlan
from memserve.kv.transfer.events import PageJob, PagesPulled, PagesSealed
from memserve.protocol.messages import AdapterFiles, AnyMessage
from memserve.protocol.peers import ArenaPlace, Peer, PeerInfo
from memserve.transport.outbound import MailboxCounters
from memserve.transport.ranges import Ranges, fits

OnLayer = Callable[[int, int], None]
"""``(step_id, layer)``: K and V of the layer are written for all rows of the plan. Called from the device's thread."""


class Device(Protocol):
    """Executes step plans, strictly in the order in which it gets them."""

    on_layer: OnLayer | None = None
    """Called for plans with ``report_layers``, where the forward can tell."""
    on_broken: Callable[[], object] | None = None
    """Called once when no further step can be computed, by a device of several workers."""
    bound_bytes: int = 0
    """What its process may have resident at most (:class:`memserve.system.memory.MemoryBound`). 0: unknown."""

    def execute(self, plan: StepPlan) -> StepFinished:
        """Do the copies, compute the rows, draw the tokens. Blocks until done; called from one thread only."""

    def begin_step(self, plan: StepPlan) -> StepFinished | Callable[[], StepFinished]:
        """As the host calls it, from one thread: where the host may be ahead of the device, it returns before the plan
        is done, and what it returns waits for that, in another thread."""
        return self.execute(plan)

    def build_grammar(self, job_id: int, grammar: str, on_built: Callable[[str], None]) -> None:
        """Begin to build what slots will be opened with, beside the steps. ``on_built`` is called from another thread,
        with the reason why there is no such grammar, or ""."""

    def forget_grammar(self, job_id: int) -> None:
        """No slot will be opened with it, and none of its slots is of use any more: end what works on it."""

    def await_mask(self, slot: int, on_mask: Callable[[], None]) -> None:
        """``on_mask`` is called, from any thread, once it is known what may come next in a slot whose draw was late."""

    def move_gate(self, gate: int, layers: int | None) -> None:
        """The rows of a gate may read so many layers of what comes before them; None: never more. From any thread.
        Raises :class:`InvariantError` where layers are not waited for: such rows are not asked for there."""
        raise InvariantError("this device waits for no layers")

    def read_adapter(self, files: AdapterFiles) -> Callable[[], None]:
        """Read a LoRA adapter, beside the steps; what it returns is called between two of them, and then it is ready
        for those that follow. Both raise :class:`UserError` for one that does not fit."""
        raise UserError("this device computes without adapters", hint="serve without --lora-folder")

    def drop_adapter(self, digest: str) -> None:
        """Called between two steps: no row of a later one has this adapter."""

    def close(self) -> None:
        """Give back arenas and threads."""


class Mailbox(Protocol):
    """Carries messages between processes. Thread-safe; nothing here blocks.

    Its builder gives a callback ``(sender: Peer, message: AnyMessage)``, which is called from the thread that reads,
    once for each message at most and in the order in which one sender sent them. Messages may be lost.
    """

    @property
    def address(self) -> str:
        """Where others reach it, ``tcp://host:port``."""

    @property
    def counters(self) -> MailboxCounters:
        """What became of messages so far: a copy."""

    def connect(self, peer: Peer, address: str) -> None:
        """From now on ``send`` knows where ``peer`` is. An older generation of the same name is forgotten."""

    def disconnect(self, peer: Peer) -> None:
        """Forget ``peer``: what is queued for it is dropped."""

    def send(self, to: Peer, message: AnyMessage) -> None:
        """Queue ``message``; unknown peers and full queues lose it, counted. Generation 0: any process of that name."""

    def restart_as(self, self_peer: Peer) -> None:
        """Go on as another generation: messages to the former one are dropped from now on."""

    def read_in(self, loop: AbstractEventLoop | None) -> None:
        """From now on ``loop``, from which this is called, reads; None: a thread of the mailbox, as at first."""

    def close(self) -> None:
        """Read no longer and close the sockets; what is queued is given up to a second to leave."""


class DataPort(Protocol):
    """Moves pages between own arenas and those of peers. Thread-safe; ``start`` does not block.

    Its builder gives a callback for :class:`PagesSealed` and :class:`PagesPulled`, called from a worker's
    thread. Each ``SealPages`` and ``PullPages`` is answered exactly once, whatever happens.
    """

    def describe(self, info: PeerInfo) -> PeerInfo:
        """``info`` with what peers need to read our arenas (host id, process, arenas, NIXL agent)."""

    def add_peer(self, info: PeerInfo) -> None:
        """Prepare to read from ``info.peer``."""

    def remove_peer(self, peer: Peer) -> None:
        """Stop to read the arenas of ``peer``; pulls from it fail."""

    def start(self, job: PageJob) -> None:
        """Queue a job."""

    def close(self) -> None:
        """Stop the workers, unmap everything."""


OnPages = Callable[[PagesSealed | PagesPulled], None]
OnMessage = Callable[[Peer, AnyMessage], None]


Seals = NDArray[np.uint64]
"""A checksum a range."""


@dataclass(slots=True)
class Travelled:
    """How the bytes of one read came, where that is another thing than how many they are."""

    saved_bytes: int = 0
    """So many fewer were sent."""
    codec_ns: int = 0
    """What encoding and decoding took."""


class LinkError(MemserveError):
    """Pages could not be read. Nothing writes the destination any more."""


class UnreachableError(LinkError):
    """The peer cannot be read over this link; another one may do."""


class ChecksumError(LinkError):
    """What came is not what its owner had sealed."""

    def __init__(self, wrong: int, blocks: int) -> None:
        super().__init__(f"{wrong} of {blocks} blocks have another checksum than their owner said")
        self.wrong_blocks = wrong


class ArenaMemory(Protocol):
    """An arena of ours, as ``_core.SharedArena`` is."""

    generation: int

    @property
    def address(self) -> int:
        """Of the first byte."""

    @property
    def nbytes(self) -> int:
        """Of all blocks."""

    @property
    def fd(self) -> int:
        """Descriptor of the memory's file."""


Arenas = Mapping[Tier, ArenaMemory]


class PageLink(Protocol):
    """Reads ranges out of peers' arenas into own ones. Thread-safe."""

    name: str
    workers: int
    """How many reads may go on at once."""

    def describe(self, info: PeerInfo) -> PeerInfo:
        """``info`` with what this link needs of it."""

    def reaches(self, info: PeerInfo) -> bool:
        """Whether it is worth trying."""

    def add_peer(self, info: PeerInfo) -> None:
        """Reads from ``info.peer`` may come. Does not block; connects when the first one does."""

    def remove_peer(self, peer: Peer) -> None:
        """No more reads; one that is under way ends soon."""

    def expect_reads(self) -> None:
        """Peers will read our arenas in a moment."""

    def read(
        self, peer: Peer, src_tier: Tier, dst_tier: Tier, ranges: Ranges, travelled: Travelled | None = None
    ) -> Seals:
        """Copy ``ranges``; the checksums of what was written, one a range. Blocks for a bounded time. ``travelled``:
        where to add how they came.

        Raises :class:`LinkError`; then, and on return, nothing writes the destination any more.
        """

    def close(self) -> None:
        """Give everything back; no read is under way."""


def place_of(info: PeerInfo, tier: Tier) -> ArenaPlace:
    """Where ``tier`` lies in the peer's memory. Raises :class:`LinkError` when it offers none."""
    for place in info.arenas:
        if place.tier is tier:
            return place
    raise LinkError(f"{info.peer.name} has no {tier.name} that can be read")


def check_ranges(ranges: Ranges, src_bytes: int, dst_bytes: int) -> None:
    """Below, addresses are trusted. Raises :class:`LinkError` for ranges that are not inside both arenas."""
    if not fits(ranges.src_offsets, ranges.range_bytes, src_bytes):
        raise LinkError("a source lies outside of the peer's arena")
    if not fits(ranges.dst_offsets, ranges.range_bytes, dst_bytes):
        raise LinkError("a destination lies outside of the arena")
