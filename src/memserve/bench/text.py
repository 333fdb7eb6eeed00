"""Figures as text for a terminal (level 4)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from memserve.bench.metrics import Figures, Slo, Spread
from memserve.bench.results import Results

_SPREADS = (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("ITL", "itl_s"), ("JCT", "jct_s"), ("late", "late_s"))


def describe(results: Results) -> Iterator[str]:
    """The lines that a person reads after a run."""
    for found in results.found:
        title = " ".join(name for name in (found.workload, found.setting) if name)
        yield from ([f"== {title}"] if title else [])
        yield from _figures(found.figures)
    if results.partial is not None:
        yield f"partial: {results.partial}"


def _figures(figures: Figures) -> Iterator[str]:
    yield f"{figures.requests} requests in {figures.wall_s:.1f} s, {figures.failed} failed" + "".join(
        f", {count} {what}" for what, count in figures.errors.items()
    )
    for what, reason in figures.reasons.items():
        yield f"  {what}: {reason}"
    yield f"{'ms':<6}{'mean':>10}{'P50':>10}{'P90':>10}{'P99':>10}{'max':>10}"
    for name, field in _SPREADS:
        if (spread := getattr(figures, field)) is not None:
            yield _row(name, spread)
    yield (
        f"{figures.requests_per_s:.2f} requests/s, {figures.output_tokens_per_s:.1f} tokens/s, "
        f"goodput {figures.goodput_per_s:.2f}/s, SLO violations {figures.slo_violations:.1%}, "
        f"prompt tokens cached {figures.cached_share:.1%}"
    )


def _row(name: str, spread: Spread) -> str:
    values = (spread.mean, spread.p50, spread.p90, spread.p99, spread.max)
    return f"{name:<6}" + "".join(f"{1e3 * value:>10.2f}" for value in values)


def table_row(cells: Iterable[str]) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


def describe_slo(slo: Slo) -> str:
    """For example ``TTFT <= 500 ms, TPOT <= 50 ms``."""
    limits = {"TTFT": slo.ttft_s, "TPOT": slo.tpot_s, "JCT": slo.jct_s}
    told = [f"{name} <= {1e3 * limit:g} ms" for name, limit in limits.items() if limit is not None]
    return ", ".join(told) or "none: every answer is good"
