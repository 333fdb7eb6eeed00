"""Prometheus families out of tables, one row a family, one sample of every source; and those of objectives."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

Read = str | Callable[[Any], float]
"""A field, a path of fields (``view.load.requests_waiting``), a key of a mapping, or a function."""
Kind = type[CounterMetricFamily] | type[GaugeMetricFamily]
GAUGE: Kind = GaugeMetricFamily
COUNTER: Kind = CounterMetricFamily
Table = list[tuple[str, Kind, str, Read]]
"""Name, kind, help and how to read it: one family each."""


def families(
    table: Table, sources: Sequence[tuple[Sequence[str], Any]], labels: Sequence[str] = ()
) -> Iterator[Metric]:
    """The families of ``table``, each with one sample of every source: its values of ``labels``, and what to read.

    A source that is a mapping gives no sample of a key that it does not have.
    """
    for name, kind, text, read in table:
        family = kind(f"memserve_{name}", text, labels=list(labels))
        for values, source in sources:
            number = _number(source, read)
            if number is not None:
                family.add_metric(list(values), float(number))
        yield family


def _number(source: Any, read: Read) -> float | None:
    if not isinstance(read, str):
        return read(source)
    number: float | None = source.get(read) if isinstance(source, Mapping) else attrgetter(read)(source)
    return number


def objective_families(
    prefix: str, whose: str, labels: Sequence[str], sources: Sequence[tuple[Sequence[str], Any]]
) -> Iterator[Metric]:
    """How objectives of ``--scheduling slo`` were kept. Of every source: values of ``labels``, ``InstanceStats``."""
    about = f"Requests (ttft) and sequences (tpot) of {whose} by whether their objective was met"
    kept = CounterMetricFamily(f"memserve_{prefix}objectives", about, labels=[*labels, "objective", "result"])
    about = f"Finished answers of {whose} by the percentiles of earlier lengths between which their own was"
    classes = CounterMetricFamily(f"memserve_{prefix}output_length_classes", about, labels=[*labels, "percentiles"])
    about = (
        f"Plans of {whose} with less prefill than there was room for, so that decoding requests keep their objective"
    )
    limited = CounterMetricFamily(f"memserve_{prefix}plans_limited", about, labels=list(labels))
    for values, instance in sources:
        report = instance.objectives
        for objective, result in itertools.product(("ttft", "tpot"), ("met", "missed")):
            kept.add_metric([*values, objective, result], float(getattr(report, f"{objective}_{result}")))
        for name, count in report.output_classes.items():
            classes.add_metric([*values, name], float(count))
        limited.add_metric(list(values), float(report.plans_limited))
    yield from (kept, classes, limited)
