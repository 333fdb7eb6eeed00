"""``memserve router``: a router beside the owner, which ``memserve serve`` runs; on this host or another."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memserve.api.http.config import ApiConfig, EdgeConfig, ServerConfig
from memserve.base.config import ClusterConfig, EngineOptions, MemberConfig
from memserve.base.deployment import StoreOptions
from memserve.base.errors import UserError
from memserve.base.types import Role
from memserve.cli import credentials
from memserve.cli import flags as opt
from memserve.cli.cluster.fleet import WITHOUT_MODEL, run_further_router
from memserve.cli.cluster.http import Served, serve_until_signal
from memserve.cli.cluster.instance import SECRET_HINT, child_of_serve, listen_host, own_host_to
from memserve.cli.cluster.models import Models, NamedModel, read_models, slug_of
from memserve.cli.cluster.several import FollowedModel, refuse_only_sleepers, serve_followed
from memserve.cli.cluster.topology import follow_context, model_of, with_models
from memserve.cli.output import print_lines
from memserve.fleet.messages import FleetOptions
from memserve.model.loading.lora import read_adapters
from memserve.system.process import EndRequested, signals_raise
from memserve.system.secrets import GivenKeys, follow_secret
from memserve.transport.member_place import MemberPlace
from memserve.transport.network_devices import join_addresses, with_port

if TYPE_CHECKING:
    from memserve.api.model_table import OwnersModels
    from memserve.host.router import RouterEngine
    from memserve.model.loading.card import RemoteModel

log = logging.getLogger(__name__)

Join = Annotated[
    str,
    typer.Option(
        help="HOST:PORT of the owner, as opened by `memserve serve --cluster-port`. With standby routers: all of"
        " them, separated by commas."
    ),
]
OwnerUrl = Annotated[
    str,
    typer.Option(
        help="Where the owner answers, http://HOST:PORT: it is asked for documents, sessions, and what else it keeps."
    ),
]
Name = Annotated[str | None, typer.Option(help="Name of the router, unique in the cluster. Default: host and process.")]
Advertise = Annotated[
    str | None, typer.Option(help="Host by which instances reach it. Default: that on the way to the owner.")
]

JOIN_TIMEOUT_S = 60.0
"""How long the owner may take to answer; the children of a ``memserve serve`` wait for their instances as well."""
_LOOK_S = 0.1
_TOLD_EVERY_S = 2.0
"""Until it is said again what it waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerOptions(MemberPlace):
    """A router's place in a cluster."""

    role: Role = Role.ROUTER
    config: ClusterConfig
    owner_url: str = ""
    """Where clients find the owner; empty: not known."""
    http_at: str = ""
    """Where clients find it, ``http://host:port``; empty: where they find the owner."""


@opt.grouped
def router(
    *,
    join: Join,
    server: Annotated[ServerConfig, opt.Without("endpoint_picker")],
    owner_url: OwnerUrl = "",
    name: Name = None,
    advertise: Advertise = None,
    cluster_secret_file: credentials.ClusterSecretFile = None,
    model: Models = None,
    engine: Annotated[EngineOptions, opt.Only("lora")],
    api: ApiConfig,
    keys: credentials.KeyOptions,
    edge: EdgeConfig,
    cluster: ClusterConfig,
    fleet: FleetOptions,
    engines_file: Annotated[
        Path | None, typer.Option(hidden=True, help="Which servers of other projects there are, as the owner says.")
    ] = None,
    supervised: Annotated[bool, typer.Option(hidden=True, help="Run as a child of `memserve serve`.")] = False,
) -> None:
    """Serve the API of a cluster beside its `memserve serve`: this router places requests by itself.

    Give it the options of that command which requests depend on: model, --lora, --policy, --caching, --admission,
    --sequence-parallel, --engine, keys.
    """
    cluster.admission.refuse_idle()
    models = read_models(model or [], engine, (None, None, None), StoreOptions())
    has_engines = fleet.are_given or engines_file is not None
    beside = opt.EnginesBeside(fleet, cluster, engines_file, name or "", owner_url) if has_engines else None
    http = partial(opt.HttpOptions, server, tls=keys.read_tls(), limits=edge, api=api, beside=beside)
    if supervised:
        _run_supervised(models, join, name or "", cluster, http, server.log_level, owner_url)
        return
    opt.set_up_logging(server.log_level)
    opt.check_name(name or "")
    if cluster_secret_file is None:
        raise UserError("a router needs the cluster's secret: --cluster-secret-file", hint=SECRET_HINT)
    own_host = advertise or own_host_to(join)
    place = FollowerOptions(
        name=name or f"router-{socket.gethostname()}-{os.getpid()}",
        join=join_addresses(join),
        secret=follow_secret(cluster_secret_file),
        config=cluster,
        host=listen_host(own_host),
        owner_url=owner_url.rstrip("/"),
        advertise=own_host,
        http_at=_http_address(own_host, server, is_tls=keys.read_tls() is not None),
    )
    run_follower(models, place, http(*keys.read_keys()), print_lines)


def _http_address(own_host: str, server: ServerConfig, *, is_tls: bool) -> str:
    """Where clients of other hosts find the API; empty: at a port that is not known yet."""
    host = own_host if server.host in ("0.0.0.0", "::") else server.host
    return f"http{'s' if is_tls else ''}://{with_port(host, server.port)}" if server.port else ""


def _run_supervised(
    models: Sequence[NamedModel],
    join: str,
    name: str,
    cluster: ClusterConfig,
    http: Callable[..., opt.HttpOptions],
    log_level: str,
    owner_url: str,
) -> None:
    """Run as a child of ``memserve serve``: secret and keys come through stdin, a final error goes to stdout."""
    with child_of_serve(join, name, log_level) as child:
        place = FollowerOptions(
            name=name, join=(join,), secret=child.secret, config=cluster, host=child.host, owner_url=owner_url,
            outlive=child.outlive,
        )  # fmt: skip
        keys = (GivenKeys.from_payload(child.startup_payload[name]) for name in ("api_keys", "metrics_keys"))
        served = http(*keys)
        if WITHOUT_MODEL in child.startup_payload and served.beside is not None:
            run_further_router(served, served.beside)
        else:
            run_follower(models, place, served, lambda line: None)


def run_follower(
    models: Sequence[NamedModel], place: FollowerOptions, http: opt.HttpOptions, print_line: Callable[[str], None]
) -> None:
    """Join, serve, leave. Raises :class:`UserError` when the owner does not answer, or refuses this router."""
    started = time.perf_counter()
    from memserve.api.http.server import bind
    from memserve.system.memory import keep_heap_small

    keep_heap_small()
    awake_models = [model for model in models if model.sleep_after_s is None]
    refuse_only_sleepers(models)
    adapters = [read_adapters(model.engine.lora) for model in awake_models]
    refused: list[str] = []
    try:
        with signals_raise(), ExitStack() as stack:
            followed = []
            for number, (model, loras) in enumerate(zip(awake_models, adapters, strict=True)):
                suffix = f"-{slug_of(model.name)}" if number else ""  # members have one name for one router
                own_place = replace(place, name=place.name + suffix, model=model.name)
                router = stack.enter_context(running_router(model.engine, own_place, print_line))
                stack.callback(partial(_note_refusal, router, refused))
                router.on_left = _end_when_refused
                _end_when_refused(router.refused)
                followed.append(FollowedModel(model, router, card_of(router, model.engine, place.config), loras))
            port = http.server.port
            with bind(http.server.host, port, is_shared=port != 0) as listener:
                if models[0].name:
                    serve_followed(followed, _owners_models(models, http.server), listener, http, started)
                else:
                    served = Served(followed[0].engine, followed[0].card)
                    serve_until_signal(served, models[0].engine.model, adapters[0], [listener], http, started)
    except EndRequested:
        pass
    for why in refused:
        _check_accepted(why)


def _owners_models(models: Sequence[NamedModel], server: ServerConfig) -> OwnersModels | None:
    """What of ``models``, and of those that come later, the owner answers for alone. None: nothing."""
    from memserve.api.model_table import OwnersModels

    names = tuple(model.name for model in models if model.sleep_after_s is not None)
    if not names and server.admin_key_file is None:
        return None
    return OwnersModels(names, has_default=models[0].name in names)


def _note_refusal(router: RouterEngine, refused: list[str]) -> None:
    refused.append(router.refused)


def card_of(router: RouterEngine, engine: EngineOptions, config: ClusterConfig) -> RemoteModel:
    """What clients are told of the model that the members of ``router`` serve; it follows those that join later."""
    from memserve.model.loading.sources import resolve_source

    infos = list(with_models(router.members()).values())
    folder = resolve_source(engine.model, "float32", keep_file=engine.may_keep_file)
    model = model_of(infos, folder, config.sequence_instances_max)
    follow_context(router, model, config.sequence_instances_max)
    return model


def _end_when_refused(refused: str) -> None:
    """A router without a cluster answers nothing: streams that it has may finish, and what started it is told."""
    if refused:
        log.error("the owner refuses this router: %s", refused)
        os.kill(os.getpid(), signal.SIGTERM)


def _check_accepted(refused: str) -> None:
    if refused:
        raise UserError(f"the owner refuses this router: {refused}", param="join")


@contextmanager
def running_router(
    engine: EngineOptions, place: FollowerOptions, print_line: Callable[[str], None]
) -> Iterator[RouterEngine]:
    """A router that the owner has accepted and that hears an instance, as long as the block runs. Raises
    :class:`UserError` when the owner does not answer, or refuses it."""
    from memserve.host.router import RouterEngine
    from memserve.model.loading.card import import_tokenizers
    from memserve.protocol.peers import Peer, PeerInfo
    from memserve.router.follower import NO_KV, Follower
    from memserve.system.memory import objects_that_stay
    from memserve.system.process import new_generation
    from memserve.transport.mailbox import ZmqMailbox

    self_peer = Peer(place.name, new_generation())
    info = PeerInfo(self_peer, Role.ROUTER, "", "", NO_KV, 0, 0, 0, False, pid=os.getpid(), model=place.model,
                    http_at=place.http_at)  # fmt: skip
    machine = Follower(info, place.join, place.config, MemberConfig(), identity_key=place.identity_key)
    gives_way = place.outlive is None
    router = RouterEngine(machine, lambda on_message: ZmqMailbox(self_peer, place, on_message, gives_way=gives_way))
    router.owner_url = place.owner_url
    place.end_when_orphaned(lambda: machine.member.router)
    try:
        with objects_that_stay():
            import_tokenizers()
            import memserve.api.app  # noqa: F401  # imported while the owner answers: later, clients would wait

        _wait_until_ready(router, place, print_line)
        yield router
    finally:
        router.close()


def _wait_until_ready(router: RouterEngine, place: FollowerOptions, print_line: Callable[[str], None]) -> None:
    """Wait until the owner has accepted this router, and an instance speaks to it."""
    from memserve.transport.probe import no_router_error, probe_all, waiting_lines

    started, reported_s = time.monotonic(), 0.0
    addresses = ", ".join(place.join).replace("tcp://", "")
    while not (router.stats().serving and with_models(router.members())):  # engines do not say what the model is
        _check_accepted(router.refused)
        seconds = time.monotonic() - started
        if seconds > JOIN_TIMEOUT_S and not router.is_member and place.outlive is None:
            raise no_router_error(probe_all(place.join, place.secret), "the owner")
        if seconds > reported_s + _TOLD_EVERY_S:
            if router.is_member or place.outlive is not None:  # a child of `serve` has the right address and secret
                print_line(f"waiting for {'instances of ' if router.is_member else ''}the owner at {addresses}")
            else:
                for line in waiting_lines(probe_all(place.join, place.secret), "the owner"):
                    print_line(line)
            reported_s = time.monotonic() - started
        time.sleep(_LOOK_S)
