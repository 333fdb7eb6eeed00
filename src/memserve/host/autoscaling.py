"""Counts of instances that follow the load: a thread that looks once a second, and what carries its decisions out.

::

    RouterEngine.stats --look--> Scaling --ScaleRole--> LocalInstances: the supervisor of this host starts, drains, ends
                                                   \\--> DecisionFile: Ray's controller, or another supervisor, does
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from memserve.base.deployment import ScalingOptions
from memserve.base.errors import UserError
from memserve.base.types import Role
from memserve.base.units import NS_PER_S
from memserve.host.router import RouterEngine
from memserve.host.stats import RouterStats
from memserve.host.supervisor import Supervisor
from memserve.router.members.autoscaling import LOOK_NS, ClusterLook, MemberLook, ScaleRole, Scaling
from memserve.system.loop import EngineStopped

log = logging.getLogger(__name__)

START_S = 600.0
"""How long a new instance may take until it is a member."""
DRAIN_S = 300.0
"""How long an instance that is too many may finish what it has; what is left goes on elsewhere."""
_LOOK_S = 0.1

Perform = Callable[[Mapping[Role, int]], object]


class LocalInstances:
    """The instances that this host's supervisor runs."""

    def __init__(self, supervisor: Supervisor, engine: RouterEngine) -> None:
        self._supervisor, self._engine = supervisor, engine
        self._lock = threading.Lock()

    def scale_roles(self, counts: Mapping[Role, int]) -> dict[str, list[str]]:
        """Come to ``counts`` instances of each role named there: new ones are members when this returns, and those that
        were too many have drained. Returns the names of all by role. Raises :class:`UserError`."""
        with self._lock:
            added = [name for role, count in counts.items() for name in self._add_instances(role, count)]
            self._wait_members(added)
            leaving = [name for role, count in counts.items() for name in self._supervisor.names_of(role)[count:]]
            self._drain_instances(leaving)
            return {role.value: self._supervisor.names_of(role) for role in counts}

    def _add_instances(self, role: Role, count: int) -> Iterator[str]:
        for _ in range(count - len(self._supervisor.names_of(role))):
            name = self._supervisor.add_child(role)
            if name is None:
                hint = f"the most that --scale {role.value}=LEAST..MOST allows is what this host has prepared"
                raise UserError(f"no further {role.value} instance can be started here", hint=hint)
            yield name

    def _wait_members(self, names: list[str]) -> None:
        deadline = time.monotonic() + START_S
        while names and not self._engine.wait_for_members(names, 1.0):
            if time.monotonic() > deadline:
                absent_names = ", ".join(name for name in names if name not in self._engine.members())
                hint = "the log says why; it is started again and again"
                raise UserError(f"{absent_names}: no member after {START_S:.0f} s", hint=hint)

    def _drain_instances(self, names: list[str]) -> None:
        """All at once: each finishes what it has, and leaves."""
        for name in names:
            self._supervisor.expect_end_of(name)
            self._engine.drain_member(name)
        deadline, members = time.monotonic() + DRAIN_S, self._engine.members()
        for name in names:  # one that is being started has nothing to finish
            self._supervisor.remove_child(name, max(0.0, deadline - time.monotonic()) if name in members else 0.0)
            self._engine.forget_member(name)  # else the next one of this name would seem to be ready at once


class DecisionFile:
    """The last decision of each role, for whatever starts instances elsewhere: ``{"prefill": {"instances": 2,
    "decision": "1f0c2a"}}``. A decision that has been carried out is known by its name, and need not hold for ever."""

    def __init__(self, path: Path) -> None:
        """Raises :class:`UserError` when no file can be written there."""
        self._path, self._decisions = path, dict[str, dict[str, object]]()
        self._write_file()

    def write_decisions(self, counts: Mapping[Role, int]) -> None:
        """Write ``counts`` down, as new decisions. Raises :class:`UserError`."""
        for role, count in counts.items():
            self._decisions[role.value] = {"instances": count, "decision": secrets.token_hex(8)}
        self._write_file()

    def _write_file(self) -> None:
        draft = self._path.with_name(f".{self._path.name}.{secrets.token_hex(4)}")
        try:
            draft.write_text(json.dumps(self._decisions) + "\n")
            draft.replace(self._path)
        except OSError as error:
            message = f"cannot write {self._path}: {error.strerror or error}"
            hint = "give --scale-file a path in a folder that this user may write to"
            raise UserError(message, hint=hint, param="scale_file") from None


class LastDecisions:
    """Decisions that wait to be carried out: the last one of each role, because earlier ones mean nothing any more."""

    def __init__(self) -> None:
        self._changed, self._closed = threading.Condition(), False
        self._decisions: dict[Role, ScaleRole] = {}

    def put_decision(self, order: ScaleRole) -> None:
        """``order`` replaces another one of its role."""
        with self._changed:
            self._decisions.pop(order.role, None)
            self._decisions[order.role] = order
            self._changed.notify()

    def next_decision(self) -> ScaleRole | None:
        """Wait for the first one, and take it. None: closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._decisions)
            return None if self._closed else self._decisions.pop(next(iter(self._decisions)))

    def close(self) -> None:
        """Nothing more is carried out."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


@contextmanager
def follow_load(
    engine: RouterEngine, options: ScalingOptions, slo_ttft_ns: int | None, perform: Perform, *, counts_gate: bool
) -> Iterator[None]:
    """Follow the load while the context is open. ``perform`` carries decisions out, one after the other, in a thread of
    its own; with ``--scale-file`` they are written there instead. ``counts_gate``: more instances would admit what
    waits for admission."""
    if not options.scale:
        yield
        return
    scaling = Scaling(options, slo_ttft_ns)
    perform = DecisionFile(Path(options.told_in)).write_decisions if options.told_in else perform
    stop_event, orders = threading.Event(), LastDecisions()

    def look() -> None:
        while not stop_event.wait(LOOK_NS / NS_PER_S):
            try:
                stats = engine.stats()
            except TimeoutError:
                continue  # busy: the next look
            except EngineStopped:
                return
            for order in scaling.handle(cluster_look_of(stats, counts_gate=counts_gate), time.monotonic_ns()):
                log.warning("%s", order.text)
                orders.put_decision(order)
            engine.scaling = scaling.role_counts()

    def carry_out() -> None:
        while (order := orders.next_decision()) is not None:
            try:
                perform({order.role: order.target})
            except UserError as error:
                log.warning("%s: %s", order.text, error.message)
            except Exception:  # the next decision may be carried out
                log.exception("%s: not carried out", order.text)

    engine.scaling = scaling.role_counts()
    threads = [
        threading.Thread(target=run, name=f"memserve-scale-{run.__name__}", daemon=True) for run in (look, carry_out)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop_event.set()
        orders.close()
        threads[0].join(_LOOK_S)


def cluster_look_of(stats: RouterStats, *, counts_gate: bool) -> ClusterLook:
    """What the policy needs of a router's statistics."""
    cluster = stats.cluster
    members = tuple(
        MemberLook.from_view(
            member.view,
            member.engine.device_ns if member.engine else 0,
            member.engine.instance if member.engine else None,
        )
        for member in stats.members
        if member.view.role.shares_kv
    )
    if cluster is None:
        return ClusterLook(members)
    gate = sum(cluster.admission.waiting.values()) if counts_gate else 0
    prompts = cluster.prompt_tokens
    return ClusterLook(members, cluster.requests_unplaced + gate, prompts.total, prompts.new)
