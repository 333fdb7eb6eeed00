"""Traces of requests for OpenTelemetry (extra ``otel``): one span a request, one below it for each of its stages.

The spans are made when a request has ended, from the facts that ``memserve explain`` shows: while it runs, it pays
nothing. Each stage belongs to the process that it was spent in, which is a service of its own to a viewer::

    memserve           POST /v1/chat/completions     parent: the client's traceparent
    memserve             read        body, template, tokens
    memserve             route       at the router: admission, placement
    memserve p1          queue       at the instance until the first step; a fetch of KV lies within
    memserve p1            fetch     KV from another instance or a store
    memserve p1          prefill     until the first token
    memserve d1          transfer    the KV goes to the instance that decodes; begins during prefill
    memserve d1          decode      the rest

No text, no token, no key and no salt enters a span. All times are on the router's clock: an instance tells durations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.types import Scope

from memserve.api.http.middleware import TRACE_KEY
from memserve.api.ui.timelines import Entry
from memserve.base.errors import UserError
from memserve.base.units import NS_PER_MS

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

SERVICE = "memserve"
SERVICES_MAX = 1024
"""Processes with spans of their own; the stages of further ones are the router's."""

_SHOWN = (
    "tenant", "model", "stream", "prompt_tokens", "cached_tokens", "computed_tokens", "output_tokens", "finish_reason",
    "response_id",
)  # fmt: skip
"""What a request's span has of its entry, as ``memserve.NAME``."""
_STAGE_FACTS = {
    "route": ("route", "route_why", "attempts", "last_failure"),
    "queue": ("cached_tokens_hbm", "cached_tokens_dram", "parked_ms", "slo_ttft"),
    "fetch": ("fetch_decision", "fetched_tokens", "fetched_from", "fetched_tier",
        "fetched_state_bytes", "fetch_cut", "fetch_failed"),
    "prefill": ("begins_by_layer", "by_layer"),
    "transfer": (
        "transfer_why", "handoff_mode", "handoff_blocks_received", "handoff_blocks_reused", "handoff_bytes",
        "handoff_state_bytes", "handoff_link",
        "prefilled_at", "handoff_not_made",
    ),
    "decode": ("slo_tpot", "drafts_kept", "returned_blocks"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a request's time, in milliseconds from its arrival, spent at ``place`` (empty: the router)."""

    name: str
    place: str
    from_ms: float
    to_ms: float
    attributes: dict[str, str | int | float] = field(default_factory=dict)
    within: str = ""
    """The stage that it is a part of."""


def stages_of(entry: Entry) -> Iterator[Stage]:
    """The stages of an entry of :class:`Timelines`, each after the one that it lies in. An entry without any has no
    answer: it was refused, or its client left before its first token."""
    parts = {stage["stage"]: (stage["from_ms"], stage["to_ms"]) for stage in entry.get("stages", ())}
    if "queue" not in parts:
        return
    yield Stage("read", "", *parts["read"])
    begins = parts["read"][1]
    prompts: dict[int, dict[str, list[Any]]] = {}
    for fact in entry["story"]:
        prompts.setdefault(fact.get("prompt", 0), {}).setdefault(fact["fact"], []).append(fact["value"])
    for prompt_index, facts in (prompts or {0: {}}).items():
        yield from _prompt_stages(prompt_index if len(prompts) > 1 else None, facts, parts, begins)


def _prompt_stages(
    prompt_index: int | None, facts: dict[str, list[Any]], parts: dict[str, tuple[float, float]], begins: float
) -> Iterator[Stage]:
    first, _, second = str(facts.get("route", [""])[-1]).partition(" to ")
    ends = parts["decode"][1]

    def stage(name: str, place: str, from_ms: float, to_ms: float, within: str = "") -> Stage:
        attributes = {f"memserve.{fact}": facts[fact][-1] for fact in _STAGE_FACTS[name] if fact in facts}
        if prompt_index is not None:
            attributes["memserve.prompt"] = prompt_index
        from_ms = min(max(from_ms, 0.0), ends)
        return Stage(name, place, from_ms, min(max(to_ms, from_ms), ends), attributes, within)

    queue_from, queue_to = parts["queue"]
    routed = min(begins + float(facts.get("route_ms", [0.0])[-1]), queue_to)
    if "route_ms" in facts:
        yield stage("route", "", queue_from, routed)
    yield stage("queue", first, routed, queue_to)
    for after_ms, took_ms in zip(facts.get("fetch_after_ms", ()), facts.get("fetch_ms", ()), strict=False):
        yield stage("fetch", first, routed + after_ms, routed + after_ms + took_ms, "queue")
    yield stage("prefill", first, *parts["prefill"])
    if "handed_over_ms" in facts and "handoff_ms" in facts:
        arrived = begins + float(facts["handed_over_ms"][-1])
        yield stage("transfer", second or first, arrived - float(facts["handoff_ms"][-1]), arrived)
    yield stage("decode", second or first, *parts["decode"])


class Traces:
    """Makes spans of requests that have ended. Lives in the event loop; sending is another thread's concern."""

    def __init__(self, processor: SpanProcessor) -> None:
        """``processor`` takes the spans, of all services."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._processor = processor
        self._providers: dict[str, TracerProvider] = {}
        self._propagator = TraceContextTextMapPropagator()

    def on_request_end(self, scope: Scope, entry: Entry, started_unix_ns: int) -> None:
        """Make the spans of a request that began at ``started_unix_ns``, and note its trace in ``scope``."""
        from opentelemetry.trace import Span, SpanKind, Status, StatusCode, format_trace_id, set_span_in_context

        carrier = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in (b"traceparent", b"tracestate")
        }

        def begin(stage: Stage, parent: Context, kind: SpanKind = SpanKind.INTERNAL) -> Span:
            tracer = self._provider_for(stage.place).get_tracer("memserve")
            start_ns = started_unix_ns + round(stage.from_ms * NS_PER_MS)
            return tracer.start_span(stage.name, parent, kind, stage.attributes, start_time=start_ns)

        def end(span: Span, stage: Stage) -> None:
            span.end(started_unix_ns + round(stage.to_ms * NS_PER_MS))

        title = f"{scope['method']} {entry['route']}"
        whole = Stage(title, "", 0.0, entry["total_ms"], _request_attributes(scope, entry))
        root = begin(whole, self._propagator.extract(carrier), SpanKind.SERVER)
        scope[TRACE_KEY] = format_trace_id(root.get_span_context().trace_id)
        if entry["status"] >= 500:
            root.set_status(Status(StatusCode.ERROR))
        if root.is_recording():
            contexts = {"": set_span_in_context(root)}
            for request_stage in stages_of(entry):
                span = begin(request_stage, contexts[request_stage.within])
                contexts[request_stage.name] = set_span_in_context(span)
                end(span, request_stage)
        end(root, whole)

    def _provider_for(self, place: str) -> TracerProvider:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        if place not in self._providers and len(self._providers) >= SERVICES_MAX:
            place = ""
        if (known_provider := self._providers.get(place)) is not None:
            return known_provider
        name = f"{SERVICE} {place}" if place else SERVICE
        resource = Resource.create({"service.name": name, "service.instance.id": place or "router"})
        provider = self._providers[place] = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(self._processor)
        return provider

    def close(self) -> None:
        """Send what waits, for a few seconds at most."""
        self._processor.shutdown()


def _request_attributes(scope: Scope, entry: Entry) -> dict[str, Any]:
    shown = {f"memserve.{name}": entry[name] for name in _SHOWN if entry.get(name) not in (None, "")}
    return shown | {
        "http.request.method": scope["method"],
        "http.route": entry["route"],
        "http.response.status_code": entry["status"],
        "memserve.request_id": entry["request_id"],
    }


def refuse_without_package() -> None:
    """Raise :class:`UserError` without the extra ``otel``."""
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace.export  # noqa: F401  # whether they are there
    except ImportError:
        hint = "pip install 'memserve[otel]'"
        raise UserError("traces need the package opentelemetry-sdk", hint=hint, param="otlp_endpoint") from None


def open_traces(endpoint: str) -> Traces:
    """Traces that go to an OTLP receiver: ``endpoint`` is its address without a path, e.g. ``http://127.0.0.1:4318``.

    OpenTelemetry's own environment variables hold for all that is not said here: ``OTEL_TRACES_SAMPLER``,
    ``OTEL_EXPORTER_OTLP_HEADERS``, ``OTEL_BSP_SCHEDULE_DELAY`` ...

    Raises :class:`UserError` without the extra ``otel``.
    """
    refuse_without_package()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return Traces(BatchSpanProcessor(OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")))
