"""Which application answers for a model: one of this server's own, or that of servers of other projects.

A name leads to the model that is called so, then to the one that lists it (a further name, an adapter), then to a
server of another project that lists it, at last to the model that knows it without listing it (where its weights lie).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from prometheus_client import CollectorRegistry

from memserve.api.app import Application
from memserve.api.http.errors import ApiError, model_not_found
from memserve.api.http.server import Calls
from memserve.api.openai.interfaces import ModelNames
from memserve.api.sleeping import ModelSleep

ASLEEP = "asleep"


@dataclass(frozen=True, slots=True)
class ModelPart:
    """One model's application."""

    name: str
    app: Application
    """Of :func:`memserve.api.app.create_app`, which leaves in its state what is used here."""
    sleep: ModelSleep | None = None
    """None: it is always awake."""
    source: str = ""
    """As it was configured."""
    has_routers: Callable[[], bool] = lambda: False
    """Whether other routers place requests for it as well: it neither goes nor sleeps."""

    @property
    def names(self) -> ModelNames:
        """By which clients may ask for it."""
        names: ModelNames = self.app.state.names
        return names

    async def state_text(self) -> str:
        """``ok``, ``asleep``, or why no request could run."""
        if self.sleep is not None and self.sleep.is_asleep:
            return ASLEEP
        text: str = await self.app.state.pages.state_text()
        return text


@dataclass(frozen=True, slots=True)
class OwnersModels:
    """For a router beside the owner: models that the owner alone answers for, and has this router hand on. Which others
    have come there it knows alone, too."""

    names: tuple[str, ...] = ()
    """Of those that may sleep: it is the owner that wakes them."""
    has_default: bool = False
    """Whether requests that name no model are for one of them."""


class RelayedModels(Protocol):
    """Models that servers of other projects have, behind one application."""

    @property
    def app(self) -> Application:
        """Its state has ``hub`` and ``behind_guard``, as that of a model, and ``feed``."""

    def model_names(self) -> list[str]:
        """Of those that no part of this server answers for."""

    def model_cards(self) -> list[dict[str, Any]]:
        """Of the same, for ``/v1/models``."""

    def model_states(self) -> dict[str, str]:
        """``ok`` for each of the same, or why no request could run."""

    def server_states(self) -> dict[str, bool]:
        """By server: whether it takes requests."""

    def registries(self) -> list[CollectorRegistry]:
        """What ``/metrics`` shows of them."""

    def count_waiting(self) -> int:
        """Requests that wait in front of the servers, and in them."""

    def hide_models(self, find_own: Callable[[str], str | None]) -> None:
        """From now on models are hidden of which ``find_own`` says what this server calls them."""


class ModelTable:
    """All models of one server."""

    def __init__(
        self, parts: Sequence[ModelPart], relayed: RelayedModels | None = None, owners: OwnersModels | None = None
    ) -> None:
        """``parts``: the default first. ``relayed``: None: there are no other servers. ``owners``: None: this server
        decides which models there are."""
        self.parts, self.relayed, self.owners = list(parts), relayed, owners
        if relayed is not None:
            relayed.hide_models(self._find_listed)

    def names(self) -> list[str]:
        """Of all models, the default first."""
        return [part.name for part in self.parts] + (self.relayed.model_names() if self.relayed is not None else [])

    def find_part(self, name: str) -> ModelPart | None:
        """The own model of a name that a client uses, and no other server's (:meth:`is_relayed`). None: there is
        none."""
        listed_name = self._find_listed(name)
        if listed_name is not None:
            return next(part for part in self.parts if part.name == listed_name)
        return next((part for part in self.parts if name in part.names), None)

    def is_relayed(self, name: str) -> bool:
        """Whether another server answers for the model of this name: it lists it, and no own model does."""
        return self.relayed is not None and name in self.relayed.model_names()

    def is_owners(self, name: str | None) -> bool:
        """Whether the owner answers for the model of this name (None: the default), or says that there is none."""
        if self.owners is None or name is None:
            return self.owners is not None and self.owners.has_default
        if name.casefold() in (owners_name.casefold() for owners_name in self.owners.names):
            return True
        return self.find_part(name) is None and not self.is_relayed(name)

    def part_named(self, name: str | None) -> ModelPart:
        """The own model that a request names; None: the default. Raises :class:`ApiError` 404, which says what there
        is."""
        part = self.parts[0] if name is None else self.find_part(name)
        if part is None:
            raise self.unknown_model(name or "")
        return part

    def part_called(self, name: str) -> ModelPart:
        """The own model of exactly this name. Raises :class:`ApiError` 404."""
        part = next((part for part in self.parts if part.name == name), None)
        if part is None:
            raise self.unknown_model(name)
        return part

    def unknown_model(self, name: str) -> ApiError:
        """404, which says what there is."""
        return model_not_found(name, ", ".join(self.names()))

    def applications(self) -> list[Application]:
        """Of all, own models first."""
        relayed = [self.relayed.app] if self.relayed is not None else []
        return [part.app for part in self.parts] + relayed

    def hubs(self) -> list[Calls]:
        """The requests of each."""
        return [app.state.hub for app in self.applications()]

    def count_waiting(self) -> int:
        """Requests that wait, of all."""
        own: list[int] = [part.app.state.count_waiting() for part in self.parts]
        return sum(own) + (self.relayed.count_waiting() if self.relayed is not None else 0)

    async def states(self) -> dict[str, str]:
        """``ok``, ``asleep``, or why no request could run, of each."""
        relayed = self.relayed.model_states() if self.relayed is not None else {}
        return {part.name: await part.state_text() for part in self.parts} | relayed

    def _find_listed(self, name: str) -> str | None:
        # in upper or lower case, before further names are looked at: one model's alias may be another one's name
        exact = (part.name for part in self.parts if part.name.casefold() == name.casefold())
        return next(exact, None) or next((part.name for part in self.parts if part.names.is_listed(name)), None)
