"""Prometheus families out of tables: one row a family, one sample of every source; those of objectives, and of KV by
layer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from memserve.base.metrics import WHOSE, metrics_of
from memserve.base.units import NS_PER_S
from memserve.router.report import AdmissionStats

Read = str | Callable[[Any], float | None]
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


def declared(statistics: type, path: str = "", *, is_engine: bool = False) -> Table:
    """The metrics that the fields of ``statistics`` declare (:mod:`memserve.base.metrics`). ``path``: what stands
    before a field's name where a source is read. ``is_engine``: those of one engine's page, by their names there."""
    whose = "the engine" if is_engine else "the instance"
    rows: Table = []
    for field_name, metric in metrics_of(statistics):
        name = metric.engine_name if is_engine else metric.name
        kind, text = COUNTER if metric.kind == "counter" else GAUGE, metric.text.replace(WHOSE, whose)
        if name:
            read = path + field_name
            rows.append((name, kind, text, _seconds(read) if field_name.endswith("_ns") else read))
    return rows


def _seconds(read: str) -> Callable[[Any], float | None]:
    def seconds(source: Any) -> float | None:
        ns = _number(source, read)
        return None if ns is None else ns / NS_PER_S

    return seconds


OLD_NAMES = {
    "memserve_admission_": "memserve_gate_",
    "memserve_router_handshakes_failed": "memserve_router_strangers",
    "memserve_router_messages_": "memserve_router_letters_",
}
"""How names begin -> how they began in the release before, which are shown for one release more."""


def with_old_names(metrics: Iterable[Metric]) -> Iterator[Metric]:
    """Each family, and behind one that was renamed the same samples under its old name."""
    for family in metrics:
        yield family
        for new, old in OLD_NAMES.items():
            if family.name.startswith(new):
                copy = Metric(
                    family.name.replace(new, old, 1), f"{family.documentation} (old name of {family.name})", family.type
                )
                copy.samples = [sample._replace(name=sample.name.replace(new, old, 1)) for sample in family.samples]
                yield copy


def _number(source: Any, read: Read) -> float | None:
    if not isinstance(read, str):
        return read(source)
    number: float | None = source.get(read) if isinstance(source, Mapping) else attrgetter(read)(source)
    return number


def block_bytes_family(
    prefix: str, whose: str, labels: Sequence[str], sources: Sequence[tuple[Sequence[str], Any]]
) -> Metric:
    """What a block takes in each tier. Of every source: values of ``labels``, ``InstanceStats``."""
    about = f"Bytes of a KV block of {whose} by tier; smaller with --kv-dtype, and in DRAM with --kv-lower-dtype"
    family = GaugeMetricFamily(f"memserve_{prefix}block_bytes", about, labels=[*labels, "tier"])
    for values, instance in sources:
        for tier, report in (("hbm", instance.hbm), ("dram", instance.dram)):
            family.add_metric([*values, tier], float(report.block_bytes))
    return family


def preemption_family(
    prefix: str, whose: str, labels: Sequence[str], sources: Sequence[tuple[Sequence[str], Any]]
) -> Metric:
    """How often sequences gave up their blocks. Of every source: values of ``labels``, ``InstanceStats``."""
    about = f"Sequences of {whose} that were preempted, by what became of their KV"
    family = CounterMetricFamily(f"memserve_{prefix}preemptions", about, labels=[*labels, "kind"])
    for values, instance in sources:
        family.add_metric([*values, "swap"], float(instance.preemptions_swap))
        family.add_metric([*values, "recompute"], float(instance.preemptions_recompute))
    return family


def objective_families(
    prefix: str, whose: str, labels: Sequence[str], sources: Sequence[tuple[Sequence[str], Any]]
) -> Iterator[Metric]:
    """How objectives of ``--scheduling slo`` were kept. Of every source: values of ``labels``, ``InstanceStats``."""
    about = f"Requests (ttft) and sequences (tpot) of {whose} by whether their objective was met"
    objectives = CounterMetricFamily(f"memserve_{prefix}objectives", about, labels=[*labels, "objective", "result"])
    about = f"Finished answers of {whose} by the percentiles of earlier lengths between which their own was"
    classes = CounterMetricFamily(f"memserve_{prefix}output_length_classes", about, labels=[*labels, "percentiles"])
    about = (
        f"Plans of {whose} with less prefill than there was room for, so that decoding requests keep their objective"
    )
    limited = CounterMetricFamily(f"memserve_{prefix}plans_limited", about, labels=list(labels))
    for values, instance in sources:
        report = instance.objectives
        for objective, result in itertools.product(("ttft", "tpot"), ("met", "missed")):
            objectives.add_metric([*values, objective, result], float(getattr(report, f"{objective}_{result}")))
        for name, count in report.output_classes.items():
            classes.add_metric([*values, name], float(count))
        limited.add_metric(list(values), float(report.plans_limited))
    yield from (objectives, classes, limited)


def layer_families(
    prefix: str, whose: str, labels: Sequence[str], sources: Sequence[tuple[Sequence[str], Any]]
) -> Iterator[Metric]:
    """KV that lies by layer (``--layerwise``). Of every source: values of ``labels``, ``InstanceStats``."""
    start, names = f"memserve_{prefix}layerwise_", list(labels)
    about = f"KV pages of sequences of {whose} that lie by layer, by tier and layer state"
    pages = GaugeMetricFamily(f"{start}pages", about, labels=[*names, "tier", "state"])
    about = f"Sequences of {whose} with KV by layer: those that lie so now, and those that are parked in DRAM"
    now = GaugeMetricFamily(f"{start}sequences", about, labels=[*names, "state"])
    about = (
        f"Times that sequences of {whose} began by layer, went over to lying by layer, were parked, went on by layer,"
        " were handed over out of DRAM, or were taken over into DRAM"
    )
    turns = CounterMetricFamily(f"{start}turns", about, labels=[*names, "turn"])
    about = f"Bytes of KV by layer that {whose} has copied between HBM and DRAM, by direction"
    nbytes = CounterMetricFamily(f"{start}bytes", about, labels=[*names, "direction"])
    about = f"Seconds that copies of KV by layer took at {whose} (busy), and that its steps stood still (waited)"
    seconds = CounterMetricFamily(f"{start}link_seconds", about, labels=[*names, "state"])
    about = f"Share (0 to 1) of the busy time of the link of {whose} between HBM and DRAM for which no step stood still"
    hidden = GaugeMetricFamily(f"{start}hidden_share", about, labels=names)
    for values, instance in sources:
        report = instance.layers
        states = {("dram", "all"): report.dram_pages, ("hbm", "kept"): report.kept_pages}
        states |= {("hbm", "staging"): report.staging_pages, ("both", "moving"): report.moving_pages}
        for (tier, state), count in states.items():
            pages.add_metric([*values, tier, state], float(count))
        now.add_metric([*values, "by_layer"], float(report.sequences))
        now.add_metric([*values, "parked"], float(report.parked))
        counts = {"begun": report.begun, "went_over": report.converted}
        counts |= {"parked": report.parkings, "went_on": report.resumed}
        counts |= {"handed_over": report.handed_over, "taken_over_parked": report.taken_over}
        for turn, count in counts.items():
            turns.add_metric([*values, turn], float(count))
        nbytes.add_metric([*values, "up"], float(report.link.up_bytes))
        nbytes.add_metric([*values, "down"], float(report.link.down_bytes))
        seconds.add_metric([*values, "busy"], report.link.busy_ns / NS_PER_S)
        seconds.add_metric([*values, "waited"], report.link.waited_ns / NS_PER_S)
        hidden.add_metric(list(values), report.link.hidden_share)
    yield from (pages, now, turns, nbytes, seconds, hidden)


def scaling_families(counts: Sequence[Any]) -> Iterator[Metric]:
    """Roles whose number of instances follows the load (``--scale``), ``RoleCount`` each."""
    about = "Instances of the role that the load asked for when that was decided last"
    wanted_instances = GaugeMetricFamily("memserve_scaling_wanted", about, labels=["role"])
    about = "Decisions of --scale for more and for fewer instances of the role"
    turns = CounterMetricFamily("memserve_scaling_decisions", about, labels=["role", "for"])
    for count in counts:
        wanted_instances.add_metric([count.role.value], float(count.target))
        turns.add_metric([count.role.value, "more"], float(count.more))
        turns.add_metric([count.role.value, "fewer"], float(count.fewer))
    yield from (wanted_instances, turns)


def counted_family(name: str, text: str, counts: Mapping[tuple[str, ...], int], *labels: str) -> Metric:
    """A counter with a sample for each of ``counts``, by values of ``labels``."""
    family = CounterMetricFamily(f"memserve_{name}", text, labels=list(labels))
    for values, count in counts.items():
        family.add_metric(list(values), float(count))
    return family


def by_label(counts: Mapping[str, int]) -> dict[tuple[str, ...], int]:
    """Counts by the values of one label."""
    return {(value,): count for value, count in counts.items()}


def admission_families(admission: AdmissionStats, *, names_tenants: bool) -> Iterator[Metric]:
    """What waits, was admitted and was rejected before placement. ``names_tenants``: whose requests wait is said."""
    yield from families(declared(AdmissionStats), [((), admission)])
    waiting = GaugeMetricFamily(
        "memserve_admission_waiting", "Requests that wait for admission", labels=["tenant"] if names_tenants else []
    )
    if names_tenants:
        for tenant, count in admission.waiting.items():
            waiting.add_metric([tenant], float(count))
    else:
        waiting.add_metric([], float(sum(admission.waiting.values())))
    rejected = by_label(admission.rejected)
    yield from (
        waiting,
        counted_family("admission_rejected", "Requests rejected before placement, by cause", rejected, "cause"),
    )
