"""Records of the load client, as a run would have written them."""

from __future__ import annotations

from memserve.base.units import NS_PER_MS
from memserve_lab.bench.load.prompts import Outcome, RequestRecord


def record(
    scheduled_ms: float = 0,
    tokens_ms: tuple[float, ...] = (100, 120, 160),
    end_ms: float | None = None,
    **fields: object,
) -> RequestRecord:
    """A request with tokens that arrived at ``tokens_ms``; ``fields``: what else differs from one that went well."""
    times = [round(ms * NS_PER_MS) for ms in tokens_ms]
    values: dict[str, object] = {
        "session": "s", "turn": 0, "scheduled_ns": round(scheduled_ms * NS_PER_MS), "token_ns": times,
        "sent_ns": round((scheduled_ms + 2) * NS_PER_MS), "first_ns": times[0] if times else None,
        "end_ns": round((end_ms if end_ms is not None else tokens_ms[-1] + 1) * NS_PER_MS),
        "output_tokens": len(times), "outcome": Outcome.OK, "http_status": 200,
    }  # fmt: skip
    return RequestRecord(**(values | fields))
