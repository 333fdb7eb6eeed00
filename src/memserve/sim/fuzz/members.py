"""What every member of a fuzzed world has: pages that others read, and a memory for what it has promised of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from random import Random
from typing import Protocol

from memserve.kv_transfer.events import PullPages
from memserve.kv_transfer.sender import Export
from memserve.messages import AnyMessage, Peer, Ready
from memserve.sim.fuzz.network import FaultyNetwork
from memserve.sim.fuzz.scenario import Scenario
from memserve.sim.fuzz.truth import Violation
from memserve.sim.fuzz.truth_device import PageMemory
from memserve.sim.member_node import MemberHost, MemberNode
from memserve.types import KVGeometry, Tier

_Page = tuple[Tier, int, int, int, int]
"""Tier, block, first and end layer, checksum."""


class FuzzedMemberHost(MemberHost, Protocol):
    """A world that a seed decides, as far as any member knows it."""

    scenario: Scenario
    random: Random
    geometry: KVGeometry
    links_cut: bool
    """Whether a cut between two members is one for pages, too."""

    @property
    def network(self) -> FaultyNetwork:
        """The wires between the nodes."""


class FuzzedMember(MemberNode):
    """A node with knobs for faults of its way to the pages of others."""

    host: FuzzedMemberHost
    random: Random
    corrupting: int
    pull_slowness: int
    has_failed: bool
    """Its device has: what it has promised may not hold."""

    @property
    @abstractmethod
    def memory(self) -> PageMemory:
        """Its pages."""

    @abstractmethod
    def open_offers(self) -> Mapping[str, Export]:
        """Its offers, by transfer."""

    def forget_promises(self) -> None:
        """A new process has promised nothing."""
        self.promises: dict[_Page, set[str]] = {}
        self.has_failed = False

    def span_ns(self, bounds_ns: tuple[int, int], slowness: int = 1) -> int:
        """A random time."""
        return self.random.randint(*bounds_ns) * slowness

    def send(self, to: Peer, message: AnyMessage) -> None:
        if isinstance(message, Ready):
            self._promise(message)
        super().send(to, message)

    def _promise(self, ready: Ready) -> None:
        """Remember what was said of pages: as long as the offer is open, they have these checksums."""
        export = self.open_offers().get(ready.transfer_id)
        if export is None:  # it has ended since
            return
        for at, checksum in enumerate(ready.checksums, ready.first_block - export.first_block):
            page = (*export.places[at], ready.first_layer, ready.end_layer, checksum)
            self.promises.setdefault(page, set()).add(ready.transfer_id)

    def check_promise(self, job: PullPages, place: int) -> None:
        """A page of ours had another checksum than we said: then its offer must have ended, or a step failed here."""
        page = (job.src_tier, job.src_blocks[place], job.first_layer, job.end_layer, job.checksums[place])
        still_open = self.promises.get(page, set()) & self.open_offers().keys()
        if still_open and not self.has_failed:
            raise Violation(f"{self.peer.name} has written to {page}, offered as {sorted(still_open)}")
