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

import argparse
import asyncio
import json
import random
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from served import serving

KEYS = {"steady": "sk-steady", "burst": "sk-burst"}
VOCABULARY = 40_000


@dataclass
class Answer:
    """The result of one request; times in seconds from when it was due."""

    tenant: str
    status: int
    first_s: float | None = None
    end_s: float = 0.0
    tokens: int = 0


@dataclass
class Summary:
    """Figures of one tenant in one setting."""

    setting: str
    tenant: str
    sent: int
    served: int
    rejected: dict[int, int] = field(default_factory=dict)
    rejected_after_ms: float | None = None
    """At the median."""
    ttft_s: tuple[float, float] | None = None
    """At the median and at the 99th percentile, of those that were served."""
    jct_s: tuple[float, float] | None = None
    goodput_tokens_per_s: float = 0.0


def percentile(values: list[float], share: float) -> float:
    """The value that ``share`` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def plan(args: argparse.Namespace, seed: int) -> list[tuple[float, str, list[int]]]:
    """``(time, tenant, prompt)`` of every request, equal in all settings."""
    rng, due = random.Random(seed), []
    if args.at_once:
        tenants_at = [("burst", 0.0)] * args.at_once
    else:
        tenants_at = []
        for tenant, rate in (("steady", args.steady_rate), ("burst", args.rate)):
            at = rng.expovariate(rate)
            while at < args.seconds:
                tenants_at.append((tenant, at))
                at += rng.expovariate(rate)
    for tenant, at in tenants_at:
        due.append((at, tenant, [rng.randrange(1000, VOCABULARY) for _ in range(args.prompt_tokens)]))
    return sorted(due)


async def ask(client: httpx.AsyncClient, start: float, at: float, tenant: str, body: dict[str, Any]) -> Answer:
    """Send the request when it is due, and read the answer to its end."""
    await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
    answer = Answer(tenant, 0)
    headers = {"Authorization": f"Bearer {KEYS[tenant]}"}
    async with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        answer.status = response.status_code
        async for line in response.aiter_lines():
            if line.startswith('data: {"error"'):
                code = json.loads(line[6:])["error"].get("code")
                answer.status = 503 if code == "overloaded" else 429
            elif line.startswith("data: {"):
                answer.tokens += 1
                answer.first_s = answer.first_s or time.perf_counter() - start - at
    answer.end_s = time.perf_counter() - start - at
    return answer


async def run(url: str, model: str, due: list[tuple[float, str, list[int]]], new_tokens: int) -> list[Answer]:
    """Send all requests."""
    rest = {"max_tokens": new_tokens, "ignore_eos": True, "stream": True, "temperature": 0}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        start = time.perf_counter() + 0.2
        asks = [ask(client, start, at, who, {"model": model, "prompt": prompt} | rest) for at, who, prompt in due]
        return list(await asyncio.gather(*asks))


def sum_up(setting: str, tenant: str, answers: list[Answer], wall_s: float, patience_s: float) -> Summary:
    """One tenant's figures; ``tenant`` "": both tenants."""
    mine = [answer for answer in answers if tenant in ("", answer.tenant)]
    served = [answer for answer in mine if answer.status == 200]
    turned_away = [answer for answer in mine if answer.status != 200]
    found = Summary(setting, tenant or "both", len(mine), len(served))
    for answer in turned_away:
        found.rejected[answer.status] = found.rejected.get(answer.status, 0) + 1
    if turned_away:
        found.rejected_after_ms = 1e3 * percentile([answer.end_s for answer in turned_away], 0.5)
    if served:
        firsts, ends = [a.first_s or a.end_s for a in served], [a.end_s for a in served]
        found.ttft_s = percentile(firsts, 0.5), percentile(firsts, 0.99)
        found.jct_s = percentile(ends, 0.5), percentile(ends, 0.99)
    found.goodput_tokens_per_s = sum(a.tokens for a in served if a.end_s <= patience_s) / wall_s
    return found


def line(found: Summary) -> str:
    """One line of the table."""

    def pair(values: tuple[float, float] | None) -> str:
        return f"{values[0]:>7.2f} {values[1]:>7.2f}" if values else f"{'-':>7} {'-':>7}"

    away = f"{found.rejected.get(429, 0):>5} {found.rejected.get(503, 0):>5}"
    after = f"{found.rejected_after_ms:>8.0f}" if found.rejected_after_ms is not None else f"{'-':>8}"
    return (f"{found.setting:<12} {found.tenant:<7} {found.sent:>5} {found.served:>6} {away} {after} "
            f"{pair(found.ttft_s)} {pair(found.jct_s)} {found.goodput_tokens_per_s:>8.1f}")  # fmt: skip


HEAD = (
    f"{'setting':<12} {'tenant':<7} {'sent':>5} {'served':>6} {'429':>5} {'503':>5} {'after ms':>8} "
    f"{'TTFT 50':>7} {'99 (s)':>7} {'JCT 50':>7} {'99 (s)':>7} {'goodput':>8}"
)


def main() -> int:
    """One server per setting, one after the other: two at once would share the cores."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="", help="default: the bundled one")
    parser.add_argument("--rate", type=float, default=10.0, help="requests a second of the burst")
    parser.add_argument("--steady-rate", type=float, default=0.5)
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--at-once", type=int, default=0)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--max-active", type=int, default=8)
    parser.add_argument("--queue", type=int, default=8)
    parser.add_argument("--wait", type=float, default=4.0)
    parser.add_argument("--mode", default="bounded", help="bounded, memory or cache")
    parser.add_argument("--patience", type=float, default=10.0)
    parser.add_argument("--serve", default="", help="further options of memserve serve, in one string")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    gate = ["--admission", args.mode, "--max-active", str(args.max_active),
            "--admission-queue", str(args.queue), "--admission-wait", str(args.wait)]  # fmt: skip
    settings = {"no gate": [], args.mode: gate}
    keys = [option for name, key in KEYS.items() for option in ("--api-key", f"{name}={key}")]
    common = [*(("--model", args.model) if args.model else ()), "--colocated", "1", *keys, *args.serve.split()]
    found: list[Summary] = []
    print(HEAD)
    for name, options in settings.items():
        with serving(*common, *options) as served:
            asyncio.run(run(served.url, served.model, plan(args, 1)[:2], 4))  # warm-up
            started = time.perf_counter()
            answers = asyncio.run(run(served.url, served.model, plan(args, 0), args.new_tokens))
            wall_s = time.perf_counter() - started
        for tenant in ("burst",) if args.at_once else ("steady", "burst", ""):
            found.append(sum_up(name, tenant, answers, wall_s, args.patience))
            print(line(found[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps([asdict(summary) for summary in found], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
