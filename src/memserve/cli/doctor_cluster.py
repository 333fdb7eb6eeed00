"""``memserve doctor --cluster URL``: what is wrong with a cluster that runs, by what its router says of it.

Nothing is asked of the router that clients may not ask: ``/health``, and the snapshot behind ``/ui``, which has the
samples of ``/metrics``. With ``--join`` and the secret file it also probes the cluster port, as an instance would.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from memserve import __version__
from memserve.base.errors import UserError
from memserve.base.types import Role
from memserve.cli.output import Finding, Status
from memserve.cli.watch import Samples
from memserve.kv.identity import secrets_in
from memserve.system.secrets import read_secret
from memserve.transport.links.nixl_agent import nixl_is_installed
from memserve.transport.probe import ProbeResult, probe_address

CALL_S = 10.0
PROBE_S = 3.0
CLOCK_OFF_S = 2.0
"""Clocks that differ by more confuse the order of an instance's lives, and when documents end."""
_LOG = "the router's log has the reason, by name"

_COUNTS = (
    ("joins refused", "router_members_refused_total", "an instance has another model, dtype, block size or version"),
    ("messages refused", "router_messages_malformed_total", "processes of several versions share this cluster"),
    (
        "failed handshakes",
        "router_handshakes_failed_total",
        "a process has another cluster secret, or is no member at all",
    ),
    ("members lost", "router_members_died_total", "look for the kernel's out-of-memory killer, and for the network"),
    ("damaged KV", "instance_checksum_mismatches_total", "check the network cards and the memory of these hosts"),
    ("failed reads of KV", "instance_pulls_failed_total", "its instance's log names the member and the cause"),
    ("failed transfers", "instance_transfers_failed_total", "hosts cannot read each other's KV: open NIXL's ports"),
    ("lost store reads", "instance_store_fetches_failed_total", "a store is away or slow: look at its log and disks"),
    ("disk errors", "store_disk_errors_total", "replace the disk; the store does without it"),
)
"""Counters that are 0 where all is well: name of the finding, metric, what it means."""


def examine_cluster(url: str, key: str | None, expected: dict[Role, int]) -> Iterator[Finding]:
    """The findings about the cluster behind ``url``; ``expected``: members of each role that there should be, of each
    model."""
    base = url.rstrip("/").removesuffix("/v1")
    health = _get(base, "/health", None)
    yield _reached(url, health)
    if health is None:
        return
    sent_ns = time.time_ns()
    reply = _get(base, "/ui/snapshot", key)
    answered_ns = time.time_ns()
    if reply is None or reply[0] != 200:
        hint = "give the key of --metrics-key with --api-key" if reply is not None and reply[0] == 401 else None
        yield Finding("figures", Status.FAIL, f"no snapshot from {url}: {_message(reply)}", hint)
        return
    snapshot = reply[1]
    yield _version(snapshot)
    yield _clock(snapshot["time_ms"] / 1000, sent_ns / 1e9, answered_ns / 1e9)
    if not snapshot["viewer"]["sees_cluster"]:
        hint = "give the key of --metrics-key with --api-key"
        yield Finding("figures", Status.FAIL, "this key sees its own requests alone", hint)
        return
    models = snapshot.get("models", ())
    if len(models) < 2:
        yield from _examine_model(snapshot, expected)
        return
    for model in models:
        part = _get(base, f"/ui/snapshot?model={quote(model)}", key)
        if part is None or part[0] != 200:
            yield Finding(model, Status.FAIL, f"no snapshot from {url}: {_message(part)}")
            continue
        for finding in _examine_model(part[1], expected):
            yield dataclasses.replace(finding, name=f"{model}: {finding.name}")


def _examine_model(snapshot: dict[str, Any], expected: dict[Role, int]) -> Iterator[Finding]:
    samples = Samples(snapshot)
    if engines := samples.labelled_rows("fleet_engine_up"):
        yield from _engines(engines)
        return
    if not samples.total("engine_up"):
        yield Finding("router", Status.FAIL, "the machine behind the API does not answer", "read its log; restart it")
        return
    if not samples.has_metric("router_instances"):
        yield Finding("members", Status.OK, "none: one engine without a cluster (--in-process)")
        return
    yield from _members(snapshot["members"], samples, expected)
    yield from _metadata(samples)
    yield from _hosts(snapshot["members"], samples)
    yield from _stores(samples)
    for name, metric, meaning in _COUNTS:
        if count := samples.total(metric):
            yield Finding(name, Status.WARN, f"{count:,.0f} since the router began", f"{meaning}; {_LOG}")


def examine_port(join: str, secret_file: Path | None) -> Iterator[Finding]:
    """Whether the routers at ``join`` (``HOST:PORT``, several separated by commas) take the secret, from here."""
    if secret_file is None:
        raise UserError("--join needs the cluster's secret", hint="add --cluster-secret-file FILE", param="join")
    text = read_secret(secret_file)
    secrets = secrets_in(text) or (text,)
    for address in join.split(","):
        results = [probe_address(f"tcp://{address}", secret, PROBE_S) for secret in secrets]
        match next(
            (result for result in (ProbeResult.ACCEPTED, ProbeResult.REJECTED) if result in results),
            ProbeResult.NO_ANSWER,
        ):
            case ProbeResult.ACCEPTED:
                secret_text = (
                    f"line {results.index(ProbeResult.ACCEPTED) + 1} of the secrets"
                    if len(secrets) > 1
                    else "the secret"
                )
                yield Finding("cluster port", Status.OK, f"{address} takes {secret_text}")
            case ProbeResult.REJECTED:
                hint = "give the file that the routers were given; it must be the same for all members"
                yield Finding("cluster port", Status.FAIL, f"{address} refuses the secret of {secret_file}", hint)
            case ProbeResult.NO_ANSWER:
                hint = "is a router there, and do firewalls and network policies let this host reach its port?"
                yield Finding("cluster port", Status.FAIL, f"nothing answers at {address}", hint)


def read_expected(text: str | None) -> dict[Role, int]:
    """``prefill=2,decode=2,store=1`` as counts. Raises :class:`UserError` for anything else."""
    expected: dict[Role, int] = {}
    for part in (text or "").split(",") if text else ():
        role, equals, count = part.partition("=")
        if role not in [known_role.value for known_role in Role] or not equals or not count.isdigit():
            hint = "for example --expect prefill=2,decode=2,store=1"
            raise UserError(f"--expect has ROLE=COUNT, not {part!r}", hint=hint, param="expect")
        expected[Role(role)] = int(count)
    return expected


def _reached(url: str, health: tuple[int, Any] | None) -> Finding:
    if health is None:
        hint = "is `memserve serve` running there? A router without instances answers when the first one has joined"
        return Finding("router", Status.FAIL, f"no answer from {url} within {CALL_S:.0f} s", hint)
    status, body = health
    if status == 200:
        return Finding("router", Status.OK, f"{url}: {body.get('status')}, {body.get('model', '')}".rstrip(", "))
    return Finding("router", Status.FAIL, f"{url} takes no requests: {_message(health)}", "see the members below")


def _version(snapshot: dict[str, Any]) -> Finding:
    router_version = snapshot["version"]
    if router_version == __version__:
        return Finding("version", Status.OK, router_version)
    hint = "members of one cluster run one version: install the router's here, or start the router anew"
    return Finding("version", Status.WARN, f"the router is {router_version}, and this is {__version__}", hint)


def _clock(router_s: float, sent_s: float, answered_s: float) -> Finding:
    off_s = max(sent_s - router_s, router_s - answered_s, 0.0)
    if off_s <= CLOCK_OFF_S:
        return Finding("clock", Status.OK, "that of the router, as far as this can be seen")
    hint = "let NTP keep the clocks: an instance with a late clock may be taken for an earlier life of itself"
    return Finding("clock", Status.WARN, f"the router's clock and this one differ by {off_s:,.1f} s", hint)


def _engines(engines: list[tuple[dict[str, str], float]]) -> Iterator[Finding]:
    """Of servers of other projects (``--engine``): which take requests."""
    down = [labels["engine"] for labels, is_up in engines if not is_up]
    text = f"{len(engines) - len(down)} of {len(engines)} take requests"
    yield Finding("engines", Status.OK if len(down) < len(engines) else Status.FAIL, text, None)
    for name in down:
        yield Finding(name, Status.WARN, "it takes no requests", "does it run, and is its /health 200?")


def _members(members: list[dict[str, str]], samples: Samples, expected: dict[Role, int]) -> Iterator[Finding]:
    counts: dict[str, int] = {}
    for member in members:
        counts[member["role"]] = counts.get(member["role"], 0) + (member["state"] == "live")
    text = ", ".join(f"{count} {role}" for role, count in sorted(counts.items())) or "none"
    instances = sum(count for role, count in counts.items() if role != Role.STORE.value)
    hint = "start instances: memserve instance --join ROUTER:PORT --role ... --cluster-secret-file FILE"
    yield Finding("members", Status.OK if instances else Status.FAIL, text, hint)
    for role, count in expected.items():
        if (has := counts.get(role.value, 0)) < count:
            hint = f"look at the log of the missing {role.value}; from its host: memserve doctor --join ROUTER:PORT"
            yield Finding(f"{role.value} missing", Status.FAIL, f"{has} of {count} are live", hint)
    for member in members:
        if member["state"] != "live":
            hint = "it takes no new requests; one that rejoins for minutes has lost the router"
            yield Finding(member["name"], Status.WARN, f"{member['role']}, {member['state']}", hint)
    names = {member["name"] for member in members}
    for labels, is_up in samples.labelled_rows("instance_process_up"):
        if not is_up or labels["instance"] not in names:
            state = "its process does not run" if not is_up else "its process runs, and is no member"
            yield Finding(labels["instance"], Status.FAIL, state, f"the router starts it again; {_LOG}")


def _metadata(samples: Samples) -> Iterator[Finding]:
    lag_s, failures = samples.total("router_metadata_lag_seconds"), samples.total("router_metadata_failures_total")
    if samples.total("router_metadata_durable"):
        yield Finding("metadata", Status.OK, f"durable, {failures:,.0f} failed writes since the router began")
        return
    detail = (
        f"not durable for {lag_s:,.0f} s" if failures or lag_s else "none is kept (--metadata none), or not durable"
    )
    yield Finding(
        "metadata", Status.WARN, detail, "documents and sessions end with the router: check its disk, or etcd"
    )


def _hosts(members: list[dict[str, str]], samples: Samples) -> Iterator[Finding]:
    live = [member for member in members if member["state"] == "live"]
    hosts = {member["host"] for member in live}
    yield Finding("hosts", Status.OK, f"{len(hosts)} with members")
    if len(hosts) < 2:
        return
    if not nixl_is_installed():
        hint = "on a trusted network with RDMA: pip install 'memserve[nixl]' on every host, and --link trusted"
        detail = "not installed here: KV goes between hosts through the cluster's encrypted channel, which is slower"
        yield Finding("NIXL", Status.OK, f"{detail} ({hint})")
    moved = samples.total("instance_handed_over_total")
    if moved and not samples.total("instance_received_bytes_total"):
        hint = "their ports are closed to one another, or their --link differ: every prompt is computed twice"
        yield Finding("KV transfer", Status.WARN, f"{moved:,.0f} requests were handed over, and no KV with them", hint)


def _stores(samples: Samples) -> Iterator[Finding]:
    for labels, is_up in samples.labelled_rows("store_up"):
        name = labels["store"]
        full = samples.total("store_disks_full", store=name)
        if not is_up:
            yield Finding(name, Status.WARN, "the store takes no KV: it drains", "it ends, or was told to")
        elif full:
            yield Finding(
                name, Status.WARN, f"{full:,.0f} disks without room", "they are read and not written: make room"
            )
        else:
            yield Finding(name, Status.OK, f"keeps {samples.total('store_kv_blocks', store=name):,.0f} blocks of KV")


def _get(base: str, path: str, key: str | None) -> tuple[int, Any] | None:
    """Status and JSON. None: there was no answer."""
    import httpx

    try:
        answer = httpx.get(base + path, headers={"authorization": f"Bearer {key}"} if key else {}, timeout=CALL_S)
        return answer.status_code, answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return None


def _message(answer: tuple[int, Any] | None) -> str:
    if answer is None:
        return "no answer"
    status, body = answer
    error = body.get("error", {}) if isinstance(body, dict) else {}
    return str(error.get("message") or (body.get("status") if isinstance(body, dict) else None) or status)
