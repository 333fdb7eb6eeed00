"""``memserve bench layerwise``: LayerKV's evaluation on real servers, scaled to this machine, over an emulated link.

One server a setting, all with the same model and memory, asked in turns with the same requests: by request, by layer
as published (*layerkv*: every step reads everything back), and as ``--layerwise auto`` does it; by request and by layer
with and without ``--scheduling slo``. The same evaluation in the simulator is :mod:`memserve_lab.experiments.layerkv`.
"""

from __future__ import annotations

import math
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import mean, median
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from memserve.base.units import NS_PER_S
from memserve_lab.bench.load.client import Target
from memserve_lab.bench.load.driver import Labels, LoadRun, send
from memserve_lab.bench.load.prompts import Manner, RequestRecord
from memserve_lab.bench.report_writer import Cell, Drawing, Table
from memserve_lab.bench.servers import Address, Servers
from memserve_lab.bench.settings import Setting
from memserve_lab.bench.study import Study, StudyResults, Tell
from memserve_lab.experiments.layerkv import requests, sooner

AXES = {"context": "tokens of prompt", "rate": "requests/s"}
SETTLES_S, SETTLE_ATTEMPTS = 1.0, 10
"""Instances tell what they have counted with their heartbeats."""
BY_REQUEST, BY_LAYER = "by request", "by layer"


def settings_of(slo_ttft_s: float, slo_tpot_s: float) -> dict[str, tuple[str, ...]]:
    """Name -> flags."""
    slo = ("--scheduling", "slo", "--slo-ttft-ms", f"{1000 * slo_ttft_s:g}", "--slo-tpot-ms", f"{1000 * slo_tpot_s:g}")
    return {
        BY_REQUEST: (),
        f"{BY_REQUEST}, slo": slo,
        "all read back (layerkv)": ("--layerwise", "layerkv"),
        BY_LAYER: ("--layerwise", "auto"),
        f"{BY_LAYER}, slo": ("--layerwise", "auto", *slo),
    }


@dataclass(frozen=True, slots=True)
class Plan:
    """The options of a run."""

    figures: tuple[str, ...]
    """Of context, rate and hidden."""
    settings: tuple[str, ...]
    """Names, :data:`BY_REQUEST` first."""
    contexts: tuple[int, ...]
    context_rate: float
    """Requests a second of the sweep of contexts."""
    rates: tuple[float, ...]
    requests: int
    """Of each point."""
    answer_tokens: int
    rounds: int
    flags: tuple[str, ...]
    """Of every server."""
    link_gbps: float
    slo_ttft_s: float
    slo_tpot_s: float
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Point:
    """One setting under one load, once."""

    figure: str
    setting: str
    at: float
    ttft_mean_s: float
    ttft_p99_s: float
    tpot_mean_s: float
    tokens_per_s: float
    violations: float
    """Share of requests that miss one of the objectives, or were not answered."""
    failed: int


@dataclass(frozen=True, slots=True)
class Copied:
    """What the link did in one load: seconds, and bytes."""

    load: str
    busy_s: float
    waited_s: float
    """Time in which steps stood still."""
    device_s: float
    up_bytes: float
    down_bytes: float

    @property
    def hidden(self) -> float:
        """Share of the copies' time (0 to 1) for which no step stood still."""
        return 1 - min(1.0, self.waited_s / self.busy_s) if self.busy_s else 1.0


@dataclass(slots=True, kw_only=True)
class LayerwiseResults(StudyResults):
    """All points."""

    points: list[Point] = field(default_factory=list)
    copied: list[Copied] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.points or self.copied)

    def points_of(self, figure: str, setting: str, at: float) -> list[Point]:
        """The rounds of one cell."""
        key = (figure, setting, at)
        return [point for point in self.points if (point.figure, point.setting, point.at) == key]


def conversation_lengths(count: int, answer_tokens: int, random: Random) -> list[tuple[int, int]]:
    """Lengths of prompts and answers: lognormal, prompts of 600 tokens at the median."""
    shapes: list[tuple[int, int]] = []
    while len(shapes) < count:
        prompt, answer = (round(random.lognormvariate(math.log(middle), 0.6)) for middle in (600, answer_tokens))
        if 64 <= prompt <= 1800 and 16 <= answer <= 3 * answer_tokens:
            shapes.append((prompt, answer))
    return shapes


def point_of(figure: str, setting: str, at: float, run: LoadRun, plan: Plan) -> Point:
    """Sum up one pass."""
    answered = [record for record in run.records if record.ok and record.first_ns is not None]
    ttfts = sorted(_ttft_s(record) for record in answered) or [0.0]
    tpots = [_tpot_s(record) for record in answered]
    kept_count = sum(
        _ttft_s(record) <= plan.slo_ttft_s and tpot <= plan.slo_tpot_s
        for record, tpot in zip(answered, tpots, strict=True)
    )
    elapsed_s = max((record.end_ns or 0 for record in answered), default=1) / NS_PER_S
    return Point(
        figure, setting, at, mean(ttfts), ttfts[min(len(ttfts) - 1, len(ttfts) * 99 // 100)],
        mean(tpots) if tpots else 0.0, sum(record.output_tokens for record in answered) / elapsed_s,
        1 - kept_count / max(1, run.planned), run.planned - len(answered),
    )  # fmt: skip


def _ttft_s(record: RequestRecord) -> float:
    return ((record.first_ns or 0) - record.scheduled_ns) / NS_PER_S


def _tpot_s(record: RequestRecord) -> float:
    steps = record.output_tokens - 1
    return (record.token_ns[-1] - record.token_ns[0]) / NS_PER_S / steps if steps > 0 and record.token_ns else 0.0


def link_use(url: str) -> dict[str, float]:
    """Totals of a server's link, once they no longer change."""
    before: dict[str, float] = {}
    for _ in range(SETTLE_ATTEMPTS):
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            now = _totals(answer.read().decode())
        if now == before:
            break
        before = now
        time.sleep(SETTLES_S)
    return before


def _totals(text: str) -> dict[str, float]:
    columns = (
        "memserve_layerwise_link_seconds_total",
        "memserve_layerwise_bytes_total",
        "memserve_device_seconds_total",
    )
    return {
        "".join(sample.labels.values()) or "device": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name in columns
    }


class LayerwiseStudy(Study[LayerwiseResults]):
    """Time to the first token, throughput and missed objectives by context and rate; what copies cost steps."""

    title = "memserve bench layerwise"
    draws_requests = True

    def __init__(self, plan: Plan, results: LayerwiseResults) -> None:
        super().__init__(results)
        self._plan = plan
        about = f"By {{}}, on this machine, over an emulated link of {plan.link_gbps:g} Gbit/s."
        self.drawings = {
            figure: Drawing(about.format(AXES[figure]), _drawing(figure, plan.link_gbps))
            for figure in plan.figures
            if figure in AXES
        }

    def fill_results(self, tell: Tell) -> None:
        plan = self._plan
        flags = settings_of(plan.slo_ttft_s, plan.slo_tpot_s)
        settings = [Setting(name, flags[name]) for name in plan.settings]
        with Servers(plan.flags, tell) as servers:
            addresses = {setting.name: servers.address_of(setting, plan.settings) for setting in settings}
            self.results.models = sorted({address.model for address in addresses.values()})
            for turn in range(plan.rounds):
                for figure in plan.figures:
                    if figure in AXES:
                        self._sweep_rates(figure, turn, addresses, tell)
            if "hidden" in plan.figures:
                self._measure_copies(addresses[BY_LAYER], tell)

    def _sweep_rates(self, figure: str, turn: int, addresses: Mapping[str, Address], tell: Tell) -> None:
        plan = self._plan
        for place in plan.contexts if figure == "context" else plan.rates:
            names = [*plan.settings[turn % len(plan.settings) :], *plan.settings[: turn % len(plan.settings)]]
            for name in names:
                random = Random(f"{plan.seed} {turn} {figure}")  # each setting gets the same requests
                lengths = conversation_lengths(plan.requests, plan.answer_tokens, random)
                shapes = [(int(place), plan.answer_tokens)] * plan.requests if figure == "context" else lengths
                rate = plan.context_rate if figure == "context" else place
                run = self._send_requests(addresses[name], shapes, rate, random, f"{figure}-{place:g}-{turn}")
                point = point_of(figure, name, place, run, plan)
                self.results.points.append(point)
                tell(f"{place:g} {AXES[figure]}, {name}: {point.ttft_mean_s:.2f} s, {point.tokens_per_s:.0f} tokens/s")

    def _send_requests(
        self, address: Address, shapes: Sequence[tuple[int, int]], rate: float, random: Random, salt: str
    ) -> LoadRun:
        manner = Manner(address.model, ignore_eos=True, salt=salt.replace(".", "-"))
        run = send(requests(shapes, rate, random), Target(address.url), manner, Labels(seed=self._plan.seed))
        if run.partial is not None:
            raise KeyboardInterrupt
        return run

    def _measure_copies(self, address: Address, tell: Tell) -> None:
        """Prompts of 1,500 tokens alone, and answers behind them."""
        for load, tokens in (("prefill alone", 1), ("prefill and decode", self._plan.answer_tokens)):
            before = link_use(address.url)
            self._send_requests(address, [(1500, tokens)] * 12, 1000.0, Random(load), load.replace(" ", "-"))
            after = link_use(address.url)
            busy, waited, device, up, down = (
                after.get(name, 0.0) - before.get(name, 0.0) for name in ("busy", "waited", "device", "up", "down")
            )
            self.results.copied.append(Copied(load, busy, waited, device, up, down))
            tell(f"{load}: {self.results.copied[-1].hidden:.0%} of {busy:.1f} s of copies are hidden")

    def head_lines(self) -> Iterator[str]:
        plan = self._plan
        yield f"* the link between KV memory and DRAM is emulated: {plan.link_gbps:g} Gbit/s"
        yield f"* objectives: {plan.slo_ttft_s:g} s to the first token, {1000 * plan.slo_tpot_s:g} ms a further one"

    def make_tables(self) -> Iterator[Table]:
        plan = self._plan
        for figure in (figure_name for figure_name in plan.figures if figure_name in AXES):
            columns = (
                AXES[figure], "setting", "TTFT mean (s)", "P99 (s)", "beside by request", "TPOT (ms)", "tokens/s",
                "beside by request", "miss an objective", "failed",
            )  # fmt: skip
            rows = [
                row
                for place in dict.fromkeys(p.at for p in self._points_of(figure))
                for row in self._row_cells(figure, place)
            ]
            title = f"By {AXES[figure]}, emulated link of {plan.link_gbps:g} Gbit/s, medians of rounds: {plan.rounds}"
            yield Table(title, columns, rows)
        if self.results.copied:
            head = ("load", "copies (s)", "waited for (s)", "hidden", "steps (s)", "of the link's time", "up", "down")
            yield Table(
                "What copies cost steps, by layer", head, [_copied_row(copied) for copied in self.results.copied]
            )

    def _points_of(self, figure: str) -> list[Point]:
        return [point for point in self.results.points if point.figure == figure]

    def _row_cells(self, figure: str, place: float) -> Iterator[list[Cell]]:
        base = self.results.points_of(figure, BY_REQUEST, place)
        for name in self._plan.settings:
            points = self.results.points_of(figure, name, place)
            pairs = list(zip(points, base, strict=False))
            if not pairs:
                continue
            ratio = median(rival.ttft_mean_s / max(1e-9, point.ttft_mean_s) for point, rival in pairs)
            more = median(point.tokens_per_s / max(1e-9, rival.tokens_per_s) for point, rival in pairs)
            yield [
                f"{place:g}", name, f"{median(p.ttft_mean_s for p in points):.2f}",
                f"{median(p.ttft_p99_s for p in points):.2f}", sooner(ratio),
                f"{1000 * median(p.tpot_mean_s for p in points):.0f}", f"{median(p.tokens_per_s for p in points):.0f}",
                f"{more - 1:+.1%}", f"{median(p.violations for p in points):.1%}", sum(p.failed for p in points),
            ]  # fmt: skip

    def terminal_lines(self) -> Iterator[str]:
        for table in self.make_tables():
            yield from table.terminal_lines()


def _copied_row(copied: Copied) -> list[Cell]:
    return [
        copied.load, f"{copied.busy_s:.2f}", f"{copied.waited_s:.2f}", f"{copied.hidden:.0%}", f"{copied.device_s:.1f}",
        f"{copied.busy_s / copied.device_s if copied.device_s else 0.0:.0%}", f"{copied.up_bytes / 1e9:.2f} GB",
        f"{copied.down_bytes / 1e9:.2f} GB",
    ]  # fmt: skip


def _drawing(figure: str, link_gbps: float) -> Any:
    """Three panels over one axis: time to the first token, throughput, missed objectives; medians of the rounds."""

    def draw(pyplot: Any, results: LayerwiseResults) -> Any:
        picture, panels = pyplot.subplots(3, 1, figsize=(8, 10), sharex=True, layout="constrained")
        points = [point for point in results.points if point.figure == figure]
        places = list(dict.fromkeys(point.at for point in points))
        for name in dict.fromkeys(point.setting for point in points):
            cells = [results.points_of(figure, name, place) for place in places]
            style = {"marker": "x" if "slo" in name else "o", "label": name}
            line = panels[0].plot(places, [median(p.ttft_mean_s for p in cell) for cell in cells], **style)[0]
            worst = [median(p.ttft_p99_s for p in cell) for cell in cells]
            panels[0].plot(places, worst, linestyle=":", color=line.get_color())
            panels[1].plot(places, [median(p.tokens_per_s for p in cell) for cell in cells], **style)
            panels[2].plot(places, [100 * median(p.violations for p in cell) for cell in cells], **style)
        panels[0].set(ylabel="TTFT (s): mean, P99 dotted", yscale="log")
        panels[1].set(ylabel="tokens / s", ylim=(0, None))
        panels[2].set(ylabel="requests that miss an objective (%)", ylim=(0, 100), xlabel=AXES[figure])
        for axes in panels:
            axes.grid(alpha=0.3)
        panels[1].legend(loc="lower left")
        picture.suptitle(f"KV by layer, emulated link of {link_gbps:g} Gbit/s")
        return picture

    return draw
