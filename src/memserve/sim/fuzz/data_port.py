"""The data port of the fuzzed world: each block is read at its own moment, and anything may happen in between."""

from __future__ import annotations

from functools import partial

from memserve.kv_transfer.events import CancelPulls, PagesPulled, PullPages, SealPages
from memserve.sim.fuzz.members import FuzzedMember
from memserve.sim.process import TICK_MIN_NS

PULL_MAX_NS = 4_000_000_000


class FaultyPort:
    """Seals and pulls beside the device."""

    def __init__(self, node: FuzzedMember) -> None:
        self._node = node

    def seal(self, job: SealPages) -> None:
        """The pages are read at the end of a random time."""
        node = self._node
        node.later(node.span_ns(node.host.scenario.pull_ns) // 4, self._seal, job)

    def _seal(self, job: SealPages) -> None:
        self._node.post(self._node.memory.seal(job))

    def cancel(self, job: CancelPulls) -> None:
        """Pulls that have begun may go on."""

    def pull(self, job: PullPages) -> None:
        """The answer comes after the last block."""
        node = self._node
        owner = node.owner_of(job)
        if not isinstance(owner, FuzzedMember):
            node.later(TICK_MIN_NS, node.post, PagesPulled(job.job_id, "no such peer"))
            return
        pull = _Pull(node, job, owner)
        at = 0
        for place in range(len(job.src_blocks)):
            at = min(max(at, node.span_ns(node.host.scenario.pull_ns, node.pull_slowness)), PULL_MAX_NS)
            node.later(at, partial(pull.read, place))
        node.host.say(f"{node.peer.name} pulls for {at / 1e6:.3f} ms: ", job)
        node.later(at + 1, pull.end)


class _Pull:
    """One job under way. The owner's memory may outlive the owner while it is mapped, or may not."""

    def __init__(self, node: FuzzedMember, job: PullPages, owner: FuzzedMember) -> None:
        self.node, self.job, self.owner = node, job, owner
        self.memory, self.life = owner.memory, owner.life
        self.errors: list[str] = []

    def read(self, place: int) -> None:
        """One block."""
        node, owner, world = self.node, self.owner, self.node.host
        if world.links_cut and world.network.is_cut(owner.peer.name, node.peer.name):
            self.errors.append("the link is down")
            return
        if owner.life != self.life and node.random.random() < 0.5:
            self.errors.append("the peer is gone")
            return
        corrupt = node.corrupting > 0 and node.random.random() < 0.5
        if not node.memory.pull(self.job, place, self.memory, corrupt=corrupt):
            self.errors.append("checksum")
            if not corrupt and owner.life == self.life:
                owner.check_promise(self.job, place)

    def end(self) -> None:
        """All blocks were read, or some could not be."""
        job, errors = self.job, self.errors
        pulled_bytes = len(job.src_blocks) * self.node.host.geometry.page_bytes * (job.end_layer - job.first_layer)
        mismatches = errors.count("checksum")
        error = errors[0] if errors else ""
        self.node.post(PagesPulled(job.job_id, error, pulled_bytes, "shm", mismatches=mismatches))
