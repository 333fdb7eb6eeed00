"""``memserve serve --on ray`` and ``memserve scale``: a cluster whose processes Ray places and starts again."""

from __future__ import annotations

import dataclasses
import os
import secrets
import socket
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memserve.base.config import EngineOptions
from memserve.base.errors import UserError
from memserve.base.options import command_line_of
from memserve.base.types import Role
from memserve.cli import credentials
from memserve.cli import flags as opt
from memserve.cli.cluster.members import ClusterOptions, find_stores
from memserve.cli.cluster.picker import check_picker
from memserve.model.gpu.setup import as_reserved
from memserve.system.process import EndRequested, signals_raise
from memserve.system.secrets import as_followed
from memserve.transport.network_devices import with_port

if TYPE_CHECKING:
    from memserve.host.ray import ClusterPlan, ProcessOrder

_LOOK_S = 0.2
_CONNECT_S = 5.0
_DROPPED = (
    "--on", "--address", "--ray-resources", "--ray-cluster", "--prefill", "--decode", "--colocated", "--cluster-host",
    "--cluster-port", "--port", "--cluster-secret-file", "--ssd", "--store-dram", "--store-listen", "--ssd-sync",
    "--ssd-writes-per-day", "--ssd-admission", "--api-key", "--api-key-file", "--metrics-key", "--metrics-key-file",
)  # fmt: skip
"""Flags of the driver that the router is not told of, or otherwise. Each has a value."""


def run_on_ray(engine: EngineOptions, http: opt.HttpOptions, cluster: ClusterOptions) -> None:
    """Place the cluster, serve until a signal comes, then drain everything. Raises :class:`UserError`."""
    started = time.perf_counter()
    check_picker(http)
    ray = _connect_ray(cluster.placement.address)
    from memserve.host.ray import START_S, new_controller

    port = http.server.port or free_port()
    try:
        node = ray.util.get_node_ip_address() if cluster.host == opt.DEFAULT_HOST else cluster.host
        plan = _plan(engine, http, cluster, node, port)
        with signals_raise():
            find_stores(dataclasses.replace(cluster, host=node), typer.echo)  # else its router ends again and again
            controller = new_controller(plan)
            with plain_errors(ray):
                try:
                    ray.get(controller.start.remote())
                    ray.get(controller.wait_members.remote())
                    _wait_healthy(http.api_url(port), START_S)
                    typer.echo(f"ready in {time.perf_counter() - started:.1f} s on Ray: {http.api_url(port)}")
                    _print_names(ray.get(controller.names.remote()))
                    while True:
                        time.sleep(1.0)
                        if cluster.placement.scaling.scale:
                            _apply_scaling(ray, controller)
                except (EndRequested, KeyboardInterrupt):
                    ray.get(controller.stop.remote())
    finally:
        ray.shutdown()


def _apply_scaling(ray: Any, controller: Any) -> None:
    """Have the decisions of the router's policy carried out. Where there is no room, everything stays as it is."""
    try:
        with plain_errors(ray):
            names = ray.get(controller.follow.remote())
    except UserError as error:
        typer.echo(f"{error.message}; {error.hint}", err=True)
        return
    if names is not None:
        _print_names(names)


def scale(
    counts: Annotated[list[str], typer.Argument(help="ROLE=COUNT, for example prefill=3 decode=2.")],
    *,
    address: Annotated[str | None, typer.Option(help="HOST:PORT of the Ray cluster. Default: RAY_ADDRESS.")] = None,
    ray_cluster: Annotated[str, typer.Option(help="Name of the cluster, where several run on this Ray.")] = "",
) -> None:
    """Start or drain instances and stores of a cluster that `memserve serve --on ray` runs; no request is lost."""
    role_counts: dict[str, int] = {}
    for text in counts:
        role, equals, count = text.partition("=")
        if role not in [known_role.value for known_role in Role] or not equals or not count.isdigit():
            hint = "for example: memserve scale prefill=3"
            raise UserError(f"ROLE=COUNT is needed, not {text!r}", hint=hint, param="counts")
        role_counts[role] = int(count)
    ray = _connect_ray(address or os.environ.get("RAY_ADDRESS") or "auto")
    try:
        with plain_errors(ray):
            _print_names(ray.get(_controller_of(ray, ray_cluster).scale.remote(role_counts)))
    finally:
        ray.shutdown()


def _controller_of(ray: Any, cluster: str) -> Any:
    """That of the cluster of this name, or of the only one. Raises :class:`UserError`."""
    from memserve.host.ray import clusters_here, controller_name

    names = clusters_here()
    if not cluster and len(names) == 1:
        cluster = names[0]
    if cluster not in names:
        is_choice = bool(names) and not cluster
        hint = f"--ray-cluster NAME, one of {', '.join(names)}" if names else "start one: memserve serve --on ray"
        called = f" called {cluster}" if cluster else ""
        message = "several clusters of memserve run" if is_choice else f"no cluster of memserve{called} runs"
        raise UserError(f"{message} on this Ray", hint=hint, param="ray_cluster")
    return ray.get_actor(controller_name(cluster))


def without_flags(words: Sequence[str], flags: Sequence[str]) -> list[str]:
    """``words`` of a command line less ``flags``, each with its value."""
    remaining, is_value = [], False
    for word in words:
        name, equals, _ = word.partition("=")
        if is_value:
            is_value = False
        elif name in flags:
            is_value = not equals
        else:
            remaining.append(word)
    return remaining


def _plan(engine: EngineOptions, http: opt.HttpOptions, cluster: ClusterOptions, node: str, port: int) -> ClusterPlan:
    secret = as_followed(cluster.secret or secrets.token_urlsafe(32)).initial_value
    cluster_port = cluster.port or free_port()
    router = router_order(sys.argv[1:], http, cluster, secret, RouterPorts(node, port, cluster_port))
    return dataclasses.replace(
        members_plan(engine, http, cluster, secret, with_port(node, cluster_port)), router=router
    )


def members_plan(
    engine: EngineOptions, http: opt.HttpOptions, cluster: ClusterOptions, secret: str, join: str
) -> ClusterPlan:
    """The instances and stores of a cluster whose router is reached at ``join``. Raises :class:`UserError` for GPUs
    that do not suit an instance."""
    from memserve.host.ray import ClusterPlan, ProcessOrder

    server = http.server
    common = ("--join", join, "--link", cluster.link, "--log-level", server.log_level, "--drain-s", str(server.drain_s))
    members, env, resources = {}, _environment(), cluster.placement.by_role()
    most_counts = cluster.at_most.counts
    for role in most_counts:
        role_options = dataclasses.replace(engine, caching=engine.caching and cluster.role_caches(role))
        try:
            role_options, resources[role.value] = as_reserved(role_options, role, resources[role.value])
        except UserError:
            if most_counts[role]:
                raise
            continue  # `memserve scale` is told that this cluster has no such role
        words = ("instance", *common, "--role", role.value, *command_line_of(role_options))
        members[role.value] = ProcessOrder("", words, secret, server.drain_s, env=env)
    words = ("store", *common, *cluster.store.store_flags, "--kv-codec", engine.kv_codec)
    members[Role.STORE.value] = ProcessOrder("", words, secret, server.drain_s, env=env)
    counts = {role.value: count for role, count in cluster.counts.items()}
    counts |= {Role.STORE.value: int(cluster.store.is_wanted)}
    counts = {role: count for role, count in counts.items() if role in members}
    return ClusterPlan(None, members, counts, resources, cluster.placement.cluster)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(("MEMSERVE_", "HF_"))}


@dataclasses.dataclass(frozen=True)
class RouterPorts:
    """Where a router listens that Ray places: the node, and its ports for clients and for members."""

    node: str
    http: int
    cluster: int


def router_order(
    line: Sequence[str], http: opt.HttpOptions, cluster: ClusterOptions, secret: str, ports: RouterPorts
) -> ProcessOrder:
    """The command ``line`` of `memserve serve`, for a router without instances of its own. Keys travel in the
    environment."""
    from memserve.host.ray import ROUTER, ProcessOrder

    no_instances = ("--prefill", "0", "--decode", "0", "--colocated", "0")
    address_flags = ("--port", str(ports.http), "--cluster-host", ports.node, "--cluster-port", str(ports.cluster))
    keys = {credentials.KEY_VARIABLE: " ".join(http.api_keys.read_keys())} if http.api_keys.are_given else {}
    if http.metrics_keys.are_given:
        keys[credentials.METRICS_VARIABLE] = http.metrics_keys.read_keys()[0]
    words = (*without_flags(line, _DROPPED), *no_instances, *address_flags)
    scales = bool(cluster.placement.scaling.scale)
    return ProcessOrder(ROUTER, words, secret, http.server.drain_s, os.getcwd(), scales, {**_environment(), **keys})


def _connect_ray(address: str | None) -> Any:
    try:
        import ray
    except ImportError:
        raise UserError("Ray is not installed", hint="pip install 'memserve[ray]'", param="on") from None
    from memserve.host.ray import NAMESPACE

    _check_answers(address)
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="warning")
    except (ConnectionError, ValueError, RuntimeError) as error:
        line = str(error).splitlines()[0]
        raise UserError(f"no Ray at {address}: {line}", hint="ray start --head, then --address HOST:6379") from None
    return ray


def _check_answers(address: str | None) -> None:
    """Raise :class:`UserError` when nothing listens at ``HOST:PORT``: Ray itself would try for minutes."""
    host, _, port = (address or "").rpartition(":")
    if not host or not port.isdigit() or "//" in host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except OSError as error:
        hint = "ray start --head there, then --address HOST:6379"
        message = f"no Ray at {address}: {error.strerror or error}"
        raise UserError(message, hint=hint, param="address") from None


@contextmanager
def plain_errors(ray: Any) -> Iterator[None]:
    """An error of ours that was raised in an actor is ours here."""
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise error.cause from None
        raise


def free_port() -> int:
    """A port of this host at which nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _wait_healthy(url: str, timeout_s: float) -> None:
    health = f"{url.removesuffix('/v1')}/health"
    trusting = ssl._create_unverified_context() if "https" in url else None  # it is this host's, under another name
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(health, timeout=5.0, context=trusting):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(_LOOK_S)
    raise UserError("the router does not answer", hint="Ray's dashboard, or `ray logs`, has what it prints")


def _print_names(names: Mapping[str, Sequence[str]]) -> None:
    for role, members in names.items():
        if members:
            typer.echo(f"{role}: {', '.join(members)}")
    sys.stdout.flush()
