"""Replay of recorded traffic: lengths and block identities, agent calls, and ServeGen's client windows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import count

import numpy as np

from memserve.base.units import ceil_div
from memserve_lab.workloads.arrivals import Draws, draws
from memserve_lab.workloads.records import (
    Blocks,
    Call,
    CallLog,
    Client,
    History,
    LengthLog,
    Lengths,
    Session,
    Span,
    Text,
    Turn,
    Window,
    Workload,
)
from memserve_lab.workloads.sessions import ANSWER_TOKENS_DEFAULT
from memserve_lab.workloads.tokens import ByteMeter, Meter

FRESH_BLOCK_BASE = 1 << 48
"""Blocks that a trace doesn't name are numbered from here: each occurs once only."""
LOCAL_BLOCKS = 1 << 32
"""Block numbers for each session, where a trace's identities are valid inside one session only."""


class _FreshBlocks:
    """Block identities that occur once."""

    def __init__(self) -> None:
        self._next = FRESH_BLOCK_BASE

    def new_span(self, tokens: int, block_tokens: int) -> Span:
        """``tokens`` tokens that occur nowhere else."""
        first = self._next
        self._next += ceil_div(tokens, block_tokens)
        return Span(first, tokens)


def replay(rows: Sequence[Lengths], *, kind: str, source: str, block_tokens: int) -> Workload:
    """One session per row, due at its recorded time (Mooncake, Azure): such traces name no sessions.

    A row without blocks shares nothing with any other (Azure publishes none).
    """
    fresh, start_s = _FreshBlocks(), min((row.at_s for row in rows), default=0.0)
    sessions = tuple(
        Session(
            f"{kind}-{number}",
            (_length_turn(row, fresh, block_tokens, due_s=row.at_s - start_s),),
            history=History.GIVEN,
        )
        for number, row in enumerate(rows)
    )
    return Workload(kind, source, sessions, arrivals="recorded times")


def replay_sessions(logs: Sequence[LengthLog], *, kind: str, source: str, block_tokens: int) -> Workload:
    """One session per log, prompts as recorded, turns in causal order with the recorded think times (agentic traces).

    Each log's identities are moved to a range of their own. An arrival process decides when logs begin: the traces have
    only times inside a session. A sub-agent is a session of its own, in the group of the agent that started it.
    """
    fresh = _FreshBlocks()
    sessions = []
    bases: dict[str, int] = {}
    for log in logs:
        base = bases.setdefault(log.parent or log.record_id, (len(bases) + 1) * LOCAL_BLOCKS)
        turns = tuple(_length_turn(row, fresh, block_tokens, base=base) for row in log.rows)
        sessions.append(Session(log.record_id, turns, group=log.parent or log.record_id, history=History.GIVEN))
    return Workload(kind, source, tuple(sessions))


def _length_turn(
    row: Lengths, fresh: _FreshBlocks, block_tokens: int, *, base: int = 0, due_s: float | None = None
) -> Turn:
    """A row as a turn. Tokens after the last named block (traces may name full blocks only) are fresh."""
    spans = [Span(span.first + base, span.tokens) for span in row.spans or ()]
    unnamed = row.input_tokens - sum(span.tokens for span in spans)
    if unnamed > 0:
        spans.append(fresh.new_span(unnamed, block_tokens))
    blocks = Blocks(block_tokens, tuple(spans))
    return Turn(blocks, max(1, row.output_tokens), due_s=due_s, think_s=row.think_s)


def replay_calls(logs: Sequence[CallLog], *, kind: str, source: str, meter: Meter | None = None) -> Workload:
    """Agents' calls as they went over the wire: every prompt as recorded, in causal order."""
    meter = meter or ByteMeter()
    sessions = []
    for log in logs:
        turns = tuple(_call_turn(call, meter) for call in log.calls if call.prompt)
        if turns:
            sessions.append(Session(log.record_id, turns, group=kind, history=History.GIVEN))
    empty = sum(not call.prompt for log in logs for call in log.calls)
    notes = (f"{empty} calls with an empty prompt left out",) if empty else ()
    return Workload(kind, source, tuple(sessions), notes=notes)


def _call_turn(call: Call, meter: Meter) -> Turn:
    bound = ANSWER_TOKENS_DEFAULT if call.output is None else max(1, len(meter.encode_text(call.output)))
    return Turn(Text(call.prompt), bound, answer=call.output)


def from_windows(
    clients: Sequence[Client],
    *,
    source: str,
    seed: int,
    start_s: float = 0.0,
    duration_s: float = 600.0,
    rate_factor: float = 1.0,
    block_tokens: int = 16,
) -> Workload:
    """Requests as ServeGen composes them (Xiang et al. 2025): each client with its own rate, burstiness and lengths.

    Gaps follow the window's fitted family and shape, scaled to the window's rate times ``rate_factor``; lengths are
    drawn from the client's quantiles, input and output independently. Prompts share nothing.
    """
    rows: list[tuple[float, str, Lengths]] = []
    for client in clients:
        rng = draws(seed, "servegen", client.record_id)
        for at_s in _client_times_s(client, rng, start_s, start_s + duration_s, rate_factor):
            rows.append((at_s, client.record_id, _drawn_lengths(client, rng, at_s, start_s)))
    rows.sort(key=lambda row: (row[0], row[1]))
    fresh, numbers = _FreshBlocks(), count()
    sessions = tuple(
        Session(
            f"servegen-{next(numbers)}",
            (_length_turn(row, fresh, block_tokens, due_s=row.at_s),),
            group=client_id,
            history=History.GIVEN,
        )
        for _, client_id, row in rows
    )
    return Workload("servegen", source, sessions, seed=seed, arrivals="client windows (ServeGen)")


def _client_times_s(client: Client, rng: Draws, start_s: float, end_s: float, factor: float) -> Iterator[float]:
    """Arrival times of one client in ``[start_s, end_s)``, window by window."""
    ends_s = [*(window.start_s for window in client.windows[1:]), float("inf")]
    for window, window_end_s in zip(client.windows, ends_s, strict=True):
        now_s, stop_s = max(start_s, window.start_s), min(end_s, window_end_s)
        rate = window.requests_per_s * factor
        if rate <= 0 or now_s >= stop_s:
            continue
        now_s += _gap_s(window, rate, rng) * rng.random()  # the window opens somewhere inside a gap
        while now_s < stop_s:
            yield now_s
            now_s += _gap_s(window, rate, rng)


def _gap_s(window: Window, rate: float, rng: Draws) -> float:
    """One gap of the window's family and shape with a mean of ``1 / rate``."""
    if window.family == "Weibull":
        return float(rng.weibull(window.shape) / (rate * math.gamma(1 + 1 / window.shape)))
    return float(rng.gamma(window.shape, 1 / (rate * window.shape)))


def _drawn_lengths(client: Client, rng: Draws, at_s: float, start_s: float) -> Lengths:
    """Input and output length of one request, from the quantiles that hold at ``at_s``."""
    valid = [lengths for lengths in client.lengths if lengths.start_s <= at_s] or client.lengths[:1]
    input_q, output_q = valid[-1].input_tokens, valid[-1].output_tokens
    return Lengths(at_s - start_s, _drawn_from(input_q, rng), _drawn_from(output_q, rng))


def _drawn_from(quantiles: tuple[float, ...], rng: Draws) -> int:
    """A length drawn from these quantiles, interpolated linearly."""
    place = rng.random() * (len(quantiles) - 1)
    return max(1, round(float(np.interp(place, np.arange(len(quantiles)), quantiles))))
