"""A finished run as snapshots of the dashboard, at even distances: ``memserve ui DIR``.

Counters and timelines come from the records of the requests, the instances of a simulation from its looks. The names
are those of ``/metrics``; what a run has not recorded is not there.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from memserve import __version__
from memserve.api.http.errors import ApiError
from memserve.api.http.middleware import on_http_error
from memserve.api.ui.pages import static_file
from memserve.base.errors import UserError
from memserve.base.types import Role
from memserve.base.units import NS_PER_MS, NS_PER_S
from memserve_lab.bench.load.prompts import RequestRecord, read_records
from memserve_lab.bench.study import RECORDS

MOMENTS = 240
LIVE_MAX, RECENT_MAX = 100, 40
SIMULATION = "simulation.json"
TIERS, STATES = ("hbm", "dram"), ("used", "cached", "free")
FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, np.inf)
TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, np.inf)
"""Upper bounds of the buckets, as ``/metrics`` has them."""
ROLES = {role.value[0]: role.value for role in (Role.PREFILL, Role.DECODE, Role.COLOCATED)}
"""By the first letter of a simulated instance's name."""

Snapshot = dict[str, Any]
Rows = list[tuple[dict[str, str], float]]
Times = npt.NDArray[np.float64]


def open_runs(folder: Path) -> dict[str, Playback]:
    """The runs in a folder of ``bench serve`` or ``sim run``, by workload, setting and seed. Raises
    :class:`UserError` for another folder."""
    if not (folder / RECORDS).is_file():
        hint = "memserve bench serve --out DIR, or memserve sim run --out DIR, writes one"
        raise UserError(f"{folder} has no {RECORDS}", hint=hint)
    by_run: dict[tuple[str, str, int], list[RequestRecord]] = {}
    for record in read_records(folder / RECORDS):
        by_run.setdefault((record.workload, record.setting, record.seed), []).append(record)
    if not by_run:
        raise UserError(f"{folder / RECORDS} holds no request", hint="was the run ended before its first request?")
    simulated = _simulated(folder / SIMULATION)
    return {
        f"{workload}, {setting}, seed {seed}": Playback(records, simulated.get(setting), setting or workload)
        for (workload, setting, seed), records in by_run.items()
    }


def _simulated(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        return {str(run["setting"]): run for run in json.loads(file.read_text())}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"cannot read {file}: {error}", hint="memserve sim run --out DIR writes it") from None


class _Growth:
    """A total that grows by ``amounts`` at ``times``."""

    def __init__(self, times: Times, amounts: Times) -> None:
        order = np.argsort(times, kind="stable")
        self._times, self._sums = times[order], np.concatenate(([0.0], np.cumsum(amounts[order])))

    def total_at(self, time: float) -> float:
        """The total then."""
        return float(self._sums[np.searchsorted(self._times, time, side="right")])


class _Histogram:
    """Observations in seconds, each made at its time."""

    def __init__(self, times: Times, seconds: Times, bounds: Sequence[float]) -> None:
        self._buckets = [(bound, _Growth(times, (seconds <= bound).astype(float))) for bound in bounds]

    def sample_rows(self, name: str, time: float) -> Iterator[tuple[str, Rows]]:
        """As ``/metrics`` has them."""
        counts = [(bound, growth.total_at(time)) for bound, growth in self._buckets]
        yield (
            f"{name}_bucket",
            [({"le": "+Inf" if np.isinf(bound) else f"{bound:g}"}, count) for bound, count in counts],
        )
        yield f"{name}_count", [({}, counts[-1][1])]


class Playback:
    """One run."""

    def __init__(self, records: Sequence[RequestRecord], simulated: dict[str, Any] | None, title: str) -> None:
        """``simulated``: its entry of ``simulation.json``; ``None``: it was measured."""
        self._records, self._title = sorted(records, key=lambda record: record.scheduled_ns), title
        self._instances: list[str] = [] if simulated is None else list(simulated["instances"])
        self._looks: list[Any] = [] if simulated is None else simulated["timeline"]
        all_records = self._records
        self._start = np.array([record.scheduled_ns for record in all_records], float)
        self._first = _times(record.first_ns for record in all_records)
        self._end = _times(record.end_ns for record in all_records)
        self._by_end = np.argsort(self._end, kind="stable")
        marks = [mark for mark in (self._start, self._first, self._end) if mark[np.isfinite(mark)].size]
        self.end_ns = max(float(mark[np.isfinite(mark)].max()) for mark in marks)
        self._prompt = _Growth(self._end, np.array([record.prompt_tokens or 0 for record in all_records], float))
        self._cached = _Growth(self._end, np.array([record.cached_tokens or 0 for record in all_records], float))
        tokens = [np.array(record.token_ns, float) for record in all_records]
        tokens_per_chunk = [
            record.output_tokens / max(1, len(record.token_ns)) for record in all_records
        ]  # chunks may carry several
        weights = [np.full(len(times), weight) for times, weight in zip(tokens, tokens_per_chunk, strict=True)]
        self._generated = _Growth(_joined(tokens), _joined(weights))
        has_first = np.isfinite(self._first)
        waits = (self._first - self._start)[has_first] / NS_PER_S
        self._ttft = _Histogram(self._first[has_first], waits, FIRST_TOKEN_S)
        gaps = _joined([np.diff(times) for times in tokens]) / NS_PER_S
        self._between = _Histogram(_joined([times[1:] for times in tokens]), gaps, TOKEN_S)

    def make_snapshots(self) -> list[Snapshot]:
        """:data:`MOMENTS` of them, from the first request to the last answer."""
        begin_ns = float(self._start[0])
        step_ns = max(1.0, (self.end_ns - begin_ns) / (MOMENTS - 1))
        return [self.snapshot_at(begin_ns + number * step_ns) for number in range(MOMENTS)]

    def snapshot_at(self, now_ns: float) -> Snapshot:
        """The snapshot of one moment, in nanoseconds since the run began."""
        sent_count = int(np.searchsorted(self._start, now_ns, side="right"))
        live = np.flatnonzero(self._end[:sent_count] > now_ns)
        finished = self._by_end[: int(np.searchsorted(self._end[self._by_end], now_ns, side="right"))]
        return {
            "time_ms": now_ns / NS_PER_MS,
            "version": __version__,
            "model": self._title,
            "viewer": {"tenant": None, "sees_cluster": True},
            "metrics": self._metrics_at(now_ns, live, len(finished)),
            "members": [
                {"name": name, "role": ROLES.get(name[0], "colocated"), "state": "live", "host": ""}
                for name in self._instances
            ],
            "live": [self._request_entry(int(index), now_ns) for index in live[:LIVE_MAX]],
            "recent": [self._request_entry(int(index), None) for index in finished[: -RECENT_MAX - 1 : -1]],
        }

    def _metrics_at(self, now_ns: float, live: npt.NDArray[np.int64], ended_count: int) -> dict[str, Rows]:
        running = int((self._first[live] <= now_ns).sum())
        totals = {
            "memserve_http_requests_in_progress": len(live),
            "memserve_sequences_running": running,
            "memserve_requests_waiting": len(live) - running,
            "memserve_http_requests_total": ended_count,
            "memserve_prompt_tokens_total": self._prompt.total_at(now_ns),
            "memserve_cached_prompt_tokens_total": self._cached.total_at(now_ns),
            "memserve_generated_tokens_total": self._generated.total_at(now_ns),
            "memserve_engine_up": 1,
        }
        rows: dict[str, Rows] = {name: [({}, float(value))] for name, value in totals.items()}
        rows |= dict(self._ttft.sample_rows("memserve_time_to_first_token_seconds", now_ns))
        rows |= dict(self._between.sample_rows("memserve_inter_token_seconds", now_ns))
        return rows | self._of_instances(now_ns)

    def _of_instances(self, now_ns: float) -> dict[str, Rows]:
        look = next((look for look in reversed(self._looks) if look["at_s"] * NS_PER_S <= now_ns), None)
        if look is None:
            return {}
        rows: dict[str, Rows] = {
            f"memserve_instance_{metric}": [
                ({"instance": name}, float(value)) for name, value in zip(self._instances, look[field], strict=True)
            ]
            for metric, field in (("sequences_running", "running"), ("requests_waiting", "waiting"))
        }
        kinds = [{"tier": tier, "state": state} for tier in TIERS for state in STATES]
        rows["memserve_instance_blocks"] = [
            ({"instance": name, **kind}, float(count))
            for name, counts in zip(self._instances, look.get("blocks") or [()] * len(self._instances), strict=True)
            for kind, count in zip(kinds, counts, strict=False)
        ]
        return rows

    def _request_entry(self, index: int, now_ns: float | None) -> Snapshot:
        """A request; ``now_ns``: it is in flight then."""
        record = self._records[index]
        until_ns = now_ns if now_ns is not None else float(self._end[index])
        total_ms = (until_ns - record.scheduled_ns) / NS_PER_MS
        first_ms = min(total_ms, (float(self._first[index]) - record.scheduled_ns) / NS_PER_MS)
        name = f"{record.session}, turn {record.turn + 1}"
        entry: Snapshot = {
            "request_id": name,
            "response_id": name,
            "tenant": "",
            "status": (record.http_status or 499) if now_ns is None else None,
            "total_ms": total_ms,
            "ttft_ms": first_ms if first_ms < total_ms or now_ns is None else None,
            "finish_reason": record.outcome.value,
            "instances": [instance for instance in record.instance.split(" to ") if instance],
            "stages": [
                {"stage": "waiting", "from_ms": 0, "to_ms": first_ms},
                {"stage": "decode", "from_ms": first_ms, "to_ms": total_ms},
            ],
            "story": [{"fact": "error", "value": record.error}] if record.error else [],
        }
        if record.prompt_tokens is not None:
            entry |= {"prompt_tokens": record.prompt_tokens, "cached_tokens": record.cached_tokens or 0}
        if now_ns is None:
            entry["output_tokens"] = record.output_tokens
        return entry


def _times(values: Iterator[int | None]) -> Times:
    """Nanoseconds; what never happened: infinite."""
    return np.array([np.inf if value is None else value for value in values], float)


def _joined(parts: Sequence[Times]) -> Times:
    return np.concatenate(parts) if parts else np.zeros(0)


def serve_runs(runs: Mapping[str, Playback], listener: socket.socket) -> None:
    """Serve them until a signal ends the process."""
    config = uvicorn.Config(recorded_app(runs), log_level="warning", lifespan="off")
    uvicorn.Server(config).run(sockets=[listener])


def recorded_app(runs: Mapping[str, Playback]) -> Starlette:
    """``/ui`` for ``runs`` by name. It needs no key."""
    names = tuple(runs)

    async def page(request: Request) -> Response:
        return static_file("index.html", is_recorded=True)

    async def file(request: Request) -> Response:
        try:
            return static_file(request.path_params["name"])
        except ApiError:
            raise HTTPException(404) from None

    async def listed(request: Request) -> Response:
        return Response(msgspec.json.encode(names), media_type="application/json")

    @cache
    def encoded(number: int) -> bytes:
        return msgspec.json.encode(runs[names[number]].make_snapshots())

    async def run(request: Request) -> Response:
        number = request.path_params["number"]
        if number >= len(names):
            raise HTTPException(404)
        return Response(encoded(number), media_type="application/json")

    return Starlette(
        routes=[
            Route("/ui", page),
            Route("/ui/runs", listed),
            Route("/ui/runs/{number:int}", run),
            Route("/ui/{name}", file),
        ],
        exception_handlers={HTTPException: on_http_error},
    )
