"""Clients that name their requests, lose their connections and their router, and ask again with the same name.

What they have got is forgotten with the connection, and judged anew on the next: the answer must be the undisturbed one
from its beginning, and a connection gets nothing that is meant for another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from msgspec import structs

from memserve.base.types import Request, TokenOutput
from memserve.protocol.events import RequestArrived, RequestCancelled
from memserve.router.requests.idempotency import TAKEN_OVER
from memserve_lab.sim.clock import Clock
from memserve_lab.sim.fuzz.clients import Ask, OutputChecker
from memserve_lab.sim.fuzz.scenario import MS, Scenario
from memserve_lab.sim.nodes import InstanceNode, RouterNode
from memserve_lab.sim.reference.oracle import require


class Balancer(Protocol):
    """Leads clients to a router."""

    def submit_event(self, event: object) -> None:
        """A client does something."""


class Host(Protocol):
    """A world with such clients."""

    scenario: Scenario
    clock: Clock
    referee: OutputChecker

    @property
    def router(self) -> RouterNode:
        """The owner."""

    @property
    def routers(self) -> Balancer:
        """All routers."""

    def log_line(self, line: str, detail: object = "") -> None:
        """One line of the story."""

    def next_turn(self, ask: Ask) -> None:
        """A client waits for nothing more, and asks something else later."""


@dataclass(eq=False, slots=True)
class _Client:
    """One request, and the connection by which its client reads the answer."""

    ask: Ask
    connection: str
    """Its name; empty: there is none now."""
    connections: int = 1


class KeyedClients:
    """All of them. Without ``Scenario.keyed`` there are none, and everything passes."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._random = Random(f"keys {host.scenario.seed} {host.scenario.setting}")
        self._clients: dict[str, _Client] = {}
        self.are_more = host.scenario.keyed
        """Whether clients that ask for the first time do it with keys."""
        self.returns = 0
        """Times that a client has come again."""
        """Times that its last connection lost the answer to an earlier one at another router."""

    def name_request(self, request: Request) -> Request:
        """The request of a client that asks for the first time, with a key."""
        if not self.are_more:
            return request
        ask = self._host.referee.asks[request.request_id]
        ask.request = structs.replace(request, key=f"key of {request.request_id}", asked="its body", created_s=1)
        client = self._clients[request.request_id] = _Client(ask, request.request_id)
        for _ in range(self._random.choice([0, 1, 1, 2])):
            after_ns = self._random.choice([self._random.randint(0, 30), self._random.randint(0, 300)]) * MS
            behaviour = self._random.choice(
                [self._lose_connection, self._lose_connection, self._ask_twice, self._goes_for_good]
            )
            self._host.clock.call_after(after_ns, behaviour, client)
        return ask.request

    def connection_of(self, request_id: str) -> str:
        """The name by which the router knows a request now."""
        client = self._clients.get(request_id)
        return client.connection if client is not None else request_id

    # -- what clients do

    def _lose_connection(self, client: _Client) -> None:
        """Its connection breaks; the server notices it or not."""
        if client.ask.over or not client.connection:
            return
        self._host.log_line(f"client of {client.connection} loses its connection")
        closed, client.connection = client.connection, ""
        if self._random.random() < 0.6:
            self._host.routers.submit_event(RequestCancelled(closed))
        self._comes_again_later(client)

    def _ask_twice(self, client: _Client) -> None:
        """It asks again although its connection is fine."""
        if not client.ask.over and client.connection:
            self._comes_again(client)

    def _goes_for_good(self, client: _Client) -> None:
        if client.ask.over or not client.connection or self._random.random() < 0.7:
            return
        self._host.log_line(f"client of {client.connection} goes, and never comes again")
        closed, client.connection, client.ask.lost = client.connection, "", True
        self._host.routers.submit_event(RequestCancelled(closed))
        self._host.next_turn(client.ask)

    def _comes_again_later(self, client: _Client) -> None:
        self._host.clock.call_after(self._random.choice([0, 5, 50, 400, 1800]) * MS, self._ask_again, client)

    def _ask_again(self, client: _Client) -> None:
        if not client.ask.over and not client.connection:
            self._comes_again(client)

    def _comes_again(self, client: _Client) -> None:
        ask = client.ask
        self.returns += 1
        client.connection = f"{ask.request.request_id}~{client.connections}"
        client.connections += 1
        ask.starts_over()
        self._host.log_line(f"client asks again, as {client.connection}")
        self._host.routers.submit_event(RequestArrived(structs.replace(ask.request, request_id=client.connection)))

    # -- what the router says

    def on_received(self, output: TokenOutput) -> TokenOutput | None:
        """What the router gives to a connection, under the client's own name for its request; ``None``: the client has
        closed it."""
        client = self._clients.get(client_of(output.request_id))
        if client is None:
            return output
        if output.request_id != client.connection:
            return None
        return structs.replace(output, request_id=client.ask.request.request_id)

    def turned_away(self, connection: str, reason: str) -> str | None:
        """The router rejects a connection: the name of the client's request; ``None``: it has another one, or none."""
        client = self._clients.get(client_of(connection))
        if client is None:
            return connection
        if connection == client.connection:
            if reason == TAKEN_OVER and self._host.scenario.followers:
                # asked for before, at another router, and heard of later by the instance: the client tries again
                client.connection = ""
                self._comes_again_later(client)
                return None
            require(reason != TAKEN_OVER, f"{connection}: no other connection was made after it")
            return client.ask.request.request_id
        return None

    def router_died(self, ask: Ask) -> bool:
        """Whether the client of ``ask`` comes again."""
        client = self._clients.get(ask.request.request_id)
        if client is None:
            return False
        if client.connection:
            client.connection = ""
            self._comes_again_later(client)
        return True

    def count_achievements(self) -> Counter[str]:
        """How often clients have come again."""
        return Counter({"keyed: returns": self.returns} if self.returns else {})

    def check_at_rest(self, instances: Sequence[InstanceNode]) -> None:
        """Nothing is kept for ever."""
        require(not len(self._host.router.machine.answers), "the router keeps answers for ever")
        for node in instances:
            link = node.machine.link
            require(link is None or not len(link.replay_buffer), f"{node.peer.name} keeps answers for ever")


def client_of(name: str) -> str:
    """The client's name for the request of a connection, or of an attempt."""
    return name.partition("#")[0].partition("~")[0]
