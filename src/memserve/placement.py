"""Where the processes of ``memserve serve`` run: on this host, or placed by Ray; options, each declared once."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from memserve.errors import UserError
from memserve.options import MANY, option
from memserve.types import Role


class Place(StrEnum):
    """What starts instances and stores."""

    LOCAL = "local"
    RAY = "ray"


@dataclass(frozen=True, slots=True)
class PlacementOptions:
    """Where the processes of a cluster run."""

    on: Place = option(Place.LOCAL)
    """``local``: the router starts its instances on this host; ``ray``: Ray places router, instances and stores on its
    nodes, and starts them again."""
    address: str | None = option(None)
    """With --on ray: HOST:PORT of the Ray cluster. None: RAY_ADDRESS, else a Ray of this host alone."""
    resources: tuple[str, ...] = option((), "--ray-resources", form=MANY)
    """With --on ray: ROLE=NAME:AMOUNT,...: what Ray reserves for each process of a role, for example
    decode=CPU:4,GPU:1; where it is not named, CPU:1. Repeatable, one role each."""

    def __post_init__(self) -> None:
        if self.on is Place.LOCAL and (self.address is not None or self.resources):
            raise UserError("--address and --ray-resources are Ray's", hint="add --on ray", param="on")
        self.by_role()

    @property
    def asked(self) -> Place | None:
        """None: nothing but this host is asked for."""
        return self.on if self.on is not Place.LOCAL else None

    def by_role(self) -> dict[str, dict[str, float]]:
        """What Ray reserves, by role. Raises :class:`UserError` for a text that is malformed."""
        found: dict[str, dict[str, float]] = {role.value: {"CPU": 1.0} for role in Role}
        for text in self.resources:
            role, _, parts = text.partition("=")
            pairs = [part.partition(":") for part in parts.split(",")]
            try:
                amounts = {name: float(amount) for name, _, amount in pairs}
            except ValueError:
                amounts = {}
            if role not in found or not amounts or "" in amounts or min(amounts.values()) <= 0:
                hint = "for example --ray-resources decode=CPU:4,GPU:1"
                raise UserError(f"cannot read --ray-resources {text!r}", hint=hint, param="ray_resources")
            found[role] = amounts
        return found


@dataclass(frozen=True, slots=True)
class Followers:
    """How the routers beside the owner are started on this host."""

    flags: tuple[str, ...] = ()
    """Of ``memserve router``, but for the owner's address."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    metrics_key: str | None = field(default=None, repr=False)

    @property
    def keys(self) -> dict[str, object]:
        """What no command line may show."""
        return {"api_keys": self.api_keys, "metrics_key": self.metrics_key}
