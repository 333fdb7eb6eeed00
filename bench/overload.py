"""More requests than can be served: how are they served, with and without admission control?

    python bench/overload.py [--rate 10] [--seconds 25] [--max-active 8] [--queue 8] [--wait 4] [--json FILE]

Two tenants. *Steady* asks now and then; *burst* asks far more often than the server can answer, both at Poisson times
that do not depend on the answers. Settings take turns with the same requests. For each setting and tenant: how many
were served and turned away (429: the queue was full, 503: waited in vain), how quickly they were rejected, the time to
the first token and to the last one of the served ones, at the median and the 99th percentile. *Goodput*: tokens
of requests whose last token came within ``--patience`` seconds, per second of the run.

``--at-once 10`` asks 10 questions at the same moment instead (row C6: 10 at once, 3 active).
"""

from __future__ import annotations

import asyncio
import sys
import time
from argparse import Namespace
from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Any

import httpx
from harness.clients import Json, astream, greedy
from harness.flags import options, save
from harness.prompts import random_tokens
from harness.rounds import percentile
from harness.served import serving
from harness.tables import Table

KEYS = {"steady": "sk-steady", "burst": "sk-burst"}


@dataclass
class Outcome:
    """The result of one request; times in seconds from when it was due."""

    tenant: str
    status: int
    first_s: float
    end_s: float
    tokens: int


Plan = list[tuple[float, str, list[int]]]
"""Time, tenant, prompt."""


def plan(args: Namespace, seed: int) -> Plan:
    """Every request, equal in all settings."""
    rng, arrivals = Random(seed), [(0.0, "burst")] * args.at_once
    for tenant, rate in () if args.at_once else (("steady", args.steady_rate), ("burst", args.rate)):
        due_s = rng.expovariate(rate)
        while due_s < args.seconds:
            arrivals.append((due_s, tenant))
            due_s += rng.expovariate(rate)
    return sorted((due_s, tenant, random_tokens(args.prompt_tokens, rng)) for due_s, tenant in arrivals)


async def ask(client: httpx.AsyncClient, start: float, due_s: float, tenant: str, body: Json) -> Outcome:
    """Send the request when it is due, and read the answer to its end."""
    await asyncio.sleep(max(0.0, start + due_s - time.perf_counter()))
    late_s = time.perf_counter() - start - due_s
    answer = await astream(client, "/v1/completions", body, {"Authorization": f"Bearer {KEYS[tenant]}"})
    status = answer.status
    if status == 200 and answer.error:
        status = 503 if "overloaded" in answer.error else 429
    return Outcome(tenant, status, late_s + answer.first_s, late_s + answer.total_s, len(answer.times_s))


async def run(url: str, model: str, requests: Plan, new_tokens: int) -> list[Outcome]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        start = time.perf_counter() + 0.2
        sends = (ask(client, start, due_s, tenant, greedy(prompt, new_tokens, model))
                 for due_s, tenant, prompt in requests)  # fmt: skip
        return list(await asyncio.gather(*sends))


def sum_up(setting: str, tenant: str, outcomes: list[Outcome], wall_s: float, patience_s: float) -> dict[str, Any]:
    """One tenant's figures; ``both``: of all requests."""
    tenant_outcomes = [outcome for outcome in outcomes if tenant in ("both", outcome.tenant)]
    served = [outcome for outcome in tenant_outcomes if outcome.status == 200]
    rejected = Counter(outcome.status for outcome in tenant_outcomes if outcome.status != 200)
    row: dict[str, Any] = {"setting": setting, "tenant": tenant, "sent": len(tenant_outcomes), "served": len(served)}
    row |= {"full": rejected[429], "in_vain": rejected[503], "rejected": rejected}
    if rejected:
        row["after_ms"] = 1e3 * percentile((outcome.end_s for outcome in tenant_outcomes if outcome.status != 200), 0.5)
    for name in ("first_s", "end_s") if served else ():
        times_s = [getattr(outcome, name) for outcome in served]
        row |= {f"{name}_p50": percentile(times_s, 0.5), f"{name}_p99": percentile(times_s, 0.99)}
    row["goodput"] = sum(outcome.tokens for outcome in served if outcome.end_s <= patience_s) / wall_s
    return row


COLUMNS = {
    "setting": "{setting}", "tenant": "{tenant}", "sent": "{sent}", "served": "{served}", "429": "{full}",
    "503": "{in_vain}", "after ms": "{after_ms:.0f}", "TTFT 50": "{first_s_p50:.2f}", "99 (s)": "{first_s_p99:.2f}",
    "JCT 50": "{end_s_p50:.2f}", "99 (s) ": "{end_s_p99:.2f}", "goodput": "{goodput:.1f}",
}  # fmt: skip


def main() -> None:
    """One server per setting, one after the other: two at once would share the cores."""
    args = options(
        __doc__, model="", rate=(10.0, "requests a second of the burst"), steady_rate=0.5, seconds=25.0, at_once=0,
        prompt_tokens=128, new_tokens=48, max_active=8, queue=8, wait=4.0, mode=("bounded", "bounded, memory or cache"),
        patience=10.0, serve=("", "further options of memserve serve, in one string"),
    )  # fmt: skip
    gate = ["--admission", args.mode, "--max-active", str(args.max_active),
            "--admission-queue", str(args.queue), "--admission-wait", str(args.wait)]  # fmt: skip
    keys = [word for name, key in KEYS.items() for word in ("--api-key", f"{name}={key}")]
    rows, table = [], Table(COLUMNS)
    for name, flags in {"no gate": [], args.mode: gate}.items():
        with serving("--colocated", "1", *keys, *args.serve.split(), *flags, model=args.model) as served:
            asyncio.run(run(served.url, served.model, plan(args, 1)[:2], 4))  # warm-up
            started = time.perf_counter()
            outcomes = asyncio.run(run(served.url, served.model, plan(args, 0), args.new_tokens))
            wall_s = time.perf_counter() - started
        for tenant in ("burst",) if args.at_once else ("steady", "burst", "both"):
            rows.append(sum_up(name, tenant, outcomes, wall_s, args.patience))
            table.show(rows[-1])
    save(args, rows)


if __name__ == "__main__":
    sys.exit(main())
