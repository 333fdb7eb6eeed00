"""Drafts: tokens that may come next, taken from what was said before, and how many of them pay.

A draft costs no model. It is what followed the same tokens before: earlier in the sequence itself (prompt lookup,
Saxena 2023), or in the prefix index, where an earlier request of the tenant went the same way. A step computes it
behind the last token, draws at each of its positions as it would have drawn anyway, and keeps the tokens up to the
first draw that differs (speculative decoding, Leviathan et al. 2023, section 2, with a draft that is certain of
itself). So the tokens are those of decoding one by one, and what is at stake is time alone.

A drafted token is worth what a token takes otherwise, times the chance that it and all before it are right; it costs
what a wider step takes longer. Both are measured: times by step, chances by where drafts come from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from memserve.base.types import TokenArray

LEAST, MOST = 2, 8
"""Tokens that must be equal before a place counts as one where the sequence has been; how many are compared at most."""

CACHED = MOST + 1
"""Source of a draft out of the prefix index. That of others: how many tokens were equal."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may come next, and where they come from."""

    tokens: list[int] = field(default_factory=list)
    source: int = LEAST


def repeated_draft(tokens: TokenArray, count: int) -> Draft:
    """The ``count`` tokens that followed the last ones of ``tokens [n]`` where most of those (2 to 8) stood before, the
    latest such place. From a place less than ``count`` back, tokens are taken to repeat. Empty: there is none."""
    end = len(tokens) - 1
    if end < LEAST:
        return Draft()
    places, alike = np.flatnonzero(tokens[:end] == tokens[end]), 1
    for back in range(1, MOST):
        longer = places[np.searchsorted(places, back) :]
        longer = longer[tokens[longer - back] == tokens[end - back]]
        if not len(longer):
            break
        places, alike = longer, back + 1
    if alike < LEAST:
        return Draft()
    continuation = tokens[int(places[-1]) + 1 :][:count].tolist()
    return Draft([continuation[offset % len(continuation)] for offset in range(count)], alike)


EXPECTED = {2: 0.4, 3: 0.5, 4: 0.6, 5: 0.65, 6: 0.7, 7: 0.8, 8: 0.88, CACHED: 0.9}
"""Source -> the chance that a drafted token is right, before any was seen (``bench/draft_policy.py`` prints it)."""

TRUST = 8.0
"""As many drafted tokens as an expectation counts for."""

FADE, FADE_UNUSED = 0.9, 0.97
"""What is left of what a sequence has seen with each further draft, and with each that was not worth its time."""

CHANCE_MAX = 0.98


class Chances:
    """How often a drafted token is right behind right ones, by source: of all sequences of an instance, or of one."""

    __slots__ = ("_accepted", "_tried", "fade")

    def __init__(self, fade: float) -> None:
        #: what is left of all before with each further draft
        self.fade = fade
        self._tried: dict[int, float] = {}
        self._accepted: dict[int, float] = {}

    def chance_of(self, source: int, expected: float) -> float:
        """The chance by what was seen, ``expected`` where that is little."""
        accepted, tried = self._accepted.get(source, 0.0), self._tried.get(source, 0.0)
        return min(CHANCE_MAX, (accepted + TRUST * expected) / (tried + TRUST))

    def learn_outcome(self, source: int, drafted: int, accepted: int) -> None:
        """Of a draft's tokens so many were right; those behind the first wrong one say nothing."""
        self._accepted[source] = self._accepted.get(source, 0.0) * self.fade + accepted
        self._tried[source] = self._tried.get(source, 0.0) * self.fade + min(drafted, accepted + 1)

    def fade_source(self, source: int) -> None:
        """A draft was not worth its time: what speaks against it counts a little less, or there never is another."""
        self._accepted[source] = self._accepted.get(source, 0.0) * FADE_UNUSED
        self._tried[source] = self._tried.get(source, 0.0) * FADE_UNUSED


class Pace:
    """What became of one sequence's drafts."""

    __slots__ = ("accepted", "chances", "drafted", "due", "misses", "source")

    def __init__(self) -> None:
        #: tokens so far, and those of them that were drawn as well
        self.drafted = self.accepted = 0
        self.chances = Chances(FADE)
        #: drawn tokens from which on it is worth a look, after so many looks in a row that found nothing worth its time
        self.due = self.misses = 0
        #: of the draft that is under way
        self.source = LEAST

    def learn_outcome(self, drafted: int, accepted: int) -> None:
        """Of ``drafted`` tokens ``accepted`` were drawn as well."""
        self.drafted += drafted
        self.accepted += accepted
        self.chances.learn_outcome(self.source, drafted, accepted)


def paying_length(chance: float, price: Price, most: int) -> int:
    """How many tokens of a draft pay, up to ``most``, if each is right with ``chance`` behind right ones."""
    if chance * price.token_ns <= price.draft_ns:
        return 0
    if price.draft_ns <= 0:
        return most
    return min(most, int(math.log(price.draft_ns / price.token_ns) / math.log(chance)))


def gain_ns(chance: float, price: Price, count: int) -> float:
    """What a draft of ``count`` tokens is expected to save."""
    return price.token_ns * chance * (1 - chance**count) / (1 - chance) - price.draft_ns * count


@dataclass(frozen=True, slots=True)
class Price:
    """What a token takes without drafts, and what a drafted one costs."""

    token_ns: float
    draft_ns: float


SETTLED, TRIALS = 0.15, 8
"""Weight of the newest step in an average; steps with drafts before the average is relied upon."""

MARGIN = 1.3
"""A drafted token must be worth so many times what it is measured to cost."""

FADE_PRICE = 0.995
"""What is left of that cost with each step without drafts: what is never drafted has no other way to get cheaper."""

GAIN_LEAST = 1.02
"""Tokens by time with drafts, over that without, below which they rest."""

OUTLIER = 2.0
"""A step that takes so many times the average counts as one that does so."""

GAIN_FIRST = 1.1
"""Before any step with drafts was seen."""

REST, REST_MAX = 64, 4096
"""Steps without drafts once they do not pay; doubled up to the latter."""

LOOK_AGAIN = 128
"""Steps with drafts before one without: what that takes changes as well."""

HANDOVER_NS = 400_000
"""What a step with drafts costs beside the device's time: it is planned when the tokens before it are known."""

WIDE = 32
"""Tokens that make a step twice as long as it is with one, before any was seen."""


class _Steps:
    """Steps of one number of sequences."""

    __slots__ = ("drafted", "extra_ns", "gain", "plain", "plain_ns", "rest", "rests", "trials")

    def __init__(self) -> None:
        self.plain_ns = 0.0  # of a step without drafts, for each sequence
        self.extra_ns = 0.0  # of a drafted token
        self.gain = GAIN_FIRST
        self.plain = self.drafted = self.trials = 0
        self.rest = self.rests = 0


class Worth:
    """Whether steps with drafts give tokens sooner than steps without, by what the device took for both.

    Steps are compared at equal numbers of sequences, from nine on by fours: a draft is nearly free where reading the
    weights is what takes time, and costs as much as it brings where many sequences share a step.
    """

    __slots__ = ("_steps",)

    def __init__(self) -> None:
        self._steps: dict[int, _Steps] = {}

    def _steps_for(self, sequences: int) -> _Steps:
        return self._steps.setdefault(sequences if sequences <= 8 else 8 + (sequences - 5) // 4, _Steps())

    def drafts_pay(self, sequences: int) -> bool:
        """Whether to look for drafts for a step of so many sequences. Changes nothing."""
        steps = self._steps_for(sequences)
        return steps.plain >= 2 and not steps.rest

    def draft_price(self, sequences: int) -> Price:
        """What drafts save and cost in a step of so many sequences."""
        steps = self._steps_for(sequences)
        return Price(steps.plain_ns, MARGIN * steps.extra_ns)

    def learn_plain_step(self, sequences: int, device_ns: int) -> None:
        """A step gave each of ``sequences`` one token."""
        steps, each_ns = self._steps_for(sequences), device_ns / sequences
        if not steps.plain:
            steps.plain_ns, steps.extra_ns = each_ns, device_ns / WIDE
        else:
            steps.plain_ns += SETTLED * (min(each_ns, OUTLIER * steps.plain_ns) - steps.plain_ns)
            steps.extra_ns *= FADE_PRICE
        steps.plain += 1
        steps.rest = max(0, steps.rest - 1)

    def learn_drafted_step(self, sequences: int, tokens: int, drafts: int, device_ns: int) -> None:
        """A step with ``drafts`` drafted tokens gave ``sequences`` together ``tokens``."""
        steps = self._steps_for(sequences)
        if not steps.plain:
            return
        step_ns = steps.plain_ns * sequences
        took_ns = min(float(device_ns), OUTLIER * (step_ns + steps.extra_ns * drafts))
        steps.extra_ns += SETTLED * (max(0.0, took_ns - step_ns) / drafts - steps.extra_ns)
        steps.gain += SETTLED * (tokens * steps.plain_ns / (took_ns + HANDOVER_NS) - steps.gain)
        steps.trials += 1
        steps.drafted += 1
        if steps.trials >= TRIALS and steps.gain < GAIN_LEAST:
            steps.rest = min(REST << steps.rests, REST_MAX)
            steps.rests = min(steps.rests + 1, 16)
            steps.trials, steps.gain = 0, GAIN_FIRST
        elif steps.trials >= TRIALS:
            steps.rests = 0
        if steps.drafted % LOOK_AGAIN == 0:
            steps.rest = max(steps.rest, 2)
