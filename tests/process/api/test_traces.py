"""``--otlp-endpoint``: a span a stage, in the process where the stage was spent, below the client's own span."""

from __future__ import annotations

import gzip
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import httpx
import msgspec
import pytest

from api_world import MODEL, World, says, serve
from fake_engine import FakeEngine
from memserve.api.http.config import ApiConfig
from memserve.api.metrics.traces import Stage, Traces, open_traces, stages_of
from memserve.base.errors import UserError
from memserve.base.types import Request
from memserve.cli.main import run
from served_cluster import Server, eventually
from tiny_models import prompt, save_folder, tiny_module

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
ROUTED = (("route", "p1 to d1"), ("route_why", "cost: p1 reuses 8 tokens"), ("attempts", 1), ("route_ms", 0.25))
FETCHED = (("fetch_after_ms", 0.125), ("fetch_ms", 0.5), ("fetched_from", "c3"))
HANDED = (("handed_over_ms", 1.5), ("handoff_ms", 0.5), ("handoff_bytes", 4096))


class ClusterFake(FakeEngine):
    """Tells what a router and its instances tell of a request."""

    def submit(self, request: Request, sink) -> None:
        def tell(news) -> None:
            story = (*ROUTED, *FETCHED) if news.queue_ns is not None else ()
            if news.finish_reason is not None:
                story = (*story, *HANDED)
            sink(msgspec.structs.replace(news, story=story))

        super().submit(request, tell)


@contextmanager
def traced(**options) -> Iterator[tuple[World, InMemorySpanExporter]]:
    exporter = InMemorySpanExporter()
    with serve(ClusterFake(says("word word word")), traces=Traces(SimpleSpanProcessor(exporter)), **options) as world:
        yield world, exporter


def ask(world: World, expected: int = 200, **more) -> None:
    headers = {"x-request-id": "theirs", **more.pop("headers", {})}
    body = {"model": MODEL, "prompt": "hello secret", "max_tokens": 4, **more}
    assert httpx.post(f"{world.url}/v1/completions", json=body, headers=headers, timeout=30).status_code == expected


def finished(exporter: InMemorySpanExporter, count: int) -> list[ReadableSpan]:
    eventually(lambda: len(exporter.get_finished_spans()) >= count)
    return list(exporter.get_finished_spans())


def test_request_span_is_child_of_client_span_with_stages() -> None:
    with traced() as (world, exporter):
        ask(world, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
        spans = {span.name: span for span in finished(exporter, 8)}
    root = spans.pop("POST /v1/completions")
    assert f"{root.parent.span_id:016x}" == PARENT and root.kind.name == "SERVER"
    assert {f"{span.context.trace_id:032x}" for span in (root, *spans.values())} == {TRACE}
    assert sorted(spans) == ["decode", "fetch", "prefill", "queue", "read", "route", "transfer"]
    place = {name: span.resource.attributes["service.name"] for name, span in spans.items()}
    assert place == {
        "read": "memserve", "route": "memserve", "queue": "memserve p1", "fetch": "memserve p1",
        "prefill": "memserve p1", "transfer": "memserve d1", "decode": "memserve d1",
    }  # fmt: skip
    parents = {name: span.parent.span_id for name, span in spans.items()}
    assert parents.pop("fetch") == spans["queue"].context.span_id
    assert set(parents.values()) == {root.context.span_id}
    for span in spans.values():
        assert root.start_time <= span.start_time <= span.end_time <= root.end_time
    line = [spans[name] for name in ("read", "route", "queue", "prefill", "decode")]
    assert line[0].start_time == root.start_time and line[-1].end_time == root.end_time
    for earlier, later in pairwise(line):
        assert earlier.end_time == later.start_time, (earlier.name, later.name)
    # The fake answers at once, so a request may be shorter than what its story tells: a stage ends with it.
    routed = min(spans["read"].end_time + 250_000, spans["queue"].end_time)
    assert spans["route"].end_time == pytest.approx(routed, abs=1000)
    arrived = min(spans["read"].end_time + 1_500_000, root.end_time)
    assert spans["transfer"].end_time == pytest.approx(arrived, abs=1000)
    assert spans["route"].attributes["memserve.route_why"] == "cost: p1 reuses 8 tokens"
    assert spans["transfer"].attributes["memserve.handoff_bytes"] == 4096
    about = root.attributes
    assert about["memserve.request_id"] == "theirs" and about["memserve.output_tokens"] == 4
    assert about["http.response.status_code"] == 200 and about["http.route"] == "/v1/completions"
    told = str([dict(span.attributes) for span in (root, *spans.values())])
    assert "secret" not in told and "word" not in told


def test_refused_request_has_one_span_unauthorized_none() -> None:
    with traced(api_keys=["sk-one"]) as (world, exporter):
        ask(world, 401)
        ask(world, 400, max_tokens=-1, headers={"authorization": "Bearer sk-one"})
        (span,) = finished(exporter, 1)
    assert span.attributes["http.response.status_code"] == 400 and span.parent is None


def test_the_clients_choice_not_to_sample_holds() -> None:
    with traced() as (world, exporter):
        ask(world, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
        ask(world, headers={"traceparent": "00-nonsense"})
        spans = finished(exporter, 8)
    assert len(spans) == 8 and TRACE not in {f"{span.context.trace_id:032x}" for span in spans}


def entry(**facts: float | str) -> dict:
    ends = [("read", 0, 1), ("queue", 1, 3), ("prefill", 3, 10), ("decode", 10, 20)]
    stages = [{"stage": name, "from_ms": begin, "to_ms": end} for name, begin, end in ends]
    return {"stages": stages, "story": [{"fact": name, "value": value} for name, value in facts.items()]}


def test_stages_are_those_that_facts_tell_of() -> None:
    alone = list(stages_of(entry()))
    assert [(one.name, one.place) for one in alone] == [("read", ""), ("queue", ""), ("prefill", ""), ("decode", "")]
    assert list(stages_of({"stages": [{"stage": "waiting", "from_ms": 0, "to_ms": 5}], "story": []})) == []
    moved = {one.name: one for one in stages_of(entry(route="p to d", route_ms=0.5, handed_over_ms=11, handoff_ms=4))}
    assert moved["queue"] == Stage("queue", "p", 1.5, 3)
    assert moved["transfer"] == Stage("transfer", "d", 8.0, 12.0)
    late = {one.name: one for one in stages_of(entry(route="p", route_ms=99.0, fetch_after_ms=5, fetch_ms=99))}
    assert late["route"].to_ms == 3 and late["fetch"].to_ms == 20, "clocks and roundings leave the request's time"


def test_each_prompt_of_a_request_has_stages_of_its_own() -> None:
    told = entry()
    told["story"] = [{"prompt": at, "fact": "route", "value": f"c{at}"} for at in range(2)]
    stages = [(one.name, one.place, one.attributes.get("memserve.prompt")) for one in stages_of(told)]
    assert stages[1:] == [
        (name, f"c{at}", at) for at in range(2) for name in ("queue", "prefill", "decode")
    ]  # fmt: skip


def test_tracing_imports_are_lazy_and_endpoint_is_validated() -> None:
    code = "import sys, memserve.api.app; sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
    with pytest.raises(UserError, match="no OTLP receiver"):
        ApiConfig(otlp_endpoint="127.0.0.1:4318")


def test_without_the_package_the_hint_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("opentelemetry.sdk.trace.export", "opentelemetry.exporter.otlp.proto.http.trace_exporter"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match="opentelemetry-sdk") as raised:
        open_traces("http://127.0.0.1:4318")
    assert "memserve[otel]" in raised.value.hint
    assert run(["serve", "--otlp-endpoint", "http://127.0.0.1:4318", "--model", "/nowhere"]) == 1
    said = capsys.readouterr().err
    assert "opentelemetry-sdk" in said and "loading" not in said


class Receiver(BaseHTTPRequestHandler):
    """The OTLP receiver of a collector, as far as traces over HTTP need it."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        assert self.path == "/v1/traces"
        self.server.received.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *words: object) -> None:
        pass


def test_cluster_exports_handover_stages_to_otlp_collector(tmp_path: Path) -> None:
    collector = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    collector.received = []
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    folder = save_folder(tiny_module("llama"), tmp_path / "tiny")
    flags = ["--prefill", "1", "--decode", "1", "--otlp-endpoint", f"http://127.0.0.1:{collector.server_port}"]
    server = Server(folder, *flags, "--metadata", "none")
    try:
        server.complete([int(token) for token in prompt(100, 3)], 12)
    finally:
        server.process.terminate()
        assert server.process.wait(60) == 0  # what waits is sent before the end
        collector.shutdown()
    spans = {}
    for request in collector.received:
        for of_service in request.resource_spans:
            (service,) = [a.value.string_value for a in of_service.resource.attributes if a.key == "service.name"]
            spans |= {span.name: (service, span) for scope in of_service.scope_spans for span in scope.spans}
    assert {name: service for name, (service, _) in spans.items()} == {
        "POST /v1/completions": "memserve", "read": "memserve", "route": "memserve", "queue": "memserve p1",
        "prefill": "memserve p1", "transfer": "memserve d1", "decode": "memserve d1",
    }  # fmt: skip
    root, transfer = spans["POST /v1/completions"][1], spans["transfer"][1]
    assert transfer.parent_span_id == root.span_id and transfer.end_time_unix_nano > transfer.start_time_unix_nano
    assert {a.key: a.value.int_value for a in transfer.attributes}["memserve.handoff_bytes"] > 0
