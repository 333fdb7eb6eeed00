"""How long an answer will be: learnt from those that this deployment has finished.

LayerKV (3.1) has a model that names the percentile range of an answer's length: the lower end bounds the future of a
decoding request from below, the median says when its memory is expected back. Here the distribution itself is kept,
for each tenant and size of prompt, and cut off below what the request has generated; the ranges are its percentiles.

::

    seen   ▁▃▆█▆▅▃▂▁▁▁       generated so far: 40        lower bound   median
                ^ 40 ▆█▇▅▃▂▁▁    what is left of it           |  p25      |  p50
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass

from memserve.errors import check

RANGES = (0.1, 0.25, 0.5, 0.75, 0.9)
"""Percentiles that divide answers into classes. A prediction is right if each class gets its share of them."""
CLASSES = tuple(f"{100 * low:.0f}-{100 * high:.0f}" for low, high in itertools.pairwise((0.0, *RANGES, 1.0)))
"""Names of the classes: ``0-10`` has the shortest tenth of all answers."""
LOWER, MEDIAN = 0.25, 0.5
_BINS_AN_OCTAVE = 4
_OCTAVES = 21  # up to 2 million tokens
_SEEN_MIN = 16  # with fewer answers of a kind all of its tenant's count, then all
_KEPT = 1024  # answers of a kind; with more the older ones count half
_KINDS_MAX = 4096


def _bin_edges() -> list[int]:
    """First length of each bin: 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 16, 19 ..."""
    edges = {round(2 ** (step / _BINS_AN_OCTAVE)) for step in range(_BINS_AN_OCTAVE * _OCTAVES)}
    return sorted(edges)


EDGES = _bin_edges()

Kind = tuple[str, int]
"""Tenant and size of the prompt (its bits); the more general kinds are ``(tenant, -1)`` and ``("", -2)``."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What is expected of one answer, in tokens altogether."""

    lower: int
    """Three of four answers like this one are at least as long."""
    median: int
    answers: int
    """Finished answers that this rests on. 0: nothing is known, ``lower`` is what is certain."""


class _Seen:
    """Lengths of one kind of answers, in bins; the newest count most."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0.0] * len(EDGES)
        self.total = 0.0

    def add(self, tokens: int) -> None:
        self.counts[_bin_of(tokens)] += 1.0
        self.total += 1.0
        if self.total > _KEPT:
            self.counts = [count / 2 for count in self.counts]
            self.total = sum(self.counts)

    def beyond(self, tokens: int) -> float:
        """How many answers were longer than ``tokens``; inside a bin lengths are taken to be spread evenly."""
        place = _bin_of(tokens)
        first, end = EDGES[place], _end_of(place)
        return self.counts[place] * (end - tokens - 1) / (end - first) + sum(self.counts[place + 1 :])

    def length_at(self, above: float) -> int:
        """The length that ``above`` of the answers exceed."""
        left = above
        for place in range(len(EDGES) - 1, -1, -1):
            count = self.counts[place]
            if count > left or (count == left and count):
                first, end = EDGES[place], _end_of(place)
                return max(first, round(end - 1 - left / count * (end - first)))
            left -= count
        return 1


def _bin_of(tokens: int) -> int:
    return max(0, bisect_right(EDGES, tokens) - 1)


def _end_of(place: int) -> int:
    return EDGES[place + 1] if place + 1 < len(EDGES) else 2 * EDGES[-1]


class OutputLengths:
    """The lengths of finished answers, by tenant and size of prompt, and what they say of those that run."""

    __slots__ = ("_seen", "classes", "finished")

    def __init__(self) -> None:
        self._seen: OrderedDict[Kind, _Seen] = OrderedDict()  # least recently finished first
        #: finished answers by the class that their length fell into, of the classes that were predicted at the start
        self.classes = dict.fromkeys(CLASSES, 0)
        self.finished = 0

    def learn(self, tenant: str, prompt_tokens: int, generated: int) -> None:
        """An answer has come to its own end after ``generated`` tokens. Not for those that were called off."""
        check(generated >= 0, "{} tokens were generated", generated)
        tokens = max(1, generated)
        known = self._known(tenant, prompt_tokens)
        if known is not None:
            self.classes[CLASSES[self._class_of(known, tokens)]] += 1
        self.finished += 1
        for kind in _kinds(tenant, prompt_tokens):
            self._seen.setdefault(kind, _Seen()).add(tokens)
            self._seen.move_to_end(kind)
        while len(self._seen) > _KINDS_MAX:
            self._seen.popitem(last=False)

    def predict(self, tenant: str, prompt_tokens: int, generated: int, most: int) -> Prediction:
        """Of an answer that has ``generated`` tokens, goes on, and ends after ``most`` at the latest."""
        certain = min(generated + 1, most)
        known = self._known(tenant, prompt_tokens)
        left = known.beyond(generated) if known is not None else 0.0
        if known is None or left < 1.0:  # longer than all that were seen
            return Prediction(certain, certain, 0)
        lower = EDGES[_bin_of(known.length_at(left * (1.0 - LOWER)))]  # the bin's first length: a bound, not a guess
        median = known.length_at(left * (1.0 - MEDIAN))
        return Prediction(_between(certain, lower, most), _between(certain, median, most), round(left))

    def _known(self, tenant: str, prompt_tokens: int) -> _Seen | None:
        for kind in _kinds(tenant, prompt_tokens):
            seen = self._seen.get(kind)
            if seen is not None and seen.total >= _SEEN_MIN:
                return seen
        return None

    @staticmethod
    def _class_of(known: _Seen, tokens: int) -> int:
        return sum(tokens > known.length_at(known.total * (1.0 - share)) for share in RANGES)

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the books do not agree. For tests; slow."""
        check(len(self._seen) <= _KINDS_MAX, "{} kinds are kept", len(self._seen))
        check(sum(self.classes.values()) <= self.finished, "more answers were judged than have finished")
        for kind, seen in self._seen.items():
            check(abs(sum(seen.counts) - seen.total) < 1e-6 * _KEPT, "answers of {} are counted wrongly", kind)


def _kinds(tenant: str, prompt_tokens: int) -> tuple[Kind, Kind, Kind]:
    """From the closest kind to all answers."""
    return (tenant, prompt_tokens.bit_length()), (tenant, -1), ("", -2)


def _between(least: int, tokens: int, most: int) -> int:
    return min(max(least, tokens), most)
