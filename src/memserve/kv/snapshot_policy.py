"""Which recurrent states are worth a snapshot, and which snapshots are worth their memory.

A policy says where a prompt leaves snapshots (:meth:`SnapshotPolicy.choose_positions`) and which cached one goes next
(:meth:`SnapshotPolicy.choose_victim`). The rest is alike for every policy: a cached snapshot holds the KV before it, KV
that no snapshot stands behind goes first, and a snapshot goes without the KV that others stand behind.

:class:`MeasuredPolicy` is the one of instances. Nothing in it is tuned: it counts what snapshots are used for.

* *Which goes*: the one with the least ``chance / age * saved / freed``. ``saved`` is the time of computing the tokens
  that it saves beside the snapshot before it, by the instance's own curves; ``freed`` is the memory that its loss
  frees, with the KV that it alone stands behind; ``chance`` is the share of snapshots of its phase that were used
  before their age doubled. A phase is a kind (branch, prompt's end ...), whether a longer one stands for it, and uses.
* *Where*: behind an answer always. Where a prompt parts from cached KV, at its end, and some blocks before its end, if
  that is expected to save more than an eviction has cost lately. What positions save is seen without a snapshot there:
  identities of those that were tried, or given up, are remembered, and later prompts are compared with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from memserve.base.types import Tier
from memserve.kv.state_snapshot import PlannedPrompt, SnapshotKind, StateSnapshot


class SnapshotPolicy(Protocol):
    """Decides; it hears of every cached snapshot."""

    answer_interval: int
    """Tokens of an answer between two snapshots that stay. 0: only its end does."""

    def choose_positions(self, prompt: PlannedPrompt) -> Iterable[int]:
        """Behind how many tokens snapshots are to stay in the cache: whole blocks, beyond where the prompt starts."""

    def on_kept(self, snapshot: StateSnapshot) -> None:
        """It is cached now."""

    def on_used(self, snapshot: StateSnapshot) -> None:
        """A sequence goes on from it."""

    def on_gone(self, snapshot: StateSnapshot, *, evicted: bool) -> None:
        """It is cached no more. ``evicted``: for room; else its KV is gone, or not to be trusted."""

    def on_moving(self, snapshot: StateSnapshot) -> None:
        """It is about to lie on another tier."""

    def on_moved(self, snapshot: StateSnapshot) -> None:
        """It lies there."""

    def choose_victim(self, owner: bytes, tier: Tier) -> StateSnapshot | None:
        """The cached snapshot of ``owner`` that leaves ``tier`` next. None: there is none that may."""

    def score_of(self, snapshot: StateSnapshot) -> float:
        """What it is expected to save, for what it takes: the one with the least goes first."""


_DECAY_AT = 1024
"""What is counted halves after so many cases: workloads change."""
_GHOSTS_MAX = 1 << 15
"""Positions that are remembered, to see what a snapshot there would have saved: about 4 MB."""
_DISTANCES = (0, 1, 2, 4, 8, 16, 32, 64)
"""Blocks before a prompt's end that are tried."""
_LOST = 1 << len(_DISTANCES)
_LINES_PER_OCTAVE = 2
"""Snapshots whose worth differs by less than the square root of two stand in one line."""

Phase = tuple[SnapshotKind, bool, int]
"""Of a cached snapshot: its kind, whether a longer one stands for it, how often it was used (2: or more)."""
LineKey = tuple[Phase, int]
"""A phase, and the logarithm of the worth."""


@dataclass(slots=True)
class _Share:
    """How much of a quantity each of several cases brought. The newest ``_DECAY_AT`` to twice as many count."""

    total: float = 0.0
    cases: float = 0.0

    def count(self, amount: float, cases: float = 1) -> None:
        self.total, self.cases = self.total + amount, self.cases + cases
        if self.cases > _DECAY_AT:
            self.total, self.cases = self.total / 2, self.cases / 2

    @property
    def mean(self) -> float:
        return self.total / self.cases if self.cases else 0.0

    @property
    def chance(self) -> float:
        """Of a case that brings one or nothing: one half before anything is known (Laplace)."""
        return (self.total + 1) / (self.cases + 2)


@dataclass(slots=True)
class _Place:
    """Where a cached snapshot stands."""

    key: LineKey
    used_at: int
    is_fresh: bool
    """It has not been used in this phase."""


class _Chances:
    """How often snapshots of one phase are used: of all of them, and of those that have reached some age."""

    __slots__ = ("_ages", "all")

    def __init__(self) -> None:
        self.all = _Share()
        self._ages: list[_Share] = []

    def count(self, age: int, used: int) -> None:
        """One has stood for ``age`` in this phase; it was used then (1), or has gone (0)."""
        reached = age.bit_length()
        self._ages += [_Share() for _ in range(reached - len(self._ages))]
        for octave in self._ages[: reached - 1]:
            octave.count(0)
        self._ages[reached - 1].count(used)

    def at_age(self, age: int) -> float:
        """The chance that one that has come to ``age`` is used before that has doubled."""
        octave = age.bit_length() - 1
        rest = age / (1 << octave) - 1
        return (1 - rest) * self._in_octave(octave) + rest * self._in_octave(octave + 1)

    def _in_octave(self, octave: int) -> float:
        share = self._ages[octave] if octave < len(self._ages) else _Share()
        return (share.total + self.all.chance) / (share.cases + 1)  # what is known of all weighs as much as one case


class _Ghosts:
    """The newest positions that were tried or lost, by the identity of their block: a bit for each number."""

    __slots__ = ("_bits",)

    def __init__(self) -> None:
        self._bits: dict[bytes, int] = {}

    def add(self, identity: bytes, bit: int) -> None:
        self._bits[identity] = self._bits.pop(identity, 0) | bit
        if len(self._bits) > _GHOSTS_MAX:
            del self._bits[next(iter(self._bits))]

    def remove(self, identity: bytes, bit: int) -> None:
        bits = self._bits.get(identity, 0) & ~bit
        if bits:
            self._bits[identity] = bits
        else:
            self._bits.pop(identity, None)

    def deepest(self, identities: bytes, least_blocks: int) -> Iterator[tuple[int, int]]:
        """Of a prompt with these blocks, the deepest positions of each bit: ``(blocks, bits)``, the deepest first, all
        beyond ``least_blocks``."""
        if not self._bits:
            return
        unseen = -1
        for blocks in range(len(identities) // 16, least_blocks, -1):
            bits = self._bits.get(identities[16 * blocks - 16 : 16 * blocks], 0) & unseen
            if bits:
                unseen &= ~bits
                yield blocks, bits


class MeasuredPolicy:
    """See the module. Deterministic: equal calls give equal answers."""

    answer_interval = 0

    def __init__(self, compute_ns: Callable[[int, int], int], token_bytes: float, state_bytes: float) -> None:
        """``compute_ns(new, context)``: what computing tokens behind others takes here, as far as it is known now.
        ``token_bytes``, ``state_bytes``: of KV of a token, and of a snapshot, in any one unit."""
        self._compute_ns = compute_ns
        self._token_bytes, self._state_bytes = token_bytes, state_bytes
        self._prompts = 0
        """The clock: an age is a number of prompts."""
        self._places: dict[StateSnapshot, _Place] = {}
        self._lines: dict[tuple[bytes, Tier], dict[LineKey, dict[StateSnapshot, None]]] = {}
        """By owner and tier."""
        self._uses: dict[Phase, _Chances] = {}
        self._source: StateSnapshot | None = None
        self._ghosts = _Ghosts()
        self._gains = [[_Share() for _ in _DISTANCES] for _ in _DISTANCES]
        """What a snapshot so far before a prompt's end would have saved beside one that is so far before it: row by row
        the other one, in the diagonal beside none."""
        self._losses = _Share()
        """What those that were given up would have saved."""

    # -- where

    def choose_positions(self, prompt: PlannedPrompt) -> Iterable[int]:
        """Where it parts, at its end and before that, as far as it pays; see :class:`SnapshotPolicy`."""
        self._prompts += 1
        self._learn_gains(prompt)
        start, last, parting = prompt.start_tokens, prompt.last_tokens, prompt.parting_tokens
        price_ns = self._losses.mean
        positions = {last - _DISTANCES[number] * prompt.block_tokens for number in self._distances_that_pay(price_ns)}
        chance = self._chances_of((SnapshotKind.BRANCH, False, 0)).all.chance
        if parting and chance * self._saved_ns(parting, start) >= price_ns:
            positions.add(parting)
        for number, distance in enumerate(_DISTANCES):
            tokens = last - distance * prompt.block_tokens
            if tokens > start:
                self._ghosts.add(prompt.identity_at(tokens), 1 << number)
                for gains in self._gains:
                    gains[number].count(0)
        return sorted(position for position in positions if position > start)

    def _distances_that_pay(self, price_ns: float) -> list[int]:
        """Numbers of the distances before a prompt's end at which snapshots save more than they are expected to cost:
        the best one, then what pays beside those. Its end, too, while nothing is known to be lost for it."""
        chosen: list[int] = []
        numbers = range(len(_DISTANCES))
        while len(chosen) < len(_DISTANCES):
            gains_ns = [min(self._gains[place][number].mean for place in chosen or [number]) for number in numbers]
            best = max((number for number in numbers if number not in chosen), key=lambda number: gains_ns[number])
            if gains_ns[best] <= price_ns:
                break
            chosen.append(best)
            if not price_ns:  # no measure of what further ones cost
                break
        return chosen if price_ns else [*{0, *chosen}]

    def _learn_gains(self, prompt: PlannedPrompt) -> None:
        """What snapshots that were not taken, or were given up, would have saved for this prompt."""
        source, self._source = self._source, None
        base = start = prompt.start_tokens
        if source is not None and source.tokens == start and source.kind in (SnapshotKind.BEHIND, SnapshotKind.PROMPT):
            base -= source.gap_tokens  # a gain must not vanish where there is a snapshot that was taken for it
        saved_ns = [0] * len(_DISTANCES)
        for blocks, bits in self._ghosts.deepest(prompt.identities, base // prompt.block_tokens):
            tokens = blocks * prompt.block_tokens
            if bits & _LOST and tokens > start:
                self._losses.count(self._saved_ns(tokens, start), 0)
            for number in range(len(_DISTANCES)):
                if bits >> number & 1:
                    saved_ns[number] = self._saved_ns(tokens, base)
        if any(saved_ns):
            for place, gains in enumerate(self._gains):
                for number, share in enumerate(gains):
                    other_ns = saved_ns[place] if place != number else 0
                    share.count(max(0, saved_ns[number] - other_ns), 0)

    def _saved_ns(self, tokens: int, base: int) -> int:
        return self._compute_ns(tokens - base, base)

    # -- which

    def on_kept(self, snapshot: StateSnapshot) -> None:
        """It stands in a line from now on; one before it may have another phase."""
        self._ghosts.remove(snapshot.identity, _LOST)
        self._enter_phase(snapshot)
        for other in (snapshot.parent, *snapshot.children):
            if other is not None and other in self._places:
                self._enter_phase(other)

    def on_used(self, snapshot: StateSnapshot) -> None:
        """Its phase has come to something; the prompt that is planned next goes on from it."""
        self._source = snapshot
        if snapshot in self._places:
            place = self._places[snapshot]
            chances = self._chances_of(place.key[0])
            chances.all.count(1)
            chances.count(self._age_of(place), 1)
            self._leave_line(snapshot)
            place.used_at, place.is_fresh = self._prompts, False
            self._join_line(snapshot, place)
            self._enter_phase(snapshot)

    def on_gone(self, snapshot: StateSnapshot, *, evicted: bool) -> None:
        """Evicted, it is remembered: a prompt that would have gone on from it shows what that has cost."""
        self._leave_line(snapshot)
        place = self._places.pop(snapshot)
        if evicted:
            self._losses.count(0)
            self._ghosts.add(snapshot.identity, _LOST)
            chances = self._chances_of(place.key[0])
            chances.count(self._age_of(place), 0)
            if place.is_fresh:
                chances.all.count(0)
        if snapshot.parent is not None and snapshot.parent in self._places:
            self._enter_phase(snapshot.parent)

    def on_moving(self, snapshot: StateSnapshot) -> None:
        """It leaves its line."""
        self._leave_line(snapshot)

    def on_moved(self, snapshot: StateSnapshot) -> None:
        """It stands in the one of its tier, as the newest there."""
        self._join_line(snapshot, self._places[snapshot])

    def choose_victim(self, owner: bytes, tier: Tier) -> StateSnapshot | None:
        """The least of the oldest in each line; see the module."""
        victim, least = None, 0.0
        for line in self._lines.get((owner, tier), {}).values():
            oldest = next((snapshot for snapshot in line if snapshot.is_ordinary), None)
            if oldest is None:
                continue
            score = self.score_of(oldest)
            if victim is None or score < least:
                victim, least = oldest, score
        return victim

    def score_of(self, snapshot: StateSnapshot) -> float:
        """The chance of a use before its age doubles, over age, times what it saves for each byte."""
        place = self._places[snapshot]
        age = self._age_of(place)
        return self._chances_of(place.key[0]).at_age(age) / age * self.worth_of(snapshot)

    def worth_of(self, snapshot: StateSnapshot) -> float:
        """What a use of it saves, for each byte that its loss frees."""
        gap = snapshot.gap_tokens
        freed = self._state_bytes + (0.0 if snapshot.children else gap * self._token_bytes)
        return self._compute_ns(gap, snapshot.tokens - gap) / freed

    def _enter_phase(self, snapshot: StateSnapshot) -> None:
        """Its phase or its worth may be another one now."""
        phase = snapshot.kind, bool(snapshot.children), min(2, snapshot.uses)
        place = self._places.get(snapshot)
        key = phase, round(_LINES_PER_OCTAVE * math.log2(max(self.worth_of(snapshot), 1e-300)))
        if place is None:
            place = self._places[snapshot] = _Place(key, self._prompts, is_fresh=True)
        elif place.key != key:
            self._leave_line(snapshot)
            if place.key[0] != phase:
                place.is_fresh = True
            place.key = key
        else:
            return
        self._join_line(snapshot, place)

    def _join_line(self, snapshot: StateSnapshot, place: _Place) -> None:
        self._lines.setdefault((snapshot.owner, snapshot.tier), {}).setdefault(place.key, {})[snapshot] = None

    def _leave_line(self, snapshot: StateSnapshot) -> None:
        name, key = (snapshot.owner, snapshot.tier), self._places[snapshot].key
        lines = self._lines[name]
        del lines[key][snapshot]
        if not lines[key]:
            del lines[key]
        if not lines:
            del self._lines[name]

    def _chances_of(self, phase: Phase) -> _Chances:
        chances = self._uses.get(phase)
        if chances is None:
            chances = self._uses[phase] = _Chances()
        return chances

    def _age_of(self, place: _Place) -> int:
        return max(1, self._prompts - place.used_at)
