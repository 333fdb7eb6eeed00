"""Processes of a cluster as Ray actors: Ray places them, and starts them again where there is room when they die.

::

    driver (memserve serve --on ray)
      controller actor, on the driver's node --> router actor, on the same node: clients know its address
                                             --> instance and store actors, in placement groups, on any node

An actor keeps one ordinary process (``memserve serve``, ``instance``, ``store``) and dies with it; the process dies
with its actor. Which of them are members is memserve's own protocol: Ray is asked for places and for restarts alone.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import signal
import subprocess
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memserve.base.errors import UserError, check
from memserve.system.process import DIES_WITH, HealthState, module_command

NAMESPACE, CONTROLLER = "memserve", "memserve-controller"
PLACE_S = 60.0
"""How long Ray may take to find room."""
START_S = 600.0
"""How long a process may take until it is a member."""
FREE_S = 5.0
"""Until a controller whose process was killed is surely gone."""
LIVES_MAX = 4
"""Of one actor, until it is a member: a process that its node does not suit ends again and again."""
END_S = 30.0
"""Beyond its patience, until a process that drains is ended."""
_LOOK_S = 0.2
_ANSWER_S = 5.0
_CALLS = 8
"""Of a controller at once: one that scales takes its time."""
_ROUTER_CALLS = 128
"""The same, where each of several routers waits for the members."""
SILENCE_S = 30.0
"""Of all further routers, until their cluster ends."""
RETURN_S = 10.0
"""For the next router to come, when the last one has left."""
ROUTER = "router"


@dataclass(frozen=True)
class ProcessOrder:
    """One process: what ``memserve`` is told, and what it runs with."""

    name: str
    words: tuple[str, ...]
    secret: str = field(repr=False)
    """The cluster's; the process reads it from a pipe."""
    drain_s: float
    cwd: str | None = None
    """None: wherever the actor runs."""
    scales: bool = False
    """It decides how many instances there are to be."""
    env: Mapping[str, str] = field(default_factory=dict, repr=False)


class ProcessActor:
    """An actor with one process. What it prints is in the log of Ray's worker."""

    def __init__(self, order: ProcessOrder) -> None:
        self._order, self._run_id = order, secrets.token_hex(8)
        self._ends = False
        self._folder = tempfile.TemporaryDirectory(prefix="memserve-ray-")
        self._health = Path(self._folder.name) / "health"
        readable, writable = os.pipe()
        with os.fdopen(writable, "w") as pipe:
            pipe.write(order.secret)
        words = [*order.words, "--cluster-secret-file", f"/dev/fd/{readable}"]
        self._decisions = Path(self._folder.name) / "scale.json"
        if order.scales:
            words += ["--scale-file", str(self._decisions)]
        if order.name != ROUTER:
            words += ["--name", _process_name(order), "--health-file", str(self._health)]
        self._process = subprocess.Popen(
            module_command("memserve", *words, cwd=order.cwd),
            cwd=order.cwd,
            env={**os.environ, **order.env, DIES_WITH: str(os.getpid())},
            pass_fds=[readable],
            stdin=subprocess.DEVNULL,
        )
        os.close(readable)
        threading.Thread(target=self._watch_process, daemon=True).start()

    def _watch_process(self) -> None:
        """End with the process, so that Ray starts the actor again; and with the raylet, whose worker this is: it may
        be killed, and its workers live on, while Ray starts others in their place."""
        raylet_pid = os.getppid()
        while self._process.poll() is None:
            time.sleep(_LOOK_S)
            if os.getppid() != raylet_pid:
                os._exit(1)
        if not self._ends:
            os._exit(1)

    def standing(self) -> tuple[str, bool]:
        """A name of this life of the actor, and whether a router has accepted its process, by the health file."""
        try:
            return self._run_id, self._health.read_text().strip() == HealthState.MEMBER.value
        except OSError:
            return self._run_id, False

    def decisions(self) -> dict[str, dict[str, Any]]:
        """What its policy has decided last, by role, as ``--scale-file`` says."""
        try:
            last_decisions: dict[str, dict[str, Any]] = json.loads(self._decisions.read_text())
            return last_decisions
        except OSError:
            return {}

    def pid(self) -> int:
        """The process's."""
        return self._process.pid

    def drain(self, patience_s: float) -> int:
        """End the process in good order, for ``patience_s`` at most; its exit status."""
        self._ends = True
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(patience_s + END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


@dataclass(frozen=True)
class ClusterPlace:
    """Where a further router joins."""

    join: str
    """``HOST:PORT``."""
    secret: str = field(repr=False)
    owner_url: str = ""


@dataclass(frozen=True)
class ClusterPlan:
    """What a controller starts."""

    router: ProcessOrder | None
    """None: it runs elsewhere."""
    members: Mapping[str, ProcessOrder]
    """By role: the order of each, but for its name."""
    counts: Mapping[str, int]
    resources: Mapping[str, Mapping[str, float]]
    """By role: what Ray reserves for each, ``CPU``, ``GPU`` or a resource of the nodes' own."""
    name: str = ""
    """Of the cluster, among those on this Ray."""
    place: ClusterPlace | None = None
    """For routers that come and go, and with the last of which the cluster ends. None: it ends when it is told to."""


class Controller:
    """Starts, scales and ends the actors of one cluster. An actor itself, so that ``memserve scale`` finds it; its
    calls run in threads."""

    def __init__(self, plan: ClusterPlan) -> None:
        self._plan = plan
        self._lock, self._ends = threading.Lock(), threading.Event()
        self._decided: dict[str, str] = {}
        self._actors: dict[str, dict[str, Any]] = {role: {} for role in plan.members}
        self._groups: dict[str, Any] = {}
        self._router: Any = None
        self._starting, self._is_started = threading.Lock(), False
        self._heard_s: dict[str, float] = {}
        self._alone_since_s = time.monotonic()
        if plan.place is not None:
            threading.Thread(target=self._watch_routers, args=(plan.place,), daemon=True).start()

    def open_place(self, router: str) -> ClusterPlace:
        """Where the further router of this name joins; the first one has everything started. Raises
        :class:`UserError` without room."""
        check(self._plan.place is not None, "the cluster takes no further routers")
        self.hear_router(router)
        with self._starting:
            if not self._is_started:
                self.start()
                self._is_started = True
        assert self._plan.place is not None
        return self._plan.place

    def hear_router(self, router: str) -> None:
        """A further router lives."""
        self._heard_s[router] = time.monotonic()

    def forget_router(self, router: str) -> None:
        """A further router has ended; another one may come in its place."""
        self._heard_s.pop(router, None)
        self._alone_since_s = time.monotonic() - SILENCE_S + RETURN_S

    def _watch_routers(self, place: ClusterPlace) -> None:
        """End everything, and this actor, when no further router is heard any more."""
        while not self._ends.wait(_LOOK_S):
            if time.monotonic() - max(self._alone_since_s, *self._heard_s.values(), 0.0) > SILENCE_S:
                break
            if self._is_started and self._plan.router is not None and self._plan.router.scales:
                with suppress(UserError):  # without room everything stays as it is
                    self.follow()
        with suppress(Exception):  # whatever state it is in
            self.stop()
        os._exit(0)

    def start(self) -> None:
        """Start the router, then all members; returns before they are ready. Raises :class:`UserError` without room."""
        import ray

        _remove_left_groups(self._plan.name)
        if self._plan.router is not None:
            self._router = ray.remote(ProcessActor).options(
                num_cpus=0, max_restarts=-1, scheduling_strategy=on_this_node()
            ).remote(self._plan.router)  # fmt: skip
        with self._lock:
            for role, count in self._plan.counts.items():
                self._add_actors(role, count)

    def scale(self, counts: Mapping[str, int]) -> dict[str, list[str]]:
        """Come to ``counts`` members of each role named there: new ones are members when this returns, and those that
        are too many have drained. Returns all names by role. Raises :class:`UserError`; then there are as many as
        before."""
        for role in counts:
            if role not in self._actors:
                roles = ", ".join(self._actors)
                raise UserError(f"this cluster has no {role}", hint=f"its roles: {roles}", param="counts")
        with self._lock:
            if self._ends.is_set():
                return self.names()
            before = {role: len(self._actors[role]) for role in counts}
            try:
                for role, count in counts.items():
                    self._add_actors(role, count - before[role])
                self.wait_members()
            except UserError:
                for role, count in before.items():
                    self._remove_actors(role, len(self._actors[role]) - count, patience_s=0.0)
                raise
            for role, count in counts.items():
                self._remove_actors(role, len(self._actors[role]) - count)
            return self.names()

    def follow(self) -> dict[str, list[str]] | None:
        """Carry out what the router's policy has decided since the last call, as :meth:`scale` does. None: nothing."""
        import ray

        try:
            decisions = ray.get(self._router.decisions.remote(), timeout=_ANSWER_S)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            return None  # it is being started again
        new = {
            role: decision for role, decision in decisions.items() if self._decided.get(role) != decision["decision"]
        }
        self._decided |= {role: decision["decision"] for role, decision in new.items()}
        return self.scale({role: decision["instances"] for role, decision in new.items()}) if new else None

    def names(self) -> dict[str, list[str]]:
        """All members by role."""
        return {role: list(actors) for role, actors in self._actors.items()}

    def wait_members(self) -> None:
        """Wait until every member has joined. Raises :class:`UserError` when one has not by then, or ends again and
        again before it has."""
        deadline, lives = time.monotonic() + START_S, defaultdict[str, set[str]](set)
        hint = "Ray's dashboard, or `ray logs`, has what they print"
        while absent_names := [name for name, actor in self._all_actors() if not _is_member(actor, lives[name])]:
            if self._ends.is_set():
                return
            for name in absent_names:
                if len(lives[name]) >= LIVES_MAX:
                    raise UserError(f"{name} has ended {LIVES_MAX - 1} times before it was a member", hint=hint)
            if time.monotonic() > deadline:
                raise UserError(f"{', '.join(absent_names)}: no member after {START_S:.0f} s", hint=hint)
            time.sleep(_LOOK_S)

    def stop(self) -> int:
        """End all processes in good order, the router first; its exit status."""
        import ray

        self._ends.set()
        status = 0
        if self._plan.router is not None:
            status = ray.get(self._router.drain.remote(self._plan.router.drain_s))
            ray.kill(self._router)
        with self._lock:
            for role, actors in self._actors.items():
                self._remove_actors(role, len(actors), patience_s=0.0)
        return int(status)

    def _all_actors(self) -> list[tuple[str, Any]]:
        return [pair for actors in self._actors.values() for pair in actors.items()]

    def _add_actors(self, role: str, count: int) -> None:
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if count <= 0:
            return
        actors, needs = self._actors[role], dict(self._plan.resources[role])
        label = f"{_groups_of(self._plan.name)}{role}-{secrets.token_hex(4)}"
        group = placement_group([needs] * count, strategy="SPREAD", name=label)
        if not group.wait(PLACE_S):
            remove_placement_group(group)
            text = ", ".join(f"{name} {amount:g}" for name, amount in needs.items())
            hint = "add nodes, ask for fewer, or for less with --ray-resources"
            raise UserError(f"Ray has no room for {count} more {role} with {text} each", hint=hint)
        own_resources = {name: amount for name, amount in needs.items() if name not in ("CPU", "GPU")}
        free = (f"{role[0]}{number}" for number in range(1, 1 << 20) if f"{role[0]}{number}" not in actors)
        for bundle, name in zip(range(count), list(_take_names(free, count)), strict=True):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
            order = self._plan.members[role]
            named_order = dataclasses.replace(order, name=name)
            actors[name] = ray.remote(ProcessActor).options(
                num_cpus=needs.get("CPU", 0), num_gpus=needs.get("GPU", 0), resources=own_resources, max_restarts=-1,
                scheduling_strategy=place,
            ).remote(named_order)  # fmt: skip
            self._groups[name] = group

    def _remove_actors(self, role: str, count: int, patience_s: float | None = None) -> None:
        """Those that came last; they drain side by side."""
        import ray
        from ray.util.placement_group import remove_placement_group

        actors = self._actors[role]
        patience_s = self._plan.members[role].drain_s if patience_s is None else patience_s
        leaving = list(actors)[len(actors) - count :] if count > 0 else []
        ends = [actors[name].drain.remote(patience_s) for name in leaving]
        ray.wait(ends, num_returns=len(ends), timeout=patience_s + 2 * END_S) if ends else None
        for name in leaving:
            ray.kill(actors.pop(name))
            group = self._groups.pop(name)
            if group not in self._groups.values():
                remove_placement_group(group)


def _groups_of(cluster: str) -> str:
    """How names of the placement groups of one cluster begin, and of no other one."""
    return f"memserve/{cluster}/"


def _remove_left_groups(cluster: str) -> None:
    """What a controller of this name before this one has reserved and left: Ray keeps it while the job lives that had
    made that controller, and Ray Serve's lives on."""
    import ray
    from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

    for group in placement_group_table().values():
        if group["name"].startswith(_groups_of(cluster)) and group["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group["placement_group_id"]))))


def _process_name(order: ProcessOrder) -> str:
    """Of an instance: another one in each life. Where a node is lost from sight, its processes may live on beside those
    that were started in their place, and of two with one name each would have the other expelled. A store keeps its
    name: what it has left is found by it."""
    return order.name if order.words[0] == "store" else f"{order.name}-{secrets.token_hex(2)}"


def _take_names(names: Any, count: int) -> list[str]:
    return [next(names) for _ in range(count)]


def _is_member(actor: Any, lives: set[str]) -> bool:
    """Whether its process is one, by the actor; one that is being started again says nothing. Its life is added to
    ``lives``."""
    import ray

    try:
        life, is_member = ray.get(actor.standing.remote(), timeout=_ANSWER_S)
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
        return False
    lives.add(life)
    return bool(is_member)


def on_this_node() -> Any:
    """Where this process is, and nowhere else."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def controller_name(cluster: str) -> str:
    """Of the actor that starts, scales and ends a cluster."""
    return f"{CONTROLLER}-{cluster}" if cluster else CONTROLLER


def clusters_here() -> list[str]:
    """The names of the clusters of memserve on this Ray."""
    from ray.util import list_named_actors

    entries = list_named_actors(all_namespaces=True)
    names = [entry["name"] for entry in entries if entry["namespace"] == NAMESPACE]
    return sorted(name.removeprefix(CONTROLLER).removeprefix("-") for name in names if name.startswith(CONTROLLER))


def shared_controller(plan: ClusterPlan) -> Any:
    """The controller of the plan's name, which is made where there is none: it outlives the process that has made it,
    and ends with the last further router (:class:`ClusterPlace`)."""
    import ray

    return ray.remote(Controller).options(
        name=controller_name(plan.name), namespace=NAMESPACE, num_cpus=0, scheduling_strategy=on_this_node(),
        max_restarts=0, max_concurrency=_ROUTER_CALLS, lifetime="detached", get_if_exists=True,
    ).remote(plan)  # fmt: skip


def new_controller(plan: ClusterPlan, wait_s: float = FREE_S) -> Any:
    """A controller on this node. It belongs to this process, and ends with it, however that ends. Raises
    :class:`UserError` when another of the plan's name is there and has not ended in ``wait_s``."""
    import ray

    deadline = time.monotonic() + wait_s
    while True:
        try:
            return ray.remote(Controller).options(
                name=controller_name(plan.name), namespace=NAMESPACE, num_cpus=0, scheduling_strategy=on_this_node(),
                max_restarts=0, max_concurrency=_CALLS,
            ).remote(plan)  # fmt: skip
        except ValueError:  # the name is taken
            if time.monotonic() > deadline:
                which = f"a cluster of memserve called {plan.name}" if plan.name else "another cluster of memserve"
                hint = "give this one a name of its own: --ray-cluster NAME; or change that one with `memserve scale`"
                raise UserError(f"{which} runs on this Ray", hint=hint, param="ray_cluster") from None
            time.sleep(_LOOK_S)
