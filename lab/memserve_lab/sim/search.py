"""The smallest cluster of each kind that is good enough, and the cheapest of those."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memserve.base.errors import UserError
from memserve.base.types import Role


@dataclass(frozen=True, slots=True)
class Mix:
    """Clusters of one kind, in all sizes: of ``whole`` instances ``prefill`` prefill, the others decode."""

    name: str
    prefill: int = 0
    whole: int = 0
    """0: all are colocated."""

    @property
    def least(self) -> int:
        """Number of instances of the smallest cluster."""
        return 2 if self.whole else 1

    def instances_of(self, size: int) -> dict[Role, int]:
        """A cluster of ``size`` instances, at least one of each role that it needs."""
        if not self.whole:
            return {Role.COLOCATED: size}
        prefill = min(size - 1, max(1, round(size * self.prefill / self.whole)))
        return {Role.PREFILL: prefill, Role.DECODE: size - prefill}


COLOCATED = Mix("colocated")


def parse_mixes(text: str) -> tuple[Mix, ...]:
    """``colocated,1:3,1:1``: prefill to decode instances. Raises :class:`UserError`."""
    mixes = []
    for part in (part.strip() for part in text.split(",")):
        prefill, _, decode = part.partition(":")
        if part == COLOCATED.name:
            mixes.append(COLOCATED)
        elif prefill.isdecimal() and decode.isdecimal() and int(prefill) and int(decode):
            mixes.append(Mix(part, int(prefill), int(prefill) + int(decode)))
        else:
            raise UserError(f"cannot read {part!r} as a mix", hint="colocated, or prefill to decode, e.g. 1:3")
    return tuple(mixes)


@dataclass(frozen=True, slots=True)
class Trial:
    """The trial of one cluster."""

    size: int
    good: bool
    cost: float
    why: str = ""
    """Why the cluster was not good enough. Empty: good."""


Try = Callable[[int], Trial]


def smallest(attempt: Try, least: int, most: int) -> tuple[Trial | None, list[Trial]]:
    """The smallest good size in ``[least, most]``, and all trials in their order. None: not even ``most`` is good.

    More instances are assumed never to be worse. So ``most`` is tried as soon as ``least`` is not good enough: if no
    cluster keeps the SLO, the search ends after two trials. Otherwise the size is doubled until it is good enough, then
    bisected.
    """
    trials = [attempt(least)]
    if trials[0].good or least == most:
        return (trials[0] if trials[0].good else None), trials
    trials.append(best := attempt(most))
    if not best.good:
        return None, trials
    bad, size = least, 2 * least
    while size < best.size:
        trials.append(trial := attempt(size))
        if trial.good:
            best = trial
        else:
            bad, size = size, 2 * size
    while best.size - bad > 1:
        trials.append(trial := attempt((best.size + bad) // 2))
        if trial.good:
            best = trial
        else:
            bad = trial.size
    return best, trials


def cheapest(trials: Sequence[tuple[str, Trial | None]]) -> tuple[str, Trial] | None:
    """The cheapest of the smallest clusters of each kind; ties go to the first. None: none was good enough."""
    good = [(name, trial) for name, trial in trials if trial is not None]
    return min(good, key=lambda pair: pair[1].cost) if good else None
