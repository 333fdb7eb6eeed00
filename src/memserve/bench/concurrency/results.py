"""What ``memserve bench concurrency`` finds (level 4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from memserve import __version__
from memserve.bench import metrics
from memserve.bench.load.record import Outcome, RequestRecord
from memserve.bench.metrics import Floats, Timing, timing
from memserve.units import NS_PER_S

REFUSED_STATUS = (429, 503)
"""What a server says that does not let a request in."""


def p95(values: Floats) -> float:
    """The value that one in twenty exceeds."""
    return float(np.percentile(values, 95))


@dataclass(frozen=True, slots=True)
class Estimate:
    """A statistic of all repetitions, with a 95 % confidence interval (bootstrap over repetitions) where there are two
    or more."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, groups: Sequence[Sequence[float]], statistic: metrics.Statistic) -> Estimate | None:
        """``groups``: the values of each repetition. ``None`` of nothing."""
        values = np.array([value for group in groups for value in group], dtype=np.float64)
        if not values.size:
            return None
        value = statistic(values)
        low, high = metrics.bootstrap(groups, statistic) or (value, value)
        return cls(value, low, high)


@dataclass(frozen=True, slots=True)
class Cell:
    """One scenario at one concurrency on one contender, all repetitions together. Latency is that of the accepted."""

    contender: str
    scenario: str
    concurrency: int
    repetitions: int
    accepted: int
    rejected: int
    failed: int
    """Neither: broken, timed out, or refused for another reason."""
    latency_mean_s: Estimate | None
    latency_p95_s: Estimate | None
    ttft_mean_s: Estimate | None
    ttft_p95_s: Estimate | None
    decode_mean_s: float | None
    """From the first token to the end."""
    wall_s: Estimate
    """Of one burst, from its start to its last answer."""
    requests_per_s: Estimate
    """Accepted ones."""
    rejected_after_mean_s: float | None
    cached_share: float
    """Of the accepted prompts' tokens."""


def cell_of(contender: str, scenario: str, concurrency: int, bursts: Sequence[Sequence[RequestRecord]]) -> Cell:
    """Sum up ``bursts``: the records of each repetition."""
    records = [record for burst in bursts for record in burst]
    refused = [record for record in records if record.http_status in REFUSED_STATUS]
    accepted = [record for record in records if record.ok]
    felt = [[one for record in burst if (one := timing(record)) is not None] for burst in bursts]

    def estimate(value: Callable[[Timing], float], statistic: metrics.Statistic) -> Estimate | None:
        return Estimate.of([[value(one) for one in burst] for burst in felt], statistic)

    decode_s = [one.jct_s - one.ttft_s for burst in felt for one in burst]
    waits_s = [((r.end_ns or r.scheduled_ns) - r.scheduled_ns) / NS_PER_S for r in refused]
    walls_s = [metrics.wall_seconds(burst) for burst in bursts]
    rates = [sum(record.ok for record in burst) / wall for burst, wall in zip(bursts, walls_s, strict=True) if wall]
    prompt_tokens = sum(record.prompt_tokens or 0 for record in accepted)
    return Cell(
        contender, scenario, concurrency, len(bursts), len(accepted), len(refused),
        len(records) - len(accepted) - len(refused),
        estimate(_jct, metrics.mean), estimate(_jct, p95), estimate(_ttft, metrics.mean), estimate(_ttft, p95),
        float(np.mean(decode_s)) if decode_s else None,
        Estimate.of([[wall] for wall in walls_s], metrics.mean) or Estimate(0.0, 0.0, 0.0),
        Estimate.of([[rate] for rate in rates], metrics.mean) or Estimate(0.0, 0.0, 0.0),
        float(np.mean(waits_s)) if waits_s else None,
        sum(record.cached_tokens or 0 for record in accepted) / prompt_tokens if prompt_tokens else 0.0,
    )  # fmt: skip


def _jct(felt: Timing) -> float:
    return felt.jct_s


def _ttft(felt: Timing) -> float:
    return felt.ttft_s


@dataclass(slots=True)
class ConcurrencyResults:
    """A whole run."""

    command: str
    prompt_words: int
    output_tokens: int
    limit: str = ""
    """What the admission limit is, in words; empty: nobody is limited."""
    prompt_tokens_mean: float = 0.0
    contenders: list[str] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)
    models: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    partial: str | None = None
    version: str = __version__


def sum_up(results: ConcurrencyResults, records: Sequence[RequestRecord]) -> None:
    """Fill the cells from ``records``, by concurrency and contender. Requests that were under way when the run was
    ended count nowhere."""
    bursts: dict[tuple[str, str, int], dict[int, list[RequestRecord]]] = {}
    for record in records:
        if record.outcome is not Outcome.STOPPED:
            key = (record.setting, record.workload, int(record.group))
            bursts.setdefault(key, {}).setdefault(record.seed, []).append(record)
    results.cells = [cell_of(*key, list(by_turn.values())) for key, by_turn in bursts.items()]
    results.cells.sort(key=lambda cell: (cell.concurrency, results.contenders.index(cell.contender)))
    counted = [record.prompt_tokens for record in records if record.prompt_tokens]
    results.prompt_tokens_mean = float(np.mean(counted)) if counted else 0.0
