"""memserve as an application of Ray Serve: its proxies in front, the router in a replica, instances in Ray's actors.

::

    serve run memserve.integrations.ray_serve:app model=smollm2-135m-instruct prefill=1 decode=1

    client -- Ray Serve's proxy -- replica: ASGI application, router -- members of a cluster: one actor each, any node

The arguments are the options of ``memserve serve`` without their dashes. The replica and everything that it has started
end together; Ray Serve starts a new replica in its place.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from memserve.base.deployment import PlacementOptions, StoreOptions
from memserve.base.errors import InvariantError, UserError
from memserve.cli.cluster.http import app_of
from memserve.cli.cluster.members import READS, ClusterOptions, ServeArguments, running_cluster
from memserve.cli.cluster.ray import free_port, members_plan, plain_errors
from memserve.cli.main import command_line
from memserve.integrations.ray_replicas import check_router, run_replica
from memserve.model.loading.lora import read_adapters
from memserve.system.secrets import as_followed
from memserve.transport.network_devices import with_port

if TYPE_CHECKING:
    from memserve.base.types import Role

log = logging.getLogger(__name__)

ASGIApp = Callable[[Any, Any, Any], Awaitable[None]]
NAME = "memserve"
REPLICAS_MAX = 64
_NAME_S = 60.0
"""How long the controller of a replica before this one may take to end."""
_OWN = (
    "host", "port", "tls_cert", "tls_key", "on", "address", "routers", "cluster_host", "metadata", "scale_file",
    "in_process", "engine", "engine_admin_key_file", "endpoint_picker",
)  # fmt: skip
"""Options that Ray Serve has of its own, that say where processes run, or that mean no cluster of memserve."""


def app(args: Mapping[str, Any]) -> Any:
    """The application, for ``serve run`` and for ``import_path`` in a configuration.

    Raises :class:`UserError` for options that ``memserve serve`` does not have, or cannot have here.
    """
    from ray import serve

    count, words = replicas_of(args), words_of({name: value for name, value in args.items() if name != "replicas"})
    settings, _ = read_options(words)

    def build() -> ASGIApp:
        return open_app(words, is_shared=count > 1)

    deployment = serve.deployment(
        name=NAME,
        num_replicas=count,
        max_ongoing_requests=settings.http.limits.connections_max,
        graceful_shutdown_timeout_s=settings.http.server.drain_s,
        ray_actor_options={"num_cpus": 1},
    )
    return deployment(serve.ingress(build)(Checked)).bind()


class Checked:
    """What Ray Serve asks of a replica beside the application."""

    def check_health(self) -> None:
        """Raises where the router has lost its cluster: Ray Serve starts another replica."""
        check_router()


def replicas_of(args: Mapping[str, Any]) -> int:
    """How many replicas are asked for. Raises :class:`UserError` for none."""
    text = str(args.get("replicas", 1))
    if not text.isdecimal() or not 1 <= int(text) <= REPLICAS_MAX:
        hint = f"a number up to {REPLICAS_MAX}, for example replicas=2"
        raise UserError(f"cannot read replicas={text[:100]}", hint=hint, param="replicas")
    return int(text)


def words_of(args: Mapping[str, Any]) -> tuple[str, ...]:
    """The command line of ``memserve serve`` for options by name: ``{"kv_memory": "4GiB", "no_cache": True}``. Raises
    :class:`UserError`."""
    words: list[str] = ["--on", "ray"]
    for name, value in args.items():
        plain = name.replace("-", "_")
        if plain in _OWN:
            hint = "leave it out: Ray Serve decides that, or it means no cluster of memserve"
            raise UserError(f"{name} cannot be set here", hint=hint, param=name)
        flag = "--" + plain.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
            continue
        for item in value if isinstance(value, Sequence) and not isinstance(value, str) else [value]:
            words += [flag, str(item)]
    return tuple(words)


def read_options(words: Sequence[str]) -> tuple[ServeArguments, ClusterOptions]:
    """What ``memserve serve`` with these ``words`` would run. Raises :class:`UserError` for wrong ones."""
    readings: list[ServeArguments] = []
    token = READS.set(readings.append)
    try:
        command_line("serve")(["serve", *words], standalone_mode=False)
    except UserError:
        raise
    except Exception as error:  # of the library that typer bundles, under no public name
        message = getattr(error, "message", None) or str(error)
        raise UserError(message, hint="memserve serve --help lists all options") from None
    finally:
        READS.reset(token)
    cluster = readings[0].cluster
    if cluster is None:
        raise InvariantError("one engine alone was asked for, and refused")
    return readings[0], cluster


def open_app(words: Sequence[str], *, is_shared: bool = False) -> ASGIApp:
    """Start the cluster from this replica, and wait until it is ready. It ends with the application's lifespan.
    ``is_shared``: it is that of all replicas, and ends with the last one.

    Raises :class:`UserError` when Ray has no room for it.
    """
    with ThreadPoolExecutor(1) as apart:  # a replica's own thread has a running loop, in which nothing may wait
        return apart.submit(_open_cluster_app, words, is_shared).result()


def _open_cluster_app(words: Sequence[str], is_shared: bool) -> ASGIApp:
    stack = ExitStack()
    try:
        settings, options = read_options(words)
        if not options.placement.cluster:
            options = dataclasses.replace(options, placement=_named(options.placement, words if is_shared else ()))
        if is_shared:
            served = stack.enter_context(run_replica(words, settings, options))
        else:
            served = stack.enter_context(_run_cluster(settings, options))
    except BaseException:
        stack.close()
        raise
    return Ending(served, stack.close)


def _named(placement: PlacementOptions, words: Sequence[str]) -> PlacementOptions:
    """The cluster has the application's name, so that several applications have clusters of their own; with a digest of
    ``words``, where replicas of an older configuration may live beside those of a new one."""
    from ray import serve

    parts = [re.sub(r"[^A-Za-z0-9._-]", "-", serve.get_replica_context().app_name)[:40]]
    parts += [sha256("\0".join(words).encode()).hexdigest()[:8]] if words else []
    return dataclasses.replace(placement, cluster="-".join(parts))


class Ending:
    """An application, and what is to be closed behind its lifespan."""

    def __init__(self, served: ASGIApp, close: Callable[[], None]) -> None:
        self._served, self._close = served, close

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """As ASGI has it."""
        await self._served(scope, receive, send)
        if scope["type"] == "lifespan":
            self._close()


@contextmanager
def _run_cluster(settings: ServeArguments, options: ClusterOptions) -> Iterator[ASGIApp]:
    import ray

    from memserve.host.ray import new_controller

    http = settings.http
    node, secret = (
        ray.util.get_node_ip_address(),
        as_followed(options.secret or secrets.token_urlsafe(32)).initial_value,
    )
    port = options.port or free_port()
    plan = members_plan(settings.engine, http, options, secret, with_port(node, port))
    controller = new_controller(plan, _NAME_S)
    router = dataclasses.replace(
        options, prefill=0, decode=0, colocated=0, host=node, port=port, secret=secret,
        store=options.store if options.store.at is not None else StoreOptions(),
        placement=PlacementOptions(scaling=options.placement.scaling),
    )  # fmt: skip

    def scale(counts: Mapping[Role, int]) -> object:
        with plain_errors(ray):
            return ray.get(controller.scale.remote({role.value: count for role, count in counts.items()}))

    try:
        with plain_errors(ray):
            ray.get(controller.start.remote())
        with running_cluster(settings.engine, router, http.server.log_level, log.info, scale) as running:
            ray.get(controller.wait_members.remote())
            adapters = read_adapters(settings.engine.lora)
            yield app_of(running.engine, running.model, settings.engine.model, adapters, http)[0]
    finally:
        ray.get(controller.stop.remote())
        ray.kill(controller)
