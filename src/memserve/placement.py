"""Where the processes of ``memserve serve`` run: on this host, or placed by Ray; options, each declared once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from memserve.errors import UserError
from memserve.options import MANY, SECONDS, check_ranges, option
from memserve.types import Role
from memserve.units import NS_PER_S

INSTANCES_MAX = 64
"""Of a role, on one command line."""


class Place(StrEnum):
    """What starts instances and stores."""

    LOCAL = "local"
    RAY = "ray"


class Range(NamedTuple):
    """Counts that are allowed, both included."""

    least: int
    most: int


@dataclass(frozen=True, slots=True)
class ScalingOptions:
    """How many instances there are of a role, where the load decides."""

    scale: tuple[str, ...] = option((), "--scale", form=MANY)
    """ROLE=LEAST..MOST,...: as many instances of this role as the load asks for, for example prefill=1..3,decode=1..2;
    at first those of --prefill, --decode and --colocated. Repeatable."""
    up_ns: int = option(5 * NS_PER_S, "--scale-up-after", form=SECONDS, least=0.1)
    """With --scale: seconds that there must have been too much to do before another instance is started."""
    down_ns: int = option(60 * NS_PER_S, "--scale-down-after", form=SECONDS, least=0.1)
    """With --scale: seconds that fewer instances must have been enough before one is drained."""
    told_in: str = option("", "--scale-file")
    """With --scale: a file for each decision, as JSON, for what starts the instances instead of this command. Empty:
    this command starts and drains them."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if not self.by_role() and self.told_in:
            raise UserError("--scale-file tells decisions of --scale", hint="add --scale prefill=1..3", param="scale")

    def by_role(self) -> dict[Role, Range]:
        """The counts that are allowed. Raises :class:`UserError` for a text that is malformed."""
        found: dict[Role, Range] = {}
        for part in (part for text in self.scale for part in text.split(",")):
            match = _RANGE.fullmatch(part.strip())
            role, counts = (match[1], Range(int(match[2]), int(match[3]))) if match else ("", Range(0, 0))
            if not role or role in found or not 1 <= counts.least <= counts.most <= INSTANCES_MAX:
                hint = "for example --scale prefill=1..3,decode=1..2; each role once, from 1 on"
                raise UserError(f"cannot read --scale {part!r}", hint=hint, param="scale")
            found[Role(role)] = counts
        return found

    def first(self, role: Role, count: int | None) -> int | None:
        """Instances of ``role`` to begin with, where ``count`` are asked for; None: not said. Raises
        :class:`UserError` for a count that is not allowed."""
        allowed = self.by_role().get(role)
        if allowed is None or count is None:
            return count if allowed is None else allowed.least
        if not allowed.least <= count <= allowed.most:
            message = f"--{role.value} {count} is not in --scale {role.value}={allowed.least}..{allowed.most}"
            raise UserError(message, hint="begin with a count that is allowed", param=role.value)
        return count


_RANGE = re.compile(r"(prefill|decode|colocated)=(\d{1,3})\.\.(\d{1,3})")


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
    decode=CPU:4,GPU:1; where it is not named, CPU:1. An instance computes on GPUs that are reserved for it, one for
    each of its workers; --device cuda reserves them. Repeatable, one role each."""
    scaling: ScalingOptions = field(default_factory=ScalingOptions)
    """How many instances there are."""

    def __post_init__(self) -> None:
        if self.on is Place.LOCAL and (self.address is not None or self.resources):
            raise UserError("--address and --ray-resources are Ray's", hint="add --on ray", param="on")
        if self.on is Place.RAY and self.scaling.told_in:
            raise UserError("Ray carries out the decisions of --scale", hint="leave out --scale-file", param="on")
        self.by_role()

    @property
    def asked(self) -> Place | None:
        """None: nothing but this host is asked for."""
        return self.on if self.on is not Place.LOCAL else None

    @property
    def wanted(self) -> object | None:
        """None: no option here is used."""
        return self.asked or self.scaling.scale or None

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
    keys: Mapping[str, object] = field(default_factory=dict, repr=False)
    """What no command line may show."""
