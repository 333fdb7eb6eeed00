"""Moves pages between arenas: one port that knows the way to every peer.

Worker threads that keep the order of each lane.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from memserve.base.errors import UserError, check
from memserve.base.types import KvCodecMode, KVGeometry, check_link
from memserve.base.units import NS_PER_S
from memserve.kv.transfer.events import CancelPulls, PageJob, PagesPulled, PagesSealed, PullPages, SealPages
from memserve.protocol.peers import ArenaPlace, Peer, PeerInfo
from memserve.system.log import RatedLog
from memserve.transport.links.cuda_ipc import IpcLink
from memserve.transport.links.encrypted import CurveLink
from memserve.transport.links.gpu_memory import GpuMemory, seal_ranges
from memserve.transport.links.nixl import NixlLink
from memserve.transport.links.nixl_agent import nixl_is_installed
from memserve.transport.links.shared_memory import ShmLink, this_host
from memserve.transport.links.staging import StagedLink
from memserve.transport.network_devices import ListenAddress, has_rdma
from memserve.transport.ports import (
    Arenas,
    ChecksumError,
    LinkError,
    OnPages,
    PageLink,
    Travelled,
    UnreachableError,
)
from memserve.transport.ranges import Ranges, block_ranges, fits, layer_offsets

log = logging.getLogger(__name__)

Task = Callable[[], None]


class Lanes:
    """Tasks of one lane run one after another, in order; different lanes run at once, on ``workers`` threads."""

    def __init__(self, name: str, workers: int) -> None:
        self._waiting: dict[Hashable, deque[Task]] = {}
        """All and only the lanes that have tasks, the running one included."""
        self._ready: deque[Hashable] = deque()
        """Lanes with tasks of which none runs, longest waiting first."""
        self._changed = threading.Condition()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run_tasks, name=f"{name} {number}", daemon=True) for number in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit_task(self, lane: Hashable, task: Task) -> bool:
        """Queue ``task``; False when closed."""
        with self._changed:
            if self._closed:
                return False
            tasks = self._waiting.get(lane)
            if tasks is None:
                self._waiting[lane] = deque([task])
                self._ready.append(lane)
                self._changed.notify()
            else:
                tasks.append(task)
            return True

    def close(self) -> None:
        """Take no more, run what is queued, stop the threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run_tasks(self) -> None:
        while (turn := self._next_task()) is not None:
            lane, task = turn
            try:
                task()
            except Exception:
                log.exception("a task of lane %r failed", lane)
            self._finish_task(lane)

    def _next_task(self) -> tuple[Hashable, Task] | None:
        """The first task of the lane that waits longest; ``None`` = closed, and nothing is left."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or (self._closed and not self._waiting))
            if not self._ready:
                return None
            # its first task stays in the queue until it has run, so that no other thread takes this lane meanwhile
            lane = self._ready.popleft()
            return lane, self._waiting[lane][0]

    def _finish_task(self, lane: Hashable) -> None:
        with self._changed:
            self._waiting[lane].popleft()
            if self._waiting[lane]:
                self._ready.append(lane)
                self._changed.notify()
            else:
                del self._waiting[lane]
                if self._closed:
                    self._changed.notify_all()


def open_data_port(
    link: str,
    geometry: KVGeometry,
    arenas: Arenas,
    on_pages: OnPages,
    listen_address: ListenAddress | None = None,
    *,
    kv_codec: KvCodecMode = "none",
) -> PagePort:
    """The port for ``link`` (:data:`memserve.base.types.LINKS`), whose links listen as ``listen_address`` says; None:
    NIXL at all addresses of this machine, and no member is asked through the cluster's channel. ``kv_codec``: of that
    channel; other links read memory as it is.

    ``arenas`` holds the tiers that have blocks. Raises :class:`UserError` for ``nixl`` without NIXL, for ``curve``
    without ``listen_address``, and for a link that does not exist.
    """
    check_link(link)
    links: list[PageLink] = []
    if link in ("auto", "trusted", "shm"):
        on_gpu = any(isinstance(arena, GpuMemory) for arena in arenas.values())
        links.append(IpcLink(arenas) if on_gpu else ShmLink(arenas))
    host = None if listen_address is None else listen_address.known_as
    if uses_nixl(link, host):
        links += _nixl_links(arenas, geometry, host, needed=link == "nixl")
    elif link == "trusted":
        log.warning("no RDMA adapter: KV goes to other hosts through the cluster's encrypted channel")
    if link in ("auto", "trusted", "curve") and listen_address is not None:
        channel = CurveLink(arenas, listen_address, geometry.block_bytes, kv_codec=kv_codec)
        links += [channel] if link == "curve" else [StagedLink(arenas, channel.read_staged), channel]
    if not links:
        raise UserError("pages go through the channel of a cluster, and this process is in none", param="link")
    return PagePort(geometry, arenas, links, on_pages)


def uses_nixl(link: str, host: str | None) -> bool:
    """Whether peers read over NIXL where it is to be had: with ``trusted`` by RDMA alone, for over TCP a reader that
    dies takes this process with it (``links/nixl.py``). ``host``: where this process listens; None: everywhere."""
    return link == "nixl" or (link == "trusted" and has_rdma(host))


def _nixl_links(arenas: Arenas, geometry: KVGeometry, host: str | None, *, needed: bool) -> list[PageLink]:
    """None where it is not needed and not to be had."""
    if needed and not has_rdma(host):
        log.warning("NIXL finds no RDMA adapter: over TCP, UCX aborts an instance when one that reads its KV dies")
    if not needed and not nixl_is_installed():
        log.warning("NIXL is not installed: KV goes to other hosts through the cluster's encrypted channel")
        return []
    try:
        return [NixlLink(arenas, geometry.block_bytes, host=host)]
    except UserError as error:
        if needed:
            raise
        log.warning("NIXL does not start, KV goes to other hosts through the cluster's encrypted channel: %s", error)
        return []


@dataclass(slots=True)
class _Route:
    """How a peer is read: by the first of these links; the others are tried when it turns out not to reach it."""

    links: list[PageLink]
    cancelled_before: int = 0
    """Pulls with a lower number need not begin."""


@dataclass(frozen=True, slots=True)
class _Pull:
    job: PullPages
    number: int
    """Of all pulls, in the order in which they came."""


class PagePort:
    """A :class:`memserve.transport.ports.DataPort` over several links.

    Pulls from one peer run in order, those from different peers at once; seals have a thread of their own. Each job is
    answered exactly once: once :meth:`close` has begun, pulls with an error, and then perhaps from the caller's thread.
    """

    def __init__(self, geometry: KVGeometry, arenas: Arenas, links: Sequence[PageLink], on_pages: OnPages) -> None:
        self._geometry = geometry
        self._arenas = arenas
        self._links = list(links)
        self._on_pages = on_pages
        self._lock = threading.Lock()
        self._routes: dict[Peer, _Route] = {}
        self._pulls = 0
        self._closing = False
        self._warnings = RatedLog(log)
        # one thread is enough: all seals are one lane
        self._sealing = Lanes("seal pages", 1)
        self._lanes = {link.name: Lanes(f"pull pages {link.name}", link.workers) for link in links}

    def describe(self, info: PeerInfo) -> PeerInfo:
        """``info`` with host, process, arenas and what each link adds; from now on the arenas are this generation's."""
        places = []
        for tier, arena in self._arenas.items():
            # readers compare it before and after a copy, and so notice that this process has a new generation
            arena.generation = info.peer.generation
            of_host = ArenaPlace(tier, arena.address, arena.nbytes, arena.fd)
            places.append(arena.describe_arena(tier) if isinstance(arena, GpuMemory) else of_host)
        info = msgspec.structs.replace(info, host_id=this_host(), pid=os.getpid(), arenas=tuple(places))
        for link in self._links:
            info = link.describe(info)
        return info

    def add_peer(self, info: PeerInfo) -> None:
        """Prepare to read from ``info.peer``, over the first link that reaches it."""
        links = [link for link in self._links if link.reaches(info)]
        for link in links:
            link.add_peer(info)
        with self._lock:
            self._routes[info.peer] = _Route(links)

    def remove_peer(self, peer: Peer) -> None:
        """Its arenas are read no more; pulls from it fail."""
        with self._lock:
            self._routes.pop(peer, None)
        for link in self._links:
            link.remove_peer(peer)

    def start(self, job: PageJob) -> None:
        """Queue a job. Raises :class:`InvariantError` for blocks or layers that are not ours to seal."""
        match job:
            case SealPages():
                self._queue_checksums(job)
            case PullPages():
                with self._lock:
                    self._pulls += 1
                    pull = _Pull(job, self._pulls)
                self._queue_pull(pull)
            case CancelPulls(peer):
                with self._lock:
                    if peer in self._routes:
                        self._routes[peer].cancelled_before = self._pulls + 1

    def close(self) -> None:
        """Answer what is queued, stop the workers, unmap everything. Waits for reads under way. Not from a callback."""
        with self._lock:
            self._closing = True
            peers = list(self._routes)
        # a pull that waits for a peer returns only when its connection goes: else the lanes below never end
        for peer in peers:
            self.remove_peer(peer)
        for lanes in (*self._lanes.values(), self._sealing):
            lanes.close()
        for link in self._links:
            link.close()

    # -- own pages

    def _queue_checksums(self, job: SealPages) -> None:
        offsets = layer_offsets(self._geometry, job.blocks, job.first_layer)
        range_bytes = (job.end_layer - job.first_layer) * self._geometry.page_bytes
        arena = self._arenas[job.tier]
        check(0 <= job.first_layer < job.end_layer <= self._geometry.num_layers, "layers to be sealed: {}", job)
        check(fits(offsets, range_bytes, arena.nbytes), "blocks to be sealed: {}", job)

        def seal() -> None:
            begun_ns = time.monotonic_ns()
            seals = seal_ranges(arena, offsets, range_bytes)
            spent_ns, sealed_bytes = time.monotonic_ns() - begun_ns, len(job.blocks) * range_bytes
            self._report_result(PagesSealed(job.job_id, tuple(seals.tolist()), sealed_bytes, spent_ns))
            for link in self._links:
                link.expect_reads()

        self._submit_task(self._sealing, "seal", seal)

    # -- peers' pages

    def _queue_pull(self, pull: _Pull, why_not: str = "") -> None:
        """Queue it with the link that reads its peer; without one the answer is an error."""
        with self._lock:
            route = self._routes.get(pull.job.peer)
            link = route.links[0] if route and route.links else None
        if route is None or link is None:
            error = why_not or f"no way to {pull.job.peer.name}"
            self._submit_task(self._sealing, "no way", lambda: self._report_result(PagesPulled(pull.job.job_id, error)))
        else:
            self._submit_task(self._lanes[link.name], pull.job.peer, lambda: self._run_pull(pull, link, route))

    @staticmethod
    def _submit_task(lanes: Lanes, lane: Hashable, task: Task) -> None:
        """Closed lanes still owe an answer."""
        if not lanes.submit_task(lane, task):
            task()

    def _run_pull(self, pull: _Pull, link: PageLink, route: _Route) -> None:
        """Read, compare, answer; or leave it to the next link."""
        begin_ns, pulled_bytes, error, mismatches = time.monotonic_ns(), 0, "", 0
        travelled = Travelled()
        try:
            # a number rather than a set of jobs: one cancel covers all that were queued before it, and what comes
            # later runs
            if self._closing or pull.number < route.cancelled_before:
                self._report_result(PagesPulled(pull.job.job_id, "not begun: cancelled", 0, link.name))
                return
            pulled_bytes = self._read_verified(pull.job, link, travelled)
        except UnreachableError as reason:
            self._drop_link(link, route, pull.job.peer, str(reason))
            self._queue_pull(pull, str(reason))
            return
        except ChecksumError as reason:
            error, mismatches = str(reason), reason.wrong_blocks
        except LinkError as reason:
            error = str(reason)
        except Exception as reason:
            log.exception("pull %s failed", pull.job.job_id)
            error = f"{type(reason).__name__}: {reason}"
        spent_ns = time.monotonic_ns() - begin_ns
        if error and not self._closing:
            self._log_failed_pull(pull.job, link, error, spent_ns)
        answer = PagesPulled(pull.job.job_id, error, pulled_bytes, link.name, spent_ns, mismatches)
        self._report_result(replace(answer, saved_bytes=travelled.saved_bytes, codec_ns=travelled.codec_ns))

    def _log_failed_pull(self, job: PullPages, link: PageLink, error: str, spent_ns: int) -> None:
        """Each peer's failures are one line in a while: what was not read is computed instead, so nothing else shows
        them."""
        about = job.peer.name, len(job.src_blocks), link.name, spent_ns / NS_PER_S, error
        self._warnings.log_limited(
            logging.WARNING, job.peer, "KV of %s (%d blocks, over %s) was not read in %.2f s: %s", *about
        )

    def _read_verified(self, job: PullPages, link: PageLink, travelled: Travelled) -> int:
        """Bytes pulled; every block has the checksum that its owner gave."""
        layers = job.first_layer, job.end_layer
        blocks = block_ranges(self._geometry, job.src_blocks, job.dst_blocks, *layers)
        if len(job.checksums) != len(blocks):
            raise LinkError(f"{len(job.checksums)} checksums of {len(blocks)} blocks")
        if job.by_page:
            pages = block_ranges(self._geometry, job.src_blocks, job.dst_blocks, *layers, by_page=True)
            link.read(job.peer, job.src_tier, job.dst_tier, pages, travelled)
            # a seal covers a block: pages that came alone are summed once all have landed
            seals = self._checksums_of_landed(job, blocks)
        else:
            seals = link.read(job.peer, job.src_tier, job.dst_tier, blocks, travelled)
        wrong = np.flatnonzero(seals != np.array(job.checksums, np.uint64))
        if len(wrong):
            raise ChecksumError(len(wrong), len(blocks))
        return blocks.total_bytes

    def _checksums_of_landed(self, job: PullPages, blocks: Ranges) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        """Checksums of blocks that came page by page."""
        return seal_ranges(self._arenas[job.dst_tier], blocks.dst_offsets, blocks.range_bytes)

    def _drop_link(self, link: PageLink, route: _Route, peer: Peer, why: str) -> None:
        """``link`` turned out not to reach ``peer``: the next one's turn."""
        with self._lock:
            # several pulls may find out at the same time: only the first takes the link away
            if route.links and route.links[0] is link:
                log.warning("%s cannot be read over %s: %s", peer.name, link.name, why)
                route.links.pop(0)

    def _report_result(self, answer: PagesSealed | PagesPulled) -> None:
        self._on_pages(answer)
