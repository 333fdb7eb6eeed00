"""The tables and plots of :mod:`memserve.bench.layerkv`."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from memserve.bench.layerkv import (
    TPOT_S,
    LayerKvResults,
    Plan,
    Sweep,
    conversation_lengths,
    long_lengths,
    measure_point,
    requests,
    sooner,
)
from memserve.bench.report_writer import Cell, Drawing, Table
from memserve.bench.study import Study, Tell

PAPER = {
    "context": "The paper's figures 1 and 4: TTFT grows sharply with the context by request, and up to an order of "
    "magnitude less by layer; throughput is nearly the same.",
    "devices": "The paper's figure 5: TTFT is lower by layer with any number of devices; throughput nearly the same.",
    "stagger": "Everything is read back in each step. Staggered, the link has the same work before each layer; how "
    "long steps wait is bound by all of it together.",
    "rate": "The paper's figures 6, 7 and 8: mean TTFT up to 69 times lower, P99 up to 45 times; throughput within "
    "3 %; 17.7 to 28.7 points fewer requests violate 3 s or 200 ms a token from 6 requests/s on.",
    "orbitflow": "OrbitFlow's paper: TPOT objectives are met up to 66 % more often than with other ways to offload, "
    "P95 latency is 38 % lower, throughput up to 3.3 times. Its objectives and device are not those of this figure.",
}

AXES = {
    "context": "tokens of context",
    "devices": "devices",
    "rate": "requests/s",
    "stagger": "requests/s",
    "orbitflow": "requests/s",
}


class LayerKvStudy(Study[LayerKvResults]):
    """Time to the first token, throughput and violations, by figure."""

    title = "memserve sim layerkv"

    def __init__(self, plan: Plan, results: LayerKvResults) -> None:
        super().__init__(results)
        self._plan = plan
        about = "{} on {}, by {}. Simulated."
        self.drawings = {
            _file_of(one): Drawing(
                about.format(one.model, plan.device, AXES[one.figure] if one.figure != "stagger" else "layer"),
                draw_depth if one.figure == "stagger" else _drawing(one),
            )
            for one in plan.sweeps
        }

    def measure(self, tell: Tell) -> None:
        plan = self._plan
        for sweep in plan.sweeps:
            for at, devices, rate in sweep.points:
                random = Random(f"{plan.seed} {sweep.figure}")  # with each load the same requests
                contenders = sweep.contenders or plan.contenders
                shapes = self._shapes(sweep.figure, at, random)
                workload = requests(shapes, rate, random)
                for contender in contenders:
                    if contender.figure not in ("", sweep.figure):
                        continue
                    point = measure_point(
                        sweep.figure, sweep.model, plan.device, devices, contender, at, workload, sweep.ttft_s
                    )
                    self.results.points.append(point)
                    tell(f"{sweep.model}, {at:g} {AXES[sweep.figure]}, {point.contender}: {point.ttft_mean_s:.2f} s")

    def _shapes(self, figure: str, at: float, random: Random) -> list[tuple[int, int]]:
        count = self._plan.requests
        if figure in ("rate", "stagger"):
            return conversation_lengths(count, random)
        if figure == "orbitflow":
            return long_lengths(max(20, count // 4), random)
        return [(int(at) - 512 * (at > 16000) if figure == "context" else 4096, 512)] * max(20, count // 4)

    def tables(self) -> Iterator[Table]:
        for sweep in self._plan.sweeps:
            rows = [row for at, *_ in sweep.points for row in self._rows(sweep, at)]
            axis = AXES[sweep.figure]
            title = f"{sweep.model} on {self._plan.device}, by {axis} (simulated: a roofline, not measured)"
            columns = (
                axis, "setting", "TTFT mean (s)", "P99 (s)", "beside the first", "TPOT (ms)", "tokens/s",
                "beside the first", "miss an objective", "parked", "of the link hidden",
            )  # fmt: skip
            yield Table(title, columns, rows, about=PAPER[sweep.figure])
            if sweep.figure == "orbitflow":
                yield self._met(sweep)

    def _met(self, sweep: Sweep) -> Table:
        columns = ("requests/s", "setting", "TTFT met", "TPOT met", "tokens in time", "steps wait for the link")
        rows: list[list[Cell]] = [
            [
                f"{point.at:g}", point.contender, f"{point.ttft_met:.1%}", f"{point.tpot_met:.1%}",
                f"{point.tbt_met:.1%}", f"{point.waited_share:.1%}",
            ]
            for at, *_ in sweep.points
            for point in self.results.points
            if (point.figure, point.model, point.at) == (sweep.figure, sweep.model, at)
        ]  # fmt: skip
        about = (
            f"Objectives: {sweep.ttft_s:g} s to the first token, {1000 * TPOT_S:g} ms for each further one; a token is "
            "in time if it is there when tokens are handed out at that pace (OrbitFlow's token deposit)."
        )
        return Table(f"{sweep.model} on {self._plan.device}: objectives met", columns, rows, about=about)

    def _rows(self, sweep: Sweep, at: float) -> Iterator[list[Cell]]:
        mine = [p for p in self.results.points if (p.figure, p.model, p.at) == (sweep.figure, sweep.model, at)]
        for point in mine:
            base = mine[0]
            yield [
                f"{at:g}", point.contender, f"{point.ttft_mean_s:.2f}", f"{point.ttft_p99_s:.2f}",
                sooner(base.ttft_mean_s / point.ttft_mean_s), f"{1000 * point.tpot_mean_s:.0f}",
                f"{point.tokens_per_s:.0f}", f"{point.tokens_per_s / base.tokens_per_s - 1:+.1%}",
                f"{point.violations:.1%}", point.parked, f"{point.hidden:.0%}",
            ]  # fmt: skip

    def told(self) -> Iterator[str]:
        for table in self.tables():
            yield from table.text()


def _file_of(sweep: Sweep) -> str:
    return f"{sweep.figure}-{sweep.model}"


def draw_depth(pyplot: Any, results: LayerKvResults) -> Any:
    """Pages read back, layer by layer."""
    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for point in (point for point in results.points if point.figure == "stagger"):
        mean = sum(point.read_pages) / max(1, len(point.read_pages))
        waits = f"{point.contender}: steps wait {point.waited_share:.1%} of their time"
        axes.plot([pages / max(1e-9, mean) for pages in point.read_pages], marker="o", label=waits)
    axes.set(xlabel="layer", ylabel="pages read back (mean of layers: 1)", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.suptitle("Work of the link over the depth, simulated")
    return figure


def _drawing(sweep: Sweep) -> Any:
    """Three panels over one axis: time to the first token, throughput, violations."""

    def draw(pyplot: Any, results: LayerKvResults) -> Any:
        figure, panels = pyplot.subplots(3, 1, figsize=(8, 10), sharex=True, layout="constrained")
        for name in dict.fromkeys(point.contender for point in results.points if point.figure == sweep.figure):
            points = results.of(sweep.figure, sweep.model, name)
            at, style = [point.at for point in points], {"marker": "x" if "slo" in name else "o", "label": name}
            line = panels[0].plot(at, [point.ttft_mean_s for point in points], **style)[0]
            panels[0].plot(at, [point.ttft_p99_s for point in points], linestyle=":", color=line.get_color())
            panels[1].plot(at, [point.tokens_per_s for point in points], **style)
            panels[2].plot(at, [100 * point.violations for point in points], **style)
        panels[0].set(ylabel="TTFT (s): mean, P99 dotted", yscale="log")
        panels[1].set(ylabel="tokens / s", ylim=(0, None))
        panels[2].set(ylabel="requests that miss an objective (%)", ylim=(0, 100), xlabel=AXES[sweep.figure])
        if sweep.figure == "context":
            panels[2].set_xscale("log", base=2)
        for axes in panels:
            axes.grid(alpha=0.3)
        panels[1].legend(loc="lower left")
        figure.suptitle(f"{sweep.model}, simulated")
        return figure

    return draw
