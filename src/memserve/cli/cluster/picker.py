"""What ``--endpoint-picker`` adds to a server: gateways ask it where requests shall go.

To the engines of ``--engine``; else to the routers of this cluster, of which any answers any request: they are a fleet
of their own, in which the least busy one is chosen.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from memserve.base.config import ClusterConfig
from memserve.base.errors import UserError
from memserve.cli.flags import HttpOptions
from memserve.fleet.messages import SILENCE_S, EngineKind, EngineSpec
from memserve.transport.network_devices import split_address, with_port

if TYPE_CHECKING:
    from memserve.api.http.middleware import KeyRing
    from memserve.api.http.server import DrainedApp
    from memserve.fleet.gateway.picker_server import WithPicker
    from memserve.fleet.host import FleetHost
    from memserve.protocol.peers import PeerInfo

FLAG = "--endpoint-picker"
_EVERYWHERE = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class Endpoints:
    """What gateways are sent to."""

    host: FleetHost
    keys: KeyRing
    """Of clients, where the picker must check them."""
    silence_s: float = SILENCE_S
    are_routers: bool = False
    """They are this cluster's own, which check keys themselves; ``host`` is the picker's alone."""


@dataclass(frozen=True, slots=True)
class OwnRouters:
    """The routers of a cluster, as gateways reach them."""

    host: str = "127.0.0.1"
    """Of this one, where it listens everywhere."""
    list_urls: Callable[[], Iterable[str]] = tuple
    """Where the others are found, ``http://HOST:PORT``, as they come and go."""

    def endpoints(self, http: HttpOptions, port: int) -> Endpoints | None:
        """For the picker of a server at ``port``. None: there is no picker."""
        if http.server.endpoint_picker is None:
            return None
        from memserve.api.http.middleware import KeyRing, split_key
        from memserve.fleet.host import FleetHost

        listens_at = self.host if http.server.host in _EVERYWHERE else http.server.host
        own_url = f"http{'' if http.tls is None else 's'}://{with_port(listens_at, port)}"

        def list_specs() -> Sequence[EngineSpec]:
            urls = dict.fromkeys((own_url, *self.list_urls()))
            return tuple(EngineSpec(EngineKind.MEMSERVE, url) for url in urls)

        keys = http.api_keys.follow_keys()
        key = keys.derive_value(lambda texts: split_key(texts[0])[1]) if http.api_keys.are_given else None
        host = FleetHost(list_specs(), ClusterConfig(policy="least-load"), engine_key=key, listed=list_specs)
        if http.tls is not None:  # routers of this cluster, by addresses that their certificates need not name
            host.client.tls = ssl._create_unverified_context()
        return Endpoints(host, KeyRing(), are_routers=True)


def urls_of_routers(members: Mapping[str, PeerInfo]) -> list[str]:
    """Where clients find those of ``members`` that are routers with an address of their own."""
    return [info.http_at for info in members.values() if info.http_at]


def check_picker(http: HttpOptions) -> None:
    """Raise :class:`UserError` where the picker of ``http`` could not start, before anything is loaded."""
    if http.server.endpoint_picker is None:
        return
    try:
        for package in ("grpc", "grpc_health.v1", "envoy.service.ext_proc.v3"):
            import_module(package)
    except ImportError:
        hint = "pip install 'memserve[gateway]'"
        raise UserError("an endpoint picker needs the package xds-protos", hint=hint, param="endpoint_picker") from None
    from memserve.api.http.server import bind

    host, port = split_address(http.server.endpoint_picker, FLAG)
    try:
        bind(host, port).close()
    except UserError as error:
        hint = f"choose another one with {FLAG} HOST:PORT"
        raise UserError(error.message, hint=hint, param="endpoint_picker") from None


def with_picker(app: DrainedApp, http: HttpOptions, endpoints: Endpoints) -> WithPicker | None:
    """``app`` with the picker that ``http`` asks for; None: it asks for none."""
    if http.server.endpoint_picker is None:
        return None
    from memserve.fleet.gateway.picker import Picker
    from memserve.fleet.gateway.picker_server import PickerAddress, PickerServer, WithPicker

    are_routers = endpoints.are_routers
    picker = Picker(endpoints.host, app.state.edge, endpoints.keys, endpoints.silence_s, has_engine_key=not are_routers)
    address = PickerAddress(*split_address(http.server.endpoint_picker, FLAG), http.tls)
    return WithPicker(app, PickerServer(picker, address, http.server.drain_s, runs_host=are_routers))


def in_turn(*calls: Callable[[], None]) -> Callable[[], None]:
    """All of ``calls`` as one."""

    def call_all() -> None:
        for call in calls:
            call()

    return call_all
