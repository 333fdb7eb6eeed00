"""All routers of the fuzzed world: the owner, and followers that may die; which of them each client asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Protocol

from memserve.cluster.asking import AskingController
from memserve.config import ClusterConfig, MemberConfig
from memserve.follower.machine import Follower
from memserve.messages import Cancel, Dispatch, Peer
from memserve.serving import RequestArrived, RequestCancelled, Send, SequenceStopped
from memserve.sim.fuzz import checks, store_checks
from memserve.sim.fuzz.clients import Ask, Referee
from memserve.sim.fuzz.gate import guest_name
from memserve.sim.fuzz.instances import FuzzedInstance, FuzzHost
from memserve.sim.fuzz.keyed import KeyedClients
from memserve.sim.fuzz.router import FuzzedRouter
from memserve.sim.fuzz.scenario import MS, Scenario
from memserve.sim.fuzz.stores import FuzzedStore
from memserve.sim.fuzz.truth import require
from memserve.sim.nodes import FollowedHost, FollowerNode, RouterNode
from memserve.units import NS_PER_S

ANSWER_NS = 1500 * MS
"""How long routers and instances keep answers."""


def cluster_config(scenario: Scenario) -> ClusterConfig:
    """Of every router."""
    return ClusterConfig(
        caching=scenario.setting.caching,
        policy=scenario.policy,
        transfer=scenario.setting.transfer,
        dead_after_ns=NS_PER_S,
        call_every_ns=200 * MS,
        stalled_after_ns=4 * NS_PER_S,
        attempts_max=4,
        unplaced_ns=6 * NS_PER_S,
        tree_ttl_ns=20 * NS_PER_S,
        speculative_ttl_ns=NS_PER_S,
        admission=scenario.admission,
        answer_ns=ANSWER_NS,
    )


def new_follower(scenario: Scenario, node: FollowerNode, owners: tuple[str, ...], member: MemberConfig) -> Follower:
    """The production machine of a follower."""
    return Follower(node.info(), owners, cluster_config(scenario), member)


class Host(FuzzHost, FollowedHost, Protocol):
    """A world with clients and routers."""

    referee: Referee
    keyed: KeyedClients
    instances: list[FuzzedInstance]
    store: FuzzedStore | None
    stalled: Counter[Peer]
    """Attempts that looked so to each router."""

    @property
    def router(self) -> FuzzedRouter:
        """The owner."""

    def next_turn(self, ask: Ask) -> None:
        """A client waits for nothing more, and asks something else later."""


class Routers:
    """The owner and the followers, behind something like a TCP balancer: each connection goes to any of them."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._random = Random(f"balancer {host.scenario.seed} {host.scenario.setting}")
        self._at: dict[str, FuzzedRouter | FollowerNode] = {}  # by the name of a connection
        self.followers = [FollowerNode(host, f"router-{number}") for number in range(2, 2 + host.scenario.followers)]
        for node in self.followers:
            host.network.nodes[node.peer.name] = node

    def at(self, connection: str) -> FuzzedRouter | FollowerNode:
        """The router of a connection."""
        return self._at.get(connection, self._host.router)

    def next_for(self, connection: str) -> FuzzedRouter | FollowerNode:
        """The router to which the balancer leads a new connection."""
        if connection not in self._at and self.followers:
            able: list[FuzzedRouter | FollowerNode] = [
                self._host.router,
                *(node for node in self.followers if node.alive),
            ]
            self._at[connection] = self._random.choice(able)
        return self.at(connection)

    def submit(self, event: object) -> None:
        """A client, or an operator at the owner, does something."""
        match event:
            case RequestArrived(request):
                self.next_for(request.request_id).submit(event)
            case RequestCancelled(name) | SequenceStopped(name, _):
                self.at(name).submit(event)
            case _:
                self._host.router.submit(event)

    def owner_dies(self) -> None:
        """It restarts at once; its clients get an error from the network, and ask again or something else later."""
        self._host.router.restart()
        self._break_off(self._host.router)

    def follower_dies(self, which: int) -> FollowerNode | None:
        """Its clients get an error from the network. Returns it. None: it is dead already, or there is none."""
        node = self.followers[which % len(self.followers)] if self.followers else None
        if node is None or not node.alive:
            return None
        node.kill()
        self._break_off(node)
        return node

    def _break_off(self, node: FuzzedRouter | FollowerNode) -> None:
        for ask in list(self._host.referee.asks.values()):
            connection = self._host.keyed.connection(ask.request.request_id)
            if ask.over or self.at(connection) is not node or self._host.keyed.router_died(ask):
                continue
            ask.lost = True
            self._host.next_turn(ask)

    def attempts_of(self, attempt_id: str) -> int:
        """How many attempts the request of this one has had. 0: no router knows it."""
        for machine in (self._host.router.machine, *(node.machine.cluster for node in self.followers)):
            req = machine._lifecycle.requests.by_attempt.get(attempt_id)
            if req is not None:
                return len(req.past) + 1
        return 0

    def achievements(self) -> Counter[str]:
        """What the followers have gone through."""
        done = Counter[str]()
        for node in self.followers:
            counters = node.machine.cluster.stats().counters
            done.update({"followers: dispatches": counters.dispatches, "followers: adopted": counters.attempts_adopted})
            done.update({"followers: finished": counters.requests_finished})
            done.update({"followers: sequences shared": counters.sequences_split})
            done.update({"followers: attempts refused": counters.attempts_failed.get("refused", 0)})
            done.update({"followers: outrun": counters.attempts_failed.get("outrun", 0)})
            admission = node.machine.cluster.stats().admission
            done.update({"followers: admitted": admission.admitted})
            done.update({f"followers: {cause} rejected": count for cause, count in admission.rejected.items()})
        return done

    def check_at_rest(self, has_events: bool) -> None:
        """Followers know exactly what instances cache, and keep nothing of requests that have ended."""
        host = self._host
        guests = host.router.machine._lifecycle.guests.by_id
        require(not guests, f"the owner counts requests of followers that have ended: {guests}")
        for node in self.followers:
            name = node.peer.name
            require(node.alive and not node.paused, f"{name} was not put right")
            stores = [] if host.store is None else [host.store]
            checks.check_at_rest(node.machine.cluster, host.instances, stores, has_events)
            for store in stores:
                store_checks.check_tree(node.machine.cluster, store)
            require(not node.machine.cluster.stats().requests_live, f"{name} has requests that do not end")
            require(not len(node.machine.cluster.answers), f"{name} keeps answers for ever")
            if not host.scenario.faults:
                failed = node.machine.cluster.stats().counters.attempts_failed
                require(
                    failed.keys() <= {"refused", "outrun", "stalled"},
                    f"{name}: attempts failed in a healthy world: {failed}",
                )
        for instance in host.instances:
            link = instance.machine.link
            require(link is None or not link.routers.alone, f"{instance.peer.name} has requests that no router wants")


def check_stalls(host: Host, node: RouterNode | FollowerNode, actions: Sequence[object]) -> None:
    """In a healthy world what looks like a stalled attempt only waits for long, behind others or for many pulls: an
    instance has it, and for this router."""
    cluster = node.machine.cluster if isinstance(node, FollowerNode) else node.machine
    stalled = cluster._counters.attempts_failed.get("stalled", 0)
    if host.scenario.faults or stalled == host.stalled[node.peer]:
        return
    host.stalled[node.peer] = stalled
    for action in actions:
        if isinstance(action, Send) and isinstance(action.message, Cancel):
            name = action.message.request_id
            machines = [one.machine for one in host.instances if name in one.machine.state.groups]
            waits = any(machine.link is None or machine.link.routers.is_of(name, node.peer) for machine in machines)
            require(waits, f"{node.peer.name} waits for {name} in a healthy world, and no instance has it for that")


def check_dispatches(host: Host, node: FollowerNode, actions: Sequence[object]) -> None:
    """The owner counts what a follower dispatches, as granted: no other request has got its place meanwhile.

    A new owner that has no records, or none of this follower, does not know what it admits beside. Nor does one
    whose clock goes forward: monotonic clocks do not.
    """
    lifecycle, happened = host.router.machine._lifecycle, host.happened
    admission, guests = lifecycle.admission, lifecycle.guests.by_id
    asking = node.machine.cluster._lifecycle.admission
    forgets = not host.scenario.remembers and (happened["router-restart"] or happened["router-power"])
    excused = forgets or happened["router-clock-jump"] or happened["disk-full"]
    if not isinstance(asking, AskingController) or admission.is_closed or excused:
        return
    for action in actions:
        if isinstance(action, Send) and isinstance(action.message, Dispatch):
            name = action.message.request.request_id.partition("#")[0]
            numbers = [one.number for one in asking._by_number.values() if one.req.request_id == name]
            known = [guests.get(guest_name(node.peer, number)) for number in numbers]
            counted = [req for req in known if req is not None and req.request_id in admission._active]
            require(bool(counted), f"{node.peer.name} dispatches {name}, which the owner does not count")
