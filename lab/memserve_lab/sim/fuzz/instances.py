"""An instance of the fuzzed world: its device computes with literal KV, and it has more faults than other nodes.

What every member of a fuzzed world has: pages that others read, and a memory for what it has promised of them.

The data port of the fuzzed world: each block is read at its own moment, and anything may happen in between.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from random import Random
from typing import Protocol

from memserve.base.types import KVGeometry, Role, Tier
from memserve.base.units import ceil_div
from memserve.instance.events import DropSegment, HoldSegment, RowFailed, StepFailed, StepFinished, StepPlan
from memserve.instance.layerwise.placer import LayerPlacer
from memserve.instance.scheduler.sequence import Group, Phase
from memserve.kv.transfer.events import CancelPulls, PagesPulled, PullPages, SealPages
from memserve.kv.transfer.sender import Export
from memserve.protocol.messages import AnyMessage, Ready, Segment
from memserve.protocol.peers import Peer
from memserve_lab.sim.fuzz.network import FaultyNetwork
from memserve_lab.sim.fuzz.scenario import Scenario
from memserve_lab.sim.fuzz.scenario_features import Workers, workers_of
from memserve_lab.sim.nodes import Host, InstanceNode, MemberHost, MemberNode, RouterNode
from memserve_lab.sim.process import TICK_MIN_NS
from memserve_lab.sim.reference.device import OracleDevice, PageMemory, fail_row
from memserve_lab.sim.reference.oracle import Violation, require

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

    def send_message(self, to: Peer, message: AnyMessage) -> None:
        if isinstance(message, Ready):
            self._remember_promise(message)
        super().send_message(to, message)

    def _remember_promise(self, ready: Ready) -> None:
        """Remember what was said of pages: as long as the offer is open, they have these checksums."""
        export = self.open_offers().get(ready.transfer_id)
        if export is None:  # it has ended since
            return
        for block, checksum in enumerate(ready.checksums, ready.first_block - export.first_block):
            page = (*export.places[block], ready.first_layer, ready.end_layer, checksum)
            self.promises.setdefault(page, set()).add(ready.transfer_id)

    def check_promise(self, job: PullPages, place: int) -> None:
        """A page of ours had another checksum than we said: then its offer must have ended, or a step failed here."""
        page = (job.src_tier, job.src_blocks[place], job.first_layer, job.end_layer, job.checksums[place])
        still_open = self.promises.get(page, set()) & self.open_offers().keys()
        if still_open and not self.has_failed:
            raise Violation(f"{self.peer.name} has written to {page}, offered as {sorted(still_open)}")


FIRST_GENERATION = 100_000_000
STEP_MAX_NS = 10_000_000_000
PLANTED = "a planted failure of this row"


LATE_SHARE = 0.2
"""Of the masks of grammars."""


class FuzzHost(Host, FuzzedMemberHost, Protocol):
    """A world that a seed decides, as its instances know it."""

    happened: Counter[str]

    @property
    def network(self) -> FaultyNetwork:
        """The wires between the nodes."""

    @property
    def router(self) -> RouterNode:
        """The one router there is."""

    def row_fails(self, node: FuzzedInstance, attempt_id: str, index: int) -> None:
        """A row of an attempt fails, and with it that sequence of the client's request."""


class FuzzedInstance(InstanceNode, FuzzedMember):
    """A node with knobs for faults, which remembers the checksums that it has promised for its pages."""

    host: FuzzHost
    device: FuzzedDevice

    def __init__(self, world: FuzzHost, name: str, role: Role, place: int) -> None:
        self.random = Random(f"{world.scenario.seed}/{name}")
        self.fails_next_step = False
        self.rows_to_fail = 0
        self.next_step_hangs_ns = 0
        self.corrupting = 0
        self.pull_slowness = 1
        self.step_slowness = 1
        self.set_back = False
        """True: its wall clock was set back, so its generations may be older than those that others know."""
        self.copy_ns = 0
        """What each block that moves between tiers adds to a step."""
        super().__init__(world, name, role, place, FIRST_GENERATION if world.scenario.setting.swarm else 0)

    @property
    def is_well(self) -> bool:
        """No fault is on."""
        return not self.corrupting and self.pull_slowness == self.step_slowness == 1 and not self.copy_ns

    def boot_process(self) -> None:
        self.held = dict[str, tuple[list[int], list[int]]]()
        self.skew_ns = self.random.choice([0, self.random.randrange(1 << 60)])
        self.forget_promises()
        super().boot_process()
        masks = Random(f"{self.host.scenario.seed}/{self.peer}/masks")
        self.memory.mask_is_late = lambda opened: masks.random() < LATE_SHARE

    def boot_in_the_past(self, by: int) -> None:
        """A new process after the wall clock, from which generations come, was set back."""
        self.peer = Peer(self.peer.name, max(0, self.peer.generation - by))
        self.set_back = True
        self.boot_process()

    def on_refused(self, reason: str) -> None:
        """Its supervisor soon restarts it."""
        if not self.set_back:
            super().on_refused(reason)
        self.kill_process()
        self.host.clock.call_after(2 * self.host.member_config.beat_ns, self._boot_unless_alive)

    def on_left(self) -> None:
        """A new process of the same name follows soon."""
        self.host.clock.call_after(2 * self.host.member_config.beat_ns, self._boot_unless_alive)

    def _boot_unless_alive(self) -> None:
        if not self.alive:
            self.boot_process()

    def post_event(self, event: object) -> None:
        """As any node; after a pause, builds and masks have taken too long."""
        state, now = self.machine.state, self.now
        deadline_ns = state.grammars.next_deadline_ns
        for group in state.groups.values() if deadline_ns is not None and deadline_ns <= now else ():
            if state.grammars.is_awaited(group.wanted_grammar):
                self._too_slow(group)
        for sequence in state.late_masks.overdue_sequences(now):
            self._too_slow(sequence.group)
        super().post_event(event)

    def _too_slow(self, group: Group) -> None:
        for index in group.sequences:
            self.host.row_fails(self, group.request.request_id, index)

    def change_segment(self, order: HoldSegment | DropSegment) -> None:
        """Remember what the segment holds, to see whether that stays so."""
        if isinstance(order, HoldSegment):
            self.held[order.name] = order.blocks, self.memory.segment_cells(order.blocks, order.tokens)
        else:
            del self.held[order.name]

    @property
    def memory(self) -> OracleDevice:
        """Its device's."""
        return self.device.memory

    def open_offers(self) -> dict[str, Export]:
        """Its offers, by transfer."""
        link = self.machine.link
        return link.exchange._sender.open if link is not None else {}

    def count_achievements(self) -> Counter[str]:
        """Counts of what its present process has done."""
        counts, link, layers = Counter[str](), self.machine.link, self.machine.state.memory.layers
        if link is not None:
            exchange = link.exchange.counters
            counts.update(handed_over=link.sender.handed_over, taken_over=link.receiver.taken_over)
            counts.update(fetched=link.fetches.fetched_tokens, sent_home=link.receiver.blocks_sent_back)
            counts.update(came_home=link.blocks_come_home, mismatches=exchange.mismatches)
            counts.update(pulled=exchange.pulled_blocks, reused=exchange.reused_blocks, expired=exchange.expired)
            counts.update(withdrawn=exchange.withdrawn, failed=link.receiver.failed)
            if link.striped.completed:
                counts["striped: completed"] = link.striped.completed
        counters = self.machine.state.counters
        if counters.late_draws:
            counts["late draws"] = counters.late_draws
        if counters.drafted_tokens:
            counts.update({"drafts: tokens": counters.drafted_tokens, "drafts: kept": counters.kept_tokens})
        if self.memory.states is not None:
            counts.update({"states: loaded": self.memory.states.loaded})
        if self.memory.windows is not None:
            report = self.machine.pool.report().windows
            counts.update({"windows: passed": report.passed, "windows: given up": report.given_up})
        if isinstance(layers, LayerPlacer):
            kv = self.memory.kv
            counts.update({"by layer: admitted": layers.admitted, "by layer: converted": layers.converted})
            counts.update({"by layer: parked": layers.parked, "by layer: resumed": layers.resumed})
            if link is not None:
                counts.update({"by layer: handed_over": link.sender.by_layer})
                counts.update({"by layer: taken_over": link.receiver.parked})
            counts.update({"by layer: pages_moved": kv.moved_pages, "by layer: pages_read": kv.read_by_layer})
        return counts


def cells_of(instances: Iterable[FuzzedInstance], segment: Segment, name: str) -> list[int] | None:
    """What a holder answers: the cells of its part of ``name``. None: it does not answer."""
    node = next((node for node in instances if node.peer == segment.peer), None)
    if node is None or not node.alive or node.paused or name not in node.held:
        return None
    blocks, cells = node.held[name]
    require(len(cells) == segment.tokens, f"{node.peer.name} holds {len(cells)} tokens of {name}, not {segment.tokens}")
    require(node.memory.segment_cells(blocks, len(cells)) == cells, f"{node.peer.name}: the part of {name} is stale")
    node.host.happened["shared: queries"] += 1
    return cells


class FuzzedDevice:
    """Literal KV, steps of random length, steps that fail."""

    def __init__(self, node: FuzzedInstance, memory: OracleDevice) -> None:
        self.memory, self.layers = memory, memory.layers
        self._node = node
        self._void: set[int] = set()
        seed = node.host.scenario.seed
        self._workers = Workers(workers_of(seed), f"{seed}/{node.peer.name}/workers")
        self._behind_ns = 0  # the slowest worker, when the plan's end is told

    def step_ns(self, plan: StepPlan) -> int:
        """A random time, which begins now."""
        node = self._node
        if plan.step_id not in self._void:
            self.memory.begin_plan(plan)
        hangs_ns, node.next_step_hangs_ns = node.next_step_hangs_ns, 0
        copies_ns = self._copied_blocks(plan) * node.copy_ns if node.copy_ns else 0
        spent_ns = node.span_ns(node.host.scenario.step_ns, node.step_slowness) + hangs_ns + copies_ns
        slowest_ns = min(spent_ns, STEP_MAX_NS)
        told_ns = self._workers.told_ns(slowest_ns)
        self._behind_ns = slowest_ns - told_ns
        return told_ns

    def _copied_blocks(self, plan: StepPlan) -> int:
        pages = sum(len(order.src) for order in plan.moves)
        return sum(len(order.src) for order in plan.copies) + ceil_div(pages, self.layers)

    def finish_layer(self, plan: StepPlan, layer: int) -> bool:
        """Compute the layer, unless the plan follows one that failed."""
        if plan.step_id in self._void:
            return False
        self.memory.finish_layer(plan, layer)
        return True

    def lose_rows(self, plan: StepPlan, slots: Iterable[int]) -> None:
        """Unless the plan follows one that failed: then nothing of it counts."""
        if plan.step_id not in self._void:
            self.memory.begin_plan(plan)
            self.memory.lose_rows(plan, slots)

    def run_plan(self, plan: StepPlan) -> StepFinished | StepFailed:
        """The end of the plan's time. Plans that were under way when one failed may do anything."""
        node = self._node
        if plan.step_id in self._void:
            return self.memory.run_void(plan)
        if not node.fails_next_step:
            event = self.memory.run_plan(plan)
            if self._behind_ns:
                self.memory.behind |= self.memory.written
                node.call_later(self._behind_ns, self.memory.behind.clear)
            return self._spoil_row(plan, event)
        node.fails_next_step = False
        node.has_failed = True
        self._void |= {later.step_id for later in node.plans}
        node.host.log_line(f"{node.peer.name}: step {plan.step_id} fails")
        self.memory.abandon_layers(plan)
        return self.memory.fail_plan(plan, node.random.randrange(100))

    def _spoil_row(self, plan: StepPlan, event: StepFinished | StepFailed) -> StepFinished | StepFailed:
        """Let one row of the plan fail, if a fault asks for it."""
        node = self._node
        if not node.rows_to_fail or not plan.slots or isinstance(event, StepFailed):
            return event
        node.rows_to_fail -= 1
        slot = node.random.choice(sorted({*plan.slots, *(slot for slots in plan.sample_slots for slot in slots)}))
        sequence = node.machine.inflight[0].by_slot()[slot]
        fail_row(plan, event, slot, RowFailed(PLANTED, kv_is_suspect=node.random.random() < 0.5))
        if sequence.phase is not Phase.FINISHED:  # else the row was the surplus one of a finished sequence
            node.host.row_fails(node, sequence.request_id, sequence.index)
        return event


PULL_MAX_NS = 4_000_000_000


class FaultyPort:
    """Seals and pulls beside the device."""

    def __init__(self, node: FuzzedMember) -> None:
        self._node = node

    def seal_pages(self, job: SealPages) -> None:
        """The pages are read at the end of a random time."""
        node = self._node
        node.call_later(node.span_ns(node.host.scenario.pull_ns) // 4, self._seal_now, job)

    def _seal_now(self, job: SealPages) -> None:
        self._node.post_event(self._node.memory.seal_pages(job))

    def cancel_pulls(self, job: CancelPulls) -> None:
        """Pulls that have begun may go on."""

    def pull_pages(self, job: PullPages) -> None:
        """The answer comes after the last block."""
        node = self._node
        owner = node.owner_of(job)
        if not isinstance(owner, FuzzedMember):
            node.call_later(TICK_MIN_NS, node.post_event, PagesPulled(job.job_id, "no such peer"))
            return
        pull = _Pull(node, job, owner)
        offset = 0
        for place in range(len(job.src_blocks)):
            offset = min(max(offset, node.span_ns(node.host.scenario.pull_ns, node.pull_slowness)), PULL_MAX_NS)
            node.call_later(offset, partial(pull.read_block, place))
        node.host.log_line(f"{node.peer.name} pulls for {offset / 1e6:.3f} ms: ", job)
        node.call_later(offset + 1, pull.end_pull)


class _Pull:
    """One job under way. The owner's memory may outlive the owner while it is mapped, or may not."""

    def __init__(self, node: FuzzedMember, job: PullPages, owner: FuzzedMember) -> None:
        self.node, self.job, self.owner = node, job, owner
        self.memory, self.life = owner.memory, owner.life
        self.errors: list[str] = []

    def read_block(self, place: int) -> None:
        """One block."""
        node, owner, world = self.node, self.owner, self.node.host
        if world.links_cut and world.network.is_cut(owner.peer.name, node.peer.name):
            self.errors.append("the link is down")
            return
        if owner.life != self.life and node.random.random() < 0.5:
            self.errors.append("the peer is gone")
            return
        corrupt = node.corrupting > 0 and node.random.random() < 0.5
        if not node.memory.pull_block(self.job, place, self.memory, corrupt=corrupt):
            self.errors.append("checksum")
            if not corrupt and owner.life == self.life:
                owner.check_promise(self.job, place)

    def end_pull(self) -> None:
        """All blocks were read, or some could not be."""
        job, errors = self.job, self.errors
        pulled_bytes = len(job.src_blocks) * self.node.host.geometry.page_bytes * (job.end_layer - job.first_layer)
        mismatches = errors.count("checksum")
        error = errors[0] if errors else ""
        self.node.post_event(PagesPulled(job.job_id, error, pulled_bytes, "shm", mismatches=mismatches))
