"""The engines of a fleet beside models of the server's own, behind one front (:mod:`memserve.api.front`).

Each is limited for itself: own models by their routers' admission and memory; requests for engines by what the HTTP
server takes of its clients, and by the engines, which queue and refuse. Keys, tenants and bodies are the server's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from prometheus_client import CollectorRegistry

from memserve.api.app import Application
from memserve.base.config import AdmissionConfig, ClusterConfig
from memserve.fleet.host import FleetHost


def without_admission(config: ClusterConfig) -> ClusterConfig:
    """``config`` of own models for the engines beside them: its admission is not theirs."""
    return replace(config, admission=AdmissionConfig())


class RelayedFleet:
    """As :class:`memserve.api.model_table.RelayedModels` has it."""

    def __init__(self, host: FleetHost, app: Application) -> None:
        """``app``: of :func:`memserve.fleet.app.create_fleet_app`, in front of the engines of ``host``."""
        self.host, self._app = host, app

    @property
    def app(self) -> Application:
        """What hands requests on to engines."""
        return self._app

    def model_names(self) -> list[str]:
        """Of all engines, but for names of own models."""
        return list(self.host.engines_by_model())

    def model_cards(self) -> list[dict[str, Any]]:
        """For ``/v1/models``."""
        cards: list[dict[str, Any]] = self._app.state.pages.model_cards()
        return cards

    def model_states(self) -> dict[str, str]:
        """By name; ``ok`` while an engine that has it takes requests."""
        by_model = self.host.engines_by_model()
        return {name: "ok" if engines else "no engine takes requests" for name, engines in by_model.items()}

    def server_states(self) -> dict[str, bool]:
        """By engine: whether it takes requests."""
        return {view.name: view.up for view in self.host.machine.engine_views()}

    def registries(self) -> list[CollectorRegistry]:
        """Of the engines, and of the requests for them."""
        registries: list[CollectorRegistry] = self._app.state.pages.registries()
        return registries

    def count_waiting(self) -> int:
        """Requests that wait in engines, by their own metrics."""
        return sum(view.report.waiting for view in self.host.machine.engine_views())

    def hide_models(self, find_own: Callable[[str], str | None]) -> None:
        """Own models win; each time that hides an engine's model, it is said once."""
        self.host.find_own = find_own
