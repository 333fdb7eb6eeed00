"""When requests are due: every function takes a workload and returns it with new times.

Open loop: requests do not wait for answers (:func:`by_request`, :func:`by_session`, :func:`trace_time`). Closed loop: N
users, each sending when its last answer has ended (:func:`closed_loop`).

Random numbers: a generator per purpose, all fixed by one seed; and English-looking text.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from memserve.base.errors import UserError
from memserve_lab.workloads.records import Session, Turn, Workload

Draws = np.random.Generator

_COMMON = """
the and that with for from this have which their about would there when were been people other more into time some
could these than first water long little after very word called just where most know through back much before good
right think small great help between never last school father keep tree start city earth light thought head under
story left night real life few north open seem together next white children begin walk example paper group always
music both mark often letter until mile river feet care second book carry science room friend idea fish mountain stop
once base hear horse sure watch color face wood main enough plain girl usual young ready above ever list though feel
talk bird soon body family direct leave song measure door product black short number class wind question happen
complete ship area half rock order fire south problem piece told knew pass since whole king space heard best hour
better during hundred five remember step early hold west ground
"""
_WORDS = np.array(_COMMON.split())
_WEIGHTS = 1 / np.arange(1, len(_WORDS) + 1)
_SHARES = _WEIGHTS / _WEIGHTS.sum()
SENTENCE_WORDS_MAX = 22


def draws(seed: int, *purpose: str | int) -> Draws:
    """The generator of ``(seed, purpose)``: drawing more for one purpose leaves the draws of all others unchanged."""
    return np.random.default_rng([seed, *(zlib.crc32(str(part).encode()) for part in purpose)])


def lognormal_count(rng: Draws, *, median: float, spread: float, at_most: int) -> int:
    """A whole number of at least 1: lengths and turns of real traffic are roughly log-normal."""
    return int(min(max(1.0, np.round(rng.lognormal(np.log(median), spread))), at_most))


def prose(rng: Draws, words: int) -> str:
    """``words`` words in sentences, common words more often (Zipf).

    Every word has three letters or more: at least ``words`` tokens with any tokenizer, and at four bytes per token.
    """
    words_drawn = rng.choice(_WORDS, size=words, p=_SHARES).tolist()
    sentences = []
    while words_drawn:
        length = int(rng.integers(5, SENTENCE_WORDS_MAX + 1))
        sentences.append(" ".join(words_drawn[:length]).capitalize() + ".")
        words_drawn = words_drawn[length:]
    return " ".join(sentences)


OVERLAP_DEFAULT = 64


class Process(Protocol):
    """A stream of arrivals with a mean rate."""

    @property
    def requests_per_s(self) -> float:
        """The mean rate."""
        ...

    def gaps_s(self, rng: Draws, count: int) -> NDArray[np.float64]:
        """Seconds between arrivals, float64 ``[count]``."""
        ...


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent arrivals (MemServe 8.2)."""

    requests_per_s: float

    def gaps_s(self, rng: Draws, count: int) -> NDArray[np.float64]:
        """Exponential gaps, float64 ``[count]``."""
        return rng.exponential(1 / self.requests_per_s, count)


@dataclass(frozen=True, slots=True)
class Constant:
    """Arrivals at equal distances."""

    requests_per_s: float

    def gaps_s(self, rng: Draws, count: int) -> NDArray[np.float64]:
        """Equal gaps, float64 ``[count]``."""
        return np.full(count, 1 / self.requests_per_s)


@dataclass(frozen=True, slots=True)
class Bursty:
    """Arrivals in bursts: Gamma gaps with a deviation of ``variation`` times their mean (1 = Poisson)."""

    requests_per_s: float
    variation: float

    def gaps_s(self, rng: Draws, count: int) -> NDArray[np.float64]:
        """Gamma gaps, float64 ``[count]``."""
        shape = 1 / self.variation**2
        return rng.gamma(shape, 1 / (self.requests_per_s * shape), count)


def by_request(workload: Workload, process: Process, *, seed: int, overlap: int = OVERLAP_DEFAULT) -> Workload:
    """Every request is due at a point of ``process``; ``overlap`` sessions at a time take the points in random order.

    This is the paper's arrival pattern: one rate for requests, whatever session they belong to, causal order kept.
    """
    _need_rate(process)
    count = workload.request_count
    points = np.cumsum(process.gaps_s(draws(seed, "gaps"), count))
    dealt: list[list[float]] = [[] for _ in workload.sessions]
    order = _dealing_order(workload.sessions, draws(seed, "deal"), overlap)
    for point, session in zip(points.tolist(), order, strict=True):
        dealt[session].append(point)
    sessions = tuple(_due(session, times) for session, times in zip(workload.sessions, dealt, strict=True))
    return replace(workload, sessions=sessions, users=None, arrivals=f"{process}, a point for each request")


def by_session(workload: Workload, process: Process, *, seed: int) -> Workload:
    """Sessions begin at the points of ``process``, slowed so that *requests* come at its rate; then causal order."""
    _need_rate(process)
    turns_mean = workload.request_count / max(1, len(workload.sessions))
    points = np.cumsum(process.gaps_s(draws(seed, "gaps"), len(workload.sessions))) * turns_mean
    sessions = tuple(
        _due(session, [point, *[None] * (len(session.turns) - 1)])
        for point, session in zip(points.tolist(), workload.sessions, strict=True)
    )
    return replace(workload, sessions=sessions, users=None, arrivals=f"{process}, a point for each session")


def closed_loop(workload: Workload, *, users: int) -> Workload:
    """``users`` users, each taking the next session when its last has ended; no request has a due time."""
    if users < 1:
        raise UserError(f"a closed loop of {users} users", hint="take at least 1")
    sessions = tuple(_due(session, [None] * len(session.turns)) for session in workload.sessions)
    return replace(workload, sessions=sessions, users=users, arrivals=f"closed loop of {users} users")


def trace_time(workload: Workload, *, speed: float = 1.0) -> Workload:
    """The recorded times, ``speed`` times as fast, think times included."""
    if speed <= 0:
        raise UserError(f"a speed of {speed}", hint="take a factor above 0: 2 replays twice as fast")

    def faster(turn: Turn) -> Turn:
        due_s = None if turn.due_s is None else turn.due_s / speed
        return replace(turn, due_s=due_s, think_s=turn.think_s / speed)

    sessions = tuple(replace(s, turns=tuple(faster(turn) for turn in s.turns)) for s in workload.sessions)
    return replace(workload, sessions=sessions, users=None, arrivals=f"recorded times, {speed:g} times as fast")


def _need_rate(process: Process) -> None:
    if process.requests_per_s <= 0:
        raise UserError(f"a rate of {process.requests_per_s} requests/s", hint="take a rate above 0")


def _due(session: Session, times_s: Sequence[float | None]) -> Session:
    return replace(session, turns=tuple(replace(t, due_s=s) for t, s in zip(session.turns, times_s, strict=True)))


def _dealing_order(sessions: Sequence[Session], rng: Draws, overlap: int) -> list[int]:
    """The session of each request: a session number for every request, at most ``overlap`` sessions open at a time."""
    turns_left = [len(session.turns) for session in sessions]
    opened = list(range(min(overlap, len(sessions))))
    waiting = iter(range(len(opened), len(sessions)))
    order = []
    for chance in rng.random(sum(turns_left)).tolist():
        slot = int(chance * len(opened))
        session = opened[slot]
        order.append(session)
        turns_left[session] -= 1
        if not turns_left[session]:
            following = next(waiting, None)
            opened[slot : slot + 1] = [] if following is None else [following]
    return order
