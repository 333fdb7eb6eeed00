"""Scheduling by service-level objectives: how much prefill the next plan may hold beside requests that decode.

LayerKV, equations 1 and 2: a decoding request of which a token may take ``S`` on average has some left over of the time
that all its tokens may take::

    slack_i = S * (past_i + future_i) - (time since its first token + future_i * time of a further token)

``future_i`` is the lower bound of what is expected of its answer (``OutputLengths``). A further token is
taken to need the mean of a decode step without prompts and of what the request's tokens have taken so far: more prompts
will come. With the step alone a long answer spends at its start what it lacks at its end (``bench/slo_noise.py``).
Prompts may be computed for as long as the smallest slack lasts. Algorithm 1 admits whole prompts by it; here it bounds
the prefill tokens of every plan, which holds the same line where prompts are computed in pieces.

An answer that was swapped out behind its first token gets no token until others have ended. That time counts, too:
prompts are held back where it would miss. Those that cannot be in time any more wait for those that can.

A request that misses its objective even if no prompt comes any more does not hold others up: without hope for any of
them the plan is filled as without objectives.

How long an answer will be: learnt from those that this deployment has finished.

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
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from memserve.base.config import SchedulerConfig
from memserve.base.errors import check
from memserve.base.types import FinishReason
from memserve.base.units import NS_PER_MS, ceil_div
from memserve.instance.scheduler.sequence import Group, Sequence
from memserve.kv.costs import PreemptionModel

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


Answer = tuple[str, int, int]
"""Of one that has ended: its tenant, tokens of its prompt, and its own."""


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

    def add_length(self, tokens: int) -> None:
        self.counts[_bin_of(tokens)] += 1.0
        self.total += 1.0
        if self.total > _KEPT:
            self.counts = [count / 2 for count in self.counts]
            self.total = sum(self.counts)

    def count_longer(self, tokens: int) -> float:
        """How many answers were longer than ``tokens``; inside a bin lengths are taken to be spread evenly."""
        place = _bin_of(tokens)
        first, end = EDGES[place], _end_of(place)
        return self.counts[place] * (end - tokens - 1) / (end - first) + sum(self.counts[place + 1 :])

    def length_at(self, above: float) -> int:
        """The length that ``above`` of the answers exceed."""
        remaining = above
        for place in range(len(EDGES) - 1, -1, -1):
            count = self.counts[place]
            if count > remaining or (count == remaining and count):
                first, end = EDGES[place], _end_of(place)
                return max(first, round(end - 1 - remaining / count * (end - first)))
            remaining -= count
        return 1


def _bin_of(tokens: int) -> int:
    return max(0, bisect_right(EDGES, tokens) - 1)


def _end_of(place: int) -> int:
    return EDGES[place + 1] if place + 1 < len(EDGES) else 2 * EDGES[-1]


class OutputLengths:
    """The lengths of finished answers, by tenant and size of prompt, and what they say of those that run."""

    def __init__(self) -> None:
        self._lengths_by_kind: OrderedDict[Kind, _Seen] = OrderedDict()  # least recently finished first
        #: finished answers by the class that their length fell into, of the classes that were predicted at the start
        self.classes = dict.fromkeys(CLASSES, 0)
        self.finished = 0
        #: of answers that ended here and that other instances have not been told of, the newest
        self._untold: deque[Answer] = deque(maxlen=_KEPT)

    def take_untold(self) -> list[Answer]:
        """The answers that have ended here since the last call, for other instances and later starts."""
        answers = list(self._untold)
        self._untold.clear()
        return answers

    def learn_answers(self, answers: Iterable[Answer]) -> None:
        """Answers that have ended elsewhere, or before the start."""
        for tenant, prompt_tokens, generated in answers:
            self._count_answer(tenant, prompt_tokens, generated)

    def learn_length(self, tenant: str, prompt_tokens: int, generated: int) -> None:
        """An answer has come to its own end after ``generated`` tokens. Not for those that were called off."""
        check(generated >= 0, "{} tokens were generated", generated)
        tokens = max(1, generated)
        lengths = self._lengths_like(tenant, prompt_tokens)
        if lengths is not None:
            self.classes[CLASSES[self._class_of(lengths, tokens)]] += 1
        self.finished += 1
        self._untold.append((tenant, prompt_tokens, tokens))
        self._count_answer(tenant, prompt_tokens, tokens)

    def _count_answer(self, tenant: str, prompt_tokens: int, tokens: int) -> None:
        for kind in _kinds(tenant, prompt_tokens):
            self._lengths_by_kind.setdefault(kind, _Seen()).add_length(tokens)
            self._lengths_by_kind.move_to_end(kind)
        while len(self._lengths_by_kind) > _KINDS_MAX:
            self._lengths_by_kind.popitem(last=False)

    def predict_length(self, tenant: str, prompt_tokens: int, generated: int, most: int) -> Prediction:
        """Of an answer that has ``generated`` tokens, goes on, and ends after ``most`` at the latest."""
        certain = min(generated + 1, most)
        lengths = self._lengths_like(tenant, prompt_tokens)
        longer_count = lengths.count_longer(generated) if lengths is not None else 0.0
        if lengths is None or longer_count < 1.0:  # longer than all that were seen
            return Prediction(certain, certain, 0)
        lower = EDGES[
            _bin_of(lengths.length_at(longer_count * (1.0 - LOWER)))
        ]  # the bin's first length: a bound, not a guess
        median = lengths.length_at(longer_count * (1.0 - MEDIAN))
        return Prediction(_between(certain, lower, most), _between(certain, median, most), round(longer_count))

    def _lengths_like(self, tenant: str, prompt_tokens: int) -> _Seen | None:
        for kind in _kinds(tenant, prompt_tokens):
            lengths = self._lengths_by_kind.get(kind)
            if lengths is not None and lengths.total >= _SEEN_MIN:
                return lengths
        return None

    @staticmethod
    def _class_of(lengths: _Seen, tokens: int) -> int:
        return sum(tokens > lengths.length_at(lengths.total * (1.0 - share)) for share in RANGES)

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the books do not agree. For tests; slow."""
        check(len(self._lengths_by_kind) <= _KINDS_MAX, "{} kinds are kept", len(self._lengths_by_kind))
        check(sum(self.classes.values()) <= self.finished, "more answers were judged than have finished")
        for kind, lengths in self._lengths_by_kind.items():
            check(abs(sum(lengths.counts) - lengths.total) < 1e-6 * _KEPT, "answers of {} are counted wrongly", kind)


def _kinds(tenant: str, prompt_tokens: int) -> tuple[Kind, Kind, Kind]:
    """From the closest kind to all answers."""
    return (tenant, prompt_tokens.bit_length()), (tenant, -1), ("", -2)


def _between(least: int, tokens: int, most: int) -> int:
    return min(max(least, tokens), most)


_LATE_WAITS = 2  # times the time that it was given: longer no answer waits for others because it is late
_LOOKS_AHEAD = 64  # of the answers that wait for memory
_AIMS_SHARE = 20  # slack is counted against a twentieth less than the objective: steps become longer as batches grow


@dataclass(frozen=True, slots=True)
class ObjectiveReport:
    """How objectives were kept since the instance was made."""

    ttft_met: int = 0
    ttft_missed: int = 0
    tpot_met: int = 0
    tpot_missed: int = 0
    plans_limited: int = 0
    """Plans that had less prefill than they had room for."""
    output_classes: dict[str, int] = field(default_factory=dict)
    """Finished answers by the percentiles (:data:`memserve.instance.scheduler.slo.CLASSES`) between which their length
    was, of what had been seen before: calibrated predictions put 10, 15, 25, 25, 15 and 10 % of them there."""


class Objectives:
    """The objectives of one instance: what they allow, and whether they are met."""

    def __init__(self, config: SchedulerConfig, costs: PreemptionModel) -> None:
        check(config.slo_tpot_ns is not None, "scheduling by objectives without one")
        self._tpot_ns = config.slo_tpot_ns or 0
        self._ttft_ns = config.slo_ttft_ns
        self._costs = costs
        self.lengths = OutputLengths()
        self._limited = 0
        self._met = {(metric, met): 0 for metric in ("ttft", "tpot") for met in (True, False)}

    # -- what is learnt

    def on_token_emitted(self, sequence: Sequence, reason: FinishReason | None, now_ns: int) -> None:
        """A first or last token of ``sequence`` is emitted: was it in time?"""
        group = sequence.group
        if sequence.since_ns is None:
            self._start_clock(sequence, now_ns)
            ttft_ns = self._ttft_of(group)
            if ttft_ns is not None and len(sequence.out) == 1:
                took_ns = now_ns - group.arrived_ns
                self._met["ttft", took_ns <= ttft_ns] += 1
                group.facts.append(("slo_ttft", f"{took_ns // NS_PER_MS} of {ttft_ns // NS_PER_MS} ms"))
            self._note_expected(sequence)
        if reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        self.lengths.learn_length(group.tenant, sequence.prompt_tokens, len(sequence.out))
        steps = len(sequence.out) - sequence.since_tokens
        if steps and sequence.since_ns is not None:
            tpot_ns, took_ns = self._tpot_of(group), now_ns - sequence.since_ns
            self._met["tpot", took_ns <= tpot_ns * steps] += 1
            took_ms = took_ns / steps / NS_PER_MS
            group.facts.append(("slo_tpot", f"{took_ms:.1f} of {tpot_ns // NS_PER_MS} ms"))

    def _note_expected(self, sequence: Sequence) -> None:
        expected = self.expected(sequence)
        if expected.answers:
            like = f"{expected.lower} tokens or more, {expected.median} at the median of {expected.answers} answers"
            sequence.group.facts.append(("expected_answer", like))

    @staticmethod
    def _start_clock(sequence: Sequence, now_ns: int) -> None:
        sequence.since_ns, sequence.since_tokens = now_ns, len(sequence.out)

    def _ttft_of(self, group: Group) -> int | None:
        asked_ns = group.request.slo_ttft_ns
        return self._ttft_ns if asked_ns is None else asked_ns

    def _tpot_of(self, group: Group) -> int:
        asked_ns = group.request.slo_tpot_ns
        return self._tpot_ns if asked_ns is None else asked_ns

    # -- what is allowed

    def prefill_tokens(
        self, decoding: list[Sequence], first: Sequence, budget: int, now_ns: int, swapped: list[Sequence] | None = None
    ) -> int:
        """Prefill tokens that the next plan, which begins at ``now_ns``, may hold: at most ``budget``, which is
        positive. ``first``: the prompt that is next; ``swapped``: answers that wait in DRAM for memory, in rank
        order."""
        slacks_ns = self.slacks_ns(decoding, now_ns) + self.swapped_slacks_ns(decoding, swapped or [], now_ns)
        if not slacks_ns or not self._costs.samples:  # nothing holds it back, or nothing is known of prefill yet
            return budget
        curve = self._costs.model.prefill
        token_ns = max(1.0, curve.token_ns + curve.pair_ns * first.computed)
        allowed = int(max(0, min(slacks_ns)) / token_ns)
        if allowed >= budget or self._must_go_on(first, slacks_ns, budget, now_ns):
            return budget
        self._limited += 1
        return allowed

    def _must_go_on(self, first: Sequence, slacks_ns: list[int], budget: int, now_ns: int) -> bool:
        """Whether ``first`` can meet its own objective, but not if it waits any longer, and costs at most one other
        request its objective: then nothing is won by holding it back."""
        ttft_ns = self._ttft_of(first.group)
        if ttft_ns is None or first.out:
            return False
        tokens, decode_ns = first.prompt_tokens - first.computed, self._decode_step_ns(len(slacks_ns))
        needs_ns = self._costs.model.prefill.ns(tokens, first.computed) + ceil_div(tokens, budget) * decode_ns
        left_ns = first.group.arrived_ns + ttft_ns - now_ns - needs_ns
        costs_others = sum(0 <= slack_ns < needs_ns for slack_ns in slacks_ns)
        return 0 <= left_ns < 2 * decode_ns and costs_others <= 1

    def slacks_ns(self, decoding: list[Sequence], now_ns: int) -> list[int]:
        """Equation 1 for each request that decodes and can still meet its objective; it may be below 0."""
        slacks: list[int] = []
        decode_ns = self._decode_step_ns(len(decoding))
        for sequence in decoding:
            if sequence.since_ns is None:
                if not sequence.out:
                    continue  # its first token is not known: its time has not begun
                self._start_clock(sequence, now_ns)
            tpot_ns, token_count = self._tpot_of(sequence.group), len(sequence.out) + sequence.inflight
            aim_ns = tpot_ns - tpot_ns // _AIMS_SHARE
            if sequence.expected_tokens <= token_count:
                sequence.expected_tokens = self.expected(sequence).lower
            past, future = token_count - sequence.since_tokens, max(1, sequence.expected_tokens - token_count)
            spent_ns = now_ns - (sequence.since_ns or now_ns)
            left_ns = aim_ns * (past + future) - spent_ns
            if left_ns >= future * decode_ns:
                pace_ns = (spent_ns - sequence.parked_ns) // max(1, past)
                so_far_ns = max(decode_ns, min(pace_ns, aim_ns))
                slacks.append(left_ns - future * (decode_ns + so_far_ns) // 2)
        return slacks

    def swapped_slacks_ns(self, decoding: list[Sequence], swapped: list[Sequence], now_ns: int) -> list[int]:
        """The same for answers that get no tokens until others have ended: each goes on where the next one of those
        before it ends, if all of them take what a step without prompts takes."""
        if not swapped:
            return []
        decode_ns, slacks = self._decode_step_ns(len(decoding)), list[int]()
        ends_ns = [self._length_left(sequence)[1] * decode_ns for sequence in decoding if sequence.out]
        heapify(ends_ns)
        for sequence in swapped[:_LOOKS_AHEAD]:
            past, tokens_left = self._length_left(sequence)
            if self._is_late(sequence, past, tokens_left, now_ns):
                continue  # it waits for the others
            end_ns = (heappop(ends_ns) if ends_ns else 0) + tokens_left * decode_ns
            heappush(ends_ns, end_ns)
            tpot_ns, spent_ns = self._tpot_of(sequence.group), now_ns - (sequence.since_ns or now_ns) + end_ns
            if spent_ns <= tpot_ns * (past + tokens_left):
                slacks.append((tpot_ns - tpot_ns // _AIMS_SHARE) * (past + tokens_left) - spent_ns)
        return slacks

    def next_in_turn(self, swapped: list[Sequence], now_ns: int) -> Sequence:
        """Which of ``swapped``, answers that wait in DRAM in rank order, gets memory next: the first that can still be
        in time. One that cannot waits for them, until it has taken twice its time."""
        candidates = swapped[:_LOOKS_AHEAD]
        in_time = (
            candidate for candidate in candidates if not self._is_late(candidate, *self._length_left(candidate), now_ns)
        )
        return next(in_time, swapped[0])

    def _is_late(self, sequence: Sequence, past: int, tokens_left: int, now_ns: int) -> bool:
        since_ns, group = sequence.since_ns, sequence.group
        if since_ns is None or not tokens_left:
            return False
        given_ns, ttft_ns = self._tpot_of(group) * (past + tokens_left), self._ttft_of(group)
        ends_ns = now_ns - since_ns + tokens_left * self._decode_step_ns(1)
        missed = ends_ns > given_ns or (ttft_ns is not None and since_ns - group.arrived_ns > ttft_ns)
        return missed and now_ns - since_ns < _LATE_WAITS * given_ns

    def _length_left(self, sequence: Sequence) -> tuple[int, int]:
        """Tokens that were told since its time began, and those that are expected behind them; 0: nothing is known."""
        token_count, expected = len(sequence.out) + sequence.inflight, self.expected(sequence)
        past = token_count - sequence.since_tokens
        return past, expected.median - token_count if expected.median > token_count + 1 else 0

    def tokens_left(self, sequence: Sequence) -> int:
        """What ``sequence`` is expected to draw yet: the median of answers like it."""
        return min(self._length_left(sequence)[1] or sequence.draws_left, sequence.draws_left)

    def _decode_step_ns(self, rows: int) -> int:
        return self._costs.decode_ns or self._costs.model.decode.ns(rows, 0)

    def expected(self, sequence: Sequence) -> Prediction:
        """How long the answer of ``sequence``, which goes on, is expected to be."""
        group = sequence.group
        token_count = len(sequence.out) + sequence.inflight
        return self.lengths.predict_length(
            group.tenant, sequence.prompt_tokens, token_count, max(sequence.max_tokens, token_count + 1)
        )

    def report(self) -> ObjectiveReport:
        """What became of them."""
        met = self._met
        return ObjectiveReport(
            met["ttft", True], met["ttft", False], met["tpot", True], met["tpot", False], self._limited,
            dict(self.lengths.classes),
        )  # fmt: skip

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the books do not agree. For tests; slow."""
        self.lengths.check_invariants()
        check(self._costs.decode_ns >= 0, "a decode step takes {} ns", self._costs.decode_ns)
