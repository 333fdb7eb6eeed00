"""Instances whose devices only know how long steps take, the world that hosts them, and the way to its routers."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from random import Random
from typing import Protocol

from memserve.base.types import Role
from memserve.protocol.events import RequestArrived, ToolCalled
from memserve.protocol.messages import AnyMessage, Dispatch
from memserve.protocol.peers import ROUTER, Peer
from memserve_lab.sim.clock import Cores
from memserve_lab.sim.fast_forward import FastForwardInstance
from memserve_lab.sim.nodes import Host, InstanceNode
from memserve_lab.sim.process import Process
from memserve_lab.sim.replay.setup import Setup
from memserve_lab.sim.timed_device import Moments, TimedDevice

SENDS_UNTIL_STALLED = 2
"""How often the router gets tokens of an attempt within the time after which an attempt counts as stalled."""


class ReplayHost(Host, Protocol):
    """A world that replays a workload."""

    @property
    def setup(self) -> Setup:
        """The setup that the world was built from."""

    @property
    def moments(self) -> Moments:
        """When each token was drawn."""


class Balancer:
    """Leads each connection to a router that lives, as a TCP balancer does: by chance. A paused one still gets some."""

    def __init__(self, seed: int) -> None:
        self._random = Random(f"balancer {seed}")
        self._at: dict[str, Process] = {}  # by the request of a connection
        self.routers: Sequence[Process] = ()
        """All of a cluster."""

    def submit_event(self, event: RequestArrived | ToolCalled) -> None:
        """A client opens a connection, and asks; or its edge has read a call."""
        if isinstance(event, ToolCalled):
            self._at[event.request_id].submit_event(event)
            return
        router = self._random.choice([router for router in self.routers if router.alive])
        self._at[event.request.request_id] = router
        router.submit_event(event)

    def requests_at(self, router: Process) -> list[str]:
        """All requests that came to ``router``."""
        return [request_id for request_id, place in self._at.items() if place is router]


class ReplayNode(InstanceNode):
    """An instance whose machine skips like steps: while it can only draw further tokens, no event is posted to it.

    The moments at which its steps end are known in advance (``_ends_ns``). Before any event ahead of the last of them,
    :meth:`catch_up` fast-forwards the machine over all steps that have ended by then.

    Tokens reach the router late, and the client reads from them when they were drawn (``timed_device.Moments``). The
    router needs tokens when an attempt fails, and measures how long it has had none. So it gets them all before the
    instance is cancelled, and often enough that no attempt seems to stall (:meth:`send_tokens`).

    An instance with a planned kill or pause does none of this: its last message decides when that is noticed.
    """

    host: ReplayHost
    device: TimedDevice

    def __init__(self, host: ReplayHost, name: str, role: Role, place: int, cores: Cores | None) -> None:
        self._cores = cores
        self.fast_forwards = host.setup.fast_forwards and not any(
            fault.stops_process(name) for fault in host.setup.faults
        )
        super().__init__(host, name, role, place)

    def boot_process(self) -> None:
        self._turn = 0
        self._begun_ns = self._end_ns = 0  # of the step under way
        self._beat_ns = 0
        self._sent_ns = 0
        self._ends_ns: list[int] = []  # of the step under way and later ones, while it skips steps
        super().boot_process()

    # -- step by step

    def _start_step(self) -> None:
        if self._working or not self.plans:
            return
        self._working = True
        plan, now = self.plans[0], self.host.clock.now
        spent_ns = self.device.step_ns(plan)
        if self._cores is not None:
            self._share_cores(self._cores, spent_ns)
            return
        self._begun_ns = self._end_ns = now
        self._run_layers(plan, spent_ns)

    def _end_later(self, rest_ns: int) -> None:
        self._await_end(self._begun_ns, self.host.clock.now + rest_ns)

    def _share_cores(self, cores: Cores, spent_ns: int) -> None:
        plan, beside = self.plans[0], self.host.setup.around.beside or (1.0, 1.0)
        only_decodes = sum(plan.counts) == len(plan.counts)
        life = self.life
        cores.start_job(
            spent_ns, beside[only_decodes], lambda: self.call_later(0, self._finish_step) if self.life == life else None
        )  # fmt: skip

    def _await_end(self, begun_ns: int, end_ns: int) -> None:
        self._begun_ns, self._end_ns = begun_ns, end_ns
        self._turn += 1
        self.call_later(end_ns - self.host.clock.now, self._end_turn, self._turn)

    def _end_turn(self, turn: int) -> None:
        if turn == self._turn:
            self._finish_step()

    def on_message(self, sender: Peer, message: AnyMessage) -> None:
        if not isinstance(message, Dispatch) and self._is_router(sender):
            self.send_tokens()  # the message may make the machine drop them
        super().on_message(sender, message)

    def _is_router(self, sender: Peer) -> bool:
        link = self.machine.link
        return sender.name == ROUTER or (link is not None and link.routers.is_follower(sender))

    def post_event(self, event: object) -> None:
        self.catch_up()
        super().post_event(event)
        if self._working:
            self._look_ahead()

    def member_ticks(self) -> None:
        self.catch_up()
        now = self.host.clock.now
        if now - self._sent_ns >= self.host.setup.cluster.stalled_after_ns // SENDS_UNTIL_STALLED:
            self.send_tokens()
        self._beat_ns = now + self.host.member_config.beat_ns  # a heartbeat interrupts the steps
        super().member_ticks()
        self._look_ahead()

    def send_tokens(self) -> None:
        """Send the routers all tokens drawn by now."""
        self.catch_up()
        self._sent_ns = self.host.clock.now
        machine = self._fast_forward
        for action in machine.take_held_tokens() if machine is not None else ():
            self._perform_action(action)

    # -- many steps at once

    @property
    def _fast_forward(self) -> FastForwardInstance | None:
        return self.machine if isinstance(self.machine, FastForwardInstance) else None

    def _look_ahead(self) -> None:
        machine = self._fast_forward
        if self._ends_ns or not self._working or machine is None or self._cores is not None:
            return
        ahead = machine.steps_ahead()
        if ahead < 2:
            return
        plan, end_ns = self.plans[0], self._end_ns
        rows = len(plan.slots)
        fair = 2 + max(0, self._beat_ns - end_ns) // self.device.spent_ns
        ends_ns = [end_ns]
        for spent_ns in self.device.decode_steps_ns(rows, sum(plan.starts) + 2 * rows, min(ahead - 1, fair)):
            end_ns += spent_ns
            ends_ns.append(end_ns)
        deadline_ns = self.machine.next_deadline_ns
        if deadline_ns is not None:
            del ends_ns[bisect_right(ends_ns, deadline_ns - self.skew_ns) :]
        if len(ends_ns) > 1:
            self._ends_ns = ends_ns
            self._turn += 1
            self.call_later(ends_ns[-1] - self.host.clock.now, self._end_skip, self._turn)

    def _end_skip(self, turn: int) -> None:
        if turn == self._turn:
            self.catch_up()
            self._look_ahead()

    def catch_up(self) -> None:
        """Fast-forward the machine over the steps that have ended by now; the step under way goes on."""
        machine = self._fast_forward
        if not self._ends_ns or machine is None:
            return
        ends_ns, self._ends_ns = self._ends_ns, []
        steps = bisect_right(ends_ns, self.host.clock.now)
        begun_ns = self._begun_ns if not steps else ends_ns[steps - 1]
        if steps:
            spent_ns = begun_ns - self._begun_ns
            steps_ns = [end - begin for begin, end in itertools.pairwise((self._begun_ns, *ends_ns[:steps]))]
            machine.fast_forward(self.host.moments.add_moment(ends_ns[:steps]), steps_ns)
            for plan in self.plans:
                plan.step_id += steps
                plan.starts = [start + steps for start in plan.starts]
            self.device.busy_ns += spent_ns
        plan = self.plans[0]
        if steps < len(ends_ns):
            end_ns = ends_ns[steps]
        else:
            rows = len(plan.slots)
            end_ns = begun_ns + self.device.decode_steps_ns(rows, sum(plan.starts) + rows, 1)[0]
        self.device.spent_ns = end_ns - begun_ns
        self._await_end(begun_ns, end_ns)
