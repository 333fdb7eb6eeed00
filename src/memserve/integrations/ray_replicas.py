"""Several replicas of Ray Serve: each is a router of one cluster, and may end without the others.

::

    client -- Ray Serve's proxy -- replica: ASGI application, router --+-- owner: an actor with `memserve serve`
                                -- replica: ASGI application, router --+-- members: one actor each, any node

The controller outlives the replica that has made it; it ends, with all that it has started, when no replica is heard
any more. What one router keeps alone, as documents and sessions, the owner keeps: replicas hand such requests on.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from memserve.cli.cluster.http import app_of
from memserve.cli.cluster.members import ClusterOptions, ServeArguments
from memserve.cli.cluster.ray import RouterPorts, free_port, members_plan, plain_errors, router_order
from memserve.cli.cluster.router import FollowerOptions, card_of, running_router
from memserve.model.loading.lora import read_adapters
from memserve.system.secrets import as_followed
from memserve.transport.network_devices import with_port

if TYPE_CHECKING:
    from memserve.host.ray import ClusterPlan
    from memserve.host.router import RouterEngine

log = logging.getLogger(__name__)

ASGIApp = Callable[[Any, Any, Any], Awaitable[None]]
BEAT_S = 2.0
"""How often a replica says that it lives."""
LOST_S = 30.0
"""How long a replica may be without its owner: that may be started again, and takes it back."""


class _Membership:
    """Whether this replica's router belongs to its cluster."""

    def __init__(self, router: RouterEngine) -> None:
        self._router, self._seen_s = router, time.monotonic()

    def check(self) -> None:
        if self._router.refused:
            raise RuntimeError(f"the owner refuses this router: {self._router.refused}")
        if self._router.is_member:
            self._seen_s = time.monotonic()
        if time.monotonic() - self._seen_s > LOST_S:
            raise RuntimeError(f"this router has had no owner for {LOST_S:.0f} s")


_memberships: list[_Membership] = []
"""Of this process: one, while it runs a replica."""


def check_router() -> None:
    """Raise where this replica's router has lost its cluster; without one, nothing is wrong."""
    for membership in _memberships:
        membership.check()


def shared_plan(words: Sequence[str], settings: ServeArguments, options: ClusterOptions, node: str) -> ClusterPlan:
    """The cluster of all replicas, with its owner on ``node``; ``words``: its options."""
    from memserve.host.ray import ClusterPlace

    http = settings.http
    ports = RouterPorts(node, free_port(), options.port or free_port())
    secret = as_followed(options.secret or secrets.token_urlsafe(32)).initial_value
    line = ("serve", *words, "--host", node, "--metadata", "none")
    router = router_order(line, http, options, secret, ports)
    join = with_port(node, ports.cluster)
    place = ClusterPlace(join, secret, f"http://{with_port(node, ports.http)}")
    plan = members_plan(settings.engine, http, options, secret, join)
    return dataclasses.replace(plan, router=router, place=place)


@contextmanager
def run_replica(words: Sequence[str], settings: ServeArguments, options: ClusterOptions) -> Iterator[ASGIApp]:
    """This replica's router and its application; the cluster is made where there is none. Raises :class:`UserError`
    when Ray has no room for it."""
    import ray

    from memserve.host.ray import shared_controller

    node, name = ray.util.get_node_ip_address(), f"router-{secrets.token_hex(4)}"
    controller = shared_controller(shared_plan(words, settings, options, node))
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(BEAT_S):
            controller.hear_router.remote(name)

    threading.Thread(target=beat, daemon=True).start()
    try:
        with plain_errors(ray):
            place = ray.get(controller.open_place.remote(name))
            ray.get(controller.wait_members.remote())
        join = (f"tcp://{place.join}",)
        follower = FollowerOptions(
            name=name, join=join, secret=place.secret, config=options.config, host=node, owner_url=place.owner_url,
            advertise=node,
        )  # fmt: skip
        with running_router(settings.engine, follower, log.info) as router:
            card, adapters = card_of(router, settings.engine, options.config), read_adapters(settings.engine.lora)
            _memberships.append(_Membership(router))
            try:
                yield app_of(router, card, settings.engine.model, adapters, settings.http)[0]
            finally:
                _memberships.clear()
    finally:
        is_over.set()
        controller.forget_router.remote(name)
