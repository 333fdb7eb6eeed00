"""Drafts: tokens that may come next, taken from what was said before, and whether it pays to look.

A draft costs no model. It is what followed the same tokens before: earlier in the sequence itself (prompt lookup,
Saxena 2023), or in the prefix index, where an earlier request of the tenant went the same way. A step computes it
behind the last token, draws at each of its positions as it would have drawn anyway, and keeps the tokens up to the
first draw that differs (speculative decoding, Leviathan et al. 2023, section 2, with a draft that is certain of
itself). So the tokens are those of decoding one by one, and what is at stake is time alone.
"""

from __future__ import annotations

import numpy as np

from memserve.types import TokenArray

LEAST, MOST = 3, 8
"""Tokens that must be equal before a place counts as one where the sequence has been; how many are compared at most."""

FIRST = 4
"""Length of a sequence's first draft."""

PAUSE, PAUSE_MAX = 8, 256
"""Tokens that a sequence decodes without a draft after one of which nothing was kept; doubled up to the latter."""


def following(tokens: TokenArray, count: int) -> list[int]:
    """The ``count`` tokens that followed the last ones of ``tokens [n]`` where most of those (3 to 8) stood before, the
    latest such place. From a place less than ``count`` back, tokens are taken to repeat. Empty: there is none."""
    end = len(tokens) - 1
    if end < LEAST:
        return []
    places = np.flatnonzero(tokens[:end] == tokens[end])
    for back in range(1, MOST):
        longer = places[np.searchsorted(places, back) :]
        longer = longer[tokens[longer - back] == tokens[end - back]]
        if not len(longer):
            if back < LEAST:
                return []
            break
        places = longer
    found = tokens[int(places[-1]) + 1 :][:count].tolist()
    return [found[at % len(found)] for at in range(count)]


class Pace:
    """How long the drafts of one sequence are, and when it has one: longer while they are kept, none for a while after
    one that was not."""

    __slots__ = ("_misses", "drafted", "due", "kept", "length")

    def __init__(self) -> None:
        self.length = FIRST
        #: tokens so far, and those of them that were drawn as well
        self.drafted = self.kept = 0
        #: drawn tokens from which on it is worth a look
        self.due = 0
        self._misses = 0

    def told(self, drafted: int, kept: int, drawn: int) -> None:
        """Of ``drafted`` tokens ``kept`` were drawn as well; the sequence has ``drawn`` tokens by now."""
        self.drafted += drafted
        self.kept += kept
        if not kept:
            self.put_off(drawn)
        else:
            self._misses = 0
            self.length = 2 * drafted if kept == drafted else kept + 1

    def put_off(self, drawn: int) -> None:
        """There was no draft, or one of no use."""
        self.due = drawn + min(PAUSE << self._misses, PAUSE_MAX)
        self._misses = min(self._misses + 1, 16)
        self.length = FIRST


SETTLED, TRIALS = 0.25, 4
"""Weight of the newest step in an average; steps with drafts before the average is relied upon."""

REST, REST_MAX = 64, 4096
"""Steps without drafts once they do not pay; doubled up to the latter."""

HANDOVER_NS = 300_000
"""What a step with drafts costs beside the device's time: the next one is planned when its tokens are known."""


class Worth:
    """Whether steps with drafts give tokens sooner than steps without, by what the device took for both.

    Steps are compared at equal numbers of sequences, by powers of two: a draft is nearly free where reading the weights
    is what takes time, and costs as much as it brings where many sequences share a step.
    """

    __slots__ = ("_gain", "_plain_ns", "_rest", "_rests", "_trials")

    def __init__(self) -> None:
        self._plain_ns: dict[int, float] = {}
        self._gain: dict[int, float] = {}
        self._trials: dict[int, int] = {}
        self._rest: dict[int, int] = {}
        self._rests: dict[int, int] = {}

    def pays(self, sequences: int) -> bool:
        """Whether to draft in a step of so many sequences. Counts the steps of a rest."""
        size = sequences.bit_length()
        left = self._rest.get(size, 0)
        if left:
            self._rest[size] = left - 1
            return False
        return True

    def plain(self, sequences: int, device_ns: int) -> None:
        """A step gave each of ``sequences`` one token."""
        size = sequences.bit_length()
        before = self._plain_ns.get(size)
        each_ns = device_ns / sequences
        self._plain_ns[size] = each_ns if before is None else before + SETTLED * (each_ns - before)

    def drafted(self, sequences: int, tokens: int, device_ns: int) -> None:
        """A step with drafts gave ``sequences`` together ``tokens``."""
        size = sequences.bit_length()
        plain_ns = self._plain_ns.get(size)
        if plain_ns is None:
            return
        gain = tokens * plain_ns / (device_ns + HANDOVER_NS)
        before = self._gain.get(size)
        self._gain[size] = gain if before is None else before + SETTLED * (gain - before)
        self._trials[size] = self._trials.get(size, 0) + 1
        if self._trials[size] >= TRIALS and self._gain[size] < 1.0:
            rests = self._rests.get(size, 0)
            self._rest[size] = min(REST << rests, REST_MAX)
            self._rests[size] = min(rests + 1, 16)
            self._trials[size] = 0
            del self._gain[size]
        elif self._gain[size] >= 1.0:
            self._rests.pop(size, None)
