"""The gate as people meet it: options, HTTP statuses, metrics, and a router in real threads."""

from __future__ import annotations

import queue
import time
from functools import partial

import numpy as np
import pytest
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from fake_engine import FakeEngine
from fake_instances import SECRET, FakeInstance
from memserve.api.http.errors import ApiError, rejected
from memserve.api.metrics.http import ApiMetrics
from memserve.api.openai.streams import REFUSAL_HOLDS_NS, Hub
from memserve.base.config import AdmissionConfig, ClusterConfig, EngineOptions, SchedulerConfig
from memserve.base.errors import UserError
from memserve.base.types import DEFERRABLE_PRIORITY, Admission, Request, SamplingParams, StopParams
from memserve.base.units import NS_PER_MS, NS_PER_S
from memserve.cli.cluster.serve import _standalone_options
from memserve.cli.main import run
from memserve.host.engine import Refusal, Rejected
from memserve.host.router import RouterEngine
from memserve.host.stats import RouterStats
from memserve.protocol.peers import ROUTER, Peer
from memserve.router.machine import Cluster
from memserve.router.report import AdmissionStats, ClusterStats, Counters
from memserve.transport.mailbox import ZmqMailbox
from memserve.transport.network_devices import ListenAddress

WAIT_S = 20.0


# -- HTTP


@pytest.mark.parametrize(
    "refusal, retry_after_s, status, code, header",
    [
        (Refusal.BUSY, 2.1, 429, "rate_limit_exceeded", "3"),
        (Refusal.OVERLOADED, 7.0, 503, "overloaded", "7"),
        (Refusal.IMPOSSIBLE, None, 400, "request_rejected", None),
    ],
)
def test_each_refusal_has_its_status_and_says_when_to_come_again(refusal, retry_after_s, status, code, header):
    error = rejected(Rejected("r", "3 requests are active", retry_after_s, refusal))
    assert (error.status, error.code, error.headers.get("retry-after")) == (status, code, header)
    assert "3 requests are active" in error.message


def test_full_queue_rejects_a_burst_of_its_tenant(monkeypatch):
    now_ns = 10**12
    monkeypatch.setattr("memserve.api.openai.streams.time.monotonic_ns", lambda: now_ns)
    hub = Hub(FakeEngine(lambda request, index: []), ApiMetrics(), 1 << 20)
    request = Request("r", np.zeros(1, np.int32), tenant="a")
    hub.note_refusal(request, Rejected("r", "the queue is full", 1.0, Refusal.OVERLOADED))
    deferrable = structs.replace(request, priority=DEFERRABLE_PRIORITY)
    hub.note_refusal(deferrable, Rejected("r", "the queue is full", 1.0, Refusal.BUSY))
    hub.check_busy("a", b"{}")
    hub.note_refusal(request, Rejected("r", "the queue is full", 1.0, Refusal.BUSY))
    with pytest.raises(ApiError) as refused:
        hub.check_busy("a", b"{}")
    assert (refused.value.status, refused.value.headers["retry-after"]) == (429, "1")
    hub.check_busy("b", b"{}")
    hub.check_busy("a", b'{"priority": -1}')  # may displace one that waits
    now_ns += REFUSAL_HOLDS_NS
    hub.check_busy("a", b"{}")


def test_admission_metrics():
    gate = AdmissionStats(12, 9, 5, 3 * NS_PER_S, {"queue": 4, "wait": 2}, 0, 1, 3, {"a": 2, "": 1})
    stats = RouterStats.from_cluster(ClusterStats(6, 0, 0, 0, 0, 0, 0, Counters(), gate), (), router_ns=1)
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(ApiMetrics().render_page(stats, names_tenants=True).decode())
        for sample in family.samples
    }
    expected = {
        ("memserve_admission_active",): 3,
        ("memserve_admission_admitted_total",): 12,
        ("memserve_admission_queued_total",): 5,
        ("memserve_admission_waited_seconds_total",): 3,
        ("memserve_admission_evictions_total",): 1,
        ("memserve_admission_waiting", "a"): 2,
        ("memserve_admission_waiting", ""): 1,
        ("memserve_admission_rejected_total", "queue"): 4,
        ("memserve_admission_rejected_total", "wait"): 2,
    }
    assert {name: samples[name] for name in expected} == expected


# -- options


def gate_of(monkeypatch, *words):
    seen = []
    monkeypatch.setattr("memserve.cli.cluster.serve.run_server", lambda options, http, cluster: seen.append(cluster))
    assert run(["serve", *words]) == 0
    return seen[0].config.admission


def test_options_become_a_gate(monkeypatch):
    assert gate_of(monkeypatch) == AdmissionConfig()
    words = ["--admission", "cache", "--max-active", "32", "--admission-queue", "8", "--admission-wait", "2.5"]
    config = gate_of(monkeypatch, *words, "--admission-evictions", "1")
    assert (config.active_max, config.waiting_max, config.wait_ns, config.evictions_max) == (32, 8, 2_500_000_000, 1)
    words = ["--admission", "bounded", "--max-active", "4", "--tenant-weight", "a=3", "--tenant-weight", "b=c=2"]
    assert gate_of(monkeypatch, *words).weights == (("a", 3), ("b=c", 2))
    words = ["--tenant-slo", "a=3000:200", "--tenant-slo", "b=c=:50"]
    assert gate_of(monkeypatch, *words).objectives == (("a", 3_000_000_000, 200_000_000), ("b=c", 0, 50_000_000))


@pytest.mark.parametrize(
    "options, complaint",
    [
        (["--admission", "bounded"], "needs a number of requests"),
        (["--max-active", "3"], "--max-active does nothing without admission"),
        (["--in-process", "--tenant-weight", "a=3"], "one engine alone treats all tenants alike"),
        (["--in-process", "--tenant-slo", "a=3000:200"], "one engine alone treats all tenants alike"),
        (["--tenant-slo", "a=3000"], "cannot read 'a=3000' as a tenant's objectives"),
        (["--tenant-slo", "a=:"], "cannot read 'a=:' as a tenant's objectives"),
        (["--admission", "memory", "--tenant-weight", "a"], "cannot read 'a' as a tenant's weight"),
        (["--admission", "memory", "--tenant-weight", "a=0"], "weight of 'a' must be at least 1"),
        (["--admission", "bounded", "--max-active", "3", "--admission-evictions", "1"], "does not look at memory"),
        (["--in-process", "--admission", "memory"], "one engine alone"),
        (["--in-process", "--admission", "bounded", "--max-active", "3", "--admission-queue", "0"], "one engine alone"),
    ],
)
def test_ineffective_options_are_refused_before_loading(options, complaint, capsys):
    assert run(["serve", "--port", "0", *options]) == 1
    error = capsys.readouterr().err
    assert complaint in error and "hint: " in error


def test_single_engine_takes_the_admission_limits():
    options = EngineOptions(scheduler=SchedulerConfig(max_running=64))
    gate = AdmissionConfig(Admission.BOUNDED, 3, waiting_max=5)
    bounded = _standalone_options(options, gate, None, None)
    assert (bounded.scheduler.max_running, bounded.scheduler.max_waiting) == (3, 5)
    assert _standalone_options(options, AdmissionConfig(), None) == options
    with pytest.raises(UserError):
        _standalone_options(options, gate, 1)


# -- threads


@pytest.fixture
def gated_router():
    gate = AdmissionConfig(Admission.BOUNDED, 1, waiting_max=1, wait_ns=400 * NS_PER_MS)
    machine = Cluster(ClusterConfig(admission=gate))
    engine = RouterEngine(machine, partial(ZmqMailbox, Peer(ROUTER, time.time_ns()), ListenAddress(SECRET)))
    member = FakeInstance("c1", engine.address, token_s=0.005)
    assert engine.wait_for_members(["c1"], WAIT_S)
    yield engine
    engine.close(WAIT_S)
    member.die()
    machine.check_invariants()


def test_router_rejects_on_full_queue_and_on_wait_timeout(gated_router):
    """One runs, one waits, the third is told at once; the second one's patience ends, by the machine's own timer."""
    news = {name: queue.Queue() for name in ("runs", "waits", "too many")}
    request = Request("", np.arange(1, 70, dtype=np.int32), SamplingParams(temperature=0.0), StopParams(10_000))
    for name, sink in news.items():
        gated_router.submit(structs.replace(request, request_id=name), sink.put)
    first = news["too many"].get(timeout=WAIT_S)
    assert isinstance(first, Rejected) and first.refusal is Refusal.BUSY and first.retry_after_s >= 1
    second = news["waits"].get(timeout=WAIT_S)
    assert isinstance(second, Rejected) and second.refusal is Refusal.OVERLOADED and second.retry_after_s >= 1
    assert not isinstance(news["runs"].get(timeout=WAIT_S), Rejected)
    gate = gated_router.stats().cluster.admission
    assert (gate.admitted, gate.queued, gate.rejected) == (1, 1, {"queue": 1, "wait": 1})
    gated_router.cancel("runs")
