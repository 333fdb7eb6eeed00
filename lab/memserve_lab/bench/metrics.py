"""Latency, throughput and goodput of requests: pure functions of records.

====== ===================================================================================================
TTFT   from the scheduled arrival to the first chunk with text
TPOT   from the first to the last chunk, over the tokens after the first; requests of one token have none
ITL    between consecutive chunks (tokens that arrived together are one chunk)
JCT    from the scheduled arrival to the end: the job completion time of MemServe's section 8
====== ===================================================================================================

Only requests that were answered to their end have these times; the others count as violations of every SLO.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from memserve.base.units import NS_PER_S
from memserve_lab.bench.load.prompts import Outcome, RequestRecord
from memserve_lab.workloads.statistics import Spread, spread

Floats = NDArray[np.float64]
Key = TypeVar("Key")
Statistic = Callable[[Floats], float]
"""A statistic of a sample of at least one value."""
BOOTSTRAP_ROUNDS = 400
REASON_CHARS_MAX = 160
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Timing:
    """One answered request, in seconds."""

    ttft_s: float
    tpot_s: float | None
    jct_s: float
    itl_s: tuple[float, ...]


def timing(record: RequestRecord) -> Timing | None:
    """Latencies of ``record``. None: the request was not answered to its end, or has no token."""
    if not record.ok or record.first_ns is None or record.end_ns is None:
        return None
    times = record.token_ns
    later = record.output_tokens - 1
    tpot_s = (times[-1] - times[0]) / NS_PER_S / later if later > 0 and len(times) > 1 else None
    return Timing(
        (record.first_ns - record.scheduled_ns) / NS_PER_S,
        tpot_s,
        (record.end_ns - record.scheduled_ns) / NS_PER_S,
        tuple((after - before) / NS_PER_S for before, after in itertools.pairwise(times)),
    )


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits of a good request, in seconds. None: no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    jct_s: float | None = None

    def is_kept(self, felt: Timing | None) -> bool:
        """Whether the request keeps all limits. False for a request without an answer."""
        if felt is None:
            return False
        pairs = ((felt.ttft_s, self.ttft_s), (felt.tpot_s, self.tpot_s), (felt.jct_s, self.jct_s))
        return all(value is None or limit is None or value <= limit for value, limit in pairs)


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a set of requests. Rates are over ``wall_s``."""

    requests: int
    failed: int
    stopped: int
    """Requests under way when the run ended: neither answered nor failed, and in no other count."""
    wall_s: float
    ttft_s: Spread | None
    tpot_s: Spread | None
    itl_s: Spread | None
    jct_s: Spread | None
    late_s: Spread | None
    """The client's own lateness: scheduled to sent."""
    requests_per_s: float
    output_tokens_per_s: float
    goodput_per_s: float
    """Requests that kept the SLO, a second (DistServe's goodput)."""
    slo_violations: float
    """Share of the ended requests that missed the SLO."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    fetched_tokens: int = 0
    """Cached tokens that came from another instance."""
    errors: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    """Kind of error, as in :attr:`errors` -> the server's message to the first such request."""

    @property
    def cached_share(self) -> float:
        """Share of the prompt tokens with KV from the cache."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def fetched_share(self) -> float:
        """Share of the prompt tokens with KV from another instance's cache."""
        return self.fetched_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def figures(records: Sequence[RequestRecord], *, slo: Slo | None = None, wall_s: float | None = None) -> Figures:
    """Figures of ``records``. ``wall_s``: their total duration. None: from the first arrival to the last end."""
    complete = [record for record in records if record.outcome is not Outcome.STOPPED]
    felt = [timing(record) for record in complete]
    answered = [latency for latency in felt if latency is not None]
    kept_count = sum(map((slo or Slo()).is_kept, felt))
    wall_s = wall_s if wall_s is not None else wall_seconds(complete)
    output_tokens = sum(record.output_tokens for record in complete if record.ok)
    return Figures(
        requests=len(complete),
        failed=sum(not record.ok for record in complete),
        stopped=len(records) - len(complete),
        wall_s=wall_s,
        ttft_s=spread(latency.ttft_s for latency in answered),
        tpot_s=spread(latency.tpot_s for latency in answered if latency.tpot_s is not None),
        itl_s=spread(gap for latency in answered for gap in latency.itl_s),
        jct_s=spread(latency.jct_s for latency in answered),
        late_s=spread((r.sent_ns - r.scheduled_ns) / NS_PER_S for r in complete if r.sent_ns is not None),
        requests_per_s=_rate(sum(record.ok for record in complete), wall_s),
        output_tokens_per_s=_rate(output_tokens, wall_s),
        goodput_per_s=_rate(kept_count, wall_s),
        slo_violations=1 - kept_count / len(complete) if complete else 0.0,
        prompt_tokens=sum(record.prompt_tokens or 0 for record in complete if record.ok),
        cached_tokens=sum(record.cached_tokens or 0 for record in complete if record.ok),
        output_tokens=output_tokens,
        fetched_tokens=sum(record.fetched_tokens for record in complete if record.ok),
        errors=_errors(complete),
        reasons=_reasons(complete),
    )


def _rate(count: int, wall_s: float) -> float:
    return count / wall_s if wall_s > 0 else 0.0


def _errors(records: Iterable[RequestRecord]) -> dict[str, int]:
    """Outcome and HTTP status -> failed requests."""
    counts = Counter(_kind_of_error(record) for record in records if not record.ok)
    return dict(sorted(counts.items()))


def _reasons(records: Iterable[RequestRecord]) -> dict[str, str]:
    reasons: dict[str, str] = {}
    for record in records:
        if not record.ok and record.error:
            reasons.setdefault(_kind_of_error(record), record.error[:REASON_CHARS_MAX])
    return dict(sorted(reasons.items()))


def _kind_of_error(record: RequestRecord) -> str:
    return record.outcome.value + (f" {record.http_status}" if record.http_status not in (None, 200) else "")


def wall_seconds(records: Sequence[RequestRecord]) -> float:
    """From the first scheduled arrival to the last end."""
    ends = [record.end_ns for record in records if record.end_ns is not None]
    if not ends:
        return 0.0
    return (max(ends) - min(record.scheduled_ns for record in records)) / NS_PER_S


def by_setting(records: Iterable[RequestRecord]) -> dict[tuple[str, str], list[RequestRecord]]:
    """``(workload, setting)`` -> its records of all seeds, in order of first occurrence."""
    return _grouped(records, lambda record: (record.workload, record.setting))


def by_turn(records: Iterable[RequestRecord]) -> dict[int, list[RequestRecord]]:
    """Turn -> its records, in the order of the turns."""
    return dict(sorted(_grouped(records, lambda record: record.turn).items()))


def by_run(records: Iterable[RequestRecord]) -> dict[int, list[RequestRecord]]:
    """Seed -> its records."""
    return _grouped(records, lambda record: record.seed)


def _grouped(records: Iterable[RequestRecord], key: Callable[[RequestRecord], Key]) -> dict[Key, list[RequestRecord]]:
    groups: dict[Key, list[RequestRecord]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups


def mean(values: Floats) -> float:
    """Arithmetic mean."""
    return float(values.mean())


def p95(values: Floats) -> float:
    """The 95th percentile."""
    return _percentile(values, 95)


def p99(values: Floats) -> float:
    """The 99th percentile."""
    return _percentile(values, 99)


def _percentile(values: Floats, percent: float) -> float:
    """``np.percentile`` to the last bit, of a list without NaN: a bootstrap asks a thousand times for that of a few
    values, for which numpy takes ten times as long."""
    ordered, place = np.sort(values), (len(values) - 1) * (percent / 100)
    below = int(place)
    low, high = float(ordered[below]), float(ordered[min(below + 1, len(ordered) - 1)])
    step, share = high - low, place - below
    return high - step * (1 - share) if share >= 0.5 else low + step * share


def bootstrap(
    groups: Sequence[Sequence[float]], statistic: Statistic, *, seed: int = 0, rounds: int = BOOTSTRAP_ROUNDS
) -> tuple[float, float] | None:
    """A 95 % confidence interval of ``statistic`` by the percentile bootstrap (Efron 1979).

    Whole groups are drawn, not values: requests of one session depend on each other, and so do those of one run. None:
    fewer than two groups have values.
    """
    arrays = [np.asarray(group, dtype=np.float64) for group in groups if len(group)]
    if len(arrays) < 2:
        return None
    rows_sampled = np.random.default_rng(seed).integers(len(arrays), size=(rounds, len(arrays)))
    return _middle([statistic(np.concatenate([arrays[index] for index in row])) for row in rows_sampled])


def _middle(values: Sequence[float]) -> tuple[float, float]:
    """The interval of the middle 95 % of ``values``."""
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(values, (tail, 100 - tail))
    return float(low), float(high)


def paired(
    before: Iterable[RequestRecord],
    after: Iterable[RequestRecord],
    value: Callable[[Timing], float | None],
    statistic: Statistic,
    *,
    seed: int = 0,
) -> tuple[float, float] | None:
    """The confidence interval of ``statistic(after) / statistic(before) - 1``, sessions drawn in pairs.

    Both settings got the same sessions, so differences between sessions cancel out. None: fewer than two
    sessions were answered by both.
    """
    olds, news = _values_by_session(before, value), _values_by_session(after, value)
    common = [key for key, numbers in olds.items() if numbers and news.get(key)]
    if len(common) < 2:
        return None
    pairs = [(np.asarray(olds[key], dtype=np.float64), np.asarray(news[key], dtype=np.float64)) for key in common]
    rows_sampled = np.random.default_rng(seed).integers(len(pairs), size=(BOOTSTRAP_ROUNDS, len(pairs)))
    changes = []
    for row in rows_sampled:
        was, now = (statistic(np.concatenate([pairs[index][side] for index in row])) for side in (0, 1))
        changes.append(now / was - 1 if was > 0 else 0.0)
    return _middle(changes)


def interval(
    records: Iterable[RequestRecord], value: Callable[[Timing], float | None], statistic: Statistic, *, seed: int = 0
) -> tuple[float, float] | None:
    """The confidence interval of a statistic of latencies; the groups are the sessions of each run."""
    return bootstrap(list(_values_by_session(records, value).values()), statistic, seed=seed)


def _values_by_session(
    records: Iterable[RequestRecord], value: Callable[[Timing], float | None]
) -> dict[tuple[int, str], list[float]]:
    groups = {}
    for key, members in _grouped(records, lambda record: (record.seed, record.session)).items():
        felt = (timing(record) for record in members)
        numbers = (value(latency) for latency in felt if latency is not None)
        groups[key] = [number for number in numbers if number is not None]
    return groups
