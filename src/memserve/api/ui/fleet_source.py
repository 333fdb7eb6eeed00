"""What the pages of a fleet show: its engines, as ``/metrics`` tells of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prometheus_client.core import Metric

from memserve.api.fleet_metrics import FleetSnapshot
from memserve.api.fleet_relay import Relay
from memserve.api.ui.snapshot import MEMBERS_MAX, Reading
from memserve.cluster.prefix_map import PrefixNode
from memserve.cluster.report import AdmissionStats
from memserve.fleet.words import EngineView
from memserve.runtime.fleet import FleetHost


class FleetReading:
    """All engines at one moment."""

    def __init__(self, engines: Sequence[EngineView], admission: AdmissionStats) -> None:
        self._engines, self._admission = engines, admission

    def families(self, names_tenants: bool) -> Iterable[Metric]:
        """The fleet's part of ``/metrics``, which names no tenant."""
        return FleetSnapshot(self._engines, self._admission).collect()

    def of_tenants(self) -> Iterable[Metric]:
        """None: engines of other projects tell nothing by tenant."""
        return ()

    def members(self) -> list[Mapping[str, Any]]:
        """The engines; their hosts are not known."""
        views = self._engines[:MEMBERS_MAX]
        return [
            {"name": view.name, "role": "engine", "state": "live" if view.up else "down", "host": ""} for view in views
        ]


class FleetSource:
    """A router of ``memserve serve --engine``."""

    def __init__(self, host: FleetHost, relay: Relay) -> None:
        self._host, self._relay = host, relay

    @property
    def draining(self) -> bool:
        """Whether the server ends."""
        return self._relay.draining

    @property
    def model(self) -> str:
        """The first name under which requests may ask; empty while no engine has answered."""
        return next(iter(self._host.machine.models()), "")

    async def read(self) -> Reading:
        """The machine lives in this loop: nothing is waited for."""
        return FleetReading(self._host.machine.engines(), self._host.machine.admission())

    async def trees(self, tenant: str | None) -> Mapping[str, Sequence[PrefixNode]]:
        """None: the prefixes of a fleet are not kept by prompt."""
        return {}
