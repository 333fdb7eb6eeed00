"""``memserve top``, ``explain`` and ``trees``: what the dashboard shows, in the terminal."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
import time
from collections.abc import Iterator
from typing import Annotated, Any
from urllib.parse import quote

import typer

from memserve.base.errors import UserError
from memserve.base.units import human_bytes

CALL_S = 10.0
BAR_CHARS = 24
_HOME_AND_CLEAR = "\x1b[H\x1b[J"

Snapshot = dict[str, Any]
Url = Annotated[str, typer.Option(help="Address of the router.")]
Key = Annotated[
    str | None, typer.Option("--api-key", help="A tenant's key, or that of --metrics-key.", envvar="MEMSERVE_CHAT_KEY")
]
Model = Annotated[str, typer.Option("--model", help="Of a server with several models: this one. Default: the first.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DEFAULT_URL = "http://127.0.0.1:8000"


def top(
    *,
    url: Url = DEFAULT_URL,
    model: Model = "",
    api_key: Key = None,
    interval_s: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print the figures once; so does a pipe.")] = False,
) -> None:
    """Watch a running server: instances, tiers, hit rate, requests. Ctrl-C ends it."""
    live = sys.stdout.isatty() and not once
    before: Snapshot | None = None
    while True:
        latest = _get(url, f"/snapshot{_query(model)}", api_key)
        size = shutil.get_terminal_size()
        lines = [line[: size.columns] if live else line for line in overview(latest, before)]
        typer.echo((_HOME_AND_CLEAR if live else "") + "\n".join(lines[: size.lines - 1] if live else lines))
        if not live:
            return
        before = latest
        time.sleep(interval_s)


def explain(
    request_id: Annotated[str, typer.Argument(help="The x-request-id of a request, or the id of its answer.")],
    *,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Tell where a request's time went, where it ran and why; in flight, or among the last that have ended."""
    entry = _get(url, f"/requests/{request_id}", api_key)
    typer.echo(json.dumps(entry) if as_json else "\n".join(timeline(entry)))


def trees(*, url: Url = DEFAULT_URL, model: Model = "", api_key: Key = None, as_json: AsJson = False) -> None:
    """Show the prefixes that the last prompts share, and which members hold them."""
    reply = _get(url, f"/trees{_query(model)}", api_key)
    typer.echo(json.dumps(reply) if as_json else "\n".join(tree_lines(reply)))


def _query(model: str) -> str:
    return f"?model={quote(model)}" if model else ""


class Samples:
    """The samples of ``/metrics`` in a snapshot."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.time_ms: float = snapshot["time_ms"]
        self._metrics = snapshot["metrics"]

    def total(self, name: str, **labels: str) -> float:
        """The sum of ``memserve_<name>`` over all samples with ``labels``."""
        rows = self._metrics.get(f"memserve_{name}", ())
        return float(sum(value for has, value in rows if labels.items() <= has.items()))

    def labelled_rows(self, name: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each sample of ``memserve_<name>``."""
        return [(has, float(value)) for has, value in self._metrics.get(f"memserve_{name}", ())]

    def has_metric(self, name: str) -> bool:
        """Whether there are samples of ``memserve_<name>``."""
        return bool(self._metrics.get(f"memserve_{name}"))


def overview(snapshot: Snapshot, before: Snapshot | None) -> list[str]:
    """The lines of ``memserve top``. Rates are those since ``before``; ``None``: since the start there are none."""
    latest, last = Samples(snapshot), Samples(before) if before is not None else None
    lines = [f"{snapshot['model']}, memserve {snapshot['version']}"]
    if snapshot["viewer"]["sees_cluster"]:
        lines += [*_traffic(latest, last), "", *_members(snapshot, latest)]
    else:
        lines.append("the cluster's figures need the key of /metrics; these are your own")
    lines += ["", *_requests("in flight", snapshot["live"]), *_requests("ended lately", snapshot["recent"][:10])]
    return lines


def _traffic(latest: Samples, last: Samples | None) -> Iterator[str]:
    cached, prompts = latest.total("cached_prompt_tokens_total"), latest.total("prompt_tokens_total")
    line = f"KV from the cache: {_share(cached, prompts)} of {prompts:,.0f} prompt tokens"
    seen_tokens, new = latest.total("router_seen_prompt_tokens_total"), latest.total("router_new_prompt_tokens_total")
    if seen_tokens:
        line += f"; an unlimited cache: {_share(max(0.0, seen_tokens - new), seen_tokens)} of {seen_tokens:,.0f}"
    yield line
    running = "router_requests_live" if latest.has_metric("router_requests_live") else "sequences_running"
    line = (
        f"requests: {latest.total(running):,.0f} in flight, {latest.total('admission_waiting'):,.0f} wait for admission"
    )
    if last is not None and latest.time_ms > last.time_ms:
        names = ("prompt_tokens_total", "generated_tokens_total")
        rates = [(latest.total(name) - last.total(name)) * 1000 / (latest.time_ms - last.time_ms) for name in names]
        line += f"; {rates[0]:,.0f} prompt tokens and {rates[1]:,.0f} generated a second"
    yield line
    for labels, target in latest.labelled_rows("scaling_wanted"):
        more, fewer = (latest.total("scaling_decisions_total", **labels, **{"for": way}) for way in ("more", "fewer"))
        yield f"scaling: {target:.0f} {labels['role']} wanted; {more:.0f} times more, {fewer:.0f} times fewer so far"
    for objective in ("ttft", "tpot"):
        name = "instance_objectives_total" if latest.has_metric("instance_objectives_total") else "objectives_total"
        met = latest.total(name, objective=objective, result="met")
        every = met + latest.total(name, objective=objective, result="missed")
        if every:
            yield f"{objective} objective: kept by {_share(met, every)} of {every:,.0f}"


def _members(snapshot: Snapshot, latest: Samples) -> Iterator[str]:
    if not snapshot["members"]:
        yield from _tiers("engine", latest, "pool_blocks", {})
    for member in snapshot["members"]:
        name, state = member["name"], "" if member["state"] == "live" else f", {member['state']}"
        if member["role"] == "store":
            used, whole = (latest.total(f"store_memory{part}_bytes", store=name) for part in ("_used", ""))
            yield f"{name} (store{state})  memory {_bar(used, 0, whole)} {human_bytes(int(used))}"
            continue
        of = {"instance": name}
        running, waiting = (
            latest.total(f"instance_{metric}", **of) for metric in ("sequences_running", "requests_waiting")
        )
        yield f"{name} ({member['role']}{state})  {running:.0f} running, {waiting:.0f} waiting"
        yield from _tiers("", latest, "instance_blocks", of)


def _tiers(title: str, latest: Samples, metric: str, of: dict[str, str]) -> Iterator[str]:
    for tier in ("hbm", "dram"):
        states = ("held", "used", "cached", "free")
        counts = {state: latest.total(metric, tier=tier, state=state, **of) for state in states}
        held_blocks, cached = counts["held"] + counts["used"], counts["cached"]
        whole = held_blocks + cached + counts["free"]
        if whole:
            text = f"{held_blocks:,.0f} held, {cached:,.0f} cached of {whole:,.0f} blocks"
            yield f"{title or ' '} {tier:4} {_bar(held_blocks, cached, whole)} {text}"


def _requests(title: str, entries: list[Snapshot]) -> Iterator[str]:
    yield f"{title}: {len(entries)}" if entries else f"{title}: none"
    for entry in entries:
        name = entry.get("response_id") or entry["request_id"]
        state = "runs" if entry["status"] is None else str(entry["status"])
        counts = ""
        if "prompt_tokens" in entry:
            counts = f"  {entry['cached_tokens']}/{entry['prompt_tokens']} from KV, {entry['output_tokens']} generated"
            counts += f"  {' to '.join(entry['instances'])}" if entry["instances"] else ""
        yield f"  {name}  {state}  {entry['total_ms']:,.0f} ms{counts}"


def timeline(entry: Snapshot) -> list[str]:
    """The lines of ``memserve explain``."""
    state = "in flight" if entry["status"] is None else f"status {entry['status']}"
    lines = [f"{entry.get('response_id') or entry['request_id']}: {state}, {entry['total_ms']:,.1f} ms"]
    longest = max([stage["to_ms"] - stage["from_ms"] for stage in entry.get("stages", ())], default=0)
    for stage in entry.get("stages", ()):
        took_ms = stage["to_ms"] - stage["from_ms"]
        lines.append(f"  {stage['stage']:8} {_bar(took_ms, 0, longest)} {took_ms:,.1f} ms")
    if "prompt_tokens" in entry:
        prompt = f"{entry['prompt_tokens']:,} prompt tokens, {entry['cached_tokens']:,} from KV"
        lines.append(f"  {prompt}; {entry['output_tokens']:,} generated; ended by {entry['finish_reason']}")
    facts = entry.get("story", ())
    width = max([len(fact["fact"]) for fact in facts], default=0)
    return [*lines, *(f"  {fact['fact'].replace('_', ' '):{width}}  {fact['value']}" for fact in facts)]


def tree_lines(reply: Snapshot) -> list[str]:
    """The lines of ``memserve trees``."""
    lines = [f"prefixes that the last {reply['prompts_max']} prompts share"]
    for of in reply["tenants"]:
        lines += [f"tenant {of['tenant']}"] if of["tenant"] else []
        lines += itertools.chain.from_iterable(_branch(node, 0) for node in of["prefixes"])
    return lines if reply["tenants"] else [*lines, "none: no prompt of a whole block has been placed"]


def _branch(node: Snapshot, depth: int) -> Iterator[str]:
    prompts = "1 prompt" if node["uses"] == 1 else f"{node['uses']} prompts"
    holders = [
        f"{holder['member']} {holder['upper_blocks']}"
        + (f"+{holder['lower_blocks']}" if holder["lower_blocks"] else "")
        for holder in node["holders"]
    ]
    holders_text = ", ".join(holders) or "not held"
    blocks = "1 block" if node["blocks"] == 1 else f"{node['blocks']} blocks"
    yield f"{'  ' * depth}{node['prefix']}  {blocks}, {prompts}, {node['used_s_ago']:.0f} s ago: {holders_text}"
    for child in node["children"]:
        yield from _branch(child, depth + 1)


def _bar(first: float, second: float, whole: float) -> str:
    if whole <= 0:
        return "[" + " " * BAR_CHARS + "]"
    first_chars, total_chars = round(BAR_CHARS * first / whole), round(BAR_CHARS * (first + second) / whole)
    return "[" + "#" * first_chars + "=" * (total_chars - first_chars) + " " * (BAR_CHARS - total_chars) + "]"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "none"


def _get(url: str, path: str, key: str | None) -> Snapshot:
    import httpx

    headers = {"authorization": f"Bearer {key}"} if key else {}
    address = f"{url.rstrip('/').removesuffix('/v1')}/ui{path}"
    try:
        answer = httpx.get(address, headers=headers, timeout=CALL_S)
        reply: Snapshot = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise UserError(f"no answer from {url}: {error}", hint="is `memserve serve` running there?") from None
    if answer.status_code != 200:
        hint = "give a key with --api-key" if answer.status_code == 401 else None
        raise UserError(str(reply.get("error", {}).get("message", answer.status_code)), hint=hint)
    return reply
